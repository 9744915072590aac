"""KL, entropy, aggregation and the composed loss: hand-worked cases and invariances."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.credit.gate import reshape
from oarjax.rl.loss import aggregate, entropy, kl_estimate, policy_loss, without_truncated
from oarjax.rl.off_policy import Importance
from oarjax.types import Mean, TrainBatch

NAN = jnp.nan

# --- KL, entropy, masks ---------------------------------------------------------------------------------------------


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


def test_without_truncated():
    kept = without_truncated(jnp.ones((2, 3), bool), jnp.array([True, False]))
    np.testing.assert_array_equal(kept, [[True] * 3, [False] * 3])


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


@pytest.mark.parametrize(
    ("surrogate", "aggregation"),
    [
        *product(["clip", "cispo"], ["dapo", "grpo", "dr_grpo"]),
        *((s, "dapo") for s in ("sapo", "gmpo", "vespo", "dppo")),
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
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


def test_unknown_modes_are_named():
    args = make_batch()
    for field, accepted in {
        "surrogate": "clip, cispo, sapo, gmpo, vespo or dppo",
        "level": "token or sequence",
        "aggregation": "grpo, bnpo, dapo, dr_grpo or luspo",
        "kl_estimator": "k1, k2 or k3",
        "rows": "filled or all",
    }.items():
        with pytest.raises(ValueError, match=f"must be {accepted}, got 'nonsense'"):
            policy_loss(*args, **FULL | {field: "nonsense"})
