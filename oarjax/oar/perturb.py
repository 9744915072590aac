"""OAR-P: a token matters as much as the outcome distribution moves when that token is masked.

arXiv 2601.07408: s_t = KL(P_clean || P_masked(t)), or for ``answer_joint`` the drop in the answer's mean
log-probability. The released code never appends the answer to the masked sequence although its answer modes read
there; here a rollout is scored as it stands, the answer in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.oar.probe import (
    ProbeMode,
    answer_logp,
    check_mode,
    completion_context,
    kl_divergence,
    outcome_logits,
    predicting_states,
    scored_tokens,
    to_inputs,
)
from oarjax.policy import Policy
from oarjax.types import AnswerSpan, Params


def masked_token_importance(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    mode: ProbeMode,
    mask_id: int,
    chunk: int,
    temperature: float,
) -> Float[Array, "B T"]:
    """Raw OAR-P scores in nats of the reasoning tokens; 0 elsewhere and in rows with no answer.

    Each reasoning token in turn is replaced by ``mask_id``, still attended to, positions unchanged. ``last`` and
    ``answer_mean`` give a KL, >= 0 up to rounding; ``answer_joint`` gives clean minus masked, which may be negative.
    No gradient flows to ``params``.

    The prompt is computed once, and then ``chunk`` = K counterfactuals of every row at a time, ceil(R / K) times,
    where R is the longest reasoning of the batch: B * K sequences of T tokens in memory. Rows wait for the one with
    the longest reasoning, so a call with few rows wastes the least.

    Args:
        temperature: divides the logits; the sampler's own, so that the outcome is the policy's.

    Raises:
        ValueError: unknown mode, chunk below 1, temperature not positive, or no prompt position.
    """
    check_mode(mode)
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1 counterfactual per forward, got {chunk}")
    params = jax.lax.stop_gradient(params)
    scored = scored_tokens(span)
    rows, length = scored.shape
    size = min(chunk, length)
    completion = tokens[:, -length:]
    context = completion_context(policy, params, tokens, valid, completion_length=length)
    mask = policy.embed(params, jnp.full((1, 1), mask_id, tokens.dtype))

    def outcome(hidden: Float[Array, "BK T D"]) -> Float[Array, "BK ..."]:
        copies = hidden.shape[0] // rows
        answer = jnp.repeat(span.answer, copies, axis=0)
        if mode == "answer_joint":
            targets = jnp.repeat(completion, copies, axis=0)
            return answer_logp(policy, params, hidden, answer, targets, temperature=temperature)
        return outcome_logits(policy, params, hidden, answer, mode=mode, temperature=temperature)

    clean = outcome(predicting_states(policy, params, context, context.embeddings))
    reference = jnp.repeat(clean, size, axis=0)

    def score_chunk(i: Int[Array, ""], scores: Float[Array, "B T"]) -> Float[Array, "B T"]:
        at = jax.lax.dynamic_slice_in_dim(order, i * size, size, axis=1)  # [B, K], T = nothing left
        hit = to_inputs(at[:, None, :] == jnp.arange(length)[None, :, None])  # [B, T, K]
        hit = jnp.moveaxis(hit, 2, 1)[..., None]
        masked = jnp.where(hit, mask[:, None], context.embeddings[:, None])
        masked = masked.reshape(-1, *masked.shape[2:])
        moved = outcome(predicting_states(policy, params, context, masked))
        found = reference - moved if mode == "answer_joint" else kl_divergence(reference, moved)
        return scores.at[jnp.arange(rows)[:, None], at].set(found.reshape(rows, size), mode="drop")

    order = _positions(scored, slots=-(-length // size) * size)
    chunks = -(-jnp.max(jnp.sum(scored, axis=1)) // size)
    return jax.lax.fori_loop(0, chunks, score_chunk, jnp.zeros(scored.shape, clean.dtype))


def _positions(mask: Bool[Array, "B T"], *, slots: int) -> Int[Array, "B slots"]:
    """Positions of the True entries of each row in order, then T."""
    length = mask.shape[1]
    first = jnp.sort(jnp.where(mask, jnp.arange(length), length), axis=1)
    return jnp.pad(first, ((0, 0), (0, slots - length)), constant_values=length)
