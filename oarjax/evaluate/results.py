"""Results of an evaluation: figures of each benchmark, as JSON and as a table, and two evaluations compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oarjax.errors import ConfigError
from oarjax.report.files import visible
from oarjax.stats import Interval, mean_interval, paired_difference, share_interval
from oarjax.system.json import number, numbers, to_plain
from oarjax.training.held_out import per_problem

INTERVALS = "95% intervals over problems, Student's t (Wilson's where all problems agree)"


def benchmark_result(records: Sequence[dict[str, Any]], *, samples: int) -> dict[str, Any]:
    """Compute the figures of one benchmark from its samples, with the numbers of their votes, in any order."""
    rows = sorted(records, key=lambda r: (r["problem"], r["sample"]))
    groups = [rows[at : at + samples] for at in range(0, len(rows), samples)]
    scores = np.asarray([[number(r["score"]) for r in group] for group in groups], float)
    by_problem = per_problem(scores, np.asarray([[r["vote"] for r in group] for group in groups], int))
    within = bool(((scores >= 0) & (scores <= 1) | np.isnan(scores)).all())
    figures = {
        name: (share_interval if within or name != f"avg@{samples}" else mean_interval)(values)
        for name, values in by_problem.items()
    }
    return {
        "problems": len(groups),
        "samples": samples,
        "figures": {name: _plain(figure) for name, figure in figures.items()},
        "length": float(np.mean([r["tokens"] for r in rows])),
        "truncated": float(np.mean([not r["ended"] for r in rows])),
        "no_answer": float(np.mean([r["answer"] is None for r in rows])),
        "ungraded": int(np.isnan(scores).sum()),
        "verdicts": dict(sorted(Counter(r["verdict"] for r in rows).items())),
        "by_problem": {"problem": [group[0]["problem"] for group in groups]}
        | {name: to_plain(values) for name, values in by_problem.items()},
    }


def print_results(console: Console, result: dict[str, Any]) -> None:
    """Print a table with a column for each benchmark."""
    benchmarks = result["benchmarks"]
    table = Table()
    table.add_column("")
    for benchmark in benchmarks:
        table.add_column(Text(visible(benchmark)), justify="right")
    table.add_row("problems", *[str(f["problems"]) for f in benchmarks.values()])
    for name in dict.fromkeys(name for f in benchmarks.values() for name in f["figures"]):
        table.add_row(name, *[per_cent(f["figures"].get(name)) for f in benchmarks.values()])
    table.add_row("length", *[f"{f['length']:.0f}" for f in benchmarks.values()])
    table.add_row("truncated", *[f"{f['truncated']:.1%}" for f in benchmarks.values()])
    table.add_row("no answer", *[f"{f['no_answer']:.1%}" for f in benchmarks.values()])
    table.add_row("ungraded", *[str(f["ungraded"]) for f in benchmarks.values()])
    console.print(table)
    console.print(f"Per cent, {INTERVALS}.", style="dim", markup=False)


def per_cent(figure: dict[str, Any] | None) -> str:
    """Format as ``45.6 (41.2 to 50.1)``; n/a if nothing is known."""
    if figure is None or figure["value"] is None:
        return "n/a"
    if figure["low"] is None:
        return f"{100 * figure['value']:.1f}"
    return f"{100 * figure['value']:.1f} ({100 * figure['low']:.1f} to {100 * figure['high']:.1f})"


# Two evaluations --------------------------------------------------------------------------------------------------


def read_result(path: Path) -> dict[str, Any]:
    """Read a results.json, or the one in a folder.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        inside = sorted(path.glob("evaluate/*/results.json"))
        hint = f"; in this run lies {visible(str(inside[0].parent))}" if inside else ""
        raise ConfigError(f"{file}: cannot be read ({error}); expected results.json of oarjax evaluate{hint}") from None
    benchmarks = tree.get("benchmarks") if isinstance(tree, dict) else None
    if not isinstance(benchmarks, dict) or not all(map(_is_compared, benchmarks.values())):
        raise ConfigError(f"{file}: not the results of oarjax evaluate; expected its results.json or its folder")
    return tree


class _Compared(BaseModel):
    """The fields of a benchmark's results that a comparison reads."""

    data: str
    settings: dict[str, Any]
    by_problem: dict[str, list[float | None]]


def _is_compared(tree: Any) -> bool:
    try:
        values = _Compared.model_validate(tree).by_problem
    except ValidationError:
        return False
    return "problem" in values and len(set(map(len, values.values()))) == 1


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compute paired differences, ours - theirs, of every figure that both have on a common benchmark.

    Raises:
        ConfigError: no benchmark in common, or one with other problems.
    """
    common = [name for name in ours["benchmarks"] if name in theirs["benchmarks"]]
    if not common:
        raise ConfigError(
            f"the two evaluations share no benchmark: {', '.join(ours['benchmarks'])} and "
            f"{', '.join(theirs['benchmarks'])}; evaluate both on the same --data"
        )
    out = {}
    for name in common:
        a, b = ours["benchmarks"][name], theirs["benchmarks"][name]
        if a["data"] != b["data"] or a["by_problem"]["problem"] != b["by_problem"]["problem"]:
            raise ConfigError(
                f"{name}: the two evaluations have different problems and cannot be paired; evaluate both on the same "
                "--data"
            )
        figures = [f for f in a["by_problem"] if f in b["by_problem"] and f != "problem"]
        out[name] = {
            "figures": {
                f: _plain(paired_difference(*(np.array(numbers(e["by_problem"][f])) for e in (a, b)))) for f in figures
            },
            "settings": {
                key: [a["settings"].get(key), b["settings"].get(key)]
                for key in sorted(a["settings"] | b["settings"])
                if a["settings"].get(key) != b["settings"].get(key)
            },
        }
    return {"benchmarks": out}


def print_comparison(console: Console, comparison: dict[str, Any]) -> None:
    table = Table()
    for heading in ("benchmark", "figure", "difference in points", "problems"):
        table.add_column(heading, justify="right" if heading[0] in "dp" else "left")
    for benchmark, compared in comparison["benchmarks"].items():
        for name, figure in compared["figures"].items():
            table.add_row(Text(visible(benchmark)), name, per_cent(figure), str(figure["problems"]))
    console.print(table)
    console.print("First minus second, paired by problem; 95% intervals, Student's t.", style="dim", markup=False)
    for benchmark, compared in comparison["benchmarks"].items():
        if compared["settings"]:
            differ = ", ".join(f"{key} {a!r} and {b!r}" for key, (a, b) in compared["settings"].items())
            console.print(visible(f"{benchmark}: the settings differ: {differ}"), markup=False)


def _plain(figure: Interval) -> dict[str, Any]:
    """Return a figure as results.json has it; null where it is not known."""
    ends = {"value": figure.mean, "low": figure.low, "high": figure.high}
    return to_plain(ends | {"problems": figure.count})
