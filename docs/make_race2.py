"""Write what the second race's records say into docs/race2.md: runs, areas by rate, seconds, what confirming detects.

python docs/make_race2.py            rewrites the tables between the page's marks
python docs/make_race2.py --print    prints them instead

All numbers are from docs/data/race2_*.jsonl, to which oarjax study adds a line per finished run, and from
docs/data/values_*.json, the "values" of the credit.json that oarjax credit writes with lab.continuations.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from oarjax.stats import detectable_effect
from oarjax.tools.study.config import StudyConfig, load_study
from oarjax.tools.study.page import arms_table, difference_table, primaries_table, table
from oarjax.tools.study.results import collect, plan_so_far

HERE = Path(__file__).resolve().parent
PAGE, FIRST, LAST = HERE / "race2.md", "<!-- records -->", "<!-- end of records -->"
MORE = [*range(4, 52)]
"""Seeds that confirm where the study's would have detected too little; docs/race2.md says why."""
TASKS = {
    "race2_forks_copy": ("forks, copy", "study_race2_forks", "{kind: copy, filler: 8}", None),
    "race2_forks_echo": ("forks, echo", "study_race2_forks", "{kind: echo, filler: 8}", MORE),
    "race2_forks_uneven": ("forks, uneven", "study_race2_forks", "{kind: copy, filler: 8, uneven: 0.35}", MORE),
    "race2_stories": ("stories", "study_race2_stories", None, None),
    "race2_demo": ("demo", "study_race2_demo", None, None),
}
"""Files of records, the names of their tasks, their studies, the kind of forks, and seeds other than the study's."""

FORKS = ("data.train", "data.eval", "sft.data")
"""Where a study's base says which forks."""

VALUED = """### Are the values right?

v(a) - b against Q(a) - V, the mean reward of 32 sampled continuations of every listed token, on the warm start of seed
0 (of the demo: that of the [credit lab](credit_lab.md)'s policy), at 2 places of a completion with the 4 likeliest
tokens and the drawn one each. "At most" is the correlation that the noise of Q leaves; "same sign" is of the tokens
whose |Q - V| exceeds two standard errors. First and second writings of echo's choices are places that no finder of the
package gives: whoever knows the task takes them.
"""


def main() -> None:
    """Write the tables, or print them."""
    if sys.argv[1:] == ["--print"]:
        print(tables())
        return
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(FIRST)[0], text.split(LAST)[1]
    PAGE.write_text(f"{before}{FIRST}\n\n{tables()}\n{LAST}{after}", encoding="utf-8")


def tables() -> str:
    """Return a table per task that has records: an arm's mean area and seeds by rate, and the seconds of a run."""
    parts = []
    for file, (task, name, forks, seeds) in TASKS.items():
        path = HERE / "data" / f"{file}.jsonl"
        if not path.exists():
            parts.append(f"{task}: no run has finished.\n")
            continue
        study = study_of(path, name, forks, seeds)
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        choosing = [record for record in records if record["value"] is not None]
        parts.append(
            f"{task}: {len(choosing)} runs that choose, from {commits_of(choosing)}.\n\n{areas_table(choosing)}"
        )
        parts += [f"{line}\n" for line in detected(choosing, len(study.seeds))]
        if confirming := [record for record in records if record["value"] is None]:
            runs = len(study.seeds) * len(study.arms)
            said = f"{task}: {len(confirming)} of {runs} runs that confirm have finished, from {commits_of(confirming)}"
            unfinished = len(confirming) < runs
            parts.append(f"{said}; they are compared once all have.\n" if unfinished else f"{said}.\n")
            parts += [] if unfinished else compared(study)
    return "\n".join([*parts, VALUED, valued()])


def study_of(records: Path, name: str, forks: str | None, seeds: list[int] | None) -> StudyConfig:
    """Load the study of a task, with the records of its runs."""
    overrides = [] if forks is None else [f"base.{data}.forks={forks}" for data in FORKS]
    overrides += [] if seeds is None else [f"seeds={seeds}"]
    return load_study(HERE.parent / "configs" / f"{name}.yaml", [f"records={records}", *overrides])


def compared(study: StudyConfig) -> list[str]:
    """Return the primary comparisons, and tables of areas by arm and of differences to each of ``against``."""
    results = collect(plan_so_far(study))
    parts = ["Areas paired by seed, Student's t, adjusted by Holm over these comparisons:\n"]
    parts.append(table(primaries_table(results["primaries"])))
    parts.append(table([row[:4] for row in arms_table(results["arms"])]))
    for baseline, differences in results["differences"].items():
        header, *rows = difference_table(differences)
        columns = [at for at, title in enumerate(header) if "time" not in title]  # runs shared the machine
        parts.append(f"Differences to {baseline}, paired by seed, in points of pass@1, not corrected:\n")
        parts.append(table([[row[at] for at in columns] for row in (header, *rows)]))
    return parts


