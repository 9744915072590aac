"""Warnings that speak once, batches that are kept, and a run that stops when nothing can be learned any more."""

import io
import math
import re

import numpy as np
import pytest
import unsound
from rich.console import Console

from oarjax.config.loading import parse_config
from oarjax.credit.record import MEASURES
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.grading.pool import GraderError
from oarjax.report.console import WARNINGS, OnceWarnings
from oarjax.run.run import open_run
from oarjax.storage.bad_batches import read_bad_batch, read_params
from oarjax.training import health as module
from oarjax.training.health import Health, UnhealthyRun
from oarjax.training.trainer import explain_grades
from oarjax.types import Grades

# --- Warnings --------------------------------------------------------------------------------------------------------

CASES = [
    ({"truncated": 0.25}, "25% of completions were cut at rollout.max_new .more than 20%.* raise rollout.max_new"),
    ({"zero_variance": 1.0}, "every group had equal rewards.* raise rollout.group_size, or set update.refills"),
    ({"entropy": 5e-4}, r"entropy fell to 0.0005 nats .it began at 0.0005.* lower optim.lr, raise loss.clip_high"),
    ({"ungraded": 0.5}, "50% of completions could not be graded.* raise grading.deadline .* or grading.memory_mb"),
    ({"no_answer": 0.9}, "90% of completions have no answer in the style of credit.answer.style"),
    ({"sampler_gap": 0.2}, "log-probabilities differ by 0.2 on average: set loss.off_policy=tis"),
    ({"sampler_gap": math.nan}, "log-probabilities differ by nan on average"),
    ({"nonfinite/loss": 0.5}, "the loss of 50% of this iteration's updates was not finite.* skipped: lower optim.lr"),
    ({"nonfinite/gradient": 1.0}, "the gradient of 100% of this iteration's updates .* policy.compute_dtype=float32"),
    (
        {"nonfinite/params": 1.0},
        "100% .*updates would have made parameters infinite.* lower optim.lr",
    ),
    ({"nonfinite/importance": 0.25}, "25% of completions have token importance that is not finite.* weights of 1: set"),
    ({"nonfinite/weights": 0.25}, "25% of completions have token weights .* set another credit.method"),
    ({"negative_weights": 0.25}, "credit.function returned negative weights in 25% of completions.* jnp.maximum"),
    ({"nonfinite/advantages": 0.25}, "25% of completions have an advantage .* grading.rewards weight"),
    ({"nonfinite/behaviour_logps": 1.0}, "the sampler's log-probabilities of 100% .* earlier checkpoint"),
    ({"nonfinite/old_logps": 0.5}, "the trainer's log-probabilities of 50% .* policy.compute_dtype=float32"),
    ({"nonfinite/ref_logps": 0.5}, "the reference policy's log-probabilities of 50% "),
    ({"nonfinite/entropies": 0.5}, "the entropies of 50% of completions are not finite"),
    *(({f"nonfinite/{n}": 0.5}, f"the signal {n} of 50% of completions") for n in MEASURES if n != "entropies"),
]


def told(warnings: OnceWarnings) -> str:
    return warnings._console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def once() -> OnceWarnings:
    return OnceWarnings(Console(file=io.StringIO(), width=1000))


def test_every_warning_has_a_case():
    assert {rule.metric for rule in WARNINGS} == {name for metrics, _ in CASES for name in metrics}


@pytest.mark.parametrize(("metrics", "says"), CASES)
def test_a_warning_says_once_what_to_change(metrics, says):
    warnings = once()
    (text,) = warnings.check(2, metrics)
    assert re.search(says, text), text
    assert text.startswith("iteration 2: ")
    assert warnings.check(3, metrics) == []
    assert told(warnings).count("warning:") == 1


def test_answers_that_nobody_reads_are_no_warning():
    assert OnceWarnings(Console(file=io.StringIO()), answers=False).check(1, {"no_answer": 0.9}) == []


def test_a_reward_that_gives_no_number_is_told_once_with_its_first_note():
    warnings, nan = once(), np.full(3, np.nan, np.float32)
    for first in ("mine: mine.py, line 3, returned None", "mine: mine.py, line 3, raised KeyError: 'x'"):
        grades = Grades(nan, {}, ["graded", "ungraded", "crash"], [None] * 3, ["", first, first])
        explain_grades(grades, warnings)
    assert told(warnings).count("warning:") == 2
    assert "rewards gave no number for 1 of 3 completions, first with: mine: mine.py, line 3, returned" in told(
        warnings
    )
    with pytest.raises(GraderError, match="grading crashed on every completion, first with: mine"):
        explain_grades(Grades(nan[:1], {}, ["crash"], [None], [first]), warnings)


