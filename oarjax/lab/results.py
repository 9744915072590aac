"""Results of ``oarjax credit``: figures with intervals, as tables for the terminal and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oarjax.report.files import visible
from oarjax.stats import Interval
from oarjax.system.json import number, to_json


@dataclass(frozen=True)
class MethodResult:
    name: str
    credit: Mapping[str, Any]  # fields of credit that make the method
    figures: Mapping[str, Interval]


@dataclass(frozen=True)
class LabCompletion:
    """A completion with every method's scores and weights. Untrusted text."""

    prompt: str
    answer: str | None
    reference: str | None
    reward: float
    tokens: Sequence[str]
    is_reasoning: Sequence[bool]
    is_answer: Sequence[bool]
    direct: Sequence[bool]
    total: Sequence[bool]
    known: Sequence[bool]  # empty if unknown
    scores: Mapping[str, Sequence[float]]  # by method
    weights: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class LabResult:
    title: str
    facts: Mapping[str, str]
    share: float  # of the reasoning that counts as the top
    interval: str  # describes the intervals
    oracles: Mapping[str, Interval]  # share of reasoning tokens that each oracle names
    best: Mapping[str, Interval]  # recall of a perfect ranking
    methods: Sequence[MethodResult]
    completions: Sequence[LabCompletion]


# Tables -----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    name: str  # of the figure
    heading: str
    note: str
    scale: float = 1.0


AGREEMENT = (
    Column("spearman", "Spearman", "rank correlation with exact OAR-P"),
    Column("recall_exact", "OAR-P top", "share of exact OAR-P's own top tokens that the method's top holds"),
    Column("recall_direct", "direct", "same for tokens whose change, the rest kept, changes the decoded answer"),
    Column("recall_total", "total", "same for tokens whose change, all after it decoded anew, changes the reward"),
    Column("recall_known", "computed", "same for the digits of the steps' results"),
)
SEPARATION = (
    Column("auc_exact", "OAR-P top", "chance that a token of exact OAR-P's top scores above another"),
    Column("auc_direct", "direct", "same for the direct oracle's tokens"),
    Column("auc_total", "total", "same for the total oracle's"),
    Column("auc_known", "computed", "same for the digits of the steps' results"),
)
COSTS = (
    Column("ess", "ESS", "effective share of reasoning tokens under the weights"),
    Column("top_mass", "top mass", "share of the weight on the heaviest tokens"),
    Column("repeat", "two draws", "Spearman between two draws of the noise"),
    Column("forwards", "forwards", "executed FLOPs over those of one forward pass of the completions"),
    Column("seconds", "ms", "warm milliseconds per completion", 1e3),
)
BEST = "best possible"


def cell(found: Interval | None, *, scale: float = 1.0) -> str:
    """Format as ``0.57 ±.04``, the mean and half the interval; n/a where undefined, the mean alone without interval."""
    if found is None or not math.isfinite(found.mean):
        return "n/a" if found is not None else ""
    mean, half = scale * found.mean, scale * found.half
    digits = 2 if abs(mean) < 10 else 1 if abs(mean) < 100 else 0
    text = f"{mean:,.{digits}f}"
    if not math.isfinite(half):
        return text
    return f"{text} ±{f'{half:.{digits}f}'.removeprefix('0') if digits else f'{half:.0f}'}"


def shown_columns(result: LabResult, columns: Sequence[Column]) -> list[Column]:
    """Select the columns that at least one method has a figure for."""
    return [
        c for c in columns if any(math.isfinite(m.figures[c.name].mean) for m in result.methods if c.name in m.figures)
    ]


def table_cells(result: LabResult, columns: Sequence[Column]) -> list[list[str]]:
    """Return a line per method, and one of the best possible recalls if a column has any."""
    lines = [[m.name, *(cell(m.figures.get(c.name), scale=c.scale) for c in columns)] for m in result.methods]
    if any(c.name in result.best for c in columns):
        lines.append([BEST, *(cell(result.best.get(c.name)) for c in columns)])
    return lines


def legend(result: LabResult, columns: Sequence[Column]) -> str:
    """Explain the columns."""
    return "; ".join(f"{c.heading}: {c.note}" for c in shown_columns(result, columns)) + "."


def tables(result: LabResult) -> list[tuple[str, Sequence[Column]]]:
    """List the title and columns of every table."""
    top = f"top {100 * result.share:g}%"
    return [
        (f"Which tokens: what the {top} of the reasoning holds", AGREEMENT),
        ("Which tokens: chance of scoring above the rest", SEPARATION),
        ("Weights and cost", COSTS),
    ]


def print_lab(console: Console, result: LabResult) -> None:
    """Print the tables, each within 80 columns."""
    for title, columns in tables(result):
        chosen = shown_columns(result, columns)
        table = Table(
            title=title, title_justify="left", caption=legend(result, columns), caption_justify="left",
            box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        table.add_column("method")
        for column in chosen:
            table.add_column(column.heading, justify="right", no_wrap=True)
        for line in table_cells(result, chosen):
            style = "dim" if line[0] == BEST else ""
            table.add_row(*(Text(visible(text), style=style) for text in line))
        console.print(table)
        console.print()
    named = ", ".join(f"{name} {cell(found, scale=100.0)}%" for name, found in result.oracles.items())
    console.print(f"Share of reasoning tokens that each oracle names: {named}.", markup=False)
    if "completions" in result.facts:
        console.print(f"Completions: {result.facts['completions']}.", markup=False)
    console.print(f"{result.interval}.", style="dim", markup=False)


# JSON -------------------------------------------------------------------------------------------------------------


def lab_json(result: LabResult) -> str:
    """Write the whole result as strict JSON; null for a number that is not finite."""
    return to_json(asdict(result), indent=1)


def write_lab(path: Path, result: LabResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lab_json(result) + "\n", encoding="utf-8")


def read_lab(path: Path) -> LabResult:
    """Read back the file that ``write_lab`` wrote."""
    tree = json.loads(path.read_text(encoding="utf-8"))

    def figures(saved: Mapping[str, Any]) -> dict[str, Interval]:
        def read(f: Mapping[str, Any]) -> Interval:
            return Interval(number(f["mean"]), number(f["low"]), number(f["high"]), f["count"])

        return {name: read(f) for name, f in saved.items()}

    methods = [MethodResult(m["name"], m["credit"], figures(m["figures"])) for m in tree["methods"]]
    completions = []
    for c in tree["completions"]:
        by_method = {
            key: {name: [number(v) for v in values] for name, values in c[key].items()} for key in ("scores", "weights")
        }
        completions.append(LabCompletion(**(c | by_method | {"reward": number(c["reward"])})))
    intervals = {"oracles": figures(tree["oracles"]), "best": figures(tree["best"])}
    return LabResult(**(tree | intervals | {"methods": methods, "completions": completions}))
