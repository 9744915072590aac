"""Folders have an order, and a file imports only from its own folder and those before it; equations touch no files."""

import ast
import re
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "oarjax"

ORDER = (
    *("errors", "types", "system", "stats"),
    *("rl", "kernels", "models", "rollout", "costs", "credit", "config"),
    *("storage", "data", "grading", "environments", "sources", "report"),
    *("step", "run", "training", "evaluate", "tools"),
    *("notebook", "cli_options", "cli"),
)
"""Folders and top-level modules, from the equations up to the command."""

PURE = ("types", "stats", "costs", "rl", "kernels", "models", "rollout", "credit", "step")
"""Equations and the data path: arrays in, arrays out. They touch no file, process or screen."""

OUTSIDE = {
    *("os", "pathlib", "subprocess", "rich"),
    *(f"oarjax.{folder}" for folder in ("system", "storage", "data", "grading", "environments", "sources", "report")),
}
"""What the pure folders never import."""

LINES_PER_FILE, LINES_PER_FOLDER = 450, 4000
"""Bounds of a file, and of all that lies below a folder."""

COUNTED_ALONE = ("credit/methods", "credit/experimental", "tools/*")
"""Folders whose lines do not count for the folder above."""

MODULES = {
    ".".join(p.relative_to(PACKAGE).with_suffix("").parts): p
    for p in sorted(PACKAGE.rglob("*.py"))
    if p.name != "__init__.py"
}


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports; what comes from this package by its module, never by a name in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide the folder; import from oarjax.… instead"
            base = str(node.module)
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix("oarjax.")
                names.add(f"oarjax.{inner}" if inner in MODULES else base)
    return names


GRAPH = {
    module: {name.removeprefix("oarjax.") for name in imports(path) if name.removeprefix("oarjax.") in MODULES}
    for module, path in MODULES.items()
}


def below(name: str, prefixes: tuple[str, ...] | set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def place(module: str) -> int:
    return ORDER.index(module.split(".")[0])


def test_the_order_names_every_folder_once():
    assert len(set(ORDER)) == len(ORDER)
    assert set(ORDER) == {module.split(".")[0] for module in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_never_go_up(module):
    mine = place(module)
    for other in GRAPH[module]:
        theirs = place(other)
        assert theirs <= mine, f"oarjax.{module} imports oarjax.{other}, whose folder comes later: {' '.join(ORDER)}"


def test_no_imports_in_a_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(GRAPH[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in MODULES if below(m, PURE)])
def test_equations_and_the_data_path_touch_nothing_outside(module):
    wrong = [name for name in imports(MODULES[module]) if below(name, OUTSIDE)]
    assert not wrong, f"oarjax.{module} is pure and imports {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("home", "pattern"),
    [
        ("stats", r"\bscipy\b|\b1\.9[56]\d*"),  # intervals
        ("system.json", r"allow_nan|def _?finite\("),  # numbers that JSON does not have
    ],
)
def test_what_has_one_place_stands_nowhere_else(home, pattern):
    held = [module for module, path in MODULES.items() if re.search(pattern, path.read_text())]
    assert held == [home], f"{pattern} belongs in oarjax.{home} alone"


def test_no_file_and_no_folder_grows_too_large():
    lines = {path.relative_to(PACKAGE): len(path.read_text().splitlines()) for path in MODULES.values()}
    long = {str(path): n for path, n in lines.items() if n > LINES_PER_FILE}
    assert not long, f"files of more than {LINES_PER_FILE} lines: {long}"
    below: Counter[str] = Counter()
    for path, count in lines.items():
        folders = [str(folder) for folder in path.parents if str(folder) != "."]
        alone = [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in COUNTED_ALONE)]
        below[max(alone, key=len) if alone else folders[-1] if folders else path.name] += count
    large = {folder: count for folder, count in below.items() if count > LINES_PER_FOLDER}
    assert not large, f"folders with more than {LINES_PER_FOLDER} lines below them: {large}"


def test_subpackage_inits_are_empty():
    for init in PACKAGE.rglob("__init__.py"):
        if init.parent != PACKAGE:
            assert not init.read_text().strip(), f"{init}: the public API is oarjax/__init__.py alone"


def test_an_equation_of_credit_loads_no_config():
    code = "import sys; from oarjax import gate, oar_weights; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert not {"pydantic", "oarjax.config", "oarjax.system.yaml_tree"} & set(done.stdout.split())
