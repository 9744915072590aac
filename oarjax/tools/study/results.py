"""Results of a study's runs: means over seeds with 95% intervals, and differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oarjax.report.curves import points
from oarjax.report.files import read_metrics
from oarjax.stats import Interval, detectable_effect, holm, mean_interval, paired_difference, paired_p_value
from oarjax.system.checkout import commit
from oarjax.system.json import to_plain
from oarjax.tools.study.config import Planned, StudyConfig, StudyPlan, make_plan
from oarjax.tools.study.records import RecordsError, read_records


class RunMeasures(NamedTuple):
    """Measures of one run. pass@1 as shares, 0..1."""

    curve: list[tuple[float, float]]  # (iteration, held-out pass@1)
    final: float  # pass@1 after the last iteration
    area: float  # under the curve, as a mean pass@1 over the iterations
    entropy: float  # nats, mean over the last fifth of the iterations
    ess: float  # effective share of the reasoning tokens, mean over the iterations
    seconds: float  # per iteration without evaluation, median without the first, which compiles
    completions: float  # number sampled in all
    flops: float  # per iteration, decoding included
    tokens: float = math.nan  # decoded per iteration, mean
    drift: Sequence[tuple[float, float]] = ()  # (iteration, KL from the start, nats per completion) where measured
    whole: float = math.nan  # seconds of all iterations, evaluations included


MEASURES = ("final", "area", "entropy", "ess", "seconds", "completions", "flops", "tokens")
COMPARED = ("final", "area", "seconds")
"""Measures that are compared arm against arm, seed by seed."""
COSTS = {"area_flops": "flops", "area_seconds": "seconds", "area_tokens": "tokens"}
"""Areas up to an equal cost, and the measure that is the cost of an iteration."""


def seed_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval:
    """Average the differences ours - theirs over the seeds that both have; NaN without any."""
    seeds = [seed for seed in ours if seed in theirs]
    return paired_difference(np.array([ours[s] for s in seeds]), np.array([theirs[s] for s in seeds]))


def area_under(curve: Sequence[tuple[float, float]]) -> float:
    """Integrate (x, y) by trapezoids and divide by the width: the mean height, in the units of y.

    Raises:
        ValueError: fewer than two points, or x does not increase.
    """
    if len(curve) < 2 or any(b[0] <= a[0] for a, b in pairwise(curve)):
        raise ValueError(f"area_under: expected at least two points with rising x, got {list(curve)}")
    total = math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(curve))
    return total / (curve[-1][0] - curve[0][0])


def area_until(curve: Sequence[tuple[float, float]], end: float) -> float:
    """Return the area of a curve cut at ``end``, where it is interpolated; NaN where it has not begun by then."""
    earlier_points = [point for point in curve if point[0] < end]
    next_point = next((point for point in curve if point[0] >= end), None)
    if earlier_points and next_point is not None:
        (x0, y0), (x1, y1) = earlier_points[-1], next_point
        earlier_points.append((end, y0 + (y1 - y0) * (end - x0) / (x1 - x0)))
    return area_under(earlier_points) if len(earlier_points) > 1 else math.nan


def finished(run: Planned) -> bool:
    """Return True for a run in the study's records, or with all its iterations and the last evaluation."""
    if run.digest in read_records(run.records):
        return True
    records = read_metrics(Path(run.config.run_dir) / "metrics.jsonl")
    return bool(records) and records[-1]["iteration"] == run.config.iterations and "pass_at_1" in records[-1]


