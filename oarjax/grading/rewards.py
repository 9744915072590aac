"""Named rewards: what a completion is worth, as a list of small functions.

A reward takes a ``Sample`` and returns a float. A user's own stands in a Python file or module that
``grading.plugins`` names::

    from oarjax.grading.rewards import Sample, reward

    @reward("short")
    def short(sample: Sample) -> float:
        return float(sample.tokens < 200)

Rewards run in the grading workers (``grading/grader.py``), never in the training process: they may hang, crash or eat
memory, and that costs one answer. Beside the reward ``math``, sympy's ``sympify`` and ``parse_expr`` read numbers and
names alone: they would run what a completion says (``grading/no_eval.py``). This module imports neither jax nor, before
the first answer, sympy.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from oarjax.credit.answer_text import extract_answer
from oarjax.grading.no_eval import forbid_evaluation
from oarjax.system.plugins import import_plugin


@dataclass(frozen=True)
class Sample:
    """One completion to grade.

    ``extracted`` is the final answer found in the completion (``oarjax.credit.answer_text``), None where there is
    none; the grader fills it in. ``ended`` is False where the completion was cut at the longest length.
    """

    prompt: str
    completion: str
    answer: str  # the reference: a bare answer, or a solution that ends in "#### x" or \boxed{x}
    ended: bool = True
    tokens: int = 0
    extracted: str | None = None


Reward = Callable[[Sample], float]


class Unparseable(ValueError):
    """A reward could not read the model's answer (then it is worth 0) or the reference (then nothing is known)."""

    def __init__(self, which: Literal["answer", "reference"], text: str):
        super().__init__(f"the {which} {text[:200]!r} is not an expression that can be compared")
        self.which = which


_registry: dict[str, Reward] = {}


def reward(name: str) -> Callable[[Reward], Reward]:
    """Register a reward under a name.

    Raises:
        ValueError: another function has the name. Loading the same file twice is fine.
    """

    def register(function: Reward) -> Reward:
        other = _registry.get(name)
        if other is not None and _place(other) != _place(function):
            raise ValueError(
                f"reward {name!r} is registered twice: in {_place(other)} and {_place(function)}; rename one"
            )
        _registry[name] = function
        return function

    return register


def _place(function: Any) -> str:
    code = getattr(function, "__code__", None)  # a callable object has none
    return f"{code.co_filename}:{function.__qualname__}" if code else repr(function)


def load_plugins(plugins: Sequence[str]) -> None:
    """Import the Python files (``path/to/mine.py``) and modules (``package.mine``) that register rewards.

    Raises:
        ValueError: one cannot be found or fails while it is imported.
    """
    for plugin in plugins:
        try:
            import_plugin(plugin)
        except Exception as error:
            raise ValueError(
                f"grading.plugins: {plugin!r} cannot be imported ({type(error).__name__}: {error}); "
                "expected a Python file or a module on the path"
            ) from error


def find_rewards(names: Sequence[str]) -> tuple[Reward, ...]:
    """The functions of these names.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    unknown = [name for name in names if name not in _registry]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _registry, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"grading.rewards: no reward is called {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(sorted(_registry))}{hint}. Register your own with @reward and name its file in grading.plugins"
        )
    return tuple(_registry[name] for name in names)


@reward("format")
def has_answer(sample: Sample) -> float:
    """1 where the completion holds an answer in the asked style, right or wrong."""
    return float(sample.extracted is not None)


@reward("exact")
def same_text(sample: Sample) -> float:
    """1 where the answer is the reference letter by letter, or both are the same plain number. Cheap."""
    if sample.extracted is None:
        return 0.0
    return float(_plainly_equal(reference_answer(sample.answer), _tidy(sample.extracted)) is True)


@reward("math")
def same_value(sample: Sample) -> float:
    """1 where the answer equals the reference as mathematics, 0 where it differs or there is none.

    math-verify compares, with its own timeouts off (they call a slow answer wrong; the grader has a deadline) and
    errors on. It reads LaTeX with a grammar, and what would become code is refused (``grading/no_eval.py``).
    Departures: plain numbers are compared directly, with the same verdict where math-verify gives one; expressions
    longer than ``MAX_LENGTH`` or nested deeper than ``MAX_DEPTH`` count as unparseable, the latter because sympy's
    recursion errors inside the comparison would come out as "wrong".

    Raises:
        Unparseable: the answer or the reference is no expression.
    """
    if sample.extracted is None:
        return 0.0
    gold, answer = reference_answer(sample.answer), _tidy(sample.extracted)
    if not gold:
        raise Unparseable("reference", sample.answer)
    plain = _plainly_equal(gold, answer)
    if plain is not None:
        return float(plain)
    target = _parsed_reference(gold)
    if not target:
        raise Unparseable("reference", gold)
    parsed = _parsed(answer)
    if not parsed:
        raise Unparseable("answer", answer)
    from math_verify import verify

    return float(verify(list(target), list(parsed), timeout_seconds=None, raise_on_error=True))


MAX_DEPTH = 100
"""Levels of an expression tree that are compared; sympy recurses several frames a level."""

MAX_LENGTH = 2000
"""Characters of an expression that is parsed. Plain numbers are compared at any length."""

_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?")


def reference_answer(text: str) -> str:
    """The bare answer of a reference that may be a whole solution (``#### x`` or ``\\boxed{x}``)."""
    for style in ("hash", "boxed"):
        found = extract_answer(text, style=style)
        if found is not None:
            return _tidy(found)
    return _tidy(text)


def _tidy(text: str) -> str:
    """White space and a sentence's full stop taken off."""
    return text.strip().removesuffix(".").strip()


def _plainly_equal(gold: str, answer: str) -> bool | None:
    """Equal or different without mathematics; None where only mathematics can tell.

    Numbers with a decimal point are equal up to rounding (six places), so only those further apart are different.
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
        """To ten decimal places, for up to fifteen digits before the point."""
        size = Decimal(f"{self.whole or 0}.{self.fraction[:10] or 0}")
        return -size if self.negative else size


def _plain_number(text: str) -> _PlainNumber | None:
    """Digits of any script with thousands separators, a sign and a decimal point; of any length, in linear time."""
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


def _parsed(text: str) -> tuple[Any, ...]:
    """What math-verify reads in an answer, empty where it is no expression (a bare string or 1/0 is none)."""
    if len(text) > MAX_LENGTH:
        return ()
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic, MatrixBase, nan, zoo

    forbid_evaluation()
    try:
        found = parse(
            f"\\boxed{{{text}}}",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,  # type: ignore[arg-type]  # None is how it is switched off
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:  # its parser has no error class of its own; a nesting too deep for it is a RecursionError
        return ()
    expressions = (e for e in found if isinstance(e, Basic | MatrixBase) and e not in (nan, zoo))
    return tuple(e for e in expressions if _depth(e) <= MAX_DEPTH)


def _depth(expression: Any) -> int:
    """Levels of an expression tree, counted without recursion up to ``MAX_DEPTH`` + 1 (also said of huge trees)."""
    level, depth = [expression], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH or len(level) > 100_000:
            return MAX_DEPTH + 1
        level = [child for node in level for child in getattr(node, "args", ())]
    return depth
