"""Log-probabilities and entropies of tokens, with the vocabulary head in chunks so that [B, T, V] never exists.

A [B, T, V] float32 array of logits is the commonest cause of out-of-memory reports in RL fine-tuning: 32
rows of 1,024 tokens over Qwen's 151,936 ids are 20 GB, and the backward pass needs them again. Here the head
runs over ``head_chunk`` token positions at a time, forward and (by recomputation) backward: one more head
product, and on a CPU still faster than the whole array, because a chunk stays in the cache. A head that is sharded
over devices is gathered once, before the first chunk, for both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from oarjax.models.policy import Policy, positions_of, prompt_cache
from oarjax.rl.checked import ArgumentError, Scalar, ScalarPositive, checked, is_traced
from oarjax.rl.ranges import Positive
from oarjax.rollout.filters import Filters, filter_logits
from oarjax.types import Params


@checked
def token_logps(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    *,
    completion_length: Positive,
    temperature: ScalarPositive,
    head_chunk: Positive,
    filters: Filters | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Compute log pi(y_t | x, y_<t) in nats and the entropy of pi(. | x, y_<t), teacher-forced, of the last T tokens.

    Token t is predicted by the hidden state of position t - 1, so the forward needs at least one position
    before the completion. Values at invalid positions are finite and mean nothing: mask them.

    Args:
        policy: the model's functions, such as ``make_policy`` gives.
        params: its parameters.
        tokens: prompt and completion, N = S + T.
        valid: positions that hold a token.
        completion_length: T, the number of positions at the right end to score, in 1 .. N - 1.
        temperature: divides the logits, > 0; the sampler's own, so that both mean the same distribution. May be traced.
        head_chunk: token positions per chunk of the head, >= 1; peak memory is about head_chunk * V floats.
        filters: renormalise over what these keep, and the token itself: the sampler's truncated distribution; default
            None, the whole vocabulary.

    Raises:
        ArgumentError: an argument does not fit the signature, or completion_length exceeds N - 1.
    """
    hidden = last_states(policy, params, tokens, valid, completion_length=completion_length)
    targets = tokens[:, tokens.shape[1] - completion_length :]
    return hidden_logps(
        policy, params, hidden, targets, temperature=temperature, head_chunk=head_chunk, filters=filters
    )


def last_states(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    *,
    completion_length: int,
) -> Float[Array, "B T D"]:
    """Compute the final hidden states that predict the last T tokens: those of the positions before them.

    The prompt but its last token is computed once for the rows that share it, if ``policy.prompt_rows`` says so.

    Raises:
        ArgumentError: completion_length outside 1 .. N - 1.
    """
    total = tokens.shape[1]
    if not 1 <= completion_length < total:
        raise ArgumentError(
            f"token_logps: completion_length must be in 1 .. {total - 1}, to leave a position before the completion of "
            f"tokens [B, {total}], got {completion_length}"
        )
    positions, start = positions_of(valid), total - completion_length - 1
    if policy.prompt_rows == 1:
        hidden, _ = policy.trunk(params, policy.embed(params, tokens), positions, valid)
        return hidden[:, start : total - 1]
    columns, prefix = slice(start, total - 1), prompt_cache(policy, params, tokens, positions, valid, start)
    embeddings = policy.embed(params, tokens[:, columns])
    return policy.trunk(params, embeddings, positions[:, columns], valid[:, columns], prefix=prefix)[0]


def hidden_logps(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    temperature: Scalar,
    head_chunk: int,
    filters: Filters | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Compute log-prob and entropy of each target from the final hidden states that predict them, ``in_chunks``.

    Raises:
        ValueError: temperature or head_chunk not positive.
    """
    if not is_traced(temperature) and temperature <= 0:
        raise ValueError(
            f"temperature: expected a positive number, got {temperature}; greedy sampling is scored at temperature 1"
        )

    def score(states, ids):
        # Rows and positions merged: with three axes the head's weight gradient takes twice as long on a CPU.
        logits = policy.unembed(params, states.reshape(-1, states.shape[-1]))
        logps, entropies = logits_logps(logits, ids.reshape(-1), temperature=temperature, filters=filters)
        return logps.reshape(ids.shape), entropies.reshape(ids.shape)

    params = policy.head(params)
    return in_chunks(score, (hidden, targets), head_chunk=head_chunk)


def in_chunks(fn: Callable[..., Any], arrays: tuple[Shaped[Array, "B T ..."], ...], *, head_chunk: int) -> Any:
    """Apply a function of token positions to ``head_chunk`` of them at a time; its results are a tree of [B, T].

    A chunk takes the same few positions of every row, so that rows split over devices keep all of them busy
    in every chunk. Only when there are more rows than ``head_chunk`` are rows split too (strided, for the
    same reason). Chunks are of equal size; up to ``head_chunk`` positions run at once, with no loop. A backward pass
    computes each chunk again.

    Raises:
        ValueError: head_chunk not positive.
    """
    if head_chunk < 1:
        raise ValueError(f"head_chunk: expected at least 1 token position, got {head_chunk}")
    rows, length = arrays[0].shape[:2]
    if rows * length <= head_chunk:
        return fn(*arrays)
    row_chunks, row_size = _even_chunks(rows, head_chunk)
    time_chunks, time_size = _even_chunks(length, max(head_chunk // rows, 1))

    def split(x):
        spare = ((0, row_chunks * row_size - rows), (0, time_chunks * time_size - length))
        x = jnp.pad(x, spare + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(row_size, row_chunks, time_chunks, time_size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, 1)).reshape(-1, row_size, time_size, *x.shape[4:])

    def join(x):
        x = jnp.moveaxis(x.reshape(row_chunks, time_chunks, row_size, time_size), (0, 1), (1, 2))
        return x.reshape(row_size * row_chunks, time_chunks * time_size)[:rows, :length]

    return jax.tree.map(join, jax.lax.map(lambda chunk: jax.checkpoint(fn)(*chunk), tuple(map(split, arrays))))


def _even_chunks(count: int, largest: int) -> tuple[int, int]:
    """Return the smallest number of chunks of at most ``largest``, and their even size."""
    chunks = -(-count // largest)
    return chunks, -(-count // chunks)


def logits_logps(
    logits: Float[Array, "*rows V"],
    targets: Int[Array, "*rows"],
    *,
    temperature: Scalar,
    filters: Filters | None = None,
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Compute log-softmax of logits / temperature at the targets, and its entropy -sum p log p, both in nats.

    Float32 at least, float64 for float64 logits. A logit of -inf is a token that cannot occur. With ``filters`` the
    softmax is over the tokens they keep and the target; the choice of tokens has no gradient.
    """
    logits = scaled_logits(logits, targets, temperature=temperature, filters=filters)
    logps = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    probs = jnp.exp(logps)
    target_logps = jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
    return target_logps, -jnp.sum(probs * jnp.where(probs > 0, logps, 0), axis=-1)


def scaled_logits(
    logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"], *, temperature: Scalar, filters: Filters | None
) -> Float[Array, "*rows V"]:
    """Divide by the temperature, in float32 at least, and set -inf where the filters drop a token but the target."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / temperature
    if filters is None:
        return logits
    filtered = filter_logits(logits, **filters._asdict())
    return jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, filtered)
