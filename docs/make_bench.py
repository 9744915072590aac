"""Write what ``oarjax bench`` measured into the tables of docs/speed.md and docs/cost.md.

python docs/make_bench.py FILE...
    takes JSON documents of the command, alone on the machine, into docs/data: work on completions of equal length into
    bench.json, W6 into bench_steps.json, W8 to W11 into bench_ragged.json, with this tree's commit: run it where they
    were measured
python docs/make_bench.py
    writes the tables from the numbers that are there

oarjax bench --only W1,W2,W3,W4 --against torch --json > FILE
oarjax bench --only W6 --json > FILE
oarjax bench --only W8 --against torch --repeats 8 --json > FILE    and so on with W9, W10 and W11

Ratios to the earlier commit are those of docs/make_before.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oarjax.tools.study.page import between, table

HERE = Path(__file__).resolve().parent
PAGE, COSTS, DATA = HERE / "speed.md", HERE / "cost.md", HERE / "data"
EQUAL = ("<!-- bench, equal lengths -->", "<!-- end of bench, equal lengths -->")
RAGGED = ("<!-- bench, lengths that differ -->", "<!-- end of bench, lengths that differ -->")
STEPS = ("<!-- bench, steps -->", "<!-- end of bench, steps -->")
SIDES = {
    "by length, finer": "finer buckets",
    "to the longest": "padded to the longest",
    "generate": "`generate`",
    "prompt per row": "every row's prompt anew",
    "torch, to the longest": "torch, padded to the longest",
}
"""Names of what a row is compared with, for those that ``oarjax bench`` names otherwise."""


def main() -> None:
    """Take documents, and write the tables."""
    found = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    for name, part in (("bench", "models"), ("bench_steps", "credit"), ("bench_ragged", "ragged")):
        if documents := [rounded(document) for document in found if document[part]]:
            keep(DATA / f"{name}.json", documents, part)
    for page, of in ((PAGE, written), (COSTS, steps)):
        page.write_text(of(page.read_text(encoding="utf-8")), encoding="utf-8")


def keep(path: Path, documents: Sequence[dict[str, Any]], part: str) -> None:
    """Write documents of one commit and machine as one file: its settings, and each with its peaks and load."""
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.check_output(git, cwd=HERE, text=True).strip()
    about = {key: documents[0][key] for key in ("versions", "platform", "device", "threads", "repeats")}
    for document in documents:
        if {key: document[key] for key in about} != about:
            sys.exit(f"{path.name}: the documents differ in versions, device, threads or repeats")
    own = ("peak", "load_average_before", "load_average_after", part)
    made = {"commit": commit, "date": time.strftime("%Y-%m-%d"), **about}
    made["documents"] = [{key: document[key] for key in own} for document in documents]
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def written(page: str) -> str:
    """Return the page with its tables written anew."""
    equal, ragged, before = (
        json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("bench", "bench_ragged", "bench_before")
    )
    page = between(page, *EQUAL, f"{machine(equal, 'bench')}\n\n{equal_table(equal)}")
    return between(page, *RAGGED, f"{machine(ragged, 'bench_ragged')}\n\n{ragged_table(ragged, before)}")


def steps(page: str) -> str:
    """Return the page of costs with the tables of whole steps written anew."""
    made = json.loads((DATA / "bench_steps.json").read_text(encoding="utf-8"))
    parts = [f"{machine(made, 'bench_steps')}\n"]
    for policy in (policy for document in made["documents"] for policy in document["credit"]):
        by = {(row["method"], row["rows"]): row for row in policy["rows"]}
        rows = [["method", "of GRPO", "FLOPs of GRPO", "goal", "half skipped", "FLOPs"]]
        for (method, of), row in by.items():
            if of == "all":
                half, goal = by[method, "half skipped"], row["goal"]
                rows.append([method, *taken(row), "" if goal is None else f"{goal:g}", *taken(half)])
        whole, half = (
            statistics.median(row["grpo"]["seconds"]["median"] for row in policy["rows"] if row["rows"] == of)
            for of in ("all", "half skipped")
        )
        said = f"**{policy['name']}**, {policy['what']}; GRPO takes {whole:.2f} s ({half:.2f} s with half skipped):"
        parts += [f"{said}\n", table(rows)]
    return between(page, *STEPS, "\n".join(parts))


def taken(row: dict[str, Any]) -> list[str]:
    """Write a step's seconds and its FLOPs over GRPO's."""
    return [spread(row["of_grpo"], ".2f"), f"{row['flops_of_grpo']:.2f}"]


def machine(made: dict[str, Any], name: str) -> str:
    """Say what documents were measured on."""
    v, documents = made["versions"], made["documents"]
    sides = [side for side in ("flops", "torch") if documents[0]["peak"].get(side)]
    ours, *theirs = (low_high([d["peak"][side] / 1e9 for d in documents], ".0f") for side in sides)
    packages = f"torch {v['torch'].partition('+')[0]}, transformers {v['transformers']}, " if theirs else ""
    beside = f" and {theirs[0]} by torch" if theirs else ""
    before, after = (low_high([d[f"load_average_{when}"] for d in documents], ".1f") for when in ("before", "after"))
    return (
        f"{made['threads']} CPU threads, medians of {made['repeats']} warm runs (minimum to maximum), ratios "
        f"pair by pair ({packages}jax {v['jax']}; products of 1,024 x 1,024 reach {ours} GFLOP/s by XLA{beside}; "
        f"load {before} before, {after} after; commit {made['commit']}, [numbers](data/{name}.json)):"
    )


def equal_table(made: dict[str, Any]) -> str:
    """Tabulate work on completions of equal length: ours, and torch's seconds over ours."""
    models = [model for document in made["documents"] for model in document["models"]]
    sizes = [f"{model['parameters'] / 1e6:.1f}M" for model in models]
    rows = [["work", *(part for size in sizes for part in (f"oarjax, {size}", "torch / oarjax"))]]
    for found in zip(*(model["rows"] for model in models)):
        cells = [f"{found[0]['name']}, {found[0]['what']}"]
        for row in found:
            value, more = row["ours"]["value"]["median"], row["ours"].get("updates_per_sequence")
            shown = f"{value:,.0f} tokens/s" if row["unit"] == "tokens/s" else f"{value:.3g} {row['unit']}"
            cells += [shown + (f" = {more:.2f} updates" if more else ""), spread(row["speedup"], ".1f")]
        rows.append(cells)
    return table(rows)


