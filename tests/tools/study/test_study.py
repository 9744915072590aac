"""A study's arithmetic by hand, its worker processes with small scripts, and a whole tiny one."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import CACHE

from oarjax.cli import main
from oarjax.config.loading import parse_config
from oarjax.config.section import changed
from oarjax.data.hf import read_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import ConfigError
from oarjax.report.files import MetricsWriter, make_console, read_metrics
from oarjax.run.run import Run
from oarjax.storage.checkpoint import finished
from oarjax.storage.durable import StorageError
from oarjax.storage.folder import locked
from oarjax.tools.bench.measure import counted_compilations
from oarjax.tools.study import command
from oarjax.tools.study.config import load_study, make_plan
from oarjax.tools.study.jobs import Job, run_jobs, share_out
from oarjax.tools.study.page import PageError, markdown, paste
from oarjax.tools.study.results import area_under, area_until, choices, collect, measure, plan_so_far, seed_difference
from oarjax.tools.study.worker import Graders, LentPrograms, attempt

# Differences, areas


def test_differences_pair_the_seeds_that_both_have():
    # Seeds 1 and 2 are in both: differences .5 and .25; mean .375, s = .25 / sqrt 2, standard error .125, t(1) = 12.706
    found = seed_difference({0: 9.0, 1: 1.0, 2: 0.5}, {1: 0.5, 2: 0.25, 3: 5.0})
    assert (found.mean, found.count) == (0.375, 2)
    assert found.half == pytest.approx(12.7062 * 0.125, rel=1e-5)
    assert seed_difference({0: 1.0}, {1: 1.0}).count == 0


def test_area_by_hand():
    # From 0 to 10: (.2 + .6) / 2 * 4 = 1.6, then (.6 + 1) / 2 * 6 = 4.8; 6.4 / 10.
    assert area_under([(0.0, 0.2), (4.0, 0.6), (10.0, 1.0)]) == pytest.approx(0.64)
    assert area_under([(3.0, 0.5), (7.0, 0.5)]) == 0.5
    for curve in ([(0.0, 1.0)], [(0.0, 1.0), (0.0, 2.0)], [(1.0, 1.0), (0.0, 2.0)]):
        with pytest.raises(ValueError, match="at least two points with rising x"):
            area_under(curve)


def test_area_of_a_curve_that_is_cut_by_hand():
    curve = [(0.0, 0.2), (4.0, 0.6), (10.0, 1.0)]
    assert area_until(curve, 10.0) == area_until(curve, 50.0) == pytest.approx(0.64)
    assert area_until(curve, 4.0) == pytest.approx(0.4)
    assert area_until(curve, 7.0) == pytest.approx((0.4 * 4 + 0.7 * 3) / 7)  # .8 at 7
    assert area_until(curve, 2.0) == pytest.approx(0.3)
    assert math.isnan(area_until(curve, 0.0))


def test_a_run_in_a_few_numbers():
    records = [
        {"iteration": 0, "pass_at_1": 0.4},
        {"iteration": 1, "entropy": 9.0, "ess": 0.5, "seconds/training": 60.0, "groups_drawn": 4.0},
        {"iteration": 2, "entropy": 3.0, "ess": None, "seconds/training": 1.0, "groups_drawn": 4.0, "pass_at_1": 0.6},
        {"iteration": 3, "entropy": 2.0, "ess": 1.0, "seconds/training": 3.0, "groups_drawn": 6.0},
        {"iteration": 4, "entropy": 1.0, "ess": 0.75, "seconds/training": 4.0, "groups_drawn": 4.0, "pass_at_1": 0.5},
    ]
    run = measure(records, group_size=8)
    assert run.curve == [(0, 0.4), (2, 0.6), (4, 0.5)]
    assert run.final == 0.5
    assert run.area == pytest.approx((0.5 * 2 + 0.55 * 2) / 4)
    assert run.entropy == 1.0  # a fifth of four iterations: the last
    assert run.ess == 0.75  # what is not known is left out
    assert run.seconds == 3.0  # without the first, which compiles
    assert run.completions == 8 * 18
    assert math.isnan(measure(records[:1], group_size=8).seconds)


# Worker processes

ECHO = """
import json, os, sys, time
for line in sys.stdin:
    task = json.loads(line)
    if task.get("die"): os._exit(3)
    if task.get("talk"): print(task["talk"], flush=True); continue
    if task.get("show"): print(json.dumps({"error": os.environ.get(task["show"])}), flush=True); continue
    time.sleep(task.get("sleep", 0))
    with open(task["log"], "a") as log: print(task["name"], os.getpid(), sorted(os.sched_getaffinity(0)), file=log)
    print(json.dumps({"error": task.get("error")}), flush=True)
