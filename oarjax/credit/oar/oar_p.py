"""OAR-P: a token matters as much as the outcome moves when that token is changed.

arXiv 2601.07408: s_t = KL(P_clean || P_masked(t)), or for a scalar probe the drop. The released code never appends the
answer to the masked sequence although its answer modes read there; here a rollout is scored as it stands.

A changed token changes nothing before it. The clean pass keeps its keys and values, and a counterfactual runs only
over the positions from its own bucket's start to the end, reading the clean prefix that all counterfactuals of a row
share. Over a whole completion that is 1/2 + 1/(2 buckets) of the positions that whole forwards would visit.
With gated delta nets, whose state cannot be cut, the clean pass keeps it at the start of every bucket.
Rows are set so that their answers end together: nothing after an answer is recomputed, and chunks of several rows hold
counterfactuals that are about equally long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.costs import RowTokens, clean_flops, masked_flops
from oarjax.credit.clean_pass import StoredPass, stored_pass
from oarjax.credit.counterfactual import Counterfactual, first_of_unit, replacement_embeddings
from oarjax.credit.gate import weigh
from oarjax.credit.method import CreditMethod
from oarjax.credit.probe import Probe, Reading, divergence, reading_of, scored_tokens, to_inputs
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, Scored, probe_of
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.checked import checked
from oarjax.rl.ranges import Count, Positive
from oarjax.types import AnswerSpan, KVCache, Params, Rollout

Find = Callable[[Float[Array, "BK L D"], int, int], Float[Array, "BK"]]
"""(states of the last L inputs, L, K) -> what is found of each of the K counterfactuals of each row."""


@checked
def masked_token_importance(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    probe: Probe,
    mask_id: Count,
    chunk: Positive,
    buckets: Positive,
    counterfactual: Counterfactual = "mask",
) -> Float[Array, "B T"]:
    """Compute raw OAR-P scores of the reasoning, in nats for a distribution; 0 elsewhere and in rows with no answer.

    Each reasoning token in turn is changed (by default replaced by ``mask_id``, still attended to), positions
    unchanged. A distribution gives a KL, >= 0 up to rounding; a scalar clean minus changed, which may be negative.
    Where ``span.units`` says which tokens belong together, they are changed together and share the unit's score
    evenly.

    Args:
        policy: the model's functions, such as ``make_policy`` gives.
        params: its parameters; no gradient flows to them.
        tokens: prompt and completion, N = S + T.
        valid: positions that hold a token.
        span: reasoning and answer of the completions, [B, T], as ``find_answers`` gives them.
        probe: the outcome, see ``outcome_probe``.
        mask_id: id that replaces a token, for counterfactual mask; the paper's is the pad id.
        chunk: counterfactuals per row and forward if they had to run over the whole completion; shorter suffixes run
            more at once. >= 1; memory is that of chunk * B forwards.
        buckets: lengths of suffix that are compiled, >= 1.
        counterfactual: mask (the paper's), second_choice, mean_embedding or deleted, see
            ``oarjax.credit.counterfactual``; default mask.

    Raises:
        ArgumentError: an argument does not fit the signature.
        ValueError: no prompt position.
    """
    scored = scored_tokens(span, probe)
    params = policy.head(jax.lax.stop_gradient(params))
    return masked_scores(
        policy,
        params,
        stored_pass(policy, params, tokens, valid, **places(scored.shape[1], chunk=chunk, buckets=buckets)),
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
    """Compute ``masked_token_importance`` of the ``scored`` tokens, after a clean pass."""
    if probe.reads == "answer" and policy.first_slots is not None:
        clean, reading, at = _ends_together(clean, reading, reading.answer | scored)
        scored = jnp.take_along_axis(scored, at, axis=1)
        units = None if units is None else jnp.take_along_axis(units, at, axis=1)
    else:
        at = jnp.broadcast_to(jnp.arange(scored.shape[1]), scored.shape)
    clean_outputs = probe.read(policy, params, clean.hidden, reading)

    def moved(states: Float[Array, "BK L D"], length: int, copies: int) -> Float[Array, "BK"]:
        if probe.reads == "completion":
            earlier = jnp.repeat(clean.hidden[:, : scored.shape[1] - length], copies, axis=0)
            states, length = jnp.concatenate([earlier, states], axis=1), scored.shape[1]
        window = jax.tree.map(lambda x: jnp.repeat(x[:, -length:], copies, axis=0), reading)
        changed_outputs = probe.read(policy, params, states, window)
        return divergence(probe, jnp.repeat(clean_outputs, copies, axis=0), changed_outputs)

    replacement = None
    if counterfactual != "deleted":
        replacement = replacement_embeddings(
            policy, params, clean.hidden, reading.tokens, counterfactual=counterfactual, mask_id=mask_id
        )
    first = first_of_unit(scored, units)
    scores = over_counterfactuals(policy, params, clean, first, replacement, moved, chunk=chunk, buckets=buckets)
    if units is not None:
        size = jnp.sum(first[:, :, None] == first[:, None, :], axis=-1)
        shared = jnp.take_along_axis(scores, jnp.minimum(first, first.shape[1] - 1), axis=1) / size
        scores = jnp.where(scored, shared, 0)
    return jnp.take_along_axis(scores, jnp.argsort(at, axis=1), axis=1)


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
    """Apply ``find`` to the states after each change, at the position of the change; 0 where nothing is changed.

    Tokens with the same ``first`` are changed together; ``first`` is the position of the first of them, or T for a
    token that nothing changes. They get the ``replacement`` embedding, or are hidden from attention where it is None.

    Rows wait for the one with the most changes, and a chunk starts at the earliest change that any row has in it or
    after it: rows whose changes end at about the same place waste the least.
    """
    length = first.shape[1]
    begins = first == jnp.arange(length)  # a change begins
    count = jnp.max(jnp.sum(begins, axis=1))
    lows, sizes = bucket_sizes(length, chunk=chunk, buckets=buckets)
    if policy.first_slots is None:  # suffixes begin where the clean pass kept a cache
        edges = {0, *clean.edges}
        lows, sizes = map(list, zip(*(pair for pair in zip(lows, sizes) if pair[0] in edges)))
    order = _last_together(begins, spare=max(sizes))
    # The first input that carries a change of this chunk or a later one: input t + 1 carries token t.
    earliest = jax.lax.cummin(jnp.min(order, axis=0), reverse=True) + 1
    branches = [
        _recomputed_from(policy, params, clean, first, replacement, find, order, low=low, size=size)
        for low, size in zip(lows, sizes)
    ]

    def step(state: tuple[Int[Array, ""], Float[Array, "B T"]]) -> tuple[Int[Array, ""], Float[Array, "B T"]]:
        i, out = state
        bucket = jnp.searchsorted(jnp.asarray(lows), earliest[i], side="right") - 1
        return i + jnp.asarray(sizes)[bucket], jax.lax.switch(bucket, branches, i, out)

    out = jnp.zeros(first.shape, jnp.promote_types(clean.hidden.dtype, jnp.float32))
    return jax.lax.while_loop(lambda state: state[0] < length, step, (length - count, out))[1]


def bucket_sizes(length: int, *, chunk: int, buckets: int) -> tuple[list[int], list[int]]:
    """Return where each bucket's suffixes start, and how many counterfactuals of a row run over one at once."""
    lows = [length * j // min(buckets, length) for j in range(min(buckets, length))]
    return lows, [min(length, max(1, chunk * length // (length - low))) for low in lows]


def places(length: int, *, chunk: int, buckets: int) -> dict[str, Any]:
    """Return the keywords with which ``stored_pass`` serves suffixes in so many buckets."""
    return {"completion_length": length, "edges": bucket_sizes(length, chunk=chunk, buckets=buckets)[0][1:]}


def _last_together(begins: Bool[Array, "B T"], *, spare: int) -> Int[Array, "B slots"]:
    """List the True entries of each row in order, the last of every row in column T - 1; T elsewhere."""
    length = begins.shape[1]
    at = masked_positions(begins, first=0, slots=length, none=length)
    late = length - jnp.sum(begins, axis=1, keepdims=True)
    turned = jnp.take_along_axis(at, (jnp.arange(length) - late) % length, axis=1)
    return jnp.pad(turned, ((0, 0), (0, spare)), constant_values=length)


def _recomputed_from(
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
    """Run one chunk: ``size`` = K counterfactuals of every row from column i of ``order``, inputs ``low`` .. T - 1."""
    rows, length = first.shape
    suffix = length - low
    changed_by = to_inputs(first + 1)[:, None, low:] - 1  # -1 at the last prompt token

    def score(i: Int[Array, ""], out: Float[Array, "B T"]) -> Float[Array, "B T"]:
        embeddings = clean.embeddings[:, None, low:]
        valid = jnp.broadcast_to(clean.valid[:, None, low:], (rows, size, suffix))
        at = jax.lax.dynamic_slice_in_dim(order, i, size, axis=1)  # [B, K], T = nothing
        hit = (changed_by == at[:, :, None]) & (at < length)[:, :, None]
        if replacement is None:
            variants, visible = jnp.broadcast_to(embeddings, (rows, size, *embeddings.shape[2:])), valid & ~hit
        else:
            variants = jnp.where(hit[..., None], to_inputs(replacement)[:, None, low:], embeddings)
            visible = valid
        hidden, _ = policy.trunk(
            params,
            variants.reshape(rows * size, suffix, -1),
            jnp.repeat(clean.positions[:, low:], size, axis=0),
            visible.reshape(rows * size, suffix),
            prefix=_cache_before(policy, clean, low),
        )
        change = find(hidden, suffix, size).reshape(rows, size).astype(out.dtype)
        return out.at[jnp.arange(rows)[:, None], at].set(change, mode="drop")

    return score


def _ends_together(
    clean: StoredPass, reading: Reading, needed: Bool[Array, "B T"]
) -> tuple[StoredPass, Reading, Int[Array, "B T"]]:
    """Turn rows right until their last needed position is the last of all; return where each position went, too.

    What comes after it wraps around to the left and is invalid. Attention goes by ``positions``, not by slots.
    """
    length = needed.shape[1]
    shift = jnp.where(needed.any(axis=1), jnp.argmax(needed[:, ::-1], axis=1), 0)[:, None]
    at, in_row = (jnp.arange(length) - shift) % length, jnp.arange(length) >= shift

    def turned(x: Array) -> Array:
        return jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)

    stored, start = clean.stored, clean.stored.valid.shape[1] - length

    def turned_slots(x: Array) -> Array:
        return jnp.concatenate([x[:, :, :start], jax.vmap(turned)(x[:, :, start:])], axis=2)

    return (
        StoredPass(
            embeddings=turned(clean.embeddings),
            positions=turned(clean.positions),
            valid=turned(clean.valid) & in_row,
            hidden=turned(clean.hidden),
            stored=KVCache(
                k=turned_slots(stored.k),
                v=turned_slots(stored.v),
                valid=jnp.concatenate([stored.valid[:, :start], turned(stored.valid[:, start:]) & in_row], axis=1),
                length=stored.length,
            ),
        ),
        Reading(turned(reading.tokens), turned(reading.valid) & in_row, turned(reading.answer)),
        at,
    )


def _cache_before(policy: Policy, clean: StoredPass, low: int) -> KVCache | None:
    """Return what stands before input ``low``, as a prefix that is read and never copied per row."""
    if policy.first_slots is not None:
        count = clean.stored.valid.shape[1] - clean.valid.shape[1] + low
        return policy.first_slots(clean.stored, count) if count else None
    prompt = (clean.stored,) if clean.stored.valid.shape[1] else ()
    caches = (*prompt, *clean.pieces[: clean.edges.index(low) + 1 if low else 0])
    if len(caches) > 1 and policy.extend is not None:
        return reduce(policy.extend, caches)
    return caches[0] if caches else None


def masked_positions(mask: Bool[Array, "B W"], *, first: int, slots: int, none: int) -> Int[Array, "B slots"]:
    """List the True entries of each row in order, counted from ``first``; then ``none``."""
    width = mask.shape[1]
    at = jnp.sort(jnp.where(mask, first + jnp.arange(width), none), axis=1)
    return jnp.pad(at, ((0, 0), (0, slots - width)), constant_values=none)


# The method ---------------------------------------------------------------------------------------------------------


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score a rollout by the configured counterfactual and probe."""
    params, probe = policy.head(params), probe_of(context)
    settings, length = settings_of(context), span.answer.shape[1]
    options = places(length, chunk=settings["chunk"], buckets=settings["buckets"])
    clean = stored_pass(policy, params, r.tokens, r.valid, **options)
    reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, probe)
    importance = masked_scores(policy, params, clean, reading, scored, units=span.units, probe=probe, **settings)
    return Scored(importance, clean.hidden)


def settings_of(context: Context) -> dict[str, Any]:
    """Return the keywords of ``masked_scores`` that the config sets."""
    m = context.credit.masking
    return {
        "mask_id": context.mask_id,
        "chunk": m.chunk,
        "buckets": m.buckets,
        "counterfactual": m.counterfactual,
    }


def check_units(cfg: CreditSettings, custom_probe: Probe | None) -> None:
    """Refuse whole lines and sentences, for the methods that change single tokens.

    Raises:
        ConfigError: credit.masking.unit is not token.
    """
    unit = cfg.masking.unit
    if unit != "token":
        raise ConfigError(f"credit.masking.unit: applies to oar_p only, got {unit}; set token, or credit.method=oar_p")


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes: one counterfactual per unit where their number is known, else one per token."""
    share = 1.0 if row.units is None or not row.reasoning else min(row.units / row.reasoning, 1.0)
    return masked_flops(d, row, share=share) / clean_flops(d, row)


METHOD = CreditMethod(weigh, name="oar_p", needs=("importance",), score=score, answer="probed", forwards=forwards)
