"""Causal spans (arXiv 2602.09331): a span is masked, and its tokens weigh by the drop in the answer's probability.

Evidence: a description, of the scores; how the source turns drops into weights was not read, so they go
through OAR's gate as any importance does. Spans are the lines or sentences of ``credit.masking.unit``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from oarjax.credit.gate import weigh
from oarjax.credit.method import CreditMethod
from oarjax.credit.oar.oar_p import forwards
from oarjax.credit.oar.oar_p import score as masked_score
from oarjax.credit.probe import Probe, Reading, answer_logp
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, Scored
from oarjax.errors import ConfigError
from oarjax.models.policy import Policy
from oarjax.types import AnswerSpan, Params, Rollout


def answer_probability(*, temperature: float) -> Probe:
    """Return the probe that reads the probability of the whole answer, in [0, 1]."""

    def read(policy: Policy, params: Params, hidden: Float[Array, "B T D"], at: Reading) -> Float[Array, "B"]:
        mean = answer_logp(policy, params, hidden, at.answer, at.tokens, temperature=temperature)
        return jnp.exp(at.answer.sum(axis=1) * mean)

    return Probe(read, kind="scalar", reads="answer")


def check(cfg: CreditSettings, probe: Probe | None) -> None:
    """Refuse single tokens, which are no spans, and a probe of another outcome.

    Raises:
        ConfigError: masking.unit is token, or there is a custom probe.
    """
    if cfg.masking.unit == "token":
        raise ConfigError("credit.masking.unit: token, and causal_spans masks whole spans; set sentence or line")
    if probe is not None:
        raise ConfigError(
            "credit.probe.function: causal_spans reads the answer's probability; set null, or credit.method=oar_p"
        )


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score the spans of a rollout by the drop in the probability of its answer when they are masked."""
    probe = answer_probability(temperature=context.temperature)
    return masked_score(policy, params, r, span, keys, context._replace(probe=probe))


METHOD = CreditMethod(
    weigh, name="causal_spans", needs=("importance",), score=score, answer="read", check=check, forwards=forwards
)
