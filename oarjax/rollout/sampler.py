"""Rollouts: prefill each prompt once, then decode its whole group in one ``lax.while_loop``.

Noise. A row at step t draws with two uniforms from ``fold_in(row's key, t)``: nothing else enters, so splitting rows
over devices or hosts changes no draw, and rows appended to a batch leave the others as they were. Row b of a rollout
has the key ``fold_in(key, b)``, and different batches need different keys: ``rollout_key``. In an evaluation the key is
the problem's and the sample's own, ``problem_keys``: how problems are batched changes no draw.

Drawing is by inverting the cumulative distribution, in two levels: blocks of 128 tokens by their mass, then a
token in its block, each with a uniform of its own. One uniform of 23 bits over a whole vocabulary of 151,936
would be off by percents on a token of average mass; two are off by less than 1e-4 of it. Against the Gumbel
trick it spares B * V random numbers and two logarithms each, which cost more than the head on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from oarjax.models.policy import Policy, positions_of
from oarjax.types import KVCache, Params, PromptBatch, Rollout

BLOCK = 128
"""Tokens per block of the two-level draw (the lane width of a TPU; it divides Qwen's vocabulary)."""


def rollout_key(root: Key[Array, ""], *, step: int | Int[Array, ""], batch: int | Int[Array, ""]) -> Key[Array, ""]:
    """The key of one rollout batch: the run's root key with the step and the batch's number in the step folded in.

    ``batch`` counts the batches drawn within one step (refills, evaluation chunks). The root key is folded,
    never consumed, so a resumed run draws what the uninterrupted one would have drawn.
    """
    return jax.random.fold_in(jax.random.fold_in(root, step), batch)


def problem_keys(key: Key[Array, ""], problems: Int[Array, "P"], *, samples: int) -> Key[Array, "B"]:
    """A key for each of the ``samples`` rows of every problem, by its number in the dataset and the sample's."""
    rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.repeat(problems, samples))
    return jax.vmap(jax.random.fold_in)(rows, jnp.tile(jnp.arange(samples), problems.shape[0]))


class _Loop(NamedTuple):
    step: Int32[Array, ""]  # tokens drawn so far
    token: Int32[Array, "B"]  # the last one
    alive: Bool[Array, "B"]  # no stop id yet
    lengths: Int32[Array, "B"]
    cache: KVCache
    tokens: Int32[Array, "T B"]
    logps: Float[Array, "T B"]
    filtered: Float[Array, "T B"]


