"""What is not finite on the device: the update is skipped or the row falls back to weights of 1, and it is counted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import unsound

from oarjax.credit.probe import Probe
from oarjax.credit.resolved import resolve_method
from oarjax.step.gradients import apply_sums, gradient_sums
from oarjax.step.iteration import iterate
from oarjax.step.metrics import QUANTITIES, all_finite, nonfinite_rows, rollout_metrics
from oarjax.step.programs import make_optimizer, make_steps
from oarjax.types import Mean, TrainBatch, TrainState

NAMES = ("loss", "gradient", "params")


def batch(value=1.0) -> TrainBatch:
    """One microbatch of one row of two tokens."""
    return TrainBatch(
        tokens=jnp.zeros((1, 1, 3), jnp.int32),
        valid=jnp.ones((1, 1, 3), bool),
        completion=jnp.ones((1, 1, 2), bool),
        advantages=jnp.full((1, 1, 2), value),
        old_logps=None,
        ref_logps=None,
        behaviour_logps=None,
    )


def updated(loss, *, value=1.0, rate=0.5):
    """The state after one update of w = [1, 2], and its metrics."""
    tx = optax.sgd(rate)
    params = {"w": jnp.array([1.0, 2.0])}
    state = TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(0))

    def mean(params, rows):
        return Mean(jnp.sum(loss(params["w"]) * rows.advantages), jnp.float32(2)), {}

    state, metrics = jax.jit(
        lambda s, b: apply_sums(tx, s, gradient_sums(mean)(s.params, None, jax.tree.map(lambda x: x[0], b)), None)
    )(state, batch(value))
    return state, {name: float(metrics[f"nonfinite/{name}"].value) for name in NAMES}, metrics


def test_a_sound_update_is_taken():
    state, wrong, metrics = updated(lambda w: w)
    np.testing.assert_array_equal(state.params["w"], [0.75, 1.75])  # w - .5 * advantage / 2 tokens
    assert wrong == {"loss": 0, "gradient": 0, "params": 0}
    assert metrics["skipped"].value == 0
    assert state.step == 1


@pytest.mark.parametrize(
    ("loss", "given", "wrong"),
    [
        (lambda w: w, {"value": jnp.nan}, {"loss": 1, "gradient": 1, "params": 0}),
        (lambda w: w, {"value": jnp.inf}, {"loss": 1, "gradient": 1, "params": 0}),
        # sqrt(0): a loss of 0, its gradient inf * 0
        (lambda w: jnp.sqrt(0 * w), {}, {"loss": 0, "gradient": 1, "params": 0}),
        # 1e30 is finite, the norm of such a gradient is not
        (lambda w: 1e30 * (w - 1), {"value": 1.0}, {"loss": 0, "gradient": 1, "params": 0}),
        (lambda w: w, {"rate": 1e39}, {"loss": 0, "gradient": 0, "params": 1}),
        (lambda w: 1e9 * w, {"rate": 1e30}, {"loss": 0, "gradient": 0, "params": 1}),
    ],
)
def test_an_update_that_is_not_finite_changes_nothing_and_says_why(loss, given, wrong):
    state, found, metrics = updated(loss, **given)
    np.testing.assert_array_equal(state.params["w"], [1, 2])
    assert state.step == 0
    assert metrics["skipped"].value == 1
    assert found == wrong


def test_rows_are_counted_inside_their_masks():
    values = jnp.array([[1.0, jnp.nan], [jnp.inf, 0.0], [0.0, 0.0], [jnp.nan, jnp.nan]])
    inside = jnp.array([[True, False], [True, True], [True, True], [True, True]])
    rows = jnp.array([True, True, True, False])
    found = nonfinite_rows(
        {"importance": values, "advantages": values[:, 0], "old_logps": None},
        {"importance": inside, "advantages": jnp.ones(4, bool), "old_logps": inside},
        rows,
    )
    assert set(found) == {"nonfinite/importance", "nonfinite/advantages"}
    for mean in found.values():  # the first row's NaN is outside its mask, the last row does not count
        assert (mean.total, mean.count) == (1, 3)


def test_all_finite():
    assert all_finite({"a": jnp.ones(2), "b": (jnp.zeros(()),)})
    assert not all_finite({"a": jnp.ones(2), "b": (jnp.full((), -jnp.inf),)})


def test_the_samplers_log_probs_are_counted_over_all_rows():
    made = unsound.evidence().rollout
    rollout = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), made)
    grades = tiny.grades(np.array([1.0, 0.0, 1.0, 1.0]))
    assert rollout_metrics(rollout, grades, equal=np.zeros(2, bool))["nonfinite/behaviour_logps"] == 0
    logps = rollout.behaviour_logps.copy()
    logps[0, 4] = np.nan  # after the row's end
    logps[1, 0], logps[2, 1] = np.nan, -np.inf
    rollout = replace(rollout, behaviour_logps=logps)
    assert rollout_metrics(rollout, grades, equal=np.zeros(2, bool))["nonfinite/behaviour_logps"] == 1 / 2


def built(cfg, read):
    """Steps whose importance comes from a probe of one's own."""
    policy, _, state = tiny.build(cfg)
    tx, _ = make_optimizer(cfg)
    probe = Probe(read=read, kind="scalar", reads="completion")
    method = resolve_method(cfg.credit, probe=probe)
    return make_steps(policy, tx, tiny.one_device(), cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD, method=method), state


