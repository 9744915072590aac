"""Draw the curves of one or several runs as PNG files (extra ``log``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oarjax.report.colours import DASHES, LIGHT, styles
from oarjax.report.figures import new_figure

Record = Mapping[str, Any]
"""A line of metrics.jsonl, see ``oarjax.report.files.read_metrics``."""


class Panel(NamedTuple):
    metric: str
    title: str
    percent: bool = False
    from_zero: bool = False  # the axis begins at 0
    first: int = 0  # iterations below it are left out


PANELS = (
    Panel("reward", "mean reward"),
    Panel("pass_at_1", "held-out pass@1", percent=True),
    Panel("length", "mean length, tokens"),
    Panel("entropy", "entropy, nats"),
    Panel("ess", "effective share of reasoning tokens", percent=True),
    Panel("seconds/training", "seconds per iteration after the first, without evaluation", from_zero=True, first=2),
)


def points(records: Sequence[Record], metric: str, *, first: int = 0) -> list[tuple[float, float]]:
    """Return (iteration, value) where the metric was logged and finite, from iteration ``first`` on."""
    pairs = ((r["iteration"], r.get(metric)) for r in records if r["iteration"] >= first)
    return [(float(n), float(v)) for n, v in pairs if v is not None and math.isfinite(v)]


def drawn_panels(runs: Mapping[str, Sequence[Record]]) -> list[Panel]:
    """Select the panels for which a run has values; of several rewards each has one, after that of their sum."""
    names = sorted({name for records in runs.values() for r in records for name in r if name.startswith("reward/")})
    reward_panels = [Panel(name, f"mean of reward {name.removeprefix('reward/')}") for name in names if len(names) > 1]
    panels = [*PANELS[:1], *reward_panels, *PANELS[1:]]
    return [p for p in panels if any(points(records, p.metric, first=p.first) for records in runs.values())]


def iteration_range(runs: Mapping[str, Sequence[Record]]) -> tuple[float, float]:
    """Return the first and last iteration of any run, so that all panels share an axis."""
    iterations = [float(record["iteration"]) for records in runs.values() for record in records]
    return (min(iterations), max(iterations)) if iterations else (0.0, 1.0)


def moving_mean(values: Sequence[float]) -> list[float]:
    """Smooth a series by centred means over about a fifteenth of it, less near its ends; short series stay as is."""
    half = len(values) // 30
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows] if half else list(values)


def curves(runs: Mapping[str, Sequence[Record]], folder: Path) -> list[Path]:
    """Draw each panel into a PNG file and all of them into curves.png; return the files, curves.png first.

    Args:
        runs: metrics by run name.
        folder: created if missing.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    panels = drawn_panels(runs)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for path, drawn_in in [(folder / "curves.png", panels), *((folder / _file_name(p), [p]) for p in panels)]:
        across = min(len(drawn_in), 3) or 1
        down = -(-len(drawn_in) // across) or 1
        figure = new_figure(4.2 * across, 2.9 * down + 0.5, dpi=150)
        axes = figure.subplots(down, across, squeeze=False).ravel()
        first, last = iteration_range(runs)
        for axis, panel in zip(axes, drawn_in):
            _draw(axis, panel, runs)
            axis.set_xlim(first, max(last, first + 1))
        for axis in axes[len(drawn_in) :]:
            axis.set_axis_off()
        lines = {line.get_label(): line for axis in axes for line in axis.lines if line.get_label() in runs}
        if len(runs) > 1 and lines:
            labels = [name for name in runs if name in lines]
            handles = [lines[name] for name in labels]
            figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), frameon=False)
        figure.savefig(path)
        paths.append(path)
    return paths


def _file_name(panel: Panel) -> str:
    return f"curve_{panel.metric.replace('/', '_')}.png"


def _draw(axis: Any, panel: Panel, runs: Mapping[str, Sequence[Record]]) -> None:
    scale = 100 if panel.percent else 1
    for (colour, variant), (name, records) in zip(styles(list(runs)), runs.items()):
        curve = points(records, panel.metric, first=panel.first)
        if not curve:
            continue
        x, y = [p[0] for p in curve], [scale * p[1] for p in curve]
        line = {"color": LIGHT[colour], "linestyle": DASHES[variant % len(DASHES)]}
        smooth = moving_mean(y)
        if smooth != y:
            axis.plot(x, y, color=LIGHT[colour], linewidth=0.8, alpha=0.3)
        marker = "o" if len(x) <= 12 else None
        axis.plot(
            x,
            smooth,
            **line,
            linewidth=1.8,
            marker=marker,
            markersize=4,
            label=name,
            clip_on=False,
        )
    axis.set_title(panel.title + (" (%)" if panel.percent else ""), fontsize=10, loc="left", color="#222222")
    axis.set_xlabel("iteration", fontsize=9, color="#555555")
    axis.tick_params(labelsize=8, color="#bbbbbb", labelcolor="#444444")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    if panel.from_zero:
        axis.set_ylim(bottom=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#bbbbbb")
