"""Write what the races could have shown into docs/results_appendix.md: spread, detectable effect, medians, edges.

python docs/make_power.py            rewrites the table between the page's marks
python docs/make_power.py --print    prints it instead

All numbers are from docs/data/study_*.json, as oarjax study writes them to study.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from oarjax.stats import detectable_effect

HERE = Path(__file__).resolve().parent
PAGE, FIRST, LAST = HERE / "results_appendix.md", "<!-- power -->", "<!-- end of power -->"
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


def main() -> None:
    """Write the table, or print it."""
    if sys.argv[1:] == ["--print"]:
        print(table())
        return
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(FIRST)[0], text.split(LAST)[1]
    PAGE.write_text(f"{before}{FIRST}\n\n{table()}\n{LAST}{after}", encoding="utf-8")


def table() -> str:
    """Return a row per race, in Markdown."""
    rows = [
        "| task | compared | seeds | SD of a pair | detectable at 80% | measured "
        "| median areas: GRPO, 2x prompts, arm | rate at the grid's edge |",
        "|---|---|---|---|---|---|---|---|",
    ]
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
        rows.append(
            f"| {task} | {arm} - GRPO | {len(both)} | {sd:.1f} | {detectable_effect(sd, len(both)):.1f} | "
            f"{differences.mean():+.1f} | {medians} | {', '.join(at)} of {len(chosen)} arms |"
        )
    return "\n".join(rows) + "\n"


def _read(file: str) -> dict[str, Any]:
    return json.loads((HERE / "data" / f"{file}.json").read_text(encoding="utf-8"))


def _areas(file: str, arm: str) -> dict[str, float]:
    """Return an arm's areas by seed, of all files of a race."""
    runs: dict[str, float] = {}
    for each in (file, *MORE.get(file, ())):
        runs |= {seed: run["area"] for seed, run in _read(each)["arms"][arm]["by_seed"].items()}
    return runs


if __name__ == "__main__":
    main()
