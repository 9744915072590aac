"""Cache compiled programs on every host. JAX reads its cache on every process, but writes it on process 0 only.

A program's key differs between the processes of a run (it hashes the process's devices), so a copy of process 0's
files does not help: every other host would compile everything again at each start.
"""

from __future__ import annotations

import types
from pathlib import Path

import jax
from jax._src import compiler


def cache_on_every_process(folder: Path) -> Path:
    """Let each of several processes read and write its own cache folder below ``folder``; return that folder.

    Call it after the processes have joined and before anything is compiled. Separate folders keep processes from
    writing the same file, on one host or on a mounted bucket. A single process uses ``folder`` itself.

    JAX has no setting for this, so the function that writes an entry is replaced by a copy that takes the process for
    process 0. If a JAX version renames the function, JAX keeps its behaviour and tests/system/test_compiled.py fails.
    """
    if jax.process_count() == 1:
        return folder
    process_folder = folder / f"process-{jax.process_index()}-of-{jax.process_count()}"
    process_folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(process_folder))
    write = getattr(compiler, "_cache_write", None)
    if isinstance(write, types.FunctionType):
        first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
        names = {**write.__globals__, "distributed": first}
        compiler._cache_write = types.FunctionType(write.__code__, names, write.__name__, write.__defaults__)
    return process_folder
