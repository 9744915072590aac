"""RLSD (arXiv 2604.03128): a teacher who knows the answer sets the size of a token's credit.

Evidence: released code read (RLSD as reimplemented in the code of SDPG). The teacher is the policy itself under a
privileged prompt, ``credit.teacher``. Departures: the teacher has the weights that generated the rollout, where the
sources synchronise a copy every ten steps; SERL's difference is taken from the log-probs of the rollout, where its
code takes the current ones: the two agree at the first update of a rollout.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, Signals, all_required
from oarjax.rl.masked import widened

BOUND = 20.0
"""Differences of log-probs are clipped to this, as released."""


def teacher_weights(
    teacher_logps: Float[Array, "B T"],
    logps: Float[Array, "B T"],
    taught: Bool[Array, "B T"],
    advantages: Float[Array, "B"],
    strength: float | Float[Array, ""],
    *,
    clip: float = 0.2,
) -> Float[Array, "B T"]:
    """Compute w = 1 - strength + strength clip(exp(sign(A) D), 1 - clip, 1 + clip) on ``taught`` tokens, 1 elsewhere.

    D = clip(teacher_logp - logp, -20, 20). So the verifier keeps the sign and the teacher sets the size. A row with a
    log-prob that is not finite gets ones.

    Raises:
        ValueError: clip outside [0, 1].
    """
    if not 0 <= clip <= 1:
        raise ValueError(f"teacher_weights: clip must be in [0, 1], got {clip}")
    change = widened(teacher_logps) - widened(logps)
    usable = jnp.all(jnp.isfinite(change) | ~taught, axis=-1)[:, None]
    signed = jnp.sign(advantages)[:, None] * jnp.clip(jnp.where(taught & usable, change, 0), -BOUND, BOUND)
    weights = 1 - strength + strength * jnp.clip(jnp.exp(signed), 1 - clip, 1 + clip)
    return jnp.where(taught & usable, weights, 1)


def taught_weights(
    signals: Signals, taught: Bool[Array, "B T"], advantages: Float[Array, "B"], context: Context
) -> Float[Array, "B T"]:
    """Weigh by the teacher, whose strength falls to 0 over ``iterations``: then the method is GRPO."""
    cfg, names = context.credit.rlsd, ("teacher_logps", "logps", "iteration")
    teacher, logps, iteration = all_required(signals, names, context)
    strength = cfg.strength * jnp.maximum(0.0, 1 - (jnp.asarray(iteration, jnp.float32) - 1) / cfg.iterations)
    return teacher_weights(teacher, logps, taught, advantages, strength, clip=cfg.clip)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh all tokens by the teacher's log-probs (RLSD)."""
    return taught_weights(inputs.signals, inputs.completion, inputs.advantages, context)


METHOD = CreditMethod(weigh, name="rlsd", needs=("teacher_logps", "logps", "iteration"))
