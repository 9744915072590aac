"""Names mean one thing each, and the files that docstrings and messages cite exist."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "oarjax").rglob("*.py"))
TREES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in FILES}
CITED = re.compile(
    r"(?<![\w/<{.*])((?:docs|tests|tpu|configs|oarjax)/[\w./-]*\w\.(?:md|py|yaml|sh))\b|``([\w/]+/\w+\.py)``"
)
MODULE = re.compile(r"``(oarjax(?:\.\w+)+)")


def test_no_class_name_means_two_things():
    homes = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def texts(tree: ast.Module) -> str:
    return "\n".join(
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def defined(dotted: str) -> bool:
    """Return True for a module, or a name that the module above it binds anywhere."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:count])
        file = module / "__init__.pyi" if module.is_dir() else module.with_suffix(".py")
        if module.is_dir() and count == len(parts):
            return True
        if file.is_file():
            return all(re.search(rf"\b{name}\b", file.read_text()) for name in parts[count:])
    return False


@pytest.mark.parametrize("path", TREES, ids=str)
def test_what_a_text_cites_exists(path):
    text = texts(TREES[path])
    cited = [first or second for first, second in CITED.findall(text.replace("path/to/mine.py", ""))]
    missing = [name for name in cited if not (ROOT / name).exists() and not (ROOT / "oarjax" / name).exists()]
    missing += [name for name in MODULE.findall(text) if not defined(name)]
    assert missing == []
