"""Read a number as people and language models write it: ``**8** eggs``, ``The answer is $8``, ``8 miles per hour``.

math-verify multiplies letters outside ``\\text``, so a unit in plain words makes a right answer wrong. Units cannot be
listed, but words that change a value can: a phrase behind a number is a unit unless it holds one of them
(``8 hundred``, ``8 and a half``, ``8 squared``). Text in, text out; nothing is parsed.
"""

from __future__ import annotations

import re

MAX_WORDS = 8
"""Length of a unit phrase."""

MAX_CHARACTERS = 2000
"""Length of an answer whose surroundings are removed; some patterns here take quadratic time."""

_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?(?:answer|result|total)"
    r"\s*(?:is\b|are\b|:|=)\s*[:=]?|=>?|-+>|→|⇒|∴|\\approx\b|≈"
    r"|\\(?:[Rr]ightarrow|Longrightarrow|implies|therefore|displaystyle|large|Large)(?![A-Za-z])",
    re.IGNORECASE,
)
_STATED = re.compile(
    r"(?P<words>(?:[A-Za-z'’]+,?\s+){0,8}?)(?:(?:is|are|was|were|has|have|had|needs?|gets?|got|earns?|earned|costs?|pays?|paid"
    r"|makes?|made|so|thus|therefore|hence|exactly|only|just|total\s+of)\b,?\s*:?|(?P<name>[A-Za-z]+)\s*[:=])\s*(?=[^\sA-Za-z]*\d)",
    re.IGNORECASE,
)
"""Words in front of a number that state it: ``The total cost is``, ``Tom has``, ``Cost:``."""
_OTHERWISE = re.compile(
    r"\b(?:squares?|cubes?|roots?|reverse|opposite|less|more|over|under|of\s+the\s+answer)\b", re.IGNORECASE
)
_MARKED = re.compile(r"(\*\*\*|\*\*|\*|__|```|`)(?!\1)(\S|\S.*?\S)\1")
_UNPAIRED = re.compile(r"^\*\*|\*\*$")  # its partner stands outside the answer, as in **#### 8**
_FENCED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ('"', '"'), ("“", "”"), ("'", "'"))
_WRAPPED = re.compile(
    r"\\(?:boxed|fbox|boldsymbol|bold|bm|mathbf|underline|(?:text)?color\s*\{\w+\})\s*\{(.*)\}", re.DOTALL
)
_FONT = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)\b\s*([^{}]*)\}|\\(?:rm|bf|it|sf|tt)\s*\{([^{}]*)\}")
_GOOD = r"\s\u200b\u2060\ufeff✅✓✔\uFE0F\U0001F300-\U0001FAFF"
_EDGES = re.compile(rf"^[{_GOOD}]+|(?:[~{_GOOD}]|\\(?:[,;:! \\]|q?quad(?![a-z])|$))+$")
"""Marks of approval at either end, and LaTeX's spaces at the end."""
TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|mbox|mathrm|mathbf|mathit|mathsf|operatorname)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_SIGN = r"\\?[$€£¥₹₽₩₫₪₺₴₦฿¢]|\\(?:euro|pounds|yen|textdollar|texteuro|textsterling)\b(?:\{\})?"
_CURRENCY = re.compile(
    rf"([-+]?)\s*(?:(?:US|CA|AU|NZ|HK|NT|[ACRS])?(?:{_SIGN})|(?:USD|EUR|GBP|JPY|INR|CHF|CNY|R[sM]\.?|kr)(?![A-Za-z]))\s*"
)
_TRAILING = re.compile(rf"(?:\s|{_SIGN}|[({{\-–—\\,~°º/:]|\{{\}}|\^\s*\{{?\s*\\circ\b\s*\}}?|\\degree\b)+$")
_SPACE = re.compile(r"\\(?:[,;:! ]|quad\b|qquad\b|cdot\b)|~")
_DEGREE = re.compile(r"\^?\s*\{?\s*\\(?:circ|degree)\b\s*\}?|°|º")
_JOINT = re.compile(
    r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*"
)
_POWER = re.compile(r"(?<=[A-Za-z])(?:\s*(?:\^\s*(?:\{\s*-?[123]\s*\}|-?[123])|[²³]|⁻[¹²³])|[23]\b)")
_NAME = re.compile(r"\s*[A-Za-z]+(?:\s*_\{?\w+\}?)?\s*")
_INITIALS = re.compile(r"\b([A-Za-z])\.\s?(?=[A-Za-z]\b)")  # p.m. becomes pm., i.e. becomes ie.
_LETTER = "A-Za-zÀ-ÖØ-öø-ɏ"
_PHRASE = re.compile(rf"(?:[{_LETTER}]|[\s.,/()·!-]|{_SIGN})*")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,; ]|[ \u00a0\u2009\u202f])\d{3})+(?!\d)")
_MIXED = re.compile(r"(?<![\d/.,])(\d+)\s+(\d+)/(\d+)(?![\d/])")
_UNIT = r"\{\s*(\\(?:text|mathrm)\s*\{[^{}]*\}|[A-Za-z]{1,12})\s*\}"
_RATIO = re.compile(rf"\\[dt]?frac\s*{_UNIT}\s*{_UNIT}")
_BARE = re.compile(rf"[-+]?[\d.,]+\s*(?:{_SIGN}|(?:\{{\}})?(?:{_DEGREE.pattern}))")
_PERCENT = re.compile(r"[\s-]*(?:\\?%|\b(?:per\s?cents?|percentage(?:\s+points?)?|pct)\b\.?)", re.IGNORECASE)

