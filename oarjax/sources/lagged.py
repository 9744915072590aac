"""Draw an iteration's rollouts before the iterations that come first are learned from: overlap as a schedule.

With a lag of k, iteration i learns from rollouts of the policy that has learned from max(0, i - 1 - k) iterations. So
at the beginning of iteration i, when the policy has learned from i - 1, those of iteration i + k are drawn from it: by
an engine in the background, while iteration i is learned from; by the run's own sampler, or in a run of several
processes, before that, with the same rollouts. Whoever is faster waits, and nothing is discarded.

No older parameters are kept: what a run has drawn ahead is in its records, complete before the checkpoint of an
iteration is written. A run that resumes takes it from there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from oarjax.rollout.source import Batch, Report, Source, Spent, Turn
from oarjax.types import Params, PromptBatch


@runtime_checkable
class Prompts(Protocol):
    """Yields the prompts of one iteration after another, and can resume."""

    def __next__(self) -> tuple[PromptBatch, Any]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class PromptsAhead:
    """Read prompts before their iteration; the position is that of the first prompts not taken yet."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._read: deque[tuple[dict[str, Any], tuple[PromptBatch, Any]]] = deque()

    def __iter__(self) -> Iterator[tuple[PromptBatch, Any]]:
        return self

    def __next__(self) -> tuple[PromptBatch, Any]:
        """Take the next prompts."""
        self.ahead(0)
        return self._read.popleft()[1]

    def ahead(self, number: int) -> PromptBatch:
        """Return the prompts that come after so many others, without taking any."""
        while len(self._read) <= number:
            position = self._prompts.state()
            self._read.append((position, next(self._prompts)))
        return self._read[number][1][0]

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return self._read[0][0] if self._read else self._prompts.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a saved position."""
        self._read.clear()
        self._prompts.restore(state)


@runtime_checkable
class DrawsInBackground(Protocol):
    """A source that draws while the devices compute."""

    def ready(self) -> None:
        """Take the parameters now, so that draws read nothing of them."""
        ...

    def cancel(self) -> None:
        """Give up what is being drawn."""
        ...


def why_in_turn(background: DrawsInBackground | None, processes: int) -> str | None:
    """Say why nothing is drawn while others are learned from; None if it is."""
    if processes > 1:
        return f"a run of {processes} processes draws and learns in turn"
    return "the run's own sampler draws on the devices that learn" if background is None else None


class DrawnAhead(NamedTuple):
    """The rollouts of an iteration, and what drawing them took."""

    turns: list[Turn]
    spent: Spent


class LaggedSource:
    """A source whose rollouts are drawn a lag ahead. Rows are not reported as they end, but graded in their iteration.

    Args:
        lag: iterations, 1 or more.
        last: iteration of the run; later ones are not drawn.
        prompts: of the iterations.
        batch_of: (iteration, its prompts) -> what is drawn of it.
        background: draws for the source that is bound, where that can be done in a thread.
        say: prints a message.
    """

    def __init__(
        self,
        lag: int,
        last: int,
        prompts: PromptsAhead,
        batch_of: Callable[[int, PromptBatch], Batch],
        *,
        background: DrawsInBackground | None = None,
        say: Callable[[str], object],
    ) -> None:
        self._lag, self._last, self._prompts, self._batch_of, self._say = lag, last, prompts, batch_of, say
        self._background = background if why_in_turn(background, jax.process_count()) is None else None
        self._source: Source | None = None
        self._held: dict[int, DrawnAhead] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._spent = Spent()

    def bind(self, source: Source) -> LaggedSource:
        """Draw with this source from now on; what has been drawn stays."""
        self.settle()
        self._source = source
        return self

    def settle(self) -> None:
        """Wait until all that is being drawn is there, and raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def together(self) -> bool:
        """True if the source draws all rows of a batch together."""
        return self._bound.together

    def sync(self, params: Params, version: int) -> None:
        """Draw with these parameters from now on."""
        self._bound.sync(params, version)

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Return the turns of an iteration, and draw those of the one that is a lag later."""
        self.settle()
        iterations = [batch.iteration + n for n in range(self._lag + 1) if batch.iteration + n <= self._last]
        batches = [batch] + [self._batch_of(n, self._prompts.ahead(n - batch.iteration - 1)) for n in iterations[1:]]
        undrawn = [b for b in batches if b.iteration not in self._held]
        if undrawn and undrawn[0] is batch:  # the run has just begun, or resumes
            self._draw_all(undrawn[:1])
            undrawn = undrawn[1:]
        if self._background is None or not undrawn:
            self._draw_all(undrawn)
        else:
            self._background.ready()
            self._thread = threading.Thread(target=self._work, args=(undrawn,), name="lagged", daemon=True)
            self._thread.start()
        ahead = self._held.pop(batch.iteration)
        self._spent = self._spent.plus(ahead.spent)
        return ahead.turns

    def spent(self) -> Spent:
        """Return the counts of the rollouts that were returned since the last call."""
        spent, self._spent = self._spent, Spent()
        return spent

    def close(self) -> None:
        """Give up what is being drawn; rows that are recorded stay so."""
        if self._thread is not None and self._background is not None:
            self._background.cancel()
            self._thread.join()
            self._thread = None

    def _draw_all(self, batches: list[Batch]) -> None:
        for batch in batches:
            turns = self._bound.draw(batch)
            self._held[batch.iteration] = DrawnAhead(turns, self._bound.spent())
            version, expected = max(int(turn.versions.max()) for turn in turns), max(0, batch.iteration - 1 - self._lag)
            if version > expected:
                self._say(
                    f"update.lag: the rollouts of iteration {batch.iteration} are drawn after {version} iterations and "
                    f"not {expected}: those drawn ahead are not recorded, because the run was extended, or are lost"
                )

    def _work(self, batches: list[Batch]) -> None:
        try:
            self._draw_all(batches)
        except BaseException as error:  # raised by ``settle``
            self._failure = error

    @property
    def _bound(self) -> Source:
        if self._source is None:
            raise ValueError("LaggedSource: expected a source, call bind first")
        return self._source
