"""Import a user's Python code, by file or by module name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from contextlib import redirect_stdout
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32


def import_plugin(plugin: str) -> ModuleType:
    """Import a Python file (``path/to/mine.py``) or a module on the path (``package.mine``); it prints to stderr.

    Raises:
        ImportError: it is none, or calls sys.exit; or whatever it raises itself.
    """
    try:
        with redirect_stdout(sys.stderr):  # stdout may be one JSON document
            return _import_plugin(plugin)
    except SystemExit as error:
        raise ImportError(f"it calls sys.exit({error.code!r})") from error


PACKAGE = __name__.partition(".")[0]

_imported: dict[Path, tuple[bytes, ModuleType]] = {}
"""Files that this process has imported, with their content then."""

_beside: dict[Path, bytes] = {}
"""Modules beside them, with their content when it was first asked for."""


def _import_plugin(plugin: str) -> ModuleType:
    if not plugin.endswith(".py"):
        return importlib.import_module(plugin)
    path = Path(plugin).expanduser().resolve()
    content = path.read_bytes()
    if str(path.parent) not in sys.path:  # its neighbours, after everything that is installed
        sys.path.append(str(path.parent))
    _check_neighbours(path)
    known, module = _imported.get(path, (None, None))
    if module is not None and known == content:  # executed again, its classes and counters would be there twice
        return module
    name = f"oarjax_plugin_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ != str(path):  # a file of this name in another folder
        name += f"_{crc32(str(path).encode()):x}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, path, content))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    _imported[path] = content, module
    return module


class _SourceLoader(SourceFileLoader):
    """Runs this source and nothing else: by bytecode, an edit within a second that keeps the length goes unseen."""

    def __init__(self, name: str, path: Path, content: bytes) -> None:
        super().__init__(name, str(path))
        self._content = content

    def get_data(self, path: Any) -> bytes:
        return self._content if str(path) == self.path else super().get_data(path)

    def path_stats(self, path: Any) -> Any:
        raise OSError(f"no bytecode is read or written of {path}")


def _check_neighbours(file: Path) -> None:
    """Check that modules beside a plugin are those that it imports by their names, and they themselves.

    Raises:
        ImportError: one is another module, installed or imported by another plugin, or was edited after its import.
    """
    for name, files in modules_beside(file).items():
        top = file.parent / name
        module = next((path for path in (top.with_suffix(".py"), top / "__init__.py") if path in files), None)
        if module is None:  # a folder without __init__.py, of data perhaps
            continue
        found = _origin(name)
        if found is not None and Path(found).resolve() != module.resolve():
            raise ImportError(f"it imports {name}, which is {found} here and not {module}; give that another name")
        content = module.read_bytes()
        if _beside.setdefault(module, content) != content and name in sys.modules:
            raise ImportError(
                f"{module} has changed since this process imported it, and Python imports a module once; start the "
                "process again"
            )


def modules_beside(file: Path) -> dict[str, set[Path]]:
    """Return the Python files in a file's own folder that it imports, directly or through each other, by module."""
    modules: dict[str, set[Path]] = {}
    todo = [file]
    while todo:
        for name in imported_names(todo.pop()) - {PACKAGE, *modules}:  # in a clone the package lies beside the file
            top = file.parent / name
            modules[name] = {top.with_suffix(".py")} if top.with_suffix(".py").is_file() else set(top.rglob("*.py"))
            todo += modules[name]
    return modules


def _origin(name: str) -> str | None:
    """Return the file that an import of this name gives, built-in or frozen; None if there is no such module."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that was made by hand
        return None
    return None if spec is None else spec.origin


def imported_names(file: Path) -> set[str]:
    """Return the outermost names of what a file imports, relative imports aside; none if it cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def plugin_file(plugin: str) -> Path | None:
    """Return the file of a plugin without importing anything; None if there is no such file.

    For a module in a package it is the module's file; the package's ``__init__`` runs before it.
    """
    if plugin.endswith(".py"):
        path = Path(plugin).expanduser().resolve()
        return path if path.is_file() else None
    top, *parts = plugin.split(".")
    try:
        spec = importlib.util.find_spec(top)  # imports nothing for a top-level name
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    path = Path(spec.origin)
    for part in parts:
        folder = path.parent
        path = next((p for p in (folder / part / "__init__.py", folder / f"{part}.py") if p.is_file()), Path())
        if not path.name:
            return None
    return path


def import_object(target: str, *, field: str, expected: type) -> Any:
    """Import the object that ``file.py:name`` or ``module:name`` names.

    Raises:
        ValueError: ``target`` has another form, its module cannot be imported or has no such name, or the object is not
            an instance of ``expected``.
    """
    plugin, colon, name = target.rpartition(":")
    if not colon or not plugin or not name:
        raise ValueError(f"{field}: expected file.py:name or module:name, got {target!r}")
    try:
        module = import_plugin(plugin)
    except Exception as error:
        raise ValueError(
            f"{field}: {plugin!r} cannot be imported ({type(error).__name__}: {error}); expected a Python file or a "
            "module on the path"
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{field}: {plugin} defines no {name}; check the name")
    value = getattr(module, name)
    if not isinstance(value, expected):
        raise ValueError(f"{field}: expected a {expected.__name__}, got {target} of type {type(value).__name__}")
    return value
