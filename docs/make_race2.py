"""Write what the second race's records say into docs/race2.md: runs, areas by rate, seconds, what confirming detects.

python docs/make_race2.py            rewrites the tables between the page's marks, and the one of docs/credit.md
python docs/make_race2.py --print    prints the page's instead

All numbers are from docs/data/race2_*.jsonl, to which oarjax study adds a line per finished run, from
docs/data/values_*.json, the "values" of the credit.json that oarjax credit writes with lab.continuations, and from
docs/data/soft_gap.json, that metric by seed and iteration.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oarjax.stats import detectable_effect, holm, mean_interval, paired_p_value
from oarjax.tools.study.config import StudyConfig, load_study
from oarjax.tools.study.page import between, budget_text, primaries_table, share, table
from oarjax.tools.study.results import (
    RunMeasures,
    areas_at_equal_cost,
    areas_at_equal_kl,
    collect,
    measured_runs,
    plan_so_far,
)

HERE = Path(__file__).resolve().parent
PAGE, FIRST, LAST = HERE / "race2.md", "<!-- records -->", "<!-- end of records -->"
CREDIT, OF_CREDIT = HERE / "credit.md", ("<!-- signed values by task -->", "<!-- end of signed values by task -->")
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

Measured = dict[str, dict[int, RunMeasures]]
"""What runs measured, by arm and seed."""
Axes = dict[str, dict[str, dict[int, float]]]
"""Areas by axis, arm and seed."""
SPLITS, SINGLE, SIGNED = ("GRPO 4x8", "GRPO 16x2"), "batch 32x1", "signed values 32x1"
RANDOM = f"{SIGNED}, random places"

FORKS = ("data.train", "data.eval", "sft.data")
"""Where a study's base says which forks."""

CRITERIA = """### By the criteria

Points of area, paired by seed; p by Student's t, adjusted by Holm over the tasks that have confirmed, within an
axis. The best split is the one whose area less its standard error is larger on the seeds that choose.
"""

ENDS = """Where the axes end is what the cheapest arm of a seed spends, and the KL that the arm with the least drift
reaches: often of an arm that is not in a comparison. Medians over seeds, and signed values less the best split with
axes cut by these two alone; p not adjusted, and in no criterion. A rate that decays over 60 iterations has decayed
little where a share is small.
"""

VALUED = """### Are the values right?

v(a) - b against Q(a) - V, the mean reward of 32 sampled continuations of every listed token, on the warm start of seed
0, at 2 places of a completion with the 4 likeliest tokens and the drawn one each. "At most" is the correlation that the
noise of Q leaves; "same sign" is of the tokens
whose |Q - V| exceeds two standard errors. First and second writings of echo's choices are places that no finder of the
package gives: whoever knows the task takes them.
"""

GAPS = """### Is the soft reward unbiased?

`soft_gap`, the mean of p less R, in points: soft reward 32x1 on seeds 0 to 5 of forks and on those that confirm of
stories and the demo, run anew for it, each from its warm start and at the race's rate, over the second half of the
iterations.
"""


REST = """### What was left

On the demo OAR-P, OAR-L and OAR-P's hard gate on batch 32x1, and 128 rollouts an iteration as prompts and as groups;
batch 32x1 is the race's own. Then the baseline by problem, where 192 problems come ten times each. Last, forks copy
with 24 letters of filler per choice.
"""
REST_OF = {
    "race2_demo_rest": "demo, the rest",
    "race2_demo_problem": "demo, 192 problems",
    "race2_forks_24": "forks, copy, 24 letters",
}


def main() -> None:
    """Write the tables, or print them."""
    told = tasks()
    if sys.argv[1:] == ["--print"]:
        print(tables(told))
        return
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), FIRST, LAST, tables(told)), encoding="utf-8")
    CREDIT.write_text(between(CREDIT.read_text(encoding="utf-8"), *OF_CREDIT, signed_table(told)), encoding="utf-8")


def tasks() -> dict[str, Told]:
    """Return what the records of every task say."""
    return {task: told_of(file, task, *study) for file, (task, *study) in TASKS.items()}


