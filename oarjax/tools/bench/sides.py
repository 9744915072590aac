"""Compare several ways to do the same work, timed in turn on the same draws, in records and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from oarjax.tools.bench.measure import Peak, spread


def compare(
    name: str,
    seconds: Mapping[str, Sequence[float]],
    *,
    flops: Sequence[float],
    peak: Peak,
    occupancy: Mapping[str, Sequence[float]],
    padding: Mapping[str, Sequence[float]],
) -> list[dict[str, Any]]:
    """Return one record per side, with ratios to the first side, draw by draw.

    Args:
        seconds: side -> seconds of every draw.
        flops: model FLOPs of every draw, the same for all sides.
        occupancy: side -> share of the computed rows that were in use.
        padding: side -> share of the computed positions without a token.
    """
    first = next(iter(seconds.values()))
    return [
        {
            "name": name,
            "side": side,
            "seconds": spread(list(values)),
            "times_first": spread([a / b for a, b in zip(values, first, strict=True)]),
            "share_of_peak": spread([peak.share(work, t) for work, t in zip(flops, values, strict=True)]),
            "occupancy": spread(list(occupancy[side])),
            "padding": spread(list(padding[side])),
        }
        for side, values in seconds.items()
    ]


def table(result: Mapping[str, Any]) -> Table:
    """Tabulate medians with minimum and maximum; ratios are to the first side of the same work, draw by draw."""
    out = Table(title=f"{result['workload']} {result['name']}, {result['what']}", title_justify="left")
    if "compile_seconds" in result:
        out.caption = f"{result['compilations']} programs, compiled in {result['compile_seconds']:.0f} s beside"
    for heading in ("work", "side", "s", "times first", "of peak", "occupied", "padding"):
        out.add_column(heading, justify="left" if heading in ("work", "side") else "right", no_wrap=True)

    def cell(v: Mapping[str, Any] | None, digits: str) -> str:
        return "-" if v is None else f"{v['median']:{digits}}\n[dim]{v['min']:{digits}}-{v['max']:{digits}}[/dim]"

    before = ""
    for row in result["rows"]:
        ratio = "" if row["name"] != before else cell(row["times_first"], ".2f")
        shares = [cell(row["share_of_peak"], ".1%"), cell(row["occupancy"], ".2f"), cell(row["padding"], ".2f")]
        out.add_row(
            "" if row["name"] == before else row["name"], row["side"], cell(row["seconds"], ".2f"), ratio, *shares
        )
        before = row["name"]
    return out
