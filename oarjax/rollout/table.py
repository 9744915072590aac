"""Move rows of a rollout in segments, on the device: all rows [B] as blocks [D, n], those of a layout [D * r].

A layout [D, r] lists, for every block, the rows that are decoded together, by their place in it; -1: an empty slot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, Shaped

from oarjax.rollout.sampler import Drawn, Rows, assemble
from oarjax.types import PromptBatch, Rollout


class Table(NamedTuple):
    """All rows of a rollout, being decoded or not, and the tokens drawn so far."""

    rows: Rows
    drawn: Drawn  # [B, T] each
    experts: Int[Array, "P S L k"] | None = None  # chosen at the prompts' tokens, if recorded


def seated(rows: Rows, layout: Int32[Array, "D r"]) -> Rows:
    """Return the rows of a layout, [D * r] each; empty slots hold a finished row."""
    blocks = layout.shape[0]

    def pick(x: Array) -> Array:
        slot_rows = jax.vmap(lambda block, at: block[jnp.maximum(at, 0)])(_in_blocks(x, blocks), layout)
        return slot_rows.reshape(-1, *x.shape[1:])

    slot_rows = jax.tree.map(pick, rows)
    return slot_rows._replace(alive=slot_rows.alive & (layout >= 0).reshape(-1))


def _in_blocks(rows: Array, blocks: int) -> Array:
    return rows.reshape(blocks, rows.shape[0] // blocks, *rows.shape[1:])


def written_back(table: Table, layout: Int32[Array, "D r"], rows: Rows, drawn: Drawn) -> Table:
    """Return the table after a segment: ``rows`` of the layout [D * r] and their draws in its K steps, [K, D * r]."""
    blocks, n = layout.shape[0], table.rows.token.shape[0] // layout.shape[0]
    matches = layout[:, :, None] == jnp.arange(n)  # [D, r, n]
    in_segment, slot = jnp.any(matches, axis=1), jnp.argmax(matches, axis=1)  # [D, n]

    def merge_rows(old: Array, new: Array) -> Array:
        wide = (slice(None), slice(None), *[None] * (new.ndim - 1))
        new_by_row = jnp.take_along_axis(_in_blocks(new, blocks), slot[wide], axis=1)
        return jnp.where(in_segment[wide], new_by_row, _in_blocks(old, blocks)).reshape(old.shape)

    old_rows = table.rows
    new_rows = Rows(
        keys=old_rows.keys,
        prompts=old_rows.prompts,
        token=merge_rows(old_rows.token, rows.token),
        lengths=merge_rows(old_rows.lengths, rows.lengths),
        alive=merge_rows(old_rows.alive, rows.alive),
        ended=merge_rows(old_rows.ended, rows.ended),
        seen=jax.tree.map(merge_rows, old_rows.seen, rows.seen),  # None stays None
        matched=jax.tree.map(merge_rows, old_rows.matched, rows.matched),
        written=old_rows.written,
    )
    columns = jnp.arange(table.drawn.token.shape[1])
    is_new = (columns >= old_rows.lengths[:, None]) & (columns < new_rows.lengths[:, None])
    step = jnp.clip(columns - old_rows.lengths[:, None], 0, drawn.token.shape[0] - 1)

    def merge_draws(old: Shaped[Array, "B T *x"], new: Shaped[Array, "K R *x"]) -> Shaped[Array, "B T *x"]:
        def wide(index: Array, ndim: int) -> Array:
            return index.reshape(*index.shape, *[1] * (ndim - index.ndim))

        in_blocks = jnp.swapaxes(new, 0, 1).reshape(blocks, -1, new.shape[0], *new.shape[2:])
        by_row = jnp.take_along_axis(in_blocks, wide(slot, in_blocks.ndim), axis=1)
        by_row = by_row.reshape(-1, *by_row.shape[2:])
        return jnp.where(wide(is_new, old.ndim), jnp.take_along_axis(by_row, wide(step, old.ndim), axis=1), old)

    return table._replace(rows=new_rows, drawn=jax.tree.map(merge_draws, table.drawn, drawn))


def copied(table: Table) -> tuple[Int32[Array, "B T"], Int32[Array, "B"], Bool[Array, "B"]]:
    """Copy tokens, lengths and ends of all rows."""
    return jax.tree.map(jnp.copy, (table.drawn.token, table.rows.lengths, table.rows.ended))


def finish(prompts: PromptBatch, table: Table) -> Rollout:
    """Assemble the rollout of a table whose rows are all finished."""
    return assemble(prompts, table.rows, table.drawn, experts=table.experts)
