"""The clean pass over a rollout, from which every attribution starts, in the forms they need.

Under causal attention the prompt is unaffected by changes to the completion. ``StoredPass`` keeps the keys and values
of every token, so that a forward with token t changed starts at t (OAR-P). ``LinearPass`` keeps the derivative of the
completion's states by its embeddings, in both directions (OAR-G, OAR-F). Both have the states that predict the
completion's tokens, so a step that wants old log-probabilities too needs no forward of its own. ``SharedPass`` is a
``LinearPass`` whose derivative also reaches the params: an update at the same params starts from it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.interpreters import partial_eval
from jaxtyping import Array, Bool, Float, Int

from oarjax.models.policy import Policy, filled, positions_of, prompt_cache
from oarjax.types import KVCache, Params


class StoredPass(NamedTuple):
    """T is the length of the completion, S that of the prompt; inputs as in ``oarjax.credit.probe``."""

    embeddings: Float[Array, "B T D"]  # of the token before each completion token
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    hidden: Float[Array, "B T D"]  # states that predict the completion's tokens
    stored: KVCache  # of the prompt but its last token (S - 1 slots), then of the T inputs unless it cannot be cut
    edges: tuple[int, ...] = ()  # inputs before which a cache that cannot be cut was kept
    pieces: tuple[KVCache, ...] = ()  # of the inputs before each edge, from the edge before


class LinearPass(NamedTuple):
    embeddings: Float[Array, "B T D"]
    hidden: Float[Array, "B T D"]
    push: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]  # d embeddings -> d hidden, at the clean point
    pull: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]  # its transpose
    states: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]  # embeddings -> hidden, anywhere


def stored_pass(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    *,
    completion_length: int,
    edges: Sequence[int] = (),
) -> StoredPass:
    """Run one forward that keeps its keys and values.

    A recurrent state after the completion no longer holds per-position information. A policy whose caches can be joined
    but not cut therefore runs from edge to edge and keeps the cache of each piece; others keep the prompt's alone.

    Args:
        edges: inputs of the completion, in order, at which later passes may begin; every input is one where caches
            can be cut.

    Raises:
        ValueError: no prompt position before the completion.
    """
    start = prompt_slots(tokens.shape[1], completion_length)
    positions = positions_of(valid)[:, :-1]
    embeddings = policy.embed(params, tokens[:, :-1])
    slots = tokens.shape[1] - 1 if policy.first_slots is not None else start
    stored, hidden = policy.init_cache(tokens.shape[0], slots), embeddings[:, :0]
    if slots:
        first = slice(0, slots)
        hidden, stored = policy.trunk(params, embeddings[:, first], positions[:, first], valid[:, first], cache=stored)
    stored = filled(stored)
    completions = embeddings[:, start:], positions[:, start:], valid[:, start:-1]
    if policy.first_slots is not None:
        return StoredPass(*completions, hidden[:, start:], stored)
    prefix = stored if start else None
    if policy.extend is None or not edges:
        return StoredPass(*completions, policy.trunk(params, *completions, prefix=prefix)[0], stored)
    states, pieces = [], []
    for begin, end in pairwise((0, *edges, completion_length)):
        rows, empty = (x[:, begin:end] for x in completions), policy.init_cache(tokens.shape[0], end - begin)
        part, cache = policy.trunk(params, *rows, prefix=prefix, cache=empty)
        states.append(part)
        pieces.append(cache := filled(cache))
        prefix = cache if prefix is None else policy.extend(prefix, cache)
    return StoredPass(*completions, jnp.concatenate(states, axis=1), stored, tuple(edges), tuple(pieces[:-1]))


def linear_pass(
    policy: Policy, params: Params, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], *, completion_length: int
) -> LinearPass:
    """Run one forward, linearised in the embeddings of the completion; the prompt runs once, outside the derivative.

    Rows that share a prompt (``policy.prompt_rows``) share its pass, too.

    Raises:
        ValueError: no prompt position before the completion.
    """
    start = prompt_slots(tokens.shape[1], completion_length)
    positions = positions_of(valid)
    prefix = prompt_cache(policy, params, tokens, positions, valid, start)
    columns = slice(start, start + completion_length)

    def states(e: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return policy.trunk(params, e, positions[:, columns], valid[:, columns], prefix=prefix)[0]

    clean = policy.embed(params, tokens[:, columns])
    hidden, push = jax.linearize(states, clean)
    transposed = jax.linear_transpose(push, clean)
    return LinearPass(clean, hidden, push, lambda ct: transposed(ct)[0], states)


class SharedPass(NamedTuple):
    linear: LinearPass
    pull_params: Callable[[Float[Array, "B T D"]], Params]  # d hidden -> d params, through prompt and completion


def shared_pass(
    policy: Policy,
    params_of: Callable[[Params], Params],
    trained: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    *,
    completion_length: int,
) -> SharedPass:
    """Run one forward and linearise it once, in the completion's embeddings and in the params that are trained.

    ``params_of`` gives all params from the trained ones. Rows that share a prompt share its pass.

    Raises:
        ValueError: no prompt position before the completion.
    """
    start = prompt_slots(tokens.shape[1], completion_length)
    positions, columns = positions_of(valid), slice(start, start + completion_length)

    def after(params: Params, prefix: KVCache | None, e: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return policy.trunk(params, e, positions[:, columns], valid[:, columns], prefix=prefix)[0]

    def states(trained: Params, e: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], KVCache | None]:
        params = params_of(trained)
        prefix = prompt_cache(policy, params, tokens, positions, valid, start)
        return after(params, prefix, e), prefix

    clean, pull_embedded = jax.vjp(lambda trained: policy.embed(params_of(trained), tokens[:, columns]), trained)
    hidden, pull_all, prefix = jax.vjp(states, trained, clean, has_aux=True)
    pull = _pruned(lambda ct: pull_all(ct)[1], hidden)
    pushed = jax.linear_transpose(pull, hidden)

    def pull_params(ct: Float[Array, "B T D"]) -> Params:
        by_params, by_embeddings = pull_all(ct)
        return jax.tree.map(jnp.add, by_params, pull_embedded(by_embeddings)[0])

    frozen = jax.lax.stop_gradient(params_of(trained))
    return SharedPass(
        LinearPass(clean, hidden, lambda d: pushed(d)[0], pull, lambda e: after(frozen, prefix, e)), pull_params
    )


def _pruned(function: Callable[[Array], Array], like: Array) -> Callable[[Array], Array]:
    """Remove the equations that a function's result does not need, also inside loops."""
    closed = jax.make_jaxpr(function)(like)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True], instantiate=True)
    return lambda x: eval_jaxpr(jaxpr, closed.consts, x)[0]


def prompt_slots(total: int, completion_length: int) -> int:
    """Return S - 1: the prompt positions before the one that predicts the first completion token."""
    start = total - completion_length - 1
    if start < 0 or completion_length < 1:
        raise ValueError(
            f"attribution: T = {completion_length} completion positions need at least {completion_length + 1} "
            f"token positions, the prompt first; got N = {total}"
        )
    return start
