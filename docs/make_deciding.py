"""Write into docs/gradients.md which noise foretells learning at equal rates: the gradient's, or its deciding part's.

python docs/make_deciding.py            rewrites the tables between the page's marks
python docs/make_deciding.py --print    prints them instead

Noises are from docs/data/deciding_*.json, as oarjax credit --gradients writes them to credit.json; areas are those of
the seeds that chose the rates of the first race, from docs/data/study_*.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oarjax.stats import paired_difference
from oarjax.tools.study.page import between, points_of, table

HERE = Path(__file__).resolve().parent
PAGE, FIRST, LAST = HERE / "gradients.md", "<!-- deciding -->", "<!-- end of deciding -->"
TASKS = {
    "forks, copy, L = 8": ("deciding_forks_copy", "study_forks"),
    "forks, echo, L = 8": ("deciding_forks_echo", "study_forks_echo_8"),
}
"""Files of the noises and of the race, by task."""
PREDICTORS = {"noise": "noise", "law": "law", "deciding": "deciding part"}
IN_RACE = {"truth through the gate": "truth"}
"""What the race calls methods that have another name in the lab."""
MORE_ROLLOUTS = {"GRPO, 2x rollouts": 2, "GRPO, 4x rollouts": 4}
"""Arms whose noise, of whatever part, is GRPO's over this number."""
RESAMPLES = 2000


class Task(NamedTuple):
    """Arms of a task with their noises over GRPO's, and their areas at every rate."""

    noises: dict[str, dict[str, Any]]  # arm -> predictor -> figure with interval
    rates: list[float]
    areas: np.ndarray  # [rates, arms, seeds]


def main() -> None:
    """Write the tables, or print them."""
    if sys.argv[1:] == ["--print"]:
        print(tables())
        return
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), FIRST, LAST, tables()), encoding="utf-8")


def tables() -> str:
    """Return a table of noises and areas per task, and one of how well each noise orders the arms."""
    tasks = {name: read_task(*files) for name, files in TASKS.items()}
    return "\n".join([*(noise_table(name, task) for name, task in tasks.items()), order_table(tasks)])


def read_task(noises: str, race: str) -> Task:
    """Read the arms that have both noises and areas."""
    methods = {method["name"]: method["figures"] for method in _read(noises)["gradients"]["methods"]}
    found = {IN_RACE.get(name, name): figures for name, figures in methods.items()}
    one = dict.fromkeys(PREDICTORS, 1.0)
    found |= {name: {p: {"mean": x / n, "low": None} for p, x in one.items()} for name, n in MORE_ROLLOUTS.items()}
    choose = _read(race)["choose"]
    arms = [name for name in choose["by_seed"] if name in found]
    seeds = [str(seed) for seed in choose["seeds"]]
    areas = [
        [[choose["by_seed"][arm][k][s]["area"] for s in seeds] for arm in arms] for k in range(len(choose["values"]))
    ]
    return Task({arm: found[arm] for arm in arms}, choose["values"], np.array(areas))


def noise_table(name: str, task: Task) -> str:
    """Return a row per arm: its noises, and the area less GRPO's at every rate."""
    rows = [[name, *PREDICTORS.values(), *(f"area - GRPO, {rate:g}" for rate in task.rates)]]
    plain = list(task.noises).index("GRPO")
    for number, (arm, noises) in enumerate(task.noises.items()):
        gaps = [paired_difference(at[number], at[plain]) for at in task.areas]
        cells = [points_of([gap.mean, gap.low, gap.high]) if arm != "GRPO" else "" for gap in gaps]
        rows.append([arm, *(_figure(noises[p]) for p in PREDICTORS), *cells])
    return table(rows)


def order_table(tasks: dict[str, Task]) -> str:
    """Return the rank correlation of less noise with more area over the arms, with bootstrap intervals over seeds."""
    rows = [["task, rate", *(f"by {name}" for name in PREDICTORS.values()), "deciding part less law"]]
    for name, task in tasks.items():
        noises = {p: np.array([_value(figures[p]) for figures in task.noises.values()]) for p in PREDICTORS}
        draws = np.random.default_rng(0).integers(0, task.areas.shape[-1], (RESAMPLES, task.areas.shape[-1]))
        for rate, areas in zip(task.rates, task.areas):
            seen = {p: order(x, areas.mean(1)) for p, x in noises.items()}
            drawn = {p: np.array([order(x, areas[:, seeds].mean(1)) for seeds in draws]) for p, x in noises.items()}
            cells = [_interval(seen[p], drawn[p]) for p in PREDICTORS]
            cells.append(_interval(seen["deciding"] - seen["law"], drawn["deciding"] - drawn["law"]))
            rows.append([f"{name}, {rate:g}", *cells])
    return table(rows)


def order(noise: np.ndarray, area: np.ndarray) -> float:
    """Return Spearman's correlation of area with less noise; 1 where the arm of less noise always learns more."""
    return float(np.corrcoef(_ranks(-noise), _ranks(area))[0, 1])


def _ranks(x: np.ndarray) -> np.ndarray:
    return np.array([np.mean(np.flatnonzero(np.sort(x) == value)) for value in x])


def _value(figure: dict[str, Any]) -> float:
    """Return a noise; infinity where the minibatches show no signal."""
    return np.inf if figure["mean"] is None or not np.isfinite(figure["mean"]) else figure["mean"]


def _figure(figure: dict[str, Any]) -> str:
    mean, low = figure["mean"], figure["low"]
    if not np.isfinite(_value(figure)):
        return "no signal"
    digits = 2 if mean < 10 else 0
    return f"{mean:.{digits}f}" + ("" if low is None or mean >= 10 else f" ±{mean - low:.2f}")


def _interval(value: float, drawn: np.ndarray) -> str:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})"


def _read(file: str) -> dict[str, Any]:
    return json.loads((HERE / "data" / f"{file}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
