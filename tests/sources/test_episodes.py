"""Episodes are rows to which turns and observations are appended; only what the policy wrote is trained on."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rich.console import Console

from oarjax.data.problems import Problem
from oarjax.environments.pool import Step
from oarjax.errors import ConfigError
from oarjax.grading.pool import GraderError
from oarjax.report.console import OnceWarnings
from oarjax.rollout.logps import token_logps
from oarjax.rollout.source import Batch, requested, rollout_of
from oarjax.run.grades import last_states, turn_rewards, without_failed, written_turns
from oarjax.run.hints import HintReader, played_turns
from oarjax.sources.episodes import EpisodeSource
from oarjax.step.hints import turn_marks
from oarjax.step.iteration import iterate
from oarjax.step.minibatches import join_grades
from oarjax.training.trainer import explain_grades
from oarjax.types import AnswerSpan, Grades, Hints

LONG = 24


def text(ids):
    return " ".join(map(str, ids))


def reply(said):
    return [int(i) for i in said.split()]


class Scripted:
    """An environment that answers turn k of a row of problem p, and says when it ends."""

    def __init__(self, answer, *, final=0.0):
        self.answer, self.final, self.finished = answer, final, []

    def advance(self, episodes):
        return [self.answer(episode) for episode in episodes]

    def finish(self, episodes):
        self.finished += episodes
        return [Step(None, self.final) for _ in episodes]


def two_turns(episode):
    """Answer the first turn, and end with the second; every turn is worth its number."""
    turn = len(episode.texts)
    return Step("7 8 9" if turn == 1 else None, float(turn))


@pytest.fixture(scope="module")
def made():
    cfg = tiny.config(rollout__max_new=LONG, loss__kl_beta=0.1)
    policy, steps, state = tiny.build(cfg)
    return cfg, policy, steps, state


def source_of(made, environments, most=4):
    _, _, steps, state = made
    sampler = tiny.sampler(steps, state.params)
    return EpisodeSource(sampler, environments, text, reply, lambda problem: {"problem": problem}, most=most)


def batch_of(made, seed=0):
    cfg = made[0]
    return Batch(tiny.prompts(seed=seed), jax.random.key(1), 1, 0, cfg.rollout.group_size, LONG)


def episodes(made, environments, most=4):
    batch = batch_of(made)
    return rollout_of(batch, requested(batch, source_of(made, environments, most).draw(batch)), pad_id=tiny.PAD)


def test_observations_are_holes_in_rows_whose_log_probs_are_those_of_the_whole_row(made):
    _, policy, _, state = made
    rollout = episodes(made, Scripted(two_turns))
    twice = rollout.origin.turns.max(1) == 1
    assert twice.sum() > len(twice) / 2
    width = rollout.tokens.shape[1] - LONG
    for b in np.flatnonzero(twice):
        first, second = written_turns(rollout)[b]
        end = len(first) + 3 + len(second)
        assert rollout.tokens[b, width : width + end].tolist() == [*first, 7, 8, 9, *second]
        assert rollout.completion[b, :end].tolist() == [True] * len(first) + [False] * 3 + [True] * len(second)
        assert rollout.extent[b].sum() == end
        assert turn_rewards(rollout)[b] == ([1.0, 2.0] if rollout.ended[b] else [1.0, 0.0])
    whole = tiny.logps_of(policy, state.params, rollout, temperature=made[0].rollout.temperature)
    np.testing.assert_allclose(whole, np.where(rollout.completion, rollout.behaviour_logps, 0), atol=2e-5)
    again = episodes(made, Scripted(two_turns))
    jax.tree.map(np.testing.assert_array_equal, rollout, again)


def test_a_row_of_one_turn_is_what_the_sampler_draws_without_an_environment(made):
    _, _, steps, state = made
    batch, sampler = batch_of(made), tiny.sampler(steps, state.params)
    alone = rollout_of(batch, requested(batch, sampler.draw(batch)), pad_id=tiny.PAD)
    once = episodes(made, Scripted(lambda episode: Step(None)))
    for name in ("tokens", "valid", "completion", "behaviour_logps", "ended"):
        np.testing.assert_array_equal(getattr(once, name), getattr(alone, name))


def test_who_else_goes_on_changes_no_token(made):
    both = episodes(made, Scripted(two_turns))
    even = episodes(made, Scripted(lambda e: two_turns(e) if e.columns["problem"] % 2 == 0 else Step(None, 5.0)))
    group = made[0].rollout.group_size
    for b in range(len(both.ended)):
        if b // group % 2 == 0:
            np.testing.assert_array_equal(both.tokens[b], even.tokens[b])
            np.testing.assert_array_equal(both.completion[b], even.completion[b])
        elif even.ended[b]:
            assert turn_rewards(even)[b] == [5.0]


def test_a_group_has_one_seed_and_problems_have_their_own(made):
    seen = []

    def remember(episode):
        seen.append((episode.columns["problem"], episode.seed))
        return Step(None)

    episodes(made, Scripted(remember))
    assert len(set(seen)) == len({problem for problem, _ in seen}) == len({seed for _, seed in seen}) > 1


def test_limits_end_episodes_that_their_environment_has_not(made):
    """By turns a row ended; by room it was cut, and the reward at the end still comes."""
    environment = Scripted(lambda episode: Step("7", 1.0), final=10.0)
    capped = episodes(made, environment, most=2)
    ended = capped.ended & (capped.origin.turns.max(1) == 1)
    assert ended.any()
    assert {tuple(turn_rewards(capped)[b]) for b in np.flatnonzero(ended)} == {(1.0, 11.0)}
    assert all(len(episode.observations) == len(episode.texts) for episode in environment.finished)
    full = episodes(made, Scripted(lambda episode: Step(" ".join("7" * LONG)), final=10.0))
    assert not full.ended.any()
    assert turn_rewards(full) == [[10.0]] * len(full.ended)  # the answer had no room, or the first turn was cut


def test_a_failed_episode_is_a_row_without_a_grade(made):
    fails = Scripted(lambda e: Step(None, 0.0, "crash: x") if e.columns["problem"] == 1 else Step(None))
    failing = episodes(made, fails)
    group = made[0].rollout.group_size
    rows = np.arange(len(failing.ended)) // group == 1
    failed = failing.origin.failed == "crash: x"
    assert failed[rows].any()
    assert set(failing.origin.failed[~failed]) == {""}
    assert not failed[~rows].any()
    assert failing.ended[failed].all(), "its policy was not cut"


@pytest.mark.parametrize(("reason", "verdict"), [("crash: x", "crash"), ("timeout: no answer", "timeout")])
def test_why_an_environment_failed_is_said_with_the_grades(made, reason, verdict):
    failing = episodes(made, Scripted(lambda episode: Step(None, 0.0, reason)))
    cut, rows = failing.origin.failed == "", len(failing.ended)
    ones, none = np.ones(rows, np.float32), [None] * rows
    grades = without_failed(Grades(ones, {"x": ones}, ["graded"] * rows, none, [""] * rows), failing)
    assert grades.verdicts == ["graded" if b else verdict for b in cut]
    assert set(grades.notes) - {""} == {f"the environment failed: {reason}"}
    assert np.array_equal(np.isnan(grades.rewards), ~cut)
    lost, warnings = join_grades([grades], np.flatnonzero(~cut)), OnceWarnings(Console(quiet=True), answers=False)
    if verdict == "crash":  # nothing can be learned
        with pytest.raises(GraderError, match=r"on every completion, .*environment failed: crash: x; mend it"):
            explain_grades(lost, warnings)
    else:
        explain_grades(lost, warnings)


def test_an_iteration_learns_from_what_the_policy_wrote_alone(made):
    """Environment tokens reach neither loss, advantages, entropy, KL nor lengths; their ids matter as context alone."""
    cfg, policy, steps, state = made
    batches, metrics = [], []

    def spied(sums, state, batch, start, stop, *, bucket):
        batches.append(jax.device_get(batch))
        return steps.accumulate(sums, state, batch, start, stop, bucket=bucket)

    host = tiny.host()._replace(source=lambda sampler: source_of(made, Scripted(two_turns)))
    copied, reference = jax.tree.map(jnp.copy, state), jax.tree.map(lambda x: 1.1 * x, state.params)
    _, done = iterate(copied, reference, 1, steps=steps._replace(accumulate=spied), host=host, cfg=cfg)
    metrics, rollout = done.metrics, done.rollout
    observed = rollout.extent & ~rollout.completion
    assert observed.any()
    assert metrics["length"] == pytest.approx(rollout.completion.sum(1).mean())
    assert metrics["prompt_tokens"] == rollout.valid.sum() - rollout.extent.sum()
    assert metrics["observed_tokens"] == pytest.approx(observed.sum(1).mean())
    assert metrics["turns"] == pytest.approx(1 + np.where(rollout.extent, rollout.origin.turns, 0).max(1).mean())
    for batch in batches:
        extent = batch.valid[..., -batch.completion.shape[-1] :]
        holes = extent & ~batch.completion
        assert not np.any(batch.advantages[holes])
    assert sum((b.valid[..., -b.completion.shape[-1] :] & ~b.completion).sum() for b in batches) > 0

    def scored(params, batch):
        tokens, valid = (jnp.asarray(x).reshape(-1, x.shape[-1]) for x in (batch.tokens, batch.valid))
        length, settings = batch.completion.shape[-1], {"temperature": cfg.rollout.temperature, "head_chunk": 64}
        found = token_logps(policy, params, tokens, valid, completion_length=length, **settings)
        return [np.asarray(x)[batch.completion.reshape(-1, length)] for x in found]

    (logps, entropies), (others, _) = (
        map(np.concatenate, zip(*(scored(params, batch) for batch in batches))) for params in (state.params, reference)
    )
    assert metrics["entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    assert metrics["kl"] == pytest.approx(np.mean(np.exp(others - logps) - 1 - (others - logps)), rel=1e-4)
    again = [sum(len(prompt) + start for start in starts) for prompt, starts in later_turns(rollout)]
    assert metrics["prefilled_again"] == pytest.approx(np.mean(again))
    assert sum(again) > 0


def later_turns(rollout):
    """Return every row's prompt, and where its turns after the first begin."""
    width = rollout.tokens.shape[1] - rollout.completion.shape[1]
    for tokens, valid, turns, written in zip(rollout.tokens, rollout.valid, rollout.origin.turns, rollout.completion):
        starts = [int(np.flatnonzero((turns == turn) & written)[0]) for turn in range(1, 1 + (turns * written).max())]
        yield tokens[:width][valid[:width]], starts


