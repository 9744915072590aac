"""Cache compiled programs on every host, and mend the cache after a kill.

JAX reads its cache on every process, but writes it on process 0 only.

A program's key differs between the processes of a run (it hashes the process's devices), so a copy of process 0's
files does not help: every other host would compile everything again at each start.
"""

from __future__ import annotations

import json
import os
import types
from contextlib import suppress
from pathlib import Path

import jax
from jax._src import compilation_cache, compiler

CHECKED = "whole.json"
"""Sizes and times of change of the entries that were found whole."""


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


def remove_broken_entries(folder: Path) -> int:
    """Remove the entries of a cache that are not whole, and return how many there were.

    A kill or a full disk leaves half an entry, which JAX can neither read nor, since it exists, replace: the program
    would be compiled at every start. Entries are compressed; each is decompressed once and then known by size and time.
    A folder that cannot be read or written is left as it is.
    """
    decompress = getattr(compilation_cache, "decompress_executable", None)
    removed, checked = 0, {}
    if decompress is None:
        return 0
    with suppress(OSError, ValueError):
        checked = dict(json.loads((folder / CHECKED).read_text(encoding="utf-8")))
    marks = {}
    with suppress(OSError):
        for entry in folder.glob("*-cache"):
            state = entry.stat()
            mark = [state.st_size, state.st_mtime_ns]
            if checked.get(entry.name) != mark:
                try:
                    decompress(entry.read_bytes())
                except OSError:
                    continue
                except Exception:  # of zlib or zstandard, whichever is installed
                    entry.unlink(missing_ok=True)
                    removed += 1
                    continue
            marks[entry.name] = mark
        if marks != checked:
            fresh = folder / f".{CHECKED}-{os.getpid()}"
            fresh.write_text(json.dumps(marks), encoding="utf-8")
            fresh.replace(folder / CHECKED)
    return removed
