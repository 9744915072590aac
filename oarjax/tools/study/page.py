"""Write a study as Markdown (command and machine, arms, differences, sweep), and paste it into a page."""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from oarjax.errors import UserError
from oarjax.storage.durable import storage_errors, write_durably

Triple = Sequence[float | None] | None
"""[mean, low, high] as ``study.results.collect`` returns them."""


class PageError(UserError, ValueError):
    """Raised when a study cannot be pasted into a page."""


def machine() -> str:
    """Describe the processor, cores and versions that the timings depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    packages = ", ".join(f"{package} {_version(package)}" for package in ("jax", "jaxlib"))
    return f"{os.cpu_count()} x {name}, Python {platform.python_version()}, {packages}"


def markdown(tree: Mapping[str, Any], *, command: str, figures: Sequence[str] = ()) -> str:
    """Return a study, as ``study.results.collect`` returns it, in Markdown."""
    arms, seeds = tree["arms"], tree["seeds"]
    runs = tree["runs"]
    parts = [
        f"    {command}\n",
        f"{len(arms)} arms, {len(seeds)} seed{'s' * (len(seeds) != 1)}, "
        f"{runs['finished']} of {runs['planned']} runs finished. Machine: {tree['machine']}.\n",
    ]
    if tree.get("failed"):
        parts.append("Failed: " + ", ".join(tree["failed"]) + ".\n")
    if arms:
        parts.append(table(arms_table(arms)))
        parts.append(
            "Means over seeds, ± half of a 95% interval (Student's t). Area: under held-out pass@1 over the "
            "iterations, as a mean. Entropy: nats per token over the last fifth of the iterations. ESS: effective "
            "share of the reasoning tokens. Seconds: of an iteration without evaluation.\n"
        )
    for baseline, by_arm in tree["differences"].items():
        if by_arm:
            parts.append(f"Differences to {baseline}, paired by seed, in points of pass@1:\n")
            parts.append(table(difference_table(by_arm)))
    if tree["differences"]:
        parts.append(
            "Not corrected for multiple comparisons: of twenty intervals, one misses its true value by chance. Equal "
            "FLOPs, equal time: areas up to what the cheapest arm of a seed spends, decoding counted. Time: mean "
            "difference in seconds per iteration.\n"
        )
    if tree.get("primaries"):
        parts.append("Primary comparisons, areas paired by seed, Student's t, adjusted by Holm over all of them:\n")
        parts.append(table(primaries_table(tree["primaries"])))
    if tree.get("choose"):
        parts.append(
            f"{tree['choose']['field']} of each arm: the largest mean area"
            f"{' less its standard error' if tree['choose'].get('by') == 'lower' else ''} over seeds "
            f"{', '.join(map(str, tree['choose']['seeds']))}, which count for nothing else:\n"
        )
        parts.append(table(choose_table(tree["choose"])))
        if tree["choose"].get("at_edge"):
            parts.append("At the edge of what was tried: " + ", ".join(tree["choose"]["at_edge"]) + ".\n")
    if tree.get("budget", {}).get("seconds"):
        parts.append(budget_text(tree["budget"]) + "\n")
    sweep = tree.get("sweep")
    if sweep is not None and sweep["cells"] and len(sweep["fields"]) == 2:
        parts.append(
            f"Final pass@1 of {sweep['of']} over {' and '.join(sweep['fields'])}, {len(sweep['seeds'])} seeds:\n"
        )
        parts.append(table(sweep_table(sweep)))
        if any(cell.get("difference") for cell in sweep["cells"]):
            parts.append(f"Their areas less those of {sweep['of']} as it is, paired by seed, in points:\n")
            parts.append(table(sweep_table(sweep, show=lambda cell: points_of(cell.get("difference")))))
    parts += [f"![{Path(figure).stem}]({figure})\n" for figure in figures]
    return "\n".join(parts)


def arms_table(arms: Mapping[str, Any]) -> list[list[str]]:
    """Return a header and a row of measures per arm."""
    rows = [["arm", "seeds", "final pass@1", "area", "median area", "entropy", "ESS", "s/iteration", "completions"]]
    for name, arm in arms.items():
        areas = [x for run in arm["by_seed"].values() if (x := run["area"]) is not None and math.isfinite(x)]
        median = f"{100 * statistics.median(areas):.1f}%" if areas else ""
        cells = [share(arm["final"]), share(arm["area"]), median]
        cells += [number(arm[measure]) for measure in ("entropy", "ess", "seconds")]
        rows.append([name, str(len(arm["by_seed"])), *cells, f"{arm['completions'][0]:,.0f}"])
    return rows


def difference_table(by_arm: Mapping[str, Any]) -> list[list[str]]:
    measures = ["final", "area", "area_flops", "area_seconds"]
    rows = [["arm", "final", "area", "area, equal FLOPs", "area, equal time", "time"]]
    for measure, title in (("area_tokens", "area, equal tokens"), ("area_kl", "area, equal KL")):
        if any(d.get(measure) for d in by_arm.values()):
            measures.append(measure)
            rows[0].insert(-1, title)
    return rows + [[name, *(points_of(d.get(m)) for m in measures), number(d["seconds"])] for name, d in by_arm.items()]


def primaries_table(primaries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [["comparison", "area, points", "median", "p", "p by Holm", "at 5%"]]
    for test in primaries:
        p_values = ["" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" for p in (test["p"], test["holm"])]
        outcome = ""
        if test["holm"] is not None:
            outcome = "above" if test["area"][0] > 0 else "below"
            if test["holm"] >= 0.05:
                detects = test.get("detects")
                outcome = "undecided" + ("" if detects is None else f"; detects {100 * detects:.1f}")
        median = "" if test.get("median") is None else f"{100 * test['median']:+.1f}"
        rows.append([f"{test['arm']} - {test['against']}", points_of(test["area"]), median, *p_values, outcome])
    return rows


def budget_text(budget: Mapping[str, Any]) -> str:
    """Say what confirming takes and what it can detect, as ``study.results.budget`` foretells it."""
    seconds = {name: value for name, value in budget["seconds"].items() if value is not None}
    total = budget["runs"] * sum(seconds.values())
    lines = [
        f"Confirming: {len(seconds)} arms x {budget['runs']} seeds, {total / 3600:.1f} hours of one worker without "
        "warm starts. Seconds of a run: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()) + "."
    ]
    for pair in budget["pairs"]:
        lines.append(
            f"{pair['arm']} - {pair['against']}: SD of a pair {100 * pair['sd']:.1f} points over {pair['of']} seeds, "
            f"so {budget['runs']} seeds detect {100 * pair['detects']:.1f} points of area with 80% power (5%, "
            "two-sided, before Holm)."
        )
    return "\n".join(lines)


def choose_table(choose: Mapping[str, Any]) -> list[list[str]]:
    """Return a table of mean areas by arm and value; an asterisk marks the chosen."""
    rows = [["arm", *map(str, choose["values"])]]
    for name, areas in choose["areas"].items():
        cells = [
            "" if area is None else f"{100 * area:.1f}%" + " *" * (choose["chosen"].get(name) == value)
            for area, value in zip(areas, choose["values"])
        ]
        rows.append([name, *cells])
    return rows


def sweep_table(
    sweep: Mapping[str, Any], *, show: Callable[[Mapping[str, Any]], str] = lambda cell: share(cell["final"])
) -> list[list[str]]:
    """Return a table of what ``show`` writes of each cell, the first field's values down and the second's across."""
    (down, downs), (across, acrosses) = sweep["fields"].items()
    cells = {tuple(cell["values"]): cell for cell in sweep["cells"]}
    short = [name.rpartition(".")[2] for name in (down, across)]
    rows = [[f"{short[0]} \\ {short[1]}", *map(str, acrosses)]]
    for a in downs:
        rows.append([str(a), *(show(cells[a, b]) if (a, b) in cells else "" for b in acrosses)])
    return rows


def share(triple: Triple) -> str:
    """Format a share in per cent, with half of its interval if it has one."""
    return _with_half(triple, scale=100.0, form="{:.1f}", unit="%")


def points_of(triple: Triple) -> str:
    """Format a difference of shares in points, signed."""
    return _with_half(triple, scale=100.0, form="{:+.1f}", unit="")


def number(triple: Triple) -> str:
    return _with_half(triple, scale=1.0, form="{:.3f}", unit="")


def _with_half(triple: Triple, *, scale: float, form: str, unit: str) -> str:
    mean, _, high = (None, None, None) if triple is None else triple
    if mean is None:
        return ""
    text = form.format(scale * mean) + unit
    return text if high is None else f"{text} ±{form.replace('+', '').format(scale * (high - mean))}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the header first, as a table in Markdown."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    line = "|" + "---|" * len(rows[0])
    return "\n".join([head, line, *body]) + "\n"


def paste(page: Path, name: str, text: str, figures: Mapping[str, Path]) -> None:
    """Paste ``text`` between the page's marks of a study, see ``around``.

    Args:
        figures: copied beside the page, by their file names there.
    """
    head, tail = around(page, name)
    with storage_errors(page):
        write_durably(page, f"{head}\n\n{text}\n{tail}")
    for file, source in figures.items():
        shutil.copyfile(source, page.parent / file)


def between(text: str, first: str, last: str, new: str) -> str:
    """Return a page's text with ``new`` between two marks of its own."""
    return f"{text.split(first)[0]}{first}\n\n{new}\n{last}{text.split(last)[1]}"


def around(page: Path, name: str) -> tuple[str, str]:
    """Split a page after its line ``<!-- study NAME -->`` and before its line ``<!-- end of study NAME -->``.

    Raises:
        PageError: the page does not exist, or does not have exactly one such pair of lines.
    """
    first, last = f"<!-- study {name} -->", f"<!-- end of study {name} -->"
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise PageError(f"--page: {page} cannot be read: {error}") from None
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise PageError(
            f"--page: {page}: expected the lines {first} and {last} once each; add them where the results should go"
        )
    return text[: text.index(first) + len(first)], text[text.index(last) :]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
