"""Rollouts in one program: prefill each prompt once, then decode its whole group in one ``lax.while_loop``.

``oarjax.rollout.segments`` draws the same in several programs, with far less padding if completions differ in length.
Both draw a token and feed it back with the functions of this file.

Noise. The token t places after a row's prompt is drawn with two uniforms from ``fold_in(row's key, t)``: nothing else
enters, so splitting rows over devices or hosts changes no draw, rows appended to a batch leave the others as they were,
and a row that goes on (``PromptBatch.written``) goes on with its noise. Row b has the key ``fold_in(key, b)``, and
batches have keys of their own: ``rollout_key``. In an evaluation the key is the problem's and the sample's own,
``problem_keys``: how problems are batched changes no draw.

Tokens are drawn by inverting the cumulative distribution, in two levels: blocks of 128 tokens by their mass, then a
token in its block, each with its own uniform. One uniform of 23 bits over a whole vocabulary of 151,936 would be off
by percents for a token of average mass; two are off by less than 1e-4 of it. Compared with the Gumbel trick it saves
B * V random numbers and two logarithms each, which cost more than the head on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from oarjax.models.policy import Policy, filled, positions_of
from oarjax.rl.checked import checked
from oarjax.rl.ranges import Count, Positive, PositiveFloat, PositiveShare, Rate, Share
from oarjax.rollout.filters import Filters, filter_logits, penalise_repeated, seen_tokens
from oarjax.types import Params, PromptBatch, Rollout

BLOCK = 128
"""Tokens per block of the two-level draw (the lane width of a TPU; it divides Qwen's vocabulary)."""

DEVICES = 16
"""A large vocabulary is padded to a multiple of this many blocks, so that a mesh that shards logits over up to 16
devices along the vocabulary shards its blocks too. Qwen's 1,187 blocks, a prime, become 1,200: without the other 13
every drawn token would gather all logits on every device."""


def rollout_key(root: Key[Array, ""], *, step: int | Int[Array, ""], batch: int | Int[Array, ""]) -> Key[Array, ""]:
    """Return the key of one rollout batch: the run's root key with the step and the batch's number in it folded in.

    ``batch`` counts the batches drawn within one step (refills, evaluation chunks). The root key is folded,
    never consumed, so a resumed run draws what the uninterrupted one would have drawn.
    """
    return jax.random.fold_in(jax.random.fold_in(root, step), batch)


def group_keys(prompts: PromptBatch, key: Key[Array, ""], *, group_size: int) -> Key[Array, "B"]:
    """Return a key for each of the ``group_size`` rows of every prompt: ``fold_in(key, b)`` for row b."""
    rows = jnp.arange(prompts.tokens.shape[0] * group_size)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def problem_keys(key: Key[Array, ""], problems: Int[Array, "P"], *, samples: int) -> Key[Array, "B"]:
    """Return a key for each of the ``samples`` rows of every problem, from the problem's number and the sample's."""
    rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.repeat(problems, samples))
    return jax.vmap(jax.random.fold_in)(rows, jnp.tile(jnp.arange(samples), problems.shape[0]))


class Decoding(NamedTuple):
    """Settings of drawing and stopping; static under jit. ``sample_rows`` explains each."""

    max_new: int
    temperature: float
    top_k: int
    top_p: float
    stop_ids: tuple[int, ...]
    pad_id: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_table: Any = None  # i32[states, V] of ``oarjax.rollout.stop_strings``; None: no stop strings
    record_experts: bool = False  # keep every router's choice, see ``Rollout.experts``

    @property
    def filters(self) -> Filters:
        """Return top-k, top-p and min-p."""
        return Filters(self.top_k, self.top_p, self.min_p)

    def check(self) -> None:
        """Raise a ValueError for a number outside its range."""
        if self.max_new < 1:
            raise ValueError(f"max_new: expected at least 1, got {self.max_new}")
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 (greedy) or more, got {self.temperature}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty: expected a positive number, 1 = off, got {self.repetition_penalty}")
        self.filters.check()


