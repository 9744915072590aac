"""``oarjax bench --project``: compute, without measuring, how much credit would add to a step of a 7B policy."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from oarjax.costs import update_flops
from oarjax.tools.plan.credit_costs import (
    ONE_PASS,
    PROJECTED,
    QWEN_7B,
    VALUES,
    Assumptions,
    credit_flops,
    decode_seconds,
    projection,
    rollout_share_for,
)

KEPT = f"{ONE_PASS}, nothing computed again"
"""The pass with products kept for the backward (remat dots or none), over a GRPO step that keeps them too."""

GOALS = {"OAR-G, 1 draw": 1.1, ONE_PASS: 1.5, KEPT: 1.5, "OAR-P": 2.0}
GOALS |= dict.fromkeys(VALUES, 1.5)
PAPER = {"OAR-G, 1 draw": 1.4, ONE_PASS: 1.4, KEPT: 1.4, "OAR-P": 4.2}
"""Time of a step over GRPO's, as arXiv 2601.07408 reports it."""


def document() -> dict[str, Any]:
    """Return every number and every assumption."""
    d, assumed = QWEN_7B, Assumptions()
    flops_of_update = update_flops(d, assumed.row, recomputed=assumed.recomputed)
    stored = replace(assumed, recomputed=0.0)
    flops = {}
    for name, count in credit_flops(d, assumed).items():
        flops |= {name: count, KEPT: credit_flops(d, stored)[ONE_PASS]} if name == ONE_PASS else {name: count}
    return {
        "policy": "Qwen2.5-7B",
        "decoder": asdict(d),
        "assumed": asdict(assumed),
        "update_flops": flops_of_update,
        "chips": [
            asdict(chip)
            | {
                "decode_seconds": decode_seconds(d, chip, assumed),
                "update_seconds": flops_of_update / (chip.flops * assumed.mfu),
                "of_grpo": projection(d, chip, assumed) | {KEPT: projection(d, chip, stored)[ONE_PASS]},
            }
            for chip in PROJECTED
        ],
        "methods": {
            name: {
                "flops": f,
                "goal": GOALS.get(name),
                "paper": PAPER.get(name),
                "rollout_share_at_goal": rollout_share_for(GOALS[name], d, stored if name == KEPT else assumed, flops=f)
                if name in GOALS
                else None,
            }
            for name, f in flops.items()
        },
    }


def table(result: dict[str, Any]) -> Table:
    """Tabulate methods by chips, with the goal and the paper's figure."""
    assumed = result["assumed"]
    out = Table(
        title=f"{result['policy']}, {assumed['prompt']}+{assumed['completion']} tokens, groups of {assumed['group']}: "
        "step over GRPO's, computed",
        title_justify="left",
        caption=f"{assumed['replica_rows']} completions at once on {assumed['replica_chips']} chips, "
        f"MFU {assumed['mfu']}, {assumed['bandwidth_share']} of the bandwidth, remat full. All rows scored.",
        caption_justify="left",
    )
    out.add_column("method", no_wrap=True)
    for heading in ("PFLOP/row", *(c["name"] for c in result["chips"]), "goal", "paper"):
        out.add_column(heading, justify="right")
    for name, m in result["methods"].items():
        ratios = [f"{c['of_grpo'][name]:.2f}" for c in result["chips"]]
        figures = [f"{m[key]}" if m[key] else "" for key in ("goal", "paper")]
        out.add_row(name, f"{m['flops'] / 1e15:.3f}", *ratios, *figures)
    return out
