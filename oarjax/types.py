"""Every pytree that crosses a function boundary, and the letters that name its axes.

Axes
    P  prompts in a batch                 S  prompt positions, LEFT-padded
    G  rollouts (completions) per prompt  T  completion positions, RIGHT-padded
    B  rows = P * G, row b = p * G + g    N  S + T
    V  vocabulary                         D  embedding width
    C  cache positions                    K  counterfactuals per chunk

Masks are bool and named for what is True. They come from lengths, never from ``ids != pad_id``:
Qwen's pad id is also one of its stop ids. Positions are ``clip(cumsum(valid) - 1, 0)``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

Params = Any
"""A plain pytree of arrays (nested dicts); only ``models/`` knows what is in it."""


@struct.dataclass
class PromptBatch:
    """Prompts as the sampler takes them. Answers and texts stay on the host, found by ``problem``."""

    tokens: Int32[Array, "P S"]
    valid: Bool[Array, "P S"]
    problem: Int32[Array, "P"]  # row number in the dataset


@struct.dataclass
class Rollout:
    """What the sampler gives back: prompt and completion side by side, G rows per prompt.

    Both log-probs are at the sampling temperature and 0 where ``completion`` is False.
    """

    tokens: Int32[Array, "B N"]
    valid: Bool[Array, "B N"]
    completion: Bool[Array, "B T"]  # generated tokens, the stop token included
    behaviour_logps: Float[Array, "B T"]  # under the whole distribution, before top-k and top-p
    filtered_logps: Float[Array, "B T"]  # under the distribution that was drawn from, after top-k and top-p
    ended: Bool[Array, "B"]  # a stop id was sampled; False = cut at T


@struct.dataclass
class AnswerSpan:
    """Where a completion reasons and where it answers. Markers and what follows the answer are neither."""

    reasoning: Bool[Array, "B T"]  # the tokens whose advantage may be reshaped
    answer: Bool[Array, "B T"]
    found: Bool[Array, "B"]
    units: Int32[Array, "B T"] | None = None  # number of the line or sentence of each token, where asked for


Verdict = Literal["graded", "unparseable", "ungraded", "timeout", "crash"]


@dataclass(frozen=True)
class Grades:
    """What the graders say of B completions, on the host. ``notes`` says why a verdict is not "graded"."""

    rewards: Float32[np.ndarray, "B"]  # sum of weight * value, NaN where a value with a weight is
    per_reward: dict[str, Float32[np.ndarray, "B"]]  # unweighted
    verdicts: list[Verdict]
    answers: list[str | None]  # as extracted from the completions, untrusted
    notes: list[str]

    def counts(self) -> dict[str, int]:
        """Number of completions of each verdict that occurs."""
        return dict(Counter(self.verdicts))


@struct.dataclass
class Scores:
    """What the rollout policy says of its own completions; None where nothing asks for it."""

    old_logps: Float[Array, "B T"] | None
    ref_logps: Float[Array, "B T"] | None
    importance: Float[Array, "B T"] | None
    entropies: Float[Array, "B T"] | None


@struct.dataclass
class Credit:
    """Per-token credit and what it was made of."""

    importance: Float[Array, "B T"]  # raw scores, >= 0 for KL probes
    weights: Float[Array, "B T"]  # 1 outside the reasoning
    advantages: Float[Array, "B T"]  # weights * group advantage


@struct.dataclass
class TrainBatch:
    """One minibatch of policy-gradient rows. Empty rows have ``completion`` all False and change nothing."""

    tokens: Int32[Array, "B N"]
    valid: Bool[Array, "B N"]
    completion: Bool[Array, "B T"]
    advantages: Float[Array, "B T"]
    old_logps: Float[Array, "B T"] | None  # None: on-policy, old = stop_gradient(new)
    ref_logps: Float[Array, "B T"] | None  # None: no KL term
    behaviour_logps: Float[Array, "B T"] | None  # None: no sampler/trainer correction


@struct.dataclass
class Mean:
    """A mean that has not been divided yet, so that microbatches, devices and hosts add exactly."""

    total: Float[Array, ""]
    count: Float[Array, ""]

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Float[Array, ""]:
        """total / count, and 0 where nothing was counted."""
        return jnp.where(self.count > 0, self.total / jnp.maximum(self.count, 1e-20), 0.0)


@struct.dataclass
class TrainState:
    """What an update takes and gives back; its memory is used again."""

    step: Int32[Array, ""]  # optimizer updates so far
    params: Params  # what is trained
    opt_state: Any
    key: Key[Array, ""]  # the run's root key; folded, never consumed
    frozen: Params | None = None  # what the params are laid over and no update changes; None: they are the whole policy


@struct.dataclass
class KVCache:
    """Keys (rotated) and values of every layer. Slots below ``length`` have been written; of these,
    ``valid`` says which hold a real token. Rows may be prompts (shared by a group) or rollouts."""

    k: Float[Array, "L B C kv h"]
    v: Float[Array, "L B C kv h"]
    valid: Bool[Array, "B C"]
    length: Int32[Array, ""]


@struct.dataclass
class Evidence:
    """One minibatch with all that made its update, to be looked at again; None where it did not get that far.

    Rows in microbatches [M, b, ...] as they were scored, of which the first ``used`` hold rows.
    """

    rollout: Rollout
    span: AnswerSpan
    numbers: Int32[Array, "M b"]  # of the rows among all that were drawn
    used: Int32[Array, ""]
    probed: tuple[Rollout, AnswerSpan] | None = None  # what importance was measured on, if not the rollout itself
    scores: Scores | None = None
    advantages: Float[Array, "M b"] | None = None  # of the group
    completion: Bool[Array, "M b T"] | None = None  # tokens that are trained on
    weights: Float[Array, "M b T"] | None = None
    denominator: Float[Array, ""] | None = None  # of the loss; None: the count of the minibatch itself
