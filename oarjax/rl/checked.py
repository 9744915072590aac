"""Check the arguments of public functions against their signatures: shapes, dtypes, choices and ranges of numbers.

The checks run when Python calls a function, so under ``jax.jit`` while it is traced: compiled programs have none.
Numbers may be traced (``jax.vmap`` over tau): they have no value yet, and their range goes unchecked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import AbstractArray, Array, Bool, Float, Int, Key, Shaped

from oarjax.errors import UserError
from oarjax.rl.ranges import Range


class ArgumentError(UserError, ValueError):
    """An argument that does not fit a function's signature; names both, what was expected and what came."""


Scalar = float | Float[Array, ""]
"""A number, which may be traced."""
ScalarShare = Annotated[Scalar, Range(ge=0, le=1)]
ScalarPositiveShare = Annotated[Scalar, Range(gt=0, le=1)]
ScalarRate = Annotated[Scalar, Range(ge=0)]
ScalarPositive = Annotated[Scalar, Range(gt=0)]
ScalarAboveOne = Annotated[Scalar, Range(gt=1)]

TRACED = "got a traced value; name it in static_argnames of jax.jit, or bind it with functools.partial"
KINDS: dict[Any, str] = {Float: "float", Bool: "bool", Int: "integer", Key: "key", Shaped: ""}
Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function) -> Function:
    """Check each call's arguments against the annotations, before the function runs; equal letters are equal sizes."""
    signature = inspect.signature(function)
    hints = functools.cache(lambda: get_type_hints(function, include_extras=True))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises it with the function's name
        sizes: dict[str, tuple[Any, str]] = {}
        for name, value in arguments.items():
            if name in hints():
                _check(name, value, hints()[name], sizes, function.__name__)
        return function(*args, **kwargs)

    return cast(Function, call)


def is_traced(value: Any) -> bool:
    """Return whether a number is known only while a program runs."""
    return isinstance(value, Tracer)


def _check(name: str, value: Any, hint: Any, sizes: dict[str, tuple[Any, str]], function: str) -> None:
    """Check one argument, or one field of it; ``sizes`` collects axis letters with the argument that set each."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [part for part in parts if part is not NoneType]
        if value is None and len(kinds) < len(parts):
            return
        if float in kinds:
            _check_number(name, value, float, Range(), function)
        elif len(kinds) == 1:
            _check(name, value, kinds[0], sizes, function)
    elif origin is Annotated:
        (bounds,) = (part for part in parts if isinstance(part, Range))
        _check_number(name, value, int if parts[0] is int else float, bounds, function, static=parts[0] in (int, float))
    elif origin is Literal:
        *choices, last = map(str, parts)
        if is_traced(value):
            raise ArgumentError(f"{function}: {name} must be {', '.join(choices)} or {last}, {TRACED}")
        if value not in parts:
            raise ArgumentError(f"{function}: {name} must be {', '.join(choices)} or {last}, got {value!r}")
    elif isinstance(hint, type) and issubclass(hint, AbstractArray):
        _check_array(name, value, hint, sizes, function)
    elif isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        if not isinstance(value, hint):
            raise ArgumentError(f"{function}: {name} must be an oarjax {hint.__name__}, got {_described(value)}")
        inner = _field_hints(hint)
        for field in fields(hint) if is_dataclass(hint) else ():  # a NamedTuple has functions, or static settings
            _check(f"{name}.{field.name}", getattr(value, field.name), inner[field.name], sizes, function)


@functools.cache
def _field_hints(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def _check_number(name: str, value: Any, kind: type, bounds: Range, function: str, *, static: bool = False) -> None:
    expected = bounds.of("an integer" if kind is int else "a number", whole=kind is int)
    if kind is int:
        number = isinstance(value, Integral) and not isinstance(value, bool)
    else:
        number = isinstance(value, Real) or getattr(value, "shape", None) == ()
    if static and is_traced(value):
        raise ArgumentError(f"{function}: {name} must be {expected}, {TRACED}")
    if not number:
        remedy = "; use jax.vmap to map over an array" if hasattr(value, "shape") and kind is float else ""
        raise ArgumentError(f"{function}: {name} must be {expected}, got {_described(value)}{remedy}")
    if not is_traced(value) and float(value) not in bounds:
        raise ArgumentError(f"{function}: {name} must be {expected}, got {value}")


def _check_array(
    name: str, value: Any, hint: type[AbstractArray], sizes: dict[str, tuple[Any, str]], function: str
) -> None:
    axes = hint.dim_str.split()
    kind = next((word for base, word in KINDS.items() if hint.dtypes == base.dtypes), "integer")
    expected = f"{function}: {name} must be {'an' if kind == 'integer' else 'a'} {kind} array".replace("  ", " ")
    expected += f" [{', '.join(axes)}]"
    key = "; use jax.random.key(seed)" if not axes else "; use oarjax.row_keys(key, rows)"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise ArgumentError(f"{expected}, got {_described(value)}{key if kind == 'key' else '; wrap it in jnp.array'}")
    if kind and not _has_dtype(value, hint):
        remedies = {"bool": f"; compare it, as in {name} > 0", "float": "; use .astype(jnp.float32)", "key": key}
        remedy = remedies.get(kind, "")
        raise ArgumentError(f"{expected}, got {_described(value)}{remedy}")
    matched = _matched(axes, value.shape)
    if matched is None:
        remedy = ""
        if kind == "key":
            remedy = key
        elif len(value.shape) == len(axes) - 1:
            rows, _ = sizes.get(axes[0], (None, ""))
            advice = f"; for one number per row broadcast {name}[:, None]"
            remedy = advice if value.shape[:1] == (rows,) else f"; for a single row pass {name}[None]"
        raise ArgumentError(f"{expected}, got {_described(value)}{remedy}")
    for axis, size in matched.items():
        prior, source = sizes.setdefault(axis, (size, name))
        if prior != size:
            raise ArgumentError(f"{expected} with {axis.lstrip('*')} = {prior} as in {source}, got {_described(value)}")


def _has_dtype(value: Any, hint: type[AbstractArray]) -> bool:
    if "prng_key" in hint.dtypes:
        return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return str(value.dtype) in hint.dtypes


def _matched(axes: list[str], shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Return the size of each named axis, a tuple for a starred one; None where the shape has other axes."""
    starred = next((at for at, axis in enumerate(axes) if axis.startswith("*") or axis == "..."), None)
    if starred is None:
        split = dict(zip(axes, shape)) if len(axes) == len(shape) else None
    elif len(shape) < len(axes) - 1:
        split = None
    else:
        end = len(shape) - (len(axes) - 1 - starred)
        split = dict(zip(axes[:starred], shape)) | {axes[starred]: shape[starred:end]}
        split |= dict(zip(axes[starred + 1 :], shape[end:]))
    unnamed = ("...", "_", "*_")
    return None if split is None else {axis: size for axis, size in split.items() if not axis.startswith(unnamed)}


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    if value is None:
        return "None"
    if isinstance(value, Real):
        return f"{type(value).__name__} {value}"
    return f"a {type(value).__name__}"
