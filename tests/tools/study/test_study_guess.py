"""What docs/environments.md says of credit per turn follows from the records of its study."""

import json
from pathlib import Path

import numpy as np

from oarjax.tools.study.results import RunMeasures, areas_at_equal_cost, seed_difference

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_has_the_numbers_of_the_records():
    measured = {}
    for line in (DOCS / "data/study_guess.jsonl").read_text().splitlines():
        record = json.loads(line)
        measures = record["measures"] | {"curve": [tuple(pair) for pair in record["measures"]["curve"]]}
        measured.setdefault(record["arm"], {})[record["seed"]] = RunMeasures(**measures)
    ours, theirs = measured["OAR-P of turns"], measured["GRPO"]
    assert {run.completions for runs in measured.values() for run in runs.values()} == {5120.0}
    area, flops = (
        seed_difference(areas["OAR-P of turns"], areas["GRPO"])
        for areas in (
            {name: {seed: run.area for seed, run in runs.items()} for name, runs in measured.items()},
            areas_at_equal_cost(measured, "flops"),
        )
    )
    spread = np.std([ours[seed].area - theirs[seed].area for seed in range(8)], ddof=1)
    first, last = ([np.mean([r.curve[at][1] for r in runs.values()]) for runs in (theirs, ours)] for at in (0, -1))
    page = " ".join((DOCS / "environments.md").read_text().split())
    for said in (
        f"{100 * area.mean:.1f} points (95% interval {100 * area.low:.1f} to {100 * area.high:.1f})",
        f"{100 * flops.mean:.1f} ({100 * flops.low:.1f} to {100 * flops.high:.1f})",
        f"from {100 * first[0]:.1f}% both, GRPO ends at {100 * last[0]:.1f}% and OAR-P at {100 * last[1]:.1f}%",
        f"The standard deviation of a pair's difference is {100 * spread:.1f} points",
        f"eight pairs show one of {115 * spread:.1f} points",
    ):
        assert said in page, said
    assert first[0] == first[1]
