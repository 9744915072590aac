"""Checkpoints of a run, by Orbax: the whole state, and a JSON record of where the run stands.

Written in the background, complete or not at all, the newest few kept. A run that is started again with the same
command goes on from the newest one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from oarjax.types import TrainState


class Checkpoints:
    """The checkpoints in one folder. Use as a context manager: leaving it waits for writes in progress.

    Args:
        folder: made if missing.
        keep: how many of the newest to keep.
    """

    def __init__(self, folder: Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def newest(self) -> int | None:
        """The iteration of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, iteration: int, state: TrainState, record: dict[str, Any]) -> None:
        """Start writing; returns once the arrays are copied, so that the next update may reuse their memory."""
        if jax.default_backend() == "cpu":  # there a "host copy" is the array's own memory, which updates reuse
            state = jax.tree.map(jnp.copy, state)
        saved = ocp.args.Composite(state=ocp.args.StandardSave(_plain(state)), record=ocp.args.JsonSave(record))
        self._manager.save(iteration, args=saved)

    def restore(self, iteration: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state, laid out over the devices as ``like`` is, and the record."""
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _plain(like))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), record=ocp.args.JsonRestore())
        found = self._manager.restore(iteration, args=args)
        key = jax.random.wrap_key_data(found["state"].key, impl=jax.random.key_impl(like.key))
        return replace(found["state"], key=key), found["record"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _plain(state: TrainState) -> TrainState:
    """The state with its random key as numbers."""
    return replace(state, key=jax.random.key_data(state.key))
