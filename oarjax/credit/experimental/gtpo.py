"""GTPO (arXiv 2508.04349): token rewards shaped by entropy among the rows of a group that are alive at a position.

Evidence: a description (formulas, not the paper). Departures: a row is correct where its group advantage is
positive and wrong where it is negative; entropies have a floor of 1e-6 nats, below which 1 / H has no bound; rows with
an entropy that is not finite are left out and keep their group advantage. As each set is normalised by itself, the
source's two coefficients all but cancel: they are constants here, and only the differences between tokens are left.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.groups import peer_sum, peers_of
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required
from oarjax.rl.masked import widened

OUTCOME, SHAPED = 1.0, 0.1
"""The source's alpha_1 and alpha_2."""
FLOOR = 1e-6
"""Entropies are at least this, nats."""
EPS = 1e-4
"""Added to the standard deviation, as to that of group advantages."""


def gtpo_advantages(
    entropies: Float[Array, "B T"],
    completion: Bool[Array, "B T"],
    advantages: Float[Array, "B"],
    groups: Int[Array, "B"],
) -> Float[Array, "B T"]:
    """Shape the rewards of tokens, and normalise them over the tokens of a group's correct and of its wrong rows.

        correct   r_it = 1 + .1 d_t H_it / sum_k H_kt
        wrong     r_it = -1 - .1 h_t (1 / H_it) / sum_k (1 / H_kt)
        A_it      (r_it - mean) / (std + 1e-4), mean and std over all tokens of the group's rows of the same sign

    Sums are over the d_t (h_t) correct (wrong) rows of the group that are alive at position t. As each set is centred
    by itself, its tokens' advantages add up to 0. Rows with A = 0 get 0.
    """
    usable = jnp.all(jnp.where(completion, jnp.isfinite(entropies), True), axis=-1)
    sign = jnp.where(usable, jnp.sign(advantages), 0)
    alive = completion & (sign != 0)[:, None]
    peers = peers_of(3 * groups + sign.astype(groups.dtype))  # of the same group and sign
    h = jnp.where(alive, jnp.maximum(widened(entropies), FLOOR), 1)
    share = jnp.where(alive, jnp.where((sign > 0)[:, None], h, 1 / h), 0)
    among = peer_sum(peers, alive)  # d_t or h_t
    part = among * (share / jnp.maximum(peer_sum(peers, share), 1e-30))
    rewards = jnp.where(alive, sign[:, None] * (OUTCOME + SHAPED * part), 0)
    count = jnp.maximum(peer_sum(peers, alive.sum(-1)), 1)
    mean = peer_sum(peers, rewards.sum(-1)) / count
    centred = jnp.where(alive, rewards - mean[:, None], 0)
    std = jnp.sqrt(peer_sum(peers, (centred**2).sum(-1)) / count)
    return jnp.where(usable[:, None], centred / (std[:, None] + EPS), advantages[:, None])


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Give the tokens the normalised shaped rewards of their group."""
    entropies, groups = all_required(inputs.signals, ("entropies", "groups"), context)
    return gtpo_advantages(entropies, inputs.completion, inputs.advantages, groups)


METHOD = CreditMethod(weigh, name="gtpo", kind="advantages", coupling="group", needs=("entropies", "groups"))
