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
from oarjax.stats import Interval, holm, mean_interval, paired_difference, paired_p_value
from oarjax.system.json import to_plain
from oarjax.tools.study.config import Planned, StudyConfig, StudyPlan, make_plan


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


MEASURES = ("final", "area", "entropy", "ess", "seconds", "completions", "flops")
COMPARED = ("final", "area", "seconds")
"""Measures that are compared arm against arm, seed by seed."""
COSTS = {"area_flops": "flops", "area_seconds": "seconds"}
"""Areas up to an equal cost, and the measure that is the cost of an iteration."""


def seed_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval:
    """Average the differences ours - theirs over the seeds that both have; NaN without any."""
    both = [seed for seed in ours if seed in theirs]
    return paired_difference(np.array([ours[s] for s in both]), np.array([theirs[s] for s in both]))


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
    kept = [point for point in curve if point[0] < end]
    after = next((point for point in curve if point[0] >= end), None)
    if kept and after is not None:
        (x0, y0), (x1, y1) = kept[-1], after
        kept.append((end, y0 + (y1 - y0) * (end - x0) / (x1 - x0)))
    return area_under(kept) if len(kept) > 1 else math.nan


def finished(run: Planned) -> bool:
    """Return True for a run with all its iterations and the last evaluation."""
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
    )


def measured_runs(runs: Sequence[Planned]) -> dict[int, RunMeasures]:
    """Measure the finished runs of an arm or a cell, by seed."""
    out = {}
    for run in runs:
        if finished(run):
            records = read_metrics(Path(run.config.run_dir) / "metrics.jsonl")
            out[run.seed] = measure(records, group_size=run.config.rollout.group_size)
    return out


def collect(plan: StudyPlan) -> dict[str, Any]:
    """Collect the study as a tree for JSON: every arm's measures and curve, the differences, and the sweep's cells.

    Intervals are [mean, low, high] over the finished seeds; with a single seed, low and high are null.
    """
    measured = {name: measured_runs(runs) for name, runs in plan.arms.items()}
    arms = {name: _arm(runs) for name, runs in measured.items() if runs}
    equal = {name: areas_at_equal_cost(measured, cost) for name, cost in COSTS.items()}
    differences = {
        other: {
            name: {
                measure: _plain(seed_difference(_of(measured[name], measure), _of(measured[other], measure)))
                for measure in COMPARED
            }
            | {
                measure: _plain(seed_difference(areas.get(name, {}), areas.get(other, {})))
                for measure, areas in equal.items()
            }
            for name in arms
            if name != other
        }
        for other in plan.study.against
        if other in arms
    }
    tree: dict[str, Any] = {"seeds": list(plan.study.seeds), "arms": arms, "differences": differences}
    if plan.study.primaries:
        tree["primaries"] = tested(measured, plan.study.primaries)
    if plan.study.choose is not None:
        tree["choose"] = {
            "field": plan.study.choose.field,
            "seeds": list(plan.study.choose.seeds),
            "values": list(plan.study.choose.values),
            "areas": {name: to_plain(areas) for name, areas in trial_areas(plan).items()},
            "by_seed": {
                name: [_by_seed(measured_runs(runs)) for runs in values] for name, values in plan.trials.items()
            },
            "chosen": choices(plan),
        }
    if plan.study.sweep is not None:
        cells = [(cell.values, measured_runs(cell.runs)) for cell in plan.cells]
        tree["sweep"] = {
            "of": plan.study.sweep.of,
            "seeds": list(plan.study.sweep.seeds),
            "fields": {name: list(values) for name, values in plan.study.sweep.over.items()},
            "cells": [{"values": list(values), **_arm(runs)} for values, runs in cells if runs],
        }
    tree["runs"] = {"planned": plan.total, "finished": sum(finished(run) for run in plan.runs)}
    return tree


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


def tested(measured: Mapping[str, Mapping[int, RunMeasures]], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Test the difference of each pair's areas by Student's paired t over seeds, and adjust by Holm over all pairs."""
    differences, p_values = [], []
    for ours, theirs in pairs:
        a, b = (_of(measured.get(name, {}), "area") for name in (ours, theirs))
        both = [seed for seed in a if seed in b]
        differences.append(_plain(seed_difference(a, b)))
        p_values.append(paired_p_value(np.array([a[s] for s in both]), np.array([b[s] for s in both])))
    return [
        {"arm": ours, "against": theirs, "area": difference, "p": to_plain(p), "holm": to_plain(adjusted)}
        for (ours, theirs), difference, p, adjusted in zip(pairs, differences, p_values, holm(p_values))
    ]


def trial_areas(plan: StudyPlan) -> dict[str, list[float]]:
    """Return the mean area of each arm with each value of ``choose``; NaN until all its seeds have finished."""
    out = {}
    for name, values in plan.trials.items():
        measured = [measured_runs(runs) for runs in values]
        out[name] = [
            _mean([run.area for run in runs.values()]) if len(runs) == len(planned) else math.nan
            for runs, planned in zip(measured, values)
        ]
    return out


def choices(plan: StudyPlan) -> dict[str, Any]:
    """Return the value of ``choose`` with the largest mean area for each arm whose trials have all finished."""
    choose = plan.study.choose
    if choose is None:
        return {}
    areas = {name: by_value for name, by_value in trial_areas(plan).items() if all(map(math.isfinite, by_value))}
    return {name: choose.values[int(np.argmax(by_value))] for name, by_value in areas.items()}


def plan_so_far(study: StudyConfig) -> StudyPlan:
    """Plan a study; with ``choose``, also the runs of those arms whose value the finished trials decide."""
    plan = make_plan(study)
    chosen = choices(plan)
    return make_plan(study, chosen) if chosen else plan


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
