"""From generated ids to the tokens that reason and the tokens that answer (host side, numpy).

The ids are never encoded again: every token's bytes are looked up, and positions are cumulative byte counts. What the
sampler drew need not be the tokenizer's own way to write the text, nor valid UTF-8.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int32

from oarjax.credit.answer_text import Extent, Style, find_extent
from oarjax.rl.checked import checked
from oarjax.types import AnswerSpan


@checked
def find_answers(
    tokens: Int[np.ndarray, "B T"],
    completion: Bool[np.ndarray, "B T"],
    token_bytes: Sequence[bytes],
    *,
    style: Style,
    pattern: str | None = None,
) -> AnswerSpan:
    """Find the reasoning and answer tokens of every completion .

    A token that overlaps the answer's characters is an answer token, also where it holds part of the marker or of a
    brace. Reasoning tokens are those that end before the marker begins. Marker tokens and what follows the answer are
    neither. A row without an answer has ``has_answer`` False and both masks empty.

    Args:
        tokens: completion ids. Ids beyond the table (padding of the vocabulary) have no bytes.
        completion: generated tokens, stop token included.
        token_bytes: the bytes of every id; special and stop tokens contribute none (``b""``).
        style: how an answer is marked, see ``oarjax.credit.answer_text``.
        pattern: regular expression of the answer, for style regex alone; default None.

    Returns:
        AnswerSpan of numpy arrays, bool [B, T], [B, T] and [B].

    Raises:
        ArgumentError: an argument does not fit the signature.
        ValueError: bad pattern. Where a pattern runs too long, a warning, and no answer in that row.
    """
    span = AnswerSpan(
        reasoning=np.zeros(tokens.shape, bool),  # type: ignore[arg-type]
        answer=np.zeros(tokens.shape, bool),  # type: ignore[arg-type]
        has_answer=np.zeros(tokens.shape[:1], bool),  # type: ignore[arg-type]
    )
    for row, (ids, mask) in enumerate(zip(tokens, completion)):
        where = np.flatnonzero(mask)
        pieces = written_pieces(ids, where, token_bytes)
        try:
            extent = byte_extent(b"".join(pieces), style=style, pattern=pattern)
        except TimeoutError:
            warnings.warn(
                f"answer pattern {pattern!r} ran too long; the row counts as one without an answer", stacklevel=2
            )
            continue
        if extent is None:
            continue
        length = np.array([len(piece) for piece in pieces])
        stop = np.cumsum(length)
        start = stop - length
        span.answer[row, where] = (length > 0) & (start < extent.end) & (stop > extent.start)
        span.reasoning[row, where] = stop <= extent.marker
        span.has_answer[row] = True
    return span


def whole_completion(
    tokens: Int32[np.ndarray, "B T"], completion: Bool[np.ndarray, "B T"], token_bytes: Sequence[bytes]
) -> AnswerSpan:
    """Mark all text as reasoning, for tasks without answers; ``has_answer`` is False in rows without text."""
    text = np.array([bool(piece) for piece in token_bytes])
    reasoning = completion & (tokens < len(text)) & text[np.minimum(tokens, len(text) - 1)]
    return AnswerSpan(reasoning=reasoning, answer=np.zeros_like(completion), has_answer=reasoning.any(1))  # type: ignore[arg-type]


def written_pieces(ids: Int[np.ndarray, "T"], where: Int[np.ndarray, "n"], token_bytes: Sequence[bytes]) -> list[bytes]:
    """Return the bytes of what the policy wrote, at the positions ``where``; a turn ends with a line break."""
    pieces = [token_bytes[i] if 0 <= i < len(token_bytes) else b"" for i in ids[where].tolist()]
    for at in np.flatnonzero(np.diff(where) > 1):
        pieces[at] += b"\n"
    return pieces


Unit = Literal["line", "sentence"]
_ENDS = {"line": re.compile(rb"\n+"), "sentence": re.compile(rb"[.!?]+(?=\s)|[;\n]+")}


def find_units(
    tokens: Int32[np.ndarray, "B T"],
    completion: Bool[np.ndarray, "B T"],
    token_bytes: Sequence[bytes],
    *,
    unit: Unit,
) -> Int32[np.ndarray, "B T"]:
    """Number, from 0, the lines or sentences that the generated tokens belong to; 0 elsewhere.

    Lines end with line breaks; sentences too, and with ``;`` or with ``.``, ``!``, ``?`` before white space (so not
    within 3.14). A token belongs to the unit in which it begins.
    """
    out = np.zeros(tokens.shape, np.int32)
    for row, (ids, mask) in enumerate(zip(tokens, completion)):
        where = np.flatnonzero(mask)
        pieces = written_pieces(ids, where, token_bytes)
        start = np.cumsum([0, *map(len, pieces)])[:-1]
        ends = np.array([m.end() for m in _ENDS[unit].finditer(b"".join(pieces))], np.int64)
        out[row, where] = np.searchsorted(ends, start, side="right")
    return out


def byte_extent(text: bytes, *, style: Style, pattern: str | None = None) -> Extent | None:
    """Run ``find_extent`` over bytes, in byte positions.

    Bytes that are not UTF-8 become one lone surrogate each and turn back into themselves, so positions are exact.
    """
    chars = text.decode("utf-8", "surrogateescape")
    extent = find_extent(chars, style=style, pattern=pattern)
    if extent is None:
        return None
    return Extent(*(len(chars[:at].encode("utf-8", "surrogateescape")) for at in extent))
