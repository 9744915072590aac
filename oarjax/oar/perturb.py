"""OAR-P: a token matters as much as the outcome moves when that token is changed.

arXiv 2601.07408: s_t = KL(P_clean || P_masked(t)), or for a scalar probe the drop. The released code never appends the
answer to the masked sequence although its answer modes read there; here a rollout is scored as it stands.

A changed token changes nothing before it. The clean pass keeps its keys and values, and a counterfactual runs only
over the positions from its own bucket's start to the end, reading the clean prefix that all counterfactuals of a row
share. Over a whole completion that is 1/2 + 1/(2 buckets) of the positions that whole forwards would visit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.oar.clean import StoredPass, stored_pass
from oarjax.oar.counterfactual import Counterfactual, first_of_unit, replacement_embeddings
from oarjax.oar.probe import Probe, Reading, divergence, reading_of, scored_tokens, to_inputs
from oarjax.policy import Policy
from oarjax.types import AnswerSpan, KVCache, Params

Find = Callable[[Float[Array, "BK L D"], int, int], Float[Array, "BK"]]
"""(states of the last L inputs, L, K) -> what is found of each of the K counterfactuals of each row."""


def masked_token_importance(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    probe: Probe,
    mask_id: int,
    chunk: int,
    buckets: int,
    counterfactual: Counterfactual = "mask",
) -> Float[Array, "B T"]:
    """Raw OAR-P scores of the reasoning tokens, in nats for a distribution; 0 elsewhere and in rows with no answer.

    Each reasoning token in turn is changed (by default replaced by ``mask_id``, still attended to), positions
    unchanged. A distribution gives a KL, >= 0 up to rounding; a scalar clean minus changed, which may be negative.
    Where ``span.units`` says which tokens belong together, they are changed together and share the unit's score
    evenly. No gradient flows to ``params``.

    Args:
        chunk: counterfactuals per row and forward if they had to run over the whole completion; shorter suffixes run
            more at once. Memory is that of chunk * B forwards.
        buckets: lengths of suffix that are compiled.

    Raises:
        ValueError: chunk or buckets below 1, an unknown counterfactual, or no prompt position.
    """
    scored = scored_tokens(span, probe)
    params = jax.lax.stop_gradient(params)
    return masked_scores(
        policy,
        params,
        stored_pass(policy, params, tokens, valid, completion_length=scored.shape[1]),
        reading_of(tokens, valid, span),
        scored,
        units=span.units,
        probe=probe,
        mask_id=mask_id,
        chunk=chunk,
        buckets=buckets,
        counterfactual=counterfactual,
    )


def masked_scores(
    policy: Policy,
    params: Params,
    clean: StoredPass,
    reading: Reading,
    scored: Bool[Array, "B T"],
    *,
    units: Int[Array, "B T"] | None,
    probe: Probe,
    mask_id: int,
    chunk: int,
    buckets: int,
    counterfactual: Counterfactual,
) -> Float[Array, "B T"]:
    """``masked_token_importance`` of the ``scored`` tokens, after a clean pass."""
    before = probe.read(policy, params, clean.hidden, reading)

    def moved(states: Float[Array, "BK L D"], length: int, copies: int) -> Float[Array, "BK"]:
        if probe.reads == "completion":
            earlier = jnp.repeat(clean.hidden[:, : scored.shape[1] - length], copies, axis=0)
            states, length = jnp.concatenate([earlier, states], axis=1), scored.shape[1]
        window = jax.tree.map(lambda x: jnp.repeat(x[:, -length:], copies, axis=0), reading)
        after = probe.read(policy, params, states, window)
        return divergence(probe, jnp.repeat(before, copies, axis=0), after)

    replacement = None
    if counterfactual != "deleted":
        replacement = replacement_embeddings(
            policy, params, clean.hidden, reading.tokens, counterfactual=counterfactual, mask_id=mask_id
        )
    first = first_of_unit(scored, units)
    found = over_counterfactuals(policy, params, clean, first, replacement, moved, chunk=chunk, buckets=buckets)
    if units is None:
        return found
    size = jnp.sum(first[:, :, None] == first[:, None, :], axis=-1)
    shared = jnp.take_along_axis(found, jnp.minimum(first, first.shape[1] - 1), axis=1) / size
    return jnp.where(scored, shared, 0)


def over_counterfactuals(
    policy: Policy,
    params: Params,
    clean: StoredPass,
    first: Int[Array, "B T"],
    replacement: Float[Array, "B T D"] | None,
    find: Find,
    *,
    chunk: int,
    buckets: int,
) -> Float[Array, "B T"]:
    """``find`` of the states after each change, at the position of the change; 0 where nothing is changed.

    Tokens with the same ``first`` are changed together; ``first`` is the position of the first of them, or T for a
    token that nothing changes. They get the ``replacement`` embedding, or are hidden from attention where it is None.

    Rows wait for the one with the most counterfactuals in a bucket, so a call with few rows wastes the least.
    """
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1 counterfactual per forward, got {chunk}")
    if buckets < 1:
        raise ValueError(f"buckets: expected at least 1, got {buckets}")
    length = first.shape[1]
    here = first == jnp.arange(length)  # a change begins
    edges = [length * j // min(buckets, length) for j in range(min(buckets, length))] + [length]
    out = jnp.zeros(first.shape, jnp.promote_types(clean.hidden.dtype, jnp.float32))
    for low, high in itertools.pairwise(edges):
        # Input t + 1 carries token t, so inputs low .. high - 1 carry tokens low - 1 .. high - 2.
        tokens = slice(max(low - 1, 0), max(high - 1, 0))
        width = tokens.stop - tokens.start
        if width == 0:
            continue
        size = min(width, max(1, chunk * length // (length - low)))
        order = masked_positions(here[:, tokens], first=tokens.start, slots=-(-width // size) * size, none=length)
        score = _bucket(policy, params, clean, first, replacement, find, order, low=low, size=size)
        chunks = -(-jnp.max(jnp.sum(here[:, tokens], axis=1)) // size)
        out = jax.lax.fori_loop(0, chunks, score, out)
    return out


def _bucket(
    policy: Policy,
    params: Params,
    clean: StoredPass,
    first: Int[Array, "B T"],
    replacement: Float[Array, "B T D"] | None,
    find: Find,
    order: Int[Array, "B slots"],
    *,
    low: int,
    size: int,
) -> Callable[[Int[Array, ""], Float[Array, "B T"]], Float[Array, "B T"]]:
    """The body of a loop: ``size`` = K counterfactuals of every row, over inputs ``low`` .. T - 1."""
    rows, length = first.shape
    suffix = length - low
    changed_by = to_inputs(first + 1)[:, None, low:] - 1  # -1 at the last prompt token
    embeddings = clean.embeddings[:, None, low:]
    prefix = _slots_before(clean.stored, clean.stored.valid.shape[1] - suffix)
    positions = jnp.repeat(clean.positions[:, low:], size, axis=0)
    valid = jnp.broadcast_to(clean.valid[:, None, low:], (rows, size, suffix))

    def score(i: Int[Array, ""], out: Float[Array, "B T"]) -> Float[Array, "B T"]:
        at = jax.lax.dynamic_slice_in_dim(order, i * size, size, axis=1)  # [B, K], T = nothing left
        hit = (changed_by == at[:, :, None]) & (at < length)[:, :, None]
        if replacement is None:
            variants, seen = jnp.broadcast_to(embeddings, (rows, size, *embeddings.shape[2:])), valid & ~hit
        else:
            variants = jnp.where(hit[..., None], to_inputs(replacement)[:, None, low:], embeddings)
            seen = valid
        hidden, _ = policy.trunk(
            params,
            variants.reshape(rows * size, suffix, -1),
            positions,
            seen.reshape(rows * size, suffix),
            prefix=prefix,
        )
        found = find(hidden, suffix, size).reshape(rows, size).astype(out.dtype)
        return out.at[jnp.arange(rows)[:, None], at].set(found, mode="drop")

    return score


def _slots_before(stored: KVCache, count: int) -> KVCache | None:
    """The first ``count`` slots, as a prefix that is read and never copied per row."""
    if count == 0:
        return None
    return KVCache(
        k=stored.k[:, :, :count],
        v=stored.v[:, :, :count],
        valid=stored.valid[:, :count],
        length=jnp.asarray(count, jnp.int32),
    )


def masked_positions(mask: Bool[Array, "B W"], *, first: int, slots: int, none: int) -> Int[Array, "B slots"]:
    """Positions of the True entries of each row in order, counted from ``first``; then ``none``."""
    width = mask.shape[1]
    at = jnp.sort(jnp.where(mask, first + jnp.arange(width), none), axis=1)
    return jnp.pad(at, ((0, 0), (0, slots - width)), constant_values=none)
