"""Follow a parameter through the calls that hand it on, whole or in parts that are objects of this package."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """Definitions of a file, and where its imported names come from."""

    functions: dict[str, Function]  # also "Class.method"; a class stands for its __init__
    classes: dict[str, dict[str, ast.expr | None]]  # name -> annotations of fields and properties
    imported: dict[str, tuple[str, str]]  # name -> module, name there


def read(path: Path) -> Module:
    functions, classes, imported = {}, {}, {}
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        if isinstance(node, ast.ClassDef):
            classes[node.name] = {}
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    functions[f"{node.name}.{inner.name}"] = inner
                    classes[node.name][inner.name] = inner.returns
                if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    classes[node.name][inner.target.id] = inner.annotation
            if f"{node.name}.__init__" in functions:
                functions[node.name] = functions[f"{node.name}.__init__"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oarjax."):
            imported |= {alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names}
    return Module(functions, classes, imported)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): read(path)
    for path in sorted((ROOT / "oarjax").rglob("*.py"))
}


def home(module: str, name: str) -> tuple[str, str] | None:
    """Return the module that defines a name which another one uses; None for what is not of this package."""
    if name in MODULES[module].functions or name in MODULES[module].classes:
        return module, name
    where, original = MODULES[module].imported.get(name, ("", ""))
    return home(where, original) if where in MODULES and where != module else None


def kind(module: str, annotation: ast.expr | None) -> tuple[str, str] | None:
    """Return the class of this package that an annotation names, alone or beside None."""
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)] if annotation else []
    found = [home(module, name) for name in names]
    return next((each for each in found if each and each[1] in MODULES[each[0]].classes), None)


class Walk:
    """The files that a parameter of a function passes through."""

    def __init__(self, module: str, function: str, parameter: str) -> None:
        self.files: set[str] = set()
        self._seen: set[tuple[str, str, str]] = set()
        self._follow(module, function, parameter)

    def _follow(self, module: str, name: str, parameter: str) -> None:
        if (module, name, parameter) in self._seen:
            return
        self._seen.add((module, name, parameter))
        self.files.add(module)
        function = MODULES[module].functions[name]
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        annotation = next(a.annotation for a in arguments if a.arg == parameter)
        own = (module, name.split(".")[0]) if parameter == "self" else kind(module, annotation)
        if own is None:
            return  # a number or an array: no object of this package
        known = {parameter: own}
        for node in ast.walk(function):  # other names of it or of its parts
            if isinstance(node, ast.Assign):
                for target, value in pairs(node.targets[0], node.value):
                    if isinstance(target, ast.Name) and (part := self._kind_of(value, known)):
                        known.setdefault(target.id, part)
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            self._enter(module, call, known)

    def _enter(self, module: str, call: ast.Call, known: dict[str, tuple[str, str]]) -> None:
        holder = self._kind_of(call.func.value, known) if isinstance(call.func, ast.Attribute) else None
        target = None
        if holder is not None and f"{holder[1]}.{call.func.attr}" in MODULES[holder[0]].functions:  # its method
            target = holder[0], f"{holder[1]}.{call.func.attr}"
            self._follow(*target, "self")
        elif isinstance(call.func, ast.Name):
            target = home(module, call.func.id)
        if target is None or target[1] not in MODULES[target[0]].functions:
            return
        parameters = [a.arg for a in MODULES[target[0]].functions[target[1]].args.args]
        parameters = parameters[parameters[:1] == ["self"] :]
        handed = [*zip(parameters, call.args), *((k.arg, k.value) for k in call.keywords)]
        for parameter, value in handed:
            if parameter is not None and self._kind_of(value, known):
                self._follow(*target, parameter)

    def _kind_of(self, value: ast.expr, known: dict[str, tuple[str, str]]) -> tuple[str, str] | None:
        """Return the class of a followed name, or of a part of it."""
        if isinstance(value, ast.Name):
            return known.get(value.id)
        if isinstance(value, ast.Attribute) and (holder := self._kind_of(value.value, known)):
            return kind(holder[0], MODULES[holder[0]].classes[holder[1]].get(value.attr))
        return None


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pair the names of an assignment with their values."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts)
    else:
        yield target, value
