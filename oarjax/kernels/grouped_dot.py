"""Multiply rows that are sorted into groups, each group by its own matrix.

``jax.lax.ragged_dot`` computes this product, but cannot be vmapped. Here the product and its gradient are primitives,
closed under differentiation in both modes and under ``jax.vmap``: the mapped axis becomes more rows, or more groups if
every copy has its own matrices.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from oarjax.kernels.precision import precision_of

BLOCK = 256
"""Rows per product of ``grouped_outer``. By a TPU's compiler what a block costs hardly depends on its rows, since its
matrix goes through memory: 128 takes 5% less where 96 rows are each group's, but more where they vary by a third."""

LOOP = "grouped_outer"
"""Scope of the loops over groups and their blocks, whose numbers sizes decide: a plan reads rows and groups there."""

_rows = Primitive("grouped_dot")
_matrices = Primitive("grouped_outer")


def grouped_dot(
    rows: Float[Array, "R D"],
    matrices: Float[Array, "E D F"],
    sizes: Int[Array, "E"],
    *,
    dtype: DTypeLike,
    beyond: Literal["zero", "any"] = "zero",
) -> Float[Array, "R F"]:
    """Multiply the first ``sizes[0]`` rows by the first matrix, the next ``sizes[1]`` by the second, and so on.

    Rows after the last group give 0, or ``any`` numbers, NaN among them, where the caller selects the others later:
    zeros take a pass over memory. Products are accumulated and returned in ``dtype``.
    """
    return _rows.bind(rows, matrices, sizes, dtype=jnp.dtype(dtype), beyond=beyond)


def grouped_outer(
    left: Float[Array, "R D"], right: Float[Array, "R F"], sizes: Int[Array, "E"], *, dtype: DTypeLike
) -> Float[Array, "E D F"]:
    """Sum the outer products of each group's rows: the gradient of ``grouped_dot`` in its matrices."""
    return _matrices.bind(left, right, sizes, dtype=jnp.dtype(dtype))


def _dot(rows: Array, matrices: Array, sizes: Array, *, dtype: np.dtype, beyond: str) -> Array:
    rows, matrices = _same_dtype(rows, matrices)
    out = jax.lax.ragged_dot(rows, matrices, sizes, precision=precision_of(rows.dtype), preferred_element_type=dtype)
    # What stands after the last group is up to the platform.
    return out if beyond == "any" else jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None], out, 0)


