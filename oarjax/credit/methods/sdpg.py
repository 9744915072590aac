"""SDPG (arXiv 2606.04036): plain GRPO, and a KL term towards the policy itself under a privileged prompt.

Evidence: released code read. The teacher is ``credit.teacher``. The source's second term, towards a reference, is this
trainer's own: ``loss.kl_beta`` with ``loss.kl_estimator=k2`` is its "urkl". Its schedules of the coefficient are not
here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from oarjax.credit.measures import privileged_rows
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context
from oarjax.models.policy import Policy
from oarjax.rl.masked import widened
from oarjax.rollout.logps import in_chunks, last_states
from oarjax.types import Params, TrainBatch

BOUND = 20.0
"""The KL of a token is clipped to this, as released; beyond it there is no gradient."""


def teacher_kl(
    policy: Policy,
    params: Params,
    hidden: Float[Array, "B T D"],
    teacher: Float[Array, "B T D"],
    *,
    temperature: float,
    head_chunk: int,
) -> Float[Array, "B T"]:
    """Compute min(KL(pi || sg pi_teacher), 20) over the whole vocabulary, from final states of either; nats.

    The gradient is the student's alone.
    """
    params = policy.head(params)
    fixed: Any = jax.lax.stop_gradient(params)

    def read(mine: Float[Array, "b t D"], other: Float[Array, "b t D"]) -> Float[Array, "b t"]:
        def logs(weights: Params, states: Float[Array, "b t D"]) -> Float[Array, "r V"]:
            logits = policy.unembed(weights, states.reshape(-1, states.shape[-1]))
            return jax.nn.log_softmax(widened(logits) / temperature, axis=-1)

        p, q = logs(params, mine), jax.lax.stop_gradient(logs(fixed, other))
        terms = jnp.where(jnp.isneginf(p), 0, jnp.exp(p) * (p - q))
        return jnp.minimum(terms.sum(-1), BOUND).reshape(mine.shape[:2])

    return in_chunks(read, (hidden, jax.lax.stop_gradient(teacher)), head_chunk=head_chunk)


def loss(
    policy: Policy, params: Params, hidden: Float[Array, "B T D"], batch: TrainBatch, context: Context
) -> Float[Array, "B T"]:
    """Return the term of every token, to be added to its loss."""
    cfg = context.credit.sdpg
    if batch.teacher is None:
        raise ValueError("sdpg: needs the teacher's prompts, got None; give TrainBatch(teacher=...)")
    length = {"completion_length": batch.completion.shape[1]}
    rows = privileged_rows(batch.teacher, batch.tokens, batch.valid, **length)
    teacher = last_states(policy, jax.lax.stop_gradient(params), *rows, **length)
    term = teacher_kl(policy, params, hidden, teacher, temperature=context.temperature, head_chunk=context.head_chunk)
    among = batch.completion & ((batch.advantages > 0) | (cfg.rows == "all"))
    return cfg.beta * jnp.where(among, term, 0)


METHOD = CreditMethod(name="sdpg", kind="auxiliary", needs=("teacher_prompt",), loss=loss)
