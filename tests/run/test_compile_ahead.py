"""Before the first iteration: a stop is heard, and programs are listed. ``oarjax accept`` counts compilations."""

import pytest
from rich.console import Console
from tiny_programs import built

from oarjax.config.section import changed
from oarjax.run.compile_ahead import by_length
from oarjax.run.run import open_run
from oarjax.run.shapes import ProgramShapes
from oarjax.step.minibatches import Bucket
from oarjax.storage.stop import Stop, Stopped
from oarjax.tools.accept.setting import Peaks, StageSetting, run_config
from oarjax.training import command


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