def test_rewards_see_turns_and_the_environment_at_its_end(made):
    last = Step(None, 1.0, state={"guesses": 3})
    rollout = episodes(made, Scripted(lambda e: Step("7", 0.5) if len(e.texts) == 1 else last))
    states, ended = last_states(rollout), rollout.ended & (rollout.origin.turns.max(1) == 1)
    assert ended.any()
    assert all((state == {"guesses": 3}) == bool(end) for state, end in zip(states, ended))


def values(prompt, turns, reference):
    """Judge a turn by its place, and by what it had read."""
    assert (prompt, reference) == ("2+2=", "4")
    return [10.0 * number + len(turn.observed) + turn.reward for number, turn in enumerate(turns)]


@pytest.mark.parametrize("marker", [None, values])
def test_turns_are_marked_by_the_environments_rewards_or_a_function_of_them(made, marker):
    rollout = episodes(made, Scripted(two_turns))
    table = [b"", b"", *(bytes([97 + i]) for i in range(tiny.VOCAB))]
    problems = dict.fromkeys(range(4), Problem("2+2=", "4", 0))
    reader = HintReader(problems, marker, "here", {}, 0, table, tiny.PAD, plays=marker is None)
    hints, width = reader(rollout, np.arange(4)), rollout.tokens.shape[1] - LONG
    twice = np.flatnonzero((rollout.origin.turns.max(1) == 1) & rollout.ended)
    assert len(twice)
    for b in twice:
        first, second = written_turns(rollout)[b]
        numbers = [1] * len(first) + [0] * 3 + [2] * len(second)
        marks = {None: [0, 1, 2], values: [0, 1, 10 + 3 + 2]}[marker]
        assert hints.turns[b, : len(numbers)].tolist() == numbers
        assert hints.marks[b, : len(numbers)].tolist() == [marks[number] for number in numbers]
        turns = played_turns(rollout, table)[b]
        assert turns[1].observed == "".join(table[i].decode() for i in rollout.tokens[b, width + len(first) :][:3])
    assert not hints.turns[~rollout.completion].any()
    if marker is not None:
        with pytest.raises(ConfigError, match=r"credit.marks: here returns \[1.0\] for an episode of 2 turns"):
            replace(reader, marker=lambda prompt, turns, reference: [1.0])(rollout, np.arange(4))


