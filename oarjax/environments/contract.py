"""Load a user's environment class, and play an episode's turns on an instance of it, text in, text out.

A class has one of two shapes. With tools, as TRL's ``environment_factory`` classes::

    class Shop:
        def reset(self, **columns): ...               # the row's columns; seed too, if the signature names it
        def price(self, item: str) -> str:            # every public method with a docstring is a tool
            \"\"\"Look up a price.

            Args:
                item: Name of the item.
            \"\"\"

A turn calls tools in Qwen's form, ``<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>``, as often
as it likes; the observation is their results, ``str(result)`` each. A turn without a call ends the episode. A call that
is not JSON, of an unknown tool or with wrong arguments gets an observation that says so, and so does a ``ValueError``
that a tool raises (TRL's classes raise it to tell the policy that a move is not allowed).

Without tools, ``step(self, text)`` gets whole turns and returns the next observation, or None at the end of the
episode; or a pair of that and the turn's reward.

Either may have ``reward`` (or TRL's ``get_reward``): a number, or a method that returns one, which is added to the last
turn's reward at the end; and ``close()``, called when an episode is over. Its public attributes at the end, as far as
JSON holds them, are what rewards of TRL's signature see in ``environments``. Any other exception, and a result of
another type, ends the episode ungraded; an ``oarjax.errors.UserError`` stops the run. ``replayable = False`` says that
the same turns may lead elsewhere a second time, so that a lost episode is not played again.

Python's and NumPy's global random numbers are seeded before every turn, by the episode's seed and the turn's number.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from oarjax.errors import ConfigError, UserError
from oarjax.system.plugins import import_object

BUILT_IN = {
    f"builtin:{name.lower()}": f"oarjax.environments.shipped:{name}" for name in ("Calculator", "Guess", "Python")
}
RESERVED = ("reset", "reward", "get_reward", "close")
"""Public methods that are not tools."""

MAX_TEXT = 2**20
"""Characters of an observation; more are cut."""
MAX_STATE = 2**16
"""Characters of the state at an episode's end, as JSON."""
MAX_CALLS = 64
"""Tool calls of a turn; more are not made."""
MAX_REWARD = 3.4e38
"""Largest reward that float32 holds."""

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
THOUGHT = "</think>"
"""Calls before the last of these are part of the reasoning."""


class TurnOutcome(NamedTuple):
    """The observation after a turn, None at the end of the episode, the turn's reward, and the state at the end."""

    text: str | None
    reward: float = 0.0
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class EnvironmentClass:
    """A user's class.

    Attributes:
        name: as the config has it.
        create: makes an instance, with the settings bound.
        tools: its tools' functions by name, {} for a class with ``step(text)``.
        replayable: the same turns always lead to the same observations and rewards.
    """

    name: str
    create: Callable[[], Any]
    tools: Mapping[str, Callable[..., Any]]
    replayable: bool


def load_environment(
    name: str, settings: Mapping[str, Any] | None = None, *, field: str = "environment"
) -> EnvironmentClass:
    """Load an environment class.

    Args:
        name: ``file.py:Class``, ``module:Class``, or one of ``BUILT_IN``.
        settings: keyword arguments of its constructor.
        field: of the config, which errors name.

    Raises:
        ConfigError: it cannot be imported, is not an environment class, or has no such setting.
    """
    try:
        cls = import_object(BUILT_IN.get(name, name), field=field, expected=type)
    except ValueError as error:
        raise ConfigError(f"{error}; built in are {', '.join(BUILT_IN)}") from error
    bound = dict(settings or {})
    try:
        inspect.signature(cls).bind(**bound)
    except TypeError as error:
        raise ConfigError(
            f"{field}: {name} does not take the settings {bound}: {error}; correct the settings"
        ) from None
    if not callable(getattr(cls, "reset", None)):
        raise ConfigError(f"{field}: {name} has no method reset; add one that takes the columns of a row")
    step = vars(cls).get("step", getattr(cls, "step", None))
    whole_turns = inspect.isfunction(step) and list(inspect.signature(step).parameters)[1:] == ["text"]
    tools = {} if whole_turns else _tools(cls, f"{field}: {name}")
    if not tools and not whole_turns:
        raise ConfigError(f"{field}: {name} has neither step(self, text) nor a public method as a tool; add one")
    return EnvironmentClass(name, lambda: cls(**bound), tools, bool(getattr(cls, "replayable", True)))


