"""Docstrings of functions open with a verb; those of modules, classes and properties may be noun phrases."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "oarjax"
QUESTIONS = {"What", "Whether", "Where", "When", "Who", "Why", "How", "Of"}
NOUNS = {"The", "A", "An", "Every", "One", "All", "Some", "Both", "Each", "True", "False"}
"""Words that open a noun phrase: "Return the ..." says what a function does with it."""


def is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", ())
    return any("property" in ast.unparse(decorator) for decorator in decorators)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_open_with_a_verb(path):
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        words = (ast.get_docstring(node) or "Return").split()
        verb = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
        if words[0] in QUESTIONS | (NOUNS if verb else set()) or (verb and not words[0][0].isupper()):
            wrong.append(f"{getattr(node, 'name', 'module')}: {' '.join(words[:6])}")
    assert not wrong, f"{path.name}: {wrong}"
