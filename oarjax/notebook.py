"""Run the commands from notebooks and scripts, and show their results.

The functions create the same runs and files as the commands, and print only warnings. Every ``show_...`` returns a
``Shown``, which Jupyter, Colab and VS Code display as the last value of a cell. It loads nothing, runs no script, has
a light background, and its styles do not leak into the page. Text from models and datasets is escaped, as in
report.html.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarjax.config.inputs import DataConfig
from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.data.rows import Rows, local_rows
from oarjax.errors import ConfigError
from oarjax.grading.grader import local_rewards
from oarjax.report.curves import PANELS, Record, points
from oarjax.report.files import CompletionRow, ShownConsole, read_completions, read_metrics, short
from oarjax.report.html import render
from oarjax.report.page import SIZE, card, chart, colour_scale, line_classes, pick_completions, token_pieces
from oarjax.run import run as training
from oarjax.run.run import Run
from oarjax.storage.stop import Stop, Stopped
from oarjax.tools.lab.command import measure_credit
from oarjax.tools.lab.plot import draw_lab
from oarjax.tools.lab.results import LabResult, legend, shown_columns, table_cells, tables
from oarjax.training.command import train_once


def train(
    cfg: Config,
    *,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    rewards: Sequence[Any] | None = None,
    watch: Callable[[list[dict[str, Any]]], object] | None = None,
    extend: bool = False,
) -> Path:
    """Train as ``oarjax train`` does; return the run's folder. A stopped run resumes; a finished one is kept.

    Args:
        cfg: of the run, see ``load_config``.
        data: rows to train on instead of ``data.train.source``, checked as those of a file: a list of dicts or a
            ``datasets.Dataset``, with the columns that ``data.train.prompt_field`` and ``answer_field`` name; default
            None. A run resumes with the same rows alone.
        eval_data: held-out rows instead of ``data.eval.source``; default None. Columns that ``data.eval`` does
            not name are those of ``data.train``.
        rewards: instead of those of ``grading.rewards``: functions that take an ``oarjax.Sample`` and return a float,
            names of registered rewards, or pairs of either with a weight, as ``[(brief, 0.2), "math"]``; default None.
            Functions run in this process, in a thread: nothing can stop one that hangs, and a later command knows them
            only by name.
        watch: called with the metrics so far, one record per iteration, whenever there are new ones; default None.
        extend: lets a run resume with more iterations even if its learning rates change; default False.

    Raises:
        KeyboardInterrupt: the cell was interrupted; finished work is saved, and the same call resumes it.
        DataError: ``data`` or ``eval_data`` are no rows, or lack a column.
        ConfigError: see ``oarjax.training.command``; also the errors of a run's parts.
        ValueError: ``rewards`` holds anything else, or a name twice.
    """
    _check_config("train", cfg)
    with ExitStack() as stack:
        tree = cfg.model_dump(mode="json")
        if rewards is not None:
            pairs = stack.enter_context(local_rewards(rewards))
            tree["grading"]["rewards"] = [{"name": name, "weight": weight} for name, weight in pairs]
        for argument, section, rows in (("data", "train", data), ("eval_data", "eval", eval_data)):
            if rows is not None:
                source = stack.enter_context(local_rows(argument, rows))
                tree["data"][section] = _columns(cfg.data, section) | {"source": source}
        cfg = parse_config(tree, source="oarjax.train")
        folder = Path(cfg.run_dir).expanduser()

        def report() -> None:
            if watch is not None:
                watch(read_metrics(folder / "metrics.jsonl"))

        try:
            with Stop() as stop:
                train_once(cfg, _WarningsOnly(), stop, report, extend=extend)
        except Stopped:
            raise KeyboardInterrupt(f"{folder} is saved; run this again to resume it") from None
        report()  # a run that was already finished reports nothing itself
        return folder


def _columns(data: DataConfig, section: str) -> dict[str, Any]:
    """Return the settings of ``data.train`` or ``data.eval``; columns that eval does not name are train's."""
    train, dataset = data.train.model_dump(mode="json"), getattr(data, section)
    if dataset is None:
        return train
    fields = {name: train[name] for name in ("prompt_field", "answer_field") if name not in dataset.model_fields_set}
    return dataset.model_dump(mode="json") | fields


def credit_lab(cfg: Config) -> LabResult:
    """Run ``oarjax credit``: compare credit methods on a policy's completions, and write the lab's files.

    Args:
        cfg: its section ``lab`` says what is measured.
    """
    _check_config("credit_lab", cfg)
    return measure_credit(cfg, _WarningsOnly())


def open_run(cfg: Config) -> Run:
    """Open a run for a custom training loop: its policy, data, tokenizer and programs, each built on first use.

    Args:
        cfg: of the run.

    Raises:
        ConfigError: see ``oarjax.run.run.open_run``.
    """
    _check_config("open_run", cfg)
    return training.open_run(cfg, _WarningsOnly())


def _check_config(function: str, cfg: Any) -> None:
    if not isinstance(cfg, Config):
        raise ConfigError(f"{function}: expected a Config, got {cfg!r}; load it with oarjax.load_config")


class _WarningsOnly(ShownConsole):
    """A console that prints warnings alone, on plain lines; everything else is in the run's files."""

    def __init__(self) -> None:
        super().__init__(force_jupyter=False, force_terminal=False, highlight=False, markup=False, width=110)

    def print(self, *objects: Any, **options: Any) -> None:
        if objects and str(objects[0]).startswith("warning: "):
            super().print(*objects, **options)


