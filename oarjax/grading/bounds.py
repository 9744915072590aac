"""Bound what evaluating an answer can cost, from its text alone.

``10^{10^{10}}`` and ``(10^9)!`` keep sympy busy for hours. A deadline would leave them ungraded, and a policy would
learn to write them in place of a wrong answer. The bounds hold before anything is parsed, so that the verdict is the
same on every machine. Sizes are estimated from above: a letter counts as e, brackets as the product of their factors.
"""

from __future__ import annotations

import itertools
import math
import re

MAX_DIGITS = 4000
"""Digits of a number that an answer writes or evaluates to; Python converts at most 4300 to text."""

MAX_EXPONENT = 5000
"""Limit of exponents, of the degree of a root, of a range's end, and of the upper number of a binomial coefficient."""

MAX_FACTORIAL = 1000

MAX_NESTING = 10
"""Depth of brackets. The parser's time doubles with each level: 2 s at 10, minutes at 20."""

MAX_FUNCTIONS = 4
"""Functions of functions (``\\sin``, ``\\log``, ``\\lfloor``) or multiplied; each takes three times as long."""

MAX_TERMS = 128
"""Terms of an expanded power of a sum, and of sums and products over a range; those in one answer multiply."""

MAX_POWERS = 100
"""Powers in one answer; a chain of them nests without brackets."""

MAX_ROOT_DIGITS = 300
"""Digits under a root, which is simplified by looking for prime factors."""

_TOKEN = re.compile(
    r"(?P<power>\^|\*\*|(?<=\d)[eE](?=[+-]?\d))|(?P<number>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|(?P<sub>_)"
    r"|(?P<open>\\?[{(\[])|(?P<close>\\?[})\]])|(?P<factorial>!+)|(?P<sign>[-+,;=<>&])|\\?(?P<name>[A-Za-z]+|.)",
    re.DOTALL,
)
_ROW = re.compile(r"(?:[-+|]\s*){2,}|(?:\\(?:sqrt|[dt]?frac|[dt]?binom)\s*\d?\s*){2,}")
_EXPONENTIAL = {"exp", "sinh", "cosh", "tanh", "coth"}
_APPLIED = re.compile(
    r"(?P<function>\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|operatorname)(?![A-Za-z]))"
    r"|(?P<open>\\lfloor|\\lceil|[{(\[])|(?P<close>\\rfloor|\\rceil|[})\]])|(?P<sign>[-+,;=<>&])"
)
_LAYOUT = {
    "left",
    "right",
    "big",
    "Big",
    "bigl",
    "bigr",
    "displaystyle",
    "text",
    "mathrm",
    "mathbf",
    "mbox",
    "operatorname",
}


def exceeds_bounds(text: str) -> bool:
    """Return True if evaluating LaTeX text could cost more than the bounds of this module allow."""
    if _nesting(text) > MAX_NESTING or _functions(text) > MAX_FUNCTIONS:
        return True
    reader = _Reader(text)
    if reader.powers > MAX_POWERS:
        return True
    return reader.product() > MAX_DIGITS or reader.terms > MAX_TERMS


def _nesting(text: str) -> int:
    """Count the levels of brackets, and the signs or commands in a row, which nest without brackets."""
    depth = deepest = 0
    for match in re.finditer(r"[{(\[]|[})\]]", text):
        depth = depth + 1 if match[0] in "{([" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return max([deepest, *(len(re.findall(r"[-+|\\]", row[0])) for row in _ROW.finditer(text))])


def _functions(text: str) -> int:
    """Count the functions that are applied to each other, or multiplied."""
    outer, applied, deepest = [0], [0], 0
    for match in _APPLIED.finditer(text):
        if match.lastgroup == "function":
            applied[-1] += 1
        elif match.lastgroup == "open":
            outer.append(outer[-1] + applied[-1] + match[0].startswith("\\"))
            applied.append(0)
        elif match.lastgroup == "close" and len(outer) > 1:
            outer.pop()
            applied.pop()
        elif match.lastgroup == "sign":
            applied[-1] = 0
        deepest = max(deepest, outer[-1] + applied[-1])
    return deepest


