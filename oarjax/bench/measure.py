"""Measurements of a benchmark: seconds of warm runs, the machine's peak, compilations, and resident memory."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import monitoring

from oarjax.system.devices import peak_flops

WARM_UP = 2
"""Calls before the clock counts: the first compiles, the second meets the arrays of the first."""


class Peak(NamedTuple):
    """Matrix products in float32 that this machine makes in a second, at most."""

    flops: float
    source: str

    def share(self, flops: float, seconds: float) -> float:
        """Return the share of the peak that ``flops`` in these seconds are."""
        return flops / seconds / self.flops


def machine_peak() -> Peak:
    """Measure the peak, or look it up for a known accelerator."""
    return Peak(*peak_flops(jnp.float32))


@dataclass
class Compilations:
    """Programs that XLA was asked for so far, those found in the compilation cache included."""

    count: int = 0

    def heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


@contextmanager
def counted_compilations() -> Iterator[Compilations]:
    """Listen to JAX while the block runs."""
    counter = Compilations()
    monitoring.register_event_duration_secs_listener(counter.heard)
    try:
        yield counter
    finally:
        monitoring.unregister_event_duration_listener(counter.heard)


@dataclass
class Measured:
    """Runs of one piece of work."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads: steadier where others use the machine
    warm_up_seconds: float = 0.0
    compilations: int = 0  # during the warm-up
    compilations_warm: int = 0  # during the timed runs; 0 unless a shape changed
    peak_rss_mb: float = 0.0  # of the whole process, since the work's warm-up began where the system can say

    def summary(self) -> dict[str, Any]:
        """Return everything for the JSON document."""
        return {
            "seconds": spread(self.seconds),
            "cpu_seconds": spread(self.cpu_seconds),
            "warm_up_seconds": self.warm_up_seconds,
            "compilations": self.compilations,
            "compilations_warm": self.compilations_warm,
            "peak_rss_mb": self.peak_rss_mb,
        }


def spread(values: list[float]) -> dict[str, Any]:
    """Summarise values: median, minimum, maximum, and all of them in order."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}


def measure(
    sides: Mapping[str, Callable[[], Any]], *, repeats: int, compiled: Compilations, warm_up: int = WARM_UP
) -> dict[str, Measured]:
    """Warm every side up, then run the sides in turn (A B A B ...), so that what disturbs one disturbs both.

    Each callable returns when its work is done.
    """
    found = {name: Measured() for name in sides}
    for name, work in sides.items():
        before, start = compiled.count, time.perf_counter()
        forget_peak_memory()
        for _ in range(warm_up):
            work()
        found[name].peak_rss_mb = peak_memory_mb()
        found[name].warm_up_seconds = time.perf_counter() - start
        found[name].compilations = compiled.count - before
    for _ in range(repeats):
        for name, work in sides.items():
            before = compiled.count
            forget_peak_memory()
            start, start_cpu = time.perf_counter(), time.process_time()
            work()
            m = found[name]
            m.seconds.append(time.perf_counter() - start)
            m.cpu_seconds.append(time.process_time() - start_cpu)
            m.peak_rss_mb = max(m.peak_rss_mb, peak_memory_mb())
            m.compilations_warm += compiled.count - before
    return found


Result = TypeVar("Result")


def warm(work: Callable[[], Result], compiled: Compilations) -> Result:
    """Run the work until a run compiles nothing, and return what that run gives.

    Raises:
        RuntimeError: ten runs in a row compile something.
    """
    for _ in range(10):
        before, result = compiled.count, work()
        if compiled.count == before:
            return result
    raise RuntimeError("bench: ten runs of the same work each compiled a program; its shapes change from run to run")


def seconds_of(work: Callable[[], Any]) -> float:
    """Time one run of the work, which returns when it is done."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget_peak_memory() -> None:
    """Start the peak anew, where the system can (Linux); elsewhere it stays the peak of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_mb() -> float:
    """Return the peak resident memory of this process in MiB, since ``forget_peak_memory`` where that works."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    except (OSError, StopIteration):
        unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
