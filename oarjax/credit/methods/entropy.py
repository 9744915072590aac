"""Entropies through OAR's gate: its signal changed, all else kept."""

from __future__ import annotations

from jaxtyping import Array, Float

from oarjax.credit.gate import gated
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, required


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by their entropies through the configured gate."""
    return gated(required(inputs.signals, "entropies", context), inputs.span, context)


METHOD = CreditMethod(weigh, name="entropy", needs=("entropies",))
