"""Read a number as people and language models write it: ``**8** eggs``, ``The answer is $8``, ``8 miles per hour``.

math-verify multiplies letters outside ``\\text``, so a unit in plain words makes a right answer wrong. Units cannot be
listed, but words that change a value can: a phrase behind a number is a unit unless it holds one of them
(``8 hundred``, ``8 and a half``, ``8 squared``). Text in, text out; nothing is parsed.
"""

from __future__ import annotations

import re

MAX_WORDS = 8
"""Length of a unit phrase."""

_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?(?:answer|result|total)"
    r"\s*(?:is\b|are\b|:|=)\s*[:=]?|=|\\approx\b|≈",
    re.IGNORECASE,
)
_MARKED = re.compile(r"(\*\*\*|\*\*|\*|__|```|`)(?!\1)(\S|\S.*?\S)\1")
_FENCED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_WRAPPED = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|mbox|mathrm|mathbf|mathit|mathsf|operatorname)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_SIGN = r"\\?[$€£¥₹₽₩₫₪₺₴₦฿¢]|\\(?:euro|pounds|yen|textdollar|texteuro|textsterling)\b(?:\{\})?"
_CURRENCY = re.compile(
    rf"([-+]?)\s*(?:(?:US|CA|AU|NZ|HK|[AC])?(?:{_SIGN})|(?:USD|EUR|GBP|JPY|INR|CHF|CNY|Rs\.?)(?![A-Za-z]))\s*"
)
_TRAILING = re.compile(rf"(?:\s|{_SIGN}|[({{\-\\,~°º]|\^\s*\{{?\s*\\circ\b\s*\}}?|\\degree\b)+$")
_SPACE = re.compile(r"\\(?:[,;:! ]|quad\b|qquad\b|cdot\b)|~")
_DEGREE = re.compile(r"\^?\s*\{?\s*\\(?:circ|degree)\b\s*\}?|°|º")
_JOINT = re.compile(
    r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*"
)
_POWER = re.compile(r"\^\s*(?:\{\s*-?[123]\s*\}|-?[123])|(?<=[A-Za-z])[23]\b|[²³]|⁻[¹²³]")
_NAME = re.compile(r"\s*[A-Za-z]+(?:\s*_\{?\w+\}?)?\s*")
_INITIALS = re.compile(r"\b([A-Za-z])\.\s?(?=[A-Za-z]\b)")  # p.m. becomes pm., i.e. becomes ie.
_PHRASE = re.compile(rf"(?:[^\W\d_]|[\s.,/()·-]|{_SIGN})*")
_PERCENT = re.compile(r"\s*(?:\\?%|\b(?:per\s?cents?|percentage(?:\s+points?)?|pct)\b\.?)", re.IGNORECASE)

_NUMBER_WORDS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    "|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundreds?|thousands?|[a-z]*illions?|bn|mn|tn|mio|mln|bln|mil|grand"
    "|lakhs?|crores?|myriads?|googol"
)
_FRACTIONS = (
    "half|halves|halved|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]+teenth"
    "|[a-z]+tieth|hundredth|thousandth|[a-z]*illionth)s?"
)
_OPERATIONS = (
    "squared|cubed|twice|thrice|doubled?|tripled?|quadrupled?|plus|minus|divided|multiplied|added|subtracted|mod"
    "|modulo|base|factorial|choose|power|exponent|reciprocal|inverse|negative|negated|log|ln|exp|sqrt|sin|cos|tan|cot"
    "|pi|infinity|infinite|inf"
)
_LOGIC = (
    "or|and|not|nor|but|if|unless|versus|vs|instead|rather|answer|except|without|no|never|wrong|incorrect|false|maybe"
    "|perhaps|possibly|ie|eg|viz|aka|alias|namely|meaning|actually|correction|equals?|is|isnt|was|wasnt|else|otherwise"
)
_CHANGES = re.compile(
    rf"(?<![\\A-Za-z])(?:{_NUMBER_WORDS}|{_FRACTIONS}(?!s?[\s-]+grade)|{_OPERATIONS}|{_LOGIC}"
    r"|per\s?cents?|percentage|pct|times(?!\s*(?:$|as\b|more\b|an?\b|per\b|each\b|every\b))|square(?=\W*$))(?![A-Za-z])",
    re.IGNORECASE,
)
"""Words that make another value of the number before them."""

_SHORT = {"oz", "hz", "in", "yd", "yr", "ny", "nd", "ng", "nm", "no", "on"}  # no products of unknowns
_LETTERS = set("mgshlLNJWVACF")


