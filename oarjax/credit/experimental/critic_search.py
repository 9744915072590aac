"""CriticSearch (arXiv 2511.12159): a share of the advantage comes from labels of the turns, good or bad.

Evidence: a description. The labels come from a critic that sees the trajectory and the reference answer: a
custom function, ``credit.marks``, which marks every turn with a value above 0 (good) or below it (bad).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required

EPS = 1e-8
"""Added to the number of good turns."""


def turn_advantages(
    labels: Float[Array, "B T"],
    turns: Int[Array, "B T"],
    completion: Bool[Array, "B T"],
    advantages: Float[Array, "B"],
    *,
    share: float = 0.25,
) -> Float[Array, "B T"]:
    """Compute A_t = share a_turn(t) + (1 - share) A, where a good turn has a = 1 / (number of good turns), a bad one 0.

    A good turn of a failed row may get a positive advantage. Tokens of no turn (turn 0) have a = 0; rows without any
    turn keep A.

    Raises:
        ValueError: share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"turn_advantages: share must be in [0, 1], got {share}")
    inside = completion & (turns > 0)
    good = inside & (labels > 0)
    previous_turns = jnp.pad(turns[:, :-1], ((0, 0), (1, 0)))
    count = jnp.sum(good & (turns != previous_turns), axis=-1, keepdims=True)
    mixed = share * good / (count + EPS) + (1 - share) * advantages[:, None]
    return jnp.where(inside.any(-1, keepdims=True), mixed, advantages[:, None])


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Mix the labels of turns into the advantage."""
    labels, turns = all_required(inputs.signals, ("marks", "turns"), context)
    return turn_advantages(
        labels, turns, inputs.completion, inputs.advantages, share=context.credit.critic_search.share
    )


METHOD = CreditMethod(weigh, name="critic_search", kind="advantages", needs=("marks", "turns"))
