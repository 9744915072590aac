"""Custom token credit: weights from places, from signals, from another attribution, or from the policy itself.

oarjax train configs/demo.yaml credit.method=custom credit.function=docs/examples/custom_credit.py:surprising
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

import oarjax
from oarjax import AnswerSpan, Context, CreditInputs, CreditMethod, Params, Policy, Rollout


def _later(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """From 0.5 at the first reasoning token to 1.5 at the last."""
    place = jnp.cumsum(inputs.span.reasoning, axis=1) / jnp.maximum(inputs.span.reasoning.sum(1, keepdims=True), 1)
    return oarjax.preserve_mass(jnp.where(inputs.span.reasoning, 0.5 + place, 1.0), inputs.span.reasoning)


def _proportional(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """In proportion to the importance, instead of through OAR's gate; a tenth is shared evenly."""
    h = oarjax.normalise(inputs.signals.importance, inputs.span.reasoning)
    return oarjax.preserve_mass(jnp.where(inputs.span.reasoning, 0.1 + 0.9 * h, 1.0), inputs.span.reasoning)


def _surprisal(
    policy: Policy, params: Params, rollout: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Float[Array, "B T"]:
    """-log p of every token, by one forward pass."""
    logps, _ = oarjax.token_logps(
        policy,
        params,
        rollout.tokens,
        rollout.valid,
        completion_length=rollout.completion.shape[1],
        temperature=context.temperature,
        head_chunk=2048,
    )
    return -logps


later = CreditMethod(_later)
proportional = CreditMethod(_proportional, needs=("importance",), score="oar_p")
surprising = CreditMethod(_proportional, needs=("importance",), score=_surprisal, forwards=1.0)
