"""Measure signals at every token from the policy's states: log-probs, entropies and others that methods need.

The head runs in chunks, forward only, and each chunk computes all the signals.
"""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.models.policy import Policy, grouped
from oarjax.rl.masked import widened
from oarjax.rollout.filters import Filters
from oarjax.rollout.logps import in_chunks, last_states, logits_logps, scaled_logits, token_logps
from oarjax.types import Params, Privileged


def measure(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    *,
    signals: Collection[str],
    completion_length: int,
    temperature: float,
    head_chunk: int,
    hidden: Float[Array, "B T D"] | None = None,
    reference: Params | None = None,
    teacher: Privileged | None = None,
    filters: Filters | None = None,
) -> dict[str, Float[Array, "B T ..."]]:
    """Compute ``signals`` of the last T tokens; with ``hidden``, their states, without a pass for them.

    logps          log pi(y) in nats, of the distribution at ``temperature``, as all others
    entropies      of that distribution, nats
    spread         its entropy over log V, in [0, 1]
    score_norms    |d log pi(y) / d logits|^2 = 1 - 2 pi(y) + sum_v pi(v)^2, in [0, 2]
    hellinger      1 - sum_v sqrt(pi(v) pi_ref(v)), in [0, 1]; a pass with the ``reference``
    teacher_logps  log pi(y) under the ``teacher``'s prompts; a pass over them
    hidden         the final states themselves, float32

    ``filters`` renormalise all but hellinger over what they keep; see ``token_logps``.

    Raises:
        ValueError: a signal without the reference or the teacher that it needs.
    """
    if not signals:
        return {}
    places = {"completion_length": completion_length}
    head = {"temperature": temperature, "head_chunk": head_chunk, "filters": filters}
    if hidden is None:
        hidden = last_states(policy, params, tokens, valid, **places)
    arrays, fixed = (hidden, tokens[:, -completion_length:]), None
    if "hellinger" in signals:
        if reference is None:
            raise ValueError("measure: hellinger needs the reference policy, got None; give reference=...")
        arrays += (last_states(policy, reference, tokens, valid, **places),)
        fixed = policy.head(reference)
    weights = policy.head(params)

    def read(
        states: Float[Array, "b t D"], ids: Int[Array, "b t"], others: Float[Array, "b t D"] | None = None
    ) -> dict[str, Float[Array, "b t"]]:
        def logits(head: Params, states: Float[Array, "b t D"]) -> Float[Array, "r V"]:
            return widened(policy.unembed(head, states.reshape(-1, states.shape[-1])))

        own_logits = logits(weights, states)
        logps, entropies = logits_logps(own_logits, ids.reshape(-1), temperature=temperature, filters=filters)
        out = {"logps": logps, "entropies": entropies, "spread": entropies / jnp.log(own_logits.shape[-1])}
        if "score_norms" in signals:
            filtered = scaled_logits(own_logits, ids.reshape(-1), temperature=temperature, filters=filters)
            square = jnp.sum(jax.nn.softmax(filtered, axis=-1) ** 2, axis=-1)
            out["score_norms"] = 1 - 2 * jnp.exp(logps) + square
        if others is not None:
            log_probs = (jax.nn.log_softmax(x / temperature, axis=-1) for x in (own_logits, logits(fixed, others)))
            out["hellinger"] = 1 - jnp.sum(jnp.exp(sum(log_probs) / 2), axis=-1)
        return {name: x.reshape(ids.shape) for name, x in out.items() if name in signals}

    out = in_chunks(read, arrays, head_chunk=head_chunk) if set(signals) - {"hidden", "teacher_logps"} else {}
    if "hidden" in signals:
        out["hidden"] = widened(hidden)
    if "teacher_logps" in signals:
        if teacher is None:
            raise ValueError("measure: teacher_logps needs the teacher's prompts, got None; give teacher=...")
        rows = privileged_rows(teacher, tokens, valid, completion_length=completion_length)
        out["teacher_logps"] = token_logps(grouped(policy, 1), params, *rows, **places, **head)[0]
    return out


def privileged_rows(
    teacher: Privileged, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], *, completion_length: int
) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
    """Put the completions behind the teacher's prompts; return tokens and the mask of real ones."""
    parts = ((teacher.tokens, tokens), (teacher.valid, valid))
    return tuple(jnp.concatenate([a, b[:, -completion_length:]], axis=1) for a, b in parts)  # type: ignore[return-value]