def sample(
    policy: Policy,
    params: Params,
    prompts: PromptBatch,
    key: Key[Array, ""],
    *,
    group_size: int,
    max_new: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Rollout:
    """Draw ``group_size`` completions for every prompt, row b with noise from ``fold_in(key, b)``: see ``sample_rows``.

    Raises:
        ValueError: a keyword outside its range.
    """
    if group_size < 1:
        raise ValueError(f"group_size: expected at least 1, got {group_size}")
    rows = jnp.arange(prompts.tokens.shape[0] * group_size)
    return sample_rows(
        policy,
        params,
        prompts,
        jax.vmap(lambda row: jax.random.fold_in(key, row))(rows),
        max_new=max_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=stop_ids,
        pad_id=pad_id,
    )


def sample_rows(
    policy: Policy,
    params: Params,
    prompts: PromptBatch,
    keys: Key[Array, "B"],
    *,
    max_new: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Rollout:
    """Draw a completion of at most ``max_new`` tokens for every key: the first B / P of them for the first prompt.

    A row ends with the first sampled stop id, which belongs to the completion; from there on tokens are
    ``pad_id``, ``valid`` is False and log-probs are 0. ``ended`` is False for rows cut at ``max_new``. The loop
    stops when every row has ended. All keywords are static under jit.

    Args:
        prompts: P prompts, left-padded; their KV is computed once and read, not copied, by their group.
        temperature: divides the logits; 0 = greedy (argmax, the first among equals), which ignores ``top_k``
            and ``top_p`` and reports both log-probs at temperature 1.
        top_k: keep the k likeliest tokens, ties with the k-th included; 0 = off.
        top_p: then keep the smallest set of likeliest tokens whose mass, of what is left, reaches p, ties
            included; 1 = off. The order (temperature, top-k, top-p) is that of ``transformers``. With both
            off the program holds nothing of them.
        stop_ids: every one of them stops a row; may be empty.
        pad_id: fills tokens after the end; may be a stop id itself, nothing is told from it.

    Raises:
        ValueError: a keyword outside its range.
    """
    _check(max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p)
    count, width = prompts.tokens.shape
    rows = keys.shape[0]
    if rows == 0 or rows % count:
        raise ValueError(f"keys: expected as many for each of the {count} prompts, got {rows}")
    group_size = rows // count
    stops = jnp.asarray(stop_ids, jnp.int32)

    def draw(logits, step):
        uniforms = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, step), (2,)))(keys)
        return draw_token(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p)

    params = policy.head(params)
    hidden, prefix = policy.trunk(
        params,
        policy.embed(params, prompts.tokens),
        positions_of(prompts.valid),
        prompts.valid,
        cache=policy.init_cache(count, width),
    )
    first = jnp.repeat(policy.unembed(params, hidden[:, -1]), group_size, axis=0)
    prompt_lengths = jnp.repeat(jnp.sum(prompts.valid, axis=-1, dtype=jnp.int32), group_size)

    def record(loop: _Loop, logits) -> _Loop:
        """Draw one token for every row and write it down for those alive."""
        token, logp, filtered = draw(logits, loop.step)
        token = jnp.where(loop.alive, token, pad_id)
        return loop._replace(
            step=loop.step + 1,
            token=token,
            alive=loop.alive & ~jnp.any(token[:, None] == stops, axis=-1),
            lengths=loop.lengths + loop.alive,
            tokens=loop.tokens.at[loop.step].set(token),
            logps=loop.logps.at[loop.step].set(jnp.where(loop.alive, logp, 0)),
            filtered=loop.filtered.at[loop.step].set(jnp.where(loop.alive, filtered, 0)),
        )

    def advance(loop: _Loop) -> _Loop:
        """Feed every row its last token. Ended rows are fed padding that nothing attends to."""
        hidden, cache = policy.trunk(
            params,
            policy.embed(params, loop.token[:, None]),
            (prompt_lengths + loop.step - 1)[:, None],
            loop.alive[:, None],
            cache=loop.cache,
            prefix=prefix,
        )
        return record(loop._replace(cache=cache), policy.unembed(params, hidden[:, 0]))

    empty = jnp.zeros((max_new, rows), jnp.promote_types(first.dtype, jnp.float32))
    start = _Loop(
        step=jnp.zeros((), jnp.int32),
        token=jnp.full((rows,), pad_id, jnp.int32),
        alive=jnp.ones((rows,), bool),
        lengths=jnp.zeros((rows,), jnp.int32),
        cache=policy.init_cache(rows, max(max_new - 1, 1)),  # the last token is never fed back
        tokens=jnp.full((max_new, rows), pad_id, jnp.int32),
        logps=empty,
        filtered=empty,
    )
    end = jax.lax.while_loop(lambda loop: (loop.step < max_new) & jnp.any(loop.alive), advance, record(start, first))
    completion = jnp.arange(max_new) < end.lengths[:, None]
    return Rollout(
        tokens=jnp.concatenate([jnp.repeat(prompts.tokens, group_size, axis=0), end.tokens.T], axis=1),
        valid=jnp.concatenate([jnp.repeat(prompts.valid, group_size, axis=0), completion], axis=1),
        completion=completion,
        behaviour_logps=end.logps.T,
        filtered_logps=end.filtered.T,
        ended=~end.alive,
    )