def signed_table(told: dict[str, Told]) -> str:
    """Return signed values less other arms by task; bold where below 5% by Holm over a task's primary comparisons."""
    against = [(arm, arm, "equal rollouts") for arm in (*SPLITS, SINGLE, RANDOM)]
    against += [(f"{SPLITS[0]}, at {axis}", SPLITS[0], axis) for axis in ("equal FLOPs", "equal KL")]
    rows = [[f"{SIGNED} less", *(task.replace(",", "") for task in told)]]
    for title, arm, axis in against:
        cells = []
        for found in told.values():
            mean = mean_interval(gaps_of(found.axes[axis], SIGNED, arm))
            bold = "**" * (axis == "equal rollouts" and found.primaries[SIGNED, arm] < 0.05)
            cells.append(f"{bold}{mean.mean:+.1f} ±{mean.half:.1f}{bold}")
        rows.append([title, *cells])
    return table(rows)


def tables(told: dict[str, Told]) -> str:
    """Return what was measured by task, the criteria over the tasks, the values, and what the demo was left for."""
    parts, axes, splits, confirmed = [], dict[str, Axes](), dict[str, str](), dict[str, Measured]()
    for task, found in told.items():
        parts += found.parts
        if found.measured:
            axes[task], splits[task], confirmed[task] = found.axes, best_split(found.choose), found.measured
    parts += [CRITERIA, *judged(axes, splits), ENDS, ends_table(confirmed, splits)]
    parts += [VALUED, valued(), GAPS, gaps_table(), REST]
    rest = {file: told_of(file, task, f"study_{file}", None, None) for file, task in REST_OF.items()}
    parts += [part for found in rest.values() for part in found.parts]
    parts += ["Mean pass@1 there, by iteration:\n", curves_table(rest["race2_forks_24"].measured)]
    return "\n".join(parts)


class Told(NamedTuple):
    """What the records of a task say: text, and once all runs have finished what they measured."""

    parts: list[str]
    measured: Measured = {}  # noqa: RUF012
    axes: Axes = {}  # noqa: RUF012
    choose: dict[str, Any] = {}  # noqa: RUF012
    primaries: dict[tuple[str, str], float] = {}  # noqa: RUF012  p by Holm


def told_of(file: str, task: str, name: str, forks: str | None, seeds: list[int] | None) -> Told:
    """Tell every arm's area and seeds by rate, the seconds of a run, what confirming detects, and what it said."""
    path = HERE / "data" / f"{file}.jsonl"
    if not path.exists():
        return Told([f"{task}: no run has finished.\n"])
    study = study_of(path, name, forks, seeds)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    choosing, confirming = ([r for r in records if (r["value"] is None) == of] for of in (False, True))
    said = f"{task}: {len(choosing)} runs that choose, from {commits_of(choosing)}.\n\n"
    parts = [said + areas_table(choosing)] if choosing else []
    plan = plan_so_far(study)
    results = collect(plan)
    if results.get("budget", {}).get("pairs"):
        parts += [f"{line}\n" for line in budget_text(results["budget"]).splitlines()]
    if not confirming:
        return Told(parts)
    runs = len(study.seeds) * len(study.arms)
    said = f"{task}: {len(confirming)} of {runs} runs that confirm have finished, from {commits_of(confirming)}"
    if len(confirming) < runs:
        return Told([*parts, f"{said}; they are compared once all have.\n"])
    measured = {arm: measured_runs(runs) for arm, runs in plan.arms.items()}
    axes = axes_of(measured)
    parts += [f"{said}.\n", *compared(study, results, measured, axes)]
    primaries = {(test["arm"], test["against"]): test["holm"] for test in results["primaries"]}
    return Told(parts, measured, axes, results.get("choose") or {}, primaries)


def study_of(records: Path, name: str, forks: str | None, seeds: list[int] | None) -> StudyConfig:
    """Load the study of a task, with the records of its runs."""
    overrides = [] if forks is None else [f"base.{data}.forks={forks}" for data in FORKS]
    overrides += [] if seeds is None else [f"seeds={seeds}"]
    return load_study(HERE.parent / "configs" / f"{name}.yaml", [f"records={records}", *overrides])


def best_split(choose: dict[str, Any]) -> str:
    """Return the GRPO split whose area at its rate, less its standard error, is the larger on the seeds that choose."""

    def worth(arm: str) -> float:
        runs = choose["by_seed"][arm][choose["values"].index(choose["chosen"][arm])]
        return lower([run["area"] for run in runs.values()])

    return max(SPLITS, key=worth)


