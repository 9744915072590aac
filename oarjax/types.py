"""Define the pytrees that cross function boundaries, and the letters of their axes.

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
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, Int32, Key, Real

Params = Any
"""A plain pytree of arrays (nested dicts); only ``models/`` knows its content."""

AXES = ("slice", "data", "expert", "fsdp", "tensor")
"""Mesh axes of the training layout, the slowest network first."""

ROLLOUT_AXES = ("data", "expert", "tensor")
"""Mesh axes of the rollout layout: the same devices in the same order."""


@struct.dataclass
class PromptBatch:
    """Prompts for the sampler. Answers and texts stay on the host; ``problem`` looks them up."""

    tokens: Int32[Array, "P S"]
    valid: Bool[Array, "P S"]
    problem: Int32[Array, "P"]  # row number in the dataset
    written: Int32[Array, "P"] | None = None  # last ids of ``tokens``, which follow the row's own prompt


@struct.dataclass
class Origin:
    """Say where the positions after a prompt come from. On the host alone."""

    turns: Int32[Array, "B T"]  # number of the turn that each belongs to, from 0
    versions: Int32[Array, "B T"]  # iterations that the policy that drew it had learned from; -1: it drew none
    episode: Int32[Array, "B"]
    rewards: Float32[Array, "B T"] | None = None  # an environment's, at the last token of each turn; None without one
    failed: Any = None  # why the environment did, so that the row is not graded, [B] of texts: "" where it did not
    states: Any = None  # the public attributes of the environments at their ends, [B] of JSON texts or None


@struct.dataclass
class Rollout:
    """Sampled completions beside their prompts, G rows per prompt.

    A row ends where ``valid`` does. Both log-probs are at the sampling temperature and 0 where ``completion`` is False.
    """

    tokens: Int32[Array, "B N"]
    valid: Bool[Array, "B N"]
    completion: Bool[Array, "B T"]  # tokens that the policy wrote, the stop token included
    behaviour_logps: Float[Array, "B T"]  # under the whole distribution, before top-k and top-p
    filtered_logps: Float[Array, "B T"]  # under the distribution that was drawn from, after top-k and top-p
    ended: Bool[Array, "B"]  # a stop id was sampled; False = cut at T
    experts: Int[Array, "B N L k"] | None = None  # chosen at each input while sampling, for policy.router replay
    teacher_logps: Float[Array, "B T"] | None = None  # recorded with rollouts from elsewhere, for loss.teacher
    origin: Origin | None = None

    @property
    def extent(self) -> Bool[Array, "B T"]:
        """Mark the row's positions after its prompt, whoever wrote them."""
        return self.valid[..., -self.completion.shape[-1] :]


@struct.dataclass
class AnswerSpan:
    """Masks of a completion's reasoning and answer. Markers and the text after the answer belong to neither."""

    reasoning: Bool[Array, "B T"]  # tokens whose advantage may be reshaped
    answer: Bool[Array, "B T"]
    has_answer: Bool[Array, "B"]  # of the style that is looked for; style none: any text
    units: Int32[Array, "B T"] | None = None  # number of each token's line or sentence, or its label, if requested
    outcome: Bool[Array, "B T"] | None = (
        None  # of rows with the reference answer: tokens whose joint probability counts
    )


@struct.dataclass
class Privileged:
    """Prompts of a teacher, which say more than the policy's own: one per row, LEFT-padded to a width of their own."""

    tokens: Int32[Array, "B S"]
    valid: Bool[Array, "B S"]


@struct.dataclass
class Hints:
    """Data of the host's that a credit method reads beside the rollout; None where it reads none."""

    marks: Float32[Array, "B T"] | None = None  # value of the mark that each token belongs to, 0 without one
    turns: Int32[Array, "B T"] | None = None  # its number from 1 on, 0 without one
    teacher: Privileged | None = None


@struct.dataclass
class SampledRows:
    """Rows [B, ...] as the programs of credit read them, or those of a minibatch in microbatches [M, b, ...]."""

    rollout: Rollout
    span: AnswerSpan
    numbers: Int32[Array, "B"]  # row numbers within the whole rollout batch
    probed: tuple[Rollout, AnswerSpan] | None = None  # rows that importance is measured on, if not ``rollout``
    hints: Hints | None = None


@struct.dataclass
class GradedRows:
    """Group advantages of rows [B, ...] or [M, b, ...], and their tokens in the loss."""

    advantages: Float[Array, "B"]
    completion: Bool[Array, "B T"]
    scale: Float[Array, "B"] | None = None  # standard deviation of all rewards, for a method that values tokens
    late: Float[Array, "B"] | None = None  # advantages of the answer's tokens, of advantage.soft split


Verdict = Literal["graded", "unparseable", "ungraded", "timeout", "crash"]


@dataclass(frozen=True)
class Grades:
    """Rewards and verdicts of B completions, on the host. ``notes`` explains verdicts other than "graded"."""

    rewards: Float32[np.ndarray, "B"]  # sum of weight * value; NaN if a value with a weight is NaN
    per_reward: dict[str, Float32[np.ndarray, "B"]]  # unweighted
    verdicts: list[Verdict]
    answers: list[str | None]  # extracted from the completions, untrusted
    notes: list[str]

    def counts(self) -> dict[str, int]:
        """Count the completions of each verdict that occurs."""
        return dict(Counter(self.verdicts))