def commits_of(records: list[dict[str, Any]]) -> str:
    """Name the commits that runs came from."""
    return ", ".join(sorted({record["commit"] for record in records}))


def valued() -> str:
    """Return a table of how v(a) - b compares with Q(a) - V of forced branches, by task and finder of the places."""
    head = ["task", "places by", "completions", "correlation", "at most", "same sign"]
    head += ["v - Q of the drawn token", "of the others"]
    rows, notes = [head], list[str]()
    for file, (task, *_) in TASKS.items():
        path = HERE / "data" / f"{file.replace('race2', 'values')}.json"
        if not path.exists():
            rows.append([task, "not measured", *[""] * (len(head) - 2)])
            continue
        tree = json.loads(path.read_text(encoding="utf-8"))
        for by, found in tree["by"].items():
            m, a, b = found["correlation"]
            cells = [f"{m:.2f} ({a:.2f} to {b:.2f})", f"{found['ceiling'][0]:.2f}"]
            if found["sign"] is None:
                cells.append("no clear case")
            else:
                m, a, b = np.clip(found["sign"], 0, 1)  # a share, by jackknife
                cells.append(f"{m:.2f} ({a:.2f} to {b:.2f})")
            cells += [f"{m:+.2f} ({a:+.2f} to {b:+.2f})" for m, a, b in (found["bias_drawn"], found["bias_others"])]
            rows.append([task, by, str(tree["completions"]), *cells])
        if places := tree.get("places"):
            shares = ", ".join(f"{count} {name}" for name, count in places.items() if name != "of")
            notes.append(f"The places of {places['of']} on {task} are {shares}.\n")
    return "\n".join([table(rows), *notes])


def areas_table(records: list[dict[str, Any]]) -> str:
    """Return the mean area over seeds by arm and rate, seeds in brackets, and the rate that would be chosen by now."""
    areas, seconds = defaultdict[tuple[str, float], list[float]](list), defaultdict[str, list[float]](list)
    for record in records:
        arm = record["arm"].rpartition(", ")[0]
        areas[arm, record["value"]].append(record["measures"]["area"])
        seconds[arm].append(record["seconds"])
    rates = sorted({rate for _, rate in areas})
    rows = [["arm", *(f"{rate:g}" for rate in rates), "best by now", "seconds of a run, median"]]
    for arm in seconds:
        cells = [areas.get((arm, rate), []) for rate in rates]
        shown = [f"{100 * np.mean(cell):.1f}% ({len(cell)})" if cell else "" for cell in cells]
        ran = {rate: cell for rate, cell in zip(rates, cells) if cell}
        best = best_rate(ran)
        named = f"{best:g}" + ", an edge" * (best in (min(ran), max(ran)))
        rows.append([arm, *shown, named, f"{np.median(seconds[arm]):.0f}"])
    return table(rows)


def best_rate(areas: dict[float, list[float]]) -> float:
    """Return the rate of the largest mean area less its standard error, on as many seeds as three rates have."""
    most = sorted(map(len, areas.values()))[-3]
    full = {rate: cell[:most] for rate, cell in areas.items() if len(cell) >= most}
    return max(full, key=lambda x: np.mean(full[x]) - (np.std(full[x], ddof=1) / most**0.5 if most > 1 else 0))


def detected(records: list[dict[str, Any]], seeds: int) -> list[str]:
    """Say what a difference to GRPO 4x8 the confirming seeds detect, at the arms' best rates with two seeds or more."""
    best: dict[str, dict[int, float]] = {}
    for arm in dict.fromkeys(record["arm"].rpartition(", ")[0] for record in records):
        areas = defaultdict[float, dict[int, float]](dict)
        for r in records:
            if r["arm"].rpartition(", ")[0] == arm:
                areas[r["value"]][r["seed"]] = r["measures"]["area"]
        best[arm] = areas[best_rate({rate: list(by_seed.values()) for rate, by_seed in areas.items()})]
    lines = []
    plain = best.pop("GRPO 4x8", {})
    for arm, areas in best.items():
        both = sorted(set(areas) & set(plain))
        if len(both) > 1:
            sd = 100 * float(np.std([areas[s] - plain[s] for s in both], ddof=1))
            lines.append(
                f"{arm} - GRPO 4x8: SD of a pair {sd:.1f} points over {len(both)} seeds; {seeds} seeds detect "
                f"{detectable_effect(sd, seeds):.1f} with 80% power."
            )
    return lines


if __name__ == "__main__":
    main()
