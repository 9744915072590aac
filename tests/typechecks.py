"""Check argument and return types at run time with beartype, generating the checks of a signature only once.

jaxtyping asks for the checks of a function whenever it is defined, which for the functions inside ``make_policy`` is at
every call. It passes an empty function with its name and annotations, so that equal ones are interchangeable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, get_args, get_origin

from beartype import beartype
from jaxtyping import AbstractArray

_known: dict[Hashable, Callable[..., Any]] = {}


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
