"""Advantages, ratios, surrogates, aggregation and the composed loss: hand-worked cases and invariances."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from oarjax.credit.gate import reshape
from oarjax.rl.grpo import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    entropy,
    group_advantages,
    kl_estimate,
    overlong_penalty,
    policy_loss,
    policy_ratio,
    without_truncated,
    zero_variance_groups,
)
from oarjax.rl.off_policy import Importance
from oarjax.types import Mean, TrainBatch

NAN = jnp.nan

# --- advantages -----------------------------------------------------------------------------------------------------

REWARDS = jnp.array([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0, NAN, 3.0, NAN])


@pytest.mark.parametrize(
    ("scale", "ddof", "first", "third"),
    [
        # group 1: mean .5, squares 4 * .25 = 1; std sqrt(1/3).   group 3: mean 2, squares 2; std sqrt(2/1)
        ("group", 1, 0.5 * 3**0.5, 2**-0.5),
        # std sqrt(1/4) = .5 and sqrt(2/2) = 1
        ("group", 0, 1.0, 1.0),
        # ten graded rewards, mean 1.4, squares 2 * .16 + 2 * 1.96 + 4 * .36 + .16 + 2.56 = 8.4; variance 8.4 / 9
        ("batch", 1, 0.5 / (8.4 / 9) ** 0.5, 1 / (8.4 / 9) ** 0.5),
        ("none", 1, 0.5, 1.0),
    ],
)
def test_group_advantages_hand_worked(scale, ddof, first, third):
    advantages = group_advantages(REWARDS, group_size=4, scale=scale, ddof=ddof, eps=0.0)
    expected = [first, -first, -first, first, 0, 0, 0, 0, -third, 0, third, 0]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_eps_is_added_to_the_std():
    # std of (0, 1) with ddof 0 is .5: .5 / (.5 + .25)
    advantages = group_advantages(jnp.array([0.0, 1.0]), group_size=2, ddof=0, eps=0.25)
    np.testing.assert_allclose(advantages, [-2 / 3, 2 / 3], rtol=1e-6)


def test_zero_variance_groups():
    # mixed, equal, one graded, none graded, equal among the graded
    rewards = jnp.array([0.0, 1.0, 0.5, 0.5, 1.0, NAN, NAN, NAN])
    np.testing.assert_array_equal(zero_variance_groups(rewards, group_size=2), [False, True, True, True])
    rewards = jnp.array([0.3, NAN, 0.3, 0.3, 0.2, NAN])
    np.testing.assert_array_equal(zero_variance_groups(rewards, group_size=3), [True, False])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    # the float32 mean of seven rewards of .1 is not .1, and eps may be 0
    rewards = jnp.concatenate([jnp.full(7, 0.1), jnp.arange(7.0)])
    assert (group_advantages(rewards, group_size=7, scale=scale, eps=0.0)[:7] == 0).all()


def test_all_rewards_missing():
    assert (group_advantages(jnp.full(4, NAN), group_size=2, scale="batch") == 0).all()


@settings(max_examples=15, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, np.nan]), min_size=12, max_size=12),
    scale=st.sampled_from(["group", "batch", "none"]),
    seed=st.integers(0, 99),
)
def test_advantages_follow_their_rows(rewards, scale, seed):
    """Centred in each group; permuting groups, or rows inside them, permutes the result; a shift changes nothing."""
    rng, rewards = np.random.default_rng(seed), np.asarray(rewards, np.float32)
    advantages = np.asarray(group_advantages(jnp.asarray(rewards), group_size=4, scale=scale))
    assert np.isfinite(advantages).all()
    np.testing.assert_allclose(advantages.reshape(3, 4).sum(1), 0, atol=1e-5)
    order = np.concatenate([g * 4 + rng.permutation(4) for g in rng.permutation(3)])
    for other in (rewards, rewards + 8):
        moved = group_advantages(jnp.asarray(other[order]), group_size=4, scale=scale)
        np.testing.assert_allclose(moved, advantages[order], atol=1e-5)


def test_ragged_groups_are_refused():
    with pytest.raises(ValueError, match="7 rows are not whole groups of 4; pad the last group with NaN"):
        group_advantages(jnp.zeros(7), group_size=4)


def test_overlong_penalty_hand_worked():
    # limit 100, window 20: nothing up to 80, 90 is half way, all of it at 100
    lengths = jnp.array([10, 80, 85, 90, 100, 120])
    penalty = partial(overlong_penalty, max_length=100, penalty=2.0)
    np.testing.assert_allclose(penalty(lengths, window=20), [0, 0, 0.5, 1, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(penalty(lengths, window=0), [0, 0, 0, 0, 0, 2])
    with pytest.raises(ValueError, match=r"window must be in 0 \.\. max_length = 100 tokens, got 101"):
        penalty(lengths, window=101)


def test_without_truncated():
    kept = without_truncated(jnp.ones((2, 3), bool), jnp.array([True, False]))
    np.testing.assert_array_equal(kept, [[True] * 3, [False] * 3])


# --- ratios, surrogates, KL, entropy --------------------------------------------------------------------------------


def test_token_ratio_is_bounded_and_one_outside():
    logps = jnp.log(jnp.array([[0.5, 0.2, 0.9]])).at[0, 2].set(NAN)
    ratio = policy_ratio(logps, jnp.log(jnp.array([[0.25, 0.4, 0.1]])), jnp.array([[True, True, False]]))
    np.testing.assert_allclose(ratio, [[2, 0.5, 1]], rtol=1e-6)
    far = policy_ratio(jnp.array([[0.0, -90.0]]), jnp.array([[-90.0, 0.0]]), jnp.ones((1, 2), bool))
    np.testing.assert_allclose(far, [[np.exp(20), np.exp(-20)]], rtol=1e-5)


def test_sequence_ratio_is_the_geometric_mean():
    # 2, 1/2, 8 -> cube root of 8 = 2 for every token; the fourth is not valid
    logps, old = jnp.log(jnp.array([[2.0, 0.5, 8.0, 5.0]])), jnp.zeros((1, 4))
    mask = jnp.array([[True, True, True, False]])
    np.testing.assert_allclose(policy_ratio(logps, old, mask, level="sequence"), [[2] * 4], rtol=1e-6)
    # d ratio / d logp = ratio / 3 for each of the three
    slope = jax.grad(lambda x: policy_ratio(x, old, mask, level="sequence")[0, 0])(logps)
    np.testing.assert_allclose(slope, [[2 / 3, 2 / 3, 2 / 3, 0]], rtol=1e-6)


RATIO = jnp.array([[0.5, 1.0, 1.2, 2.0, 4.0]])


def test_clipped_surrogate_hand_worked():
    surrogate = partial(clipped_surrogate, RATIO, clip_low=0.2, clip_high=0.3)
    # A = 1: min(r, clip(r, .8, 1.3)).   A = -1: the larger of the two, negated
    np.testing.assert_allclose(surrogate(jnp.ones((1, 5))), [[0.5, 1, 1.2, 1.3, 1.3]], rtol=1e-6)
    np.testing.assert_allclose(surrogate(-jnp.ones((1, 5))), [[-0.8, -1, -1.2, -2, -4]], rtol=1e-6)
    # dual clip at 3 touches only A < 0
    np.testing.assert_allclose(surrogate(jnp.ones((1, 5)), dual_clip=3.0), [[0.5, 1, 1.2, 1.3, 1.3]], rtol=1e-6)
    np.testing.assert_allclose(surrogate(-jnp.ones((1, 5)), dual_clip=3.0), [[-0.8, -1, -1.2, -2, -3]], rtol=1e-6)


def test_clipped_tokens_have_no_gradient():
    def slope(advantage):
        a = jnp.full((1, 5), advantage)
        clipped = partial(clipped_surrogate, advantages=a, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
        return jax.grad(lambda r: clipped(r).sum())(RATIO)

    np.testing.assert_allclose(slope(1.0), [[1, 1, 1, 0, 0]])
    np.testing.assert_allclose(slope(-1.0), [[0, -1, -1, -1, 0]])


def test_dual_clip_is_a_cap_on_the_unclipped_ratio_when_above_the_range():
    ratio = jnp.linspace(0.1, 6, 60)[None]
    for advantage in (-1.5, 1.5):
        a = jnp.full(ratio.shape, advantage)
        capped = jnp.minimum(jnp.minimum(ratio, 1.5) * a, jnp.clip(ratio, 0.8, 1.28) * a)
        np.testing.assert_allclose(clipped_surrogate(ratio, a, dual_clip=1.5), capped, rtol=1e-6)


def test_cispo_hand_worked():
    # weights min(r, 2) are constants: value and gradient in logp are w * A * (logp, 1)
    logps, a = jnp.full((1, 5), -0.5), jnp.full((1, 5), 3.0)
    weights = np.array([[0.5, 1, 1.2, 2, 2]])
    np.testing.assert_allclose(cispo_surrogate(logps, RATIO, a, ratio_cap=2.0), -1.5 * weights, rtol=1e-6)
    slope = jax.grad(lambda x: cispo_surrogate(x, jnp.exp(x) * 0 + RATIO, a, ratio_cap=2.0).sum())(logps)
    np.testing.assert_allclose(slope, 3 * weights, rtol=1e-6)


def test_kl_estimators_in_expectation(x64):
    """Over a whole categorical: k1 and k3 average to KL(p || q); gradients are those the docstring names."""
    rng = np.random.default_rng(0)
    logits, ref = jnp.asarray(rng.normal(size=6)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=6)))

    def forward(x):  # KL(p || q)
        p = jax.nn.log_softmax(x)
        return jnp.sum(jnp.exp(p) * (p - ref))

    def reverse(x):  # KL(q || p)
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(x)))

    def average(x, estimator):  # over tokens of the policy, which is not differentiated as a sampler
        p = jax.nn.log_softmax(x)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(p)) * kl_estimate(p, ref, estimator=estimator))

    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(average(logits, estimator), forward(logits), rtol=1e-12)
    slope = {k: jax.grad(partial(average, estimator=k))(logits) for k in ("k1", "k2", "k3")}
    np.testing.assert_allclose(slope["k1"], 0, atol=1e-12)
    np.testing.assert_allclose(slope["k2"], jax.grad(forward)(logits), atol=1e-12)
    np.testing.assert_allclose(slope["k3"], jax.grad(reverse)(logits), atol=1e-12)


def test_kl_hand_worked():
    # x = ref - logp = log 2: -.693, .2402, 2 - .693 - 1 = .3069; an absurd gap stays finite
    logps, ref = jnp.array([-1.0]), jnp.array([-1.0 + np.log(2)], jnp.float32)
    for estimator, value in (("k1", -0.693147), ("k2", 0.240227), ("k3", 0.306853)):
        np.testing.assert_allclose(kl_estimate(logps, ref, estimator=estimator), [value], rtol=1e-5)
    assert np.isfinite(kl_estimate(jnp.array([-1000.0]), jnp.array([0.0]))[0])


def test_entropy_hand_worked():
    # uniform over 4: log 4.  p = (1/2, 1/4, 1/4): 1.5 log 2, also with an impossible fourth outcome
    logits = jnp.array([[3.0, 3.0, 3.0, 3.0], [0.0, -np.log(2), -np.log(2), -jnp.inf]], jnp.float32)
    np.testing.assert_allclose(entropy(logits), [np.log(4), 1.5 * np.log(2)], rtol=1e-6)
    assert entropy(logits.astype(jnp.bfloat16)).dtype == jnp.float32


# --- aggregation ----------------------------------------------------------------------------------------------------

VALUES = jnp.array([[1.0, 2.0, 3.0, NAN], [10.0, NAN, NAN, NAN], [NAN] * 4])
VALID = jnp.array([[True, True, True, False], [True, False, False, False], [False] * 4])


@pytest.mark.parametrize(
    ("mode", "rows", "total", "count"),
    [
        ("dapo", "filled", 16, 4),
        ("grpo", "filled", 2 + 10, 2),  # the rows' means
        ("grpo", "all", 2 + 10, 3),
        ("dr_grpo", "filled", 16, 2 * 8),
        ("dr_grpo", "all", 16, 3 * 8),
        ("bnpo", "filled", 4, 1),
    ],
)
def test_aggregate_hand_worked(mode, rows, total, count):
    mean = aggregate(VALUES, VALID, mode=mode, max_length=8, rows=rows)
    assert (float(mean.total), float(mean.count)) == (total, count)


@pytest.mark.parametrize("mode", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_aggregate_of_nothing(mode):
    mean = aggregate(VALUES[2:], VALID[2:], mode=mode, max_length=8)
    assert (float(mean.total), float(mean.count), float(mean.value)) == (0, 0, 0)


def test_bnpo_depends_on_the_cut_and_dapo_does_not():
    pieces = [aggregate(VALUES[i : i + 1], VALID[i : i + 1], mode="bnpo", max_length=8) for i in range(3)]
    assert (pieces[0] + pieces[1] + pieces[2]).value == (2 + 10) / 2  # not 16 / 4; the empty piece counts for nothing
    pieces = [aggregate(VALUES[i : i + 1], VALID[i : i + 1], mode="dapo", max_length=8) for i in range(3)]
    assert (pieces[0] + pieces[1] + pieces[2]).value == 16 / 4


# --- the whole loss -------------------------------------------------------------------------------------------------

FULL = {
    "level": "token",
    "kl_beta": 0.04,
    "entropy_bonus": 0.01,
    "importance": Importance("token_truncate", high=1.1),
    "max_drift": 0.05,
    "dual_clip": 1.5,
    "max_length": 7,
}


def make_batch(rows=6, tokens=7, prompt=2, seed=0):
    """Current log-probs, entropies and a batch with rows of different lengths, the last row empty."""
    rng = np.random.default_rng(seed)
    logps = jnp.asarray(-rng.exponential(size=(rows, tokens)))  # float64 under x64

    def near():
        return logps + jnp.asarray(0.3 * rng.normal(size=logps.shape))

    lengths = np.append(rng.integers(1, tokens + 1, rows - 1), 0)
    completion = jnp.asarray(np.arange(tokens) < lengths[:, None])
    batch = TrainBatch(
        tokens=jnp.zeros((rows, prompt + tokens), jnp.int32),
        valid=jnp.concatenate([jnp.ones((rows, prompt), bool), completion], 1),
        completion=completion,
        advantages=jnp.asarray(rng.normal(size=logps.shape)),
        old_logps=near(),
        ref_logps=near(),
        behaviour_logps=near(),
    )
    return logps, jnp.asarray(rng.exponential(size=logps.shape)), batch


def loss_and_gradient(logps, entropies, batch, **settings):
    """Sum, count, metrics, and the gradient of the SUM in log-probs and entropies."""

    def total(logps, entropies):
        mean, metrics = policy_loss(logps, entropies, batch, **settings)
        return mean.total, (mean, metrics)

    (_, (mean, metrics)), gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(logps, entropies)
    return mean, metrics, gradient


def rows_of(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo", "gmpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["dapo", "grpo", "dr_grpo"])
def test_microbatched_is_whole(surrogate, level, aggregation, x64):
    settings = FULL | {"surrogate": surrogate, "level": level, "aggregation": aggregation}
    whole_args = make_batch()
    whole, metrics, gradient = loss_and_gradient(*whole_args, **settings)
    mean, parts, gradients = Mean(jnp.zeros(()), jnp.zeros(())), [], []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        piece, piece_metrics, piece_gradient = loss_and_gradient(*rows_of(whole_args, rows), **settings)
        mean = mean + piece
        parts.append(piece_metrics)
        gradients.append(piece_gradient)
    np.testing.assert_allclose(mean.value, whole.value, rtol=1e-12)
    assert mean.count == whole.count
    together = jax.tree.map(lambda *pieces: jnp.concatenate(pieces) / mean.count, *gradients)
    for ours, theirs in zip(together, gradient):
        np.testing.assert_allclose(ours, theirs / whole.count, rtol=1e-12)
    for name, metric in metrics.items():
        np.testing.assert_allclose(sum(p[name].total for p in parts), metric.total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_padding_and_junk_change_nothing(aggregation):
    """More padded tokens, more empty rows, and NaN wherever the mask is False."""
    settings = FULL | {"aggregation": aggregation, "level": "sequence"}
    logps, entropies, batch = make_batch()
    mean, metrics, gradient = loss_and_gradient(logps, entropies, batch, **settings)

    def widen(x):
        if x.dtype == bool:
            return jnp.pad(x, ((0, 2), (0, 3)))
        if x.dtype == jnp.int32:
            return jnp.pad(x, ((0, 2), (0, 3)))
        junk = jnp.where(batch.completion, x, NAN)
        return jnp.pad(junk, ((0, 2), (0, 3)), constant_values=NAN)

    wide = jax.tree.map(widen, (logps, entropies, batch))
    mean2, metrics2, gradient2 = loss_and_gradient(*wide, **settings)
    np.testing.assert_allclose(mean2.value, mean.value, rtol=1e-6)
    for ours, theirs in zip(gradient2, gradient):
        np.testing.assert_allclose(ours[:6, :7] / mean2.count, theirs / mean.count, rtol=1e-5, atol=1e-7)
        assert (ours[6:] == 0).all()
        assert (ours[:, 7:] == 0).all()
    for name in metrics:
        np.testing.assert_allclose(metrics2[name].value, metrics[name].value, rtol=1e-5, atol=1e-7)


def test_permuting_rows_permutes_gradients():
    args, order = make_batch(), jnp.array([3, 5, 0, 2, 1, 4])
    mean, _, gradient = loss_and_gradient(*args, **FULL)
    mean2, _, gradient2 = loss_and_gradient(*rows_of(args, order), **FULL)
    np.testing.assert_allclose(mean2.value, mean.value, rtol=1e-6)
    for ours, theirs in zip(gradient2, gradient):
        np.testing.assert_array_equal(ours, theirs[order])


def test_on_policy_gradient_is_the_policy_gradient():
    """Without old log-probs the ratio is 1: the loss is -mean A, its gradient -A / tokens, for clip and CISPO alike."""
    logps, entropies, batch = make_batch()
    batch = batch.replace(old_logps=None, ref_logps=None, behaviour_logps=None)
    expected = -jnp.where(batch.completion, batch.advantages, 0) / batch.completion.sum()
    for surrogate in ("clip", "cispo"):
        mean, metrics, (gradient, _) = loss_and_gradient(
            logps, entropies, batch, surrogate=surrogate, aggregation="dapo", max_length=7
        )
        np.testing.assert_allclose(gradient / mean.count, expected, rtol=1e-6)
        assert metrics["ratio"].value == 1
        assert metrics["clip_low"].value == metrics["clip_high"].value == 0
        assert set(metrics) == {"ratio", "entropy", "clip_low", "clip_high"}
    np.testing.assert_allclose(metrics["entropy"].value, entropies[batch.completion].mean(), rtol=1e-6)


def test_weights_of_one_are_grpo_exactly():
    logps, entropies, batch = make_batch()
    sequence = batch.advantages[:, 0]
    plain = jnp.where(batch.completion, sequence[:, None], 0)
    shaped = reshape(sequence, jnp.ones_like(logps), batch.completion)
    one, two = (loss_and_gradient(logps, entropies, batch.replace(advantages=a), **FULL) for a in (plain, shaped))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_sampler_weight_entropy_bonus_and_kl_hand_worked():
    # one token: ratio 1, A = 2, old / behaviour = 1.5 cut at 1.2 -> -2.4; k3 at log 2: .306853 * .1; .5 nats * .01
    half = jnp.log(jnp.array([[0.5]]))
    batch = TrainBatch(
        tokens=jnp.zeros((1, 2), jnp.int32),
        valid=jnp.ones((1, 2), bool),
        completion=jnp.ones((1, 1), bool),
        advantages=jnp.array([[2.0]]),
        old_logps=half,
        ref_logps=half + np.log(2),
        behaviour_logps=half - np.log(1.5),
    )
    capped = Importance("token_truncate", high=1.2)
    mean, metrics = policy_loss(
        half, jnp.array([[0.5]]), batch, kl_beta=0.1, entropy_bonus=0.01, importance=capped, max_length=1
    )
    np.testing.assert_allclose(mean.value, -2.4 + 0.0306853 - 0.005, rtol=1e-6)
    np.testing.assert_allclose(metrics["sampler_gap"].value, np.log(1.5), rtol=1e-6)
    np.testing.assert_allclose(metrics["sampler_weight"].value, 1.2, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl"].value, 0.306853, rtol=1e-5)
    # the gap is a distance: the same with the sampler above the trainer, and the weight is then 1 / 1.5
    _, metrics = policy_loss(
        half, jnp.array([[0.5]]), batch.replace(behaviour_logps=half + np.log(1.5)), importance=capped, max_length=1
    )
    np.testing.assert_allclose(metrics["sampler_gap"].value, np.log(1.5), rtol=1e-6)
    np.testing.assert_allclose(metrics["sampler_weight"].value, 1 / 1.5, rtol=1e-6)


def test_clip_shares_hand_worked():
    # ratios .5, 2, .5, 2 with A = -1, 1, 1, -1: the first is clipped low, the second high
    ratio = jnp.array([[0.5, 2.0, 0.5, 2.0]])
    batch = TrainBatch(
        tokens=jnp.zeros((1, 5), jnp.int32),
        valid=jnp.ones((1, 5), bool),
        completion=jnp.ones((1, 4), bool),
        advantages=jnp.array([[-1.0, 1.0, 1.0, -1.0]]),
        old_logps=jnp.zeros((1, 4)),
        ref_logps=None,
        behaviour_logps=None,
    )
    _, metrics = policy_loss(jnp.log(ratio), jnp.zeros((1, 4)), batch, max_length=4)
    assert (metrics["clip_low"].value, metrics["clip_high"].value) == (0.25, 0.25)
    np.testing.assert_allclose(metrics["ratio"].value, 1.25, rtol=1e-6)


def test_jitted_equals_plain():
    args = make_batch()
    plain, jitted = loss_and_gradient(*args, **FULL), jax.jit(partial(loss_and_gradient, **FULL))(*args)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), plain, jitted)


def test_missing_log_probs_are_named():
    logps, entropies, batch = make_batch()
    with pytest.raises(ValueError, match=r"kl_beta = 0\.1 needs batch\.ref_logps"):
        policy_loss(logps, entropies, batch.replace(ref_logps=None), kl_beta=0.1, max_length=7)
    bare = batch.replace(behaviour_logps=None)
    with pytest.raises(ValueError, match=r"importance needs batch\.behaviour_logps"):
        policy_loss(logps, entropies, bare, importance=Importance("token_truncate"), max_length=7)


def test_unknown_modes_are_named(unchecked):
    args = make_batch()
    for field, accepted in {
        "surrogate": "clip, cispo, sapo or gmpo",
        "level": "token or sequence",
        "aggregation": "grpo, bnpo, dapo or dr_grpo",
        "kl_estimator": "k1, k2 or k3",
        "rows": "filled or all",
    }.items():
        with pytest.raises(ValueError, match=f"must be {accepted}, got 'nonsense'"):
            policy_loss(*args, **FULL | {field: "nonsense"})
    with pytest.raises(ValueError, match="scale must be group, batch or none, got 'nonsense'"):
        group_advantages(REWARDS, group_size=4, scale="nonsense")
