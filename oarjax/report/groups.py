"""Completions of whole groups as Parquet: one file per iteration, one row per completion, for pandas or DuckDB."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oarjax.runs.durable import storage_errors
from oarjax.types import Grades, Rollout

FOLDER = "groups"
"""Below a run's folder; files are named by iteration."""


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
        beside = path.with_suffix(".part")
        parquet.write_table(pyarrow.table(columns), beside, compression="zstd")
        os.replace(beside, path)
    return path
