"""The outcome distribution: what the policy says of its own answer, and how far a perturbation moves it.

Under causal attention the prompt does not feel a perturbation of the completion, so its keys and values are computed
once and every perturbed forward runs over the completion alone. Rows enter that forward shifted by one: input t is
the token before completion token t (input 0 is the last prompt token), so that hidden state t predicts completion
token t, and the answer mask of the completion is also the mask of the hidden states that predict the answer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from oarjax.logps import logits_logps
from oarjax.policy import Policy, positions_of
from oarjax.types import AnswerSpan, KVCache, Params

ProbeMode = Literal["last", "answer_mean", "answer_joint"]


def probe_mode(iteration: int, *, mode: ProbeMode, warmup_mode: ProbeMode, warmup_iterations: int) -> ProbeMode:
    """``warmup_mode`` for the first ``warmup_iterations`` iterations (counted from 0), then ``mode``."""
    return warmup_mode if iteration < warmup_iterations else mode


class Context(NamedTuple):
    """What all forwards of a batch share: clean inputs of the completion and the prompt's keys and values."""

    embeddings: Float[Array, "B T D"]  # clean, of the tokens before each completion token
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    prefix: KVCache | None  # the prompt but its last token; None for a prompt of one slot


def completion_context(
    policy: Policy, params: Params, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], *, completion_length: int
) -> Context:
    """Run the prompt once and embed the inputs that predict the last ``completion_length`` = T tokens.

    Raises:
        ValueError: no prompt position before the completion.
    """
    start = tokens.shape[1] - completion_length - 1
    if start < 0 or completion_length < 1:
        raise ValueError(
            f"completion_context: T = {completion_length} completion positions need at least {completion_length + 1} "
            f"token positions, the prompt first; got N = {tokens.shape[1]}"
        )
    positions = positions_of(valid)
    embeddings = policy.embed(params, tokens)
    prefix = None
    if start > 0:
        _, prefix = policy.trunk(
            params,
            embeddings[:, :start],
            positions[:, :start],
            valid[:, :start],
            cache=policy.init_cache(tokens.shape[0], start),
        )
    own = slice(start, start + completion_length)
    return Context(embeddings[:, own], positions[:, own], valid[:, own], prefix)


def predicting_states(
    policy: Policy, params: Params, context: Context, embeddings: Float[Array, "BK T D"]
) -> Float[Array, "BK T D"]:
    """Hidden states that predict the completion's tokens, of K variants of each row (row-major: b * K + k)."""
    copies = embeddings.shape[0] // context.valid.shape[0]
    hidden, _ = policy.trunk(
        params,
        embeddings,
        jnp.repeat(context.positions, copies, axis=0),
        jnp.repeat(context.valid, copies, axis=0),
        prefix=context.prefix,
    )
    return hidden


def to_inputs(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
    """Values at completion tokens, moved to the inputs that carry those tokens; 0 at the last prompt token."""
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def from_inputs(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
    """Values at inputs, moved to the completion tokens they carry; 0 at the last one, which is no input."""
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def scored_tokens(span: AnswerSpan) -> Bool[Array, "B T"]:
    """The tokens that get a score: the reasoning of rows with an answer."""
    usable = span.found & span.answer.any(axis=1)
    return span.reasoning & usable[:, None]


def outcome_logits(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    answer: Bool[Array, "B T"],
    *,
    mode: ProbeMode,
    temperature: float,
) -> Float[Array, "B V"]:
    """Logits of the outcome distribution, one vocabulary row per sequence, in float32 (float64 for float64 states).

    ``last``: where the first answer token is predicted (LT-Logits). ``answer_mean``: the mean of the logits over all
    answer tokens, to be followed by one softmax (AS-Mean). The head is linear, so this is the head of the mean hidden
    state: A - 1 rows of the vocabulary saved. The sum is in another order than the published one, and bfloat16 heads
    round one mean state, not A states. A row with no answer gets the head of a zero state.

    Raises:
        ValueError: ``mode`` is not one of these (``answer_joint`` has no distribution: see answer_logp), or
            temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature: expected the sampler's, a positive number, got {temperature}")
    if mode == "last":
        share = answer & (jnp.cumsum(answer, axis=1) == 1)
    elif mode == "answer_mean":
        share = answer
    else:
        raise ValueError(f"outcome_logits: mode must be last or answer_mean, got {mode!r}")
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    share = share.astype(wide) / jnp.maximum(share.sum(axis=1, keepdims=True), 1)
    pooled = jnp.einsum("bt,btd->bd", share, hidden.astype(wide), precision=jax.lax.Precision.HIGHEST)
    return policy.unembed(params, pooled).astype(wide) / temperature


def kl_divergence(p_logits: Float[Array, "*rows V"], q_logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """KL(p || q) = sum p (log p - log q) in nats, >= 0 up to rounding."""
    log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def answer_logp(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    answer: Bool[Array, "B T"],
    completion: Int[Array, "B T"],
    *,
    temperature: float,
) -> Float[Array, "B"]:
    """phi: mean log-probability of the answer's tokens, in nats (AS-Joint); 0 for a row with no answer."""
    return _over_answer(policy, params, hidden, answer, completion, temperature)[0]


def answer_logp_cotangent(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    answer: Bool[Array, "B T"],
    completion: Int[Array, "B T"],
    *,
    temperature: float,
) -> Float[Array, "B T D"]:
    """d phi / d hidden, of every row's own phi; 0 away from the answer."""
    return _over_answer(policy, params, hidden, answer, completion, temperature)[1]


def _over_answer(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    answer: Bool[Array, "B T"],
    completion: Int[Array, "B T"],
    temperature: float,
) -> tuple[Float[Array, "B"], Float[Array, "B T D"]]:
    """phi and d phi / d hidden, one answer token of every row at a time: [B, V] in memory, never [B, T, V].

    The loop runs to the longest answer of the batch. A caller that wants phi alone pays nothing for the other
    under jit.
    """
    if temperature <= 0:
        raise ValueError(f"temperature: expected the sampler's, a positive number, got {temperature}")
    rows = jnp.arange(answer.shape[0])
    count = answer.sum(axis=1)
    order = jnp.argsort(~answer, axis=1, stable=True)  # answer positions first
    wide = jnp.promote_types(hidden.dtype, jnp.float32)

    def add_token(a, so_far):
        phi, gradient = so_far
        at = order[:, a]

        def logp(state):
            return logits_logps(policy.unembed(params, state), completion[rows, at], temperature=temperature)[0]

        value, pull = jax.vjp(logp, hidden[rows, at])
        share = jnp.where(a < count, 1 / jnp.maximum(count, 1), 0).astype(value.dtype)
        return phi + (value * share).astype(wide), gradient.at[rows, at].add(pull(share)[0])

    start = jnp.zeros(answer.shape[0], wide), jnp.zeros_like(hidden)
    return jax.lax.fori_loop(0, count.max(), add_token, start)


def check_mode(mode: str) -> None:
    """Raises ValueError unless ``mode`` is a probe mode."""
    if mode not in get_args(ProbeMode):
        raise ValueError(f"mode: expected one of {', '.join(get_args(ProbeMode))}, got {mode!r}")
