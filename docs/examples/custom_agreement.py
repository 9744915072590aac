"""Custom credit that a group agrees on: importance averaged over the rows of a prompt at the same place, then the gate.

oarjax train configs/forks.yaml credit.method=custom credit.function=docs/examples/custom_agreement.py:agreed_g

What a completion's importance owes to what came after the token averages out, and so does OAR-G's noise. It needs
completions whose places mean the same, as on forks, where all have their choices at the same places. Elsewhere it
averages tokens that have nothing in common. Figures: docs/results.md.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import oarjax
from oarjax import Context, CreditInputs, CreditMethod


def group_mean(
    importance: Float[Array, "B T"], reasoning: Bool[Array, "B T"], groups: Int[Array, "B"]
) -> Float[Array, "B T"]:
    """Average log(1 + s), scaled to 1 at each row's largest, over the rows of a group that reason at a position."""
    scores = jnp.where(reasoning, jnp.log1p(jnp.abs(importance)), 0.0)
    scores = scores / jnp.maximum(jnp.max(scores, axis=1, keepdims=True), 1e-12)
    same = (groups[:, None] == groups[None, :]).astype(scores.dtype)
    count = same @ reasoning.astype(scores.dtype)
    return jnp.where(reasoning, same @ scores / jnp.maximum(count, 1), 0.0)


def _weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Send the group's mean through the configured gate."""
    mean = group_mean(jnp.asarray(inputs.signals.importance), inputs.span.reasoning, jnp.asarray(inputs.signals.groups))
    return oarjax.oar_weights(mean, inputs.span.reasoning, **vars(context.credit.gate))


agreed_p = CreditMethod(_weigh, coupling="group", needs=("importance", "groups"), score="oar_p")
agreed_g = CreditMethod(_weigh, coupling="group", needs=("importance", "groups"), score="oar_g")
