"""EGCA (arXiv 2603.16158): the whole advantage on the tokens at fault, where they are known.

Evidence: a description. A custom function, ``credit.marks``, finds the tokens (by a compiler, a debugger, a
trace against the reference program). A row without a mark (correct, or at fault as a whole) is plain GRPO.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.gate import preserve_mass
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, required


def span_weights(marked: Bool[Array, "B T"], completion: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Give w = (T / |S|) on the marked tokens S of a row and 0 on its others; 1 in rows without a mark and outside."""
    inside = marked & completion
    weights = preserve_mass(inside.astype(float), completion)
    return jnp.where(completion & inside.any(-1, keepdims=True), weights, 1)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Put the advantage of a row on its marked tokens."""
    return span_weights(required(inputs.signals, "marks", context) > 0, inputs.completion)


METHOD = CreditMethod(weigh, name="egca", needs=("marks",))
