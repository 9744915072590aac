"""Check shapes of every annotated function at run time, share a compilation cache, and locate the golden files."""

import gc
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Programs of tests run for milliseconds and compile for seconds. The first flag skips LLVM's passes, two thirds of that
# time; the second leaves a program in one part, where 32 for as many threads help nobody beside another worker; the
# third skips writing MLIR for every fusion, most of what is left (later jaxlibs have no such flag). HLO is optimised
# as always. Processes that tests start inherit all.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)

import jax
import jaxtyping
import pytest
import typechecks
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

# Tracing allocates much and leaves few cycles: collecting as often as Python does by itself takes 7% of the suite.
gc.freeze()
gc.set_threshold(50_000, 20, 50)

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("OARJAX_TEST_CACHE", Path.home() / ".cache" / "oarjax" / "tests"))
SHARED = ROOT.parent / "shared"
TESTS = ROOT / "tests"

jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# types.py is left out: trees of shapes, shardings and reshaped microbatches pass through its classes.
UNHOOKED = {"oarjax.types", "oarjax.__init__"}
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "oarjax").rglob("*.py"))
]
jaxtyping.jaxtyped = typechecks.jaxtyped  # which the hook's code looks up
install_import_hook(
    [m for m in MODULES if m not in UNHOOKED and m != "oarjax" and not any(u.startswith(m + ".") for u in UNHOOKED)],
    "typechecks.check",
)


def virtual_devices(count: int) -> str:
    """Return XLA_FLAGS for another process with ``count`` devices."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def json_lines(program: str, *arguments: str, devices: int, quick: bool = False, timeout: float = 600) -> list[Any]:
    """Run a program in a separate process with virtual devices, and return the JSON lines that it prints.

    With ``quick`` it is compiled as these tests are, in less time; otherwise as XLA compiles for users.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": virtual_devices(devices) if quick else f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, TESTS, *sorted(TESTS.glob("*/"))])),
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests behind the others, so that a session of both runs each kind as a session of its own would."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture
def data() -> Path:
    return TESTS / "golden"


@pytest.fixture
def shared() -> Path:
    """Return the folder of the large golden files and real data beside the checkout; skip without it."""
    if not SHARED.is_dir():
        pytest.skip("the large golden files do not lie beside this checkout")
    return SHARED


@pytest.fixture
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked():
    """Turn off the runtime type checks, as for a user, so that values outside a Literal reach the function's error."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def tests_go_on(monkeypatch):
    """Let the command return to tests that call it, where it would end a process that a signal stopped."""
    monkeypatch.setattr("oarjax.cli.STOPPED", ())


@pytest.fixture(autouse=True, scope="module")
def forget_rewards():
    """Unregister the rewards of a file's plugins: the file may be set up again, in another folder."""
    yield
    if module := sys.modules.get("oarjax.grading.rewards"):
        for name, function in list(module._registry.items()):
            if not function.__module__.startswith("oarjax."):
                del module._registry[name]
    if module := sys.modules.get("oarjax.system.plugins"):
        module._imported.clear()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Free the programs of a finished file: over the whole suite they would take several GiB."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def compilation_cache():
    """Restore the suite's compilation cache after each test: a run sets its own."""
    names = ("compilation_cache_dir", "enable_compilation_cache")
    names += ("persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