def ragged_table(made: dict[str, Any], before: dict[str, Any]) -> str:
    """Tabulate work on completions that differ in length: our first way, and the others' seconds over its."""
    found = [work for document in made["documents"] for work in document["ragged"]]
    rows, compiled = [["work", "oarjax", "compared with", "its figure", "ratio"]], list[str]()
    earlier_commit = f"commit {before['commits']['before'][:7]}"
    for work in sorted(found, key=lambda work: int(work["workload"][1:])):
        for name in dict.fromkeys(row["name"] for row in work["rows"]):
            first, *others = (row for row in work["rows"] if row["name"] == name)
            label = work["workload"] if name == "rollout" else f"{work['workload']}, {name}"
            ours = figure(first)
            if earlier := before["works"].get(label.replace(",", "")):
                then, now = earlier["seconds"]["before"], earlier["seconds"]["now"]
                ratios = spread(span([a / b for a, b in zip(then, now)]), ".2f")
                rows.append([label, seconds(span(now)), earlier_commit, seconds(span(then)), ratios])
                label = ""
            for other in others:
                rows.append([label, ours, SIDES.get(other["side"], other["side"]), figure(other), ratio(other)])
                label, ours = "", ""
        compiled.append(f"{work['compilations']} programs in {work['compile_seconds']:.0f} s ({work['workload']})")
    return f"{table(rows)}\nCompiled beside: {', '.join(compiled)}.\n\n{padding(found)}"


def padding(found: Sequence[dict[str, Any]]) -> str:
    """Say what share of the update's positions holds no token, and of the rollout's rows is in use."""
    of = {(work["workload"], row["name"], row["side"]): row for work in found for row in work["rows"]}
    coarse, fine, theirs = (
        of["W9", "update", side]["padding"]["median"] for side in ("by length", "by length, finer", "torch, by length")
    )
    ours, whole = (of["W8", "rollout", side]["occupancy"]["median"] for side in ("oarjax", "generate"))
    return (
        f"W9's update pads {coarse:.0%} of its positions in buckets of 64, {fine:.0%} in buckets of 16; torch "
        f"{theirs:.0%}. Of the rows that W8 decodes {ours:.0%} are in use, of `generate`'s {whole:.0%}."
    )


def figure(row: dict[str, Any]) -> str:
    """Write tokens per second of a rollout, and seconds of other work."""
    if row["name"] == "rollout":
        return f"{spread(row['tokens_per_second'], ',.0f')} tokens/s"
    return seconds(row["seconds"])


def seconds(values: Mapping[str, float]) -> str:
    """Write seconds with their range."""
    return spread(values, ".3g") + " s"


def ratio(row: dict[str, Any]) -> str:
    """Write how many times a row's seconds are the first's."""
    return spread(row["times_first"], ".2f")


def span(values: Sequence[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def low_high(values: Sequence[float], form: str) -> str:
    """Write the smallest and the largest, or one where they look alike."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def spread(values: Mapping[str, float], form: str) -> str:
    """Write a median with its range."""
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


def rounded(value: Any) -> Any:
    """Round numbers to five digits, and leave single runs out of spreads."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items() if name != "runs"}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
