"""Keep compiled programs on every host. JAX reads its cache on every process and writes it on process 0 only.

The keys of a program differ between the processes of one run (they hash the process's own devices), so a copy of
process 0's files does not help, and without this every other host would compile everything again at each start.
"""

from __future__ import annotations

import types
from pathlib import Path

import jax
from jax._src import compiler


def cache_on_every_process(folder: Path) -> Path:
    """Give each of several processes a cache folder of its own below ``folder``, which it reads and writes.

    Call it after the processes have joined and before anything is compiled. Separate folders keep processes from
    writing the same file, on one host or on a mounted bucket. A single process uses ``folder`` itself.

    JAX has no setting for this: the function that writes an entry is replaced by itself with process number 0. A JAX
    whose function has another name keeps its own behaviour (tests/system/test_compiled.py would tell).
    """
    if jax.process_count() == 1:
        return folder
    own = folder / f"process-{jax.process_index()}-of-{jax.process_count()}"
    own.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(own))
    write = getattr(compiler, "_cache_write", None)
    if isinstance(write, types.FunctionType):
        first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
        names = {**write.__globals__, "distributed": first}
        compiler._cache_write = types.FunctionType(write.__code__, names, write.__name__, write.__defaults__)
    return own
