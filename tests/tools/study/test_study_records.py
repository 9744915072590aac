"""A study keeps finished runs in one file and resumes from it; grids grow at their edges; budgets; equal KL."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from oarjax.report.files import MetricsWriter
from oarjax.stats import detectable_effect
from oarjax.storage.durable import StorageError
from oarjax.tools.study import command
from oarjax.tools.study.config import load_study, make_plan
from oarjax.tools.study.page import budget_text, markdown
from oarjax.tools.study.records import RecordsError, add_records, read_records
from oarjax.tools.study.results import (
    RunMeasures,
    areas_at_equal_kl,
    budget,
    choices,
    collect,
    edges,
    kl_path,
    plan_so_far,
    trial_areas,
)

ARITHMETIC = {"source": "builtin:arithmetic", "arithmetic": {"terms": 2}}


@pytest.fixture
def write(tmp_path):
    """Two arms whose rates are chosen on seeds 0 and 1 and confirmed on 2 and 3."""

    def write(choose=(), **changes):
        base = {
            "device": "cpu",
            "run_dir": "unused",
            "iterations": 1,
            "policy": {"path": "builtin:arithmetic"},
            "data": {"template": "plain", "train": ARITHMETIC, "eval": ARITHMETIC | {"split": "eval", "limit": 4}},
            "grading": {"rewards": [{"name": "exact"}]},
        }
        tree = {
            "run_dir": str(tmp_path / "st"),
            "records": str(tmp_path / "kept" / "st.jsonl"),
            "base": base,
            "arms": {"GRPO": {"credit.method": "uniform"}, "OAR": {}},
            "primaries": [["OAR", "GRPO"]],
            "choose": {"field": "optim.lr", "values": [1e-4, 2e-4, 4e-4], "seeds": [0, 1]} | dict(choose),
            "seeds": [2, 3],
        } | changes
        path = tmp_path / "st.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_study(path)

    return write


def make_up(run, last, *, seconds=10.0):
    """The metrics of a finished run whose area is (.2 + last) / 2."""
    with MetricsWriter(Path(run.config.run_dir)) as metrics:
        metrics.write(0, {"pass_at_1": 0.2})
        metrics.write(1, {"seconds/training": 2.0, "seconds/total": seconds, "groups_drawn": 4.0, "pass_at_1": last})


def try_out(plan, ends):
    """Make up the trials of every arm: its last pass@1 by rate, the same for both seeds but for +-.1."""
    for arm, by_value in ends.items():
        for value, runs in zip(plan.tried[arm], plan.trials[arm]):
            for run, spread in zip(runs, (0.1, -0.1)):
                if not command.finished(run):
                    make_up(run, by_value[value] + spread)


def test_finished_runs_are_kept_in_a_file_that_the_study_resumes_from(write, tmp_path):
    study, kept = write(confirm=False), tmp_path / "kept" / "st.jsonl"
    plan = plan_so_far(study)
    ends = {name: {1e-4: 0.4, 2e-4: 0.6, 4e-4: 0.5} for name in ("GRPO", "OAR")}
    try_out(plan, ends)
    command.record_finished(plan, {"seed 0, GRPO, 0.0001": 33.0})
    assert len(read_records(kept)) == 12
    first = json.loads(kept.read_text().splitlines()[0])
    assert (first["arm"], first["seed"], first["value"], first["seconds"]) == ("GRPO, 0.0001", 0, 1e-4, 33.0)
    assert first["measures"]["curve"] == [[0, 0.2], [1, 0.5]]
    assert first["measures"]["tokens"] is None  # unknown
    command.record_finished(plan, {})  # what is kept is not written twice
    assert len(kept.read_text().splitlines()) == 12

    before = collect(plan_so_far(study))
    shutil.rmtree(tmp_path / "st")
    plan = plan_so_far(study)
    assert command.tasks(plan) == []  # confirm is false, and nothing that chooses is left
    assert choices(plan) == {"GRPO": 2e-4, "OAR": 2e-4}
    after = collect(plan)
    assert after["choose"] == before["choose"]
    assert after["budget"]["seconds"] == {"GRPO": 10.0, "OAR": 10.0}
    assert len(command.tasks(plan_so_far(write()))) == 2 + 4  # two starts, two arms with two seeds

    # With other fields a run is another run. A default that is not written is not asked for.
    other = write(arms={"GRPO": {"credit.method": "uniform"}, "OAR": {"optim.b1": 0.8}})
    jobs = [job.name for job in command.tasks(plan_so_far(other))]
    assert sum("OAR, " in name for name in jobs) == 6
    assert not any("GRPO, " in name for name in jobs)
    kept.write_text(kept.read_text() + "{}\n")
    with pytest.raises(RecordsError, match=r"line 13 of .* is not a run; remove the line"):
        plan_so_far(study)
    kept.write_text(json.dumps(first | {"measures": {"area": 1.0}}) + "\n")  # of another version
    with pytest.raises(RecordsError, match=r"GRPO, 0.0001, seed 0: .* missing .*; remove its line"):
        plan_so_far(study)


def test_records_keep_six_digits_and_the_last_of_equals(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    assert read_records(path) == {}
    for value in (1 / 3, math.nan):
        add_records(path, [{"digest": "a", "measures": {"x": value, "path": [(1, 2 / 3)]}}])
    assert path.read_text().splitlines()[0] == '{"digest": "a", "measures": {"x": 0.333333, "path": [[1, 0.666667]]}}'
    assert read_records(path)["a"]["measures"]["x"] is None


@pytest.mark.parametrize("line", [b"\xff", b"[" * 100_000, b'{"digest": "a", "measures": {"area": "12"}}', b"7", b"{}"])
def test_records_that_are_none_are_named(tmp_path, line):
    (tmp_path / "r.jsonl").write_bytes(b'{"digest": "a", "measures": {"area": 1}}\n' + line)
    with pytest.raises(RecordsError, match=r"line 2 of .* is not a run; remove the line"):
        read_records(tmp_path / "r.jsonl")
    with pytest.raises(StorageError, match=r"cannot read .*directory.*; choose another path"):
        read_records(tmp_path)


def test_a_grid_grows_where_a_winner_stands_at_its_edge(write):
    study = write({"beyond": [8e-4, 5e-5, 1.6e-3]})
    plan = plan_so_far(study)
    ends = {
        "GRPO": {5e-5: 0.2, 1e-4: 0.6, 2e-4: 0.4, 4e-4: 0.3},
        "OAR": {1e-4: 0.1, 2e-4: 0.2, 4e-4: 0.3, 8e-4: 0.5, 1.6e-3: 0.4},
    }
    try_out(plan, ends)
    plan = plan_so_far(study)
    assert plan.tried == {"GRPO": (5e-5, 1e-4, 2e-4, 4e-4), "OAR": (1e-4, 2e-4, 4e-4, 8e-4)}
    assert plan.arms == {}
    assert len(command.tasks(plan)) == 2 + 4  # and two starts
    try_out(plan, ends)
    plan = plan_so_far(study)
    assert plan.tried["OAR"] == (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
    assert plan.arms == {}  # GRPO has chosen; it waits, so that the budget is told before any run that confirms
    try_out(plan, ends)
    plan = plan_so_far(study)
    assert {name: runs[0].config.optim.lr for name, runs in plan.arms.items()} == {"GRPO": 1e-4, "OAR": 8e-4}
    assert edges(plan) == set()
    tree = collect(plan)["choose"]
    assert tree["values"] == [5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3]
    assert tree["areas"]["OAR"][0] is None
    assert tree["areas"]["OAR"][4] == pytest.approx(0.35)
    assert tree["by_seed"]["OAR"][0] == {}


def test_a_winner_at_the_last_edge_is_named(write):
    study = write({"beyond": [8e-4]})
    for _ in range(2):
        plan = plan_so_far(study)
        try_out(plan, {name: {1e-4: 0.1, 2e-4: 0.2, 4e-4: 0.3, 8e-4: 0.5} for name in plan.trials})
    assert edges(plan_so_far(study)) == {"GRPO", "OAR"}
    text = markdown(collect(plan_so_far(study)) | {"machine": "m"}, command="oarjax study x")
    assert "At the edge of what was tried: GRPO, OAR." in text


def test_the_lower_end_chooses_a_steady_value_over_a_better_mean(write):
    study = write({"by": "lower"})
    plan = plan_so_far(study)
    for runs in plan.trials.values():
        for by_seed, ends in zip(runs, ((0.2, 0.2), (0.55, 0.45), (0.9, 0.3))):
            for run, end in zip(by_seed, ends):
                make_up(run, end)
    # areas .375 .325 and .55 .25: means .35 and .4, standard errors .025 and .15
    assert trial_areas(plan)["GRPO"] == pytest.approx([0.2, 0.35, 0.4])
    assert choices(plan)["GRPO"] == 2e-4
    assert choices(plan_so_far(write()))["GRPO"] == 4e-4


def test_the_budget_says_what_confirming_takes_and_detects(write):
    study = write()
    plan = plan_so_far(study)
    for arm, ends in (("GRPO", (0.4, 0.4)), ("OAR", (0.8, 0.5))):
        for runs in plan.trials[arm]:
            for run, end in zip(runs, ends):
                make_up(run, end, seconds=90.0 if arm == "OAR" else 30.0)
    found = budget(plan_so_far(study))
    # areas differ by .2 and .05: SD .15 / sqrt 2
    (pair,) = found["pairs"]
    assert pair["sd"] == pytest.approx(0.15 / math.sqrt(2))
    assert pair["detects"] == pytest.approx(detectable_effect(0.15 / math.sqrt(2), 2))
    assert found["seconds"] == {"GRPO": 30.0, "OAR": 90.0}
    text = budget_text(found)
    assert "2 arms x 2 seeds, 0.1 hours" in text  # 2 x 120 s
    assert "OAR - GRPO: SD of a pair 10.6 points over 2 seeds" in text


def run_of(curve, drift):
    nan = math.nan
    return RunMeasures(curve, curve[-1][1], nan, nan, nan, nan, nan, nan, nan, drift)


def test_areas_at_equal_kl_by_hand():
    ours = run_of([(0, 0.2), (10, 0.4), (20, 0.8), (30, 0.6)], [(10, 1.0), (20, 4.0), (30, 3.0)])
    theirs = run_of([(0, 0.2), (10, 0.6)], [(10, 2.0)])
    assert kl_path(ours) == [(0.0, 0.2), (1.0, 0.4), (4.0, 0.8)]  # the last is no further than the one before
    unmeasured = run_of([(0, 0.2), (10, 0.9)], [])
    found = areas_at_equal_kl({"a": {0: ours}, "b": {0: theirs}, "c": {0: unmeasured}})
    # Up to 2 nats: a is .4 at 1 and .4 + .4 / 3 at 2; (.3 + .4 + .2 / 3) / 2. b: .4.
    assert found == {"a": {0: pytest.approx((0.3 + 0.4 + 0.2 / 3) / 2)}, "b": {0: pytest.approx(0.4)}, "c": {}}


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        ({"beyond": [2e-4]}, "beyond: expected numbers outside values"),
        ({"values": ["a", "b"], "beyond": [1.0]}, "beyond: expected numbers as values"),
        ({"by": "lower", "seeds": [0]}, "lower needs two seeds"),
    ],
)
def test_grids_that_make_no_sense(write, choose, says):
    with pytest.raises(ValueError, match=says):
        write(choose)


def test_digests_tell_seeds_and_fields_apart(write):
    runs = make_plan(write()).runs
    assert len({run.digest for run in runs}) == len(runs) == 12
    assert np.all([len(run.digest) == 16 for run in runs])