def _outer(left: Array, right: Array, sizes: Array, *, dtype: np.dtype) -> Array:
    """Add up blocks of rows, one matrix product each, group after group; in the last block other rows count as zeros.

    Every group has a first block, more follow in a loop: a sum of many blocks goes to memory once. Rows after the last
    group, which belong to other devices' experts, cost nothing.

    ``jax.lax.ragged_dot_general`` has this product too, but TPU compilers (libtpu 0.0.42) turn it into a dense one over
    every group's mask, which multiplies the work by the number of groups.
    """
    left, right = _same_dtype(left, right)
    rows, groups = left.shape[0], sizes.shape[0]
    block = min(BLOCK, rows)
    sum_dtype = jnp.promote_types(dtype, jnp.float32)

    def product(begin: Array, end: Array) -> Array:
        start = jnp.minimum(begin, rows - block)  # a block at the end of all rows begins earlier, with rows of no use
        at = start + jnp.arange(block)
        x, y = (jax.lax.dynamic_slice_in_dim(z, start, block) for z in (left, right))
        block_rows = jnp.where(((begin <= at) & (at < end))[:, None], x, 0)
        dimension_numbers = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(
            block_rows, y, dimension_numbers, precision=precision_of(left.dtype), preferred_element_type=sum_dtype
        )

    def outer(group: tuple[Array, Array]) -> Array:
        begin, end = group

        def add(i: Any, total: Array) -> Array:
            return total + product(begin + i * block, end)

        return jax.lax.fori_loop(1, -(-(end - begin) // block), add, product(begin, end)).astype(dtype)

    ends = jnp.cumsum(sizes)
    with jax.named_scope(f"{LOOP}_{rows}_{groups}"):
        return jax.lax.map(outer, (ends - sizes, ends))


def even_blocks(rows: int, groups: int, share: float) -> int:
    """Count the blocks of ``grouped_outer`` if groups of equal size hold ``share`` of the rows."""
    return groups * math.ceil(rows * share / groups / min(BLOCK, rows))


def _same_dtype(a: Array, b: Array) -> tuple[Array, Array]:
    """Cast to the narrower of two dtypes: a cotangent in the stream's dtype meets operands in the compute dtype."""
    dtype = min(a.dtype, b.dtype, key=lambda d: d.itemsize)
    return a.astype(dtype), b.astype(dtype)


def _turned(matrices: Array) -> Array:
    return jnp.swapaxes(matrices, -1, -2)


# Derivatives ----------------------------------------------------------------------------------------------------------


def _jvp(primitive: Primitive) -> Any:
    def rule(primals: Any, tangents: Any, **options: Any) -> Any:
        a, b, sizes = primals
        da, db, _ = tangents
        parts = []
        if type(da) is not ad.Zero:
            parts.append(primitive.bind(da, b, sizes, **options))
        if type(db) is not ad.Zero:
            parts.append(primitive.bind(a, db, sizes, **options))
        return primitive.bind(a, b, sizes, **options), sum(parts[1:], parts[0])

    return rule


def _transpose_dot(ct: Any, rows: Any, matrices: Any, sizes: Any, *, dtype: np.dtype, beyond: str) -> list[Any]:
    if type(ct) is ad.Zero:
        return [None, None, None]
    if ad.is_undefined_primal(rows):
        return [grouped_dot(ct, _turned(matrices), sizes, dtype=rows.aval.dtype), None, None]
    return [None, _matrices.bind(rows, ct, sizes, dtype=matrices.aval.dtype), None]


def _transpose_outer(ct: Any, left: Any, right: Any, sizes: Any, *, dtype: np.dtype) -> list[Any]:
    if type(ct) is ad.Zero:
        return [None, None, None]
    if ad.is_undefined_primal(left):
        return [grouped_dot(right, _turned(ct), sizes, dtype=left.aval.dtype), None, None]
    return [None, grouped_dot(left, ct, sizes, dtype=right.aval.dtype), None]


# Batching -------------------------------------------------------------------------------------------------------------


def _copies(args: Any, dims: Any) -> int:
    return next(a.shape[d] for a, d in zip(args, dims) if d is not None)


def _first(a: Array, dim: int | None, copies: int) -> Array:
    """Move the mapped axis to the front; repeat an array that is not mapped."""
    return jnp.broadcast_to(a, (copies, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)


def _merged(a: Array) -> Array:
    return a.reshape(-1, *a.shape[2:])


def _groups(sizes: Array, rows: int) -> Array:
    """Return the group of each of ``rows`` rows of each copy, [copies rows]; E after the last group."""
    return jax.vmap(lambda s: jnp.searchsorted(jnp.cumsum(s), jnp.arange(rows), side="right"))(sizes)


def _own_groups(sizes: Array, rows: int) -> Array:
    """Return the order that puts rows of all copies into groups of their own, those of no group last."""
    copies, groups = sizes.shape
    group = _groups(sizes, rows)
    segment = jnp.where(group < groups, group + groups * jnp.arange(copies)[:, None], copies * groups)
    return jnp.argsort(segment.reshape(-1), stable=True)


def _batch_dot(args: Any, dims: Any, **options: Any) -> tuple[Array, int]:
    copies, (rows, matrices, sizes) = _copies(args, dims), args
    if dims[1] is None and dims[2] is None:  # the copies of a row belong to its group: put them side by side
        interleaved = jnp.moveaxis(rows, dims[0], 1)
        out = _rows.bind(_merged(interleaved), matrices, sizes * copies, **options)
        return out.reshape(*interleaved.shape[:2], -1), 1
    rows, sizes = _first(rows, dims[0], copies), _first(sizes, dims[2], copies)
    if dims[1] is not None:  # own matrices: own groups
        matrices, order = _merged(_first(matrices, dims[1], copies)), _own_groups(sizes, rows.shape[1])
        group_sizes = sizes.reshape(-1)
    else:
        order, group_sizes = jnp.argsort(_groups(sizes, rows.shape[1]).reshape(-1), stable=True), sizes.sum(0)
    out = _rows.bind(_merged(rows)[order], matrices, group_sizes, **options)
    return out[jnp.argsort(order)].reshape(*rows.shape[:2], -1), 0


def _batch_outer(args: Any, dims: Any, *, dtype: np.dtype) -> tuple[Array, int]:
    copies = _copies(args, dims)
    left, right, sizes = (_first(a, d, copies) for a, d in zip(args, dims))
    order = _own_groups(sizes, left.shape[1])
    out = _matrices.bind(_merged(left)[order], _merged(right)[order], sizes.reshape(-1), dtype=dtype)
    return out.reshape(*sizes.shape, *out.shape[1:]), 0


def _dot_shape(rows: Any, matrices: Any, sizes: Any, *, dtype: np.dtype, beyond: str) -> ShapedArray:
    return ShapedArray((rows.shape[0], matrices.shape[2]), dtype)


def _outer_shape(left: Any, right: Any, sizes: Any, *, dtype: np.dtype) -> ShapedArray:
    return ShapedArray((sizes.shape[0], left.shape[1], right.shape[1]), dtype)


for _primitive, _call, _shape, _transpose, _batch in (
    (_rows, _dot, _dot_shape, _transpose_dot, _batch_dot),
    (_matrices, _outer, _outer_shape, _transpose_outer, _batch_outer),
):
    _primitive.def_impl(_call)
    _primitive.def_abstract_eval(_shape)
    ad.primitive_jvps[_primitive] = _jvp(_primitive)
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batch
    mlir.register_lowering(_primitive, mlir.lower_fun(_call, multiple_results=False))
