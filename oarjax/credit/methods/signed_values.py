"""Signed values: tokens listed at a few places of a row move by their own value, for or against (ours).

A finder's importance, or the policy's entropy, chooses places. There the likeliest tokens stand in turn, everything
else as it was drawn, and the policy says how probable the reference answer is then: v(a), teacher-forced. That is a
direct effect and not Q(a): text that was drawn after the original token stays, and pulls the values of other tokens to
that token's wherever it restates or depends on it; and a token that ends a completion is valued as if the text went on.
Other tokens get a share of the row's advantage.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.costs import RowTokens, clean_flops, masked_flops
from oarjax.credit.clean_pass import StoredPass, stored_pass
from oarjax.credit.method import CreditMethod, built_in, scorer_of
from oarjax.credit.oar import oar_l
from oarjax.credit.oar.oar_p import over_counterfactuals, places
from oarjax.credit.probe import Probe, outcome_probability, reading_of, scored_tokens
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, Scored, probe_of, required
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.masked import widened
from oarjax.rollout.logps import hidden_logps
from oarjax.types import AnswerSpan, Params, Rollout, TokenValues, TrainBatch

SCOPE = "signed_values"
"""The name of its loop over candidates in compiled programs."""

FREE = ("entropy", "random")
"""Finders that need no pass beside the clean one: the policy's entropy where a token was drawn, and noise."""


def signed_value_loss(
    logps: Float[Array, "*rows V"],
    ids: Int[Array, "*rows C"],
    values: Float[Array, "*rows C"],
    listed: Bool[Array, "*rows C"],
    scale: Float[Array, "*rows"],
) -> Float[Array, "*rows"]:
    """Compute -sum_{a in C} pi(a) stop[(v(a) - b) / s], b = sum_C pi(a) v(a) / sum_C pi(a), of each place.

    pi is the policy's over the whole vocabulary: were it renormalised over C, the mass of all other tokens could not
    move. Those count as average, v = b. With C the whole vocabulary and v = Q this is the exact policy gradient of the
    place's expected return, in units of s. A scale of 0 (equal rewards) gives 0.

    Args:
        logps: of every token, differentiable.
        ids: the tokens C.
        values: v, not differentiated.
        listed: entries of C that exist, each token once.
        scale: s, the standard deviation of the batch's rewards.
    """
    pi = jnp.where(listed, jnp.exp(jnp.take_along_axis(logps, ids, axis=-1)), 0)
    mass = jnp.sum(pi, axis=-1, keepdims=True)
    baseline = jnp.sum(pi * values, axis=-1, keepdims=True) / jnp.where(mass > 0, mass, 1)
    s = scale[..., None]
    advantages = jnp.where(s > 0, (values - baseline) / jnp.where(s > 0, s, 1), 0)
    return -jnp.sum(pi * jax.lax.stop_gradient(advantages), axis=-1)


def chosen_places(
    importance: Float[Array, "B T"], reasoning: Bool[Array, "B T"], *, count: int
) -> tuple[Int[Array, "B k"], Bool[Array, "B k"]]:
    """Return the reasoning tokens of the largest importance, the earliest of equals, and which of the k exist."""
    order = jnp.argsort(jnp.where(reasoning, -jnp.abs(widened(importance)), jnp.inf), axis=1, stable=True)
    at = order[:, :count]
    return at, jnp.take_along_axis(reasoning, at, axis=1)


def candidates(
    logits: Float[Array, "B k V"], drawn: Int[Array, "B k"], *, count: int
) -> tuple[Int[Array, "B k C"], Bool[Array, "B k C"]]:
    """Return the likeliest tokens and then the drawn one, C = count + 1, and which of them count: each once."""
    likeliest = jax.lax.top_k(logits, count)[1].astype(drawn.dtype)
    alone = ~jnp.any(likeliest == drawn[..., None], axis=-1, keepdims=True)
    ids = jnp.concatenate([likeliest, drawn[..., None]], axis=-1)
    return ids, jnp.concatenate([jnp.ones(likeliest.shape, bool), alone], axis=-1)


