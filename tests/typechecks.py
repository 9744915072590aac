"""Check argument and return types at run time with beartype, generating the checks of a signature only once.

jaxtyping asks for the checks of a function whenever it is defined, which for the functions inside ``make_policy`` is at
every call. It passes an empty function with its name and annotations, so that equal ones are interchangeable.

``jaxtyped`` takes the place of jaxtyping's decorator, which also reads the signature at every definition (.3 ms) and
binds the arguments at every call (10 us): tracing a program defines hundreds of functions and calls thousands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, NamedTuple, get_args, get_origin

import jaxtyping
from beartype import beartype
from jax._src import traceback_util
from jaxtyping import AbstractArray, TypeCheckError

traceback_util.register_exclusion(__file__)  # as jaxtyping does: programs name the lines of who calls
_known: dict[Hashable, Callable[..., Any]] = {}
_written: dict[Hashable, Checks] = {}
_jaxtyped: Any = jaxtyping.jaxtyped
_axes = _jaxtyped("context")  # sizes of axes are one function's


class Checks(NamedTuple):
    """What a definition's arguments, and what it returns, are given to."""

    arguments: Callable[..., Any]
    returned: Callable[[Any], Any]


def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that checks a function's arguments and result, as jaxtyping's of this name does.

    Annotations that are texts mean the same at every definition, and those are left to jaxtyping that are not, or that
    read an argument's value.
    """
    return functools.partial(_jaxtyped_with, typechecker=typechecker)


def _jaxtyped_with(function: Any, *, typechecker: Callable[..., Any]) -> Any:
    if not isinstance(function, FunctionType):
        return _jaxtyped(function, typechecker=typechecker)
    hints = tuple(function.__annotations__.items())
    if not all(isinstance(hint, str) and "{" not in hint for _, hint in hints):
        return _jaxtyped(function, typechecker=typechecker)
    key = function.__module__, function.__qualname__, function.__code__, hints
    if key not in _written:
        _written[key] = _checks(function, typechecker)
    checks, settings = _written[key], jaxtyping.config

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if settings.jaxtyping_disable:
            return function(*args, **kwargs)
        with _axes:
            try:
                checks.arguments(*args, **kwargs)
            except Exception:
                return _jaxtyped(function, typechecker=typechecker)(*args, **kwargs)  # says which argument
            result = function(*args, **kwargs)
            try:
                checks.returned(result)
            except Exception as error:
                name = f"{function.__module__}.{function.__qualname__}"
                raise TypeCheckError(f"Type-check error whilst checking the return value of {name}.") from error
            return result

    return checked


def _checks(function: Callable[..., Any], typechecker: Callable[..., Any]) -> Checks:
    """Return a definition's checks, of the empty functions with its annotations that jaxtyping asks to check."""
    asked: list[Any] = []
    _jaxtyped(function, typechecker=lambda empty: asked.append(empty) or empty)
    whole, arguments = asked

    def returned(value):
        return value

    returned.__annotations__ = {"return": whole.__annotations__.get("return", Any)}
    returned.__module__, returned.__qualname__ = whole.__module__, whole.__qualname__
    return Checks(typechecker(arguments), typechecker(returned))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its annotations checked, by code that is written when it is first called."""
    code, defaults = function.__code__, (len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ()))
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_varnames
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not made:
            annotations = tuple((name, _form(hint)) for name, hint in function.__annotations__.items())
            key = (function.__module__, function.__qualname__, arguments, defaults, annotations)
            try:
                if key not in _known:
                    _known[key] = beartype(function)
            except TypeError:  # an annotation without a hash
                made.append(beartype(function))
            else:
                made.append(_known[key])
        return made[0](*args, **kwargs)

    return checked


def _form(hint: Any) -> Any:
    """Return what equal annotations have in common: jaxtyping makes a new class of every ``Float[Array, "B T"]``."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return repr(hint)
    if isinstance(hint, list):  # arguments of a Callable
        return tuple(map(_form, hint))
    arguments = get_args(hint)
    return (get_origin(hint), *map(_form, arguments)) if arguments else hint
