"""One record for every method of token credit, and the signals that a method may read.

A method is a pure function from signals, answer spans, group advantages and masks to weights [B, T] >= 0. It multiplies
the advantage of each token (``oarjax.credit.gate.reshape``) and never changes its sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.models.policy import Policy
from oarjax.types import AnswerSpan, Params, Rollout

Signal = Literal["importance", "entropies", "tokens"]


class Signals(NamedTuple):
    """What the rollout policy said of its own completions; None where the method does not ask for it."""

    importance: Float[Array, "B T"] | None = None  # attribution scores, 0 outside the reasoning
    entropies: Float[Array, "B T"] | None = None  # of the distribution that each token was drawn from, nats
    tokens: Int[Array, "B T"] | None = None  # completion ids


TokenCredit = Callable[
    [Signals, AnswerSpan, Float[Array, "B"], Bool[Array, "B T"], Key[Array, ""]], Float[Array, "B T"]
]
"""(signals, span, advantages, completion, key) -> token weights, finite and >= 0; outside the completion unused."""


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


def given(signal: Array | None, name: Signal, *, method: str) -> Array:
    """A signal that the method needs.

    Raises:
        ValueError: it is None. A run computes what its method declares, so only callers with signals of their own
            can meet this.
    """
    if signal is None:
        raise ValueError(f"credit method {method}: needs the signal {name}, got None; give Signals({name}=...)")
    return signal
