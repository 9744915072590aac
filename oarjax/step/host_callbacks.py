"""The host as an iteration sees it: sources of prompts and grades, clocks, and the health watch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from oarjax.credit.probe import ProbeMode
from oarjax.rl.advantages import PastRewards
from oarjax.rollout.source import EndedRows, Source
from oarjax.types import AnswerSpan, Evidence, Grades, Hints, Mean, Params, PromptBatch, Rollout, TrainState


class PhaseRecord(NamedTuple):
    """One phase of a minibatch for the health watch: its metrics, and everything they were computed from."""

    phase: Literal["sample", "credit", "update"]
    iteration: int
    minibatch: int
    metrics: dict[str, Mean]  # of this phase alone
    state: TrainState  # as it was used; after an update the new one, with the same params if skipped
    probe: ProbeMode
    evidence: Evidence


class Submission(Protocol):
    """Grades one rollout, in the background."""

    @property
    def report(self) -> Callable[[EndedRows], object] | None:
        """Start grading completions that ended while others are decoded; None to wait for the rollout's end."""
        ...

    @property
    def rest(self) -> Callable[[Rollout], Callable[[], Grades]]:
        """Start grading the rows that were not reported; calling the result waits for all grades."""
        ...


@dataclass(frozen=True)
class GradedAtOnce:
    """A ``Submission`` that grades whole rollouts."""

    rest: Callable[[Rollout], Callable[[], Grades]]
    report: None = None


class HostCallbacks(NamedTuple):
    """Functions of the host that an iteration calls."""

    next_prompts: Callable[[], PromptBatch]
    submit: Callable[[PromptBatch], Submission]  # before the rollout of these prompts
    find_answers: Callable[[Rollout], AnswerSpan]
    fetch: Callable[[Any], Any]  # device -> numpy
    place: Callable[[Any, str], Any]  # numpy -> device, laid out as "prompts" or "microbatches"
    phase: Callable[[str], AbstractContextManager[Any]]  # times a phase
    probed: Callable[[Rollout, AnswerSpan, np.ndarray], tuple[Rollout, AnswerSpan]] | None = None
    # (rollout, span, problems) -> the rows that importance is measured on, if not the rollout itself
    hints: Callable[[Rollout, np.ndarray], Hints] | None = None  # (rollout, problems) -> inputs of the credit method
    watch: Callable[[PhaseRecord], None] | None = None  # looks for values that are not finite
    load_reference: Callable[[Params], Params] = lambda params: params  # to the device, if it is kept elsewhere
    source: Callable[[Source], Source] = lambda sampler: sampler  # what rollouts are drawn from; by default the sampler
    past: Callable[[np.ndarray], PastRewards] | None = None  # problems of rows -> their earlier rewards
    prompt_step: int | None = None  # widths of prompts are multiples of it; None: rollout.prompt_bucket
