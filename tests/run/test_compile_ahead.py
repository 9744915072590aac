"""Programs are listed and compiled in the background; a stop is heard. ``oarjax accept`` counts compilations."""

import os
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT
from rich.console import Console
from tiny_programs import built

from oarjax.config.section import changed
from oarjax.run.compile_ahead import by_length, compiled_ahead, in_order
from oarjax.run.run import open_run
from oarjax.run.shapes import ProgramShapes
from oarjax.step.minibatches import Bucket
from oarjax.storage.stop import Stop, Stopped
from oarjax.system.background import Background
from oarjax.tools.accept.setting import Peaks, StageSetting, run_config
from oarjax.training import command
from oarjax.training.health import Health


def test_a_stop_is_heard_before_the_first_evaluation(tmp_path, monkeypatch, unchecked):
    cfg = run_config(StageSetting(tmp_path, None, "cpu", Peaks(None, None, None)), "run", iterations=1)
    held_out = changed(cfg.data.train, split="eval", limit=8)
    run = open_run(changed(cfg, data=changed(cfg.data, eval=held_out)), Console(quiet=True))
    monkeypatch.setattr(command, "evaluate", lambda *_: pytest.fail("it was evaluated"))
    stop = Stop()
    monkeypatch.setattr(stop, "asked", lambda: True)
    with pytest.raises(Stopped):
        command.start_policy(run, None, stop)


@pytest.mark.parametrize("fused", ["never", "auto"])
def test_every_length_has_its_program(fused):
    """Scores and updates of every bucket, for both probes where the run changes from one to the other."""
    probe = {"mode": "last", "warmup_mode": "answer_mean", "warmup_iterations": 2}
    run = built(credit={"method": "oar_g", "probe": probe}, rollout__completion_bucket=5, update__fused=fused)
    found = [(p.phase, p.static.get("probe"), p.static["bucket"]) for p in by_length(ProgramShapes(run))]
    sizes = [Bucket(6, 5), Bucket(6, 10)]
    phase = "score" if run.steps.fused_add is None else "fused"
    scored = [(phase, mode, size) for mode in ("answer_mean", "last") for size in sizes]
    assert found == scored + ([] if phase == "fused" else [("update", None, size) for size in sizes])
    assert phase == ("score" if fused == "never" else "fused")


def test_what_the_first_iteration_needs_comes_first():
    """But for the longest program of the update; evaluations come last, unless the run begins with one."""
    changes = {"credit": {"method": "oar_g"}, "data__eval": {"source": "unused"}, "eval__batch": 4}
    run = built(rollout__completion_bucket=5, **changes)
    shapes = ProgramShapes(run)
    after = [program.phase for program in in_order(shapes, evaluates_first=False)]
    before = [program.phase for program in in_order(shapes, evaluates_first=True)]
    assert after[0] == before[0] == "fused"
    assert (after[1], before[1]) == ("sample", "evaluate")
    assert (after[-1], before[-1]) == ("evaluate", "fused")
    assert sorted(after) == sorted(before)
    names = [program.name for program in in_order(shapes, evaluates_first=False) if program.phase == "sample"]
    assert names[0] == "prefill"
    slots = [int(name.split()[3]) for name in names if name.startswith("decode 16 rows")]
    assert slots == sorted(slots)


@pytest.mark.slow
def test_on_few_cores_it_begins_after_the_first_step_of_a_warm_start(tmp_path, monkeypatch, unchecked):
    cfg = run_config(StageSetting(tmp_path, None, "cpu", Peaks(None, None, None)), "run", iterations=1)
    task = {"source": "builtin:arithmetic", "split": "sft", "limit": 8, "arithmetic": {"terms": 3, "highest": 9}}
    run = open_run(changed(cfg, sft={"data": task, "steps": 2, "batch": 4, "microbatch": 4}), Console(quiet=True))
    done, look = [], Health.imitated
    monkeypatch.setattr(Health, "imitated", lambda *args: done.append("step") or look(*args))
    monkeypatch.setattr(Background, "_lower", lambda _: done.append("begun"))
    for cores, order in ((2, ["step", "begun", "step"]), (64, ["begun"])):  # the second finds the warm start finished
        done.clear()
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        with compiled_ahead(run, evaluates_first=False, warm_start=True) as background:
            assert done == [step for step in order if order[0] == "begun"]
            command.start_policy(run, None, Stop(), background)
        assert done == order


HANGING = """
import os, signal, sys, threading, time
from pathlib import Path
from oarjax import cli
from oarjax.system.background import Background

whole, config, folder = Background._compile, *sys.argv[1:]

def hang(self, future, *rest):  # the last program, a short bucket's, takes longer than the run
    if future is self._jobs[-1][0]:
        time.sleep(600)
    whole(self, future, *rest)

def stop_after_an_iteration():
    metrics = Path(folder) / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

Background._compile = hang
threading.Thread(target=stop_after_an_iteration, daemon=True).start()
sys.argv = ["oarjax", "train", config]
cli.main()
"""


@pytest.mark.slow
def test_a_run_ends_while_a_program_is_being_compiled(tmp_path):
    """Told to stop, it saves its work and exits with 75 at once."""
    setting = StageSetting(tmp_path, None, "cpu", Peaks(None, None, None))
    cfg = run_config(setting, "run", iterations=400)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path / "run.yaml"), str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 75, done.stdout[-3000:] + done.stderr[-3000:]
    assert list((tmp_path / "run" / "checkpoints").iterdir())
