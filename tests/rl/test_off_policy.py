"""Off-policy corrections, SAPO, GMPO, VESPO, LUSPO, RLOO, GDPO and the optimal token baseline are TRL's and verl's.

``golden/off_policy/trl_verl.npz`` holds float64 arrays: for each name the weights, loss and gradient in the log-probs
that TRL 1.16.0 computes for one batch with right padding (dapo aggregation; SAPO: the rows' means), verl 0.9.1's
geometric-mean loss and optimal token baseline, and TRL's advantages. Each was made by executing the corresponding
source of the installed package. DPPO's are prime-rl's formulas, without its own KL term, written in torch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.credit.methods.token_baseline import baseline_advantages
from oarjax.rl.advantages import (
    group_advantages,
    leave_one_out_advantages,
    per_reward_advantages,
    reward_after_kl,
)
from oarjax.rl.loss import policy_loss
from oarjax.rl.off_policy import Importance, importance_weights, near_policy
from oarjax.rl.surrogates import gmpo_surrogate, sapo_surrogate
from oarjax.types import TrainBatch

GOLDEN = {
    "token_truncate": {"importance": Importance("token_truncate", high=1.3)},
    "token_truncate_both": {"importance": Importance("token_truncate", 0.8, 1.3)},
    "token_mask": {"importance": Importance("token_mask", 0.7, 1.4)},  # IcePop
    "sequence_truncate": {"importance": Importance("sequence_truncate", high=1.5)},
    "sequence_mask": {"importance": Importance("sequence_mask", 0.3, 1.5)},
    "drift": {"max_drift": 0.2},
    "drift_and_token_mask": {"max_drift": 0.2, "importance": Importance("token_mask", 0.5, 5.0)},
    "sapo": {"surrogate": "sapo", "aggregation": "grpo"},
    "sapo_sharp": {"surrogate": "sapo", "aggregation": "grpo", "sapo_positive": 2.0, "sapo_negative": 3.0},
    "gmpo": {"surrogate": "gmpo", "aggregation": "grpo", "clip_low": 0.15, "clip_high": 0.25},
    "vespo": {"surrogate": "vespo"},
    "luspo": {"aggregation": "luspo", "level": "sequence"},
    "dppo": {"surrogate": "dppo", "clip_low": 0.2, "clip_high": 0.2},
    "dppo_narrow": {"surrogate": "dppo", "clip_low": 0.02, "clip_high": 0.03},
    "kl_corrected": {"kl_beta": 0.3, "kl_corrected": True},
    "kl_corrected_sequence": {"kl_beta": 0.3, "kl_corrected": True, "level": "sequence", "aggregation": "grpo"},
}
SHARP = {"vespo_k_positive": 1.5, "vespo_lambda_positive": 0.5, "vespo_k_negative": 0.75, "vespo_lambda_negative": 4.0}
GOLDEN["vespo_sharp"] = {"surrogate": "vespo", **SHARP}


@pytest.fixture
def golden(data, x64):
    with np.load(data / "off_policy" / "trl_verl.npz") as arrays:
        return {name: jnp.asarray(arrays[name]) for name in arrays}


def test_losses_and_gradients_are_those_of_trl_and_verl(golden):
    mask = golden["mask"] > 0
    batch = TrainBatch(
        tokens=jnp.zeros(mask.shape, jnp.int32),
        valid=mask,
        completion=mask,
        advantages=jnp.broadcast_to(golden["advantages"][:, None], mask.shape),
        old_logps=golden["old_logps"],
        ref_logps=golden["ref_logps"],  # without kl_beta they are measured and change nothing
        behaviour_logps=golden["behaviour_logps"],
    )
    for name, settings in GOLDEN.items():

        def loss(logps, settings=settings):
            mean, metrics = policy_loss(logps, jnp.zeros_like(logps), batch, max_length=mask.shape[1], **settings)
            return mean.value, metrics

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(golden["logps"])
        np.testing.assert_allclose(value, golden[f"loss__{name}"], rtol=1e-7, err_msg=name)  # verl adds 1e-8 to counts
        np.testing.assert_allclose(gradient, golden[f"grad__{name}"], rtol=1e-7, atol=1e-12, err_msg=name)
        if f"weights__{name}" in golden:
            weights = jnp.where(mask, golden[f"weights__{name}"], 0)
            np.testing.assert_allclose(metrics["sampler_weight"].value, weights.sum() / mask.sum(), rtol=1e-12)
            masked = ((weights == 0) & mask).sum() / mask.sum()
            np.testing.assert_allclose(metrics["sampler_masked"].value, masked, rtol=1e-6)
        if name == "drift":  # the second row alone, of four tokens
            np.testing.assert_allclose(metrics["drifted"].value, 4 / mask.sum(), rtol=1e-6)


def test_importance_weights_hand_worked():
    # ratios 2, 1, 1/4; the product of the first two is 2, that of all three 1/2
    old, behaviour = jnp.log(jnp.array([[0.5, 0.5, 0.1]])), jnp.log(jnp.array([[0.25, 0.5, 0.4]]))
    mask, every = jnp.array([[True, True, False]]), jnp.ones((1, 3), bool)
    for weighting, expected, of_all in (
        ("token_truncate", [1.5, 1], [1.5, 1, 0.5]),
        ("token_mask", [0, 1], [0, 1, 0]),
        ("sequence_truncate", [1.5, 1.5], [0.5, 0.5, 0.5]),
        ("sequence_mask", [0, 0], [0.5, 0.5, 0.5]),
    ):

        def weigh(x, mask, weighting=weighting):
            return importance_weights(x, behaviour, mask, weighting=weighting, low=0.5, high=1.5)

        np.testing.assert_allclose(weigh(old, mask)[0, :2], expected, rtol=1e-6, err_msg=weighting)
        np.testing.assert_allclose(weigh(old, every)[0], of_all, rtol=1e-6, err_msg=weighting)
        assert (jax.grad(lambda x: weigh(x, every).sum())(old) == 0).all()
    far = importance_weights(old + 500, behaviour, every, weighting="sequence_mask", high=float("inf"))
    np.testing.assert_allclose(far, np.exp(20), rtol=1e-5)


def test_bad_ranges_and_names_are_refused(unchecked):
    logps, mask = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    with pytest.raises(ValueError, match=r"low = 2\.0 exceeds high = 1\.0"):
        importance_weights(logps, logps, mask, weighting="token_mask", low=2.0, high=1.0)
    for wrong in ("token", "row_mask", "token_clip"):
        with pytest.raises(ValueError, match=f"weighting must be token_truncate, .* got '{wrong}'"):
            importance_weights(logps, logps, mask, weighting=wrong)
    with pytest.raises(ValueError, match="scale must be batch or none, got 'group'"):
        leave_one_out_advantages(jnp.zeros(2), group_size=2, scale="group")


def test_drifted_rows_keep_their_positive_tokens():
    # the first row's mean log-ratio is (.4 + 0) / 2 = .2 nats, above .1; padding does not count
    logps, behaviour = jnp.zeros((2, 3)), jnp.array([[0.4, 0.0, 9.0], [0.1, 0.1, 0.1]])
    mask, advantages = jnp.array([[True, True, False], [True] * 3]), jnp.array([[-1.0, 0.5, -1], [-1, -1, 1]])
    kept = near_policy(logps, behaviour, advantages, mask, max_drift=0.1 + 1e-6)
    np.testing.assert_array_equal(kept, [[False, True, False], [True, True, True]])


def test_sapo_has_the_policy_gradient_at_ratio_one_and_fades_on_both_sides():
    ratio, a = jnp.array([[0.2, 1.0, 1.8]]), jnp.full((1, 3), 2.0)
    slope = jax.grad(lambda r: sapo_surrogate(r, a, positive=3.0).sum())(ratio)
    # 4 sigmoid'(tau (r - 1)) A: at 1 it is A; at .2 and 1.8 it is 4 s (1 - s) A with s = sigmoid(2.4) = .91683
    np.testing.assert_allclose(slope, [[0.610040, 2, 0.610040]], rtol=1e-5)
    # at ratio 1 the value is 2 / tau * A, of the other temperature
    np.testing.assert_allclose(sapo_surrogate(ratio, -a, negative=1e-3, positive=9.0)[0, 1], -4000, rtol=1e-5)


def test_gmpo_bounds_each_token_and_spares_padding():
    # log-ratios .5 and -.1: A > 0 caps the first at .2, mean .05; A < 0 raises neither -> mean .2
    logps, old = jnp.array([[0.5, -0.1, 7.0]]), jnp.zeros((1, 3))
    mask, a = jnp.array([[True, True, False]]), jnp.full((1, 3), 2.0)
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    np.testing.assert_allclose(gmpo_surrogate(logps, old, a, mask, **bounds)[0, :2], 2 * np.exp(0.05), rtol=1e-6)
    np.testing.assert_allclose(gmpo_surrogate(logps, old, -a, mask, **bounds)[0, :2], -2 * np.exp(0.2), rtol=1e-6)


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_leave_one_out_is_trls(golden, scale):
    ours = leave_one_out_advantages(golden["rloo_rewards"], group_size=4, scale=scale)
    np.testing.assert_allclose(ours, golden[f"rloo_advantages__{scale}"], rtol=1e-12, atol=1e-15)
    # r_i - mean of the others = G / (G - 1) * (r_i - mean), where all are graded; equal rewards give exactly 0
    centred = group_advantages(golden["rloo_rewards"], group_size=4, scale="none")[:4] * 4 / 3
    if scale == "none":
        np.testing.assert_allclose(ours[:4], centred, rtol=1e-12)
    assert (leave_one_out_advantages(jnp.full(3, 0.1), group_size=3, scale=scale) == 0).all()


def test_per_reward_advantages_are_trls(golden):
    ours = per_reward_advantages(golden["gdpo_rewards"].T, golden["gdpo_weights"], group_size=4)
    np.testing.assert_allclose(ours, golden["gdpo_advantages"], rtol=1e-12, atol=1e-15)
    # a reward on a hundred times the scale weighs as much as before
    scaled = golden["gdpo_rewards"].T * jnp.array([[1.0], [100.0]])
    np.testing.assert_allclose(
        per_reward_advantages(scaled, golden["gdpo_weights"], group_size=4, eps=0.0),
        per_reward_advantages(golden["gdpo_rewards"].T, golden["gdpo_weights"], group_size=4, eps=0.0),
        atol=1e-12,
    )


def test_the_optimal_token_baseline_is_verls(golden):
    """Of the returns themselves; the longest row is alone at its end, where both leave it its return."""
    norms = 1 - 2 * jnp.exp(golden["otb_logps"]) + golden["otb_square"]
    mask, groups = golden["otb_mask"] > 0, jnp.repeat(jnp.arange(2), 4)
    ours = baseline_advantages(norms, mask, golden["otb_rewards"], groups)
    np.testing.assert_allclose(jnp.where(mask, ours, 0), golden["otb_advantages"], rtol=1e-7, atol=1e-8)  # it adds 1e-8


def test_kl_in_the_reward_hand_worked():
    # log(policy / reference) of the two tokens is .5 and -.2: the reward falls by 2 * .3; the third is padding
    behaviour, ref = jnp.array([[-0.5, -1.2, 3.0]]), jnp.array([[-1.0, -1.0, 9.0]])
    mask = jnp.array([[True, True, False]])
    np.testing.assert_allclose(reward_after_kl(jnp.array([1.0]), behaviour, ref, mask, beta=2.0), [0.4], rtol=1e-6)
    assert np.isnan(reward_after_kl(jnp.array([jnp.nan]), behaviour, ref, mask, beta=2.0)[0])
