"""Draw a study's figures (extra ``log``): learning curves, comparisons, and the sweep as a heat map."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oarjax.report.colours import DASHES, LIGHT, styles
from oarjax.report.figures import new_figure

DPI = 80
"""Low: the figures are committed beside a page."""


def draw_curves(tree: Mapping[str, Any], path: Path) -> None:
    """Draw learning curves, differences to the reference arms, entropy, ESS and time into one PNG.

    Args:
        tree: as ``study.results.collect`` returns it, with at least one arm.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, axes = _figure(5 + len(tree["differences"]), across=4)
    arms = tree["arms"]
    _learning(axes[0], arms)
    comparisons = list(tree["differences"].items())
    for axis, (baseline, differences) in zip(axes[1:], comparisons):
        _dots(axis, {n: d["area"] for n, d in differences.items()}, arms, f"area - {baseline}'s, points (95%)", 100.0)
        axis.axvline(0, color="#888888", linewidth=1)
    panels = (
        ("final", "final pass@1, % (95%)", 100.0),
        ("entropy", "entropy at the end, nats", 1.0),
        ("ess", "effective share of reasoning tokens", 1.0),
        ("seconds", "seconds per iteration", 1.0),
    )
    for axis, (what, title, scale) in zip(axes[1 + len(comparisons) :], panels):
        _dots(axis, {name: arm[what] for name, arm in arms.items()}, arms, title, scale)
    axes[len(comparisons) + len(panels)].set_xlim(left=0)  # seconds
    for axis in axes[1 + len(comparisons) + len(panels) :]:
        axis.set_axis_off()
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=min(len(arms), 7), frameon=False, fontsize=9)
    figure.savefig(path)


def draw_frontier(sweep: Mapping[str, Any], path: Path) -> None:
    """Draw final pass@1 over the sweep's two fields, averaged over seeds, as a heat map with numbers.

    Raises:
        ValueError: the sweep does not have two fields.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if len(sweep["fields"]) != 2:
        raise ValueError(f"draw_frontier: expected two fields, got {', '.join(sweep['fields'])}")
    (down, downs), (across, acrosses) = sweep["fields"].items()
    shares = {tuple(cell["values"]): 100 * cell["final"][0] for cell in sweep["cells"]}
    table = [[shares.get((a, b), float("nan")) for b in acrosses] for a in downs]
    figure, (axis,) = _figure(1, across=1)
    image = axis.imshow(table, cmap="cividis", aspect="auto")
    middle = (min(shares.values()) + max(shares.values())) / 2
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            text = "" if value != value else f"{value:.1f}"
            axis.text(j, i, text, ha="center", va="center", color="black" if value > middle else "white", fontsize=9)
    axis.set_xticks(range(len(acrosses)), [str(v) for v in acrosses])
    axis.set_yticks(range(len(downs)), [str(v) for v in downs])
    axis.set_xlabel(across.rpartition(".")[2], fontsize=9)
    axis.set_ylabel(down.rpartition(".")[2], fontsize=9)
    axis.set_title(f"final pass@1 (%), {sweep['of']}, {len(sweep['seeds'])} seeds", fontsize=10, loc="left")
    figure.colorbar(image, ax=axis)
    figure.savefig(path)


def _learning(axis: Any, arms: Mapping[str, Any]) -> None:
    for i, (name, arm) in enumerate(arms.items()):
        curve = [(p["iteration"], p["pass_at_1"]) for p in arm["curve"] if p["pass_at_1"] is not None]
        # Shifted so that the intervals of the arms do not overlap.
        x = [n + 0.25 * (i - (len(arms) - 1) / 2) for n, _ in curve]
        y = [100 * t[0] for _, t in curve]
        half = [100 * (t[2] - t[0]) if t[2] is not None else 0.0 for _, t in curve]
        colour, variant = styles(list(arms))[i]
        dash = DASHES[variant % len(DASHES)]
        axis.errorbar(x, y, half, color=LIGHT[colour], linestyle=dash, linewidth=1.5, elinewidth=0.8, label=name)
    axis.set_title("held-out pass@1, % (95% over seeds)", fontsize=10, loc="left")
    axis.set_xlabel("iteration", fontsize=9)
    _plain(axis, grid="y")


def _dots(axis: Any, values: Mapping[str, Any], arms: Mapping[str, Any], title: str, scale: float) -> None:
    """Draw one arm per line, the first on top: mean and interval."""
    intervals = {name: triple for name, triple in values.items() if triple is not None}
    colours = dict(zip(arms, styles(list(arms))))
    for number, (name, (mean, low, high)) in enumerate(intervals.items()):
        half = [[scale * (mean - low)], [scale * (high - mean)]] if low is not None and high is not None else None
        axis.errorbar(scale * mean, -number, xerr=half, fmt="o", color=LIGHT[colours[name][0]], markersize=5)
    axis.set_yticks([-number for number in range(len(intervals))], list(intervals))
    axis.set_title(title, fontsize=10, loc="left")
    _plain(axis, grid="x")


def _plain(axis: Any, *, grid: str) -> None:
    axis.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, color="#bbbbbb", labelcolor="#444444")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _figure(panels: int, *, across: int) -> tuple[Any, list[Any]]:
    down = -(-panels // across)
    figure = new_figure(4.6 * across, 3.1 * down + 0.4, dpi=DPI)
    return figure, figure.subplots(down, across, squeeze=False).ravel().tolist()
