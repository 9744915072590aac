"""Decide which rows are decoded, and the rows and slots of the programs of a segmented rollout, on the host.

Plain numpy, a function of the shapes and of which rows are done, so every process decides the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

FEWEST = 8
"""Rows below which none are dropped: a matrix product of fewer takes a CPU or a TPU just as long."""


SHORT = 128
"""Tokens of completions below which no rows are dropped at all: that saves less than its programs take to compile."""


TILE = 128
"""Slots of a cache are whole multiples of this, if there are so many: the lanes of a TPU."""


def cache_step(max_new: int, slots: int | None) -> int:
    """Return the slots that are read at first: ``slots``, or an eighth of max_new and at least 128."""
    return min(slots or max(128, -(-max_new // 8)), max(max_new - 1, 1))


def fewest_decoded(rows: int, max_new: int, *, share: float = 0.0) -> int:
    """Return the rows below which none of ``rows`` are dropped: this share, and at least FEWEST; all where SHORT."""
    return rows if max_new < SHORT else max(FEWEST, int(share * rows))


class RowBucket(NamedTuple):
    """Rows of a decode program."""

    rows: int  # of each block
    share: int  # neighbouring rows that read one row of the prefix


class DecodePlan(NamedTuple):
    """Sizes of the programs for rollouts of one shape."""

    blocks: int  # of rows, each on its own devices
    block: int  # rows of each, decoded at the moment or not
    group: int  # rows per prompt
    max_new: int
    cache_bucket: int
    buckets: tuple[RowBucket, ...]  # most rows first

    @property
    def together(self) -> bool:
        """True if all rows are decoded from the start, in step with one another."""
        return self.buckets[0].rows == self.block

    def slots_after(self, slots: int, written: int) -> int:
        """Return the next size of a full cache of ``slots``, of which rows still need the last ``written``."""
        return self.size_of(slots + 1 if self.together else self.rounded(written) + self.cache_bucket)

    def size_of(self, needed: int) -> int:
        """Return the smallest size of a cache with ``needed`` slots."""
        return next(size for size in self.cache_sizes() if size >= needed)

    def cache_sizes(self) -> list[int]:
        """List the numbers of slots that programs read: each is twice the one before, but for the last."""
        longest = max(self.max_new - 1, 1)
        end = longest if self.together else self.rounded(longest) + self.cache_bucket
        doublings = max(-(-end // self.cache_bucket) - 1, 0).bit_length()
        return [self.cache_bucket << number for number in range(doublings)] + [end]

    def rounded(self, slots: int) -> int:
        """Round slots up to whole buckets of the cache."""
        return -(-slots // self.cache_bucket) * self.cache_bucket

    def largest(self) -> tuple[int, int]:
        """Return the rows and slots of the cache, whole tiles of a TPU: it stores others in another order of axes."""
        slots = self.sizes()[0][1]
        return self.blocks * self.buckets[0].rows, slots if slots < TILE else -(-slots // TILE) * TILE

    @property
    def no_drop(self) -> Any:
        """Return the slots to drop where none are; None where none ever are."""
        return None if self.together else np.int32(0)

    def in_place(self) -> Int[np.ndarray, "D R"]:
        """Return for every row of the cache its own place."""
        rows = np.arange(self.buckets[0].rows, dtype=np.int32)
        return np.broadcast_to(rows, (self.blocks, len(rows)))

    def padded(self, places: Int[np.ndarray, "D r"]) -> Int[np.ndarray, "D R"]:
        """Return the places of all rows of the cache, -1 for those behind ``places``."""
        padding = self.buckets[0].rows - places.shape[1]
        return np.pad(places, ((0, 0), (0, padding)), constant_values=-1)

    def sizes(self) -> list[tuple[RowBucket, int]]:
        """List (bucket, slots) of every possible decode program, the largest first."""
        return [(bucket, slots) for bucket in self.buckets for slots in reversed(self.cache_sizes())]

    def full_steps(self) -> dict[int, float]:
        """Return the steps of a rollout whose rows all go to max_new, by slots: two programs stand for all.

        What a step reads grows in proportion to its window, so that the shortest and the longest one, in these shares,
        read what the programs between them do. Where rows wait for others, the longest stands for all.
        """
        sizes, steps = self.cache_sizes(), float(self.max_new - 1)
        shortest, longest = sizes[0], sizes[-1]
        if not self.together:
            return {longest: steps * -(-self.block // self.buckets[0].rows)}
        if longest == shortest:
            return {longest: steps}
        slots_read = sum((size - smaller) * size for size, smaller in zip(sizes, [0, *sizes]))
        at_longest = (slots_read - steps * shortest) / (longest - shortest)
        return {longest: at_longest, shortest: steps - at_longest}


def make_plan(
    *,
    prompts: int,
    width: int,
    group: int,
    max_new: int,
    cache_bucket: int,
    slots: int | None,
    blocks: int,
    fewest: int = FEWEST,
) -> DecodePlan:
    """Choose buckets of rows for ``prompts`` of ``width`` positions: all rows (or ``slots``), then powers of two.

    Neighbouring rows of a prompt read its prefix together: half as many as remain of a group on average, so that few
    slots stay empty when fewer remain. A bucket whose copies of the prefix need more memory than the rows that it
    drops is left out.
    """
    blocks = blocks if prompts % blocks == 0 else 1
    block = prompts // blocks * group
    most_rows = block if slots is None else min(block, max(slots // blocks, 1))

    def memory(bucket: RowBucket) -> int:
        return bucket.rows * max_new + bucket.rows // bucket.share * width

    buckets, rows = [RowBucket(most_rows, group if most_rows == block else 1)], 1
    while rows * 2 < most_rows:
        rows *= 2
    while rows < most_rows and rows >= 1 and blocks * rows >= fewest:
        largest_share = group * rows // (2 * block) if most_rows == block else 1
        share = max(s for s in range(1, max(largest_share, 1) + 1) if group % s == 0 and rows % s == 0)
        if memory(RowBucket(rows, share)) <= memory(buckets[0]):
            buckets.append(RowBucket(rows, share))
        rows //= 2
    return DecodePlan(blocks, block, group, max_new, cache_bucket, tuple(buckets))


# --- Which rows are decoded ------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Rows in the slots of a program: numbers within their block, -1 for an empty slot."""

    bucket: RowBucket
    rows: Int[np.ndarray, "D r"]

    def among(self, block: int) -> Bool[np.ndarray, "D n"]:
        """Mark, among all rows, those that have a slot."""
        return (self.rows[:, :, None] == np.arange(block)).any(1)

    def places(self, previous: Layout) -> Int[np.ndarray, "D r"]:
        """Return for every slot the one that its row had before, -1 if it had none."""
        matches = (self.rows[:, :, None] == previous.rows[:, None, :]) & (self.rows >= 0)[:, :, None]
        return np.where(matches.any(2), matches.argmax(2), -1).astype(np.int32)

    def prompts(self, group: int) -> Int[np.ndarray, "D s"]:
        """Return the prompt in the block that every ``share`` neighbouring slots read; any prompt for empty ones."""
        first_rows = self.rows.reshape(len(self.rows), -1, self.bucket.share)[:, :, 0]
        return (np.maximum(first_rows, 0) // group).astype(np.int32)


def first_layout(plan: DecodePlan) -> Layout:
    """Put every row at its own place, or leave all slots empty."""
    rows = np.arange(plan.block) if plan.together else np.full(plan.buckets[0].rows, -1)
    return Layout(plan.buckets[0], np.broadcast_to(rows, (plan.blocks, len(rows))).astype(np.int32))


def next_layout(
    plan: DecodePlan, layout: Layout, alive: Bool[np.ndarray, "D n"], waiting: Bool[np.ndarray, "D n"]
) -> Layout:
    """Return the layout of the next segment: ``layout``, with waiting rows in free slots, or the smallest that fits."""
    if waiting.any():
        rows = layout.rows.copy()
        for d, (slots, queue) in enumerate(zip(rows, waiting)):
            free = np.flatnonzero((slots < 0) | ~alive[d, slots])
            queue = np.flatnonzero(queue)[: len(free)]
            slots[free[: len(queue)]] = queue
        return layout if (rows == layout.rows).all() else Layout(layout.bucket, rows)
    for bucket in reversed(plan.buckets):
        if bucket.rows < layout.bucket.rows:
            slots_by_block = [arrange(np.flatnonzero(block), bucket, group=plan.group) for block in alive]
            if all(len(rows) == bucket.rows for rows in slots_by_block):
                return Layout(bucket, np.stack(slots_by_block))
    return layout


def arrange(rows: Int[np.ndarray, "n"], bucket: RowBucket, *, group: int) -> Int[np.ndarray, "r"]:
    """Put rows into slots, those of a prompt side by side, -1 in empty ones; returns too many if they do not fit."""
    slots: list[int] = []
    for prompt in np.unique(rows // group):
        prompt_rows = rows[rows // group == prompt].tolist()
        slots += prompt_rows + [-1] * (-len(prompt_rows) % bucket.share)
    return np.asarray(slots + [-1] * (bucket.rows - len(slots)), np.int32)


def fewest_left(
    plan: DecodePlan, layout: Layout, alive: Bool[np.ndarray, "D n"], waiting: Bool[np.ndarray, "D n"]
) -> Int[np.ndarray, "D"]:
    """Return, per block, the rows in use at which the next bucket may fit; 0 if there is no smaller one."""
    smaller = next((b for b in plan.buckets if b.rows < layout.bucket.rows), None)
    if smaller is None or waiting.any():
        return np.zeros(plan.blocks, np.int32)
    floors = []
    for block in alive:
        excess = len(arrange(np.flatnonzero(block), smaller, group=plan.group)) - smaller.rows
        floors.append(block.sum() - -(-excess // smaller.share))  # a finished row frees at most that many slots
    return np.asarray(floors, np.int32)
