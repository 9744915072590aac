"""A file imports only from floors below its own (the package's layering)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "oarjax"

# Floor of each module, the longest matching prefix wins. Modules on one floor may import one another
# only inside one folder, or where the number after the point says who comes first.
FLOORS = {
    "types": 0.0,
    "config": 0.1,
    "config_study": 0.15,
    "oar.answer": 0.2,  # text only
    "masked": 1.0,
    "accuracy": 1.0,
    "grpo": 1.1,
    "oar.gate": 1.1,
    "oar.diagnose": 1.1,
    "oar.agreement": 1.15,
    "batches": 1.2,
    "measures": 1.2,
    "optim": 1.2,
    "lora": 1.2,
    "flops": 1.0,
    "chips": 0.5,
    "cost": 1.1,
    "hlo": 0.5,
    "roofline": 1.2,
    "oar.span": 1.1,
    "credit": 1.2,
    "policy": 2.0,
    "credit.own": 2.05,  # sees a policy
    "sharding": 2.0,
    "models": 2.1,
    "logps": 3.0,
    "oar.probe": 3.1,
    "oar.clean": 3.1,
    "oar.counterfactual": 3.1,
    "oar.screen": 1.1,
    "oar.perturb": 3.2,
    "oar.local": 3.2,
    "oar.gradient": 3.2,
    "oar.fisher": 3.2,
    "oar.intervene": 3.3,
    "oar.saliency": 3.2,
    "sampling": 3.2,
    "methods": 3.9,
    "steps": 4.0,
    "loop": 4.1,
    "host": 9.0,  # a wing of its own, see WING
    "cli": 10.0,
}
WING = {"chips", "types", "config", "config_study", "policy", "sharding", "models", "credit", "oar.answer"}
"""What host/ may import besides itself; nothing on floors 1-4 imports host/."""


def floor(module: str) -> float:
    best = max((p for p in FLOORS if module == p or module.startswith(p + ".")), key=len, default=None)
    if best is None:
        raise KeyError(f"oarjax.{module} stands on no floor: add it to FLOORS in {Path(__file__).name}")
    return FLOORS[best]


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: relative imports hide the floor; import from oarjax.… instead")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "oarjax":
            base = node.module.removeprefix("oarjax").strip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".strip(".")
                is_module = (PACKAGE / full.replace(".", "/")).with_suffix(".py").exists() or (
                    PACKAGE / full.replace(".", "/")
                ).is_dir()
                found.add(full if is_module else base)
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("oarjax.") for a in node.names if a.name.startswith("oarjax.")}
    return found


MODULES = {
    ".".join(p.relative_to(PACKAGE).with_suffix("").parts): p
    for p in sorted(PACKAGE.rglob("*.py"))
    if p.name != "__init__.py"
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    mine = floor(module)
    for other in imports(MODULES[module]):
        theirs = floor(other)
        same_folder = module.split(".")[0] == other.split(".")[0] and "." in module
        if module.startswith("host."):
            allowed = other.startswith("host.") or any(other == w or other.startswith(w + ".") for w in WING)
        elif module.startswith("cli."):
            allowed = True
        else:
            allowed = theirs < mine or (theirs == mine and same_folder)
        assert allowed, f"oarjax.{module} (floor {mine}) imports oarjax.{other} (floor {theirs}), which is not below it"


def test_subpackage_inits_are_empty():
    for init in PACKAGE.rglob("__init__.py"):
        if init.parent != PACKAGE:
            assert not init.read_text().strip(), f"{init}: the public API is oarjax/__init__.py alone"
