"""Register and look up rewards, small functions that score a completion, and compare answers.

A reward takes a ``Sample`` and returns a float. Custom rewards are registered in a Python file or module that
``grading.plugins`` names::

    from oarjax import Sample, reward

    @reward("short")
    def short(sample: Sample, *, limit: int = 200) -> float:
        return float(sample.tokens < limit)

Keyword arguments are its settings: ``grading.rewards: [{name: short, settings: {limit: 100}}]``. ``per`` says how many
samples a call sees, and any of the three may be ``async def``:

    sample   one, the default                          (sample) -> float
    batch    all of a rollout, in order                (samples) -> one float per sample
    group    the completions of one prompt, in order   (samples) -> one float per sample

None, or NaN, leaves a sample ungraded. Rewards run in worker processes (``grading/grader.py``; batch, group and async
ones in a separate one, ``grading/pool.py``), never in the training process: a hang, a crash or a memory leak costs
the samples of that call. In a worker with the reward ``math``, sympy's ``sympify`` and ``parse_expr`` parse only
numbers and names: they would otherwise run a completion's text as code (``grading/no_eval.py``). This module does not
import jax, and imports sympy only for the first answer.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypeVar

from oarjax.credit.answer_text import extract_answer
from oarjax.grading.bounds import exceeds_bounds
from oarjax.grading.everyday import bare, in_percent, with_commas, without_unit
from oarjax.grading.no_eval import forbid_evaluation
from oarjax.grading.strict import has_extra_values, is_list, without_percent
from oarjax.grading.trl import has_trl_signature, needs_of_trainer, per_batch
from oarjax.system.plugins import import_plugin


@dataclass(frozen=True)
class Sample:
    """A completion to grade.

    Attributes:
        prompt: text of the dataset row, before template and ``data.prompt_format``.
        completion: text without stop and other special tokens; untrusted.
        answer: the row's reference answer.
        ended: False for a completion cut at the maximum length.
        tokens: of the completion.
        extracted: the completion's final answer (``oarjax.credit.answer_text``), filled in by the grader; None if it
            has none.
        columns: of the dataset row, by name: those of ``data.*.columns``, by default all that JSON can hold.
        group: number of the prompt within the rollout; shared by the completions of a prompt.
        limit: ``rollout.max_new``, the maximum number of tokens of a completion; 0 if unknown.
        chat: turns of a prompt that is a list of messages, else empty; ``prompt`` is its last turn's text.
        rewards: names of the rewards that grade it; empty: all of the run.
        completion_ids: tokens of the completion, for rewards of TRL's signature alone, else empty.
        environment: public attributes of the episode's environment at its end; None without one, or if it failed.
        turn_rewards: of an episode's turns, by its environment, else empty; ``completion`` joins what the policy wrote.
    """

    prompt: str
    completion: str
    answer: str  # the reference: a bare answer, or a solution that ends in "#### x" or \boxed{x}
    ended: bool = True
    tokens: int = 0
    extracted: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    group: int = 0
    limit: int = 0
    chat: Sequence[dict[str, str]] = ()
    completion_ids: Sequence[int] = ()
    environment: dict[str, Any] | None = None
    turn_rewards: Sequence[float] = ()
    rewards: Sequence[str] = ()

    def asks(self, name: str) -> bool:
        """Return True if a reward grades this sample."""
        return not self.rewards or name in self.rewards


Reward = Callable[..., Any]
"""A registered function with its settings bound."""

Registered = TypeVar("Registered", bound=Reward)
Per = Literal["sample", "batch", "group"]


class Unparseable(ValueError):
    """Raised when a reward cannot parse the model's answer (its value is 0) or the reference (no value)."""

    def __init__(self, which: Literal["answer", "reference"], text: str):
        super().__init__(f"the {which} {text[:200]!r} is not an expression that can be compared")
        self.which = which


_registry: dict[str, Reward] = {}
_places: dict[str, str] = {}  # where each was defined
_imported: dict[str, Reward] = {}  # of plugins, by name; registered once a config names one
_loading: list[str] = []  # the plugins that are being imported
_per: dict[str, Per] = {}  # of rewards that are not per sample

