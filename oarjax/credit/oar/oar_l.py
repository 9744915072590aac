"""OAR-L: OAR-P that recomputes only the positions that a change affects most (ours, not in the paper).

A changed token acts on the answer directly, through its own keys and values, and through the tokens after it. Here
the changed token, the ``window`` tokens after it and the positions that predict the answer are recomputed; every
other token keeps its clean keys and values. That is 1 + window + answers positions for each token, however long the
completion is, where exact OAR-P takes all that follow: for R reasoning tokens about as much as 1 + window + answers
clean forwards in all, against R / 2.

With a window over everything after the token it is OAR-P itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.costs import RowTokens, clean_flops, local_flops
from oarjax.credit.clean_pass import StoredPass, stored_pass
from oarjax.credit.counterfactual import Counterfactual, replacement_embeddings
from oarjax.credit.gate import weigh
from oarjax.credit.method import CreditMethod
from oarjax.credit.oar.oar_p import check_units, masked_positions
from oarjax.credit.probe import Probe, Reading, divergence, reading_of, scored_tokens
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, Scored, probe_of
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.checked import checked
from oarjax.rl.ranges import Count, Positive
from oarjax.types import AnswerSpan, Params, Rollout

SCOPE = "oar_l"
"""The name of its loop in compiled programs."""


@checked
def local_importance(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    probe: Probe,
    mask_id: Count,
    window: Count,
    answers: Positive,
    chunk: Positive,
    counterfactual: Counterfactual = "mask",
) -> Float[Array, "B T"]:
    """Compute OAR-L scores of the reasoning tokens, as those of ``masked_token_importance``; 0 elsewhere.

    Args:
        policy: the model's functions, such as ``make_policy`` gives.
        params: its parameters; no gradient flows to them.
        tokens: prompt and completion, N = S + T.
        valid: positions that hold a token.
        span: reasoning and answer of the completions, [B, T], as ``find_answers`` gives them.
        probe: the outcome, one that reads the answer alone, see ``outcome_probe``.
        mask_id: id that replaces a token, for counterfactual mask.
        window: tokens after the changed one that are recomputed too, >= 0.
        answers: answer tokens that are read, the first ones, >= 1; longer answers are read in part.
        chunk: as for OAR-P, counterfactuals per row and forward if they had to run over the whole completion, >= 1.
        counterfactual: see ``masked_token_importance``; default mask.

    Raises:
        ArgumentError: an argument does not fit the signature.
        ValueError: a probe that reads more than the answer, or no prompt position.
    """
    scored = scored_tokens(span, probe)
    params = policy.head(jax.lax.stop_gradient(params))
    return local_scores(
        policy,
        params,
        stored_pass(policy, params, tokens, valid, completion_length=scored.shape[1]),
        reading_of(tokens, valid, span),
        scored,
        probe=probe,
        mask_id=mask_id,
        window=window,
        answers=answers,
        chunk=chunk,
        counterfactual=counterfactual,
    )


def local_scores(
    policy: Policy,
    params: Params,
    clean: StoredPass,
    reading: Reading,
    scored: Bool[Array, "B T"],
    *,
    probe: Probe,
    mask_id: int,
    window: int,
    answers: int,
    chunk: int,
    counterfactual: Counterfactual,
) -> Float[Array, "B T"]:
    """Compute ``local_importance`` of the ``scored`` tokens, after a clean pass."""
    if policy.first_slots is None:
        raise ValueError(
            "OAR-L: this policy has recurrent states, which depend on every earlier token; use oar_p, oar_g or oar_f"
        )
    if probe.reads != "answer":
        raise ValueError("OAR-L: expected a probe that reads the answer alone; for others use OAR-P")
    rows, length = scored.shape
    answers = min(answers, length)
    places = 1 + min(window, length - 1) + answers  # recomputed positions of a counterfactual
    size = chunk_size(length, places=places, chunk=chunk)
    inputs, is_read = _first_answers(reading.answer, answers)
    read_at = Reading(_take(reading.tokens, inputs), is_read, is_read & _take(reading.answer, inputs))
    clean_outputs = probe.read(policy, params, _take(clean.hidden, inputs), read_at)
    replacement = None
    if counterfactual != "deleted":
        replacement = replacement_embeddings(
            policy, params, clean.hidden, reading.tokens, counterfactual=counterfactual, mask_id=mask_id
        )
    slots = clean.stored.valid.shape[1]
    offset = slots - length  # of the completion's inputs among the stored ones
    copy = lambda x: jnp.repeat(x, size, axis=0)  # noqa: E731
    order = masked_positions(scored, first=0, slots=-(-length // size) * size, none=length)

    def score(i: Int[Array, ""], out: Float[Array, "B T"]) -> Float[Array, "B T"]:
        at = jax.lax.dynamic_slice_in_dim(order, i * size, size, axis=1)  # [B, K], T = nothing left
        # Input t + 1 carries token t: the changed input, the window after it, then the inputs that are read.
        near = at[..., None] + 1 + jnp.arange(places - answers)
        read_inputs = jnp.broadcast_to(inputs[:, None], (rows, size, answers))
        at_read = read_inputs == near[..., :1]  # the changed token is itself where the answer is predicted
        before_read = near < jnp.where(is_read[:, :1], inputs[:, :1], length)[:, None]
        attended = jnp.concatenate([before_read, jnp.broadcast_to(is_read[:, None], read_inputs.shape)], axis=-1)
        is_changed = jnp.concatenate([near == near[..., :1], at_read], axis=-1)
        where = jnp.concatenate([near, read_inputs], axis=-1)
        inside = jnp.minimum(where, length - 1).reshape(rows, -1)
        embeddings = _take(clean.embeddings, inside).reshape(rows, size, places, -1)
        if replacement is None:
            attended = attended & ~is_changed
        else:
            embedding = _take(replacement, jnp.minimum(at, length - 1))[:, :, None]
            embeddings = jnp.where(is_changed[..., None], embedding, embeddings)
        stands = where + offset
        redone = (jnp.arange(slots) == stands[..., None]) & (attended | is_changed)[..., None]
        visible = (jnp.arange(slots) < stands[..., None]) & ~redone.any(axis=2, keepdims=True)
        hidden, _ = policy.trunk(
            params,
            embeddings.reshape(rows * size, places, -1),
            _take(clean.positions, inside).reshape(rows * size, places),
            attended.reshape(rows * size, places),
            prefix=clean.stored,
            visible=visible.reshape(rows * size, places, slots),
        )
        changed_outputs = probe.read(policy, params, hidden[:, places - answers :], jax.tree.map(copy, read_at))
        change = divergence(probe, copy(clean_outputs), changed_outputs).reshape(rows, size).astype(out.dtype)
        return out.at[jnp.arange(rows)[:, None], at].set(change, mode="drop")

    chunks = -(-jnp.max(jnp.sum(scored, axis=1)) // size)
    out = jnp.zeros(scored.shape, jnp.promote_types(clean.hidden.dtype, jnp.float32))
    with jax.named_scope(SCOPE):
        return jax.lax.fori_loop(0, chunks, score, out)


def chunk_size(length: int, *, places: int, chunk: int) -> int:
    """Return the number of a row's counterfactuals per chunk, each with ``places`` recomputed positions.

    No more than an eighth of the completion: what the last chunk of a row has too many is wasted.
    """
    return min(-(-length // 8), max(1, chunk * length // places))


def _first_answers(answer: Bool[Array, "B T"], count: int) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Find the first ``count`` answer tokens, in order, and which of them exist."""
    at = jnp.argsort(~answer, axis=1, stable=True)[:, :count]
    return at, jnp.arange(count) < answer.sum(axis=1, keepdims=True)


