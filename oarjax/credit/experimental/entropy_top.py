"""Train on the share of tokens of highest entropy alone (arXiv 2506.01939, "Beyond the 80/20 rule").

Evidence: a description. Departures: rows of advantage 0 are left out of a batch's share, and tokens tied with the
threshold are all taken.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.gate import preserve_mass, reweighted_rows
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, required
from oarjax.rl.masked import masked_quantile, widened


def entropy_top_weights(
    entropies: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    share: float = 0.2,
    scope: Literal["sequence", "batch"] = "batch",
    mass: Literal["kept", "free"] = "kept",
) -> Float[Array, "B T"]:
    """Give 1 to tokens whose entropy is at least the (1 - share)-quantile, 0 below it; 1 outside the mask.

    The quantile is over the valid tokens of the row (``sequence``) or of all rows (``batch``, as in the paper). Tokens
    tied with it are all taken: equal entropies select every token. ``kept`` divides by the selected share, so the
    weights average 1 over the scope and the loss is the paper's mean over selected tokens (weights of 0 and 5);
    ``free`` leaves 0 and 1, which also shrinks the loss.

    Rows with an entropy that is NaN or infinite get ones and count for nothing.

    Raises:
        ValueError: share outside (0, 1], unknown scope or mass.
    """
    if not 0 < share <= 1:
        raise ValueError(f"entropy_top_weights: share must be in (0, 1], got {share}")
    if scope not in ("sequence", "batch"):
        raise ValueError(f"entropy_top_weights: scope must be sequence or batch, got {scope!r}")
    if mass not in ("kept", "free"):
        raise ValueError(f"entropy_top_weights: mass must be kept or free, got {mass!r}")
    finite = jnp.all(jnp.where(mask, jnp.isfinite(entropies), True), axis=-1, keepdims=True)
    among, values = mask & finite, widened(entropies)
    if scope == "batch":
        among, values = among.reshape(1, -1), values.reshape(1, -1)
    cut = masked_quantile(values, among, level=1 - share)[:, None]
    weights = jnp.where(among, (values >= cut).astype(values.dtype), 1)
    if mass == "kept":
        weights = preserve_mass(weights, among)
    return weights.reshape(entropies.shape)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Train on the configured share of highest entropy alone; a batch's share is among the rows that teach."""
    cfg, among = context.credit, inputs.completion
    if cfg.entropy.scope == "batch":
        taught = reweighted_rows(inputs.advantages, polarity=cfg.polarity) & (inputs.advantages != 0)
        among = inputs.completion & taught[:, None]
    return entropy_top_weights(required(inputs.signals, "entropies", context), among, **vars(cfg.entropy))


METHOD = CreditMethod(weigh, name="entropy_top", coupling="batch", needs=("entropies",))
