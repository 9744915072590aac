"""OAR-F: the second-order expansion of OAR-P, for all tokens from a few backward passes (ours, not in the paper).

With d_t = e' - e_t the change of a token's embedding, KL(P || P(e + d_t)) = 1/2 d_t^T J^T (diag p - p p^T) J d_t to
second order, and diag p - p p^T = sum_v p_v (1_v - p)(1_v - p)^T, so

    s_t = 1/2 sum_v p_v <grad_{e_t} log p_v, d_t>^2.

One backward pass per outcome v gives its term for every token at once. The most likely outcomes are exact,
and the rest, if at all, by drawing outcomes from it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.costs import RowTokens, clean_flops, fisher_flops
from oarjax.credit.clean_pass import LinearPass, linear_pass
from oarjax.credit.counterfactual import Counterfactual, replacement_embeddings
from oarjax.credit.gate import weigh
from oarjax.credit.method import CreditMethod
from oarjax.credit.oar.oar_p import check_units
from oarjax.credit.probe import Probe, from_inputs, reading_of, scored_tokens, to_inputs
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, Scored, probe_of
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.checked import checked
from oarjax.rl.ranges import Count, Positive
from oarjax.types import AnswerSpan, Params, Rollout


@checked
def fisher_importance(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    keys: Key[Array, "B"],
    *,
    probe: Probe,
    mask_id: Count,
    outcomes: Positive,
    sampled: Count,
    counterfactual: Counterfactual = "mask",
) -> Float[Array, "B T"]:
    """Compute OAR-F scores in nats, >= 0 for a distribution; 0 outside the reasoning and in rows with no answer.

    A scalar probe has a first order, and one pass: s_t = -<grad_{e_t} phi, d_t>, the expansion of clean minus changed.

    Args:
        policy: the model's functions, such as ``make_policy`` gives.
        params: its parameters; no gradient flows to them.
        tokens: prompt and completion, N = S + T.
        valid: positions that hold a token.
        span: reasoning and answer of the completions, [B, T], as ``find_answers`` gives them.
        keys: one per row (``oarjax.credit.oar.oar_g.row_keys``), used where ``sampled`` > 0.
        probe: the outcome, see ``outcome_probe``.
        mask_id: id that replaces a token, for counterfactual mask; the paper's is the pad id.
        outcomes: backward passes for the most likely outcomes, 1 to V.
        sampled: further passes for outcomes drawn from the rest, in proportion to their probability, >= 0.
        counterfactual: mask, second_choice or mean_embedding, see ``oarjax.credit.counterfactual``; default mask.

    Raises:
        ArgumentError: an argument does not fit the signature.
        ValueError: a counterfactual without an embedding, or no prompt position.
    """
    params = policy.head(jax.lax.stop_gradient(params))
    clean = linear_pass(policy, params, tokens, valid, completion_length=span.answer.shape[1])
    return fisher_scores(
        policy,
        params,
        clean,
        tokens,
        valid,
        span,
        keys,
        probe=probe,
        mask_id=mask_id,
        outcomes=outcomes,
        sampled=sampled,
        counterfactual=counterfactual,
    )


def fisher_scores(
    policy: Policy,
    params: Params,
    clean: LinearPass,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    keys: Key[Array, "B"],
    *,
    probe: Probe,
    mask_id: int,
    outcomes: int,
    sampled: int,
    counterfactual: Counterfactual,
) -> Float[Array, "B T"]:
    """Compute ``fisher_importance`` after a clean pass."""
    reading, scored = reading_of(tokens, valid, span), scored_tokens(span, probe)
    replacement = replacement_embeddings(
        policy, params, clean.hidden, reading.tokens, counterfactual=counterfactual, mask_id=mask_id
    )
    change = to_inputs(jnp.where(scored[..., None], replacement, 0)) - to_inputs(scored)[..., None] * clean.embeddings

    def read(hidden: Float[Array, "B T D"]) -> Array:
        return probe.read(policy, params, hidden, reading)

    def effect(cotangent: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        return from_inputs(jnp.sum(clean.pull(cotangent) * change, axis=-1))

    if probe.kind == "scalar":
        slope = jax.grad(lambda h: jnp.sum(read(h)))(clean.hidden)
        return jnp.where(scored, -effect(slope), 0)
    logits, pull = jax.vjp(read, clean.hidden)
    factors = fisher_factors(jax.nn.softmax(logits), keys, outcomes=outcomes, sampled=sampled)
    effects = jax.vmap(lambda factor: effect(pull(factor)[0]))(factors)
    return jnp.where(scored, jnp.sum(effects**2, axis=0) / 2, 0)


def fisher_factors(
    p: Float[Array, "B V"], keys: Key[Array, "B"], *, outcomes: int, sampled: int
) -> Float[Array, "M B V"]:
    """Find vectors f_m with sum_m f_m f_m^T = diag p - p p^T, the Fisher information of a softmax by its logits.

    f_v = sqrt(p_v) (1_v - p) for the ``outcomes`` most likely v, exactly; the rest in expectation, with weights
    sqrt(p_rest / sampled) for ``sampled`` outcomes drawn from it, or not at all. M = outcomes + sampled.
    """
    top, ids = jax.lax.top_k(p, min(outcomes, p.shape[-1]))
    vocabulary = jnp.arange(p.shape[-1])
    if sampled == 0:
        return jax.vmap(_factor, in_axes=(1, 1, None))(top, ids, p)
    is_top = jnp.any(ids[:, :, None] == vocabulary, axis=1)
    tail = jnp.where(is_top, 0, p)
    draw = jax.vmap(lambda key, logits: jax.random.categorical(key, logits, shape=(sampled,)))
    sample_ids = draw(keys, jnp.where(tail > 0, jnp.log(jnp.where(tail > 0, tail, 1)), -jnp.inf))
    share = jnp.broadcast_to(tail.sum(axis=-1, keepdims=True) / sampled, sample_ids.shape)
    return jax.vmap(_factor, in_axes=(1, 1, None))(
        jnp.concatenate([top, share], axis=1), jnp.concatenate([ids, sample_ids.astype(ids.dtype)], axis=1), p
    )


def _factor(weight: Float[Array, "B"], outcome: Int[Array, "B"], p: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Compute sqrt(weight) (1_outcome - p)."""
    return jnp.sqrt(weight)[:, None] * (jax.nn.one_hot(outcome, p.shape[-1], dtype=p.dtype) - p)


