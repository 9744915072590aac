"""Which rows are reweighted at all: every row, or those of one sign of the advantage."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Polarity = Literal["both", "correct", "wrong"]


def reweighted_rows(advantages: Float[Array, "B"], *, polarity: Polarity) -> Bool[Array, "B"]:
    """Rows that a polarity lets a method reweight: all, those of A > 0 (correct), or those of A < 0 (wrong).

    Raises:
        ValueError: unknown polarity.
    """
    if polarity == "both":
        return jnp.ones(advantages.shape, bool)
    if polarity == "correct":
        return advantages > 0
    if polarity == "wrong":
        return advantages < 0
    raise ValueError(f"polarity must be both, correct or wrong, got {polarity!r}")


def polarised(
    weights: Float[Array, "B T"], advantages: Float[Array, "B"], *, polarity: Polarity
) -> Float[Array, "B T"]:
    """The weights of the rows that the polarity lets through, 1 in the others.

    The last step of every method, so that an exempt row is plain GRPO throughout. In GRAIL's released code the
    answer of an exempt row still gets the largest weight, because its overrides come after the polarity.
    """
    return jnp.where(reweighted_rows(advantages, polarity=polarity)[:, None], weights, 1)
