"""SHEAR (arXiv 2604.23318): windows of a row weigh as far as their states lie from those of opposing rows.

Evidence: a description. Ours, since the source's were not read: Sinkhorn's regularisation and iterations;
windows of a short row or at its end hold what tokens there are; opposing rows are those of the group whose advantage
has the other sign; rows without any, or with a state that is not finite, get ones. The mass is not kept.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.groups import peer_sum, peers_of
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required
from oarjax.rl.masked import widened

FAR = 1e9
"""The log-weight of a point that is not there."""


def wasserstein(
    x: Float[Array, "n D"],
    y: Float[Array, "m D"],
    in_x: Bool[Array, "n"],
    in_y: Bool[Array, "m"],
    *,
    epsilon: float,
    iterations: int,
) -> Float[Array, ""]:
    """Compute the cost of Sinkhorn's plan between two point sets of equal masses, Euclidean distances: W1 from above.

    ``epsilon`` is the regularisation in units of distance: towards 0 the result falls to W1, and needs more
    ``iterations``. Without a point on either side it means nothing.
    """
    square = jnp.sum(x**2, -1)[:, None] + jnp.sum(y**2, -1) - 2 * jnp.matmul(x, y.T, precision="highest")
    cost = jnp.sqrt(jnp.maximum(square, 0))
    log_x, log_y = (jnp.where(m, -jnp.log(jnp.maximum(m.sum(), 1)), -FAR) for m in (in_x, in_y))

    def step(_: Array, potentials: tuple[Array, Array]) -> tuple[Array, Array]:
        _, g = potentials
        f = -epsilon * logsumexp((g - cost) / epsilon + log_y, axis=1)
        return f, -epsilon * logsumexp((f[:, None] - cost) / epsilon + log_x[:, None], axis=0)

    f, g = jax.lax.fori_loop(0, iterations, step, (jnp.zeros(len(x)), jnp.zeros(len(y))))
    plan = jnp.exp((f[:, None] + g - cost) / epsilon + log_x[:, None] + log_y)
    return jnp.sum(plan * cost)


def divergence_weights(
    hidden: Float[Array, "B T D"],
    completion: Bool[Array, "B T"],
    advantages: Float[Array, "B"],
    groups: Int[Array, "B"],
    *,
    window: int = 100,
    stride: int = 25,
    epsilon: float = 0.05,
    iterations: int = 50,
) -> Float[Array, "B T"]:
    """Compute w_it = max over windows k of row i that hold t of d_ik / n, n the mean norm of the group's states.

    d_ik = min over opposing rows j and their windows q of W1(states of k, states of q). Windows of ``window`` tokens
    begin every ``stride``; the last one that holds a token of its own is the row's last. ``epsilon`` is in units of n.

    Raises:
        ValueError: settings that are not positive, or a stride of more than the window.
    """
    if not (0 < stride <= window and epsilon > 0 and iterations > 0):
        raise ValueError(
            "divergence_weights: expected 0 < stride <= window, epsilon > 0 and iterations > 0, got "
            f"window={window}, stride={stride}, epsilon={epsilon}, iterations={iterations}"
        )
    B, T = completion.shape
    usable = jnp.all(jnp.isfinite(hidden).all(-1) | ~completion, axis=-1)
    mask = completion & usable[:, None]
    states = jnp.where(mask[..., None], widened(hidden), 0)
    largest = jnp.max(jnp.abs(states))
    states = states / jnp.where(largest > 0, largest, 1)
    peers = peers_of(groups)
    norm = peer_sum(peers, jnp.linalg.norm(states, axis=-1).sum(-1)) / jnp.maximum(peer_sum(peers, mask.sum(-1)), 1)
    states = states / jnp.where(norm > 0, norm, 1)[:, None, None]

    starts = jnp.arange(1 + max(0, -(-(T - window) // stride))) * stride
    places = starts[:, None] + jnp.arange(window)  # [K, window]
    length = mask.sum(-1)
    exists = ((starts == 0) | (starts + window - stride < length[:, None])) & (length > 0)[:, None]  # [B, K]
    places_in = jnp.minimum(places, T - 1)
    inside = (places < T) & mask[:, places_in]  # [B, K, window]
    sign = jnp.where(usable & (length > 0), jnp.sign(advantages), 0)
    opposing = (groups[:, None] == groups) & (sign[:, None] * sign < 0)
    distance = partial(wasserstein, epsilon=epsilon, iterations=iterations)

    def nearest(pair: tuple[Array, Array]) -> Float[Array, ""]:
        i, k = pair
        x, x_in = states[i, places_in[k]], inside[i, k]

        def to_row(j: Array) -> Float[Array, ""]:
            distances = jax.lax.map(lambda q: distance(x, states[j, places_in[q]], x_in, inside[j, q]), windows)
            return jnp.min(jnp.where(exists[j], distances, jnp.inf))

        def skip(j: Array) -> Float[Array, ""]:
            return jnp.array(jnp.inf, states.dtype)

        return jnp.min(jax.lax.map(lambda j: jax.lax.cond(opposing[i, j] & exists[i, k], to_row, skip, j), rows))

    rows, windows = jnp.arange(B), jnp.arange(len(starts))
    pairs = tuple(x.reshape(-1) for x in jnp.meshgrid(rows, windows, indexing="ij"))
    nearest_opposing = jax.lax.map(nearest, pairs).reshape(B, len(starts))
    nearest_opposing = jnp.where(jnp.isfinite(nearest_opposing), nearest_opposing, 0)  # windows that do not exist
    spread = jnp.zeros((B, T), states.dtype).at[:, places_in].max(jnp.where(inside, nearest_opposing[..., None], 0))
    return jnp.where(mask & opposing.any(1, keepdims=True), spread, 1)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the tokens by how far the states of their windows are from opposing rows."""
    hidden, groups = all_required(inputs.signals, ("hidden", "groups"), context)
    return divergence_weights(hidden, inputs.completion, inputs.advantages, groups, **vars(context.credit.shear))


METHOD = CreditMethod(weigh, name="shear", coupling="group", needs=("hidden", "groups"))
