"""Rollouts in one program: prefill each prompt once, then decode its whole group in one ``lax.while_loop``.

``oarjax.rollout.segments`` draws the same completions in several programs and pays for far less padding where they
differ in length. The draw of a token and the step that feeds it back are here, once for both.

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


def group_keys(prompts: PromptBatch, key: Key[Array, ""], *, group_size: int) -> Key[Array, "B"]:
    """A key for each of the ``group_size`` rows of every prompt: ``fold_in(key, b)`` for row b."""
    rows = jnp.arange(prompts.tokens.shape[0] * group_size)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def problem_keys(key: Key[Array, ""], problems: Int[Array, "P"], *, samples: int) -> Key[Array, "B"]:
    """A key for each of the ``samples`` rows of every problem, by its number in the dataset and the sample's."""
    rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.repeat(problems, samples))
    return jax.vmap(jax.random.fold_in)(rows, jnp.tile(jnp.arange(samples), problems.shape[0]))


class Decoding(NamedTuple):
    """Settings of drawing and of when a row is done; static under jit. ``sample_rows`` explains each."""

    max_new: int
    temperature: float
    top_k: int
    top_p: float
    stop_ids: tuple[int, ...]
    pad_id: int

    def check(self) -> None:
        """Raise a ValueError for a number outside its range."""
        if self.max_new < 1:
            raise ValueError(f"max_new: expected at least 1, got {self.max_new}")
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a share in (0, 1], 1 = off, got {self.top_p}")


class Rows(NamedTuple):
    """Rows in the middle of their completions."""

    keys: Key[Array, "B"]  # of their noise
    prompts: Int32[Array, "B"]  # tokens of the prompt
    token: Int32[Array, "B"]  # the last one drawn; the pad id once a row is done
    lengths: Int32[Array, "B"]  # tokens drawn so far
    alive: Bool[Array, "B"]  # neither ended nor cut
    ended: Bool[Array, "B"]  # a stop id was drawn


class Drawn(NamedTuple):
    """One token of every row, the pad id and log-probs of 0 for rows that were done before."""

    token: Int32[Array, "B"]
    logp: Float[Array, "B"]
    filtered: Float[Array, "B"]


def prefill(
    policy: Policy, params: Params, prompts: PromptBatch, keys: Key[Array, "B"]
) -> tuple[Rows, Float[Array, "B V"], KVCache]:
    """Rows without a token yet, the logits of their first one, and the cache of the prompts."""
    count, width = prompts.tokens.shape
    rows = keys.shape[0]
    if rows == 0 or rows % count:
        raise ValueError(f"keys: expected as many for each of the {count} prompts, got {rows}")
    group_size = rows // count
    hidden, prefix = policy.trunk(
        params,
        policy.embed(params, prompts.tokens),
        positions_of(prompts.valid),
        prompts.valid,
        cache=policy.init_cache(count, width),
    )
    if prefix is None:
        raise ValueError("policy.trunk: expected the filled cache as second result of a call with cache=, got None")
    zeros = jnp.zeros((rows,), jnp.int32)
    start = Rows(
        keys=keys,
        prompts=jnp.repeat(jnp.sum(prompts.valid, axis=-1, dtype=jnp.int32), group_size),
        token=zeros,
        lengths=zeros,
        alive=jnp.ones((rows,), bool),
        ended=jnp.zeros((rows,), bool),
    )
    return start, jnp.repeat(policy.unembed(params, hidden[:, -1]), group_size, axis=0), prefix


def draw_next(rows: Rows, logits: Float[Array, "B V"], how: Decoding) -> tuple[Rows, Drawn]:
    """Draw a token for every row that is not done; token t of a row takes its noise from (key, t)."""

    def noise(key: Key[Array, ""], token: Int[Array, ""]) -> Float[Array, "2"]:
        return jax.random.uniform(jax.random.fold_in(key, token), (2,))

    uniforms = jax.vmap(noise)(rows.keys, rows.lengths)
    token, logp, filtered = draw_token(logits, uniforms, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)
    token = jnp.where(rows.alive, token, how.pad_id)
    stopped = rows.alive & jnp.any(token[:, None] == jnp.asarray(how.stop_ids, jnp.int32), axis=-1)
    lengths = rows.lengths + rows.alive
    after = rows._replace(
        token=token, lengths=lengths, alive=rows.alive & ~stopped & (lengths < how.max_new), ended=rows.ended | stopped
    )
    return after, Drawn(token, jnp.where(rows.alive, logp, 0), jnp.where(rows.alive, filtered, 0))