def test_limits_are_where_the_table_says():
    fine = {"truncated": 0.2, "zero_variance": 0.99, "entropy": 0.1, "ungraded": 0.05, "no_answer": 0.5}
    fine |= {"sampler_gap": 0.05} | {rule.metric: 0.0 for rule in WARNINGS if rule.metric.startswith("nonfinite/")}
    assert once().check(1, fine) == []
    assert once().check(1, {"sampler_gap": 0.2, "lag": 1.0}) == []  # drawn by an older policy
    assert len(once().check(1, {"sampler_gap": 0.2, "lag": 0.0})) == 1


def test_entropy_collapse_is_measured_from_the_first_finite_value():
    warnings = once()
    assert warnings.check(1, {"entropy": math.nan}) == []
    assert warnings.check(2, {"entropy": 0.5}) == []
    assert warnings.check(3, {"entropy": 0.06}) == []
    assert len(warnings.check(4, {"entropy": 0.04})) == 1
    assert warnings.check(5, {"entropy": 1e-4}) == []  # the other limit is of the same thing


def test_a_run_that_goes_on_remembers_its_first_entropy_and_what_it_said():
    warnings = once()
    warnings.remember([{"iteration": 1, "entropy": 0.5, "truncated": 0.3, "sampler_gap": None}])
    assert told(warnings) == ""
    (text,) = warnings.check(2, {"entropy": 0.04, "truncated": 0.3})
    assert "it began at 0.5" in text


# --- Batches that are kept, and the end of a run ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    return write_builtin_policy(folder / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)


def watch(policy, folder, **settings) -> Health:
    tree = unsound.MICRO | {"run_dir": str(folder), "policy": {"path": str(policy)}, "health": settings}
    return Health(open_run(parse_config(tree), Console(quiet=True)), folder, once())


def names(folder):
    return sorted(p.name for p in (folder / "bad_batches").glob("*"))


def test_a_sound_run_keeps_nothing_and_goes_on(policy, tmp_path):
    health = watch(policy, tmp_path, stop_after=1)
    for n in range(1, 5):
        health(unsound.phase_record(n, phase="credit", importance=0.0))
        health(unsound.phase_record(n, loss=0.0, gradient=0.0, params=0.0))
        assert health.after(n) is None
    assert names(tmp_path) == []
    assert told(health._warnings) == ""


def test_a_skipped_update_is_kept_with_all_that_replays_it(policy, tmp_path):
    health = watch(policy, tmp_path)
    health(unsound.phase_record(12, phase="credit", importance=0.25))
    health(unsound.phase_record(12, loss=1.0, gradient=1.0))
    assert health.after(12) is None
    assert health.skipped_in_a_row == 1
    assert names(tmp_path) == ["iteration-000012.safetensors", "params-iteration-000007.safetensors"]
    header, evidence = read_bad_batch(tmp_path / "bad_batches" / names(tmp_path)[0])
    assert header.wrong == {"credit": ["importance"], "update": ["loss", "gradient"]}
    assert (header.kind, header.number, header.minibatch, header.step) == ("iteration", 12, 1, 7)
    assert header.config == health._run.cfg.model_dump(mode="json")
    assert parse_config(header.config) == health._run.cfg
    assert (header.key, header.probe) == ([0, 3], "last")
    np.testing.assert_array_equal(evidence.rollout.tokens, unsound.evidence().rollout.tokens)
    assert header.params is not None
    np.testing.assert_array_equal(read_params(tmp_path / "bad_batches" / header.params)["a"]["w"], np.ones(3))
    assert "phase credit: importance not finite; see where it begins with: oarjax replay" in told(health._warnings)
    assert told(health._warnings).count("warning:") == 1


def test_a_row_of_skipped_updates_stops_the_run(policy, tmp_path):
    health = watch(policy, tmp_path, stop_after=3, bad_batches=2)
    shares = [1, 1, 0, 1, 1, 1]  # a sound update in between begins the count anew
    stopped = None
    for n, share in enumerate(shares, 1):
        health(unsound.phase_record(n, loss=share))
        stopped = health.after(n)
        assert (stopped is not None) == (n == 6)
    assert isinstance(stopped, UnhealthyRun)
    said = (
        r"iteration 6, optimizer step 7, phase update: loss not finite: nothing could be learned in 3 updates in a row "
    )
    said += r"\(health.stop_after=3\), so the run stops, with the parameters of step 7; see where it begins with: "
    assert re.match(said + f"oarjax replay {tmp_path}/bad_batches/iteration-000006.safetensors$", str(stopped))
    assert names(tmp_path)[:2] == ["iteration-000005.safetensors", "iteration-000006.safetensors"]
    assert len(names(tmp_path)) == 3  # all of them met the same params


