"""Compute what compiling costs before the first iteration, on a machine whose compilation cache is empty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oarjax.config.learning import RolloutConfig
from oarjax.rollout.row_schedule import DecodePlan
from oarjax.run.compile_ahead import MOST_THREADS, compiled_at_once
from oarjax.step.minibatches import completion_buckets
from oarjax.tools.plan.topology import Slice

CORES = {"v4": 240, "v5e": 112, "v5p": 208, "v6e": 180, "v7x": 224}
"""vCPUs of a host of four chips, from the vendor's pages; a host of one v5e or v6e has 24 or 44, of eight v5e 224."""


def cores_of(where: Slice) -> int:
    """Return the vCPUs of one of a slice's hosts."""
    if where.chips == 1:
        return {"v5e": 24, "v6e": 44}.get(where.family, CORES[where.family])
    return CORES[where.family] * (2 if (where.family, where.chips) == ("v5e", 8) else 1)


def starting_of(
    rollout: RolloutConfig,
    rows: DecodePlan,
    where: Slice,
    phases: Sequence[Mapping[str, Any]],
    *,
    evaluated: DecodePlan | None,
) -> dict[str, float] | None:
    """Count the programs of a run and the seconds of compiling them; None where a phase was not compiled.

    The first iteration needs every window of all rows, and the longest update, and so does the evaluation before it
    (``evaluated``, None without one); the rest are fewer rows and shorter completions. Programs of a kind are taken to
    cost as much as those that were compiled, and each of sampling their mean where a plan knows their sum alone. Every
    host compiles all of them.
    """
    step_phases = {p["name"]: p for p in phases if p["method"] is None}
    sampling = step_phases["sample"]["programs"] if "sample" in step_phases else []
    mean = step_phases["sample"]["compile_cpu_seconds"] / len(sampling) if sampling else 0.0
    costs = [(program["name"].startswith("decode"), program.get("cpu_seconds", mean)) for program in sampling]
    decode = [seconds for decodes, seconds in costs if decodes]
    if not {"reshard", "apply"} <= step_phases.keys() or len(step_phases) < 4 or not decode:
        return None
    decode_mean, other_seconds = sum(decode) / len(decode), sum(seconds for _, seconds in costs) - sum(decode)
    lengths = len(completion_buckets(rollout.completion_bucket, rollout.max_new))
    learning = {
        name: step_phases[name]["compile_cpu_seconds"] for name in ("score", "update", "fused") if name in step_phases
    }
    fixed_seconds = step_phases["reshard"]["compile_cpu_seconds"] + step_phases["apply"]["compile_cpu_seconds"]
    samplers = [rows] if evaluated is None else [rows, evaluated]
    windows, sizes = sum(len(plan.cache_sizes()) for plan in samplers), sum(len(plan.sizes()) for plan in samplers)
    first_cpu = fixed_seconds + len(samplers) * other_seconds + windows * decode_mean + sum(learning.values())
    all_cpu = fixed_seconds + len(samplers) * other_seconds + sizes * decode_mean + lengths * sum(learning.values())
    programs = 2 + len(samplers) * (len(sampling) - len(decode)) + sizes + lengths * len(learning)
    threads, longest = compiled_at_once(cores_of(where)), max(*learning.values(), decode_mean)
    return {
        "programs": float(programs),
        "first_cpu_seconds": first_cpu,
        "first_seconds": max(first_cpu / threads, longest),
        "cpu_seconds": all_cpu,
        "seconds": max(all_cpu / threads, math.ceil(lengths * len(learning) / threads) * longest),
    }


def describe_starting(costs: Mapping[str, float]) -> str:
    """Say in one line what a run compiles with an empty cache, and how long its hosts take at least."""
    return (
        f"With an empty cache a run compiles {costs['programs']:.0f} programs in {costs['cpu_seconds']:,.0f} CPU "
        f"seconds, at least {costs['seconds']:,.0f} s on every host; its first iteration and the evaluation before it "
        f"wait for {costs['first_cpu_seconds']:,.0f} of them, at least {costs['first_seconds']:,.0f} s."
    )


def starting_table(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate what compiling costs; configs of which a phase was not compiled are left out."""
    lines = [
        "Compiling with an empty cache, by the CPU seconds of the machine that compiled these plans, with as many "
        f"programs at once as a quarter of a host's cores and at most {MOST_THREADS}. What the first iteration and the "
        "evaluation before it wait for is compiled first, the rest while they run. With a cache none of it is needed. "
        "Where a plan has the sum of sampling's programs alone, each counts as their mean.",
        "",
        "| config | programs | CPU seconds for the first iteration | seconds on every host, at least | CPU seconds for "
        "all | seconds on every host, at least |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for plan in plans:
        if costs := plan.get("starting"):
            times = [f"{costs[part]:,.0f}" for part in ("first_cpu_seconds", "first_seconds", "cpu_seconds", "seconds")]
            lines.append("| " + " | ".join([plan["config"], f"{costs['programs']:.0f}", *times]) + " |")
    return lines
