"""The clean pass over a rollout, from which every attribution starts, in the two forms they need.

Under causal attention the prompt does not feel a change of the completion. ``StoredPass`` keeps the keys and values
of every token, so that a forward with token t changed starts at t (OAR-P). ``LinearPass`` keeps the derivative of the
completion's states by its embeddings, in both directions (OAR-G, OAR-F). Both have the states that predict the
completion's tokens, so a step that wants old log-probabilities too needs no forward of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from oarjax.models.policy import Policy, positions_of
from oarjax.types import KVCache, Params


class StoredPass(NamedTuple):
    """T is the length of the completion, S that of the prompt; inputs as in ``oarjax.credit.probe``."""

    embeddings: Float[Array, "B T D"]  # of the token before each completion token
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    hidden: Float[Array, "B T D"]  # states that predict the completion's tokens
    stored: KVCache  # of the prompt but its last token (S - 1 slots), then of the T inputs


class LinearPass(NamedTuple):
    embeddings: Float[Array, "B T D"]
    hidden: Float[Array, "B T D"]
    push: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]  # d embeddings -> d hidden, at the clean point
    pull: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]  # its transpose
    states: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]  # embeddings -> hidden, anywhere


def stored_pass(
    policy: Policy, params: Params, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], *, completion_length: int
) -> StoredPass:
    """Run one forward that keeps its keys and values.

    Raises:
        ValueError: no prompt position before the completion.
    """
    start = prompt_slots(tokens.shape[1], completion_length)
    positions = positions_of(valid)[:, :-1]
    embeddings = policy.embed(params, tokens[:, :-1])
    cache = policy.init_cache(tokens.shape[0], tokens.shape[1] - 1)
    hidden, stored = policy.trunk(params, embeddings, positions, valid[:, :-1], cache=cache)
    if stored is None:
        raise ValueError("policy.trunk: expected the filled cache as second result of a call with cache=, got None")
    return StoredPass(embeddings[:, start:], positions[:, start:], valid[:, start:-1], hidden[:, start:], stored)


def linear_pass(
    policy: Policy, params: Params, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], *, completion_length: int
) -> LinearPass:
    """Run one forward, linearised in the embeddings of the completion; the prompt runs once, outside the derivative.

    Raises:
        ValueError: no prompt position before the completion.
    """
    start = prompt_slots(tokens.shape[1], completion_length)
    positions = positions_of(valid)
    embeddings = policy.embed(params, tokens)
    prefix = None
    if start > 0:
        cache = policy.init_cache(tokens.shape[0], start)
        _, prefix = policy.trunk(params, embeddings[:, :start], positions[:, :start], valid[:, :start], cache=cache)
    own = slice(start, start + completion_length)

    def states(e: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return policy.trunk(params, e, positions[:, own], valid[:, own], prefix=prefix)[0]

    clean = embeddings[:, own]
    hidden, push = jax.linearize(states, clean)
    transposed = jax.linear_transpose(push, clean)
    return LinearPass(clean, hidden, push, lambda ct: transposed(ct)[0], states)


def prompt_slots(total: int, completion_length: int) -> int:
    """Return S - 1: the prompt positions before the one that predicts the first completion token."""
    start = total - completion_length - 1
    if start < 0 or completion_length < 1:
        raise ValueError(
            f"attribution: T = {completion_length} completion positions need at least {completion_length + 1} "
            f"token positions, the prompt first; got N = {total}"
        )
    return start
