"""From generated ids to the tokens that reason and the tokens that answer (host side, numpy).

The ids are never encoded again: every token's bytes are looked up, and positions are cumulative byte counts. What the
sampler drew need not be the tokenizer's own way to write the text, nor valid UTF-8.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32

from oarjax.oar.answer import Extent, Style, find_extent
from oarjax.types import AnswerSpan


def find_answers(
    tokens: Int32[np.ndarray, "B T"],
    completion: Bool[np.ndarray, "B T"],
    token_bytes: Sequence[bytes],
    *,
    style: Style,
    pattern: str | None = None,
) -> AnswerSpan:
    """Reasoning and answer tokens of every completion (design, sections 4 and 7).

    A token that overlaps the answer's characters is an answer token, also where it holds part of the marker or of a
    brace. Reasoning tokens are those that end before the marker begins. Marker tokens and what follows the answer are
    neither. A row without an answer has ``found`` False and both masks empty.

    Args:
        tokens: completion ids. Ids beyond the table (padding of the vocabulary) have no bytes.
        completion: generated tokens, stop token included.
        token_bytes: the bytes of every id; special and stop tokens contribute none (``b""``).
        style, pattern: see ``oarjax.oar.answer``.

    Returns:
        AnswerSpan of numpy arrays, bool [B, T], [B, T] and [B].

    Raises:
        ValueError: unknown style or bad pattern. Where a pattern runs too long, a warning, and no answer in that row.
    """
    span = AnswerSpan(
        reasoning=np.zeros(tokens.shape, bool),  # type: ignore[arg-type]
        answer=np.zeros(tokens.shape, bool),  # type: ignore[arg-type]
        found=np.zeros(tokens.shape[:1], bool),  # type: ignore[arg-type]
    )
    for row, (ids, mask) in enumerate(zip(tokens, completion)):
        where = np.flatnonzero(mask)
        pieces = [token_bytes[i] if 0 <= i < len(token_bytes) else b"" for i in ids[where].tolist()]
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
        span.found[row] = True
    return span


def byte_extent(text: bytes, *, style: Style, pattern: str | None = None) -> Extent | None:
    """``find_extent`` over bytes, in byte positions.

    Bytes that are not UTF-8 become one lone surrogate each and turn back into themselves, so positions are exact.
    """
    chars = text.decode("utf-8", "surrogateescape")
    extent = find_extent(chars, style=style, pattern=pattern)
    if extent is None:
        return None
    return Extent(*(len(chars[:at].encode("utf-8", "surrogateescape")) for at in extent))
