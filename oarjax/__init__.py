"""oarjax: GRPO and Outcome-grounded Advantage Reshaping for Qwen policies, as pure functions in JAX.

``oarjax/__init__.pyi`` lists the public names by theme, for editors, type checkers and this file. A name's module is
imported when the name is first used; importing oarjax itself loads no JAX and opens no device or network.
"""

import ast
import os
from importlib import import_module
from pathlib import Path
from typing import Any

# transformers only reads tokenizers here and needs no torch; its notice looks like a broken install.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
_IMPORTS = [node for node in _STUB.body if isinstance(node, ast.ImportFrom)]
_HOME = {str(node.module): tuple(alias.name for alias in node.names) for node in _IMPORTS}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'oarjax' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
