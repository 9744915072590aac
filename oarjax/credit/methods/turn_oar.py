"""First a turn's share of the advantage, then OAR inside the turn (ours).

The share is a weight by the gate over turns, each of which counts with the sum of its tokens' importance, or the
turn's own advantage by its rewards, see ``turn_rewards``. Inside a turn its reasoning tokens go through the same gate
among themselves, with mean 1. So a turn keeps what its share gives it, and an episode its group's advantage.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.gate import oar_weights, preserve_mass
from oarjax.credit.method import CreditMethod
from oarjax.credit.methods.turn_rewards import turn_advantages
from oarjax.credit.signals import Context, CreditInputs, all_required
from oarjax.rl.masked import masked_sum, widened


def weights_inside(
    importance: Float[Array, "B T"], turns: Int[Array, "B T"], reasoning: Bool[Array, "B T"], **gate: Any
) -> Float[Array, "B T"]:
    """Compute OAR's weights of every turn's reasoning tokens among themselves; their mean is 1, and 1 elsewhere.

    Args:
        gate: settings of ``oar_weights``; the mass is kept, whatever they say.
    """

    settings: dict[str, Any] = {**gate, "mass": "kept"}

    def turn(number: Int[Array, ""], weights: Float[Array, "B T"]) -> Float[Array, "B T"]:
        inside = reasoning & (turns == number)
        return jnp.where(inside, oar_weights(importance, inside, **settings), weights)

    return _over_turns(turn, jnp.ones_like(widened(importance)), turns, reasoning)


def turn_shares(
    importance: Float[Array, "B T"], turns: Int[Array, "B T"], reasoning: Bool[Array, "B T"], **gate: Any
) -> Float[Array, "B T"]:
    """Compute OAR's weights of turns by the sums of their importance, at all their reasoning tokens; 1 elsewhere.

    The gate sees a turn once, however long it is. The mean over a row's reasoning tokens is 1.
    """
    importance, free = jnp.where(reasoning, widened(importance), 0), cast(dict[str, Any], {**gate, "mass": "free"})

    def total(number: Int[Array, ""], totals: Float[Array, "B T"]) -> Float[Array, "B T"]:
        inside = reasoning & (turns == number)
        first = inside & (jnp.cumsum(inside, axis=1) == 1)
        return jnp.where(first, masked_sum(importance, inside)[:, None], totals)

    totals = _over_turns(total, jnp.full_like(importance, -1), turns, reasoning)
    by_turn = oar_weights(totals, totals >= 0, **free)

    def spread(number: Int[Array, ""], weights: Float[Array, "B T"]) -> Float[Array, "B T"]:
        inside = reasoning & (turns == number)
        return jnp.where(inside, masked_sum(by_turn, inside & (totals >= 0))[:, None], weights)

    weights = _over_turns(spread, jnp.ones_like(importance), turns, reasoning)
    return preserve_mass(weights, reasoning)


def _over_turns(body: Any, start: Float[Array, "B T"], turns: Int[Array, "B T"], reasoning: Bool[Array, "B T"]) -> Any:
    count = jnp.max(jnp.where(reasoning, turns, 0)) + 1
    return jax.lax.fori_loop(0, count, body, start)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Give every turn its share, and its tokens theirs."""
    importance, marks, turns = all_required(inputs.signals, ("importance", "marks", "turns"), context)
    importance, reasoning, credit = jax.lax.stop_gradient(importance), inputs.span.reasoning, context.credit
    gate, rows = vars(credit.gate), jnp.broadcast_to(inputs.advantages[:, None], importance.shape)
    if credit.turn_oar.share == "rewards":
        rows = turn_advantages(marks, turns, inputs.completion, inputs.advantages, **vars(credit.turn_rewards))
    elif credit.turn_oar.share == "importance":
        rows = rows * turn_shares(importance, turns, reasoning, **gate)
    return rows * weights_inside(importance, turns, reasoning, **gate)


METHOD = CreditMethod(
    weigh, name="turn_oar", kind="advantages", needs=("importance", "marks", "turns"), score="turn_oar.by"
)
