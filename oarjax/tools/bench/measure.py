"""Measure a benchmark: seconds of warm runs, the machine's peak, compilations, and resident memory."""

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
"""Untimed calls: the first compiles, the second gets the arrays of the first."""


APART = 0.1
"""Share by which the peak before and after a workload may differ."""


class Peak(NamedTuple):
    """The machine's peak FLOP/s of float32 matrix products, and how it is known."""

    flops: float
    source: str
    torch: float | None = None  # of torch's products, where they were measured

    def share(self, flops: float, seconds: float) -> float:
        """Return ``flops`` in these seconds as a share of the peak."""
        return flops / seconds / self.flops


def machine_peak() -> Peak:
    """Measure the peak over a second, or look it up for a known accelerator."""
    return Peak(*peak_flops(jnp.float32, seconds=1.0))


def settled(result: dict[str, Any], peak: Peak, after: Peak) -> dict[str, Any]:
    """Add the peak ``after`` a workload; drop every share of the peak if the two differ by more than a tenth.

    Another process that was busy at either time makes a peak too low and shares too high.
    """
    agree = abs(after.flops - peak.flops) <= APART * max(peak.flops, after.flops)
    return (result if agree else _without_shares(result)) | {"peak_after": after.flops}


def _without_shares(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: None if name == "share_of_peak" else _without_shares(value) for name, value in tree.items()}
    return [_without_shares(value) for value in tree] if isinstance(tree, list) else tree


def share_text(share: Mapping[str, Any] | None) -> str:
    """Format the median share of the peak; a dash where the peak was not steady."""
    return "-" if share is None else f"{share['median']:.1%}"


@dataclass
class Compilations:
    """Programs requested from XLA so far, including those in the compilation cache, and the seconds they took."""

    count: int = 0
    seconds: float = 0.0

    def count_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            self.seconds += duration_secs


@contextmanager
def counted_compilations() -> Iterator[Compilations]:
    """Count compilations while the block runs."""
    counter = Compilations()
    monitoring.register_event_duration_secs_listener(counter.count_event)
    try:
        yield counter
    finally:
        monitoring.unregister_event_duration_listener(counter.count_event)


@dataclass
class TimedRuns:
    """Timed runs of one piece of work."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads: steadier on a shared machine
    warm_up_seconds: float = 0.0
    compilations: int = 0  # during the warm-up
    compilations_warm: int = 0  # during the timed runs; 0 unless a shape changed
    peak_rss_mb: float = 0.0  # of the process since the start of the warm-up, if the system reports it

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


def measure(sides: Mapping[str, Callable[[], Any]], *, repeats: int, compiled: Compilations) -> dict[str, TimedRuns]:
    """Warm every side up, then run the sides in turn (A B A B ...), so that disturbances affect all of them.

    Each callable returns when its work is done.
    """
    measured = {name: TimedRuns() for name in sides}
    for name, work in sides.items():
        start_count, start = compiled.count, time.perf_counter()
        reset_peak_memory()
        for _ in range(WARM_UP):
            work()
        measured[name].peak_rss_mb = peak_memory_mb()
        measured[name].warm_up_seconds = time.perf_counter() - start
        measured[name].compilations = compiled.count - start_count
    for _ in range(repeats):
        for name, work in sides.items():
            start_count = compiled.count
            reset_peak_memory()
            start, start_cpu = time.perf_counter(), time.process_time()
            work()
            m = measured[name]
            m.seconds.append(time.perf_counter() - start)
            m.cpu_seconds.append(time.process_time() - start_cpu)
            m.peak_rss_mb = max(m.peak_rss_mb, peak_memory_mb())
            m.compilations_warm += compiled.count - start_count
    return measured


Result = TypeVar("Result")


def warm(work: Callable[[], Result], compiled: Compilations) -> Result:
    """Run the work until a run compiles nothing, and return that run's result.

    Raises:
        RuntimeError: ten runs in a row compile something.
    """
    for _ in range(10):
        start_count, result = compiled.count, work()
        if compiled.count == start_count:
            return result
    raise RuntimeError("bench: ten runs of the same work each compiled a program; its shapes change from run to run")


def seconds_of(work: Callable[[], Any]) -> float:
    """Time one run of the work, which returns when it is done."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def reset_peak_memory() -> None:
    """Reset the peak on Linux; elsewhere it remains the peak of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_mb() -> float:
    """Return the peak resident memory of this process in MiB, since ``reset_peak_memory`` if that works."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    except (OSError, StopIteration):
        unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
