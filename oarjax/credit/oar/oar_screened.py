"""Screened OAR-P: exact scores where a cheaper method expects most, its estimates elsewhere (ours)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from oarjax.costs import RowTokens, clean_flops, masked_flops
from oarjax.credit.clean_pass import stored_pass
from oarjax.credit.gate import weigh
from oarjax.credit.method import CreditMethod, built_in, scorer_of
from oarjax.credit.oar import oar_l, oar_p
from oarjax.credit.oar.oar_l import local_scores
from oarjax.credit.oar.oar_p import check_units, masked_scores
from oarjax.credit.probe import Probe, reading_of, scored_tokens
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, Scored, probe_of, required
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.checked import ScalarShare, checked
from oarjax.rl.masked import masked_count, masked_quantile, masked_sum, widened
from oarjax.types import AnswerSpan, Params, Rollout


@checked
def top_share(scores: Float[Array, "B T"], mask: Bool[Array, "B T"], *, share: ScalarShare) -> Bool[Array, "B T"]:
    """Mark the ceil(share * n) highest of each row's n valid scores; ties go to the earlier token.

    Args:
        scores: of each token.
        mask: tokens that count, n in a row.
        share: in [0, 1]. May be traced.
    """
    order = jnp.argsort(jnp.where(mask, -widened(scores), jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    count = jnp.ceil(share * masked_count(mask) * (1 - 1e-6))
    return mask & (rank < count[:, None])


@checked
def screened_scores(
    exact: Float[Array, "B T"], estimate: Float[Array, "B T"], chosen: Bool[Array, "B T"], scored: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Combine exact scores of the chosen tokens with the others' estimates, scaled to them and kept below them.

    A row's factor is sum(exact) / sum(estimate) over its chosen tokens, and less where the highest of the others
    would pass the median of the chosen. The others keep their order among themselves. Where the factor is undefined
    (nothing chosen, nothing above 0) they keep their estimates. Absolute values, for scores that may be negative.

    Args:
        exact: scores of the chosen tokens; unused elsewhere.
        estimate: cheaper scores of all tokens.
        chosen: tokens with exact scores, such as those of ``top_share``.
        scored: tokens that get a score.
    """
    exact, estimate = jnp.where(chosen, exact, 0), jnp.abs(estimate).astype(exact.dtype)
    inexact = scored & ~chosen
    above, below = masked_sum(jnp.abs(exact), chosen), masked_sum(estimate, chosen)
    highest = jnp.max(jnp.where(inexact, estimate, 0), axis=-1)
    cap = masked_quantile(jnp.abs(exact), chosen, level=0.5)
    scale = jnp.where(below > 0, above / jnp.where(below > 0, below, 1), jnp.inf)
    scale = jnp.minimum(scale, jnp.where(highest > 0, cap / jnp.where(highest > 0, highest, 1), jnp.inf))
    scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1)
    return jnp.where(chosen, exact, jnp.where(inexact, estimate * scale[:, None], 0))


# The method ---------------------------------------------------------------------------------------------------------


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score a rollout: estimates of every token, exact scores of those that the estimates put first."""
    screen, head, probe = context.credit.screen, policy.head(params), probe_of(context)
    # A row has only a share of its tokens to score: as many rows at once, so that much fewer of each.
    settings, length = oar_p.settings_of(context), span.answer.shape[1]
    settings["chunk"] = max(1, round(settings["chunk"] * screen.share))
    options = oar_p.places(length, chunk=settings["chunk"], buckets=settings["buckets"])
    clean = stored_pass(policy, head, r.tokens, r.valid, **options)
    reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, probe)
    if screen.by == "random":
        estimate = jax.vmap(lambda key: jax.random.uniform(key, (scored.shape[1],)))(keys)
    elif screen.by == "oar_l":  # starts from the same clean pass
        estimate = local_scores(policy, head, clean, reading, scored, probe=probe, **oar_l.settings_of(context))
    else:
        screened = scorer_of(built_in(screen.by))(policy, params, r, span, keys, context)
        estimate = required(screened, "importance", context)
    chosen = top_share(jnp.abs(estimate), scored, share=screen.share)
    exact = masked_scores(policy, head, clean, reading, chosen, units=None, probe=probe, **settings)
    return Scored(screened_scores(exact, estimate, chosen, scored), clean.hidden)


def check(cfg: CreditSettings, custom_probe: Probe | None) -> None:
    """Refuse what the screening method refuses, and whole lines.

    Raises:
        ConfigError: from that method.
    """
    screening = None if cfg.screen.by == "random" else built_in(cfg.screen.by).check
    (screening or check_units)(cfg, custom_probe)


def noisy(cfg: CreditSettings) -> bool:
    """Return whether another key gives other estimates."""
    return cfg.screen.by == "oar_f" and cfg.fisher.sampled > 0


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes of the estimates and of the exact part, each with a clean pass; with OAR-L they share it."""
    screen, exact = settings.screen, masked_flops(d, row, share=settings.screen.share) / clean_flops(d, row)
    if screen.by == "random":
        return exact
    return exact + built_in(screen.by).forwards_of(settings, row, d) - (screen.by == "oar_l")


METHOD = CreditMethod(
    weigh,
    name="oar_screened",
    needs=("importance",),
    score=score,
    answer="probed",
    check=check,
    forwards=forwards,
    noisy=noisy,
)