_DIGIT_WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|fifty"
_NUMBER_WORDS = (
    "zero|nought|naught|nil|null|none|nothing|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    "|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundreds?|thousands?|[a-z]*illi[oó]n(?:en|es|s)?|millones|bn|mn|tn|mio|mln|bln|mil|bil|tril|mille|tausend|hundert|grand"
    "|lakhs?|crores?|cr|myriads?|googol|thous?|ppm|bps|basis\\s+points?|per\\s?mille|[a-z]+fold|tau|phi"
)
_FRACTIONS = (
    "half|halfs|semi|halves|halved|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]+teenth"
    "|[a-z]+tieth|hundredth|thousandth|[a-z]*illionth)s?"
)
_OPERATIONS = (
    "squared|cubed|twice|thrice|doubled?|tripled?|[a-z]+upled?|raised|increment(?:ed)?|decrement(?:ed)?|reversed|plus|minus|divided|multiplied|added|subtracted|mod"
    "|modulo|base|factorial(?:ized)?|choose|power|exponent|reciprocal|inverse|negative|negated|log|ln|exp|sqrt|sin|cos|tan|cot"
    "|pi|infinity|infinite|inf"
)
_LOGIC = (
    "or|and|oder|ou|not|nope|nah|aint|nor|xor|either|neither|though|although|however|oops|scratch|but|if|unless|versus|vs|instead|rather|answer|except|without|no|never|wrong|incorrect|false|maybe"
    "|perhaps|possibly|ie|eg|viz|aka|alias|namely|meaning|actually|correction|equals?|is|isnt|was|wasnt|else|otherwise"
)
_CHANGES = re.compile(
    rf"(?<![\\{_LETTER}])(?:{_NUMBER_WORDS}|{_FRACTIONS}(?!s?[\s-]+grade)|{_OPERATIONS}|{_LOGIC}"
    r"|per\s?cents?|percentage|pct|times(?=\s+(?:itself|that|this|it|its)\b)"
    rf"|(?:square|sq|cube|root|hex|octal|binary|hexadecimal|point|mega|giga|milli|micro|nano)(?=\W*$))(?![{_LETTER}])",
    re.IGNORECASE,
)
"""Words that make another value of the number before them."""

_COMPOUND = re.compile(
    rf"\b(?:{_DIGIT_WORDS})-(?!(?:{_NUMBER_WORDS}|{_FRACTIONS}|dozens?|scores?|pairs?|times|fold)\b)[a-z]{{3,}}(?=[\s-][a-z])",
    re.IGNORECASE,
)
"""A size that belongs to the unit, as in ``two-dollar bills``."""

_SHORT = {"oz", "hz", "in", "yd", "yr", "ny", "nd", "ng", "nm", "no", "on", "an", "my", "by"}  # no products of unknowns
_LETTERS = set("mgshlLNJWVACF")