def compared(study: StudyConfig, results: dict[str, Any], measured: Measured, axes: Axes) -> list[str]:
    """Return the primary comparisons, the arms, and the differences to each of ``against`` on every axis."""
    parts = ["Areas paired by seed, Student's t, adjusted by Holm over these comparisons:\n"]
    parts.append(table(primaries_table(results["primaries"])))
    rows = [["arm", "seeds", "final pass@1", "median", "area", "median", "runs that end below their start"]]
    first = study.against[0]
    rows[0].append(f"FLOPs over those of {first}")
    for name, runs in measured.items():
        ends, areas = ([100 * getattr(run, part) for run in runs.values()] for part in ("final", "area"))
        worse = sum(run.final < run.curve[0][1] for run in runs.values())
        arm = results["arms"][name]
        shares = [share(arm["final"]), f"{np.median(ends):.1f}%", share(arm["area"]), f"{np.median(areas):.1f}%"]
        dearer = np.median([run.flops / measured[first][seed].flops for seed, run in runs.items()])
        rows.append([name, str(len(runs)), *shares, str(worse), f"{dearer:.1f}"])
    parts.append(table(rows))
    for baseline in study.against:
        rows = [["arm", *axes]]
        rows += [
            [name, *(text_of(gaps_of(areas, name, baseline)) for areas in axes.values())]
            for name in measured
            if name != baseline
        ]
        parts.append(f"Differences to {baseline}, paired by seed, in points of area, p not corrected:\n")
        parts.append(table(rows))
    return parts


def axes_of(measured: Measured) -> Axes:
    """Return every arm's area by seed on each axis."""
    rollouts = {name: {seed: run.area for seed, run in runs.items()} for name, runs in measured.items()}
    costs = {"equal FLOPs": "flops", "equal tokens": "tokens"}
    equal = {title: areas_at_equal_cost(measured, cost) for title, cost in costs.items()}
    return {"equal rollouts": rollouts, **equal, "equal KL": areas_at_equal_kl(measured)}


def gaps_of(areas: dict[str, dict[int, float]], arm: str, against: str) -> np.ndarray:
    """Return the differences of two arms by seed, in points; none where one of them was not measured."""
    ours, theirs = areas.get(arm, {}), areas.get(against, {})
    gaps = 100 * np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    return gaps[np.isfinite(gaps)]


def text_of(gaps: np.ndarray, p: float | None = None) -> str:
    """Write a mean difference with its interval, median and p (by t, or as given); where undecided what is detected."""
    if len(gaps) < 2:
        return ""
    p = paired_p_value(gaps, np.zeros(len(gaps))) if p is None else p
    found, chance = mean_interval(gaps), "< 0.001" if p < 0.001 else f"{p:.3f}"
    words = f"{found.mean:+.1f} ±{found.half:.1f}, median {np.median(gaps):+.1f}, p {chance}"
    return words if p < 0.05 else f"{words}, detects {detectable_effect(float(gaps.std(ddof=1)), len(gaps)):.1f}"


def judged(axes: dict[str, Axes], splits: dict[str, str]) -> list[str]:
    """Return the comparisons of the criteria by axis, p adjusted by Holm over the tasks that have confirmed."""
    comparisons = [
        (SIGNED, "the best split", splits, [*axes[next(iter(axes))]]),
        (SIGNED, SINGLE, dict.fromkeys(splits, SINGLE), ["equal rollouts"]),
        (SIGNED, "its random places", dict.fromkeys(splits, RANDOM), ["equal rollouts"]),
        (SINGLE, "the best split", splits, [*axes[next(iter(axes))]]),
        (
            SINGLE,
            "batch with that split",
            {t: s.replace("GRPO", "batch") for t, s in splits.items()},
            ["equal rollouts"],
        ),
    ]
    parts = []
    for arm, title, against, names in comparisons:
        rows = [["task", "against", *names]] + [[task, against[task]] for task in splits]
        for name in names:
            gaps = [gaps_of(axes[task][name], arm, against[task]) for task in splits]
            adjusted = holm([paired_p_value(g, np.zeros(len(g))) for g in gaps])
            for row, g, p in zip(rows[1:], gaps, adjusted):
                row.append(text_of(g, float(p)))
        parts += [f"{arm} less {title}:\n", table(rows)]
    return parts


