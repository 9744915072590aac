"""Completions are graded as they end, while the device decodes the others."""

from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from oarjax.data.problems import Problem
from oarjax.rollout.source import EndedRows
from oarjax.run.grades import RolloutGrading
from oarjax.step.iteration import draw
from oarjax.types import Grades, Rollout

TABLE = [bytes([97 + i]) for i in range(tiny.VOCAB)]
PROBLEMS = [Problem(prompt=f"p{b}", answer=f"a{b}", index=b) for b in range(16)]


class SlowGrader:
    """Grades nothing until it is told to, and then the last submission first."""

    def __init__(self, log):
        self.log, self.submitted = log, []

    def submit(self, samples):
        self.log.append(("graded", [sample.tokens for sample in samples]))
        self.submitted.append((samples, Future()))
        return self.submitted[-1][1]

    def finish(self):
        for samples, future in reversed(self.submitted):
            values = np.asarray([len(set(s.completion)) + s.ended for s in samples], np.float32)
            answers = [s.prompt + s.answer + s.completion for s in samples]
            future.set_result(
                Grades(values, {"kinds": values}, ["graded"] * len(samples), answers, [""] * len(samples))
            )


def test_short_completions_are_graded_before_the_longest_has_ended(monkeypatch):
    cfg = tiny.config(rollout__segment=2, grading__overlong_window=4)
    _, steps, state = tiny.build(cfg)
    decode, graders, logs = steps.sample._decode, [], []

    def submit(batch):
        graders.append(SlowGrader(logs[-1]))
        return RolloutGrading(cfg.rollout, cfg.grading, graders[-1], PROBLEMS, TABLE, group=2)

    def logged_decode(*args, **static):
        logs[-1].append(("decode", None))
        return decode(*args, **static)

    monkeypatch.setattr(steps.sample, "_decode", logged_decode)
    for _ in range(2):  # what a resumed run submits is found among the recorded verdicts: it must be the same
        logs.append([])
        host = tiny.host(batches=[tiny.prompts()])._replace(submit=submit)
        draws = draw(state, 1, steps=steps, host=host, rollout=cfg.rollout, refills=cfg.update.refills)
        rollout, wait = draws.rollout, draws.grades
    assert logs[0] == logs[1]

    lengths = rollout.completion.sum(1)
    kinds = [kind for kind, _ in logs[0]]
    graded = [tokens for _, tokens in logs[0] if tokens]
    last_decode = len(kinds) - 1 - kinds[::-1].index("decode")
    assert kinds.index("graded") < last_decode
    assert max(graded[0]) < lengths.max()
    assert kinds[-1] == "graded"  # those that ended last
    assert sorted(length for tokens in graded for length in tokens) == sorted(lengths)

    graders[-1].finish()
    grades, whole = wait(), SlowGrader([])
    at_once = RolloutGrading(cfg.rollout, cfg.grading, whole, PROBLEMS, TABLE, group=2).rest(rollout)
    whole.finish()
    want = at_once()
    assert (grades.verdicts, grades.answers, grades.notes) == (want.verdicts, want.answers, want.notes)
    np.testing.assert_array_equal(grades.rewards, want.rewards)
    jax.tree.map(np.testing.assert_array_equal, grades.per_reward, want.per_reward)
    assert (want.per_reward["overlong"] < 0).any()


def test_a_rollout_that_ends_at_once_has_nothing_left_to_grade():
    """Every row was reported: the rest is empty, and the grades are still there."""
    cfg, grader = tiny.config(), SlowGrader([])
    grading = RolloutGrading(cfg.rollout, cfg.grading, grader, PROBLEMS[:2], TABLE, group=1)
    tokens, lengths = jnp.asarray([[3, 1, 0], [4, 5, 1]]), jnp.asarray([2, 3])
    for rows in ([1], [0]):
        grading.report(EndedRows(np.asarray(rows), tokens, lengths, lengths > 0))
    completion = np.arange(3) < np.asarray(lengths)[:, None]
    zeros = np.zeros((2, 3), np.float32)
    rollout = Rollout(np.asarray(tokens), completion, completion, zeros, zeros, np.ones(2, bool))
    wait = grading.rest(rollout)
    grader.finish()
    assert wait().answers == ["p0a0db", "p1a1efb"]
    assert len(grader.submitted) == 2


def test_rewards_of_a_group_see_all_of_it():
    """Nothing is submitted before the end; then all rows at once, with their group, columns and limit."""
    cfg, grader = tiny.config(grading__rewards=[{"name": "length"}], rollout__stop=["b"]), SlowGrader([])
    grading = RolloutGrading(cfg.rollout, cfg.grading, grader, PROBLEMS[:2], TABLE, group=2)
    tokens, lengths = jnp.asarray([[3, 1, 0], [4, 5, 1]]), jnp.asarray([2, 3])
    grading.report(EndedRows(np.asarray([1]), tokens, lengths, lengths > 0))
    assert not grader.submitted
    completion = np.arange(3) < np.asarray(lengths)[:, None]
    zeros = np.zeros((2, 3), np.float32)
    grading.rest(Rollout(np.asarray(tokens), completion, completion, zeros, zeros, np.ones(2, bool)))
    ((samples, _),) = grader.submitted
    assert [(s.group, s.tokens, s.limit) for s in samples] == [(0, 2, cfg.rollout.max_new), (0, 3, cfg.rollout.max_new)]
    assert [s.completion for s in samples] == ["d", "ef"]  # cut before the stop string
