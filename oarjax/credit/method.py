"""A credit method: pure functions that score and weigh tokens, the same for built-in and custom ones.

A method has up to two halves. ``score`` reads the policy, where the rollout is scored, and gives every token an
importance. ``weigh`` reads signals, answer spans, group advantages and masks, and returns what its kind says: token
weights, bonuses or advantages. ``oarjax.credit.signals`` has what they receive.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from oarjax.costs import RowTokens
from oarjax.credit.probe import Probe
from oarjax.credit.record import CUSTOM, Coupling, Kind
from oarjax.credit.registry import METHODS
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Advantage, Context, CreditInputs, Loss, Reweigh, Score, Scored, SharedScore, Weigh
from oarjax.models.decoder import Decoder


def weigh_uniform(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Leave every token the advantage of its row."""
    return jnp.ones(inputs.completion.shape, jnp.float32)


@dataclass(frozen=True)
class CreditMethod:
    """Pure functions that give every token of a completion its share of the advantage.

    ``CreditMethod(weigh)`` reads spans, advantages and masks alone. A method that reweights another one's scores is
    ``CreditMethod(weigh, needs=("importance",), score="oar_p")``; one that scores tokens itself gives a function.
    """

    weigh: Weigh = weigh_uniform
    """(inputs, context) -> [B, T]; see ``signals.CreditInputs``."""
    needs: tuple[str, ...] = ()
    """The signals (``record.SIGNALS``) that ``weigh`` reads; others are None."""
    score: Score | str | None = None
    """(policy, params, rollout, span, row keys, context) -> importance [B, T]; see ``signals.Score``. Or the name of
    a built-in method, or of a field of credit that holds one, whose importance this method reads."""
    shared: SharedScore | None = None
    """(policy, params, ``clean_pass.LinearPass``, rollout, span, row keys, context) -> the importance that ``score``
    gives, from a pass that the update shares. Only for methods whose weights of a row depend on that row alone."""
    reweigh: Reweigh | None = None
    """(log-probs [B, T], batch, context) -> weights [B, T] on top, recomputed in every update; see ``signals.Reweigh``.
    It needs several updates per rollout: in the first one nothing has changed."""
    advantage: Advantage | None = None
    """Of kind sequence: (rewards [B, K], their weights [K], group size, advantage section) -> A [B]."""
    loss: Loss | None = None
    """Of kinds auxiliary and values: (policy, params, states [B, T, D], batch, context) -> [B, T], added to the tokens'
    losses."""
    name: str = CUSTOM
    """The value of credit.method."""
    kind: Kind = "weights"
    coupling: Coupling = "row"
    """With ``group``, a minibatch must contain whole groups, so only one minibatch per iteration is allowed."""
    answer: Literal["unread", "probed", "read"] = "unread"
    """Use of the completion's answer in scoring: never, unless the probe reads something else, always."""
    check: Callable[[CreditSettings, Probe | None], None] | None = None
    """(settings, custom probe or None) -> None; raises ConfigError for settings that cannot go together."""
    forwards: float | Callable[[CreditSettings, RowTokens, Decoder], float] = 0.0
    """Cost of scoring, in forward passes over the row: a number, or (settings, row, decoder) -> number. The cost of
    signals (log-probs, entropies) is not part of it."""
    noisy: bool | Callable[[CreditSettings], bool] = False
    """True if another key gives other scores, or (settings) -> bool."""
    grouped: bool = False
    """True if ``score`` passes over the rows as they are and nothing else, so that a policy may compute the prompt of a
    group once (``oarjax.models.policy.grouped``)."""
    cuts: bool = False
    """True if scoring recomputes positions inside a row, which policies with recurrent states do not allow."""

    def forwards_of(self, settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
        """Count the scoring of one row, in clean passes over that row."""
        return float(self.forwards(settings, row, d) if callable(self.forwards) else self.forwards)


def built_in(name: str) -> CreditMethod:
    """Import the module of a built-in method, and return its ``METHOD``."""
    return importlib.import_module(METHODS[name].module).METHOD


def scorer_of(method: CreditMethod) -> Callable[..., Scored]:
    """Return the function that scores tokens for a method, which must have one of its own; see ``signals.Score``."""
    score = method.score
    if not callable(score):
        raise TypeError(f"{method.name}: score is {score!r}, expected a function")

    def scores(*args: Any) -> Scored:
        result = score(*args)
        return result if isinstance(result, Scored) else Scored(result)

    return scores
