"""Continuous batching: finished rows leave the batch, waiting ones take their slots, in one cache of the largest size.

``SegmentedSampler`` is a loop on the host over a few jitted programs. It draws what ``sampler.sample_rows`` draws:
noise belongs to row and token, so it does not matter which rows are decoded together.

    prefill   prompts -> their cache, the first token of every row
    decode    up to ``segment`` tokens of the rows in use; ends early once so few are left that a smaller batch fits
    take      the prompts' cache -> copies of some of its rows, for the rows in use once they are fewer or others
    move      rows in use to the front of the cache, waiting ones in place of finished ones, in the same memory
    finish    -> Rollout

A decode program reads a window of the cache: the first rows of every block, and as many of its slots as are needed.
Rows and slots of a program take few values (powers of two, ``cache_bucket`` and its doubles), so that programs are few;
``row_schedule`` has them. The next program depends only on which rows have finished, and every process reads that from
the same array: all run the same programs in the same order, whatever their clocks say.

On a mesh each block of rows stays on its own devices: block d keeps its own rows, and all blocks have as many slots,
so that no cache moves and no device is idle while another has rows left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Key

from oarjax.kernels.decode_cache import Window
from oarjax.models.policy import Policy
from oarjax.rollout.row_schedule import (
    FEWEST,
    DecodePlan,
    RowBucket,
    cache_step,
    fewest_left,
    first_layout,
    make_plan,
    next_layout,
)
from oarjax.rollout.sampler import Decoding, Drawn, Rows, decode_step, empty_cache, first_drawn, prefill, sample_rows
from oarjax.rollout.source import EndedRows, Spent
from oarjax.rollout.table import Table, copied, finish, seated, written_back
from oarjax.types import Params, PromptBatch, Rollout

Keys = Callable[[PromptBatch, Key[Array, ""]], Key[Array, "B"]]
"""(prompts, key of the batch) -> the noise key of every row."""


class Flags(NamedTuple):
    """The only values that the host reads after a program."""

    alive: Bool[Array, "B"]
    steps: Int32[Array, ""]  # decode steps of this program
    tokens: Float[Array, ""]  # drawn in these steps
    attended: Float[Array, ""]  # slots of their own cache that these tokens attended to


class RolloutProgram(NamedTuple):
    """A jitted program of a rollout, its arguments, and the other arrays alive while it runs, as shapes."""

    name: str
    jitted: Any
    args: tuple[Any, ...]
    static: Mapping[str, Any]  # keyword arguments
    held: Any  # arrays of the rollout that are not arguments
    largest: bool = True  # may need more memory than the others
    steps: float = 0.0  # decode steps that it stands for where every row is decoded to the end; 1 without a loop

    def lower(self) -> Any:
        return self.jitted.lower(*self.args, **self.static)


class SegmentedSampler:
    """Draw rollouts in segments. The same seed, settings and mesh give the same bits.

    Args:
        keys_of: returns the noise keys of all rows, from prompts and a key; traced.
        group: rows per prompt.
        segment: maximum number of decode steps of one program, after which the host looks at the rows.
        cache_bucket: slots of the cache that are read at first, and that double; None: an eighth of max_new, at least
            128.
        slots: rows decoded at once, over all devices; None: all. Waiting rows take the place of finished ones.
        rows: sharding of rows; their first axis is divided into as many blocks as it has devices.
        fewest: rows below which none are dropped.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        policy: Policy,
        decoding: Decoding,
        *,
        keys_of: Keys,
        group: int,
        segment: int = 128,
        cache_bucket: int | None = None,
        slots: int | None = None,
        rows: NamedSharding | None = None,
        fewest: int = FEWEST,
    ):
        decoding.check()
        numbers = {"group_size": group, "segment": segment, "cache_bucket": cache_bucket, "slots": slots}
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise ValueError(f"{name}: expected at least 1, got {number}")
        self._policy, self._decoding, self._keys_of, self._group = policy, decoding, keys_of, group
        self._segment, self._slots, self._fewest = min(segment, decoding.max_new), slots, fewest
        self._bucket = cache_step(decoding.max_new, cache_bucket)
        self._blocks, self._spent, self._programs = row_blocks(rows), Spent(), set[tuple[RowBucket, int]]()
        self._rows = rows

        def jitted(function: Any, out: Any, **options: Any) -> Any:
            return jax.jit(function, **options, **({} if rows is None else {"out_shardings": out}))

        everywhere = None if rows is None else NamedSharding(rows.mesh, PartitionSpec())
        self._prefill = jitted(self._prefill_rows, (None, rows, everywhere))
        self._decode = jitted(
            self._decode_rows, (rows, None, everywhere), donate_argnums=(1, 2), static_argnames="slots"
        )
        self._finish = jitted(finish, rows)
        self._copied = jitted(copied, rows)
        self._whole = jitted(self._sample_rows, rows)
        self._empty = jax.jit(partial(empty_cache, policy), static_argnums=(0, 1))
        self._take = jax.jit(policy.caches.take)
        self._move = jax.jit(policy.caches.move, donate_argnums=0)

    def elsewhere(self, policy: Policy, rows: NamedSharding) -> SegmentedSampler:
        """Return the same sampler of a policy on other devices."""
        sizes = {"segment": self._segment, "cache_bucket": self._bucket, "slots": self._slots, "fewest": self._fewest}
        return SegmentedSampler(policy, self._decoding, keys_of=self._keys_of, group=self._group, rows=rows, **sizes)

    def __call__(
        self,
        params: Params,
        prompts: PromptBatch,
        key: Key[Array, ""],
        *,
        report: Callable[[EndedRows], object] | None = None,
    ) -> Rollout:
        """Draw ``group`` completions of every prompt.

        ``report`` is called with the rows that ended, while the device decodes the others. The rows of each call depend
        on the draw alone; those that end last are in the rollout only.
        """
        plan, prompt_cache = self.plan(prompts), None
        prompt_cache, table, flags = self._prefill(params, prompts, key)
        alive = _per_block(plan, jax.device_get(flags.alive))
        layout, prefix, cache = first_layout(plan), prompt_cache, None
        waiting = np.zeros_like(alive) if plan.together else alive.copy()
        start_steps, step = np.zeros(alive.shape, int), 0  # decode steps, when a row got its slot and so far
        slots = filled = 0
        was_alive = np.ones_like(alive)
        while alive.any():
            # A copy: decoding takes the table's memory.
            just_ended = np.flatnonzero(was_alive & ~alive) if report else np.zeros(0, int)
            ended_rows = EndedRows(just_ended, *self._copied(table)) if len(just_ended) else None
            was_alive = alive
            new_layout = next_layout(plan, layout, alive, waiting)
            if new_layout is not layout:
                start_steps[waiting & new_layout.among(plan.block)] = step
                waiting &= ~new_layout.among(plan.block)
                if cache is not None:
                    cache = self._move(cache, plan.padded(new_layout.places(layout)), plan.no_drop)
                prefix = self._take(prompt_cache, new_layout.prompts(plan.group))
                layout = new_layout
            if filled == slots:
                longest = int((step - start_steps)[alive & ~waiting].max())
                size, used = plan.slots_after(slots, longest), slots if plan.together else plan.rounded(longest)
                if cache is None:
                    cache = self._first_cache(plan, like=prompt_cache)
                elif used < slots:
                    cache = self._move(cache, plan.in_place(), np.int32(slots - used))
                slots, filled = size, used
            limit = np.int32(min(self._segment, slots - filled))
            floor = fewest_left(plan, layout, alive, waiting)
            table, cache, flags = self._decode(params, table, cache, prefix, layout.rows, floor, limit, slots=slots)
            if report and ended_rows:
                report(ended_rows)  # nobody waits for the device yet
            flags = jax.device_get(flags)
            alive, steps = _per_block(plan, flags.alive), int(flags.steps)
            step, filled = step + steps, filled + steps
            self._count(plan, layout.bucket, slots, flags)
        return self._finish(prompts, table)

    def plan(self, prompts: PromptBatch) -> DecodePlan:
        """Choose the sizes of the programs for these prompts."""
        count, width = prompts.tokens.shape
        return make_plan(
            prompts=count,
            width=width,
            group=self._group,
            max_new=self._decoding.max_new,
            cache_bucket=self._bucket,
            slots=self._slots,
            blocks=self._blocks,
            fewest=self._fewest,
        )

    def spent(self) -> Spent:
        """Return the counts of the rollouts since the last call."""
        counts, self._spent = self._spent, Spent()
        return counts

    @property
    def decode_programs(self) -> int:
        """Number of decode programs so far in this process, at most row buckets times cache buckets."""
        return len(self._programs)

    def whole(self, params: Params, prompts: PromptBatch, key: Key[Array, ""]) -> Rollout:
        """Draw the same rollout in one program, whose work can be traced: every row until max_new."""
        return self._whole(params, prompts, key)

    def programs(self, params: Params, prompts: PromptBatch, key: Any) -> list[RolloutProgram]:
        """List every program that such prompts may need, with arguments as shapes that are laid out as in a rollout.

        They are in the order of a rollout whose rows end late.

        ``largest`` are, of each kind, those that no other needs more memory than: the decode programs of most slots, of
        all rows and of most copies of prompts. ``steps`` are those of ``DecodePlan.full_steps``.
        """
        plan = self.plan(prompts)
        count, width = prompts.tokens.shape
        _, table, _ = self._prefill.eval_shape(params, prompts, key)
        table = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows), table)
        prompt_cache, cache = self._cache_shapes(count, width), self._cache_shapes(*plan.largest())
        programs = [RolloutProgram("prefill", self._prefill, (params, prompts, key), {}, (), steps=1)]
        counts = [bucket.rows // bucket.share for bucket in plan.buckets]
        most_copies = max(counts[1:] if plan.together else counts, default=0)
        for number, bucket in enumerate(plan.buckets):
            rows, is_first = plan.blocks * bucket.rows, plan.together and number == 0
            copies = rows // bucket.share
            prefix = prompt_cache if is_first else self._cache_shapes(copies, width)
            held = () if is_first else prompt_cache
            if not is_first:
                prompts_of = _integers(plan.blocks, bucket.rows // bucket.share)
                name, live = f"take {copies} of {count} prompts", (table, cache)
                if name not in {program.name for program in programs}:
                    largest = counts[number] == most_copies
                    programs.append(RolloutProgram(name, self._take, (prompt_cache, prompts_of), {}, live, largest))
            layout, floor, limit = _integers(plan.blocks, bucket.rows), _integers(plan.blocks), _integers()
            longest = plan.cache_sizes()[-1]
            for slots in plan.cache_sizes():
                programs.append(
                    RolloutProgram(
                        f"decode {rows} rows, {slots} slots",
                        self._decode,
                        (params, table, cache, prefix, layout, floor, limit),
                        {"slots": slots},
                        held,
                        largest=slots == longest and (is_first or counts.index(most_copies, plan.together) == number),
                        steps=plan.full_steps().get(slots, 0) if number == 0 else 0,
                    )
                )
        if len(plan.buckets) > 1 or not plan.together:
            most_rows = max(bucket.rows for bucket in plan.buckets)
            places, drop = _integers(plan.blocks, most_rows), None if plan.together else _integers()
            programs.append(RolloutProgram("move rows", self._move, (cache, places, drop), {}, (table, prompt_cache)))
        held = (cache, prompt_cache)
        programs.append(RolloutProgram("copy ended rows", self._copied, (table,), {}, held, largest=False))
        return [*programs, RolloutProgram("finish", self._finish, (prompts, table), {}, held, largest=False)]

    def wrap_programs(self, wrap: Callable[[Any], Any]) -> None:
        """Replace every jitted program of a rollout by ``wrap`` of it."""
        for name in ("_prefill", "_decode", "_finish", "_copied", "_take", "_move"):
            setattr(self, name, wrap(getattr(self, name)))

    def _first_cache(self, plan: DecodePlan, *, like: Any) -> Any:
        """Create the empty cache of a rollout, with the sharding of the prompts'."""
        if self._rows is None:
            return self._empty(*plan.largest())
        devices = self._rows.device_set
        with jax.default_device(next(iter(devices))) if len(devices) == 1 else nullcontext():
            cache = self._empty(*plan.largest())
        return jax.device_put(cache, jax.tree.map(lambda x: x.sharding, like))

    def _cache_shapes(self, rows: int, slots: int) -> Any:
        """Describe an empty cache as shapes, with the sharding that the policy gives it."""
        shapes = jax.eval_shape(lambda: empty_cache(self._policy, rows, slots))
        layout = self._rows
        if layout is not None and layout.mesh.size == 1:  # nothing else says which device it is
            shardings = jax.tree.map(lambda _: NamedSharding(layout.mesh, PartitionSpec()), shapes)
        else:
            shardings = self._empty.lower(rows, slots).compile().output_shardings
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    def _count(self, plan: DecodePlan, bucket: RowBucket, slots: int, flags: Flags) -> None:
        steps = int(flags.steps)
        rows = plan.blocks * bucket.rows * steps
        self._spent = self._spent.plus(Spent(steps, float(flags.tokens), rows, float(flags.attended), rows * slots))
        self._programs.add((RowBucket(plan.blocks * bucket.rows, bucket.share), slots))

    def _sample_rows(self, params: Params, prompts: PromptBatch, key: Key[Array, ""]) -> Rollout:
        return sample_rows(self._policy, params, prompts, self._keys_of(prompts, key), **self._decoding._asdict())

    def _prefill_rows(self, params: Params, prompts: PromptBatch, key: Key[Array, ""]) -> tuple[Any, Table, Flags]:
        """Return the cache of the prompts, and every row with its first token."""
        keys = self._keys_of(prompts, key)
        prefilled = prefill(self._policy, self._policy.head(params), prompts, keys, self._decoding)
        rows, first = first_drawn(prefilled, self._decoding)

        def column(x: Array) -> Array:
            fill = self._decoding.pad_id if x is first.token else 0
            return jnp.full((x.shape[0], self._decoding.max_new, *x.shape[1:]), fill, x.dtype).at[:, 0].set(x)

        table, zero = Table(rows, jax.tree.map(column, first), prefilled.experts), jnp.zeros((), jnp.float32)
        return prefilled.cache, table, Flags(rows.alive, jnp.zeros((), jnp.int32), zero, zero)

    def _decode_rows(
        self,
        params: Params,
        table: Table,
        cache: Any,
        prefix: Any,
        layout: Int32[Array, "D r"],
        floor: Int32[Array, "D"],
        limit: Int32[Array, ""],
        *,
        slots: int,
    ) -> tuple[Table, Any, Flags]:
        """Draw up to ``limit`` tokens in the first slots, until no block has more than ``floor`` unfinished rows."""
        params, caches = self._policy.head(params), self._policy.caches
        blocks = layout.shape[0]
        window = Window(blocks, layout.shape[1], slots)
        rows = seated(table.rows, layout)
        count = rows.token.shape[0]
        drawn = jax.tree.map(lambda x: jnp.zeros((self._segment, count, *x.shape[2:]), x.dtype), table.drawn)

        def unfinished(loop: tuple[Array, Rows, Any, Drawn]) -> Bool[Array, ""]:
            step, rows, _, _ = loop
            alive = jnp.sum(rows.alive.reshape(blocks, -1), axis=1, dtype=jnp.int32)
            return (step < limit) & jnp.any(alive > floor)

        def advance(loop: tuple[Array, Rows, Any, Drawn]) -> tuple[Array, Rows, Any, Drawn]:
            step, rows, cache, drawn = loop
            rows, cache, step_draws = decode_step(self._policy, params, rows, cache, prefix, self._decoding)
            return step + 1, rows, cache, jax.tree.map(lambda draws, x: draws.at[step].set(x), drawn, step_draws)

        start = (jnp.zeros((), jnp.int32), rows, caches.begin(caches.window(cache, window), prefix), drawn)
        step, rows, part, drawn = jax.lax.while_loop(unfinished, advance, start)
        new_table = written_back(table, layout, rows, drawn)
        old_lengths, lengths = (x.astype(jnp.float32) for x in (table.rows.lengths, new_table.rows.lengths))
        attended = jnp.sum(lengths * (lengths - 1) - old_lengths * (old_lengths - 1)) / 2
        return (
            new_table,
            caches.restore(cache, part, window),
            Flags(new_table.rows.alive, step, jnp.sum(lengths - old_lengths), attended),
        )


def _integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def row_blocks(rows: NamedSharding | None) -> int:
    """Count the blocks that a sharding divides the first axis into."""
    if rows is None or not rows.spec or rows.spec[0] is None:
        return 1
    axes = rows.spec[0] if isinstance(rows.spec[0], tuple) else (rows.spec[0],)
    return math.prod(rows.mesh.shape[axis] for axis in axes)


def _per_block(plan: DecodePlan, flags: Bool[np.ndarray, "B"]) -> Bool[np.ndarray, "D n"]:
    return np.asarray(flags).reshape(plan.blocks, plan.block)