def draw_token(
    logits: Float[Array, "B V"],
    uniforms: Float[Array, "B 2"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[Int32[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
    """One token per row, its log-prob under the whole distribution and under what top-k and top-p left of it.

    ``uniforms`` in [0, 1) pick the block and the token in it. With the filters off the two log-probs are one.
    """
    if temperature == 0:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logp = _chosen(logits, token) - jax.nn.logsumexp(logits, axis=-1)
        return token, logp, logp
    logits = logits / temperature
    kept = filter_logits(logits, top_k=top_k, top_p=top_p)
    token = invert_cdf(kept, uniforms)
    chosen = _chosen(logits, token)
    logp = chosen - jax.nn.logsumexp(logits, axis=-1)
    filtered = logp if kept is logits else chosen - jax.nn.logsumexp(kept, axis=-1)
    return token, logp, filtered


def filter_logits(logits: Float[Array, "B V"], *, top_k: int, top_p: float) -> Float[Array, "B V"]:
    """Logits with -inf where top-k, then top-p, drops a token; the same array when both are off.

    Both keep by a threshold, so tokens of equal logit stay or go together (``transformers`` breaks such ties
    by index in top-p). The likeliest token always stays.
    """
    if 0 < top_k < logits.shape[-1]:
        bound = lowest_kept(logits, jnp.ones_like(logits), limit=float(top_k))
        logits = jnp.where(logits >= bound, logits, -jnp.inf)
    if top_p < 1:
        bound = lowest_kept(logits, jax.nn.softmax(logits, axis=-1), limit=top_p)
        logits = jnp.where(logits >= bound, logits, -jnp.inf)
    return logits


def lowest_kept(logits: Float[Array, "B V"], weights: Float[Array, "B V"], *, limit: float) -> Float[Array, "B 1"]:
    """The lowest value with less than ``limit`` (> 0) of weight strictly above it: a logit, or -inf for all.

    Found exactly, by bisection over the bit patterns of floats, which order like the floats once those of
    negative numbers are reversed. One pass over the vocabulary per bit is many times cheaper than sorting it.
    """
    bits = jnp.finfo(logits.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def reverse_negatives(x):
        return jnp.where(x < 0, x ^ jnp.iinfo(integer).max, x)

    ranks = reverse_negatives(jax.lax.bitcast_convert_type(logits, integer))

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above = jnp.sum(jnp.where(ranks > middle, weights, 0), axis=-1, keepdims=True)
        return jnp.where(above < limit, low, middle + 1), jnp.where(above < limit, middle, high)

    # From -inf, where everything is above, to the row's maximum, where nothing is.
    high = jnp.max(ranks, axis=-1, keepdims=True)
    low = jnp.minimum(
        reverse_negatives(jax.lax.bitcast_convert_type(jnp.full_like(high, -jnp.inf, logits.dtype), integer)), high
    )
    bound = jax.lax.fori_loop(0, bits, halve, (low, high))[1]
    return jax.lax.bitcast_convert_type(reverse_negatives(bound), logits.dtype)


def invert_cdf(logits: Float[Array, "B V"], uniforms: Float[Array, "B 2"]) -> Int32[Array, "B"]:
    """The token at which the cumulative softmax passes the uniforms, block first; never one of logit -inf."""
    rows, vocab = logits.shape
    spare = -vocab % BLOCK
    blocks = jnp.pad(logits, ((0, 0), (0, spare)), constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    top = jnp.max(logits, axis=-1)
    block = _pick(jnp.sum(jnp.exp(blocks - top[:, None, None]), axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = _pick(jnp.exp(inside - jnp.max(inside, axis=-1, keepdims=True)), uniforms[:, 1])
    return block * BLOCK + token


def _pick(mass: Float[Array, "B n"], uniform: Float[Array, "B"]) -> Int32[Array, "B"]:
    """First index whose cumulative mass exceeds uniform * total, among those of positive mass.

    A parallel cumulative sum is not quite monotone, so entries of no mass are excluded by name.
    """
    edges = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), -1)
    return jnp.argmax(edges > uniform[:, None] * jnp.max(edges, axis=-1, keepdims=True), axis=-1).astype(jnp.int32)


def _chosen(logits: Float[Array, "B V"], token: Int32[Array, "B"]) -> Float[Array, "B"]:
    return jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]


def _check(*, max_new: int, temperature: float, top_k: int, top_p: float) -> None:
    if max_new < 1:
        raise ValueError(f"max_new: expected at least 1, got {max_new}")
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 (greedy) or more, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k: expected 0 (off) or more, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a share in (0, 1], 1 = off, got {top_p}")
