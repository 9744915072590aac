"""The outcome probe: what is read of a completion's hidden states, and how far a perturbation moves it.

Rows enter a forward shifted by one: input t is the token before completion token t (input 0 is the last prompt
token), so that hidden state t predicts completion token t, and the answer mask of the completion is also the mask of
the hidden states that predict the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from oarjax.models.policy import Policy
from oarjax.rl.checked import Scalar, ScalarPositive, checked
from oarjax.rollout.logps import logits_logps
from oarjax.types import AnswerSpan, Params

ProbeMode = Literal["last", "answer_mean", "answer_joint"]


class Reading(NamedTuple):
    """Inputs of a probe beside the hidden states, all at the same positions."""

    tokens: Int[Array, "B T"]  # completion tokens that the states predict
    valid: Bool[Array, "B T"]  # positions that hold a token
    answer: Bool[Array, "B T"]


Read = Callable[[Policy, Params, Float[Array, "B T D"], Reading], Array]


def reading_of(tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], span: AnswerSpan) -> Reading:
    """Take the completion's part of a rollout."""
    length = span.answer.shape[1]
    return Reading(tokens[:, -length:], valid[:, -length:], span.answer)


class Probe(NamedTuple):
    """The outcome that importance is measured by. Any pure function of the hidden states will do.

    Built in are ``outcome_probe``'s three. One of your own for tasks without an answer span, e.g. a reward model's
    score of the last state: ``Probe(read=score, kind="scalar", reads="completion")``.
    """

    read: Read  # (policy, params, hidden, reading) -> logits [B, V] or scores [B]
    kind: Literal["distribution", "scalar"]  # compared by KL(clean || moved), or by clean - moved
    reads: Literal["answer", "completion"]  # answer: nothing before the first answer token, and rows need an answer


@checked
def outcome_probe(mode: ProbeMode, *, temperature: ScalarPositive) -> Probe:
    """Return one of the paper's probes: ``last`` (LT-Logits), ``answer_mean`` (AS-Mean), ``answer_joint`` (AS-Joint).

    Args:
        mode: what is read of the answer (arXiv 2601.07408, as released): the distribution of its first token
            (``last``), that of its mean logits (``answer_mean``), or its mean log-probability (``answer_joint``).
        temperature: divides the logits, > 0; the sampler's own. May be traced.

    Raises:
        ArgumentError: an argument does not fit the signature.
    """
    if mode == "answer_joint":

        def joint(policy: Policy, params: Params, hidden: Float[Array, "B T D"], at: Reading) -> Float[Array, "B"]:
            return answer_logp(policy, params, hidden, at.answer, at.tokens, temperature=temperature)

        return Probe(joint, "scalar", "answer")

    def logits(policy: Policy, params: Params, hidden: Float[Array, "B T D"], at: Reading) -> Float[Array, "B V"]:
        return outcome_logits(policy, params, hidden, at.answer, mode=mode, temperature=temperature)

    return Probe(logits, "distribution", "answer")


def probe_mode(iteration: int, *, mode: ProbeMode, warmup_mode: ProbeMode, warmup_iterations: int) -> ProbeMode:
    """Return ``warmup_mode`` for the first ``warmup_iterations`` iterations (counted from 0), then ``mode``."""
    return warmup_mode if iteration < warmup_iterations else mode


def to_inputs(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
    """Move values at completion tokens to the inputs that carry those tokens; 0 at the last prompt token."""
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def from_inputs(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
    """Move values at inputs to the completion tokens they carry; 0 at the last one, which is no input."""
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def scored_tokens(span: AnswerSpan, probe: Probe) -> Bool[Array, "B T"]:
    """Mark the tokens that get a score: the reasoning, of rows with an answer where the probe reads one."""
    usable = span.has_answer
    if probe.reads == "answer":
        usable = usable & span.answer.any(axis=1)
    return span.reasoning & usable[:, None]


def divergence(probe: Probe, clean: Float[Array, "B ..."], moved: Float[Array, "B ..."]) -> Float[Array, "B"]:
    """Measure how far the outcome moved: KL(clean || moved) in nats; clean - moved, of any sign, for a scalar."""
    return kl_divergence(clean, moved) if probe.kind == "distribution" else clean - moved


def outcome_logits(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    answer: Bool[Array, "B T"],
    *,
    mode: ProbeMode,
    temperature: Scalar,
) -> Float[Array, "B V"]:
    """Compute logits of the outcome distribution, one row per sequence, in float32 (float64 for float64 states).

    ``last``: where the first answer token is predicted (LT-Logits). ``answer_mean``: the mean of the logits over all
    answer tokens, to be followed by one softmax (AS-Mean). The head is linear, so this is the head of the mean hidden
    state: A - 1 rows of the vocabulary saved. The sum is in another order than the published one, and bfloat16 heads
    round one mean state, not A states. A row with no answer gets the head of a zero state.

    Raises:
        ValueError: ``mode`` is not one of these (``answer_joint`` has no distribution: see answer_logp).
    """
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
    """Compute KL(p || q) = sum p (log p - log q) in nats, >= 0 up to rounding."""
    log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def answer_logp(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    answer: Bool[Array, "B T"],
    completion: Int[Array, "B T"],
    *,
    temperature: Scalar,
) -> Float[Array, "B"]:
    """Compute phi, the mean log-probability of the answer's tokens, in nats (AS-Joint); 0 for a row with no answer.

    One answer token of every row at a time: [B, V] in memory, never [B, T, V]. The loop runs to the longest answer
    of the batch. Differentiable in ``hidden`` alone, by reverse mode: the same loop makes the gradient.
    """

    params = policy.head(params)

    def over_answer(states: Float[Array, "B T D"]) -> tuple[Float[Array, "B"], Float[Array, "B T D"]]:
        return _over_answer(policy, params, states, answer, completion, temperature)

    @jax.custom_vjp
    def phi(states: Float[Array, "B T D"]) -> Float[Array, "B"]:
        return over_answer(states)[0]  # under jit the unused gradient is not computed

    phi.defvjp(over_answer, lambda gradient, ct: ((ct[:, None, None] * gradient).astype(gradient.dtype),))
    return phi(hidden)


def outcome_probability(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    outcome: Bool[Array, "B T"],
    tokens: Int[Array, "B T"],
    *,
    temperature: float,
) -> Float[Array, "B"]:
    """Compute the joint probability of the outcome's tokens; 0 in rows without any."""
    mean = answer_logp(policy, params, hidden, outcome, tokens, temperature=temperature)
    count = jnp.sum(outcome, axis=1)
    return jnp.where(count > 0, jnp.exp(mean * count), 0)


def _over_answer(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    answer: Bool[Array, "B T"],
    completion: Int[Array, "B T"],
    temperature: Scalar,
) -> tuple[Float[Array, "B"], Float[Array, "B T D"]]:
    """Compute phi and d phi / d hidden, of every row's own phi; the gradient is 0 away from the answer."""
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
