"""Completions of whole groups: as Parquet for pandas or DuckDB, and a few of them as JSON for the report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oarjax.storage.durable import DamagedError, cannot_read, storage_errors, write_durably
from oarjax.system.json import number, to_json
from oarjax.types import Grades, Rollout

FOLDER = "groups"
"""Below a run's folder; files are named by iteration."""
SHOWN = "samples"
"""Below a run's folder: the groups that report.html shows."""
TIMES = 12
"""Iterations of a run of which it shows groups."""


@dataclass(frozen=True)
class ShownCompletion:
    completion: str
    answer: str | None
    reward: float  # NaN = ungraded
    rewards: Mapping[str, float]  # by reward function
    advantage: float
    verdict: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class ShownGroup:
    """A prompt with all its completions."""

    iteration: int
    prompt: str
    reference: str
    completions: Sequence[ShownCompletion]

    @property
    def mean_reward(self) -> float:
        """Mean of the graded completions; NaN without any."""
        graded = [row.reward for row in self.completions if np.isfinite(row.reward)]
        return float(np.mean(graded)) if graded else float("nan")


def shows_groups(iteration: int, iterations: int) -> bool:
    """Return True for about ``TIMES`` iterations of a run, the first and the last among them."""
    return iteration in (1, iterations) or iteration % max(iterations // TIMES, 1) == 0


def write_shown(folder: Path, iteration: int, table: dict[str, Any], *, count: int) -> Path:
    """Write the first ``count`` groups of an iteration's table below a run's folder.

    Raises:
        StorageError: the file cannot be written.
    """
    rewards = [name for name in table if name.startswith("reward/")]
    groups: list[dict[str, Any]] = []
    for row, group in enumerate(table["group"]):
        if group == count:
            break
        if group == len(groups):
            groups.append({"prompt": table["prompt"][row], "reference": table["reference"][row], "completions": []})
        names = ("completion", "answer", "reward", "advantage", "verdict", "tokens", "ended")
        completion = {name: table[name][row] for name in names}
        completion["rewards"] = {name.removeprefix("reward/"): table[name][row] for name in rewards}
        groups[-1]["completions"].append(completion)
    path = folder / SHOWN / f"{iteration:06d}.json"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, to_json({"iteration": iteration, "groups": groups}) + "\n")
    return path


def read_shown(folder: Path) -> list[ShownGroup]:
    """Read the groups of a run's folder, by iteration.

    Raises:
        DamagedError: a file is not what a run wrote.
        StorageError: a file cannot be read.
    """
    groups = []
    for path in sorted((folder / SHOWN).glob("*.json")):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            groups += [_group(int(tree["iteration"]), group) for group in tree["groups"]]
        except OSError as error:
            raise cannot_read(path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(
                f"{path} is not what a run wrote ({error}); put a good copy there, or remove it"
            ) from None
    return groups


def _group(iteration: int, tree: dict[str, Any]) -> ShownGroup:
    rows = []
    for row in tree["completions"]:
        numbers: dict[str, Any] = {name: number(row[name]) for name in ("reward", "advantage")}
        rewards = {str(name): number(value) for name, value in row["rewards"].items()}
        rows.append(ShownCompletion(**(row | numbers | {"rewards": rewards})))
    return ShownGroup(iteration, str(tree["prompt"]), str(tree["reference"]), rows)


def group_table(
    iteration: int,
    rollout: Rollout,
    grades: Grades,
    advantages: np.ndarray,
    *,
    prompts: Sequence[str],
    references: Sequence[str],
    texts: Sequence[str],
) -> dict[str, Any]:
    """Collect the columns of an iteration's completions; each of its groups is a number in ``group``.

    Args:
        prompts, references: of each group.
        texts: of each completion.
    """
    size = len(texts) // len(prompts)
    return {
        "iteration": [iteration] * len(texts),
        "group": [row // size for row in range(len(texts))],
        "prompt": [prompts[row // size] for row in range(len(texts))],
        "completion": list(texts),
        "answer": list(grades.answers),
        "reference": [references[row // size] for row in range(len(texts))],
        "reward": grades.rewards.astype(float),
        **{f"reward/{name}": values.astype(float) for name, values in grades.per_reward.items()},
        "advantage": np.asarray(advantages, float),
        "verdict": list(grades.verdicts),
        "note": list(grades.notes),
        "tokens": np.asarray(rollout.completion).sum(1).astype(int),
        "ended": np.asarray(rollout.ended),
    }


def write_groups(folder: Path, iteration: int, table: dict[str, Any]) -> Path:
    """Write an iteration's table below a run's folder, whole or not at all; NaN (ungraded) is null.

    Raises:
        StorageError: it cannot be written.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    path = folder / FOLDER / f"{iteration:06d}.parquet"
    columns = {name: pyarrow.array(values, from_pandas=True) for name, values in table.items()}
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = path.with_suffix(".part")
        parquet.write_table(pyarrow.table(columns), partial_file, compression="zstd")
        os.replace(partial_file, path)
    return path