def test_updates_of_one_iteration_count_each_and_one_batch_of_it_is_kept(policy, tmp_path):
    health = watch(policy, tmp_path, stop_after=2)
    health(unsound.phase_record(1, gradient=1.0))
    health(unsound.phase_record(1, loss=1.0))
    assert "loss" in str(health.after(1))
    (batch, _) = names(tmp_path)
    assert read_bad_batch(tmp_path / "bad_batches" / batch)[0].wrong == {"update": ["gradient"]}


def test_damaged_params_stop_a_run_that_makes_no_updates(policy, tmp_path):
    health = watch(policy, tmp_path, stop_after=2)
    health(unsound.phase_record(1, phase="sample", behaviour_logps=1.0))
    assert health.after(1) is None
    assert health.after(2) is None  # equal rewards and nothing wrong: not a word
    health(unsound.phase_record(3, phase="sample", behaviour_logps=1.0))
    assert "phase sample: behaviour_logps not finite: nothing could be learned in 2 updates" in str(health.after(3))


def test_rows_that_fell_back_do_not_fill_the_disk_and_never_stop(policy, tmp_path):
    health = watch(policy, tmp_path, stop_after=1, bad_batches=2)
    for n in range(1, 7):
        health(unsound.phase_record(n, phase="credit", importance=0.25, step=n))
        health(unsound.phase_record(n, loss=0.0, step=n))
        assert health.after(n) is None
    assert [n for n in names(tmp_path) if n.startswith("iter")] == [f"iteration-{i:06d}.safetensors" for i in (1, 2)]


def test_settings_that_turn_things_off(policy, tmp_path):
    health = watch(policy, tmp_path, stop_after=0, bad_batches=0)
    for n in range(1, 20):
        health(unsound.phase_record(n, loss=1.0))
        assert health.after(n) is None
    assert names(tmp_path) == []
    health = watch(policy, tmp_path, stop_after=1, bad_batches=0)
    health(unsound.phase_record(1, loss=1.0))
    assert "set health.bad_batches to keep such batches for oarjax replay, and lower optim.lr" in str(health.after(1))
    health = watch(policy, tmp_path, params_mb=0)
    health(unsound.phase_record(1, loss=1.0))
    assert names(tmp_path) == ["iteration-000001.safetensors"]
    assert read_bad_batch(tmp_path / "bad_batches" / names(tmp_path)[0])[0].params is None


def test_a_full_disk_is_a_warning(policy, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_bad_batch", full)
    health = watch(policy, tmp_path, stop_after=2)
    health(unsound.phase_record(1, loss=1.0))
    assert health.after(1) is None
    assert "could not be kept (No space left on device); free some space, or set health.bad_b" in told(health._warnings)
    health(unsound.phase_record(2, loss=1.0))
    assert "oarjax replay /" not in str(health.after(2))


def test_the_count_goes_on_where_a_run_was_stopped(policy, tmp_path):
    health = watch(policy, tmp_path, stop_after=3)
    records = [{"iteration": n, "skipped_in_a_row": float(n)} for n in (1, 2, 3)]
    health.remember(records, until=2)  # the third will be run again
    health(unsound.phase_record(3, loss=1.0))
    assert health.after(3) is not None
    health = watch(policy, tmp_path, stop_after=3)
    health.remember([], until=0)
    assert health.skipped_in_a_row == 0


def test_params_are_written_anew_when_they_have_changed(policy, tmp_path, monkeypatch):
    written = []
    write = module.write_params
    monkeypatch.setattr(module, "write_params", lambda *a, **k: written.append(k["step"]) or write(*a, **k))
    health = watch(policy, tmp_path, stop_after=0)
    for n, step in enumerate([4, 4, 5, 5, 5], 1):
        health(unsound.phase_record(n, loss=1.0, step=step))
        health.after(n)
    assert written == [4, 5]
    headers = [read_bad_batch(path)[0] for path in sorted((tmp_path / "bad_batches").glob("iteration-*"))]
    assert [(h.number, h.params) for h in headers] == [(n, "params-iteration-000005.safetensors") for n in (3, 4, 5)]
    assert len(names(tmp_path)) == 4