@struct.dataclass
class TokenValues:
    """Values of C tokens that could stand at a completion's places; nothing is listed elsewhere."""

    ids: Int32[Array, "B T C"]
    values: Float[Array, "B T C"]  # probability of the reference answer, with the token there and all else as it stands
    listed: Bool[Array, "B T C"]
    scale: Float[Array, "B"] | None = None  # that advantages are divided by; None before rows are graded


@struct.dataclass
class Scores:
    """Log-probs, importance and signals of a rollout under the policy that drew it; None where unused."""

    old_logps: Float[Array, "B T"] | None = None
    ref_logps: Float[Array, "B T"] | None = None
    importance: Float[Array, "B T"] | None = None
    measured: dict[str, Float[Array, "B T ..."]] | None = None  # by name, see oarjax.credit.measures
    values: TokenValues | None = None
    outcome: Float[Array, "B"] | None = None  # probability of the reference answer, see AnswerSpan


@struct.dataclass
class Credit:
    """Per-token credit and its parts."""

    importance: Float[Array, "B T"]  # raw scores, >= 0 for KL probes
    weights: Float[Array, "B T"]  # the token's advantage over its row's; 1 where that is 0
    advantages: Float[Array, "B T"]  # of the tokens
    returned: Float[Array, "B T"] | None = None  # by the method, of its kind; None: the weights


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
    teacher: Privileged | None = None  # read by an auxiliary loss
    experts: Int[Array, "B N L k"] | None = None  # None: the router chooses
    values: TokenValues | None = None  # read by an auxiliary loss
    entropy_bonus: Float[Array, ""] | None = None  # coefficient that adapts; None: the loss has its own


@struct.dataclass
class Mean:
    """A mean as sum and count, so that microbatches, devices and hosts add up exactly."""

    total: Float[Array, ""]
    count: Float[Array, ""]

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Float[Array, ""]:
        """Divide total by count; 0 without any."""
        return jnp.where(self.count > 0, self.total / jnp.maximum(self.count, 1e-20), 0.0)


@struct.dataclass
class TrainState:
    """Training state that an update takes and returns; its buffers are donated."""

    step: Int32[Array, ""]  # optimizer updates so far
    params: Params  # trained parameters
    opt_state: Any
    key: Key[Array, ""]  # the run's root key; folded, never consumed
    frozen: Params | None = None  # base weights below LoRA adapters, never updated; None: params are the whole policy


@struct.dataclass
class Routing:
    """Choices of a mixture's routers, of one layer or of L, and sums over the tokens that count."""

    chosen: Int[Array, "*_L B N k"]  # numbers of the experts, the most likely first
    load: Float[Array, "*_L E"]  # choices of each expert
    probability: Float[Array, "*_L E"]  # of each expert, before the choice
    tokens: Float[Array, "*_L"]  # that count


@struct.dataclass
class KVCache:
    """Keys (rotated) and values of every layer.

    Slots below ``length`` have been written; ``valid`` marks those that hold a real token. Rows may be prompts (shared
    by a group) or rollouts.
    """

    k: Float[Array, "L B C kv h"]
    v: Float[Array, "L B C kv h"]
    valid: Bool[Array, "B C"]
    length: Int32[Array, ""]


@struct.dataclass
class DeltaState:
    """Memory of delta net layers after a row's last token; zeros before its first."""

    memory: Float[Array, "*L B Hv dk dv"]
    tail: Float[Array, "*L B taps C"]  # the convolution's last inputs


@struct.dataclass
class HybridCache(KVCache):
    """Keys and values of the attention layers, and the state of the others after the slots that are written."""

    state: DeltaState


class Window(NamedTuple):
    """The part of a cache that a program reads and writes; static."""

    blocks: int  # that the cache's rows are divided into
    rows: int  # the first ones of each block
    slots: int  # the first ones


@struct.dataclass
class DecodeCache:
    """Keys (rotated) and values of every layer, or int8 and their steps; ``valid`` and ``length`` as in ``KVCache``."""

    k: Real[Array, "L kv B h C"]
    v: Real[Array, "L kv B C h"]
    valid: Bool[Array, "B C"]
    length: Int32[Array, ""]
    steps: BFloat16[Array, "L kv B 2 C"] | None = None  # of a slot's keys, and of its values; None: not int8
    state: DeltaState | None = None  # of layers with delta nets; of the window's rows alone where there is a window
    window: Window | None = struct.field(pytree_node=False, default=None)  # None: all rows and slots
    begun: bool = struct.field(pytree_node=False, default=False)  # a row without a token has its prefix's state already


@struct.dataclass
class Evidence:
    """One minibatch with every input of its update, for replay; None for stages that it did not reach.

    Rows are in microbatches [M, b, ...], as they were scored; the first ``used`` microbatches hold rows.
    """

    rollout: Rollout
    span: AnswerSpan
    numbers: Int32[Array, "M b"]  # row numbers within the whole rollout batch
    used: Int32[Array, ""]
    probed: tuple[Rollout, AnswerSpan] | None = None  # rows that importance was measured on, if not ``rollout``
    scores: Scores | None = None
    advantages: Float[Array, "M b"] | None = None  # group advantages
    completion: Bool[Array, "M b T"] | None = None  # tokens in the loss
    weights: Float[Array, "M b T"] | None = None  # what the credit method returned, of its kind
    denominator: Float[Array, ""] | None = None  # of the loss; None: the minibatch's count
    scale: Float[Array, "M b"] | None = None  # see GradedRows
    late: Float[Array, "M b"] | None = None
    hints: Hints | None = None