def run(steps, state, cfg, **changes):
    """One iteration, and what its watch was shown."""
    shown = []
    state, done = iterate(
        state, None, 1, steps=steps, host=tiny.host()._replace(watch=shown.append, **changes), cfg=cfg
    )
    return state, done, shown


def wrong(seen):
    return [
        name
        for name in QUANTITIES
        if f"nonfinite/{name}" in seen.metrics and seen.metrics[f"nonfinite/{name}"].total > 0
    ]


@pytest.mark.slow
def test_rows_with_importance_that_is_nan_are_plain_grpo():
    cfg = tiny.config(credit__method="oar_g", update__skip_zero_variance=False)

    def even(policy, params, hidden, reading):  # NaN in rows whose first token is even
        bad = reading.tokens[:, 0] % 2 == 0
        return jnp.where(bad, jnp.nan, 1.0) * hidden.sum((1, 2))

    steps, state = built(cfg, even)
    state, done, shown = run(steps, state, cfg)
    made = done.rollout.completion.shape[1]
    bad = done.rollout.tokens[:, -made] % 2 == 0
    bad &= done.span.reasoning.any(1)
    assert 0 < bad.sum() < 16
    assert done.metrics["nonfinite/importance"] == pytest.approx(bad.sum() / 16)
    assert done.metrics["nonfinite/weights"] == 0
    assert (done.weights[bad] == 1).all()
    assert (done.weights[~bad] != 1).any()
    assert done.metrics["skipped"] == 0
    assert int(state.step) == 1
    assert all_finite(state.params)
    assert [(s.phase, wrong(s)) for s in shown] == [("credit", ["importance"]), ("update", [])]
    importance = np.asarray(shown[0].evidence.scores.importance)
    assert importance.shape == shown[0].evidence.completion.shape
    assert np.isnan(importance).any((1, 2)).any()


def test_damaged_params_are_seen_where_they_are_used():
    """NaN params give NaN log-probs and equal completions, so that no update is made: the watch hears of it anyway."""
    cfg = tiny.config()
    _, steps, state = tiny.build(cfg)
    scale = state.params["norm"]["scale"].at[3].set(jnp.nan)
    state = replace(state, params=state.params | {"norm": {"scale": scale}})
    after, done, shown = run(steps, state, cfg)
    assert done.metrics["nonfinite/behaviour_logps"] == 1
    assert shown[0].phase == "sample"
    assert wrong(shown[0]) == ["behaviour_logps"]
    evidence = shown[0].evidence
    assert evidence.numbers.reshape(-1).tolist() == list(range(16))
    np.testing.assert_array_equal(evidence.rollout.tokens.reshape(16, -1), done.rollout.tokens)
    assert int(after.step) == 0


def test_rewards_that_overflow_are_counted_and_the_update_is_skipped():
    cfg = tiny.config()
    _, steps, state = tiny.build(cfg)
    before = jax.device_get(state.params)
    world = tiny.host(reward=lambda r: np.where(np.arange(16) % 4 < 2, 3e38, 2e38))
    shown = []
    state, done = iterate(state, None, 1, steps=steps, host=world._replace(watch=shown.append), cfg=cfg)
    assert done.metrics["nonfinite/advantages"] == 1
    assert done.metrics["skipped"] == 1
    assert [(s.phase, wrong(s)[0]) for s in shown] == [("credit", "advantages"), ("update", "loss")]
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def test_a_reward_that_is_infinite_is_an_ungraded_row():
    """Its group learns from the others as if it had not been there."""
    cfg = tiny.config(update__skip_zero_variance=False)
    results = []
    for bad in (np.inf, np.nan):
        _, steps, state = tiny.build(cfg)
        world = tiny.host(reward=lambda r, bad=bad: np.where(np.arange(16) == 5, bad, tiny.even_tokens(r)))
        results.append(iterate(state, None, 1, steps=steps, host=world, cfg=cfg))
    (a, done), (b, _) = results
    assert done.metrics["ungraded"] == 1 / 16
    assert done.metrics["skipped"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a.params), jax.device_get(b.params))
