"""Call rewards that have the signature of TRL's: ``(completions, **columns)``, lists of all completions of a batch.

A function of a plugin with a parameter ``completions``, ``completion_ids`` or ``environments`` is registered under its
own name, without ``@reward``. It is called per batch, with ``prompts``, ``completions``, ``completion_ids`` and every
column of the dataset's rows by keyword, as many of them as it takes. Chats are given as lists of messages, texts as
texts. Its keyword-only arguments are settings, as of any reward; TRL's ``trainer_state`` and loggers are not there.

An element of ``environments`` has the public attributes of an episode's environment at its end, as far as JSON holds
them. A function that takes them is not called for completions without an environment, or whose episode failed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

ABSENT = ("trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's rewards that only its trainer has."""


def has_trl_signature(function: Any) -> bool:
    """Return True for a function that takes the lists that TRL gives to rewards."""
    if not inspect.isfunction(function):
        return False
    return not {"completions", "completion_ids", "environments"}.isdisjoint(inspect.signature(function).parameters)


def needs_of_trainer(function: Callable[..., Any]) -> list[str]:
    """Return the arguments without a default that only TRL's trainer has."""
    parameters = inspect.signature(function).parameters
    return [name for name in ABSENT if name in parameters and parameters[name].default is inspect.Parameter.empty]


def per_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward per batch, of ``Sample``s, that calls a function of TRL's signature.

    Raises:
        ValueError: the function needs an argument that only TRL's trainer has.
    """
    parameters, absent = inspect.signature(function).parameters, needs_of_trainer(function)
    if absent:
        raise ValueError(f"reward {function.__name__!r}: {', '.join(absent)} is not available here; give it a default")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes_environments = "environments" in parameters

    def arguments(samples: Sequence[Any], settings: dict[str, Any]) -> dict[str, Any]:
        lists: dict[str, list[Any]] = {
            "prompts": [list(s.chat) or s.prompt for s in samples],
            "completions": [
                [{"role": "assistant", "content": s.completion}] if s.chat else s.completion for s in samples
            ],
            "completion_ids": [list(s.completion_ids) for s in samples],
        }
        if takes_environments:
            lists["environments"] = [SimpleNamespace(**s.environment) for s in samples]
        names = {name for s in samples for name in s.columns} - {"prompt", "completion"} - lists.keys()
        lists |= {name: [s.columns.get(name) for s in samples] for name in sorted(names)}
        return {name: values for name, values in lists.items() if takes_all or name in parameters} | settings

    def seen(samples: Sequence[Any]) -> list[Any]:
        return [s for s in samples if s.environment is not None] if takes_environments else list(samples)

    def spread(values: Any, samples: Sequence[Any]) -> Any:
        """Return one value per sample, None for those that the function has not seen."""
        if not takes_environments:
            return values
        remaining, few = iter(values := list(values)), seen(samples)
        if len(values) != len(few):
            raise ValueError(f"{len(values)} values for {len(few)} samples; return one per sample")
        return [None if s.environment is None else next(remaining) for s in samples]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(samples: Sequence[Any], **settings: Any) -> Any:
            few = seen(samples)
            return spread(await function(**arguments(few, settings)) if few else (), samples)

        return awaited

    @functools.wraps(function)
    def called(samples: Sequence[Any], **settings: Any) -> Any:
        few = seen(samples)
        return spread(function(**arguments(few, settings)) if few else (), samples)

    return called
