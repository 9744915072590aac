"""The one shape that every method of token credit has, and what a method may look at.

A method is a pure function from signals, answer spans, group advantages and masks to weights [B, T] >= 0. It multiplies
the advantage of each token (``oarjax.oar.gate.reshape``) and never changes its sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.types import AnswerSpan

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


def given(signal: Array | None, name: Signal, *, method: str) -> Array:
    """A signal that the method needs.

    Raises:
        ValueError: it is None. A run computes what its method declares, so only callers with signals of their own
            can meet this.
    """
    if signal is None:
        raise ValueError(f"credit method {method}: needs the signal {name}, got None; give Signals({name}=...)")
    return signal
