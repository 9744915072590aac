"""credit.png: each method's recall against its cost, and its rank correlation with exact OAR-P (extra ``log``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from oarjax.report.colours import LIGHT, styles
from oarjax.report.figures import new_figure
from oarjax.report.files import visible
from oarjax.stats import Interval
from oarjax.tools.lab.results import LabResult, MethodResult

MARKERS = "os^Dv"


def plot_lab(path: Path, result: LabResult) -> None:
    """Write ``draw_lab``'s figure as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_lab(result).savefig(path)


def draw_lab(result: LabResult) -> Any:
    """Draw a matplotlib figure: recall of both oracles over forward passes, and bars of Spearman's correlation.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure(14.0, 5.2, dpi=150)
    top = f"top {100 * result.share:g}%"
    panels = figure.subplots(1, 3)
    _against_cost(panels[0], result, "recall_exact", f"{top} of exact OAR-P found in the method's {top}")
    _against_cost(panels[1], result, "recall_direct", f"tokens that flip the decoded answer, found in the {top}")
    _bars(panels[2], result, "spearman", "Spearman with exact OAR-P")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _against_cost(axis: Any, result: LabResult, name: str, title: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    free = []
    for (colour, variant), method in zip(styles([m.name for m in result.methods]), result.methods):
        cost, interval = method.figures.get("forwards"), method.figures.get(name)
        if cost is None or interval is None or not math.isfinite(interval.mean):
            continue
        if not cost.mean > 0:
            free.append(method)
            continue
        axis.errorbar(
            [cost.mean],
            [interval.mean],
            yerr=_half(interval),
            fmt=MARKERS[variant % len(MARKERS)],
            color=LIGHT[colour],
            markersize=6,
            capsize=2,
            linewidth=1,
            label=visible(method.name),
        )
    levels = [("costs nothing", method.figures[name].mean, ":") for method in free[-1:]]
    if name in result.best and math.isfinite(result.best[name].mean):
        levels.append(("best possible", result.best[name].mean, "--"))
    for text, level, dash in levels:
        axis.axhline(level, color="#999999", linestyle=dash, linewidth=1.2)
        axis.annotate(
            text, (0.01, level), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
            fontsize=7, color="#777777",
        )  # fmt: skip
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("executed FLOPs, in forward passes", fontsize=9)
    _dress(axis, title)


def _bars(axis: Any, result: LabResult, name: str, title: str) -> None:
    rows: list[tuple[int, MethodResult]] = [
        (colour, m)
        for (colour, _), m in zip(styles([m.name for m in result.methods]), result.methods)
        if name in m.figures and math.isfinite(m.figures[name].mean)
    ]
    for number, (colour, method) in enumerate(rows):
        interval = method.figures[name]
        axis.barh(number, interval.mean, xerr=_half(interval), color=LIGHT[colour], height=0.7, capsize=2)
    axis.set_yticks(range(len(rows)), [visible(m.name) for _, m in rows])
    axis.invert_yaxis()
    axis.axvline(0, color="#555555", linewidth=0.8)
    _dress(axis, title)


def _half(interval: Interval) -> Any:
    """Return the error bar below and above the mean, None without an interval."""
    if not math.isfinite(interval.low):
        return None
    return [[max(interval.mean - interval.low, 0)], [max(interval.high - interval.mean, 0)]]


def _dress(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=10, loc="left", color="#222222")
    axis.tick_params(labelsize=8, color="#bbbbbb", labelcolor="#444444")
    axis.grid(color="#ececec", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
