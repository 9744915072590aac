"""Tabulate where the time of scores and update goes, by the cycles that the TPU's compiler states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from oarjax.tools.plan.hlo import PRODUCTS
from oarjax.tools.plan.roofline import Reached

KEPT, SHOWN = 12, 6
"""Operations that a plan keeps of a phase, and that the table has a column for."""

OTHERS = "other passes"


def largest_operations(operations: Mapping[str, float], kept: int = KEPT) -> dict[str, float]:
    """Return the cycles of the operations that take most, and of all others together."""
    most = {name: float(operations[name]) for name in sorted(operations, key=lambda name: -operations[name])[:kept]}
    return most | {OTHERS: float(sum(operations.values())) - sum(most.values())}


def cycles_table(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate the seconds of scores and update by operation, of plans that keep their cycles; [] without any.

    Columns are the operations of the largest share in any of these plans, matrix products first.
    """
    parts = {plan["config"]: seconds for plan in plans if (seconds := _seconds_of(plan))}
    if not parts:
        return []
    shares: Counter[str] = Counter()
    for seconds in parts.values():
        for name, value in seconds["operations"].items():
            shares[name] = max(shares[name], value / seconds["together"])  # type: ignore[assignment]
    del shares[OTHERS]
    shares[PRODUCTS] = 2
    shown = [name for name, _ in shares.most_common(1 + SHOWN)]
    names = [PRODUCTS, *(f"`{name}`" for name in shown[1:]), OTHERS, "gathers", "kernels", "links", "together", "MFU"]
    lines = [
        "Seconds per run of scores and update on a chip, every row at `max_new`. The first two columns are FLOPs at "
        "the peak: those that the model asks for, and those executed in matrix products. Then cycles as the compiler "
        "states them, at the chip's clock: matrix products with what is fused into them, and passes by the name of "
        f"their last operation; gathers and scatters of rows, of which it states none, by their bytes at "
        f"{Reached().memory:.0%} of HBM's rate; kernels at {Reached().kernels:.0%} of the peak; links with nothing "
        "overlapped.",
        "",
        "| config | model | executed | " + " | ".join(names) + " |",
        "|---|" + "---:|" * (2 + len(names)),
    ]
    for config, seconds in parts.items():
        operations = seconds["operations"]
        other = sum(value for name, value in operations.items() if name not in shown)
        cells = [seconds["model"], seconds["executed"], *(operations.get(name, 0.0) for name in shown), other]
        rest = seconds["together"] - sum(operations.values()) - seconds["kernels"] - seconds["links"]
        cells += [max(rest, 0.0), seconds["kernels"], seconds["links"], seconds["together"]]
        share = seconds["model"] / seconds["together"]
        lines.append(
            f"| {config.removeprefix('configs/')} | " + " | ".join(f"{c:.1f}" for c in cells) + f" | {share:.0%} |"
        )
    return lines


def _seconds_of(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the seconds of a plan's scores and update by part; None if it does not keep their cycles."""
    phases = [p for p in plan["phases"] if p["method"] is None and p["name"] in ("score", "update", "fused")]
    if not phases or any("operations" not in p for p in phases):
        return None
    chip, operations = plan["chip"], Counter[str]()
    for phase in phases:
        operations.update(phase["operations"])

    def total(field: str) -> float:
        return sum(phase[field] for phase in phases)

    return {
        "model": total("model") / plan["chips"] / chip["flops"],
        "executed": (total("executed") - total("kernels")) / chip["flops"],
        "operations": {name: cycles / chip["clock"] for name, cycles in operations.items()},
        "kernels": total("kernels") / (chip["flops"] * Reached().kernels),
        "links": total("links_expected"),
        "together": total("seconds_compiler"),
    }
