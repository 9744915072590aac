"""Mix the rows of several data sets by weight, and draw those less often that are too easy or too hard.

Grain decides whose turn it is, and each data set's order. Both are functions of a position, so a saved position is a
few counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from oarjax.data.rows import DataError


def draw_share(
    mean: float | None,
    *,
    easy_above: float | None = None,
    easy_share: float = 1.0,
    hard_below: float | None = None,
    hard_share: float = 1.0,
) -> float:
    """Return the share of a problem's turns in which it is drawn, by the mean of its earlier rewards.

    Args:
        mean: of the earlier rewards; None without any, which is drawn in every turn.
        easy_above: problems of this mean or a higher one are easy; None = none is.
        easy_share: of easy problems, 0 .. 1.
        hard_below: problems of this mean or a lower one are hard; None = none is.
        hard_share: of hard problems, 0 .. 1.
    """
    if mean is None:
        return 1.0
    if easy_above is not None and mean >= easy_above:
        return easy_share
    return hard_share if hard_below is not None and mean <= hard_below else 1.0


def check_position(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Compare a saved position with the data and settings of this run.

    Raises:
        DataError: it was saved with others.
    """
    saved = {name: state.get(name) for name in identity}
    if saved != identity:
        raise DataError(
            f"data: the saved position belongs to {saved}, but this run has {identity}; resume with the data, weights, "
            "batch and seed that it was saved with"
        )


class MixedRows:
    """Yield endless batches of row numbers of several data sets that lie one after the other.

    Every turn belongs to a data set, in proportion to its weight, and takes the next row of its order. A row with a
    share below 1 is skipped in the other turns, by a number that depends on the seed and the place in the order alone.
    Skipping changes no data set's share. Once a whole epoch of a data set was skipped, the next row is taken.

    Args:
        sizes: rows of each data set.
        weights: of each, > 0.
        batch: rows of a batch.
        seed: of all orders.
        shuffle: draw each data set in random order, each row once before any twice.
        share: of a row number, 0 .. 1, asked at every turn; None = 1.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        batch: int,
        seed: int,
        shuffle: bool,
        share: Callable[[int], float] | None = None,
    ) -> None:
        orders = [grain.MapDataset.range(rows).seed((seed + part) % 2**32) for part, rows in enumerate(sizes)]
        self._orders: list[Any] = [(order.shuffle() if shuffle else order).repeat() for order in orders]
        turns = [grain.MapDataset.source([part]).repeat() for part in range(len(sizes))]
        self._turns: Any = grain.MapDataset.mix(turns, list(weights))
        self._sizes, self._firsts = list(sizes), np.cumsum([0, *sizes])[:-1].tolist()
        self._batch, self._seed, self._share = batch, seed, share
        self._identity = {"sizes": self._sizes, "weights": list(weights), "batch": batch, "seed": seed}
        self._identity["shuffle"] = shuffle
        self._taken, self._read = 0, [0] * len(sizes)

    def next_rows(self) -> list[int]:
        return [self._next_row() for _ in range(self._batch)]

    def _next_row(self) -> int:
        part = int(self._turns[self._taken])
        self._taken += 1
        for _ in range(self._sizes[part]):
            row, position = self._next_of(part)
            share = 1.0 if self._share is None else self._share(row)
            if share == 1 or np.random.default_rng([self._seed, part, position]).random() < share:
                return row
        return self._next_of(part)[0]

    def _next_of(self, part: int) -> tuple[int, int]:
        """Read the next row of a data set; return its number and its place in the order."""
        position = self._read[part]
        self._read[part] += 1
        return self._firsts[part] + int(self._orders[part][position]), position

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values, equal on every process."""
        return {**self._identity, "taken": self._taken, "read": list(self._read)}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a saved position, as ``check_position`` allows."""
        check_position(state, self._identity)
        self._taken, self._read = int(state["taken"]), [int(count) for count in state["read"]]
