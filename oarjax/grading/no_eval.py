"""Sympy without its two ways from text to running code.

math-verify reads LaTeX with a grammar, but underneath it

- sympy turns the digits of every number into a number by ``parse_expr``, which is ``eval`` (and dear: a thousand
  times the work of reading the digits);
- sympy sums some series with ``lambdify``, which writes Python with the names of symbols in it as they are, and runs
  it. A completion chooses such names almost freely (``\\hat{...}``).

Here the first reads numbers and names and nothing else, and the second runs arithmetic and nothing else. Everything
else is a ``TextEvaluated`` error, in the whole process, whoever asks; so this is for grading workers.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
from typing import Any


class TextEvaluated(ValueError):
    """Something wanted to run text as code in a grading worker."""


@functools.cache
def forbid_evaluation() -> None:
    """Close both ways, for good. Later calls do nothing."""
    parser = importlib.import_module("sympy.parsing.sympy_parser")
    vars(parser).update(parse_expr=read_plain, eval_expr=refuse)
    # sympy.utilities.lambdify is a function as well; a module's own name hides the built-in one.
    vars(importlib.import_module("sympy.utilities.lambdify"))["compile"] = compile_arithmetic


_WHOLE = re.compile(r"[0-9]+")
_FRACTION = re.compile(r"([0-9]+)/([0-9]+)")
_DECIMAL = re.compile(r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?")


def read_plain(text: str, *_: Any, **__: Any) -> Any:
    """What ``parse_expr`` makes of a number, a fraction of whole numbers or a name; sympy's own modules need no more.

    Raises:
        TextEvaluated: it is anything else, or the name of something that could be called.
    """
    import sympy

    if _WHOLE.fullmatch(text):
        return sympy.Integer(int(text))
    if _DECIMAL.fullmatch(text):
        return sympy.Float(text)
    if fraction := _FRACTION.fullmatch(text):
        return sympy.Rational(int(fraction[1]), int(fraction[2]))
    if text.isidentifier() and not hasattr(builtins, text) and "__" not in text:
        known = vars(sympy).get(text)
        if known is None or isinstance(known, sympy.Basic):
            return sympy.Symbol(text) if known is None else known
    return refuse(text)


def refuse(text: Any, *_: Any) -> Any:
    """Raises TextEvaluated."""
    raise TextEvaluated(
        f"{str(text)[:80]!r} would be run as code; a grading worker reads numbers and names alone. In a reward of your "
        "own, read text without sympify and parse_expr"
    )


_HARMLESS = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Tuple, ast.List, ast.keyword),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
_FUNCTIONS = {"abs", "complex", "float", "int", "max", "min", "pow", "range", "round", "sum"}


def compile_arithmetic(source: str, filename: str, mode: str) -> Any:
    """``compile`` of what ``lambdify`` wrote: numbers, names, operators, and calls of mathematical functions.

    Raises:
        TextEvaluated: there is anything else in it, such as a text, an attribute or a built-in function.
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