class Rows(NamedTuple):
    """Rows in the middle of their completions."""

    keys: Key[Array, "B"]  # of their noise
    prompts: Int32[Array, "B"]  # tokens of the prompt
    token: Int32[Array, "B"]  # the last one drawn; the pad id once a row is finished
    lengths: Int32[Array, "B"]  # tokens drawn so far
    alive: Bool[Array, "B"]  # neither ended nor cut
    ended: Bool[Array, "B"]  # a stop id was drawn, or a stop string completed
    seen: Bool[Array, "B V"] | None = None  # tokens of prompt and completion so far; None without a penalty
    matched: Int32[Array, "B"] | None = None  # state of ``stop_table`` after the bytes so far; None without it
    written: Int32[Array, "B"] | None = None  # tokens after the prompt, from before this turn; None in a first turn

    def following(self) -> Int32[Array, "B"]:
        """Count the tokens after the row's own prompt."""
        return self.lengths if self.written is None else self.lengths + self.written


class Drawn(NamedTuple):
    """One token of every row; the pad id and log-probs of 0 for rows that had finished before."""

    token: Int32[Array, "B"]
    logp: Float[Array, "B"]
    filtered: Float[Array, "B"]
    experts: Int[Array, "B L k"] | None = None  # chosen at the input before it; None: not recorded


class Prefilled(NamedTuple):
    rows: Rows  # without a token yet
    logits: Float[Array, "B V"]  # of their first one
    cache: Any  # of the prompts, as decoding reads it
    experts: Int[Array, "P S L k"] | None  # chosen at the prompts' tokens; None: not recorded


def prefill(
    policy: Policy, params: Params, prompts: PromptBatch, keys: Key[Array, "B"], decoding: Decoding
) -> Prefilled:
    """Compute the prompts, once per group."""
    count, width = prompts.tokens.shape
    rows = keys.shape[0]
    if rows == 0 or rows % count:
        raise ValueError(f"keys: expected as many for each of the {count} prompts, got {rows}")
    group_size = rows // count
    positions, cache = positions_of(prompts.valid), policy.init_cache(count, width)
    hidden, prefix, experts = _filled(policy, params, prompts.tokens, positions, prompts.valid, decoding, cache=cache)
    zeros = jnp.zeros((rows,), jnp.int32)
    start = Rows(
        keys=keys,
        prompts=jnp.repeat(jnp.sum(prompts.valid, axis=-1, dtype=jnp.int32), group_size),
        token=zeros,
        lengths=zeros,
        alive=jnp.ones((rows,), bool),
        ended=jnp.zeros((rows,), bool),
    )
    logits = jnp.repeat(policy.unembed(params, hidden[:, -1]), group_size, axis=0)
    if decoding.repetition_penalty != 1:
        seen = seen_tokens(prompts.tokens, prompts.valid, vocab=logits.shape[-1])
        start = start._replace(seen=jnp.repeat(seen, group_size, axis=0))
    if decoding.stop_table is not None:
        start = start._replace(matched=zeros)
    if prompts.written is not None:
        start = start._replace(written=jnp.repeat(prompts.written, group_size))
    return Prefilled(start, logits, policy.caches.prefix(prefix), experts)


def _filled(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    decoding: Decoding,
    *,
    cache: Any,
    prefix: Any = None,
) -> tuple[Float[Array, "B N D"], Any, Int[Array, "B N L k"] | None]:
    """Run the trunk; return states, the filled cache, and the experts chosen if they are recorded."""
    inputs, experts = (params, policy.embed(params, tokens), positions, valid), None
    if decoding.record_experts:
        if policy.routed is None:
            raise ValueError("record_experts: this policy has no experts; set it to False")
        hidden, new_cache, routing = policy.routed(*inputs, cache=cache, prefix=prefix)
        experts = routing.chosen
    else:
        hidden, new_cache = policy.trunk(*inputs, cache=cache, prefix=prefix)
    return hidden, filled(new_cache), experts


def empty_cache(policy: Policy, rows: int, slots: int) -> Any:
    """Create the cache of rows that are decoded."""
    return (policy.caches.init or policy.init_cache)(rows, slots)


