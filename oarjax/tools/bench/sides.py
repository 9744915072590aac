"""Compare several ways to do the same work on rows that differ in length, in turn on the same draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from rich.table import Table

from oarjax.tools.bench.measure import Compilations, Peak, spread


class TimedDraw(NamedTuple):
    """One side's run of the work on one draw."""

    seconds: float
    lengths: Int[np.ndarray, "B"]  # of the completions
    flops: float  # of the model, the same for all sides
    occupancy: float  # share of the computed rows that were in use
    padding: float | None  # share of the computed positions without a token, where it is known


Draw = Callable[[int], Mapping[str, Mapping[str, TimedDraw]]]
"""Number of a draw, from 1 -> work -> side -> its run, warm."""


def share_in_use(lengths: Int[np.ndarray, "B"]) -> float:
    """Return the share of decoded rows that were unfinished where all run as long as the longest."""
    return float((lengths - 1).sum() / (len(lengths) * max(int(lengths.max()) - 1, 1)))


def compare(
    draw: Draw, workload: str, name: str, shape: str, *, repeats: int, compiled: Compilations, peak: Peak
) -> dict[str, Any]:
    """Time every side in turn on ``repeats`` draws; ratios are to the first side of the same work, draw by draw."""
    start_count = compiled.count
    draws = [draw(number) for number in range(1, repeats + 1)]
    rows, lengths = [], []
    for work, sides in draws[0].items():
        first = [next(iter(timed[work].values())) for timed in draws]
        lengths += [float(run.lengths.mean()) for run in first]
        for side in sides:
            runs = [timed[work][side] for timed in draws]
            padding = [run.padding for run in runs if run.padding is not None]
            rows.append(
                {
                    "name": work,
                    "side": side,
                    "seconds": spread([run.seconds for run in runs]),
                    "tokens_per_second": spread([int(run.lengths.sum()) / run.seconds for run in runs]),
                    "times_first": spread([run.seconds / its.seconds for run, its in zip(runs, first)]),
                    "share_of_peak": spread([peak.share(run.flops, run.seconds) for run in runs]),
                    "occupancy": spread([run.occupancy for run in runs]),
                    "padding": spread(padding) if padding else None,
                }
            )
    return {
        "workload": workload,
        "name": name,
        "what": f"{shape}, {np.mean(lengths):.0f} on average",
        "mean_length": spread(lengths),
        "compilations": compiled.count - start_count,
        "rows": rows,
    }


def table(result: Mapping[str, Any]) -> Table:
    """Tabulate medians with minimum and maximum: of a rollout its tokens per second, of other work its seconds."""
    out = Table(title=f"{result['workload']} {result['name']}, {result['what']}", title_justify="left")
    if "compile_seconds" in result:
        out.caption = f"{result['compilations']} programs, compiled in {result['compile_seconds']:.0f} s beside"
    speed, digits = ("tokens_per_second", ",.0f") if result["workload"] == "W8" else ("seconds", ".2f")
    unit = "tokens/s" if result["workload"] == "W8" else "s"
    for heading in ("work", "side", unit, "times first", "of peak", "occupied", "padding"):
        out.add_column(heading, justify="left" if heading in ("work", "side") else "right", no_wrap=True)

    def cell(v: Mapping[str, Any] | None, digits: str) -> str:
        return "-" if v is None else f"{v['median']:{digits}}\n[dim]{v['min']:{digits}}-{v['max']:{digits}}[/dim]"

    name = ""
    for row in result["rows"]:
        ratio = "" if row["name"] != name else cell(row["times_first"], ".2f")
        shares = [cell(row["share_of_peak"], ".1%"), cell(row["occupancy"], ".2f"), cell(row["padding"], ".2f")]
        out.add_row("" if row["name"] == name else row["name"], row["side"], cell(row[speed], digits), ratio, *shares)
        name = row["name"]
    return out