# The method ---------------------------------------------------------------------------------------------------------


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score a rollout by the configured number of outcomes and probe."""
    cfg, params = context.credit, policy.head(params)
    clean = linear_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
    importance = fisher_scores(
        policy,
        params,
        clean,
        r.tokens,
        r.valid,
        span,
        keys,
        probe=probe_of(context),
        mask_id=context.mask_id,
        outcomes=cfg.fisher.outcomes,
        sampled=cfg.fisher.sampled,
        counterfactual=cfg.masking.counterfactual,
    )
    return Scored(importance, clean.hidden)


def check(cfg: CreditSettings, custom_probe: Probe | None) -> None:
    """Refuse settings that the expansion does not have.

    Raises:
        ConfigError: deleted tokens, or whole lines.
    """
    if cfg.masking.counterfactual == "deleted":
        raise ConfigError(
            "credit.masking.counterfactual: deleted leaves no embedding for OAR-F to expand around; set "
            "another, or credit.method to oar_p or oar_l"
        )
    check_units(cfg, custom_probe)


def noisy(cfg: CreditSettings) -> bool:
    """Return whether outcomes are drawn."""
    return cfg.fisher.sampled > 0


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes."""
    return fisher_flops(d, row, outcomes=settings.fisher.outcomes + settings.fisher.sampled) / clean_flops(d, row)


METHOD = CreditMethod(
    weigh,
    name="oar_f",
    needs=("importance",),
    score=score,
    answer="probed",
    check=check,
    forwards=forwards,
    noisy=noisy,
    grouped=True,
)
