"""The optimal token baseline (arXiv 2602.07078): a baseline per position, weighted by the gradient norm up to there.

Evidence: code read (verl). The baseline is invariant to a shift of the group's returns, so it is taken from the group
advantages: with ``advantage.scale=none`` A is r minus the group's mean and the result is the published one; with
``group`` it is divided by the group's standard deviation. Departure: beyond the second longest row the baseline is 0
and the row keeps its A, where verl leaves its uncentred return.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.groups import peer_sum, peers_of
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required
from oarjax.rl.masked import widened


def baseline_advantages(
    score_norms: Float[Array, "B T"],
    completion: Bool[Array, "B T"],
    advantages: Float[Array, "B"],
    groups: Int[Array, "B"],
) -> Float[Array, "B T"]:
    """Compute A_it = A_i - B_t, B_t = sum_j A_j W_jt / sum_j W_jt over the group's rows that are alive at t.

    W_jt = sum_{s <= t} |d log pi(y_js) / d logits|^2, the gradient's squared norm up to t by a proxy. Where one row of
    the group is alive, or no W is positive, B_t is 0. Rows with a norm that is not finite are left out of B_t.
    """
    usable = jnp.all(jnp.where(completion, jnp.isfinite(score_norms), True), axis=-1)
    alive = completion & usable[:, None]
    norms = jnp.where(alive, jnp.clip(widened(score_norms), 0, 2), 0)
    energy = jnp.where(alive, jnp.cumsum(norms, axis=-1), 0)
    peers = peers_of(groups)
    total = peer_sum(peers, energy)
    baseline = peer_sum(peers, energy * advantages[:, None]) / jnp.where(total > 0, total, 1)
    several = peer_sum(peers, alive) > 1
    return advantages[:, None] - jnp.where(several & alive, baseline, 0)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Take the position's baseline from the group advantages."""
    norms, groups = all_required(inputs.signals, ("score_norms", "groups"), context)
    return baseline_advantages(norms, inputs.completion, inputs.advantages, groups)


METHOD = CreditMethod(
    weigh, name="token_baseline", kind="advantages", coupling="group", needs=("score_norms", "groups")
)
