"""A linear function paired with its transpose, for maps whose transpose is a separate kernel.

``jax.custom_vjp`` has no forward mode, and ``jax.custom_derivatives.linear_call``, which has both modes, cannot be
vmapped. A linear pair supports both modes and ``jax.vmap``: a tangent goes through ``push``, a cotangent through
``pull``, and each is vmapped itself. Differentiating it by its residuals is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Linear = Callable[..., tuple[jax.Array, ...]]
"""(*residuals, *arrays) -> arrays, linear in the arrays that follow the residuals."""

_pair = Primitive("linear_pair")
_pair.multiple_results = True


def linear_pair(
    push: Linear, pull: Linear, residuals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return ``push(*residuals, *tangents)``, whose transpose is ``pull(*residuals, *cotangents)``.

    Neither function may close over traced values; pass them as ``residuals``.
    """
    return _pair.bind(*residuals, *tangents, push=push, pull=pull, residual_count=len(residuals))


@_pair.def_impl
def _call(*args: Any, push: Linear, pull: Linear, residual_count: int) -> list[Any]:
    return list(push(*args))


@_pair.def_abstract_eval
def _shapes(*args: Any, push: Linear, pull: Linear, residual_count: int) -> list[Any]:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    return [ShapedArray(a.shape, a.dtype) for a in jax.eval_shape(push, *shapes)]


def _jvp(primals: Any, tangents: Any, *, residual_count: int, **functions: Any) -> tuple[list[Any], list[Any]]:
    if any(type(tangent) is not ad.Zero for tangent in tangents[:residual_count]):
        raise NotImplementedError("linear_pair: a residual is differentiated, and it is linear in the others alone")
    linear = [ad.instantiate_zeros(tangent) for tangent in tangents[residual_count:]]
    options = {"residual_count": residual_count, **functions}
    return _pair.bind(*primals, **options), _pair.bind(*primals[:residual_count], *linear, **options)


def _transpose(cotangents: Any, *args: Any, push: Linear, pull: Linear, residual_count: int) -> list[Any]:
    dense = [ad.instantiate_zeros(ct) for ct in cotangents]
    return [None] * residual_count + _pair.bind(
        *args[:residual_count], *dense, push=pull, pull=push, residual_count=residual_count
    )


def _batch(args: Any, dims: Any, *, push: Linear, pull: Linear, residual_count: int) -> tuple[list[Any], list[int]]:
    """Batch the linear arguments along a new first axis; residuals keep the axis they have, if any."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    linear = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args[residual_count:], dims[residual_count:])
    ]
    mapped = partial(_mapped, in_axes=tuple(dims[:residual_count]))
    out = _pair.bind(
        *args[:residual_count], *linear, push=mapped(push), pull=mapped(pull), residual_count=residual_count
    )
    return out, [0] * len(out)


def _mapped(linear: Linear, in_axes: tuple[int | None, ...]) -> Linear:
    def call(*args: Any) -> tuple[jax.Array, ...]:
        return jax.vmap(linear, in_axes=(*in_axes, *[0] * (len(args) - len(in_axes))))(*args)

    return call


ad.primitive_jvps[_pair] = _jvp
ad.primitive_transposes[_pair] = _transpose
batching.primitive_batchers[_pair] = _batch
mlir.register_lowering(_pair, mlir.lower_fun(_call, multiple_results=True))
