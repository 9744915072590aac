"""Credit of turns by what each was worth (ours): an environment's rewards, or the values that ``credit.marks`` gives.

With r_k the reward of turn k, or v_k - v_(k-1) of values v after each turn, and a discount d, its return is

    G_k = sum_(j >= k) d^(j - k) r_j.

With differences that is the generalised advantage estimate over turns (arXiv 1506.02438, eq. 16, its gamma 1 and its
lambda d): for d = 0 the turn's own change of the value, for d = 1 the last value less the one before the turn. A row
keeps the mean advantage of its tokens, so turns are compared within an episode, and episodes by their group.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required
from oarjax.rl.masked import masked_mean


def last_tokens(turns: Int[Array, "B T"], written: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Mark the last token of every turn, among those that the policy wrote; turn 0 is none."""
    number = jnp.where(written, turns, 0)
    return (number > 0) & (number != jnp.pad(number[:, 1:], ((0, 0), (0, 1))))


def turn_returns(
    rewards: Float[Array, "B T"], last: Bool[Array, "B T"], *, discount: float = 1.0
) -> Float[Array, "B T"]:
    """Compute G_k at the tokens of turn k, from its reward at its ``last`` token."""

    def earlier(later: tuple[Array, Array], here: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * here[0], here[1] + here[0] * later[1]

    steps = jnp.where(last, discount, 1.0), jnp.where(last, rewards, 0.0)
    return jax.lax.associative_scan(earlier, steps, reverse=True, axis=1)[1]


def turn_differences(values: Float[Array, "B T"], last: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Compute v_k - v_(k-1) at the ``last`` token of turn k, 0 elsewhere; the value before the first turn is 0."""
    ends = jax.lax.cummax(jnp.where(last, jnp.arange(last.shape[1]), -1), axis=1)
    previous_end = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    earlier = jnp.take_along_axis(values, jnp.maximum(previous_end, 0), axis=1)
    return jnp.where(last, values - jnp.where(previous_end < 0, 0, earlier), 0)


def turn_advantages(
    marks: Float[Array, "B T"],
    turns: Int[Array, "B T"],
    written: Bool[Array, "B T"],
    advantages: Float[Array, "B"],
    *,
    values: Literal["rewards", "differences"] = "rewards",
    discount: float = 1.0,
    weight: float = 1.0,
) -> Float[Array, "B T"]:
    """Compute A_t = A + weight (G_k(t) - mean of G over the row's tokens of turns), whose mean over these is A.

    Tokens of no turn (turn 0) keep A.
    """
    last, inside = last_tokens(turns, written), written & (turns > 0)
    rewards = turn_differences(marks, last) if values == "differences" else marks
    returns = turn_returns(rewards, last, discount=discount)
    bonus = weight * (returns - masked_mean(returns, inside)[:, None])
    return advantages[:, None] + jnp.where(inside, bonus, 0)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Give every turn the advantage of its return."""
    marks, turns = all_required(inputs.signals, ("marks", "turns"), context)
    return turn_advantages(marks, turns, inputs.completion, inputs.advantages, **vars(context.credit.turn_rewards))


METHOD = CreditMethod(weigh, name="turn_rewards", kind="advantages", needs=("marks", "turns"))