def first_drawn(prefilled: Prefilled, decoding: Decoding) -> tuple[Rows, Drawn]:
    """Draw the first token of every row."""
    rows, drawn = draw_next(prefilled.rows, prefilled.logits, decoding)
    if prefilled.experts is None:
        return rows, drawn
    group_size = rows.token.shape[0] // prefilled.experts.shape[0]
    return rows, drawn._replace(experts=jnp.repeat(prefilled.experts[:, -1], group_size, axis=0))


def draw_next(rows: Rows, logits: Float[Array, "B V"], decoding: Decoding) -> tuple[Rows, Drawn]:
    """Draw a token for every unfinished row; token t after a row's prompt takes its noise from (key, t)."""

    def noise(key: Key[Array, ""], token: Int[Array, ""]) -> Float[Array, "2"]:
        return jax.random.uniform(jax.random.fold_in(key, token), (2,))

    uniforms = jax.vmap(noise)(rows.keys, rows.following())
    penalised = None if rows.seen is None else penalise_repeated(logits, rows.seen, penalty=decoding.repetition_penalty)
    settings = {"temperature": decoding.temperature, **decoding.filters._asdict()}
    token, logp, filtered = draw_token(logits, uniforms, penalised=penalised, **settings)
    token = jnp.where(rows.alive, token, decoding.pad_id)
    stopped = rows.alive & jnp.any(token[:, None] == jnp.asarray(decoding.stop_ids, jnp.int32), axis=-1)
    if rows.seen is not None:
        rows = rows._replace(seen=rows.seen.at[jnp.arange(token.shape[0]), token].set(True))
    if rows.matched is not None:
        matched = jnp.asarray(decoding.stop_table)[rows.matched, token]
        stopped = stopped | (rows.alive & (matched == len(decoding.stop_table) - 1))
        rows = rows._replace(matched=jnp.where(rows.alive, matched, rows.matched))
    next_rows = rows._replace(token=token, lengths=rows.lengths + rows.alive, ended=rows.ended | stopped)
    next_rows = next_rows._replace(alive=rows.alive & ~stopped & (next_rows.following() < decoding.max_new))
    return next_rows, Drawn(token, jnp.where(rows.alive, logp, 0), jnp.where(rows.alive, filtered, 0))


def decode_step(
    policy: Policy, params: Params, rows: Rows, cache: Any, prefix: Any, decoding: Decoding
) -> tuple[Rows, Any, Drawn]:
    """Feed every row its last token and draw the next. Finished rows get padding, which nothing attends to."""
    positions = (rows.prompts + rows.lengths - 1)[:, None]
    inputs = rows.token[:, None], positions, rows.alive[:, None]
    hidden, new_cache, experts = _filled(policy, params, *inputs, decoding, cache=cache, prefix=prefix)
    next_rows, drawn = draw_next(rows, policy.unembed(params, hidden[:, 0]), decoding)
    return next_rows, new_cache, drawn if experts is None else drawn._replace(experts=experts[:, 0])


class _Loop(NamedTuple):
    step: Int32[Array, ""]  # tokens drawn so far by unfinished rows
    rows: Rows
    cache: Any
    drawn: Drawn  # [T, B] each


