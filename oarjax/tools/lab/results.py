"""Results of ``oarjax credit``: figures with intervals, as tables for the terminal and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    credit: Mapping[str, Any]  # fields of the config's credit section that define the method
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
    known: Sequence[bool]  # tokens known to carry the computation; empty if unknown
    wrong: Sequence[bool]  # the first wrong step of a failed completion; empty if unknown
    scores: Mapping[str, Sequence[float]]  # by method
    weights: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class GradientResult:
    """Relations of every method's minibatch gradient to the expected gradient of plain GRPO."""

    facts: Mapping[str, str]
    interval: str  # describes the intervals
    figures: Mapping[str, Interval]  # reward, share of the score noise outside the reasoning, rho if known
    methods: Sequence[MethodResult]


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
    gradients: GradientResult | None = None
    values: Mapping[str, Interval] | None = None  # signed values against forced branches


# Tables -----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    name: str  # of the figure
    heading: str
    note: str
    scale: float = 1.0


AGREEMENT = (
    Column("spearman", "Spearman", "rank correlation with exact OAR-P"),
    Column("recall_exact", "OAR-P top", "share of exact OAR-P's top tokens that the method's top holds"),
    Column("recall_direct", "direct", "same for tokens whose change, the rest kept, changes the decoded answer"),
    Column("recall_total", "total", "same for tokens whose change, all after it decoded again, changes the reward"),
    Column("recall_known", "computed", "same for the tokens known to carry the computation"),
)
SEPARATION = (
    Column("auc_exact", "OAR-P top", "chance that a token of exact OAR-P's top scores above another"),
    Column("auc_direct", "direct", "same for the direct oracle's tokens"),
    Column("auc_total", "total", "same for the total oracle's"),
    Column("auc_known", "computed", "same for the tokens known to carry the computation"),
)
COSTS = (
    Column("ess", "ESS", "effective share of reasoning tokens under the weights"),
    Column("top_mass", "top mass", "share of the weight on the heaviest tokens"),
    Column("repeat", "two draws", "Spearman between two draws of the noise"),
    Column("forwards", "forwards", "executed FLOPs over those of one forward pass of the completions"),
    Column("seconds", "ms", "warm milliseconds per completion", 1e3),
)
WRONG = (
    Column("recall_wrong", "recall", "share of the first wrong step's tokens that the method's top holds"),
    Column("auc_wrong", "AUC", "chance that one of them scores above another token of the reasoning"),
)
POINTING = (
    Column("cosine", "cosine", "of a minibatch's gradient with the expected gradient of GRPO"),
    Column("ratio", "ratio", "cosine over GRPO's"),
    Column("bias", "bias", "cosine of the method's expected gradient with GRPO's"),
    Column("noise", "noise", "1 / cosine^2 - 1 over GRPO's: how many times the rollouts it needs"),
    Column("mixture_noise", "mixed", "the noise of the best mixture with GRPO, a bound on weights shrunk towards 1"),
    Column("mixture", "share", "share of the method in that mixture"),
    Column("law", "law", "the noise that the method's weights should leave by rho + (1 - rho)(a / b)^2"),
)
NOISE = (
    Column("inverse_ess", "1/ESS", "of the weights: what random ones multiply the noise by"),
    Column("norm", "norm", "root mean square of the gradient's length over GRPO's"),
    Column("pivotal", "pivotal", "share of the gradient's noise from tokens that decide the outcome"),
    Column("other", "other", "share from the other tokens"),
    Column("deciding", "deciding", "noise over signal of their part of the gradient alone, over GRPO's"),
)
BEST = "best possible"


def cell(figure: Interval | None, *, scale: float = 1.0) -> str:
    """Format as ``0.57 ±.04``, the mean and half the interval; n/a where undefined, the mean alone without interval."""
    if figure is None or not math.isfinite(figure.mean):
        return "n/a" if figure is not None else ""
    mean, half = scale * figure.mean, scale * figure.half
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
    """Return a line per method, and a line of the best possible recalls if a column has any."""
    lines = [[m.name, *(cell(m.figures.get(c.name), scale=c.scale) for c in columns)] for m in result.methods]
    if any(c.name in result.best for c in columns):
        lines.append([BEST, *(cell(result.best.get(c.name)) for c in columns)])
    return lines


def legend(result: LabResult, columns: Sequence[Column]) -> str:
    """Explain the columns."""
    return "; ".join(f"{c.heading}: {c.note}" for c in shown_columns(result, columns)) + "."


