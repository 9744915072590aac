"""From what a credit method returns to the advantages of the tokens, by the method's kind. All of it is detached."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.record import Kind


def token_advantages(
    kind: Kind, credit: Float[Array, "B T"], advantages: Float[Array, "B"], completion: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Compute the tokens' advantages: A + b of a bonus, the credit itself of advantages, else A w; 0 outside.

    Weights leave a row with A = 0 at 0; a bonus and advantages need not.
    """
    credit, rows = jax.lax.stop_gradient(credit), advantages[:, None]
    values = {"bonus": rows + credit, "advantages": credit}.get(kind, credit * rows)
    return jnp.where(completion, values, 0)


def neutral(kind: Kind, advantages: Float[Array, "B"]) -> Float[Array, "B 1"]:
    """Return the credit that leaves a row at its group advantage: a bonus of 0, A itself, or weights of 1."""
    rows = advantages[:, None]
    return {"bonus": jnp.zeros_like(rows), "advantages": rows}.get(kind, jnp.ones_like(rows))


def relative(
    kind: Kind,
    credit: Float[Array, "B T"],
    token_advantages: Float[Array, "B T"],
    advantages: Float[Array, "B"],
    completion: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Return the tokens' advantages over their row's, for reports; of weights the credit, else 1 where A = 0."""
    if kind not in ("bonus", "advantages"):
        return credit
    rows = advantages[:, None]
    return jnp.where(completion & (rows != 0), token_advantages / jnp.where(rows == 0, 1, rows), 1)