@checked
def sample(
    policy: Policy,
    params: Params,
    prompts: PromptBatch,
    key: Key[Array, ""],
    *,
    group_size: Positive,
    max_new: Positive,
    temperature: Rate,
    top_k: Count,
    top_p: PositiveShare,
    stop_ids: tuple[int, ...],
    pad_id: Count,
    min_p: Share = 0.0,
    repetition_penalty: PositiveFloat = 1.0,
    stop_table: Any = None,
    record_experts: bool = False,
) -> Rollout:
    """Draw ``group_size`` completions for every prompt, row b with noise from ``fold_in(key, b)``: see ``sample_rows``.

    One pure program, to be jitted, vmapped or taken apart; every row is computed until the last one has finished.
    ``SegmentedSampler``, a loop on the host over jitted programs, draws the same several times as fast, if ragged.

    Args:
        policy: the model's functions, such as ``make_policy`` gives.
        params: its parameters.
        prompts: left-padded.
        key: of the noise; different batches need different keys, see ``rollout_key``.
        group_size: G, completions per prompt, >= 1.
        max_new: T, the maximum number of tokens of a completion, >= 1.
        temperature: divides the logits, >= 0; 0 = greedy. Static, as all keywords are.
        top_k: keep the k most likely tokens; 0 = off.
        top_p: keep the most likely tokens that have this mass, in (0, 1]; 1 = off.
        stop_ids: ids that end a row.
        pad_id: fills tokens after the end.
        min_p: keep tokens with at least this share of the highest probability, in [0, 1]; default 0.0, off.
        repetition_penalty: > 0; default 1.0, off.
        stop_table: of stop strings; default None.
        record_experts: keep every router's choice; default False.

    Raises:
        ArgumentError: an argument does not fit the signature.
    """
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
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop_table=stop_table,
        record_experts=record_experts,
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
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop_table: Any = None,
    record_experts: bool = False,
) -> Rollout:
    """Draw a completion of at most ``max_new`` tokens for every key: the first B / P keys for the first prompt.

    A row ends with the first sampled stop id, which belongs to the completion; from there on tokens are
    ``pad_id``, ``valid`` is False and log-probs are 0. ``ended`` is False for rows cut at ``max_new``. The loop
    stops when every row has ended. All keywords are static under jit.

    Args:
        prompts: P prompts, left-padded; their KV is computed once and read, not copied, by their group.
        temperature: divides the logits; 0 = greedy (argmax, ties to the lowest id), which ignores the filters and
            reports log-probs at temperature 1.
        top_k: keep the k most likely tokens, ties with the k-th included; 0 = off.
        top_p: then keep the smallest set of most likely tokens whose mass, of what is left, reaches p, ties
            included; 1 = off. The order (penalty, temperature, top-k, top-p, min-p) is that of ``transformers``. A
            filter that is off leaves nothing in the program.
        min_p: then keep tokens with at least this share of the highest probability; 0 = off.
        repetition_penalty: see ``oarjax.rollout.filters``; 1 = off. ``behaviour_logps`` leave it out, as they do
            the filters; ``filtered_logps`` are of the distribution that was drawn from.
        stop_table: of ``oarjax.rollout.stop_strings.stop_table``: a row also ends with the token whose bytes complete a
            stop string. That token and those before it stay in the completion with their log-probs; its text is cut.
        record_experts: keep the choice of every router, for ``Rollout.experts``.
        stop_ids: every one of them stops a row; may be empty.
        pad_id: fills tokens after the end; may be a stop id itself, since nothing is derived from it.

    Raises:
        ValueError: a keyword outside its range.
    """
    filters = (min_p, repetition_penalty, stop_table)
    decoding = Decoding(max_new, temperature, top_k, top_p, stop_ids, pad_id, *filters, record_experts)
    decoding.check()
    params = policy.head(params)
    prefilled = prefill(policy, params, prompts, keys, decoding)
    rows, first = first_drawn(prefilled, decoding)
    blank = jax.tree.map(lambda x: jnp.full((max_new, *x.shape), pad_id if x is first.token else 0, x.dtype), first)
    completion_cache = empty_cache(policy, keys.shape[0], max(max_new - 1, 1))  # the last token is never fed back
    start = _Loop(
        step=jnp.ones((), jnp.int32),
        rows=rows,
        cache=policy.caches.begin(completion_cache, prefilled.cache),
        drawn=jax.tree.map(lambda draws, x: draws.at[0].set(x), blank, first),
    )

    def advance(loop: _Loop) -> _Loop:
        rows, cache, step_draws = decode_step(policy, params, loop.rows, loop.cache, prefilled.cache, decoding)
        drawn = jax.tree.map(lambda draws, x: draws.at[loop.step].set(x), loop.drawn, step_draws)
        return _Loop(loop.step + 1, rows, cache, drawn)

    end = jax.lax.while_loop(lambda loop: (loop.step < max_new) & jnp.any(loop.rows.alive), advance, start)
    drawn = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), end.drawn)
    return assemble(prompts, end.rows, drawn, experts=prefilled.experts)


