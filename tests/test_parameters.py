"""Functions take what they need: few take a whole config or run, and an iteration is short enough to read at once."""

import ast
from pathlib import Path

import pytest
from walks import Walk

PACKAGE = Path(__file__).parent.parent / "oarjax"


def functions() -> list[ast.FunctionDef]:
    trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def takes(function: ast.FunctionDef, name: str) -> bool:
    arguments = function.args
    annotations = [a.annotation for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    nodes = [node for annotation in annotations if annotation is not None for node in ast.walk(annotation)]
    return any(isinstance(node, ast.Name) and node.id == name for node in nodes)


@pytest.mark.parametrize(("name", "most"), [("Config", 61), ("Run", 50)])
def test_few_functions_take_the_whole(name, most):
    found = sum(takes(function, name) for function in functions())
    assert 0 < found <= most, f"{found} functions take a {name}; pass the sections, the shapes or the parts they read"


@pytest.mark.parametrize(
    ("module", "function", "parameter", "most"),
    [("oarjax.training.trainer", "train", "run", 9), ("oarjax.step.programs", "make_steps", "cfg", 7)],
)
def test_the_whole_passes_through_few_files(module, function, parameter, most):
    files = Walk(module, function, parameter).files
    assert 3 < len(files) <= most, f"{parameter} of {function}, or a part of it, is handed to {sorted(files)}"


def test_an_iteration_is_read_at_once():
    (iterate,) = (function for function in functions() if function.name == "iterate")
    inner = {
        id(name)
        for node in ast.walk(iterate)
        if isinstance(node, ast.ListComp | ast.GeneratorExp)
        for part in node.generators
        for name in ast.walk(part.target)
    }
    stored = {
        node.id
        for node in ast.walk(iterate)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inner
    }
    names = stored | {argument.arg for argument in (*iterate.args.args, *iterate.args.kwonlyargs)}
    lines = (iterate.end_lineno or 0) - (iterate.body[0].end_lineno or 0)  # below the docstring
    assert 0 < lines <= 60
    assert 0 < len(names) <= 20, sorted(names)