def measure(records: Sequence[Mapping[str, Any]], *, group_size: int) -> RunMeasures:
    """Reduce a finished run's metrics (``oarjax.report.files.read_metrics``) to a few numbers."""
    curve = points(records, "pass_at_1")
    entropies = [v for _, v in points(records, "entropy")]
    seconds = sorted(v for n, v in points(records, "seconds/training") if n > 1) or [math.nan]
    ess = [v for _, v in points(records, "ess")]
    return RunMeasures(
        curve=curve,
        final=curve[-1][1],
        area=area_under(curve) if len(curve) > 1 else math.nan,
        entropy=_mean(entropies[-max(len(entropies) // 5, 1) :]),
        ess=_mean(ess),
        seconds=(seconds[len(seconds) // 2] + seconds[(len(seconds) - 1) // 2]) / 2,
        completions=group_size * sum(v for _, v in points(records, "groups_drawn")),
        flops=_mean([v for _, v in points(records, "flops")]),
        tokens=_mean([v for _, v in points(records, "completion_tokens")]),
        drift=points(records, "kl_start"),
        whole=math.fsum(v for _, v in points(records, "seconds/total")),
    )


def measured_runs(runs: Sequence[Planned]) -> dict[int, RunMeasures]:
    """Measure the finished runs of an arm or a cell, by seed."""
    return {run.seed: measured_run(run) for run in runs if finished(run)}


def measured_run(run: Planned) -> RunMeasures:
    """Measure a finished run, from the study's records or from its folder."""
    record = read_records(run.records).get(run.digest)
    if record is not None:
        measures: dict[str, Any] = {n: math.nan if value is None else value for n, value in record["measures"].items()}
        try:
            pairs = {name: [tuple(pair) for pair in measures.get(name, [])] for name in ("curve", "drift")}
            fields: dict[str, Any] = measures | pairs
            return RunMeasures(**fields)
        except TypeError as error:  # of another version
            raise RecordsError(
                f"records: {run.records}: {run.name}, seed {run.seed}: {error}; remove its line"
            ) from None
    return measure(read_metrics(Path(run.config.run_dir) / "metrics.jsonl"), group_size=run.config.rollout.group_size)


def record_of(run: Planned, value: Any, seconds: float) -> dict[str, Any]:
    """Return the record of a finished run, of an arm tried at a value of ``choose`` or None.

    ``seconds`` are those that it took with its start; NaN where only its iterations' are known.
    """
    measures = measured_run(run)
    return {
        "arm": run.name,
        "seed": run.seed,
        "value": value,
        "digest": run.digest,
        "commit": commit(),
        "seconds": measures.whole if math.isnan(seconds) else seconds,
        "measures": measures._asdict(),
    }


def collect(plan: StudyPlan) -> dict[str, Any]:
    """Collect the study as a tree for JSON: every arm's measures and curve, the differences, and the sweep's cells.

    Intervals are [mean, low, high] over the finished seeds; with a single seed, low and high are null.
    """
    measured = {name: measured_runs(runs) for name, runs in plan.arms.items()}
    arms = {name: _arm(runs) for name, runs in measured.items() if runs}
    equal = {name: areas_at_equal_cost(measured, cost) for name, cost in COSTS.items()}
    equal["area_kl"] = areas_at_equal_kl(measured)
    differences = {
        baseline: {
            name: {
                measure: _plain(seed_difference(_of(measured[name], measure), _of(measured[baseline], measure)))
                for measure in COMPARED
            }
            | {
                measure: _plain(seed_difference(areas.get(name, {}), areas.get(baseline, {})))
                for measure, areas in equal.items()
            }
            for name in arms
            if name != baseline
        }
        for baseline in plan.study.against
        if baseline in arms
    }
    tree: dict[str, Any] = {"seeds": list(plan.study.seeds), "arms": arms, "differences": differences}
    if plan.study.primaries:
        tree["primaries"] = tested(measured, plan.study.primaries)
    if plan.study.choose is not None:
        tree["choose"] = {
            "field": plan.study.choose.field,
            "by": plan.study.choose.by,
            "seeds": list(plan.study.choose.seeds),
            "values": plan.values,
            "areas": {name: to_plain(_aligned(plan, name, areas)) for name, areas in trial_areas(plan).items()},
            "by_seed": {
                name: _aligned(plan, name, [_by_seed(measured_runs(runs)) for runs in values], {})
                for name, values in plan.trials.items()
            },
            "chosen": choices(plan),
            "at_edge": sorted(edges(plan)),
        }
        tree["budget"] = budget(plan)
    if plan.study.sweep is not None:
        cells = [(cell.values, measured_runs(cell.runs)) for cell in plan.cells]
        base = _of(measured[plan.study.sweep.of], "area")
        tree["sweep"] = {
            "of": plan.study.sweep.of,
            "seeds": list(plan.study.sweep.seeds),
            "fields": {name: list(values) for name, values in plan.study.sweep.over.items()},
            "cells": [
                {"values": list(values), **_arm(runs), "difference": _plain(seed_difference(_of(runs, "area"), base))}
                for values, runs in cells
                if runs
            ],
        }
    tree["runs"] = {"planned": plan.total, "finished": sum(finished(run) for run in plan.runs)}
    if plan.study.records is not None:
        records = read_records(Path(plan.study.records).expanduser())
        tree["commits"] = sorted({str(records[run.digest]["commit"]) for run in plan.runs if run.digest in records})
    return tree


def _aligned(plan: StudyPlan, name: str, items: Sequence[Any], missing: Any = math.nan) -> list[Any]:
    """Put what an arm has for each value that it was tried at in the order of the plan's values."""
    tried = list(plan.tried[name])
    return [items[tried.index(value)] if value in tried else missing for value in plan.values]


def areas_at_equal_cost(measured: Mapping[str, Mapping[int, RunMeasures]], cost: str) -> dict[str, dict[int, float]]:
    """Return every arm's area by seed, up to what the cheapest arm of a seed spends in all, in iterations of its own.

    ``cost`` is the measure of an iteration, such as its FLOPs. Arms whose cost is unknown are left out.
    """
    out: dict[str, dict[int, float]] = {name: {} for name in measured}
    for seed in {seed for runs in measured.values() for seed in runs}:
        runs = {name: by_seed[seed] for name, by_seed in measured.items() if seed in by_seed}
        runs = {name: run for name, run in runs.items() if run.curve and math.isfinite(getattr(run, cost))}
        if runs:
            budget = min(run.curve[-1][0] * getattr(run, cost) for run in runs.values())
            for name, run in runs.items():
                out[name][seed] = area_until(run.curve, budget / getattr(run, cost))
    return out


def areas_at_equal_kl(measured: Mapping[str, Mapping[int, RunMeasures]]) -> dict[str, dict[int, float]]:
    """Return every arm's mean pass@1 over KL from the start, up to the smallest that an arm of the seed reaches.

    pass@1 is joined by straight lines between evaluations, over the largest KL so far; runs without KL are left out.
    """
    out: dict[str, dict[int, float]] = {name: {} for name in measured}
    for seed in {seed for runs in measured.values() for seed in runs}:
        paths = {name: kl_path(by_seed[seed]) for name, by_seed in measured.items() if seed in by_seed}
        paths = {name: path for name, path in paths.items() if len(path) > 1}
        if paths:
            end = min(path[-1][0] for path in paths.values())
            for name, path in paths.items():
                out[name][seed] = area_until(path, end)
    return out


def kl_path(run: RunMeasures) -> list[tuple[float, float]]:
    """Return (KL from the start, pass@1) of a run's evaluations; only those that drift further than all before."""
    drift, path = dict(run.drift), list[tuple[float, float]]()
    for iteration, share in run.curve:
        kl = drift.get(iteration, 0.0 if iteration == run.curve[0][0] else math.nan)
        if not path or kl > path[-1][0]:
            path.append((kl, share))
    return path if run.drift else []


def budget(plan: StudyPlan) -> dict[str, Any]:
    """Foretell the runs that confirm: arms x runs x seconds, and what differences of areas they can detect.

    Both are read off the runs that chose: a pair's SD is that of its areas at the chosen values, seed by seed. Few
    seeds tell an SD badly: of 4, its 95% interval is .57 to 3.7 times what is seen.
    """
    seeds, values, areas, seconds = plan.study.seeds, choices(plan), dict[str, dict[int, float]](), dict[str, float]()
    for name, value in values.items():
        runs = plan.trials[name][plan.tried[name].index(value)]
        areas[name] = _of(measured_runs(runs), "area")
        seconds[name] = _mean([_seconds(run) for run in runs])
    pairs = []
    for arm, against in plan.study.primaries:
        shared = [seed for seed in areas.get(arm, {}) if seed in areas.get(against, {})]
        if len(shared) > 1:
            sd = float(np.std([areas[arm][seed] - areas[against][seed] for seed in shared], ddof=1))
            pairs.append(
                {
                    "arm": arm,
                    "against": against,
                    "sd": sd,
                    "of": len(shared),
                    "detects": detectable_effect(sd, len(seeds)),
                }
            )
    return {"runs": len(seeds), "seconds": to_plain(seconds), "pairs": to_plain(pairs)}


def _seconds(run: Planned) -> float:
    record = read_records(run.records).get(run.digest)
    return measured_run(run).whole if record is None else float(record["seconds"])


def tested(measured: Mapping[str, Mapping[int, RunMeasures]], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Test the difference of each pair's areas by Student's paired t over seeds, and adjust by Holm over all pairs."""
    differences, p_values, extras = [], [], list[dict[str, float]]()
    for arm, against in pairs:
        a, b = (_of(measured.get(name, {}), "area") for name in (arm, against))
        seeds = [seed for seed in a if seed in b]
        differences.append(_plain(seed_difference(a, b)))
        p_values.append(paired_p_value(np.array([a[s] for s in seeds]), np.array([b[s] for s in seeds])))
        gaps = np.array([a[s] - b[s] for s in seeds])
        extras.append(
            {
                "median": float(np.median(gaps)) if len(gaps) else math.nan,
                "detects": detectable_effect(float(gaps.std(ddof=1)), len(gaps)) if len(gaps) > 1 else math.nan,
            }
        )
    return [
        {"arm": arm, "against": against, "area": difference, "p": to_plain(p), "holm": to_plain(adjusted)}
        | to_plain(extra)
        for (arm, against), difference, p, adjusted, extra in zip(pairs, differences, p_values, holm(p_values), extras)
    ]


def trial_areas(plan: StudyPlan) -> dict[str, list[float]]:
    """Return the mean area of each arm at each value that it is tried at; NaN until all its seeds have finished."""
    return {name: [_mean(areas) for areas in values] for name, values in _areas_tried(plan).items()}


def choices(plan: StudyPlan) -> dict[str, Any]:
    """Return the best value of ``choose`` for each arm whose trials have all finished, see ``ChooseConfig.by``."""
    choose = plan.study.choose
    if choose is None:
        return {}
    out = {}
    for name, values in _areas_tried(plan).items():
        if all(values):
            errors = [np.std(areas, ddof=1) / math.sqrt(len(areas)) if choose.by == "lower" else 0 for areas in values]
            worth = [_mean(areas) - float(error) for areas, error in zip(values, errors)]
            out[name] = plan.tried[name][int(np.argmax(worth))]
    return out


def edges(plan: StudyPlan) -> set[str]:
    """Return the arms whose chosen value is the smallest or the largest of those they were tried at."""
    values = {name: value for name, value in choices(plan).items() if isinstance(value, int | float)}
    return {name for name, value in values.items() if value in (min(plan.tried[name]), max(plan.tried[name]))}


def _areas_tried(plan: StudyPlan) -> dict[str, list[list[float]]]:
    """Return the areas of each arm at each value that it is tried at; none until all seeds have finished."""
    out = {}
    for name, values in plan.trials.items():
        areas = [list(_of(measured_runs(runs), "area").values()) for runs in values]
        out[name] = [a if len(a) == len(planned) else [] for a, planned in zip(areas, values)]
    return out


def plan_so_far(study: StudyConfig) -> StudyPlan:
    """Plan a study; with ``choose``, also further values at an edge, and the runs of arms whose value is decided."""
    plan, choose = make_plan(study), study.choose
    if choose is None:
        return plan
    while True:
        decisions = choices(plan)
        tried = {name: choose.with_next(plan.tried[name], value) for name, value in decisions.items() if choose.beyond}
        grown = {name for name, values in tried.items() if values != plan.tried[name]}
        if not grown:  # where grids may grow, no arm confirms before all have chosen: see ``budget``
            decided = len(decisions) == len(study.arms) if choose.beyond else decisions
            return make_plan(study, decisions, plan.tried) if decided else plan
        plan = make_plan(study, None, plan.tried | tried)


def _arm(runs: Mapping[int, RunMeasures]) -> dict[str, Any]:
    iterations = sorted({x for run in runs.values() for x, _ in run.curve})
    heights = {x: [y for run in runs.values() for n, y in run.curve if n == x] for x in iterations}
    return {
        **{measure: _plain(mean_interval(np.array(list(_of(runs, measure).values())))) for measure in MEASURES},
        "curve": [{"iteration": x, "pass_at_1": _plain(mean_interval(np.array(heights[x])))} for x in iterations],
        "by_seed": _by_seed(runs),
    }


def _by_seed(runs: Mapping[int, RunMeasures]) -> dict[str, dict[str, float]]:
    return {str(seed): {measure: getattr(run, measure) for measure in MEASURES} for seed, run in runs.items()}


def _of(runs: Mapping[int, RunMeasures], measure: str) -> dict[int, float]:
    return {seed: float(getattr(run, measure)) for seed, run in runs.items()}


def _plain(interval: Interval) -> list[float | None] | None:
    """Return [mean, low, high] for study.json; None if the interval counts no values."""
    return to_plain([interval.mean, interval.low, interval.high]) if interval.count else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