def assemble(
    prompts: PromptBatch, rows: Rows, drawn: Drawn, *, experts: Int[Array, "P S L k"] | None = None
) -> Rollout:
    """Build the rollout of finished rows from their draws, [B, T] each, and the experts of the prompts.

    The last token of a row is no input of any other: its experts are 0.
    """
    group_size = rows.lengths.shape[0] // prompts.tokens.shape[0]
    completion = jnp.arange(drawn.token.shape[1]) < rows.lengths[:, None]
    return Rollout(
        tokens=jnp.concatenate([jnp.repeat(prompts.tokens, group_size, axis=0), drawn.token], axis=1),
        valid=jnp.concatenate([jnp.repeat(prompts.valid, group_size, axis=0), completion], axis=1),
        completion=completion,
        behaviour_logps=drawn.logp,
        filtered_logps=drawn.filtered,
        ended=rows.ended,
        experts=None
        if experts is None or drawn.experts is None
        else _experts_of_rows(experts, drawn.experts, completion),
    )


def _experts_of_rows(
    prompts: Int[Array, "P S L k"], drawn: Int[Array, "B T L k"], completion: Bool[Array, "B T"]
) -> Int[Array, "B N L k"]:
    """Join the choices at prompts and completions; drawn token t has those made at the input before it."""
    inputs = jnp.pad(drawn[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
    inputs = jnp.where(jnp.pad(completion[:, 1:], ((0, 0), (0, 1)))[..., None, None], inputs, 0)
    return jnp.concatenate([jnp.repeat(prompts, drawn.shape[0] // prompts.shape[0], axis=0), inputs], axis=1)


def draw_token(
    logits: Float[Array, "B V"],
    uniforms: Float[Array, "B 2"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    penalised: Float[Array, "B V"] | None = None,
) -> tuple[Int32[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
    """Draw a token per row; return it and its log-probs under the whole distribution and under the filtered one.

    ``uniforms`` in [0, 1) pick the block and the token in it. ``penalised`` are the logits after the repetition
    penalty, which are drawn from. Without penalty and filters the two log-probs are equal.
    """
    source = logits if penalised is None else penalised
    if temperature == 0:
        token = jnp.argmax(source, axis=-1).astype(jnp.int32)
        greedy = _chosen(logits, token) - jax.nn.logsumexp(logits, axis=-1)
        return token, greedy, greedy if source is logits else _chosen(source, token) - jax.nn.logsumexp(source, axis=-1)
    logits = logits / temperature
    drawn_from = logits if penalised is None else penalised / temperature
    kept_logits = filter_logits(drawn_from, top_k=top_k, top_p=top_p, min_p=min_p)
    token = invert_cdf(kept_logits, uniforms)
    logp = _chosen(logits, token) - jax.nn.logsumexp(logits, axis=-1)
    filtered = logp if kept_logits is logits else _chosen(kept_logits, token) - jax.nn.logsumexp(kept_logits, axis=-1)
    return token, logp, filtered


def invert_cdf(logits: Float[Array, "B V"], uniforms: Float[Array, "B 2"]) -> Int32[Array, "B"]:
    """Return the token at which the cumulative softmax passes the uniforms, block first; never one of logit -inf."""
    rows, vocab = logits.shape
    spare = -vocab % (BLOCK * (DEVICES if vocab >= 8 * BLOCK * DEVICES else 1))
    blocks = jnp.pad(logits, ((0, 0), (0, spare)), constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    top = jnp.max(logits, axis=-1)
    block = _pick(jnp.sum(jnp.exp(blocks - top[:, None, None]), axis=-1), uniforms[:, 0])
    block_logits = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = _pick(jnp.exp(block_logits - jnp.max(block_logits, axis=-1, keepdims=True)), uniforms[:, 1])
    return block * BLOCK + token


def _pick(mass: Float[Array, "B n"], uniform: Float[Array, "B"]) -> Int32[Array, "B"]:
    """Return the first index whose cumulative mass exceeds uniform * total, among those of positive mass.

    A parallel cumulative sum is not quite monotone, so entries without mass are excluded explicitly.
    """
    edges = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), -1)
    return jnp.argmax(edges > uniform[:, None] * jnp.max(edges, axis=-1, keepdims=True), axis=-1).astype(jnp.int32)


def _chosen(logits: Float[Array, "B V"], token: Int32[Array, "B"]) -> Float[Array, "B"]:
    return jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
