"""Draw docs/law.png: the noise that each method's gradient has, against the noise that the law expects of its weights.

python docs/make_law.py    reads docs/data/law_*.json, as oarjax credit --gradients writes them to credit.json

One panel per file. On the line the law holds; the band is 25% on each side, the margin of docs/race.md. Both axes are
multiples of GRPO's noise. Methods whose noise or law is above ``MOST`` are named below the panel instead of drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from oarjax.report.colours import LIGHT, styles

HERE = Path(__file__).resolve().parent
LEAST, MOST = 0.05, 8.0
ACROSS = 3
MARGIN = 0.25
MARKERS = ("o", "s", "^", "D", "v")


def main() -> None:
    """Draw every file, a panel each."""
    files = sorted((HERE / "data").glob("law_*.json"))
    rows = -(-len(files) // ACROSS)
    figure = Figure(figsize=(2.9 * ACROSS, 3.2 * rows + 0.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    held = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    names = list(dict.fromkeys(method["name"] for each in held for method in each["gradients"]["methods"]))
    names.remove("GRPO")
    looks = dict(zip(names, styles(names)))
    axes = figure.subplots(rows, ACROSS, squeeze=False).ravel()
    for axis, each in zip(axes, held):
        panel(axis, each, looks)
    for axis in axes[::ACROSS]:
        axis.set_ylabel("measured noise, in GRPO's", fontsize=9)
    for axis in axes[len(files) :]:
        axis.remove()
    marks = {mark.get_label(): mark for axis in axes[: len(files)] for mark in axis.get_legend_handles_labels()[0]}
    figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=min(len(marks), 5), frameon=False, fontsize=8
    )
    figure.savefig(HERE / "law.png")


def panel(axis: Any, lab: dict[str, Any], looks: dict[str, tuple[int, int]]) -> None:
    """Draw one task: a point with its interval per method, and the law with its margin."""
    ends = [LEAST, MOST]
    axis.fill_between(
        ends, [x / (1 + MARGIN) for x in ends], [x * (1 + MARGIN) for x in ends], color="#eef2f6", linewidth=0
    )
    axis.plot(ends, ends, color="#888888", linewidth=1)
    beyond = []
    for method in lab["gradients"]["methods"]:
        name, noise, law = method["name"], method["figures"]["noise"], method["figures"].get("law")
        if name == "GRPO" or law is None:
            continue
        if not (LEAST < noise["mean"] < MOST and LEAST < law["mean"] < MOST):
            beyond.append(f"{name} {noise['mean']:.3g} ({law['mean']:.3g})")
            continue
        colour, number = looks[name]
        bars = {side: [[max(v["mean"] - (v["low"] or LEAST), 0)], [(v["high"] or MOST) - v["mean"]]]
                for side, v in (("xerr", law), ("yerr", noise))}  # fmt: skip
        marker = MARKERS[number % len(MARKERS)]
        axis.errorbar(
            law["mean"],
            noise["mean"],
            **bars,
            fmt=marker,
            color=LIGHT[colour],
            markersize=5,
            elinewidth=0.7,
            label=name,
        )
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_title(lab["title"], fontsize=10, loc="left")
    below = "\nbeyond, measured (law): " + ", ".join(beyond) if beyond else ""
    axis.set_xlabel("noise by the law" + below, fontsize=8 if beyond else 9)


if __name__ == "__main__":
    main()
