"""Keyword weights: tokens of words such as "therefore" get more of the advantage. A baseline of OAR's comparison.

The paper gives no formula that we could read; the form here is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from oarjax.credit.gate import preserve_mass
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, KeywordTable, required

NONE = -1
"""Fills an n-gram up to the longest one."""


def keyword_weights(
    keyword: Bool[Array, "B T"], reasoning: Bool[Array, "B T"], *, boost: float = 2.0
) -> Float[Array, "B T"]:
    """Give 1 + boost to reasoning tokens of a keyword, then scale to a mean of 1 over the row's reasoning.

    1 outside the reasoning, and in rows where no token or every token is a keyword's.

    Raises:
        ValueError: negative boost.
    """
    if boost < 0:
        raise ValueError(f"keyword_weights: boost must be >= 0, got {boost}")
    return preserve_mass(jnp.where(keyword & reasoning, 1.0 + boost, 1.0), reasoning)


def keyword_tokens(
    tokens: Int[Array, "B T"], completion: Bool[Array, "B T"], table: KeywordTable
) -> Bool[Array, "B T"]:
    """Mark tokens that belong to an occurrence of a keyword, found as n-grams of ids.

    An occurrence that begins with a letter must not follow a token that ends in one, and one that ends with a letter
    must not be followed by a token that begins with one: "so" is not found in "al" + "so". The last prompt token is
    not looked at.
    """
    K, L = table.grams.shape
    count = (table.grams != NONE).sum(axis=1)
    begins = jnp.asarray(table.begins)[tokens] & completion
    ends = jnp.asarray(table.ends)[tokens] & completion
    inside = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))[:, :, None] & table.opens
    match = jnp.broadcast_to(completion[:, :, None], (*tokens.shape, K)) & ~inside
    for j in range(L):
        hits = (_later(tokens, j)[:, :, None] == table.grams[:, j]) & _later(completion, j)[:, :, None]
        match &= hits | (j >= count)
        match &= ~(_later(begins, j + 1)[:, :, None] & table.closes & (count == j + 1))
    inside_keyword = jnp.zeros(tokens.shape, bool)
    for j in range(L):
        starts = jnp.any(match & (j < count), axis=-1)
        inside_keyword |= jnp.pad(starts, ((0, 0), (j, 0)))[:, : tokens.shape[1]]
    return inside_keyword


def keyword_table(
    words: Sequence[str], encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]
) -> KeywordTable:
    """List the spellings of each word that are looked for (host side, once per run).

    Every single token that is the word in upper or lower case with nothing but spaces and punctuation around it (for a
    word without letters: spaces only), and the tokenizer's own encoding of the word as it is and capitalised, each with
    and without a space in front. Not found: other splits into several tokens, several-token spellings in capitals, and
    a word that shares a token with other letters.

    Args:
        encode: text to ids; a ValueError means that the vocabulary cannot write the text.
        token_bytes: the bytes of every id.

    Raises:
        ValueError: no spelling of any word can be written in this vocabulary.
    """
    by_word = _whole_words(token_bytes)
    grams: dict[tuple[int, ...], None] = {}
    for word in words:
        grams |= dict.fromkeys((i,) for i in by_word.get(_bare(word), ()))
        grams |= dict.fromkeys(_encodings(word, encode, token_bytes))
    if not grams:
        raise ValueError(f"none of {', '.join(map(repr, words)) or 'no words'} can be written in this vocabulary")
    rows = np.full((len(grams), max(map(len, grams))), NONE, np.int32)
    for row, gram in zip(rows, grams):
        row[: len(gram)] = gram
    texts = [b"".join(token_bytes[i] for i in gram) for gram in grams]
    return KeywordTable(
        grams=rows,
        opens=np.array([_in_word(text[:1]) for text in texts]),
        closes=np.array([_in_word(text[-1:]) for text in texts]),
        begins=np.array([_in_word(piece[:1]) for piece in token_bytes]),
        ends=np.array([_in_word(piece[-1:]) for piece in token_bytes]),
    )


def _later(x: Shaped[Array, "B T"], by: int) -> Shaped[Array, "B T"]:
    """Return the value ``by`` positions further on; zero past the end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1]))))


def _whole_words(token_bytes: Sequence[bytes]) -> dict[str, list[int]]:
    """Map each word to the ids that spell it alone."""
    ids: dict[str, list[int]] = {}
    for index, piece in enumerate(token_bytes):
        if bare := _bare(piece.decode("utf-8", errors="replace")):
            ids.setdefault(bare, []).append(index)
    return ids


def _bare(text: str) -> str:
    """Return a word in lower case without what surrounds it; a text without letters or digits without its spaces."""
    word = text.strip()
    if any(c.isalnum() for c in word):
        while not word[0].isalnum():
            word = word[1:]
        while not word[-1].isalnum():
            word = word[:-1]
    return word.lower()


def _encodings(
    word: str, encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]
) -> Iterator[tuple[int, ...]]:
    """Yield the tokenizer's encodings of a word, without those that do not decode to the text."""
    for text in dict.fromkeys((word, word.capitalize(), f" {word}", f" {word.capitalize()}")):
        try:
            ids = encode(text)
        except ValueError:
            continue
        if ids and b"".join(token_bytes[i] for i in ids) == text.encode():
            yield tuple(ids)


def _in_word(byte: bytes) -> bool:
    """Return whether a byte is an ASCII letter or digit, or any byte of a longer character."""
    return byte.isalnum() or byte >= b"\x80"


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Give more of the advantage to the words of the configured list."""
    if context.keyword_table is None:
        raise ValueError("keywords: needs the words as token ids, got None; give Context(keyword_table=...)")
    keyword = keyword_tokens(required(inputs.signals, "tokens", context), inputs.completion, context.keyword_table)
    return keyword_weights(keyword, inputs.span.reasoning, boost=context.credit.keywords.boost)


METHOD = CreditMethod(weigh, name="keywords", needs=("tokens", "keyword_table"))
