"""Block sympy's two ways from text to running code.

math-verify parses LaTeX with a grammar, but below it

- sympy parses the digits of every number with ``parse_expr``, which calls ``eval`` (and takes a thousand times as long
  as reading the digits);
- sympy sums some series with ``lambdify``, which writes the names of symbols unchanged into Python source and runs it.
  A completion chooses such names almost freely (``\\hat{...}``).

Here the first parses only numbers and names, and the second runs only arithmetic. Anything else raises
``TextEvaluated``, for every caller in the process; so this is for grading workers.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
from typing import Any


class TextEvaluated(ValueError):
    """Raised when text would run as code in a grading worker."""


@functools.cache
def forbid_evaluation() -> None:
    """Block both ways permanently. Later calls do nothing."""
    parser = importlib.import_module("sympy.parsing.sympy_parser")
    vars(parser).update(parse_expr=read_plain, eval_expr=refuse)
    # import_module: sympy.utilities.lambdify is also a function. A module global hides the built-in ``compile``.
    vars(importlib.import_module("sympy.utilities.lambdify"))["compile"] = compile_arithmetic


_WHOLE = re.compile(r"[0-9]+")
_FRACTION = re.compile(r"([0-9]+)/([0-9]+)")
_DECIMAL = re.compile(r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?")


def read_plain(text: str, *_: Any, **__: Any) -> Any:
    """Parse a number, a fraction of integers or a name as ``parse_expr`` does; sympy's own modules need no more.

    Raises:
        TextEvaluated: the text is anything else, or names something callable.
    """
    import sympy

    if _WHOLE.fullmatch(text):
        return sympy.Integer(int(text))
    if _DECIMAL.fullmatch(text):
        return sympy.Float(text)
    if fraction := _FRACTION.fullmatch(text):
        return sympy.Rational(int(fraction[1]), int(fraction[2]))
    if text.isidentifier() and not hasattr(builtins, text) and "__" not in text:
        constant = vars(sympy).get(text)
        if constant is None or isinstance(constant, sympy.Basic):
            return sympy.Symbol(text) if constant is None else constant
    return refuse(text)


def refuse(text: Any, *_: Any) -> Any:
    """Raise TextEvaluated."""
    raise TextEvaluated(
        f"{str(text)[:80]!r} would be run as code; a grading worker parses only numbers and names. In a custom reward, "
        "parse text without sympify and parse_expr"
    )


_HARMLESS = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Tuple, ast.List, ast.keyword),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
_FUNCTIONS = {"abs", "complex", "float", "int", "max", "min", "pow", "range", "round", "sum"}


def compile_arithmetic(source: str, filename: str, mode: str) -> Any:
    """Compile source that ``lambdify`` wrote: numbers, names, operators, and calls of mathematical functions.

    Raises:
        TextEvaluated: it holds anything else, such as a string, an attribute or a built-in function.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        harmless = isinstance(node, _HARMLESS)
        if isinstance(node, ast.Constant):
            harmless = isinstance(node.value, int | float | complex | None)
        elif isinstance(node, ast.Name):
            harmless = "__" not in node.id and (node.id in _FUNCTIONS or not hasattr(builtins, node.id))
        elif isinstance(node, ast.Call):
            harmless = isinstance(node.func, ast.Name)
        elif isinstance(node, ast.FunctionDef):
            harmless = not node.decorator_list
        if not harmless:
            refuse(source)
    return builtins.compile(tree, filename, mode)
