"""SERL (arXiv 2605.19447): RLSD on marked tokens alone, the actions of a trajectory (``credit.marks``).

Evidence: released code read. Departure: the difference is taken from the log-probs of the rollout, where the released
code takes the current ones: the two agree at the first update of a rollout. See ``rlsd`` for the teacher.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from oarjax.credit.method import CreditMethod
from oarjax.credit.methods.rlsd import taught_weights
from oarjax.credit.signals import Context, CreditInputs, required


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the marked tokens, the actions, by the teacher's log-probs (SERL)."""
    actions = required(inputs.signals, "marks", context) != 0
    return taught_weights(inputs.signals, inputs.completion & actions, inputs.advantages, context)


METHOD = CreditMethod(weigh, name="serl", needs=("teacher_logps", "logps", "iteration", "marks"))