def _tools(cls: type, where: str) -> dict[str, Callable[..., Any]]:
    tools = {}
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in RESERVED or not inspect.isfunction(function):
            continue
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{where}: tool {name} is async; make it a plain method, with asyncio.run inside")
        hints = "step(self, text) for whole turns, or " if name == "step" else ""
        if not inspect.getdoc(function):
            raise ConfigError(f"{where}: tool {name} has no docstring; write {hints}one, or rename it to _{name}")
        bare = [p.name for p in _parameters(function).values() if p.annotation is p.empty]
        if bare:
            raise ConfigError(f"{where}: tool {name} has no type for {', '.join(bare)}; annotate the arguments")
        tools[name] = function
    return tools


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a method without self."""
    return dict(list(inspect.signature(function).parameters.items())[1:])


def tool_schemas(environment: EnvironmentClass, *, field: str = "environment") -> list[dict[str, Any]]:
    """Return the JSON schemas of an environment's tools, as chat templates take them; [] without tools.

    Imports transformers, so call it in the parent process.

    Raises:
        ConfigError: a docstring does not describe an argument, or a type has no schema.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for name, function in environment.tools.items():
        try:
            schemas.append(get_json_schema(types.MethodType(function, object())))
        except Exception as error:  # of its docstring, of its types: each has its own class
            raise ConfigError(
                f"{field}: {environment.name}: tool {name}: {error}; see Args in its docstring"
            ) from error
    return schemas


def begin(environment: EnvironmentClass, columns: Mapping[str, Any], seed: int) -> Any:
    """Create an instance and reset it for an episode.

    Raises:
        UserError: ``reset`` returned a text.
    """
    _seed_globals(seed, 0)
    instance = environment.create()
    parameters = inspect.signature(instance.reset).parameters
    arguments: dict[str, Any] = dict(columns)
    if "seed" in parameters:
        arguments.setdefault("seed", seed)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    text = instance.reset(**arguments)
    if text:
        raise UserError(
            f"{environment.name}: reset returned {_shown(text)}, and prompts are made before an episode begins; put "
            "what it says into the prompt column, and return None"
        )
    return instance


def play(environment: EnvironmentClass, instance: Any, text: str, *, seed: int, turn: int) -> TurnOutcome:
    """Play a turn of the policy; the outcome at an episode's end has the final reward in it.

    Args:
        text: the turn.
        seed: of the episode.
        turn: its number, from 1.

    Raises:
        BaseException: what the instance raised, or a TypeError or ValueError about what it returned.
    """
    _seed_globals(seed, turn)
    if environment.tools:
        observation, reward = _call_tools(environment.tools, instance, text), 0.0
    else:
        result = instance.step(text)
        observation, reward = result if isinstance(result, tuple) and len(result) == 2 else (result, 0.0)
        reward = _number(reward, "step")
        if not isinstance(observation, str | None):
            raise TypeError(f"step returned {_shown(observation)}, expected a text or None")
        observation = observation and _clean(observation, MAX_TEXT)
    if observation is not None:
        return TurnOutcome(observation, reward)
    end = finish(instance)
    return end._replace(reward=reward + end.reward)


def finish(instance: Any) -> TurnOutcome:
    """Return the final reward of an episode and its state, and close its instance."""
    source = getattr(instance, "get_reward", None)
    value = getattr(instance, "reward", 0.0) if source is None else source
    reward = _number(value() if callable(value) else value, "reward")
    state = _state(instance)
    if callable(close := getattr(instance, "close", None)):
        close()
    return TurnOutcome(None, reward, state)


