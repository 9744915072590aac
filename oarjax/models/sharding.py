"""Map the names of a param's axes to mesh axes, and constrain arrays to them. No device is touched here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from oarjax.errors import UserError

RULES: Mapping[str, str | None] = {
    "layers": None,  # scanned one after another
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "embed": "fsdp",
    "head": None,  # the numbers inside one head stay together
    "rank": None,  # of adapters
    "expert": "expert",  # whole experts, each divided by ffn and embed as well
    "router": None,
    "delta": None,  # heads of delta nets: queries, keys and values are one matrix
    "tap": None,  # of their convolution
}
"""Training layout: matrices sharded over ``fsdp`` along the embedding and over ``tensor`` along the other axis.

Experts are sharded over ``expert`` besides; along it every other param is whole, and rows are sharded.
"""

ROLLOUT: Mapping[str, str | None] = {**RULES, "embed": None}
"""Rollout layout: whole along the embedding, so that decoding does not gather every weight for every token."""

ROWS = ("slice", "data", "expert", "fsdp")
"""Mesh axes that shard the rows of a batch, if the mesh has them."""


class ShardingError(UserError, ValueError):
    """A size that the mesh does not divide; names the axis, both sizes and the remedy."""


def param_specs(axes: Any, *, rules: Mapping[str, str | None] = RULES) -> Any:
    """Return the PartitionSpec of every param from its axes' names (``models.weights.logical_axes``).

    A vector takes no ``fsdp`` axis: sharding a norm saves nothing and costs a gather.

    Raises:
        KeyError: an axis name without a rule.
    """

    def spec(names: tuple[str, ...]) -> PartitionSpec:
        inner = [n for n in names if n != "layers"]
        keep_whole = len(inner) == 1
        mesh_axes = [rules[name] for name in names]
        return PartitionSpec(*(None if keep_whole and mesh_axis == "fsdp" else mesh_axis for mesh_axis in mesh_axes))

    return _map(spec, axes)


def undivided(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """Return the spec of an array that is whole along a mesh axis."""
    entries = [tuple(a for a in (p if isinstance(p, tuple) else (p,)) if a not in (axis, None)) for p in spec]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def training_rules(*, kv_heads: int, tensor: int) -> Mapping[str, str | None]:
    """Adapt ``RULES`` to a policy with this many key heads on a tensor axis of this size.

    If the axis is a multiple of the key heads, their projections stay whole along it: they are small, and a device
    needs the one key head that its query heads read.
    """
    return {**RULES, "kv_heads": None} if tensor % kv_heads == 0 and kv_heads % tensor else RULES


def row_axes(mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of ``ROWS`` that a mesh has."""
    return tuple(axis for axis in ROWS if axis in mesh)


def batch_spec(mesh: Mapping[str, int] | None = None) -> PartitionSpec:
    """Shard rows of a batch over the mesh's row axes (by default all of ``ROWS``); keep every other axis whole."""
    return PartitionSpec(ROWS if mesh is None else row_axes(mesh))


def check_divisible(
    axes: Any,
    pieces: Any,
    mesh: Mapping[str, int],
    *,
    rules: Mapping[str, str | None] = RULES,
    what: str = "the mesh",
) -> None:
    """Check that a mesh (axis name -> size) divides every param; ``what`` names it in errors.

    ``pieces`` has, in the same tree, the number of pieces that each axis may be cut into
    (``models.weights.divisible_pieces``): an axis of heads is cut between heads, never within one.

    Raises:
        ShardingError: lists every (axis, size, mesh axis, size) that does not divide.
    """
    faults = {
        (name, size, rules[name])
        for names, sizes in zip(_leaves(axes), _leaves(pieces))
        for name, size in zip(names, sizes)
        if rules[name] is not None and size % mesh.get(str(rules[name]), 1)
    }
    if faults:
        lines = [f"{name} = {size} on mesh axis {axis} = {mesh[str(axis)]}" for name, size, axis in sorted(faults)]
        raise ShardingError(
            f"{what} does not divide the policy: {'; '.join(lines)}; choose mesh sizes that divide them"
        )


def check_rows(rows: int, mesh: Mapping[str, int], *, what: str, remedy: str = "") -> None:
    """Check that the mesh's row axes divide a number of rows; ``what`` is the config field's path.

    ``remedy``: a remedy besides another number of rows.

    Raises:
        ShardingError: with the axes, both sizes and a number that divides.
    """
    axes = [axis for axis in row_axes(mesh) if axis != "expert" or mesh[axis] > 1]
    parts = math.prod(mesh[axis] for axis in axes)
    if rows % parts:
        raise ShardingError(
            f"{what} = {rows} rows cannot be divided over mesh axes {' x '.join(axes)} = {parts}; "
            f"use a multiple of {parts}, such as {-(-rows // parts) * parts}{remedy}"
        )


def repeated_kv_heads(kv_heads: int, *, tensor: int) -> int:
    """Return the key heads of the rollout policy: repeated if the tensor axis is a multiple of them, else unchanged.

    Grouped-query attention with every key head repeated gives the same numbers.
    """
    return tensor if tensor % kv_heads == 0 else kv_heads


def _is_leaf(node: Any) -> bool:
    return isinstance(node, tuple)


def _map(function: Any, tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=_is_leaf)


def _leaves(tree: Any) -> list[tuple[Any, ...]]:
    return jax.tree.leaves(tree, is_leaf=_is_leaf)


def placed(mesh: Mesh, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Constrain each axis of x to mesh axes, or keep it whole for None; leave it open if they do not divide it."""

    def place(axis: str | tuple[str, ...] | None, size: int) -> Any:
        mesh_axes = tuple(a for a in ((axis,) if isinstance(axis, str) else axis or ()) if a in mesh.shape)
        return PartitionSpec.UNCONSTRAINED if size % math.prod(mesh.shape[a] for a in mesh_axes) else mesh_axes or None

    spec = PartitionSpec(*(place(axis, size) for axis, size in zip(axes, x.shape, strict=True)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