def token_values(
    policy: Policy,
    params: Params,
    clean: StoredPass,
    tokens: Int[Array, "B T"],
    outcome: Bool[Array, "B T"],
    at: Int[Array, "B k"],
    exists: Bool[Array, "B k"],
    *,
    count: int,
    temperature: float,
    chunk: int,
    buckets: int,
) -> TokenValues:
    """Compute v(a) of the ``count`` likeliest tokens and the drawn one at each place, after a clean pass."""
    row = jnp.arange(len(at))[:, None]
    length = tokens.shape[1]
    logits = policy.unembed(params, clean.hidden[row, at])
    ids, listed = candidates(logits, tokens[row, at], count=count)
    first = jnp.full(tokens.shape, length).at[row, jnp.where(exists, at, length)].set(at, mode="drop")
    settings: dict[str, Any] = {"temperature": temperature}

    def found(states: Float[Array, "BK L D"], last: int, copies: int) -> Float[Array, "BK"]:
        window = (jnp.repeat(x[:, -last:], copies, axis=0) for x in (outcome, tokens))
        return outcome_probability(policy, params, states, *window, **settings)

    def tried(token: Int[Array, "B k"]) -> Float[Array, "B k"]:
        replacement = policy.embed(params, tokens.at[row, at].set(token))
        out = over_counterfactuals(policy, params, clean, first, replacement, found, chunk=chunk, buckets=buckets)
        return out[row, at]

    with jax.named_scope(SCOPE):
        swapped = jnp.moveaxis(jax.lax.map(tried, jnp.moveaxis(ids[..., :-1], -1, 0)), 0, -1)
    current = outcome_probability(policy, params, clean.hidden, outcome, tokens, **settings)[:, None, None]
    values = jnp.concatenate([swapped, jnp.broadcast_to(current, (*at.shape, 1)).astype(swapped.dtype)], axis=-1)
    values = jnp.where(ids == tokens[row, at][..., None], current, values)  # the row as it stands, needing no forward
    listed = listed & exists[..., None]

    def spread(x: Array) -> Array:
        return jnp.zeros((*tokens.shape, count + 1), x.dtype).at[row, at].set(jnp.where(listed, x, jnp.zeros_like(x)))

    return TokenValues(spread(ids), spread(values), spread(listed))


def at_places(
    policy: Policy, params: Params, scored: Scored, *, places: int, temperature: float
) -> tuple[Int[Array, "B k"], Int[Array, "B k C"], Float[Array, "B k C"], Float[Array, "B k C"], Bool[Array, "B k C"]]:
    """Return the places of scored rows, the tokens there, their values and probabilities, and which of them count."""
    values, hidden = scored.values, scored.hidden
    if values is None or hidden is None:
        raise ValueError("at_places: expected rows that signed_values scored")
    at, exists = chosen_places(jnp.ones(values.listed.shape[:2]), values.listed.any(-1), count=places)
    row = jnp.arange(len(at))[:, None]
    logits = widened(policy.unembed(policy.head(params), hidden[row, at])) / temperature
    pi = jnp.exp(jnp.take_along_axis(jax.nn.log_softmax(logits), values.ids[row, at], axis=-1))
    return at, values.ids[row, at], values.values[row, at], pi, values.listed[row, at] & exists[..., None]