def bare(answer: str) -> str:
    """Remove what stands around an answer: emphasis, code marks, math delimiters, a box, "The answer is", "="."""
    if len(answer) > MAX_CHARACTERS:
        return answer.strip().removesuffix(".").strip()
    text = re.sub(r"\s+", " ", answer.replace("−", "-"))
    text = _tidy(re.sub(r"(?<=\d)\s*°", r"^\\circ ", text))
    text = _FONT.sub(lambda font: rf"\text{{{font[1] or font[2]}}}", text)
    for _ in range(8):
        text = _UNPAIRED.sub("", text) if text.count("**") == 1 else text
        inner = _tidy(_unfenced(_MARKED.sub(r"\2", text, count=1) if text[:1] in "*_`" else text))
        lead = _LEAD.match(inner)
        inner = inner[lead.end() :].strip() if lead is not None and lead.end() < len(inner) else inner
        if inner == text:
            break
        text = inner
    return text


def without_unit(answer: str) -> str | None:
    """Return the number in front of a unit phrase, the answer itself without one, None if words change the value.

    Words that state the number, a currency in front of it, and a name with an equals sign are removed too.
    """
    match = TEXT.fullmatch(answer) or re.fullmatch(r"\(([^(),;]+)\)", answer)
    text = _without_statement((answer if match is None else match[1]).strip().rstrip(",; "))
    text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), _RATIO.sub(r"\1/\2", text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    currency = _CURRENCY.match(text)
    if currency is not None:
        text = currency[1] + text[currency.end() :]
    name, equals, value = text.partition("=")
    text = value.strip() if equals and "=" not in value and _NAME.fullmatch(name) else text
    start = _first_word(text)
    if start is None or not re.search(r"\d", text[:start]):
        return _TRAILING.sub("", text) if _BARE.fullmatch(text) else text
    head, phrase = text[:start], _flat(text[start:])
    if is_unit(phrase) and not (len(phrase) == 1 and head.rstrip().endswith("/")):  # a fraction, 8/m
        return _TRAILING.sub("", head)
    unknown = re.fullmatch(r"[-+]?[\d.,\s]*\d[\d.,\s]*/?\s*[^\W\d_eiEI]", text) is not None
    return None if unknown or TEXT.search(text) or re.search(r"(?<![\\A-Za-z])[A-Za-z]{2}", text[start:]) else text


def _without_statement(text: str) -> str:
    """Remove the words in front of a number that state it, unless they change its value."""
    lead = TEXT.match(text)
    plain = text if lead is None else f"{lead[1]} {text[lead.end() :]}".strip()
    answered, stated = _LEAD.match(plain), _STATED.match(plain)
    if answered is not None:
        return plain[answered.end() :].strip()
    if stated is None:
        return plain if _CURRENCY.match(plain) else text
    words = f"{stated['words']} {stated['name'] or ''}"
    return text if _CHANGES.search(words) or _OTHERWISE.search(words) else plain[stated.end() :]


def in_percent(answer: str) -> str | None:
    """Return the number of an answer in per cent, as in ``25 percent of the eggs``; None for any other."""
    text = _flat(_without_statement(answer))
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
    phrase = re.sub(r"\b[A-Za-z]-(?=[a-z]{3})", "", _COMPOUND.sub("", _INITIALS.sub(r"\1", phrase)))
    words = re.findall(r"[^\W\d_]+", phrase)
    if not _PHRASE.fullmatch(phrase) or len(words) > MAX_WORDS or _CHANGES.search(phrase.strip(" .,!")):
        return False
    return all(_is_word(word, len(words)) for word in words)


def _is_word(word: str, words: int) -> bool:
    """Return False for what looks like unknowns, such as x, xy or abc."""
    if len(word) == 1:
        return word in _LETTERS or (word in "as" and words > 1)
    lower = word.lower()
    if (lower in "abcdefghijklmnopqrstuvwxyz" and lower not in ("hi", "no", "st")) or re.fullmatch("[ivx]+", lower):
        return False
    return word != "MM" and (len(word) > 2 or lower in _SHORT or not set(lower) & set("xyzn"))


def _first_word(text: str) -> int | None:
    """Return where the first word or text command begins, beyond other commands."""
    for match in re.finditer(rf"{TEXT.pattern}|\\[A-Za-z]+|[^\W\d_]", text):
        if not match[0].startswith("\\") or match[1] is not None:
            return match.start()
    return None


def _flat(text: str) -> str:
    """Replace text commands by their text, and LaTeX's spaces by plain ones."""
    return re.sub(r"\s+", " ", _SPACE.sub(" ", TEXT.sub(r" \1 ", text))).strip()


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
    """Strip white space, LaTeX's too, marks of approval, and a final full stop."""
    text = _EDGES.sub("", text.strip())
    return text if text.endswith("..") else text.removesuffix(".").strip()
