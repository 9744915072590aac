"""Low-rank adapters (LoRA, arXiv 2106.09685) as plain trees beside a policy's params.

An adapted matrix W [in, out] computes y = x W + scale * (x A) B with A [in, rank], B [rank, out] and
scale = alpha / rank. W is frozen: only A and B have gradients and optimizer state, and no gradient of W's shape is ever
formed. B starts at 0, so that a policy with fresh adapters equals the one without, bit for bit.

The adapters of a tree {"layers": {"attention": {"q": {"kernel": W, "bias": b}}}} are
{"layers": {"attention": {"q": {"lora_a": A, "lora_b": B}}}}. Joined with the frozen tree (``join_params``) they are
the params that a policy computes with; the frozen tree alone is the policy that training started from: a free
reference for a KL term. ``merge_adapters`` gives the same policy as plain params, for sampling and for export.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from oarjax.types import Params, TrainState

RANK = "rank"
"""Name of the adapters' own axis, which is never sharded."""


def adapter_shapes(shapes: Params, *, rank: int, targets: Collection[str]) -> Params:
    """Return the shapes of the adapters of every target matrix; float32, stacked like the matrices.

    Args:
        shapes: of the params, such as ``models.weights.abstract_params``.

    Raises:
        ValueError: a target without a matrix, or a rank that is not below the matrices' own.
    """
    module_names = set(targets)

    def shape(path: tuple[str, ...], kernel: Any) -> dict[str, Any]:
        *stack, into, out = kernel.shape
        if not 0 < rank < min(into, out):
            raise ValueError(
                f"rank: {rank} for {'.'.join(path)} of {into} x {out}; expected 1 to {min(into, out) - 1}; with more, "
                "adapters are no smaller than the matrix"
            )
        module_names.discard(path[-1])
        return {
            "lora_a": jax.ShapeDtypeStruct((*stack, into, rank), jnp.float32),
            "lora_b": jax.ShapeDtypeStruct((*stack, rank, out), jnp.float32),
        }

    adapters = _at_targets(shape, shapes, targets)
    if module_names:
        raise ValueError(f"targets: this policy has no matrix {', '.join(sorted(module_names))}")
    return adapters


def adapter_axes(axes: Params, *, targets: Collection[str]) -> Params:
    """Name the adapters' axes for sharding: A is sharded like W's first axis, B like its last.

    ``axes`` are those of the params (``models.weights.logical_axes``).
    """

    def names(_: tuple[str, ...], kernel: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        *stack, into, out = kernel
        return {"lora_a": (*stack, into, RANK), "lora_b": (*stack, RANK, out)}

    return _at_targets(names, axes, targets)


def init_adapters(key: Key[Array, ""], shapes: Params, *, rank: int, targets: Collection[str]) -> Params:
    """Initialise adapters: A normal with variance 1 / in, B zero.

    An array's numbers depend on the key and its name alone.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(adapter_shapes(shapes, rank=rank, targets=targets))

    def start(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.endswith("lora_b"):
            return jnp.zeros(shape.shape, shape.dtype)
        weight_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return jax.random.normal(weight_key, shape.shape, shape.dtype) / math.sqrt(shape.shape[-2])

    return jax.tree.unflatten(tree, [start(path, shape) for path, shape in leaves])


def join_params(frozen: Params | None, params: Params) -> Params:
    """Join frozen and trained params into the tree that a policy's functions read; no array is copied.

    Without frozen params the trained ones are the whole policy.
    """
    if frozen is None:
        return params

    def overlay(under: Any, upper: Any) -> Any:
        if not isinstance(under, Mapping) or not isinstance(upper, Mapping):
            raise ValueError("join_params: trained and frozen params overlap; remove one of the two")
        common = {name: overlay(under[name], upper[name]) for name in under.keys() & upper.keys()}
        return {**under, **upper, **common}

    return overlay(frozen, params)


def all_params(state: TrainState) -> Params:
    """Return all params of a state, trained and frozen, as the policy's functions read them."""
    return join_params(state.frozen, state.params)


def without_adapters(params: Params) -> Params:
    """Drop the adapters, which leaves the policy that training started from. No array is copied."""
    if not isinstance(params, Mapping):
        return params
    return {name: without_adapters(node) for name, node in params.items() if name not in ("lora_a", "lora_b")}


def merge_adapters(params: Params, *, scale: float, dtype: DTypeLike | None = None) -> Params:
    """Merge adapters into plain params: W + scale * A B, rounded to ``dtype`` or W's own.

    Products and sum are computed in float32, or in W's dtype where that is wider.

    Params without adapters are returned unchanged, or cast to ``dtype``. In bfloat16 a change of a weight by less than
    half a unit of its last place, a share of 2^-9 to 2^-8, is lost.
    """

    def node(tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree if dtype is None else tree.astype(dtype)
        plain = {name: node(part) for name, part in tree.items() if name not in ("lora_a", "lora_b", "kernel")}
        if "kernel" not in tree:
            return plain
        kernel = tree["kernel"]
        if "lora_a" in tree:
            sum_dtype = jnp.promote_types(jnp.float32, kernel.dtype)
            a, b = (tree[name].astype(sum_dtype) for name in ("lora_a", "lora_b"))
            change = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            kernel = (kernel.astype(sum_dtype) + change).astype(kernel.dtype if dtype is None else dtype)
        return {**plain, "kernel": node(kernel)}

    return node(params)


def _at_targets(
    function: Callable[[tuple[str, ...], Any], Any], tree: Params, targets: Collection[str], path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a tree with ``function(path, kernel)`` for every target with a kernel; other nodes are left out."""
    subtree: dict[str, Any] = {}
    for name, node in tree.items():
        if not isinstance(node, Mapping):
            continue
        if name in targets and "kernel" in node:
            subtree[name] = function((*path, name), node["kernel"])
        elif inner := _at_targets(function, node, targets, (*path, name)):
            subtree[name] = inner
    return subtree
