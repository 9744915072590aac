"""Write what is computed of the races into their pages: power, medians, edges, and the outcome of primary tests.

python docs/make_power.py            rewrites the tables of results.md and results_appendix.md
python docs/make_power.py --print    prints the one of power instead

All numbers are from docs/data/study_*.json, as oarjax study writes them to study.json, and from ablations_*.jsonl.
Of what ``oarjax study --page`` pasted, the tables of arms and of primary comparisons are written anew.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from oarjax.stats import Interval, detectable_effect, mean_interval, paired_difference, paired_p_value
from oarjax.tools.study.config import load_study
from oarjax.tools.study.page import arms_table, between, points_of, primaries_table, share, table
from oarjax.tools.study.results import collect, plan_so_far

HERE = Path(__file__).resolve().parent
PAGE, FIRST, LAST = HERE / "results_appendix.md", "<!-- power -->", "<!-- end of power -->"
SHORT_FIRST, SHORT_LAST = "<!-- without filler -->", "<!-- end of without filler -->"
RACE, RACE_FIRST, RACE_LAST = HERE / "results.md", "<!-- race -->", "<!-- end of race -->"
RACES = {
    "study_forks": "forks, L = 8",
    "study_forks_copy_0": "forks, L = 0",
    "study_forks_copy_24": "forks, L = 24",
    "study_forks_copy_64": "forks, L = 64",
    "study_forks_echo_8": "echo, L = 8",
    "study_stories": "stories",
    "study_demo_rates": "demo",
}
"""Files of the races that chose their rates, and the names of their tasks."""
MORE = {"study_forks_copy_0": ("study_forks_copy_0_rest",)}
"""Further seeds of a race."""


NAMES = {"truth": "truth, through OAR's gate", "truth, level": "truth, gate by level"}
"""What the page of results calls arms whose names say too little there."""
ABLATIONS = {
    "ablations_forks": [],
    "ablations_demo": ["base=demo.yaml", "base.optim.lr=1e-4", "run_dir=runs/ablations-demo"],
}
"""Of study_ablations, which is kept as records of its runs: overrides of each task."""


def main() -> None:
    """Write the tables, or print the one of power."""
    if sys.argv[1:] == ["--print"]:
        print(power())
        return
    PAGE.write_text(appendix(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    RACE.write_text(results(RACE.read_text(encoding="utf-8")), encoding="utf-8")


def appendix(text: str) -> str:
    """Return the appendix with the tables that its data give."""
    studies = re.compile(r"<!-- study ([^\n]+) -->.*?<!-- end of study \1 -->", re.DOTALL)
    text = studies.sub(lambda study: renewed(study[0], _read(study[1].replace("-", "_"))), text)
    for first, last, made in ((FIRST, LAST, power), (SHORT_FIRST, SHORT_LAST, without_filler)):
        text = between(text, first, last, made())
    return text


def results(text: str) -> str:
    """Return the page of results with the table of the race on forks."""
    return between(text, RACE_FIRST, RACE_LAST, race())


def renewed(study: str, tree: dict[str, Any]) -> str:
    """Return a pasted study with the tables of its arms and its primary comparisons written anew."""
    tables = {"| arm | seeds |": arms_table(tree["arms"])}
    if "primaries" in tree:
        tests = [test | _paired(tree["arms"], test["arm"], test["against"]) for test in tree["primaries"]]
        tables["| comparison |"] = primaries_table(tests)
    for start, rows in tables.items():
        old = re.search(rf"^{re.escape(start)}.*\n(\|.*\n)+", study, re.MULTILINE)
        if old is None:
            raise ValueError(f"make_power: the study has no table that begins with {start}")
        study = study[: old.start()] + table(rows) + study[old.end() :]
    return study


def race() -> str:
    """Return the table of the race on forks with 8 letters of filler."""
    tree = _read("study_forks")
    plain, control = (tree["differences"][name] for name in ("GRPO", "permuted OAR-P"))
    titles = "forks, 8 letters of filler; rate; area; median; - GRPO; median; - permuted; - GRPO, equal FLOPs"
    rows = [[*titles.split("; "), "below 50% at the end"]]
    for name, arm in tree["arms"].items():
        gap = plain.get(name)
        cells = ["", "", points_of(control.get(name, {}).get("area")), ""]
        if gap:
            above = "**" if gap["area"][1] > 0 else ""
            median = _paired(tree["arms"], name, "GRPO")["median"]
            cells[:2] = [f"{above}{points_of(gap['area'])}{above}", f"{100 * median:+.1f}"]
            cells[3] = points_of(gap["area_flops"])
        median = f"{100 * np.median(_column(arm, 'area')):.1f}%"
        low = f"{sum(x < 0.5 for x in _column(arm, 'final'))} of {len(arm['by_seed'])}"
        rate = f"{tree['choose']['chosen'][name]:.0e}".replace("e-0", "e-")
        rows.append([NAMES.get(name, name), rate, share(arm["area"]), median, *cells, low])
    return table(rows)


def without_filler() -> str:
    """Return the table of the race on forks without filler, over both of its files."""
    rows = [["arm", "area", "median", "- GRPO", "median", "p, not adjusted"]]
    for name in _read("study_forks_copy_0")["arms"]:
        runs, plain = (_areas("study_forks_copy_0", arm) for arm in (name, "GRPO"))
        areas, theirs = (np.array([each[seed] for seed in plain]) for each in (runs, plain))
        cells = [share(_triple(mean_interval(areas))), f"{100 * np.median(areas):.1f}%", "", "", ""]
        if name != "GRPO":
            cells[2] = points_of(_triple(paired_difference(areas, theirs)))
            cells[3:] = [f"{100 * np.median(areas - theirs):+.1f}", f"{paired_p_value(areas, theirs):.2g}"]
        rows.append([name, *cells])
    return table(rows)


def power() -> str:
    """Return a row per race, in Markdown."""
    titles = (
        "task; compared; seeds; SD of a pair; detectable at 80%; measured, median; median areas: GRPO, 2x prompts, arm"
    )
    rows = [[*titles.split("; "), "rate at the grid's edge"]]
    for file, task in RACES.items():
        tree = _read(file)
        arm = next(name for name in ("OAR-P", "OAR-L") if name in tree["arms"])
        areas = {name: _areas(file, name) for name in ("GRPO", "GRPO, 2x rollouts", arm)}
        both = sorted(set(areas["GRPO"]) & set(areas[arm]))
        differences = 100 * np.array([areas[arm][seed] - areas["GRPO"][seed] for seed in both])
        sd = float(differences.std(ddof=1))
        medians = ", ".join(f"{100 * np.median(list(each.values())):.1f}%" for each in areas.values())
        chosen, values = tree["choose"]["chosen"], tree["choose"]["values"]
        edge = {"highest": max(values), "lowest": min(values)}
        at = [f"{sum(rate == value for rate in chosen.values())} {name}" for name, value in edge.items()]
        seen = f"{differences.mean():+.1f}, {np.median(differences):+.1f}"
        cells = [f"{arm} - GRPO", str(len(both)), f"{sd:.1f}", f"{detectable_effect(sd, len(both)):.1f}", seen, medians]
        rows.append([task, *cells, f"{', '.join(at)} of {len(chosen)} arms"])
    return table(rows)


def _paired(arms: dict[str, Any], arm: str, against: str) -> dict[str, float]:
    """Return the median of the paired differences of two arms' areas, and the effect that their spread detects."""
    ours, theirs = (arms[name]["by_seed"] for name in (arm, against))
    gaps = np.array([ours[seed]["area"] - theirs[seed]["area"] for seed in ours if seed in theirs])
    return {"median": float(np.median(gaps)), "detects": detectable_effect(float(gaps.std(ddof=1)), len(gaps))}


def _triple(interval: Interval) -> list[float]:
    return [interval.mean, interval.low, interval.high]


def _column(arm: dict[str, Any], measure: str) -> list[float]:
    return [run[measure] for run in arm["by_seed"].values()]


@cache
def _read(file: str) -> dict[str, Any]:
    if file in ABLATIONS:
        changes = [*ABLATIONS[file], f"records={HERE / 'data' / file}.jsonl"]
        return collect(plan_so_far(load_study(HERE.parent / "configs" / "study_ablations.yaml", changes)))
    return json.loads((HERE / "data" / f"{file}.json").read_text(encoding="utf-8"))


def _areas(file: str, arm: str) -> dict[str, float]:
    """Return an arm's areas by seed, of all files of a race."""
    runs: dict[str, float] = {}
    for each in (file, *MORE.get(file, ())):
        runs |= {seed: run["area"] for seed, run in _read(each)["arms"][arm]["by_seed"].items()}
    return runs


if __name__ == "__main__":
    main()