def tables(result: LabResult) -> list[tuple[str, Sequence[Column], LabResult]]:
    """Return the title, columns and lines of every table that has a figure to show; the lines are a LabResult."""
    top = f"top {100 * result.share:g}%"
    parts = [
        (f"Which tokens: what the {top} of the reasoning holds", AGREEMENT, result),
        ("Which tokens: chance of scoring above the rest", SEPARATION, result),
        (f"Failed completions: is the first wrong step in the {top}", WRONG, result),
        ("Weights and cost", COSTS, result),
    ]
    if result.gradients is not None:
        lines = replace(result, methods=result.gradients.methods, best={})
        parts += [
            ("Gradients: how well one minibatch points", POINTING, lines),
            ("Gradients: where the noise comes from", NOISE, lines),
        ]
    return [part for part in parts if shown_columns(part[2], part[1])]


def gradient_notes(gradients: GradientResult) -> list[str]:
    """Describe the measurement in sentences."""
    shares = {"rho": "pivotal tokens' share of GRPO's noise (rho)", "outside": "score noise outside the reasoning"}
    figures = gradients.figures
    notes = [f"mean reward {cell(figures['reward'])}"]
    notes += [f"{text} {cell(figures[n], scale=100.0)}%" for n, text in shares.items() if n in figures]
    facts = "; ".join(f"{name}: {text}" for name, text in gradients.facts.items())
    return [f"Gradients: {facts}; {'; '.join(notes)}.", f"{gradients.interval}."]


def notes_of(result: LabResult) -> list[str]:
    """List what is said below the tables."""
    notes = [] if result.values is None else value_notes(result.values)
    return notes + ([] if result.gradients is None else gradient_notes(result.gradients))


def value_notes(values: Mapping[str, Interval]) -> list[str]:
    """Describe how signed values compare with forced branches."""
    texts = {"correlation": "correlation", "ceiling": "at most, by the noise of Q", "sign": "same sign"}
    texts |= {"bias_drawn": "v - Q of the drawn token", "bias_others": "of the others"}
    figures = "; ".join(f"{text} {cell(values[name])}" for name, text in texts.items())
    return [f"Signed values v(a) - b against Q(a) - V of forced branches: {figures}."]


def print_lab(console: Console, result: LabResult) -> None:
    """Print the tables, each within 80 columns."""
    for title, columns, part in tables(result):
        table_columns = shown_columns(part, columns)
        table = Table(
            title=title, title_justify="left", caption=legend(part, columns), caption_justify="left",
            box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        table.add_column("method")
        for column in table_columns:
            table.add_column(column.heading, justify="right", no_wrap=True)
        for line in table_cells(part, table_columns):
            style = "dim" if line[0] == BEST else ""
            table.add_row(*(Text(visible(text), style=style) for text in line))
        console.print(table)
        console.print()
    shares = ", ".join(f"{name} {cell(figure, scale=100.0)}%" for name, figure in result.oracles.items())
    console.print(f"Share of reasoning tokens that each oracle names: {shares}.", markup=False)
    if "completions" in result.facts:
        console.print(f"Completions: {result.facts['completions']}.", markup=False)
    console.print(f"{result.interval}.", style="dim", markup=False)
    for note in notes_of(result):
        console.print(note, style="dim", markup=False)


# JSON -------------------------------------------------------------------------------------------------------------


def lab_json(result: LabResult) -> str:
    """Return the whole result as strict JSON; a number that is not finite is null."""
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

    def methods(saved: Sequence[Mapping[str, Any]]) -> list[MethodResult]:
        return [MethodResult(m["name"], m["credit"], figures(m["figures"])) for m in saved]

    gradients = tree.get("gradients")
    if gradients is not None:
        parts = {"figures": figures(gradients["figures"]), "methods": methods(gradients["methods"])}
        gradients = GradientResult(**(gradients | parts))
    completions = []
    for c in tree["completions"]:
        by_method = {
            key: {name: [number(v) for v in values] for name, values in c[key].items()} for key in ("scores", "weights")
        }
        completions.append(LabCompletion(**(c | by_method | {"reward": number(c["reward"])})))
    values = tree.get("values")
    parsed: dict[str, Any] = {"oracles": figures(tree["oracles"]), "best": figures(tree["best"])}
    parsed["values"] = None if values is None else figures(values)
    parsed |= {"methods": methods(tree["methods"]), "completions": completions, "gradients": gradients}
    return LabResult(**(tree | parsed))
