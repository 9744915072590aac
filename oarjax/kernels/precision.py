"""Compute matrix products in the precision of their operands.

TPUs multiply float32 matrices in one pass of bfloat16, and GPUs in TF32, unless a program asks for more. A policy whose
compute dtype is float32 asks for ``highest``, which is float32 on both. It costs three to six passes there, nothing on
a CPU, and does not affect bfloat16 operands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jax.typing import DTypeLike


def precision_of(dtype: DTypeLike) -> Precision | None:
    """Return the ``precision`` of a product with operands of this dtype; None, JAX's own choice, below float32."""
    return Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None


def product_of(dtype: DTypeLike) -> Callable[..., jax.Array]:
    """Return the matrix products (``jnp.einsum``) of operands of this dtype, which add up in float32."""
    return partial(jnp.einsum, precision=precision_of(dtype), preferred_element_type=jnp.float32)


def full_precision(dtype: DTypeLike) -> AbstractContextManager[Any]:
    """Trace products that set no ``precision`` with that of ``precision_of``."""
    return nullcontext() if precision_of(dtype) is None else jax.default_matmul_precision("highest")


def in_full(function: Callable[..., Any], dtype: DTypeLike) -> Any:
    """Return ``function`` traced under ``full_precision(dtype)``; its derivatives are too."""
    if precision_of(dtype) is None:
        return function

    @wraps(function)
    def traced(*args: Any, **options: Any) -> Any:
        with full_precision(dtype):
            return function(*args, **options)

    return traced
