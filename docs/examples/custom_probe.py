"""Define a custom outcome probe: what importance is measured by, for any oar_ method but oar_l.

oarjax train configs/demo.yaml credit.method=oar_g credit.probe.function=docs/examples/custom_probe.py:first_and_last
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from oarjax import Params, Policy, Probe, Reading


def _read(policy: Policy, params: Params, hidden: Float[Array, "B T D"], at: Reading) -> Float[Array, "B V"]:
    """Mean logits of the states that predict the answer's first and last token."""
    place = jnp.arange(hidden.shape[1])
    first = jnp.argmax(at.answer, axis=1)
    last = jnp.max(jnp.where(at.answer, place, 0), axis=1)
    states = jnp.take_along_axis(hidden, jnp.stack([first, last], axis=1)[..., None], axis=1)  # [B, 2, D]
    return policy.unembed(params, states).mean(1)


first_and_last = Probe(read=_read, kind="distribution", reads="answer")
