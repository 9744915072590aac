"""Record rollouts on disk before an update uses them, so that a resumed run draws nothing twice.

Without them an engine of others, which draws with noise of its own, would give the iterations that a resumed run
repeats other rollouts. Each iteration has one file of JSON lines, to which lines are only added: one per turn, and one
per batch once all of it is there. ``docs/rollouts.md`` describes them; of two lines of the same turn the later counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from oarjax.rollout.source import Batch, EndedRows, Report, Request, RowId, Source, Spent, Turn, continuing
from oarjax.storage.durable import (
    DamagedError,
    Failures,
    Lines,
    check_guards,
    prune_numbered,
    read_lines,
    storage_errors,
    sync_folder,
)
from oarjax.system.json import numbers, plain_floats
from oarjax.system.processes import gather, is_first
from oarjax.types import Params

PLACE = ("iteration", "attempt", "row", "turn")


def line_of(request: Request, turn: Turn, *, problem: int | None = None, report: int | None = None) -> dict[str, Any]:
    """Return the line of a turn."""
    versions = np.unique(turn.versions)
    line = {
        **request.id._asdict(),
        "problem": problem,
        "prompt": request.tokens.tolist(),
        "prompt_length": request.prompt_length,
        "key": list(request.key),
        "tokens": turn.tokens.tolist(),
        "logps": plain_floats(turn.logps.tolist()),
        "version": int(versions[0]) if len(versions) == 1 else turn.versions.tolist(),
        "finish": turn.finish,
        "report": report,
    }
    if turn.whole_logps is not None:
        line["whole_logps"] = plain_floats(turn.whole_logps.tolist())
    if turn.teacher_logps is not None:
        line["teacher_logps"] = plain_floats(turn.teacher_logps.tolist())
    return line if turn.experts is None else line | {"experts": turn.experts.tolist()}


def turn_of(line: Mapping[str, Any]) -> Turn:
    """Read the line of a turn.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    tokens, logps = whole_numbers("tokens", line["tokens"]), np.asarray(numbers(line["logps"]), np.float32)
    whole_logps, experts, teacher = (line.get(name) for name in ("whole_logps", "experts", "teacher_logps"))
    versions = whole_numbers("version", np.atleast_1d(line.get("version") or 0))
    if logps.shape != tokens.shape or line["finish"] not in ("stop", "length"):
        raise ValueError(f"{len(logps)} log-probs of {len(tokens)} tokens, finish {line['finish']!r}")
    if whole_logps is not None and len(whole_logps) != len(tokens):
        raise ValueError(f"{len(whole_logps)} whole_logps of {len(tokens)} tokens")
    return Turn(
        place_of(line),
        tokens,
        logps,
        np.broadcast_to(versions, tokens.shape).copy(),
        line["finish"],
        None if whole_logps is None else np.asarray(numbers(whole_logps), np.float32),
        None if experts is None else whole_numbers("experts", experts, axes=3),
        None if teacher is None else np.asarray(numbers(teacher), np.float32),
    )


def place_of(line: Mapping[str, Any]) -> RowId:
    """Read which turn a line is of.

    Raises:
        ValueError, KeyError: it does not say.
    """
    row_id = RowId(*(line[name] for name in PLACE))
    if any(type(number) is not int or number < 0 for number in row_id):
        raise ValueError(f"expected {', '.join(PLACE)} as whole numbers from 0, got {row_id!r:.200}")
    return row_id


def whole_numbers(name: str, values: Any, *, axes: int = 1) -> Int32[np.ndarray, "..."]:
    """Read whole numbers of a line as an array.

    Raises:
        ValueError: they are others, not of so many axes, or negative.
    """
    array = np.asarray(values)
    if array.ndim != axes or (array.size and (array.dtype.kind != "i" or not 0 <= array.min() <= array.max() < 2**31)):
        raise ValueError(f"expected {name} as whole numbers from 0, got {values!r:.60}")
    return array.astype(np.int32)


class Known(NamedTuple):
    """The recorded parts of a batch."""

    lines: dict[int, dict[str, Any]]  # of its rows
    spent: Spent | None  # by all of it; None: rows may be missing