def decode_step(
    policy: Policy, params: Params, rows: Rows, cache: KVCache, prefix: KVCache, how: Decoding
) -> tuple[Rows, KVCache, Drawn]:
    """Feed every row its last token and draw the next. Rows that are done are fed padding, which nothing attends to."""
    hidden, after = policy.trunk(
        params,
        policy.embed(params, rows.token[:, None]),
        (rows.prompts + rows.lengths - 1)[:, None],
        rows.alive[:, None],
        cache=cache,
        prefix=prefix,
    )
    if after is None:
        raise ValueError("policy.trunk: expected the filled cache as second result of a call with cache=, got None")
    moved, drawn = draw_next(rows, policy.unembed(params, hidden[:, 0]), how)
    return moved, after, drawn


class _Loop(NamedTuple):
    step: Int32[Array, ""]  # tokens drawn so far by rows that are not done
    rows: Rows
    cache: KVCache
    made: Drawn  # [T, B] each


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

    One pure program, to be jitted, vmapped or taken apart; every row is computed until the last one is done. Where
    completions differ in length, ``oarjax.rollout.segments.SegmentedSampler`` draws the same ones several times as
    fast, as a loop on the host over jitted programs: it is what training, evaluation and the lab use.

    Raises:
        ValueError: a keyword outside its range.
    """
    if group_size < 1:
        raise ValueError(f"group_size: expected at least 1, got {group_size}")
    prompts = jax.tree.map(jnp.asarray, prompts)  # a run's prompts are numpy
    return sample_rows(
        policy,
        params,
        prompts,
        group_keys(prompts, key, group_size=group_size),
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
        pad_id: fills tokens after the end; may be a stop id itself, since nothing is derived from it.

    Raises:
        ValueError: a keyword outside its range.
    """
    how = Decoding(max_new, temperature, top_k, top_p, stop_ids, pad_id)
    how.check()
    params = policy.head(params)
    begun, logits, prefix = prefill(policy, params, prompts, keys)
    rows, first = draw_next(begun, logits, how)
    made = jax.tree.map(lambda x: jnp.full((max_new, *x.shape), pad_id if x is first.token else 0, x.dtype), first)
    start = _Loop(
        step=jnp.ones((), jnp.int32),
        rows=rows,
        cache=policy.init_cache(keys.shape[0], max(max_new - 1, 1)),  # the last token is never fed back
        made=jax.tree.map(lambda every, x: every.at[0].set(x), made, first),
    )

    def advance(loop: _Loop) -> _Loop:
        rows, cache, drawn = decode_step(policy, params, loop.rows, loop.cache, prefix, how)
        made = jax.tree.map(lambda every, x: every.at[loop.step].set(x), loop.made, drawn)
        return _Loop(loop.step + 1, rows, cache, made)

    end = jax.lax.while_loop(lambda loop: (loop.step < max_new) & jnp.any(loop.rows.alive), advance, start)
    return assemble(prompts, end.rows, jax.tree.map(jnp.transpose, end.made))


def assemble(prompts: PromptBatch, rows: Rows, made: Drawn) -> Rollout:
    """The rollout of rows that are done, from what was drawn, [B, T] each."""
    group_size = rows.lengths.shape[0] // prompts.tokens.shape[0]
    completion = jnp.arange(made.token.shape[1]) < rows.lengths[:, None]
    return Rollout(
        tokens=jnp.concatenate([jnp.repeat(prompts.tokens, group_size, axis=0), made.token], axis=1),
        valid=jnp.concatenate([jnp.repeat(prompts.valid, group_size, axis=0), completion], axis=1),
        completion=completion,
        behaviour_logps=made.logp,
        filtered_logps=made.filtered,
        ended=rows.ended,
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