class _Reader:
    """Estimate the decimal logarithm of the largest number in a text, infinite beyond a bound, and the terms."""

    def __init__(self, text: str):
        tokens = [(str(match.lastgroup), match[match.lastgroup or 0]) for match in _TOKEN.finditer(text)]
        self._tokens = [token for token in tokens if not token[1].isspace() and token[1] not in _LAYOUT]
        self._at = 0
        self.powers = sum(kind == "power" for kind, _ in self._tokens)
        self.terms = 1.0

    def product(self, *, inner: bool = False) -> float:
        """Read to the end, or to the bracket that closes; return the largest product of factors between two signs."""
        largest = size = 0.0
        while self._at < len(self._tokens):
            kind, _ = self._tokens[self._at]
            if kind in ("close", "sign"):
                self._at += 1
                largest, size = max(largest, size), 0.0
                if kind == "close" and inner:
                    break
            else:
                size += self._factor()
        return max(largest, size)

    def _factor(self, *, raised: bool = False) -> float:
        """Read a number, a name or brackets, with powers and factorials; an exponent has no subscripts of its own."""
        start = self._at
        ranged = start < len(self._tokens) and self._tokens[start][1] in ("sum", "prod")
        size = self._atom()
        base = self._tokens[start : self._at]
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if kind == "power":
                self._at += 1
                exponent = self._factor(raised=True)
                self.terms *= 10 ** min(exponent, 9) if ranged else _expanded(base, exponent)
                size = _power(size, exponent)
            elif kind == "factorial":
                self._at += 1
                size = _factorial(size, len(text))
            elif kind == "sub" and not raised:
                self._at += 1
                first = self._atom()
                self.terms *= 10 ** min(first, 9) if ranged else 1
            else:
                break
        return size

    def _atom(self) -> float:
        if self._at >= len(self._tokens):
            return 0.0
        kind, text = self._tokens[self._at]
        if kind in ("close", "power", "factorial", "sub"):
            return 0.0
        self._at += 1
        if kind == "number":
            digits = text.replace(",", "").lstrip("0")
            return math.log10(int(digits or 1)) if len(digits) <= 15 else float(len(digits))
        if kind == "open":
            return self.product(inner=True)
        return self._atom() if kind == "sign" else self._named(text)

    def _named(self, name: str) -> float:
        """Read the arguments of commands that compute; those of others are read as factors."""
        following = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if name == "sqrt":
            degree = _power(0.0, self._atom()) if following[1] == "[" else 0.0
            size = self._atom()
            return math.inf if math.isinf(degree) or size > MAX_ROOT_DIGITS else size
        if name in _EXPONENTIAL:
            return _power(0.0, self._atom())
        if name in ("Gamma", "gamma") and following[0] == "open":
            return _factorial(self._atom(), 1)
        if name.endswith("binom"):
            return _power(math.log10(2), self._atom()) + self._atom()
        if name.endswith("frac") and following[0] == "open":
            return self._atom() + self._atom()
        return 0.0


def _power(base: float, exponent: float) -> float:
    """Return the logarithm of a power from the logarithms of its two numbers."""
    return (base or math.log10(math.e)) * 10**exponent if exponent <= math.log10(MAX_EXPONENT) else math.inf


def _expanded(base: list[tuple[str, str]], exponent: float) -> float:
    """Count the terms of a power of a sum that is no number: those of its sums, by its exponent."""
    signs = sum(kind == "sign" and previous != "open" for (previous, _), (kind, _) in itertools.pairwise(base))
    if signs and any(kind == "name" for kind, _ in base):
        power = round(10 ** min(exponent, 4))
        return float(math.comb(power + signs, signs)) if signs <= 20 else math.inf
    return 1.0


def _factorial(size: float, signs: int) -> float:
    """Return the logarithm of n! from that of n; double factorials are smaller, and nobody writes a third sign."""
    beyond = signs > 2 or size > math.log10(MAX_FACTORIAL)
    return math.inf if beyond else math.lgamma(10**size + 1) / math.log(10)