@pytest.mark.parametrize("method", ["turn_rewards", "turn_oar", "oar_p"])
def test_an_iteration_credits_turns(made, method):
    """All tokens of a turn have one advantage (turn_oar: of the last turns, the answers'), those of an episode A."""
    answer = {"style": "regex", "pattern": "."}
    cfg = tiny.config(
        rollout__max_new=LONG, credit__method=method, credit__answer=answer, credit__masking={"buckets": 2}
    )
    steps, state = tiny.build(cfg)[1:]
    scripted = Scripted(
        lambda episode: two_turns(episode) if len(episode.texts) > 2 else Step("7 8", len(episode.texts))
    )

    def find(rollout):
        turns = rollout.origin.turns
        last = rollout.completion & (turns == turns.max(1, where=rollout.extent, initial=0)[:, None]) & (turns > 0)
        return AnswerSpan(rollout.completion & ~last, last, last.any(1), turns)

    host = tiny.host()._replace(source=lambda sampler: source_of(made, scripted), find_answers=find)
    if method != "oar_p":
        host = host._replace(hints=lambda rollout, _: Hints(*turn_marks(rollout, turn_rewards(rollout))))
    _, done = iterate(jax.tree.map(jnp.copy, state), None, 1, steps=steps, host=host, cfg=cfg)
    weights, written, turns = done.weights, done.rollout.completion, done.rollout.origin.turns
    rows = np.flatnonzero((written & (turns == 2)).any(1) & (done.advantages != 0))
    assert len(rows)
    np.testing.assert_allclose(np.where(written, weights, 0).sum(1)[rows], written.sum(1)[rows], rtol=1e-4)
    within = [[weights[b, written[b] & (turns[b] == k)] for k in range(turns[b].max() + 1)] for b in rows]
    for each in within:
        assert all(np.ptp(turn) < 1e-5 for turn in (each[-1:] if method == "turn_oar" else each))
    assert any(abs(each[0].mean() - each[1].mean()) > 1e-3 for each in within)
