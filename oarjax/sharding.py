"""From the names of a param's axes to mesh axes. Names and sizes only: no device is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

RULES: Mapping[str, str | None] = {
    "layers": None,  # scanned one after another
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "embed": "fsdp",
    "head": None,  # the numbers inside one head stay together
}
"""Training layout: matrices divided over ``fsdp`` along the embedding and over ``tensor`` along the other axis."""

REPLICATED_FSDP: Mapping[str, str | None] = {**RULES, "embed": None}
"""Rollout layout: whole along ``fsdp``, so that decoding does not gather every weight for every token."""

ROWS = ("data", "fsdp")
"""Mesh axes over which the rows of a batch are divided."""


class ShardingError(ValueError):
    """A size that the mesh does not divide; names the axis, both sizes and the remedy."""


def param_specs(axes: Any, *, rules: Mapping[str, str | None] = RULES) -> Any:
    """PartitionSpec of every param from its axes' names (``models.weights.logical_axes``).

    A vector takes no ``fsdp`` axis: dividing a norm saves nothing and costs a gather.

    Raises:
        KeyError: an axis name without a rule.
    """

    def spec(names: tuple[str, ...]) -> PartitionSpec:
        inner = [n for n in names if n != "layers"]
        keep_whole = len(inner) == 1
        places = [rules[name] for name in names]
        return PartitionSpec(*(None if keep_whole and place == "fsdp" else place for place in places))

    return _map(spec, axes)


def batch_spec() -> PartitionSpec:
    """Rows of a batch over the data and fsdp axes; every other axis whole."""
    return PartitionSpec(ROWS)


def check_divisible(
    axes: Any, pieces: Any, mesh: Mapping[str, int], *, rules: Mapping[str, str | None] = RULES
) -> None:
    """Refuse a mesh (axis name -> size) that does not divide every param.

    ``pieces`` has, in the same tree, what each axis may be cut into (``models.weights.divisible_pieces``): an
    axis of heads is cut between heads, never within one.

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
            f"the mesh does not divide the policy: {'; '.join(lines)}; choose mesh sizes that divide them"
        )


def check_rows(rows: int, mesh: Mapping[str, int], *, what: str) -> None:
    """Refuse a number of rows that the data and fsdp axes do not divide; ``what`` is the config field's path."""
    parts = 1
    for axis in ROWS:
        parts *= mesh.get(axis, 1)
    if rows % parts:
        raise ShardingError(
            f"{what} = {rows} rows cannot be divided over mesh axes data x fsdp = {parts}; "
            f"use a multiple of {parts}, such as {-(-rows // parts) * parts}"
        )


def _is_leaf(node: Any) -> bool:
    return isinstance(node, tuple)


def _map(function: Any, tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=_is_leaf)


def _leaves(tree: Any) -> list[tuple[Any, ...]]:
    return jax.tree.leaves(tree, is_leaf=_is_leaf)