class Records:
    """The records of a run; only the first process writes and reads them.

    Args:
        folder: created if missing, in the run's folder.
        failures: handles rollouts that cannot be written.
        say: prints a message.
    """

    def __init__(self, folder: Path, *, failures: Failures, say: Callable[[str], object]) -> None:
        check_guards(folder)
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
        self._folder, self._failures, self._say = folder, failures, say

    def known(self, batch: Batch, requests: list[Request]) -> Known:
        """Return what is recorded of a batch, on every process; nothing if its record is of other prompts or keys."""

        def read() -> Any:
            lines: dict[int, dict[str, Any]] = {}
            spent = None
            path = self._path(batch.iteration)
            try:
                for line in read_lines(path):
                    if line["attempt"] == batch.attempt and "spent" in line:
                        spent = Spent(**line["spent"])
                        if not all(isinstance(count, int | float) for count in spent):
                            raise ValueError("its counts are no numbers")
                    elif line["attempt"] == batch.attempt:
                        if len(turn_of(line).tokens) > batch.max_new or not isinstance(line["report"], int | None):
                            raise ValueError(f"too many tokens, or report {line['report']!r:.60}")
                        lines[line["row"]] = line
                mismatched = {b for b, line in lines.items() if b >= len(requests) or not _answers(line, requests[b])}
            except (DamagedError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._say(f"{path} cannot be read ({error}); drawing iteration {batch.iteration} again")
                path.unlink(missing_ok=True)
                return [{}, None]
            if mismatched:
                self._say(f"{path}: these rollouts are of other prompts or keys; drawing again")
                return [{}, None]
            return [lines, spent]

        lines, spent = gather(read() if is_first() else None)[0]
        return Known({int(b): line for b, line in lines.items()}, None if spent is None else Spent(*spent))

    def append(self, iteration: int, lines: Iterable[Mapping[str, Any]], *, sync: bool = True) -> None:
        """Add lines to the record of an iteration; with ``sync`` all of it is on the disk on return."""
        if not is_first():
            return
        path = self._path(iteration)
        with self._failures.handled(), storage_errors(path):
            is_new = not path.exists()
            with closing(Lines(path)) as file:
                for line in lines:
                    file.write(line)
                if sync:
                    file.sync()
            if is_new:
                sync_folder(path.parent)

    def prune(self, before: int) -> None:
        """Remove the records of iterations up to ``before``, which no kept checkpoint can repeat."""
        prune_numbered(self._folder, ".jsonl", before)

    def _path(self, iteration: int) -> Path:
        return self._folder / f"{iteration:06d}.jsonl"


def _answers(line: Mapping[str, Any], request: Request) -> bool:
    return line["prompt"] == request.tokens.tolist() and line["key"] == list(request.key)


class RecordedSource:
    """A source that records its turns, and draws only those that are not recorded.

    Recorded rows are reported in the batches in which they were once reported, so that their verdicts are found.
    """

    def __init__(self, source: Source, records: Records) -> None:
        self._source, self._records, self._spent = source, records, Spent()

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Return the recorded turns of a batch, and draw the others; all are on the disk on return."""
        requests, problems = batch.requests, np.repeat(np.asarray(batch.prompts.problem), batch.group_size)
        recorded = self._records.known(batch, requests)
        turns = {b: turn_of(line) for b, line in recorded.lines.items()}
        again = report if self._source.together or is_first() else None  # who was told of them when they were drawn
        missing_rows = np.setdiff1d(np.arange(len(requests)), list(turns))
        if recorded.spent is not None and not len(missing_rows):
            self._spent = self._spent.plus(recorded.spent)
            _report_again(batch, recorded, turns, again)
            return [turns[b] for b in sorted(turns)]
        numbers = {b: line["report"] for b, line in recorded.lines.items()}
        number, written_rows = count(1 + max((n for n in numbers.values() if n is not None), default=-1)), set[int]()

        def line(turn: Turn) -> dict[str, Any]:
            b = turn.id.row
            return line_of(requests[b], turn, problem=int(problems[b]), report=numbers.get(b))

        def keep(news: EndedRows) -> None:
            numbers.update(dict.fromkeys(news.rows.tolist(), next(number)))
            if news.turns:
                self._records.append(batch.iteration, map(line, news.turns), sync=False)
                written_rows.update(turn.id.row for turn in news.turns)
            if report is not None:
                report(news)

        if self._source.together:
            numbers.clear()
            number = count()
        else:
            _report_again(batch, recorded, turns, again)
        new_turns = self._source.draw(batch, keep, rows=missing_rows)
        spent = self._source.spent()
        if turns and not self._source.together:
            spent = spent.plus(Spent(redrawn=len(missing_rows)))
        lines = [line(turn) for turn in new_turns if turn.id.row not in written_rows]
        key = {"iteration": batch.iteration, "attempt": batch.attempt}
        self._records.append(batch.iteration, [*lines, {**key, "spent": spent._asdict()}])
        self._spent = self._spent.plus(spent)
        turns |= {turn.id.row: turn for turn in new_turns}
        return [turns[b] for b in sorted(turns)]

    def go_on(self, batch: Batch, requests: Sequence[Request]) -> list[Turn]:
        """Draw further turns. They are not recorded: the run's own sampler draws them again bit for bit."""
        turns = continuing(self._source).go_on(batch, requests)
        self._spent = self._spent.plus(self._source.spent())
        return turns

    @property
    def together(self) -> bool:
        """True if the source draws all rows of a batch together."""
        return self._source.together

    def sync(self, params: Params, version: int) -> None:
        """Draw with these parameters from now on."""
        self._source.sync(params, version)

    def spent(self) -> Spent:
        """Return the counts of the draws since the last call, those that are replayed as they were recorded."""
        spent, self._spent = self._spent, Spent()
        return spent

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _report_again(batch: Batch, recorded: Known, turns: dict[int, Turn], report: Report | None) -> None:
    """Report recorded rows in the batches of their first draw."""
    by_number: dict[int, list[int]] = {}
    for b, line in sorted(recorded.lines.items()):
        if line["report"] is not None:
            by_number.setdefault(line["report"], []).append(b)
    if report is None or not by_number:
        return
    table = EndedTable(batch)
    for number in sorted(by_number):
        report(table.ended([turns[b] for b in by_number[number]]))


class EndedTable:
    """The rows of a batch that have ended, on the host."""

    def __init__(self, batch: Batch) -> None:
        rows = len(batch.prompts.problem) * batch.group_size
        self._tokens, self._lengths = np.zeros((rows, batch.max_new), np.int32), np.zeros(rows, np.int32)
        self._ended = np.zeros(rows, bool)

    def ended(self, turns: list[Turn]) -> EndedRows:
        """Enter turns, in the order of their rows, and return their report."""
        for turn in turns:
            b = turn.id.row
            self._tokens[b, : len(turn.tokens)], self._lengths[b] = turn.tokens, len(turn.tokens)
            self._ended[b] = turn.finish == "stop"
        rows = np.asarray([turn.id.row for turn in turns])
        arrays: Any = (self._tokens, self._lengths, self._ended)
        return EndedRows(rows, *arrays, turns=tuple(turns))
