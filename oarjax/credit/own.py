"""A method of token credit of one's own: what ``credit.function`` names, and ``make_steps(own_method=...)`` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Key

from oarjax.credit.signals import Signal, TokenCredit
from oarjax.policy import Policy
from oarjax.types import AnswerSpan, Params, Rollout

ScoreTokens = Callable[[Policy, Params, Rollout, AnswerSpan, Key[Array, "B"]], Float[Array, "B T"]]
"""(policy, params, rollout, span, row keys) -> importance; what stands outside ``span.reasoning`` is not used."""


class CreditMethod(NamedTuple):
    """Pure functions that give every token of a completion its share of the advantage.

    ``CreditMethod(weigh)`` reads spans, advantages and masks alone. A method that reweights another attribution says
    ``CreditMethod(weigh, needs=("importance",), importance="oar_p")``; one that scores tokens by the policy itself
    gives a function there.
    """

    weigh: TokenCredit  # (signals, span, advantages, completion, key) -> weights [B, T], finite and >= 0
    needs: tuple[Signal, ...] = ()  # the signals that ``weigh`` reads; others are None
    importance: str | ScoreTokens = "oar_g"  # whose: oar_g, oar_p, oar_f, oar_l, oar_screened, grail, or a function