_temporary: set[str] = set()  # names that ``register_local`` registered

BUILT_IN = ("oarjax.grading.shaping", "oarjax.grading.code")
"""Modules of built-in rewards beside this one, imported when rewards are looked up."""


def reward(name: str, *, per: Per = "sample") -> Callable[[Registered], Registered]:
    """Register a reward under a name.

    Args:
        name: of the reward, as ``grading.rewards`` has it.
        per: what a call gets: one ``sample``, the whole ``batch`` or a prompt's ``group``; default sample.

    Raises:
        ValueError: another function has the name (importing the same file twice is fine), or an unknown ``per``.
    """
    if per not in ("sample", "batch", "group"):
        raise ValueError(f"reward {name!r}: per must be sample, batch or group, got {per!r}")

    def register(function: Registered) -> Registered:
        source = _place(function)
        earlier = _places.get(name) if name in _registry else None
        if earlier is not None and earlier != source:
            raise ValueError(f"reward {name!r} is registered twice: in {earlier} and {source}; rename one")
        _registry[name], _places[name] = function, source
        _per.pop(name, None)
        if per != "sample":
            _per[name] = per
        return function

    return register


def _place(function: Any) -> str:
    """Return where a reward is defined; of a callable object, such as an ``HttpJudge``, its plugin and class."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{function.__qualname__}"
    return f"{_loading[-1]}:{type(function).__qualname__}" if _loading else repr(function)


def load_plugins(plugins: Sequence[str]) -> None:
    """Import the Python files (``path/to/mine.py``) and modules (``package.mine``) that register rewards.

    Functions of TRL's signature are registered by name; imported ones, and those to refuse, once a config names them.

    Raises:
        ValueError: a plugin cannot be found or fails during its import.
    """
    for plugin in plugins:
        _loading.append(plugin)
        try:
            module = import_plugin(plugin)
        except Exception as error:
            raise ValueError(
                f"grading.plugins: {plugin!r} cannot be imported ({type(error).__name__}: {error}); "
                "expected a Python file or a module on the path"
            ) from error
        finally:
            _loading.pop()
        for name, function in vars(module).items():
            if has_trl_signature(function):
                if function.__module__ == module.__name__ and not needs_of_trainer(function):
                    reward(name, per="batch")(per_batch(function))
                else:
                    _imported[name] = function


def find_rewards(names: Sequence[str], settings: Mapping[str, dict[str, Any]] | None = None) -> tuple[Reward, ...]:
    """Look up the rewards of these names, with their settings bound.

    Raises:
        ValueError: a name is unknown (the message lists the known ones), or a reward has no such setting.
    """
    _import_built_in()
    for name in _imported.keys() & set(names) - _registry.keys():
        reward(name, per="batch")(per_batch(_imported[name]))
    unknown = [name for name in names if name not in _registry]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _registry, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"grading.rewards: no reward is called {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(sorted(_registry))}{hint}. Register your own with @reward, its file in grading.plugins"
        )
    return tuple(_with_settings(name, (settings or {}).get(name, {})) for name in names)


def calls_of(name: str) -> Per:
    """Return the samples that a call of a registered reward gets: one, a batch, or a group."""
    _import_built_in()
    return _per.get(name, "sample")


def _import_built_in() -> None:
    for module in BUILT_IN:
        importlib.import_module(module)


def wants_ids(name: str) -> bool:
    """Return True for a registered reward that is given the ids of the completions' tokens."""
    _import_built_in()
    return has_trl_signature(inspect.unwrap(_registry[name]))


def is_joint(name: str) -> bool:
    """Return True for a reward that runs outside the pool: per batch, per group, or async."""
    return calls_of(name) != "sample" or is_async(_registry[name])