# The method ---------------------------------------------------------------------------------------------------------


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score a rollout whose answer is the reference by the finder, and value tokens at the places it puts first."""
    if span.outcome is None:
        raise ValueError("signed_values: needs rows with the reference answer, see oarjax.step.spans.with_reference")
    cfg, m, probe = context.credit.signed_values, context.credit.masking, probe_of(context)
    head, length = policy.head(params), span.answer.shape[1]
    chunk = min(m.chunk, cfg.places)
    clean = stored_pass(policy, head, r.tokens, r.valid, **places(length, chunk=chunk, buckets=m.buckets))
    reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, probe)
    if cfg.by == "random":
        importance = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(keys)
    elif cfg.by == "oar_l":  # starts from the same clean pass
        settings = oar_l.settings_of(context)
        importance = oar_l.local_scores(policy, head, clean, reading, scored, probe=probe, **settings)
    elif cfg.by == "entropy":
        at_head = {"temperature": context.temperature, "head_chunk": context.head_chunk}
        importance = hidden_logps(policy, head, clean.hidden, reading.tokens, **at_head)[1]
    else:
        importance = required(
            scorer_of(built_in(cfg.by))(policy, params, r, span, keys, context), "importance", context
        )
    at, exists = chosen_places(importance, span.reasoning, count=cfg.places)
    settings = {"count": cfg.candidates, "temperature": context.temperature, "chunk": chunk, "buckets": m.buckets}
    values = token_values(policy, head, clean, reading.tokens, span.outcome, at, exists, **settings)
    return Scored(importance, clean.hidden, values)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Give every token its share of the row's advantage, and the places none: they have values."""
    cfg, reasoning = context.credit.signed_values, inputs.span.reasoning
    at, exists = chosen_places(required(inputs.signals, "importance", context), reasoning, count=cfg.places)
    row = jnp.arange(len(at))[:, None]
    at_place = jnp.zeros(reasoning.shape, bool).at[row, at].max(exists)
    return jnp.where(at_place, 0.0, cfg.share)


def loss(
    policy: Policy, params: Params, hidden: Float[Array, "B T D"], batch: TrainBatch, context: Context
) -> Float[Array, "B T"]:
    """Compute ``signed_value_loss`` at the places, 0 elsewhere."""
    v = batch.values
    if v is None or v.scale is None:
        raise ValueError("signed_values: the batch has no values; score and credit it first")
    at, exists = chosen_places(
        jnp.ones(batch.completion.shape), v.listed.any(-1), count=context.credit.signed_values.places
    )
    row = jnp.arange(len(at))[:, None]
    logits = widened(policy.unembed(params, hidden[row, at])) / context.temperature
    scale = jnp.broadcast_to(v.scale[:, None], at.shape)
    losses = signed_value_loss(jax.nn.log_softmax(logits), v.ids[row, at], v.values[row, at], v.listed[row, at], scale)
    return jnp.zeros(batch.completion.shape, losses.dtype).at[row, at].add(jnp.where(exists, losses, 0))


def check(cfg: CreditSettings, custom_probe: Probe | None) -> None:
    """Refuse rows without the reference answer, weights for one sign alone, and what the finder refuses.

    Raises:
        ConfigError: any of these is configured.
    """
    if cfg.answer.source != "reference":
        raise ConfigError(
            "credit.answer.source: own with credit.method signed_values, which values tokens by the reference answer; "
            "set credit.answer.source=reference"
        )
    if cfg.polarity != "both":
        raise ConfigError(
            f"credit.polarity: {cfg.polarity} with credit.method signed_values, whose values have a sign of their own; "
            "set both"
        )
    finder = None if cfg.signed_values.by in FREE else built_in(cfg.signed_values.by)
    if finder is not None and finder.check is not None:
        finder.check(cfg, custom_probe)


def noisy(cfg: CreditSettings) -> bool:
    """Return whether another key gives other places."""
    if cfg.signed_values.by in FREE:
        return cfg.signed_values.by == "random"
    finder = built_in(cfg.signed_values.by).noisy
    return finder if isinstance(finder, bool) else finder(cfg)


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes of the finder and one from a place to the row's end per candidate.

    OAR-L and the entropies, which need the head at every token, share the clean pass.
    Places are taken to be spread evenly over the reasoning.
    """
    cfg = settings.signed_values
    tried = cfg.places * cfg.candidates / max(row.reasoning, 1)
    values = masked_flops(d, row, share=tried) / clean_flops(d, row)
    if cfg.by in FREE:
        return values + (cfg.by == "entropy") * 2.0 * d.head_params * row.completion / clean_flops(d, row)
    return values + built_in(cfg.by).forwards_of(settings, row, d) - (cfg.by == "oar_l")


METHOD = CreditMethod(
    weigh,
    name="signed_values",
    kind="values",
    needs=("importance",),
    score=score,
    loss=loss,
    answer="read",
    check=check,
    forwards=forwards,
    noisy=noisy,
    cuts=True,
)