def _state(instance: Any) -> dict[str, Any]:
    """Return an instance's public attributes and properties that JSON holds, as long as they are short."""
    properties = [name for name, _ in inspect.getmembers(type(instance), lambda member: isinstance(member, property))]
    state, room = {}, MAX_STATE
    for name in sorted({*getattr(instance, "__dict__", {}), *properties}):
        try:
            value = None if name.startswith("_") else json.dumps(getattr(instance, name))
        except Exception:  # no plain data, or a property that fails
            continue
        if value is not None and len(value) <= room:
            room -= len(value)
            state[name] = json.loads(value)
    return state


def _call_tools(tools: Mapping[str, Callable[..., Any]], instance: Any, text: str) -> str | None:
    """Make the calls of a turn; return their results, None without a call."""
    calls = CALL.findall(text.rpartition(THOUGHT)[2])
    if not calls:
        return None
    room = MAX_TEXT // min(len(calls), MAX_CALLS)
    results = [_clean(_call(tools, instance, *call), room) for call in calls[:MAX_CALLS]]
    if len(calls) > MAX_CALLS:
        results.append(_error(f"{len(calls) - MAX_CALLS} more calls were not made"))
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def _call(tools: Mapping[str, Callable[..., Any]], instance: Any, body: str, end: str) -> str:
    """Make one call; return its result, or what is wrong with the call."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return _error("the call is not JSON")
    if not end:
        return _error("the call has no </tool_call>")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _error("a call needs a name and arguments")
    name, arguments = call["name"], call.get("arguments", {})
    if name not in tools:
        return _error(f"no tool is called {name[:100]}; there are {', '.join(tools)}")
    if not isinstance(arguments, dict):
        return _error("the arguments of a call are an object")
    if fault := _wrong_argument(tools[name], arguments):
        return _error(f"{name}: {fault}")
    try:
        result = getattr(instance, name)(**arguments)
    except ValueError as error:
        return _error(str(error))
    if isinstance(result, bytes | bytearray | memoryview):
        raise TypeError(f"{name} returned {_shown(result)}, expected a text")
    return str(result)


def _error(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)


def _wrong_argument(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Say what is wrong with the arguments of a call, by the signature and its types; "" if nothing is."""
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        return str(error)
    try:
        hints = get_type_hints(function)
    except Exception:  # types that exist only for a type checker
        hints = {}
    for name, value in arguments.items():
        if name in hints and not fits(value, hints[name]):
            hint, plain = hints[name], isinstance(hints[name], type) and not get_args(hints[name])
            return f"argument {name} must be {hint.__name__ if plain else str(hint).removeprefix('typing.')}"
    return ""


def fits(value: Any, hint: Any) -> bool:
    """Return False for a value of JSON that is none of a type; only the outermost type is compared."""
    origin = get_origin(hint) or hint
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if origin in (int, float):
        return isinstance(value, int if origin is int else int | float) and not isinstance(value, bool)
    if origin in (bool, str, list, dict):
        return isinstance(value, origin)
    return value is None if origin in (None, type(None)) else True


def _number(value: Any, source: str) -> float:
    """Return a reward as a float.

    Raises:
        TypeError, ValueError: it is not a number, or not finite in float32.
    """
    if value is None or isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{source} returned the reward {_shown(value)}, expected a number")
    reward = float(value)
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        raise ValueError(f"{source} returned the reward {reward}, expected a finite number")
    return reward


def _clean(text: str, limit: int) -> str:
    """Return a text that every tokenizer takes, cut at a limit with a note."""
    cut = f"\n[{len(text) - limit} more characters]" if len(text) > limit else ""
    return text[:limit].encode("utf-8", "replace").decode() + cut


def _shown(value: Any) -> str:
    return f"{value!r:.100} of type {type(value).__name__}"


def _seed_globals(seed: int, turn: int) -> None:
    random.seed(f"{seed}/{turn}")
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(random.randrange(2**32))
        random.seed(f"{seed}/{turn}")