@dataclass(frozen=True, repr=False)
class Shown:
    """A piece of HTML that notebooks display."""

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return "Shown: displayed as the last value of a notebook's cell"


def show_curves(runs: Mapping[str, Path | Sequence[Record]], *, metrics: Sequence[str] = ()) -> Shown:
    """Show curves by iteration, a chart per metric.

    Args:
        runs: folders or records ``{"iteration": n, metric: value, ...}``, by run name.
        metrics: to show, in this order; default (): the report's metrics that the runs have.

    Raises:
        ValueError: a metric has no chart.
    """
    records = {name: read_metrics(r / "metrics.jsonl") if isinstance(r, Path) else r for name, r in runs.items()}
    panels = {panel.metric: panel for panel in PANELS}
    unknown = [name for name in metrics if name not in panels]
    if unknown:
        raise ValueError(f"show_curves: expected metrics among {', '.join(panels)}, got {', '.join(unknown)}")
    has = {name: any(points(rows, name, first=p.first) for rows in records.values()) for name, p in panels.items()}
    plots = [panels[name] for name in metrics or panels if has[name]]
    return _shown(
        charts=[chart(panel, records) for panel in plots],
        legend=list(zip(records, line_classes(list(records)))) if len(records) > 1 else [],
        empty="" if plots else "No iteration has been finished yet.",
    )


def show_completions(run: Path | Sequence[tuple[int, CompletionRow]], *, count: int = 2) -> Shown:
    """Show a run's completions, each token coloured by its weight.

    Args:
        run: folder, or rows of ``read_completions``.
        count: completions, >= 1, from the earliest and latest iterations, those of uneven weights first; default 2.
    """
    rows = read_completions(run / "completions.jsonl") if isinstance(run, Path) else run
    completions = pick_completions(rows, count=count)
    return _shown(
        cards=[card(iteration, row) for iteration, row in completions],
        scale=colour_scale(),
        empty="" if completions else "No completion has been saved yet.",
    )


def show_tokens(
    tokens: Sequence[str],
    weights: Mapping[str, Sequence[float]],
    *,
    reasoning: Sequence[bool] = (),
    answer: Sequence[bool] = (),
    title: str = "",
) -> Shown:
    """Show a completion once for each set of weights.

    Args:
        tokens: texts of the completion's tokens.
        weights: by name, a weight per token, 1 = as in plain GRPO.
        reasoning: marks the reasoning; default (): all tokens.
        answer: marks the answer; default (): none.
        title: above the completion; default ''.

    Raises:
        ValueError: the lengths differ.
    """
    return _shown(views=[_view(title, tokens, weights, reasoning, answer)], scale=colour_scale())


def show_credit(result: LabResult, *, methods: Sequence[str] = (), count: int = 2) -> Shown:
    """Show completions of a credit lab, each coloured by every method in turn.

    Args:
        result: of ``credit_lab``.
        methods: names of the lab's methods, in the order to show; default (): all.
        count: maximum number of completions; default 2.

    Raises:
        ValueError: the lab has not measured a method.
    """
    names = [m.name for m in result.methods]
    unknown = [name for name in methods if name not in names]
    if unknown:
        raise ValueError(f"show_credit: expected methods among {', '.join(names)}, got {', '.join(unknown)}")
    views = []
    for c in result.completions[:count]:
        title = f"{c.prompt}   reward {short(c.reward)}"
        weights = {name: c.weights[name] for name in methods or names}
        views.append(_view(title, c.tokens, weights, c.is_reasoning, c.is_answer))
    return _shown(views=views, scale=colour_scale())


def show_lab(result: LabResult) -> Shown:
    """Show the tables of a credit lab, with the meaning of their columns, and its figures.

    Args:
        result: of ``credit_lab``.
    """
    views = []
    for title, columns, part in tables(result):
        chosen = shown_columns(part, columns)
        lines = table_cells(part, chosen)
        header = ["method", *(column.heading for column in chosen)]
        views.append({"title": title, "header": header, "lines": lines, "note": legend(part, chosen)})
    return _shown(tables=views, note=f"{result.interval}.")


def show_lab_figure(result: LabResult) -> Shown:
    """Plot each method's recall against its cost, and its ranking beside exact OAR-P (needs matplotlib).

    Args:
        result: of ``credit_lab``.
    """
    target = io.BytesIO()
    draw_lab(result).savefig(target, format="png", dpi=110)
    return _shown(picture=base64.b64encode(target.getvalue()).decode(), label="credit lab: recall against cost")


def _view(
    title: str,
    tokens: Sequence[str],
    weights: Mapping[str, Sequence[float]],
    reasoning: Sequence[bool],
    answer: Sequence[bool],
) -> dict[str, Any]:
    lines = []
    for name, values in weights.items():
        row = CompletionRow(
            prompt="", completion="", reward=0.0, answer=None, verdict="", tokens=tokens, weights=values,
            is_reasoning=reasoning, is_answer=answer,
        )  # fmt: skip
        lines.append((name, token_pieces(row)))
    return {"title": title, "lines": lines}


def _shown(**parts: Any) -> Shown:
    empty: dict[str, Any] = {"charts": [], "legend": [], "cards": [], "views": [], "tables": [], "scale": []}
    empty |= {"note": "", "empty": "", "picture": "", "label": ""}
    return Shown(render("report/shown.html", **(empty | {"size": SIZE} | parts)))
