"""Bound what evaluating an answer can cost, from its text alone.

``10^{10^{10}}`` and ``(10^9)!`` keep sympy busy for hours. A deadline would leave them ungraded, and a policy would
learn to write them in place of a wrong answer. The bounds hold before anything is parsed, so that the verdict is the
same on every machine. Sizes are estimated from above: a letter counts as e, brackets as the product of their factors.
"""

from __future__ import annotations

import math
import re

MAX_DIGITS = 4000
"""Digits of a number that an answer writes or evaluates to; Python converts at most 4300 to text."""

MAX_EXPONENT = 5000
"""Limit of exponents, of the degree of a root, of a range's end, and of the upper number of a binomial coefficient."""

MAX_FACTORIAL = 1000

MAX_NESTING = 10
"""Depth of brackets. The parser's time doubles with each level: 2 s at 10, minutes at 20."""

_TOKEN = re.compile(
    r"(?P<power>\^|\*\*|(?<=\d)[eE](?=[+-]?\d))|(?P<number>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|(?P<sub>_)"
    r"|(?P<open>\\?[{(\[])|(?P<close>\\?[})\]])|(?P<factorial>!+)|(?P<sign>[-+,;=<>&])|\\?(?P<name>[A-Za-z]+|.)",
    re.DOTALL,
)
_ROW = re.compile(r"(?:[-+|]\s*){2,}|(?:\\(?:sqrt|[dt]?frac|[dt]?binom)\s*\d?\s*){2,}")


def exceeds_bounds(text: str) -> bool:
    """Return True if evaluating LaTeX text could cost more than the bounds of this module allow."""
    return _nesting(text) > MAX_NESTING or _Reader(text).product() > MAX_DIGITS


def _nesting(text: str) -> int:
    """Count the levels of brackets, and the signs or commands in a row, which nest without brackets."""
    depth = deepest = 0
    for match in re.finditer(r"[{(\[]|[})\]]", text):
        depth = depth + 1 if match[0] in "{([" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return max([deepest, *(len(re.findall(r"[-+|\\]", row[0])) for row in _ROW.finditer(text))])


class _Reader:
    """Estimate the decimal logarithm of the largest number in a text; infinite beyond a bound."""

    def __init__(self, text: str):
        self._tokens = [(str(match.lastgroup), match[match.lastgroup or 0]) for match in _TOKEN.finditer(text)]
        self._at = 0

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

    def _factor(self) -> float:
        """Read a number, a name or brackets, with powers and factorials."""
        size = self._atom()
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if kind == "power":
                self._at += 1
                size = _power(size, self._factor())
            elif kind == "factorial":
                self._at += 1
                size = _factorial(size, len(text))
            elif kind == "sub":
                self._at += 1
                self._atom()
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
        if name == "sqrt" and following[1] == "[":
            return math.inf if math.isinf(_power(0.0, self._atom())) else 0.0
        if name == "exp":
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


def _factorial(size: float, signs: int) -> float:
    """Return the logarithm of n! from that of n; double factorials are smaller, and nobody writes a third sign."""
    beyond = signs > 2 or size > math.log10(MAX_FACTORIAL)
    return math.inf if beyond else math.lgamma(10**size + 1) / math.log(10)
