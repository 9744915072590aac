"""Train on rollouts from files: the form of a run's records, as JSON lines or Parquet; see docs/rollouts.md.

The files say which prompts an iteration has: their groups, in order, ``rollout.prompts`` at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from oarjax.data.problems import Problem
from oarjax.data.rows import DataError, parquet_rows
from oarjax.data.streams import Encoded, bucketed, pad_prompts
from oarjax.rollout.source import Batch, Report, RowId, Spent, Turn
from oarjax.sources.records import place_of, turn_of, whole_numbers
from oarjax.sources.turns import Rules, check_turn
from oarjax.storage.durable import read_lines
from oarjax.types import Params, PromptBatch

FIELD = "rollout.from"
NEEDED = ("prompt", "tokens", "logps", "finish")
TAUGHT = (*NEEDED, "teacher_logps")
"""Fields of a line, and those where the teacher's log-probs are recorded, too."""


class Group(NamedTuple):
    """The completions of a prompt."""

    problem: Problem
    prompt: list[int]
    turns: list[Turn]


def recorded_files(names: Sequence[str], *, run: Path) -> list[Path]:
    """Return the files that a config names, those of folders in the order of their names.

    Args:
        run: the run's own folder, which holds records that it writes and removes itself.

    Raises:
        DataError: one is missing or the run's own, or a folder has none.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        inside = sorted(p for p in path.glob("*") if p.suffix in (".jsonl", ".parquet")) if path.is_dir() else [path]
        if not inside or not all(p.is_file() for p in inside):
            raise DataError(f"{FIELD}: expected a .jsonl or .parquet file, or a folder of them, got {name}")
        if any(p.resolve().is_relative_to((run / "rollouts").resolve()) for p in inside):
            raise DataError(f"{FIELD}: {name} are records that this run writes and removes; set another run_dir")
        files += inside
    return files


def read_groups(
    files: Sequence[Path],
    encoded: Encoded,
    *,
    group_size: int,
    max_new: int,
    rules: Rules,
    needed: Sequence[str] = NEEDED,
) -> list[Group]:
    """Read groups in the order of files, iterations, attempts and rows.

    Args:
        encoded: problems that they are of.
        rules: what a turn must be.
        needed: fields that every line has.

    Raises:
        DataError: a line is no turn of this policy and of these problems, or a group is not complete.
    """
    by_prompt = {tuple(ids): problem for ids, problem in zip(encoded.prompts, encoded.problems)}
    prompts = {problem.index: tuple(ids) for ids, problem in zip(encoded.prompts, encoded.problems)}
    unread = dict.fromkeys({"experts", "teacher_logps"}.difference(needed))
    groups: list[Group] = []
    for path in files:
        rows = sorted(_rows(path).items())
        for start in range(0, len(rows), group_size):
            part = [row for _, row in rows[start : start + group_size]]
            location, prompt, turns = part[0][0], (), []
            for where, line in part:
                try:
                    if lacking := [name for name in needed if line.get(name) is None]:
                        raise ValueError(f"lacks {' and '.join(lacking)}")
                    turns.append(turn_of({**line, **unread}))
                    check_turn(turns[-1], max_new, rules)
                    ids = tuple(whole_numbers("prompt", line["prompt"]).tolist())
                    prompt = prompt or ids
                    if not ids or line["turn"] != 0 or ids != prompt:
                        raise ValueError(f"expected {group_size} completions of a prompt, one turn each, in a row")
                    if not isinstance(line.get("problem"), int | None):
                        raise ValueError(f"expected problem as a whole number, got {line['problem']!r:.60}")
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
                    raise DataError(f"{where}: {kind}{error}") from None
            number = part[0][1].get("problem")
            problem = by_prompt.get(prompt) if number is None else encoded.by_index.get(number)
            if problem is None or prompts[problem.index] != prompt:
                raise DataError(
                    f"{location}: data.train has no such prompt, rendered as the config says; set its dataset"
                )
            if len(turns) < group_size:
                raise DataError(f"{location}: {len(turns)} completions, expected rollout.group_size = {group_size}")
            groups.append(Group(problem, list(prompt), turns))
    return groups


def _rows(path: Path) -> dict[RowId, tuple[str, dict[str, Any]]]:
    """Return the lines of turns by their ids, with their places; of two lines of a turn the later one counts."""
    rows = {}
    for number, (where, line) in enumerate(_lines(path)):
        if "spent" not in line or line.get("tokens") is not None:
            line = {"iteration": 0, "attempt": 0, "row": number, "turn": 0, "finish": None, **line}
            try:
                rows[place_of(line)] = (where, line)
            except ValueError as error:
                raise DataError(f"{where}: {error}") from None
    return rows


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".parquet":
        yield from parquet_rows(path, FIELD)
    else:
        yield from ((f"{path}, line {number}", line) for number, line in enumerate(read_lines(path), 1))


class RecordedRollouts:
    """Yield the prompts of recorded groups, and draw what is recorded of them: a stream of prompts and a source.

    Args:
        prompts: groups per batch.
        bucket: prompt widths are multiples of it.
    """

    together = False

    def __init__(self, groups: Sequence[Group], *, prompts: int, bucket: int, pad_id: int) -> None:
        self._groups, self._prompts, self._bucket, self._pad_id = groups, prompts, bucket, pad_id
        self._position, self._given = 0, list[Group]()

    def __next__(self) -> tuple[PromptBatch, list[Problem]]:
        start = self._position
        self._given = list(self._groups[start : start + self._prompts])
        self._position += self._prompts
        if len(self._given) < self._prompts:
            raise DataError(f"{FIELD}: {len(self._groups)} groups are used up; lower iterations, or add files")
        ids, problems = [group.prompt for group in self._given], [group.problem for group in self._given]
        length = bucketed(ids, self._bucket)
        numbers = [problem.index for problem in problems]
        return pad_prompts(ids, length=length, pad_id=self._pad_id, problems=numbers), problems

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"groups": len(self._groups), "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a saved position."""
        self._position = state["position"]

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Return the recorded turns of the prompts that were yielded last."""
        turns = (turn for group in self._given for turn in group.turns)
        return [turn._replace(id=RowId(batch.iteration, batch.attempt, b)) for b, turn in enumerate(turns)]

    def sync(self, params: Params, version: int) -> None:
        """Return: what is recorded was drawn by others."""

    def spent(self) -> Spent:
        """Return no counts."""
        return Spent()

    def close(self) -> None:
        """Return: nothing is open."""
