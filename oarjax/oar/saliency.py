"""GRAIL's saliency: gradient times activation of the answer's likelihood (arXiv 2606.04889)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.oar.clean import LinearPass, linear_pass
from oarjax.oar.probe import answer_logp, from_inputs, reading_of
from oarjax.policy import Policy
from oarjax.types import AnswerSpan, Params


def answer_saliency(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    temperature: float,
) -> Float[Array, "B T"]:
    """s_t = || (dL/de_t) * e_t ||_2 with L = -sum_k log pi(answer token k), of the reasoning of rows with an answer.

    The product is elementwise, over the D entries of the token's own embedding. 0 elsewhere. One backward pass; no
    gradient flows to ``params``.

    Raises:
        ValueError: no prompt position before the completion.
    """
    params = policy.head(jax.lax.stop_gradient(params))
    clean = linear_pass(policy, params, tokens, valid, completion_length=span.answer.shape[1])
    return saliency_scores(policy, params, clean, tokens, valid, span, temperature=temperature)


def saliency_scores(
    policy: Policy,
    params: Params,
    clean: LinearPass,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    temperature: float,
) -> Float[Array, "B T"]:
    """``answer_saliency`` after a clean pass."""
    at, count = reading_of(tokens, valid, span), span.answer.sum(axis=1)

    def loss(hidden: Float[Array, "B T D"]) -> Float[Array, ""]:
        return -jnp.sum(count * answer_logp(policy, params, hidden, at.answer, at.tokens, temperature=temperature))

    product = clean.pull(jax.grad(loss)(clean.hidden)) * clean.embeddings
    wide = product.astype(jnp.promote_types(product.dtype, jnp.float32))
    scored = span.reasoning & (count > 0)[:, None]
    return jnp.where(scored, from_inputs(jnp.linalg.norm(wide, axis=-1)), 0)