def _take(x: Array, at: Int[Array, "B A"]) -> Array:
    """Take x[b, at[b, a], ...]."""
    return jax.vmap(lambda row, i: row[i])(x, at)


# The method ---------------------------------------------------------------------------------------------------------


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score a rollout by the configured counterfactual, window and probe."""
    params, probe = policy.head(params), probe_of(context)
    clean = stored_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
    reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, probe)
    return Scored(
        local_scores(policy, params, clean, reading, scored, probe=probe, **settings_of(context)), clean.hidden
    )


def settings_of(context: Context) -> dict[str, Any]:
    """Return the keywords of ``local_scores`` that the config sets."""
    m, local = context.credit.masking, context.credit.local
    return {
        "mask_id": context.mask_id,
        "chunk": m.chunk,
        "counterfactual": m.counterfactual,
        "window": local.window,
        "answers": local.answers,
    }


def check(cfg: CreditSettings, custom_probe: Probe | None) -> None:
    """Refuse whole lines, and probes that read more than the answer.

    Raises:
        ConfigError: either is configured.
    """
    check_units(cfg, custom_probe)
    if custom_probe is not None and custom_probe.reads != "answer":
        raise ConfigError(
            "credit.probe.function: OAR-L recomputes only the answer's positions and this probe reads the "
            "whole completion; set credit.method to oar_p, oar_g or oar_f, or credit.screen.by to oar_f"
        )


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes."""
    return local_flops(d, row, **vars(settings.local)) / clean_flops(d, row)


METHOD = CreditMethod(
    weigh, name="oar_l", needs=("importance",), score=score, answer="probed", check=check, forwards=forwards, cuts=True
)