def ends_table(confirmed: dict[str, Measured], splits: dict[str, str]) -> str:
    """Return where the axes of a task end, and the first comparison on axes that end where its own two arms do."""
    rows = [["task", "share of signed values' FLOPs", "of the best split's"]]
    rows[0] += ["KL at the end, of signed values, of the best split, nats"]
    rows[0] += [f"{name}, the two alone" for name in ("equal FLOPs", "equal tokens", "equal KL")]
    for task, measured in confirmed.items():
        two = {name: measured[name] for name in (SIGNED, splits[task])}
        cells, drift = [task], [np.median([drift_of(run) for run in runs.values()]) for runs in two.values()]
        for runs in two.values():
            least = {seed: min(arm[seed].flops for arm in measured.values() if seed in arm) for seed in runs}
            cells.append(f"{np.median([least[seed] / run.flops for seed, run in runs.items()]):.0%}")
        seeds = two[SIGNED]
        end = np.median([min(drift_of(arm[seed]) for arm in measured.values() if seed in arm) for seed in seeds])
        cells.append(", ".join(f"{kl:.2f}" for kl in (end, *drift)))
        alone = axes_of(two)
        cells += [text_of(gaps_of(alone[name], SIGNED, splits[task])) for name in [*alone][1:]]
        rows.append(cells)
    return table(rows)


def curves_table(measured: Measured) -> str:
    """Return the mean over seeds of every arm's pass@1 at each evaluation."""
    curves = {arm: np.array([run.curve for run in runs.values()]) for arm, runs in measured.items()}
    rows = [["arm", *(f"{iteration:g}" for iteration in next(iter(curves.values()))[0, :, 0])]]
    rows += [[arm, *(f"{100 * share:.1f}%" for share in curve[:, :, 1].mean(axis=0))] for arm, curve in curves.items()]
    return table(rows)


def drift_of(run: RunMeasures) -> float:
    """Return the largest KL from the start that a run reaches."""
    return max((kl for _, kl in run.drift), default=float("nan"))


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


def gaps_table() -> str:
    """Return the mean of p - R over seeds by task, with Student's interval."""
    rows = [["task", "rate", "seeds", "p less R"]]
    for task, runs in json.loads((HERE / "data" / "soft_gap.json").read_text(encoding="utf-8")).items():
        late = [np.mean(gaps[len(gaps) // 2 :]) for gaps in runs["soft_gap"].values()]
        found = mean_interval(100 * np.array(late))
        shown = f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
        rows.append([task, f"{runs['rate']:g}", str(len(late)), shown])
    return table(rows)


def areas_table(records: list[dict[str, Any]]) -> str:
    """Return mean area ± standard error by arm and rate, seeds in brackets, and the rate that is chosen by now."""
    areas, seconds = defaultdict[tuple[str, float], list[float]](list), defaultdict[str, list[float]](list)
    for record in records:
        arm = record["arm"].rpartition(", ")[0]
        areas[arm, record["value"]].append(record["measures"]["area"])
        seconds[arm].append(record["seconds"])
    rates = sorted({rate for _, rate in areas})
    rows = [["arm", *(f"{rate:g}" for rate in rates), "best", "seconds of a run, median"]]
    for arm in seconds:
        cells = [areas.get((arm, rate), []) for rate in rates]
        shown = [f"{100 * np.mean(cell):.1f}%{error_of(cell)} ({len(cell)})" if cell else "" for cell in cells]
        ran = {rate: cell for rate, cell in zip(rates, cells) if cell}
        best = best_rate(ran)
        named = f"{best:g}" + ", an edge" * (best in (min(ran), max(ran)))
        rows.append([arm, *shown, named, f"{np.median(seconds[arm]):.0f}"])
    return table(rows)


def error_of(areas: list[float]) -> str:
    """Write the standard error of a mean of shares, in points; nothing of a single one."""
    return f" ±{100 * standard_error(areas):.1f}" if len(areas) > 1 else ""


def standard_error(areas: list[float]) -> float:
    """Return the standard error of a mean; 0 of a single value."""
    return float(np.std(areas, ddof=1)) / len(areas) ** 0.5 if len(areas) > 1 else 0.0


def lower(areas: list[float]) -> float:
    """Return the mean less its standard error, by which rates and splits are chosen."""
    return float(np.mean(areas)) - standard_error(areas)


def best_rate(areas: dict[float, list[float]]) -> float:
    """Return the rate of the largest mean area less its standard error, on as many seeds as three rates have."""
    most = sorted(map(len, areas.values()))[-3]
    full = {rate: cell[:most] for rate, cell in areas.items() if len(cell) >= most}
    return max(full, key=lambda rate: lower(full[rate]))


if __name__ == "__main__":
    main()
