"""The replacement of a token when its importance is measured, and which tokens are changed together.

The paper puts the pad token in (``mask``). A pad in the middle of a text is something that no policy was trained on;
the other kinds stay closer to what it knows.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.models.policy import Policy
from oarjax.types import Params

Counterfactual = Literal["mask", "second_choice", "mean_embedding", "deleted"]
POSITIONS_AT_ONCE = 2048
"""Token positions, or vocabulary rows, per pass of the head or the embedding."""


def replacement_embeddings(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    completion: Int[Array, "B T"],
    *,
    counterfactual: Counterfactual,
    mask_id: int,
) -> Float[Array, "B T D"]:
    """Return the embedding that replaces each completion token (of which ``hidden`` are the predicting states).

    ``mask``: that of ``mask_id``. ``second_choice``: of the most likely token there, excluding the
    current one. ``mean_embedding``: the mean over the vocabulary. ``deleted`` has none: the token is hidden
    from attention.

    Raises:
        ValueError: ``deleted``, or an unknown kind.
    """
    rows, length, width = hidden.shape
    if counterfactual == "second_choice":
        return policy.embed(params, next_choices(policy, params, hidden, completion))
    if counterfactual == "mean_embedding":
        mean = mean_embedding(policy, params, hidden)
        return jnp.broadcast_to(mean, (rows, length, width)).astype(hidden.dtype)
    if counterfactual != "mask":
        raise ValueError(
            f"counterfactual: expected one with an embedding, {', '.join(get_args(Counterfactual)[:3])}, "
            f"got {counterfactual!r}"
        )
    mask = policy.embed(params, jnp.full((1, 1), mask_id, completion.dtype))
    return jnp.broadcast_to(mask, (rows, length, width))


def next_choices(
    policy: Policy, params: Params, hidden: Float[Array, "B T D"], completion: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """Return the most likely token at each position, excluding the current one; ties go to the lowest id."""

    params = policy.head(params)

    def best_other(at: tuple[Float[Array, "D"], Int[Array, ""]]) -> Int[Array, ""]:
        state, token = at
        logits = policy.unembed(params, state[None])[0]
        return jnp.argmax(jnp.where(jnp.arange(logits.shape[-1]) == token, -jnp.inf, logits)).astype(completion.dtype)

    flat = hidden.reshape(-1, hidden.shape[-1]), completion.reshape(-1)
    return jax.lax.map(best_other, flat, batch_size=POSITIONS_AT_ONCE).reshape(completion.shape)


def mean_embedding(policy: Policy, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "D"]:
    """Average the embeddings of all ids of the head, rows that only pad the vocabulary included."""
    vocabulary = jax.eval_shape(lambda h: policy.unembed(params, h), hidden[:1, 0]).shape[-1]
    ids = jnp.arange(vocabulary, dtype=jnp.int32)
    total = jax.lax.fori_loop(
        0,
        -(-vocabulary // POSITIONS_AT_ONCE),
        lambda i, so_far: so_far + _slice_sum(policy, params, ids, i * POSITIONS_AT_ONCE),
        jnp.zeros(hidden.shape[-1], jnp.promote_types(hidden.dtype, jnp.float32)),
    )
    return total / vocabulary


def _slice_sum(policy: Policy, params: Params, ids: Int[Array, "V"], start: Int[Array, ""]) -> Float[Array, "D"]:
    at = start + jnp.arange(POSITIONS_AT_ONCE)
    rows = policy.embed(params, ids[jnp.minimum(at, ids.shape[0] - 1)][None])[0]
    return jnp.sum(jnp.where((at < ids.shape[0])[:, None], rows, 0), axis=0)


def first_of_unit(scored: Bool[Array, "B T"], units: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """Find the first scored token of each scored token's unit; T elsewhere. Without units every token is one."""
    length = scored.shape[1]
    at = jnp.arange(length)
    if units is None:
        return jnp.where(scored, at, length)
    same_unit = (units[:, :, None] == units[:, None, :]) & scored[:, None, :]
    return jnp.where(scored, jnp.min(jnp.where(same_unit, at, length), axis=-1), length)
