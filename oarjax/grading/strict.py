"""Reject answers that state more than one value, which math-verify would reduce to the right part.

math-verify reads free text: it drops words, units, per cent signs and subscripts, takes the last side of an equation,
and searches garbage for something that parses. A policy in training exploits that: for the reference 7 it accepts
``8=7``, ``7\\text{ (or 8)}`` and ``7_{8}``. Here an answer may have such parts only if the reference has them too. Text
in, text out; nothing is parsed.
"""

from __future__ import annotations

import re
from collections import Counter

from oarjax.grading.everyday import TEXT

_WORD = re.compile(
    r"(?<!\\)\b(?:or|and|not|but|if|unless|plus|minus|times|over|divided|answer|per\s?cents?|percentage|pct|half|dozens?"
    r"|hundreds?|thousands?|[mb]illions?|trillions?|squared|cubed|twice|thrice|i\.e|namely)\b",
    re.IGNORECASE,
)
_DOTS = re.compile(r"\\[lcv]?dots\w?\b|\.\.\.|…")
_EQUALS = re.compile(r"(?<![\\<>!:])=|\\(?:approx|equiv|simeq|cong|sim|doteq)\b|[≈≡]")
_REMAINDER = re.compile(r"\\[bp]?mod\b")
_RAISED = re.compile("[²³¹⁰-₎¼-¾⅐-⅞①-⑳Ⅰ-ↈ]")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*)?")
_COMMA = re.compile(r",(?!\d{3}(?!\d))|;")
_SUBSCRIPT = re.compile(r"(?<=[\d})\]])\s*_\s*(\{[^{}]*\}|\\?\w+)")
_ENVIRONMENT = re.compile(r"(?<!\\)\$|\\[(\[\])]|\\(?:boxed|fbox)\b")
_SCRIPT = re.compile(r"[_^]\s*\{[^{}]*\}")
_LAYOUT = re.compile(r"\\(?:left|right|quad|qquad|displaystyle|[,;:! ])|~")
_NAME = re.compile(
    r"(?:\\(?!(?:frac|dfrac|tfrac|sqrt|cdot|times|div|pi|pm|mp|infty|sum|prod|int|binom|over)\b)[A-Za-z]+|[A-Za-z{}'|\s])+"
)


def has_extra_values(reference: str, answer: str) -> bool:
    """Return True if an answer has something beyond one value that the reference does not have."""
    inner, flat, flat_reference = _unwrapped(answer), _without_scripts(_unwrapped(answer)), _without_scripts(reference)
    if _ENVIRONMENT.search(inner):
        return True
    value = re.sub(r"[A-Za-z]\s*\([^()]*\)", "", _LAYOUT.sub("", _EQUALS.split(inner.replace("{,}", ""))[-1]))
    if _NUMBER.fullmatch(reference) and _COMMA.search(value):
        return True
    return bool(
        (_DOTS.search(inner) and not _DOTS.search(reference))
        or (_RAISED.search(inner) and not _RAISED.search(reference))
        or (_REMAINDER.search(inner) and not _REMAINDER.search(reference))
        or _words(inner) - _words(reference)
        or (_subscripts(inner) and _subscripts(inner) != _subscripts(reference))
        or (not _equals(flat_reference) and not all(map(_is_value, _pieces(flat))))
        or any(_equals(piece) > max(1, _equals(flat_reference)) for piece in _pieces(flat))
    )


def is_list(reference: str) -> bool:
    """Return True for several values with commas between them, bare or in braces, and no words."""
    inner = reference.strip().removeprefix(r"\{").removesuffix(r"\}")
    return len(_pieces(inner)) > 1 and not _WORD.search(reference)


def without_percent(reference: str, answer: str) -> str:
    """Return an answer in per cent as a fraction of one, unless the reference is in per cent too."""
    match = re.fullmatch(r"\s*(.*?)\s*\\?%\s*", answer, re.DOTALL)
    if match is not None and "%" not in reference:
        return rf"\frac{{{match[1]}}}{{100}}"
    return re.sub(r"\s+(\\?%)", r"\1", answer)


def _without_scripts(text: str) -> str:
    """Remove subscripts and superscripts in braces, such as the range of a sum."""
    while (shorter := _SCRIPT.sub("", text)) != text:
        text = shorter
    return text


def _unwrapped(text: str) -> str:
    """Remove the dollar signs around the whole text, or the one in front of a price."""
    if re.fullmatch(r"\s*\$\s*[\d.,]+\s*", text):
        return text.replace("$", "")
    match = re.fullmatch(r"\s*(\$\$?)((?:[^$]|\\\$)*)\1\s*", text)
    return text if match is None else match[2]


def _words(text: str) -> Counter[str]:
    """Count the words that change a value, and the numbers in text that stands beside something else."""
    words = Counter(word.lower() for word in _WORD.findall(text))
    if TEXT.sub("", text).strip():
        words.update(number for part in TEXT.findall(text) for number in re.findall(r"\d+", part))
    return words


def _subscripts(text: str) -> set[str]:
    """Return the subscripts of numbers and brackets, such as the base of ``101_2``."""
    return {match.strip("{} ") for match in _SUBSCRIPT.findall(text)}


def _equals(text: str) -> int:
    return len(_EQUALS.findall(text))


def _pieces(text: str) -> list[str]:
    """Split a list at its commas and semicolons outside brackets."""
    pieces, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and depth <= 0:
            pieces.append(text[start:at])
            start = at + 1
    return [*pieces, text[start:]]


def _is_value(piece: str) -> bool:
    """Return True for a value, and for a value with its name, as in ``f(x) = 7``."""
    sides = _EQUALS.split(piece)
    return len(sides) == 1 or (len(sides) == 2 and _is_name(sides[0]))


def _is_name(side: str) -> bool:
    """Return True for a variable, a function of something, a length such as ``AB``: no value of its own."""
    side = TEXT.sub(lambda match: re.sub(r"[\s.'-]", "", match[1]), _LAYOUT.sub(" ", side))
    side = re.sub(r"_\s*(?:\{[^{}]*\}|\\?\w)|\^\s*\{?-1\}?", "", side)
    side = re.sub(r"(?<=[A-Za-z}\s])\([^()]*\)", "", side)
    return _NAME.fullmatch(side) is not None and re.search("[A-Za-z]", side) is not None
