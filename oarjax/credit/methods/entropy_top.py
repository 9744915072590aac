"""Train on the share of tokens of highest entropy alone (arXiv 2506.01939, "Beyond the 80/20 rule").

Evidence: released code read (its authors' fork of verl). Departures: tokens tied with the last one taken are all taken;
rows of advantage 0 are left out of a batch's share; entropies are those of the policy that generated the batch, over
a minibatch, where the released code takes those of the policy in training, over each device's microbatch.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.gate import preserve_mass, reweighted_rows
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, required
from oarjax.rl.masked import masked_count, widened


def entropy_top_weights(
    entropies: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    share: float = 0.2,
    scope: Literal["sequence", "batch"] = "batch",
    mass: Literal["kept", "free"] = "kept",
) -> Float[Array, "B T"]:
    """Give 1 to the ceil(share n) tokens of largest entropy among n valid ones, 0 to the others; 1 outside the mask.

    n is counted in the row (``sequence``) or in all rows (``batch``, as released); share is rounded to four decimals.
    Tokens tied with the last one are all taken: equal entropies select every token. ``kept`` divides by the selected
    share, so the weights average 1 over the scope and the loss is the paper's mean over selected tokens (weights of 0
    and 5); ``free`` leaves 0 and 1, which also shrinks the loss.

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
    ordered = jnp.sort(jnp.where(among, values, -jnp.inf), axis=-1, descending=True)
    last = jnp.maximum(selected(masked_count(among), share) - 1, 0)
    cut = jnp.take_along_axis(ordered, last[:, None], axis=-1)
    weights = jnp.where(among, (values >= cut).astype(values.dtype), 1)
    if mass == "kept":
        weights = preserve_mass(weights, among)
    return weights.reshape(entropies.shape)


def selected(count: Int[Array, "B"], share: float) -> Int[Array, "B"]:
    """Compute max(1, ceil(share count)) in integers: a float32 product of a long batch would be a token off."""
    parts = round(share * 10_000)
    quotient, remainder = jnp.divmod(count, 10_000)
    return jnp.maximum(quotient * parts + (remainder * parts + 9_999) // 10_000, 1)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Train on the configured share of highest entropy alone; a batch's share is of rows with a nonzero advantage."""
    cfg, among = context.credit, inputs.completion
    if cfg.entropy.scope == "batch":
        taught = reweighted_rows(inputs.advantages, polarity=cfg.polarity) & (inputs.advantages != 0)
        among = inputs.completion & taught[:, None]
    return entropy_top_weights(required(inputs.signals, "entropies", context), among, **vars(cfg.entropy))


METHOD = CreditMethod(weigh, name="entropy_top", coupling="batch", needs=("entropies",))