def register_local(function: Reward) -> str:
    """Register a callable of this process until ``unregister_local``; return its name, or the one it already has.

    Raises:
        ValueError: it has no name, or another reward has the same one.
    """
    for name, registered in _registry.items():
        if inspect.unwrap(registered) is function:
            return name
    name = getattr(function, "__name__", type(function).__name__)
    if name == "<lambda>":
        raise ValueError("rewards: a lambda has no name for the config and the log; define a function")
    if has_trl_signature(function):
        reward(name, per="batch")(per_batch(function))
    else:
        reward(name)(function)
    _temporary.add(name)
    return name


def unregister_local(name: str) -> None:
    """Remove a reward that ``register_local`` registered."""
    if name in _temporary:
        _temporary.remove(name)
        del _registry[name]
        _per.pop(name, None)


def is_async(function: Any) -> bool:
    """Return True for a coroutine function, or an object that is called like one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _with_settings(name: str, settings: dict[str, Any]) -> Reward:
    function = _registry[name]
    if not settings:
        return function
    keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(settings.keys() - set(keywords))
    if unknown:
        takes = f"its settings are {', '.join(keywords)}" if keywords else "it has none (keyword-only arguments)"
        raise ValueError(f"grading.rewards: {name} has no setting {', '.join(unknown)}; {takes}")
    return functools.partial(function, **settings)


def name_of(function: Reward) -> str:
    """Return the name that a reward is registered under."""
    inner = getattr(function, "func", function)  # of a partial application
    return next((name for name, registered in _registry.items() if registered is inner), repr(function))


@reward("format")
def has_answer(sample: Sample) -> float:
    """Return 1 if the completion has an answer in the configured style, right or wrong."""
    return float(sample.extracted is not None)


@reward("exact")
def same_text(sample: Sample) -> float:
    """Return 1 if the answer and the reference are the same text or the same plain number. Cheap."""
    if sample.extracted is None:
        return 0.0
    return float(plainly_equal(reference_answer(sample.answer), _tidy(sample.extracted)) is True)


@reward("math")
def same_value(sample: Sample, *, percent_as_unit: bool = False) -> float:
    """Return 1 if the answer equals the reference mathematically, 0 if it differs or is missing.

    math-verify compares, with its own timeouts off (they count a slow answer as wrong; the grader has a deadline) and
    errors on. It parses LaTeX with a grammar, and text that would run as code is rejected (``grading/no_eval.py``).
    Departures: plain numbers are compared directly, with the same verdict if math-verify gives one, and for such a
    reference an answer may have a unit in any words (``grading/everyday.py``); an answer that states more than one
    value is wrong (``grading/strict.py``); 7% is 7/100 unless the reference is in per cent, and never equals a whole
    number above 1; expressions that exceed the bounds of ``grading/bounds.py``, ``MAX_LENGTH`` or ``MAX_DEPTH`` count
    as unparseable, the last because sympy's recursion errors inside the comparison would be reported as "wrong".

    Args:
        percent_as_unit: accept 25% and "25 percent" for the reference 25, as GSM8K's problems ask for percentages.

    Raises:
        Unparseable: the answer or the reference is not an expression.
    """
    if sample.extracted is None:
        return 0.0
    gold, answer = reference_answer(sample.answer), bare(sample.extracted)
    if not gold:
        raise Unparseable("reference", sample.answer)
    plain = plainly_equal(gold, answer)
    if plain is None and len(answer) <= MAX_LENGTH:
        answer = _as_reference(gold, answer, percent_as_unit=percent_as_unit)
        if answer is None:
            return 0.0
        plain = plainly_equal(gold, answer)
    if plain is not None:
        return float(plain)
    target = _parsed_reference(gold)
    if not target:
        raise Unparseable("reference", gold)
    if len(answer) <= MAX_LENGTH and has_extra_values(gold, answer):
        return 0.0
    parsed = _parsed(without_percent(gold, answer), whole=True)
    if not parsed:
        raise Unparseable("answer", answer)
    from math_verify import verify

    return float(verify(list(target), list(parsed), timeout_seconds=None, raise_on_error=True))


def _as_reference(gold: str, answer: str, *, percent_as_unit: bool) -> str | None:
    """Write an answer as its reference is written: a bare number, or a list; None if it certainly differs."""
    number, share = _plain_number(gold), in_percent(answer)
    if number is None and not _RATIO.fullmatch(gold):
        return with_commas(answer) if is_list(gold) else answer
    if share is None or number is None:
        return without_unit(answer)
    if percent_as_unit and plainly_equal(gold, share):
        return share
    if not number.fraction and number.whole not in ("", "1"):
        return None
    return f"{share}%" if answer.endswith("%") else answer


MAX_DEPTH = 100
"""Depth limit of expression trees; sympy recurses several frames per level."""

MAX_LENGTH = 2000
"""Length limit of expressions, in characters. Plain numbers are compared at any length."""

_RATIO = re.compile(r"-?(?:\d+/\d+|\\[dt]?frac\s*(?:\{\d+\}\s*\{\d+\}|\d\s*\d))")
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?")


def reference_answer(text: str) -> str:
    """Extract the bare answer of a reference that may be a whole solution (``#### x`` or ``\\boxed{x}``)."""
    for style in ("hash", "boxed"):
        answer = extract_answer(text, style=style)
        if answer is not None:
            return _tidy(answer)
    return _tidy(text)


def _tidy(text: str) -> str:
    """Strip white space and a final full stop."""
    return text.strip().removesuffix(".").strip()


def plainly_equal(gold: str, answer: str) -> bool | None:
    """Compare texts and plain numbers; return None if only math-verify can decide.

    math-verify rounds decimal numbers to six places, so only numbers further apart than that are certainly different.
    """
    if gold == answer:
        return True
    a, b = _plain_number(gold), _plain_number(answer)
    if a is None or b is None:
        return None
    if a == b:
        return True
    if not (a.fraction or b.fraction):
        return False
    return False if max(len(a.whole), len(b.whole)) <= 15 and abs(a.value() - b.value()) > 1e-5 else None


class _PlainNumber(NamedTuple):
    negative: bool
    whole: str  # without leading zeros; "" is 0
    fraction: str  # without trailing zeros

    def value(self) -> Decimal:
        """Return the number to ten decimal places, for up to fifteen digits before the point."""
        size = Decimal(f"{self.whole or 0}.{self.fraction[:10] or 0}")
        return -size if self.negative else size


def _plain_number(text: str) -> _PlainNumber | None:
    """Parse digits of any script with thousands separators, a sign and a decimal point, in linear time."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction = match[1], match[2].replace(",", ""), match[3] or ""
    if not (whole or fraction):
        return None
    if not text.isascii():
        whole, fraction = ("".join(str(int(digit)) for digit in part) for part in (whole, fraction))
    whole, fraction = whole.lstrip("0"), fraction.rstrip("0")
    return _PlainNumber(sign == "-" and bool(whole or fraction), whole, fraction)


@functools.lru_cache(maxsize=4096)
def _parsed_reference(text: str) -> tuple[Any, ...]:
    return _parsed(text)


def _parsed(text: str, *, whole: bool = False) -> tuple[Any, ...]:
    """Parse an answer with math-verify; empty if it is not an expression (as a bare string or 1/0).

    With ``whole`` the complete text must be an expression; without it a part suffices.
    """
    if len(text) > MAX_LENGTH or exceeds_bounds(text):
        return ()
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic, MatrixBase, nan, zoo

    forbid_evaluation()
    try:
        parsed = parse(
            f"\\boxed{{{text}}}",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            extraction_mode="first_match" if whole else "any_match",
            parsing_timeout=None,  # type: ignore[arg-type]  # None disables it
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:  # the parser has no error class; RecursionError for deep nesting
        return ()
    expressions = (e for e in parsed if isinstance(e, Basic | MatrixBase) and e not in (nan, zoo))
    return tuple(e for e in expressions if _depth(e) <= MAX_DEPTH)


def _depth(expression: Any) -> int:
    """Count the levels of an expression tree without recursion, at most ``MAX_DEPTH`` + 1 (also for huge trees)."""
    level, depth = [expression], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH or len(level) > 100_000:
            return MAX_DEPTH + 1
        level = [child for node in level for child in getattr(node, "args", ())]
    return depth
