"""The host as an iteration sees it: where prompts and grades come from, clocks, and who looks at the numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from oarjax.credit.probe import ProbeMode
from oarjax.rollout.segments import EndedRows
from oarjax.types import AnswerSpan, Evidence, Grades, Hints, Mean, Params, PromptBatch, Rollout, TrainState


class PhaseRecord(NamedTuple):
    """Hold one phase of a minibatch for the health watch: its metrics, and everything they were computed from."""

    phase: Literal["sample", "credit", "update"]
    iteration: int
    minibatch: int
    metrics: dict[str, Mean]  # of this phase alone
    state: TrainState  # as it was used; after an update, which leaves the params where it is skipped, the new one
    probe: ProbeMode
    evidence: Evidence


class Submission(Protocol):
    """The grading of one rollout."""

    @property
    def report(self) -> Callable[[EndedRows], object] | None:
        """Start grading completions that ended while others are decoded; None: all wait for the rollout's end."""
        ...

    @property
    def rest(self) -> Callable[[Rollout], Callable[[], Grades]]:
        """Start grading what has not been reported; calling the result waits for all grades."""
        ...


@dataclass(frozen=True)
class GradedAtOnce:
    """A submission that grades whole rollouts."""

    rest: Callable[[Rollout], Callable[[], Grades]]
    report: None = None


class HostCallbacks(NamedTuple):
    """Supply what an iteration needs from the host."""

    next_prompts: Callable[[], PromptBatch]
    submit: Callable[[PromptBatch], Submission]  # before the rollout of these prompts
    find_answers: Callable[[Rollout], AnswerSpan]
    fetch: Callable[[Any], Any]  # device -> numpy
    place: Callable[[Any, str], Any]  # numpy -> device, laid out as "prompts" or "microbatches"
    phase: Callable[[str], AbstractContextManager[Any]]  # times a phase
    probed: Callable[[Rollout, AnswerSpan, np.ndarray], tuple[Rollout, AnswerSpan]] | None = None
    # (rollout, span, problems) -> what importance is measured on, where that is not the rollout itself
    hints: Callable[[Rollout, np.ndarray], Hints] | None = None  # (rollout, problems) -> what the credit method reads
    watch: Callable[[PhaseRecord], None] | None = None  # looks for what is not finite
    load_reference: Callable[[Params], Params] = lambda params: params  # to the device, where it lives elsewhere
    prompt_step: int | None = None  # what widths of prompts are a multiple of; None: rollout.prompt_bucket
