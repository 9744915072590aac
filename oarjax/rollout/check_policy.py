"""Check a policy of one's own: do its functions agree with one another?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from oarjax.models.policy import Policy, filled, positions_of
from oarjax.rl.checked import ArgumentError, checked
from oarjax.rl.ranges import Positive, PositiveFloat
from oarjax.types import KVCache, Params

PROMPTS, GROUP, PROMPT, COMPLETION = 2, 2, 6, 4
PADDED = 2  # slots of the first prompt without a token


@checked
def check_policy(policy: Policy, params: Params, *, vocab_size: Positive, tolerance: PositiveFloat = 1e-3) -> None:
    """Compare the functions of a policy on small random rows, and raise where one contradicts another.

    The states of whole rows are the measure. No later token and nothing that stands at an invalid position may change
    them, and the same tokens have to give the same states behind a ``cache``, behind a ``prefix``, behind both, and
    behind the first slots of a cache. A trunk that leaves out ``prefix``, for one, trains without an error, on
    completions that do not see their prompt.

    Args:
        policy: its ``routed``, ``extend`` and ``caches`` are not called.
        params: its parameters; float32, since the rounding of bfloat16 passes the tolerance.
        vocab_size: number of tokens, the logits' last axis; tokens are drawn below it.
        tolerance: largest difference of a state, as a share of the largest state, > 0; default 0.001.

    Raises:
        ArgumentError: says which function, and what differs by how much.
    """
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, vocab_size, (PROMPTS, PROMPT))
    completions = draw.integers(0, vocab_size, (PROMPTS * GROUP, COMPLETION))
    tokens = jnp.asarray(np.concatenate([prompts.repeat(GROUP, 0), completions], axis=1), jnp.int32)
    valid = jnp.ones(tokens.shape, bool).at[:GROUP, :PADDED].set(False)
    policy = policy._replace(trunk=jax.jit(policy.trunk))
    with jax.default_matmul_precision("highest"):
        states = _whole(policy, params, tokens, valid)
        logits = policy.unembed(params, states)
        if logits.shape != (*tokens.shape, vocab_size):
            raise ArgumentError(
                f"check_policy: unembed must return logits [B, N, {vocab_size}] of states [B, N, D], got "
                f"{list(logits.shape)}"
            )
        for function, case, got, columns in _paths(policy, params, tokens, valid, vocab_size):
            mask = np.asarray(valid[:, columns])
            exact, got = np.asarray(states[:, columns], np.float64)[mask], np.asarray(got, np.float64)[mask]
            off, largest = np.abs(got - exact).max(), np.abs(exact).max()
            if not off <= tolerance * largest:
                raise ArgumentError(
                    f"check_policy: {function}: {case}, states differ by {off:.2g} from those of whole rows, the "
                    f"largest of which is {largest:.2g}"
                )


def _whole(policy: Policy, params: Params, tokens: Array, valid: Array) -> Array:
    """Compute the states of whole rows, without a cache."""
    embeddings = policy.embed(params, tokens)
    if (
        embeddings.ndim != 3
        or embeddings.shape[:2] != tokens.shape
        or embeddings.dtype not in (jnp.float32, jnp.float64)
    ):
        raise ArgumentError(
            f"check_policy: embed must return float32 [B, N, D] for tokens {list(tokens.shape)}, got "
            f"{embeddings.dtype} {list(embeddings.shape)}"
        )
    states, cache = policy.trunk(params, embeddings, positions_of(valid), valid)
    if states.shape[:2] != tokens.shape or cache is not None:
        raise ArgumentError(
            f"check_policy: trunk must return states [B, N, D] and None without a cache, got {list(states.shape)} and "
            f"{'None' if cache is None else f'a {type(cache).__name__}'}"
        )
    if not jnp.isfinite(states).all():
        raise ArgumentError("check_policy: trunk must return finite states, at invalid positions too: NaN x 0 is NaN")
    return states


def _paths(
    policy: Policy, params: Params, tokens: Array, valid: Array, vocab_size: int
) -> Iterator[tuple[str, str, Array, slice]]:
    """Yield function, what was done, states, and the columns that they are of, for every other way to compute them."""
    positions, tail = positions_of(valid), slice(PROMPT, None)
    other_last = _whole(policy, params, tokens.at[:, -1].set((tokens[:, -1] + 1) % vocab_size), valid)
    yield "trunk", "with another last token", other_last[:, :-1], slice(None, -1)
    unseen = jnp.where(valid, tokens, (tokens + 1) % vocab_size)
    yield "trunk", "with other tokens at invalid positions", _whole(policy, params, unseen, valid), slice(None)

    def run(columns: slice, rows: slice = slice(None), **caches: Any) -> tuple[Array, Any]:
        embeddings = policy.embed(params, tokens[rows, columns])
        return policy.trunk(params, embeddings, positions[rows, columns], valid[rows, columns], **caches)

    cache = policy.init_cache(len(tokens), PROMPT + COMPLETION + 1)  # one slot stays empty
    for columns in (slice(0, PROMPT), slice(PROMPT, PROMPT + 1), slice(PROMPT + 1, None)):
        states, cache = run(columns, cache=filled(cache))
        yield "trunk, init_cache", "with what stands before in the cache", states, columns

    firsts = slice(None, None, GROUP)  # rows with the prompts
    prefix = filled(run(slice(PROMPT), firsts, cache=policy.init_cache(PROMPTS, PROMPT))[1])
    yield "trunk", "with the prompt as prefix, one for the rows of a group", run(tail, prefix=prefix)[0], tail
    cache = policy.init_cache(len(tokens), COMPLETION)
    for columns in (slice(PROMPT, PROMPT + 1), slice(PROMPT + 1, None)):
        states, cache = run(columns, prefix=prefix, cache=filled(cache))
        yield "trunk", "with the prompt as prefix and the rest in the cache", states, columns

    if policy.first_slots is None:
        return
    full_cache = filled(run(slice(None), cache=policy.init_cache(*tokens.shape))[1])
    slots = policy.first_slots(full_cache, PROMPT)
    yield "first_slots", f"with the first {PROMPT} slots of a filled cache as prefix", run(tail, prefix=slots)[0], tail
    if isinstance(full_cache, KVCache):
        all_valid = replace(full_cache, valid=jnp.ones_like(full_cache.valid))
        in_prompt = jnp.arange(tokens.shape[1]) < PROMPT
        visible = jnp.broadcast_to(in_prompt & valid[:, None, :], (len(tokens), COMPLETION, tokens.shape[1]))
        states = run(tail, prefix=all_valid, visible=visible)[0]
        yield "trunk", "with the prompt's slots visible of a prefix that holds the whole row", states, tail