def bare(answer: str) -> str:
    """Remove what stands around an answer: emphasis, code marks, math delimiters, a box, "The answer is", "="."""
    text = _tidy(answer)
    if len(text) > 2000:
        return text
    for _ in range(8):
        inner = _tidy(_unfenced(_MARKED.sub(r"\2", text, count=1) if text[:1] in "*_`" else text))
        lead = _LEAD.match(inner)
        inner = inner[lead.end() :].strip() if lead is not None and lead.end() < len(inner) else inner
        if inner == text:
            break
        text = inner
    return text


def without_unit(answer: str) -> str | None:
    """Return the number in front of a unit phrase, the answer itself without one, None if words change the value.

    A currency in front of the number, and a name with an equals sign, are removed too.
    """
    whole = TEXT.fullmatch(answer)
    text = answer if whole is None else whole[1].strip()
    currency = _CURRENCY.match(text)
    if currency is not None:
        text = currency[1] + text[currency.end() :]
    name, equals, value = text.partition("=")
    text = value.strip() if equals and "=" not in value and _NAME.fullmatch(name) else text
    start = _first_word(text)
    if start is None or not re.search(r"\d", text[:start]):
        return _TRAILING.sub("", text) if re.fullmatch(rf"[\d.,\s+-]+(?:{_SIGN})", text) else text
    head, phrase = _TRAILING.sub("", text[:start]), _flat(text[start:])
    if is_unit(phrase):
        return head
    return None if TEXT.search(text) or re.search(r"(?<![\\A-Za-z])[A-Za-z]{2}", text[start:]) else text


def in_percent(answer: str) -> str | None:
    """Return the number of an answer in per cent, as in ``25 percent of the eggs``; None for any other."""
    text = _flat(answer)
    sign = _PERCENT.search(text)
    if sign is None or not re.search(r"\d", text[: sign.start()]) or not is_unit(text[sign.end() :]):
        return None
    return text[: sign.start()].strip()


def with_commas(answer: str) -> str:
    """Write a list with commas alone: ``1, 2 \\text{ and } 3`` becomes ``1, 2, 3``."""
    return _JOINT.sub(", ", answer)


def is_unit(phrase: str) -> bool:
    """Return True for a phrase that may follow a number without changing its value; True for none."""
    phrase = _POWER.sub("", _DEGREE.sub(" degrees ", phrase)).replace("'", "").replace("’", "")
    phrase = _INITIALS.sub(r"\1", phrase)
    words = re.findall(r"[^\W\d_]+", phrase)
    if not _PHRASE.fullmatch(phrase) or len(words) > MAX_WORDS or _CHANGES.search(phrase.strip(" .,")):
        return False
    return all(_is_word(word, len(words)) for word in words)


def _is_word(word: str, words: int) -> bool:
    """Return False for what looks like unknowns, such as x, xy or abc."""
    if len(word) == 1:
        return word in _LETTERS or (word in "as" and words > 1)
    lower = word.lower()
    if lower in "abcdefghijklmnopqrstuvwxyz" and lower not in ("hi", "no", "st"):
        return False
    return len(word) > 2 or lower in _SHORT or not set(lower) & set("xyzn")


def _first_word(text: str) -> int | None:
    """Return where the first word or text command begins, beyond other commands."""
    for match in re.finditer(rf"{TEXT.pattern}|\\[A-Za-z]+|[^\W\d_]", text):
        if not match[0].startswith("\\") or match[1] is not None:
            return match.start()
    return None


def _flat(text: str) -> str:
    """Replace text commands by their text, and LaTeX's spaces by plain ones."""
    return _SPACE.sub(" ", TEXT.sub(r" \1 ", text)).strip()


def _unfenced(text: str) -> str:
    """Remove math delimiters or a box around the whole text."""
    for left, right in _FENCED:
        inner = text[len(left) : len(text) - len(right)]
        if (
            text.startswith(left)
            and text.endswith(right)
            and inner.strip()
            and left not in inner
            and right not in inner
        ):
            return inner
    box = _WRAPPED.fullmatch(text)
    return box[1] if box is not None and _is_closed(box[1]) else text


def _is_closed(text: str) -> bool:
    """Return True if no brace closes before it opens, and all close."""
    depth = 0
    for sign in re.sub(r"\\.", "", text, flags=re.DOTALL):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0


def _tidy(text: str) -> str:
    """Strip white space and a final full stop."""
    return text.strip().removesuffix(".").strip()
