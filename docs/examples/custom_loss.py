"""Define a custom loss: log-probabilities in, a sum and a count out.

oarjax train configs/demo.yaml loss.function=docs/examples/custom_loss.py:half_as_hard_on_failures

``loss.settings.share=.3`` sets its keyword argument.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import oarjax
from oarjax import Mean, TrainBatch


def half_as_hard_on_failures(
    logps: Float[Array, "B T"], entropies: Float[Array, "B T"], batch: TrainBatch, *, share: float = 0.5
) -> tuple[Mean, dict[str, Mean]]:
    """REINFORCE, -A log p of every token, with negative advantages at a share of their size; metrics beside it."""
    advantages = jnp.where(batch.advantages < 0, share, 1.0) * batch.advantages
    loss = oarjax.aggregate(-advantages * logps, batch.completion, mode="dapo", max_length=1)
    entropy = oarjax.aggregate(jax.lax.stop_gradient(entropies), batch.completion, mode="dapo", max_length=1)
    return loss, {"entropy": entropy}