"""


@pytest.fixture
def echo(tmp_path):
    """Run jobs with a worker that writes down what it did; (outcomes, lines)."""

    def run(*jobs: tuple, workers=2):
        log = tmp_path / "done.txt"
        made = [
            Job(name, {"name": name, "log": str(log), **task}, *rest)  # rest: needs, like
            for name, task, *rest in jobs
        ]
        outcomes = run_jobs(made, [sys.executable, "-c", ECHO], workers=workers, log=tmp_path)
        return {o.name: o.error for o in outcomes}, log.read_text().splitlines() if log.exists() else []

    return run


def test_a_worker_does_job_after_job_in_order(echo):
    outcomes, lines = echo(*((name, {}) for name in "abcd"), workers=1)
    assert outcomes == dict.fromkeys("abcd")
    assert [line.split()[0] for line in lines] == list("abcd")
    assert len({line.split()[1] for line in lines}) == 1  # one process


def test_workers_run_on_large_memory_pages(echo, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    outcomes, _ = echo(("a", {"show": "GLIBC_TUNABLES"}))
    assert outcomes["a"] == "glibc.malloc.check=0:glibc.malloc.hugetlb=1"


def test_a_worker_does_jobs_that_are_alike_after_one_another(echo):
    jobs = [(f"{arm}{seed}", {}, None, arm) for seed in (0, 1) for arm in "abc"]
    outcomes, lines = echo(*jobs, ("start", {}), workers=1)
    assert [line.split()[0] for line in lines] == ["a0", "a1", "b0", "b1", "c0", "c1", "start"]
    assert list(outcomes) == [name for name, *_ in jobs] + ["start"]


def test_workers_have_cores_of_their_own(echo):
    _, lines = echo(("a", {"sleep": 0.5}), ("b", {"sleep": 0.5}))
    seen = [set(json.loads(line.split(" ", 2)[2])) for line in lines]
    assert len(seen) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert not seen[0] & seen[1]


def test_sharing_out_cores():
    assert share_out([3, 5, 7], 2) == [[3, 7], [5]]
    assert share_out([3, 5], 3) == [[3], [5], [3]]
    assert share_out([3, 5], 0) == []


def test_a_failure_costs_its_job_and_those_that_need_it(echo):
    outcomes, lines = echo(
        ("start 0", {"error": "no such file"}),
        ("start 1", {}),
        ("run 0", {}, "start 0"),
        ("run 1", {}, "start 1"),
        ("last", {}, "made before"),
    )
    assert outcomes == {
        "start 0": "no such file",
        "start 1": None,
        "run 0": "not run: it needs start 0, which failed",
        "run 1": None,
        "last": None,
    }
    assert {line.split()[0] for line in lines} == {"start", "run", "last"}
    assert len(lines) == 4


def test_a_need_is_waited_for(echo):
    _, lines = echo(("slow", {"sleep": 0.6}), ("needs slow", {}, "slow"), ("free", {}))
    assert [line.split()[0] for line in lines] == ["free", "slow", "needs"]


def test_a_worker_that_dies_or_babbles_is_replaced(echo):
    outcomes, _ = echo(("dies", {"die": True}), ("babbles", {"talk": "hello"}), ("after", {}), workers=1)
    assert outcomes["dies"] == "the worker died with exit code 3; see its log"
    assert outcomes["babbles"] is not None
    assert outcomes["babbles"].startswith("the worker does not answer: ")
    assert outcomes["after"] is None


def test_a_worker_follows_its_parent_before_it_imports_jax():
    program = "import sys; from oarjax.grading.process_tree import end_with; end_with(int(sys.argv[1])); "
    program += "print('jax' in sys.modules)"
    for parent, said in ((os.getpid(), "False\n"), (os.getpid() + 1, "")):  # the second has ended by now
        done = subprocess.run([sys.executable, "-c", program, str(parent)], capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == (said, int(not said))
    assert "end_with" in command.WORKER[-1].split("study.worker")[0]


def test_no_worker(tmp_path):
    (outcome,) = run_jobs([Job("a", {})], ["/nowhere/python"], workers=1, log=tmp_path)
    assert outcome.error is not None
    assert outcome.error.startswith("the worker could not be started: ")


# Planning, resuming and collecting, with runs that were made up

TINY = {
    "iterations": 1,
    "device": "cpu",
    "compilation_cache": str(CACHE),
    "data": {
        "template": "plain",
        "max_prompt": 24,
        "train": {"source": "builtin:arithmetic", "split": "train", "limit": 20, "arithmetic": {"terms": 2}},
        "eval": {"source": "builtin:arithmetic", "split": "eval", "limit": 5, "arithmetic": {"terms": 2}},
    },
    "sft": {
        "data": {"source": "builtin:arithmetic", "split": "sft", "limit": 20, "arithmetic": {"terms": 2}},
        "steps": 3,
        "batch": 4,
        "microbatch": 4,
        "max_length": 48,
    },
    "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 16, "completion_bucket": 12},
    "grading": {"rewards": [{"name": "exact"}], "workers": 1},
    "credit": {"answer": {"style": "regex", "pattern": "[0-9]"}},
    "update": {"microbatch": 8},
    "eval": {"batch": 5},
    "report": {"completions": 1, "html": False},
    "export": {"folder": None},
}


@pytest.fixture
def file(tmp_path):
    """Two arms, two seeds, a sweep of two by one cells over one seed."""
    policy = write_builtin_policy(tmp_path / "policy", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    tree = {
        "run_dir": str(tmp_path / "study-x"),
        "base": {**TINY, "run_dir": "unused", "policy": {"path": str(policy)}},
        "arms": {"GRPO": {"credit.method": "uniform"}, "permuted": {"credit.method": "permuted"}},
        "seeds": [0, 1],
        "against": ["GRPO"],
        "sweep": {
            "of": "permuted",
            "over": {"credit.gate.tau": [0.2, 0.4], "credit.gate.boost": [2.0]},
            "seeds": [0],
        },
    }
    path = tmp_path / "study_x.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def make_up(folder: Path, last: float, *, iterations: int = 1, flops: float = 100.0) -> None:
    """The metrics of a run that ended with this pass@1."""
    with MetricsWriter(folder) as metrics:
        metrics.write(0, {"pass_at_1": 0.25})
        for n in range(1, iterations + 1):
            metrics.write(n, {"entropy": 0.5, "ess": 0.75, "seconds/training": 2.0, "groups_drawn": 4.0})
        metrics.write(iterations, {"pass_at_1": last, "flops": flops})


def test_finished_runs_are_not_run_again(file, tmp_path):
    plan = make_plan(load_study(file))
    assert [(job.name, job.needs) for job in command.tasks(plan)] == [
        ("seed 0, start", None),
        ("seed 1, start", None),
        ("seed 0, GRPO", "seed 0, start"),
        ("seed 0, permuted", "seed 0, start"),
        ("seed 1, GRPO", "seed 1, start"),
        ("seed 1, permuted", "seed 1, start"),
        ("seed 0, tau 0.2, boost 2.0", "seed 0, start"),
    ]
    root = tmp_path / "study-x"
    make_up(root / "seed0" / "grpo", 0.5)
    with MetricsWriter(root / "seed0" / "permuted") as metrics:  # stopped within its only iteration
        metrics.write(0, {"pass_at_1": 0.25})
    (root / "seed0" / "before.json").write_text("null")
    (root / "seed0" / "start").mkdir()
    (root / "seed0" / "start" / "config.json").write_text("{}")
    make_up(root / "seed1" / "grpo", 0.5)
    make_up(root / "seed1" / "permuted", 0.5)
    assert [job.name for job in command.tasks(plan)] == ["seed 0, permuted", "seed 0, tau 0.2, boost 2.0"]


def choosing(file, **changes):
    """The study of ``file`` without a sweep: rates are chosen on seeds 0 and 1, seeds 2 to 4 confirm them."""
    tree = yaml.safe_load(file.read_text()) | {"sweep": None, "seeds": [2, 3, 4], "primaries": [["permuted", "GRPO"]]}
    tree["choose"] = {"field": "optim.lr", "values": [1e-4, 1e-3], "seeds": [0, 1]}
    file.write_text(yaml.safe_dump(tree | changes, sort_keys=False))
    return load_study(file)


def test_a_rate_is_chosen_for_each_arm_and_then_confirmed_on_other_seeds(file, tmp_path):
    study, root = choosing(file), tmp_path / "study-x"
    first = plan_so_far(study)
    assert sorted(first.starts) == [0, 1, 2, 3, 4]
    assert first.arms == {}
    assert [(run.name, run.seed, run.config.optim.lr) for run in first.runs[:3]] == [
        ("GRPO, 0.0001", 0, 1e-4), ("GRPO, 0.0001", 1, 1e-4), ("GRPO, 0.001", 0, 1e-3),
    ]  # fmt: skip
    assert len(first.runs) == 8
    assert first.total == 8 + 2 * 3  # the runs that confirm have no value yet
    for arm, value, ends in (
        ("grpo", 0.0001, (0.5, 0.5)), ("grpo", 0.001, (0.6, 0.6)), ("permuted", 0.0001, (0.9, 0.3)),
    ):  # fmt: skip
        for seed, end in enumerate(ends):
            make_up(root / f"seed{seed}" / "choose" / arm / str(value), end)
    make_up(root / "seed0" / "choose" / "permuted" / "0.001", 0.9)
    assert choices(plan_so_far(study)) == {"GRPO": 1e-3}  # a run of the other arm is missing
    make_up(root / "seed1" / "choose" / "permuted" / "0.001", 0.1)
    plan = plan_so_far(study)
    assert choices(plan) == {"GRPO": 1e-3, "permuted": 1e-4}  # .6 against .5 on average
    assert plan.total == len(plan.runs) == 14
    confirmed = {(run.name, run.seed): run.config.optim.lr for runs in plan.arms.values() for run in runs}
    assert confirmed == {(a, s): r for a, r in (("GRPO", 1e-3), ("permuted", 1e-4)) for s in (2, 3, 4)}
    assert {job.name for job in command.tasks(plan)} == {
        *(f"seed {s}, {name}" for s in (2, 3, 4) for name in ("start", "GRPO", "permuted"))
    }

    # The runs that confirm: areas (.25 + end) / 2, so half the differences of the ends, .1, .2 and .3.
    for seed, (theirs, ours) in enumerate([(0.5, 0.6), (0.5, 0.7), (0.5, 0.8)], start=2):
        make_up(root / f"seed{seed}" / "grpo", theirs, flops=100.0)
        make_up(root / f"seed{seed}" / "permuted", ours, flops=200.0)
    tree = collect(plan)
    assert tree["choose"]["chosen"] == {"GRPO": 1e-3, "permuted": 1e-4}
    assert [run["final"] for run in tree["choose"]["by_seed"]["permuted"][0].values()] == [0.9, 0.3]
    (primary,) = tree["primaries"]
    assert primary["area"][0] == pytest.approx(0.1)
    assert primary["p"] == primary["holm"] == pytest.approx(1 - math.sqrt(12 / 14))
    # Twice the FLOPs: half of its curve counts, which ends at (.25 + end) / 2; (.25 + that) / 2 less (.25 + .5) / 2.
    expected = sum((0.25 + (0.25 + end) / 2) / 2 - 0.375 for end in (0.6, 0.7, 0.8)) / 3
    assert tree["differences"]["GRPO"]["permuted"]["area_flops"][0] == pytest.approx(expected)
    assert tree["differences"]["GRPO"]["permuted"]["area_seconds"] is None  # the only iteration compiles
    text = markdown(tree | {"machine": "m"}, command="oarjax study x")
    assert "| permuted - GRPO | +10.0 ±12.4 | +10.0 | 0.074 | 0.074 | undecided; detects 15.5 |" in text
    (primary,) = tree["primaries"]
    for p, sign, words in ((0.0004, -1, "< 0.001 | < 0.001 | below"), (0.02, 1, "0.020 | 0.020 | above")):
        tree["primaries"] = [primary | {"p": p, "holm": p, "area": [sign * 0.1] * 3}]
        assert f"| {words} |" in markdown(tree | {"machine": "m"}, command="oarjax study x")
    assert "| GRPO | 37.5% | 42.5% * |" in text


def test_another_config_does_not_touch_a_study(file, tmp_path):
    plan = make_plan(load_study(file))
    run = plan.arms["GRPO"][1]
    make_up(Path(run.config.run_dir), 0.5)
    (Path(run.config.run_dir) / "config.yaml").write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
    with pytest.raises(ConfigError, match=r"seed1/grpo holds a run of another config \(optim.lr was 1e-06, is 0.5\)"):
        command.run(file, ["base.optim.lr=0.5"], jobs=0)


def test_two_studies_in_a_folder_are_refused(file, tmp_path):
    with locked(tmp_path / "study-x"), pytest.raises(ConfigError, match=r"study-x is in use by process"):
        command.run(file, [])


def test_results_of_runs_made_up(file, tmp_path, capsys):
    root = tmp_path / "study-x"
    for folder, last in {
        "seed0/grpo": 0.50,
        "seed1/grpo": 0.70,
        "seed0/permuted": 0.75,
        "seed1/permuted": 0.75,
        "seed0/sweep/tau-0.2-boost-2.0": 0.35,
    }.items():
        make_up(root / folder, last)
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- study study-x -->\nold\n<!-- end of study study-x -->\nafter\n")
    command.run(file, [], jobs=0, page=page)

    tree = json.loads((root / "study.json").read_text())
    assert tree["runs"] == {"planned": 5, "finished": 5}
    grpo, permuted = tree["arms"]["GRPO"], tree["arms"]["permuted"]
    # .5 and .7: mean .6, standard error .1, t(1) = 12.7062
    assert grpo["final"] == pytest.approx([0.6, 0.6 - 1.27062, 0.6 + 1.27062], rel=1e-5)
    assert grpo["area"][0] == pytest.approx((0.375 + 0.475) / 2)
    assert permuted["final"] == [0.75, 0.75, 0.75]
    assert [p["iteration"] for p in grpo["curve"]] == [0, 1]
    assert grpo["curve"][0]["pass_at_1"][0] == 0.25
    assert grpo["by_seed"]["1"]["final"] == 0.7
    # seed by seed .25 and .05
    assert tree["differences"]["GRPO"]["permuted"]["final"][0] == pytest.approx(0.15)
    assert tree["differences"]["GRPO"]["permuted"]["final"][2] == pytest.approx(0.15 + 12.7062 * 0.1, rel=1e-5)
    cells = {tuple(cell["values"]): cell["final"] for cell in tree["sweep"]["cells"]}
    assert cells == {(0.2, 2.0): [0.35, None, None], (0.4, 2.0): [0.75, None, None]}  # tau .4 is the arm's own run

    text = (root / "study.md").read_text()
    assert "| GRPO | 2 | 60.0% ±127.1 | 42.5% ±63.5 | 42.5% | 0.500 ±0.000 | 0.750 ±0.000 |" in text
    assert "| permuted | +15.0 ±127.1 | +7.5 ±63.5 |" in text
    assert "| tau \\ boost | 2.0 |\n|---|---|\n| 0.2 | 35.0% |\n| 0.4 | 75.0% |" in text
    # tau .2 ends at .35, the arm at .75 on the sweep's only seed: half of that in areas. tau .4 is the arm's own run.
    assert "| tau \\ boost | 2.0 |\n|---|---|\n| 0.2 | -20.0 |\n| 0.4 | +0.0 |" in text
    assert "![curves](curves.png)" in text
    for figure in ("curves.png", "frontier.png"):
        assert (root / figure).read_bytes().startswith(b"\x89PNG")
    pasted = page.read_text()
    assert pasted.startswith("before\n<!-- study study-x -->\n")
    assert pasted.endswith("<!-- end of study study-x -->\nafter\n")
    assert "old" not in pasted
    assert "![study_x](study_x.png)" in pasted
    assert (tmp_path / "study_x_frontier.png").is_file()
    assert "permuted" in capsys.readouterr().out


def test_without_matplotlib_the_tables_come_without_figures(file, tmp_path, capsys, monkeypatch):
    make_up(tmp_path / "study-x/seed0/grpo", 0.5)
    monkeypatch.setattr(command, "can_draw", lambda: False)
    command.run(file, [], jobs=0)
    assert "figures  not drawn: matplotlib is not installed; pip install" in capsys.readouterr().out
    assert "![" not in (tmp_path / "study-x" / "study.md").read_text()
    assert not list((tmp_path / "study-x").glob("*.png"))


def test_a_full_disk_leaves_the_results_and_the_page_as_they_were(file, tmp_path, monkeypatch):
    root, page = tmp_path / "study-x", tmp_path / "results.md"
    make_up(root / "seed0/grpo", 0.5)
    page.write_text("<!-- study study-x -->\nold\n<!-- end of study study-x -->\n")
    command.run(file, [], jobs=0)
    files = {path: path.read_bytes() for path in (root / "study.json", root / "study.md", page)}
    make_up(root / "seed1/grpo", 0.7)
    for full in files:

        def fsync(number, full=full):
            if full.name in os.readlink(f"/proc/self/fd/{number}"):
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(StorageError, match="No space left on device"):
                command.run(file, [], jobs=0, page=page)
        assert full.read_bytes() == files[full]


def test_a_page_without_marks_is_missed_before_anything_runs(file, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_jobs", lambda *_, **__: pytest.fail("ran"))
    (tmp_path / "page.md").write_text("<!-- study study-x -->\n")
    with pytest.raises(PageError, match=r"expected the lines <!-- study study-x --> and <!-- end of study study-x -->"):
        command.run(file, [], page=tmp_path / "page.md")
    with pytest.raises(PageError, match="cannot be read"):
        paste(tmp_path / "none.md", "x", "", {})


def test_a_study_of_which_nothing_has_finished(file, tmp_path):
    command.run(file, [], jobs=0)
    tree = json.loads((tmp_path / "study-x" / "study.json").read_text())
    assert (tree["arms"], tree["sweep"]["cells"], tree["runs"]["finished"]) == ({}, [], 0)
    assert not (tmp_path / "study-x" / "curves.png").exists()
    assert "0 of 5 runs finished" in markdown(collect(make_plan(load_study(file))) | {"machine": ""}, command="")


# Whole ones


def oarjax(monkeypatch, capfd, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["oarjax", *map(str, arguments)])
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    return code, *capfd.readouterr()


def test_the_command_and_its_mistakes(file, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = oarjax(monkeypatch, capfd, "study", "--help")
    assert code == 0
    for words in ("CONFIG.yaml", "--quick", "--jobs", "--page", "finished runs are kept"):
        assert words in out
    for arguments, says in [
        ([tmp_path / "none.yaml"], "no such file"),
        ([file, "--quick"], "has no section quick"),
        ([file, "against=[x]"], "against: no arm is called 'x'"),
        ([file, "base.rollout.prompts=0"], "rollout.prompts: Input should be greater than 0"),
        ([file, "--page", tmp_path / "none.md"], "cannot be read"),
    ]:
        code, _, err = oarjax(monkeypatch, capfd, "study", *arguments)
        assert code == 2
        assert says in err


@pytest.mark.slow
def test_a_study_from_end_to_end(file, tmp_path, monkeypatch, capfd):
    """Two arms, two rates tried on a seed and the better one run on another; one run is broken, mended and resumed."""
    root = tmp_path / "study-x"
    choosing(file, seeds=[1], choose={"field": "optim.lr", "values": [1e-4, 1e-3], "seeds": [0]})
    blocked = root / "seed1" / "permuted" / "completions.jsonl"
    blocked.mkdir(parents=True)  # a folder where the run's file should be
    code, out, err = oarjax(monkeypatch, capfd, "study", file)
    assert code == 2, out + err
    assert "1 of 3 failed" in err
    assert "seed 1, permuted: " in err
    tree = json.loads((root / "study.json").read_text())
    assert tree["runs"] == {"planned": 6, "finished": 5}
    assert tree["failed"] == ["seed 1, permuted"]
    assert [p.parts[-3:-1] for p in root.glob("seed*/*/checkpoints")] == [("seed1", "permuted")]  # it may go on

    blocked.rmdir()
    done = [p for p in root.glob("seed*/**/metrics.jsonl") if p.parent != blocked.parent]
    before = {p: p.stat().st_mtime_ns for p in done}
    assert len(before) == 5
    code, out, err = oarjax(monkeypatch, capfd, "study", file)
    assert code == 0, out + err
    assert "6 runs, 1 to do after 0 warm starts" in out
    assert {p: p.stat().st_mtime_ns for p in before} == before
    tree = json.loads((root / "study.json").read_text())
    assert tree["runs"] == {"planned": 6, "finished": 6}
    assert set(tree["choose"]["chosen"]) == {"GRPO", "permuted"}
    assert tree["primaries"][0]["area"] is not None
    assert all(run["flops"] > 0 for arm in tree["arms"].values() for run in arm["by_seed"].values())

    # The same start, prompts and noise for both arms and all rates of a seed, and others for another seed.
    first = {p.relative_to(root).parts[0:-1]: read_metrics(p)[1] for p in root.glob("seed*/**/metrics.jsonl")}
    rewards = {folder: (record["reward"], record["completion_tokens"]) for folder, record in first.items()}
    assert len({rewards[folder] for folder in rewards if folder[0] == "seed0"}) == 1
    assert rewards["seed1", "grpo"] == rewards["seed1", "permuted"] != rewards["seed0", "choose", "grpo", "0.001"]


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_killed_study_leaves_no_run_behind_and_goes_on(file, tmp_path, monkeypatch, capfd):
    root = tmp_path / "study-x"
    tree = yaml.safe_load(file.read_text()) | {"arms": {"GRPO": {"credit.method": "uniform"}}}
    file.write_text(yaml.safe_dump(tree | {"sweep": None, "seeds": [0]}, sort_keys=False))
    arguments = ["study", str(file), "base.iterations=10", "base.checkpoint.every=1", "--jobs", "1"]
    process = subprocess.Popen([sys.executable, "-m", "oarjax.cli", *arguments], stdout=subprocess.DEVNULL)
    metrics = root / "seed0" / "grpo" / "metrics.jsonl"
    end = time.monotonic() + 300
    while time.monotonic() < end and not finished(root / "seed0" / "grpo" / "checkpoints"):
        time.sleep(0.1)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert workers
    end = time.monotonic() + 30
    while any(map(alive, workers)):
        assert time.monotonic() < end, workers
        time.sleep(0.1)
    assert read_metrics(metrics)[-1]["iteration"] < 10

    code, out, err = oarjax(monkeypatch, capfd, *arguments)
    assert code == 0, out + err
    assert "resuming after iteration" in (root / "seed0" / "grpo" / "log.txt").read_text()
    assert [r["iteration"] for r in read_metrics(metrics)] == list(range(11))
    assert json.loads((root / "study.json").read_text())["runs"] == {"planned": 1, "finished": 1}


@pytest.mark.slow
def test_runs_of_one_arm_share_their_programs(file, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.clear_caches", lambda: None)  # forgotten programs go; JAX's own small ones may stay
    jobs = {job.name: dict(job.task) for job in command.tasks(make_plan(load_study(file)))}
    with ExitStack() as stack:
        graders, programs = Graders(stack), LentPrograms()

        def lines(name: str) -> list[dict]:
            assert attempt(jobs[name], graders, programs) is None
            clock = ("seconds/", "time", "tokens_per_second", "mfu")
            records = read_metrics(Path(jobs[name]["folder"]) / "metrics.jsonl")
            return [{k: v for k, v in record.items() if not k.startswith(clock)} for record in records]

        for name in ("seed 0, start", "seed 1, start"):
            assert attempt(jobs[name], graders, programs) is None
        lines("seed 0, GRPO")
        with counted_compilations() as compiled:
            shared = lines("seed 1, GRPO")
        assert compiled.count <= 2  # the new state, and a product that measures this CPU's peak
        shutil.rmtree(jobs["seed 1, GRPO"]["folder"])
        programs.forget()
        with counted_compilations() as compiled:
            assert lines("seed 1, GRPO") == shared
        assert compiled.count > 5


def test_programs_are_shared_by_the_same_model_and_code_alone(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text("def credit(*_): ...\n")
    credit = {"method": "custom", "function": f"{code}:credit"}
    cfg = parse_config(TINY | {"run_dir": "a", "policy": {"path": "builtin:arithmetic"}, "credit": credit})

    small = read_config(write_builtin_policy(tmp_path / "policy", seed=0))[0]

    def lent(model=small, **changes) -> object:
        run = Run(changed(cfg, **changes), model=model)
        run.steps = object()  # type: ignore[assignment]
        programs.lend(run)
        return run.steps

    programs = LentPrograms()
    first = lent()
    assert lent(run_dir="b", seed=7) is first
    second = lent(replace(small, num_hidden_layers=small.num_hidden_layers + 1))
    assert second is not first
    third = lent()
    assert third is not second
    assert lent() is third
    code.write_text("def credit(*_): return None\n")  # edited while the study runs
    fourth = lent()
    assert fourth is not third
    assert lent(iterations=9) is not fourth


def test_write_results_prints_markdown_as_it_is(file, capsys):
    plan = make_plan(load_study(file))
    tree = command.write_results(plan, command="oarjax study [x]", failed=["a"], page=None, console=make_console())
    assert tree["failed"] == ["a"]
    out = capsys.readouterr().out
    assert "oarjax study [x]" in out
    assert "Failed: a." in out
