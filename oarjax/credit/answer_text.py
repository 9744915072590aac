"""Find the final answer of a text: one finder for answer spans (OAR) and for grading.

Text in, character positions out; imports nothing of the package, so that grading workers stay small.

Styles
    boxed  ``\\boxed{x}`` or ``\\fbox{x}``: the last one that is complete. Braces are counted; ``\\{``, ``\\}`` and
           ``\\\\`` are read as TeX reads them and count for nothing. ``\\boxed x`` without braces is no answer.
           Of nested boxes the inner one is taken. A box that was cut off is passed over for an earlier complete one.
    hash   ``#### x``: the last one, to the end of its line. Longer runs of ``#`` are headings, not markers.
    tag    ``<answer>x</answer>``: the last complete one.
    regex  the user's pattern: its last match; group 1 is the answer, or the whole match where it has no groups.

White space around the answer does not belong to it. The last marker decides: if what it holds is blank, the text has
no answer, whatever stood before.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import regex

Style = Literal["boxed", "hash", "tag", "regex"]
CUES = {"boxed": "\nThe final answer is \\boxed{", "hash": "\n#### ", "tag": "\n<answer>"}
"""Text put before a reference answer to have the policy predict it, by style."""

PATTERN_SECONDS = 1.0
"""Limit on one search with a user's pattern."""

_BOX = regex.compile(r"\\(?:boxed|fbox)\s*\{")
_HASH = regex.compile(r"(?<!#)####(?!#)([^\n]*)")
_BRACE = regex.compile(r"\\.|[{}]", regex.DOTALL)


class Extent(NamedTuple):
    """Character positions in a text; ``text[start:end]`` is the answer, and the marker begins at ``marker``."""

    marker: int
    start: int
    end: int


@functools.lru_cache(maxsize=32)
def check_pattern(pattern: str | None) -> regex.Pattern:
    """Compile the pattern of style ``regex``.

    Raises:
        ValueError: there is none, it does not compile, or it matches the empty text.
    """
    if not pattern:
        raise ValueError("answer style regex needs a pattern, got none; set credit.answer.pattern")
    try:
        compiled = regex.compile(pattern)
        blank = compiled.search("", timeout=PATTERN_SECONDS)
    except regex.error as error:
        raise ValueError(f"answer pattern {pattern!r} is not a regular expression: {error}") from None
    if blank is not None:
        raise ValueError(f"answer pattern {pattern!r} matches empty text; make it require at least one character")
    return compiled


def find_extent(text: str, *, style: Style, pattern: str | None = None) -> Extent | None:
    """Find the extent of the final answer; None where the text has none.

    Raises:
        ValueError: an unknown style, or a bad pattern (see ``check_pattern``).
        TimeoutError: the user's pattern ran for more than ``PATTERN_SECONDS``.
    """
    if style == "boxed":
        extent = _last_box(text)
    elif style == "hash":
        extent = None
        for match in _HASH.finditer(text):
            extent = Extent(match.start(), *match.span(1))
    elif style == "tag":
        extent = _last_tag(text)
    elif style == "regex":
        extent = _last_match(text, check_pattern(pattern))
    else:
        raise ValueError(f"answer style {style!r} is unknown; expected boxed, hash, tag or regex")
    return None if extent is None else _trimmed(text, extent)


def extract_answer(text: str, *, style: Style, pattern: str | None = None) -> str | None:
    """Return the text of the final answer, or None. Raises as ``find_extent`` does."""
    extent = find_extent(text, style=style, pattern=pattern)
    return None if extent is None else text[extent.start : extent.end]


def _last_box(text: str) -> Extent | None:
    """Pass once over the braces after the first box; boxes that close are remembered by where they open."""
    openings = {match.end(): match.start() for match in _BOX.finditer(text)}
    if not openings:
        return None
    best: Extent | None = None
    stack: list[int] = []
    for match in _BRACE.finditer(text, min(openings.values())):
        token = match.group()
        if token == "{":
            stack.append(match.end())
        elif token == "}" and stack:
            inside = stack.pop()
            if inside in openings and (best is None or inside > best.start):
                best = Extent(openings[inside], inside, match.start())
    return best


def _last_tag(text: str) -> Extent | None:
    end = text.rfind("</answer>")
    marker = text.rfind("<answer>", 0, max(end, 0))
    return None if marker < 0 else Extent(marker, marker + len("<answer>"), end)


def _last_match(text: str, pattern: regex.Pattern) -> Extent | None:
    extent = None
    group = 1 if pattern.groups else 0
    for match in pattern.finditer(text, timeout=PATTERN_SECONDS):
        if match.start(group) >= 0:
            extent = Extent(match.start(), *match.span(group))
    return extent


def _trimmed(text: str, extent: Extent) -> Extent | None:
    inner = text[extent.start : extent.end]
    body = inner.strip()
    if not body:
        return None
    start = extent.start + len(inner) - len(inner.lstrip())
    return Extent(extent.marker, start, start + len(body))
