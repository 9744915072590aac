"""Built-in environments: a calculator, a guessing game, and a Python tool in the code reward's sandbox."""

from __future__ import annotations

import ast
import operator
import random
import re
from fractions import Fraction

from oarjax.grading.sandbox import prove_isolation, run_program

MAX_EXPRESSION = 200
MAX_OUTPUT = 8_000
"""Characters of a program's output that the policy sees."""

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Calculator:
    """Offers a tool that computes; the answer in the last turn is for a reward such as ``exact`` to grade."""

    def reset(self, **columns: object) -> None:
        """Begin an episode; nothing of its row matters."""

    def calculate(self, expression: str) -> str:
        """Compute an expression exactly.

        Args:
            expression: Numbers, + - * / and parentheses, such as (37+25)*4.
        """
        if len(expression) > MAX_EXPRESSION:
            raise ValueError(f"an expression has at most {MAX_EXPRESSION} characters")
        try:
            value = _value(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError("expected numbers, + - * / and parentheses") from None
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        return str(value)


def _value(node: ast.expr) -> Fraction:
    """Return the value of numbers, + - * / and signs."""
    if isinstance(node, ast.Constant) and re.fullmatch(r"[0-9.e+-]+", str(node.value)):  # not inf, True or 1j
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("expected numbers, + - * / and parentheses")


class Guess:
    """Hides a whole number; says ``higher`` or ``lower`` to guesses, and rewards a hit within the budget with 1.

    Args:
        highest: the hidden number lies in 1..highest.
        budget: guesses of an episode; other texts count as guesses too.
    """

    def __init__(self, highest: int = 31, budget: int = 5):
        self._highest, self._budget = highest, budget

    def reset(self, hidden: int | None = None, seed: int = 0, **columns: object) -> None:
        """Begin an episode with the hidden number of its row, else one drawn by the seed."""
        self._hidden = random.Random(seed).randint(1, self._highest) if hidden is None else int(hidden)
        self._left = self._budget

    def step(self, text: str) -> str | tuple[str | None, float] | None:
        """Compare a guess with the hidden number."""
        guess = int(text) if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) else None
        if guess == self._hidden:
            return None, 1.0
        self._left -= 1
        if not self._left:
            return None
        return "number?" if guess is None else "higher" if guess < self._hidden else "lower"


class Python:
    """Offers a tool that runs programs in the sandbox of the reward ``code``; each starts afresh.

    Args:
        seconds: of a program; keep it below the environment's deadline.
        memory_mb: address space of a program.
    """

    def __init__(self, seconds: float = 4.0, memory_mb: int = 512):
        prove_isolation()
        self._seconds, self._memory_mb = seconds, memory_mb

    def reset(self, **columns: object) -> None:
        """Begin an episode; nothing of its row matters."""

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Only the standard library is there; no state is kept.

        Args:
            code: The program.
        """
        result = run_program(code, seconds=self._seconds, memory_mb=self._memory_mb)
        parts = [result.output[:MAX_OUTPUT], result.errors[-MAX_OUTPUT:], result.stopped]
        text = "\n".join(part.strip("\n") for part in parts if part)
        return text or f"(no output, exit code {result.code})"
