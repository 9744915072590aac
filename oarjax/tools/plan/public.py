"""Set plans beside what others measured on the same chips, and beside an earlier version's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TRAINING = {
    "TPU v5e": "61% and 67% (MaxText, 16B and 32B)",
    "TPU v5p": "71% (MaxText, 32B)",
    "TPU v6e": "46% (MaxText, Llama 3.1 8B)",
}
"""Model-FLOPs utilisation of pretraining, from the projects' own pages; without credit, sampling or adapters."""

DECODING = {"TPU v6e": "38 to 47% (sglang-jax), 53 to 59% (vLLM-TPU)"}
"""Share of HBM's rate that weights and filled cache take while tokens are served."""


def public_table(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate shares of the peaks at expected seconds, beside the best public figures for the chip."""
    lines = [
        "Shares of a chip's peaks at the expected seconds: of matrix products in scores and update, of HBM in sampling "
        "(weights and the cache in the sampler's window). Public figures are measurements of other programs on the "
        "same chips, as their projects state them; nothing of ours is measured.",
        "",
        "| config | chip | scores and update, MFU | public, pretraining | sampling, tokens/s per chip | share of HBM | "
        "public, serving |",
        "|---|---|---:|---|---:|---:|---|",
    ]
    for plan in plans:
        phases = {p["name"]: p for p in plan["phases"] if p["method"] is None and "seconds_compiler" in p}
        learning = [phases[name] for name in ("score", "update", "fused") if name in phases]
        sample = phases.get("sample")
        seconds = sum(p["seconds_expected"] for p in learning)
        rate = plan["chips"] * plan["chip"]["flops"] * seconds
        if not learning:  # of an older plan
            continue
        cells = [plan["config"].removeprefix("configs/"), plan["chip"]["name"]]
        cells += [
            f"{sum(p['model'] for p in learning) / rate:.0%}" if rate else "",
            TRAINING.get(plan["chip"]["name"], ""),
        ]
        if sample is None:
            cells += ["", ""]
        else:
            speed = _tokens_per_chip(plan, sample)
            share = sample["read"] / (plan["chip"]["bandwidth"] * sample["seconds_expected"])
            cells += [f"{speed:,.0f}", f"{share:.0%}"]
        lines.append("| " + " | ".join([*cells, DECODING.get(plan["chip"]["name"], "")]) + " |")
    return lines


def served_line(served: Mapping[str, Any]) -> str:
    """Set the sampler's plan for the requests of a serving benchmark beside what an engine was measured at."""
    sample = served["phase"]
    rate = _tokens_per_chip(served, sample)
    return (
        "The same requests in a plan and in a measurement: Qwen3-8B in bfloat16 on a v6e-4, 256 requests of 1,024 + "
        "1,024 tokens at once, prefill included. sglang-jax measured 7,571.84 tokens/s, 1,893 per chip (its "
        "[benchmark](https://github.com/sgl-project/sglang-jax/blob/main/docs/performance/qwen3_benchmark.md) of 12 "
        f"September 2025); this sampler's plan expects {rate:,.0f} per chip, at "
        f"{sample['hbm_expected']:.0%} of HBM's rate."
    )


def _tokens_per_chip(plan: Mapping[str, Any], sample: Mapping[str, Any]) -> float:
    """Return the tokens that a chip samples in an expected second."""
    sizes = plan["shapes"]
    return sizes["rows"] * sizes["completion"] / sample["seconds_expected"] / plan["chips"]


def before_table(plans: Sequence[Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tabulate sampling, and scores and update, beside the plans of an earlier version by the same assumptions.

    ``before`` has, per config, the counts and assumed seconds of its phases, and what today's counting makes of the
    compiler's cycles where an earlier program was compiled anew.
    """
    lines = [
        "| config | sampling, s | share of HBM's rate | scores and update, s | MFU | share of HBM's rate "
        "| scores and update by cycles, s | MFU by cycles |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for plan in plans:
        now = {p["name"]: {**p, "seconds": p["seconds_assumed"]} for p in plan["phases"] if p["method"] is None}
        old = {n: {**p, "seconds": p["seconds_expected"]} for n, p in before.get(plan["config"], {}).items()}
        cells = zip(*(_shares(phases, plan) for phases in (old, now)))
        name = plan["config"].removeprefix("configs/")
        lines.append(f"| {name} | " + " | ".join(" to ".join(filter(None, cell)) for cell in cells) + " |")
    return lines


def _shares(phases: Mapping[str, Mapping[str, Any]], plan: Mapping[str, Any]) -> list[str]:
    """Return seconds and shares of the peaks: bytes that sampling must read, and all that scores and update move.

    The last two are the seconds and MFU of scores and update by the compiler's cycles, empty where they are not known.
    """
    learning = [phases[name] for name in ("score", "update", "fused") if name in phases]
    if not learning:
        return [""] * 7
    chip, seconds, sample = plan["chip"], sum(p["seconds"] for p in learning), phases["sample"]
    at_peak = sum(p["model"] for p in learning) / (plan["chips"] * chip["flops"])
    cycles = sum(p.get("seconds_compiler", math.nan) for p in learning)
    by_cycles = [f"{cycles:.1f}", f"{at_peak / cycles:.0%}"] if math.isfinite(cycles) else [""] * 2
    moved = sum(p["moved"] + p["passed"] for p in learning) / (chip["bandwidth"] * seconds)
    read = sample["read"] / (chip["bandwidth"] * sample["seconds"])
    return [
        f"{sample['seconds']:.1f}",
        f"{read:.0%}",
        f"{seconds:.1f}",
        f"{at_peak / seconds:.0%}",
        f"{moved:.0%}",
        *by_cycles,
    ]
