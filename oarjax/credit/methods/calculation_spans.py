"""Find the calculations and sentences of a completion, the causal spans of arXiv 2602.09331 (numpy, on the host).

A calculation is numbers joined by operators, an equals sign and a number. A sentence ends with a token that is ``.``,
``!`` or ``?`` alone, or that holds a blank line. Departures from the released code: its pattern also takes single
letters of \\times and \\div for operators; of two calculations that share a token, the first has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32

NUMBER = rb"\d+(?:\.\d+)?"
CALCULATION = re.compile(
    rb"%b(?:\s*(?:[-+*/]|\xc3\x97|\xc3\xb7)\s*%b)+\s*=\s*%b" % (NUMBER, NUMBER, NUMBER)  # also x and the obelus
)
FORMATTING = {b"#" * n for n in (1, 2, 3, 4)} | {b"=" * n for n in (1, 2, 3, 4)} | {b"-" * n for n in (1, 2, 3)}
"""Tokens whose importance is cut to a tenth, without the white space around them."""

SENTENCE, LONGEST = 5, 50
"""The fewest tokens of a sentence, and the most of any span."""
LATEX = 0.3
"""Spans with a larger share of backslashes are left out."""

NO_TEXT = -3
"""Label of tokens without bytes, such as the stop token."""


def find_calculations(
    tokens: Int[np.ndarray, "B T"],
    completion: Bool[np.ndarray, "B T"],
    token_bytes: Sequence[bytes],
    reasoning: Bool[np.ndarray, "B T"],
    *,
    most: int,
) -> Int32[np.ndarray, "B T"]:
    """Label tokens with 2 * span + formatting: spans are numbered from 0, at most ``most``, formatting is 0 or 1.

    Tokens of no span count as of span -1, and those without bytes have ``NO_TEXT``; 0 outside the completion.
    """
    labels = np.zeros(tokens.shape, np.int32)
    for row, (ids, mask) in enumerate(zip(tokens, completion)):
        pieces = [token_bytes[i] if 0 <= i < len(token_bytes) else b"" for i in ids.tolist()]
        span = np.full(len(pieces), -1)
        where = np.flatnonzero(reasoning[row])
        for number, (start, stop) in enumerate(row_spans([pieces[at] for at in where], most=most)):
            span[where[start:stop]] = np.where(span[where[start:stop]] < 0, number, span[where[start:stop]])
        formatting = np.array([piece.strip() in FORMATTING for piece in pieces])
        text = np.array([bool(piece) for piece in pieces])
        labels[row] = np.where(mask, np.where(text, 2 * span + formatting, NO_TEXT), 0)
    return labels


def row_spans(pieces: Sequence[bytes], *, most: int) -> list[tuple[int, int]]:
    """List first and last + 1 of the tokens of each span, in order; sentences that overlap a calculation are none."""
    calculations = _calculations(pieces, most=most // 2)
    sentences = [
        (start, stop)
        for start, stop in _sentences(pieces, most=most)
        if all(stop <= first or start >= last for first, last in calculations)
    ]
    spans = sorted([*calculations, *sentences], key=lambda span: span[0])
    return [(start, stop) for start, stop in spans if stop - start <= LONGEST][:most]


def _calculations(pieces: Sequence[bytes], *, most: int) -> list[tuple[int, int]]:
    stops = np.cumsum([len(piece) for piece in pieces])
    spans = []
    for match in CALCULATION.finditer(b"".join(pieces)):
        start, stop = (int(np.searchsorted(stops, at, side="right")) for at in (match.start(), match.end() - 1))
        if not _is_latex(pieces[start : stop + 1]):
            spans.append((start, stop + 1))
    return spans[:most]


def _sentences(pieces: Sequence[bytes], *, most: int) -> list[tuple[int, int]]:
    """List the sentences, the rest behind the last of ``most`` included, if it is long enough."""
    spans, start = [], 0
    for at, piece in enumerate(pieces):
        if piece.strip() not in (b".", b"!", b"?") and b"\n\n" not in piece:
            continue
        if at + 1 - start >= SENTENCE and not _is_latex(pieces[start : at + 1]):
            spans.append((start, at + 1))
        start = at + 1
        if len(spans) >= most:
            break
    if len(pieces) - start >= SENTENCE and not _is_latex(pieces[start:]):
        spans.append((start, len(pieces)))
    return spans


def _is_latex(pieces: Sequence[bytes]) -> bool:
    text = b"".join(pieces).decode("utf-8", "replace")
    return text.count("\\") > LATEX * len(text)
