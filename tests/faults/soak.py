"""A long run under random faults ends as one that nothing happened to, and does not grow. By hand, not in CI:

    PYTHONPATH=tests python tests/faults/soak.py --iterations 1000 --seed 0 --faults 100

Rows take turns in slots, with refills, and rewards are per sample, per group and async. Faults come at random moments:
SIGSTOP and SIGCONT of the run or of a grading worker, SIGKILL of a worker or of the run, SIGHUP, SIGTERM, a reader of
its output that goes away, an fsync that fails with EIO, and a clock that jumps by up to a day. Whatever ends, the same
command starts again. With ``--faults`` they fall after random numbers of iterations instead of seconds, so that a slow
machine makes progress between them, and further runs with other seeds are disturbed until there were so many. Prints
what was injected, how attempts ended, and the largest memory, descriptors and children in
the first and in the last third; exit code 1 where the end differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import micro
import psutil
import yaml
from starts import Started

PLUGIN = '''
"""Let the next fsync of the trainer fail where a file asks for it, and its clock jump."""
import errno
import os
import time
from pathlib import Path

MARK, CLOCK = Path(__file__).with_name("eio"), Path(__file__).with_name("clock")
real, clock = os.fsync, time.time


def jumping():
    return clock() + (float(CLOCK.read_text() or 0) if CLOCK.exists() else 0.0)


time.time = jumping


def fsync(handle):
    if MARK.exists():
        MARK.unlink(missing_ok=True)
        raise OSError(errno.EIO, "injected")
    return real(handle)


os.fsync = fsync
'''
FAULTS = ("stop the run", "stop a worker", "kill a worker", "kill the run", "SIGHUP", "SIGTERM", "lose output", "EIO")
FAULTS += ("clock",)
ALLOWED = {0, 75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP}
"""Ends of an attempt. A signal ends it by itself before the run is under way, and a second one at any time."""


class Soak:
    """One run, started until it is done, with a fault every so often: ``every`` seconds or iterations on average."""

    def __init__(self, config: Path, run: Path, *, seed: int, every: float, by_iteration: bool):
        self.config, self.run, self.every, self.by_iteration = config, run, every, by_iteration
        self.draw = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.ends: Counter[int] = Counter()
        self.sizes: list[tuple[float, int, int]] = []  # MB, descriptors, children

    def now(self) -> float:
        """Return the time by which faults are drawn: seconds, or the lines of the run's metrics."""
        if not self.by_iteration:
            return time.monotonic()
        lines = self.run / "metrics.jsonl"
        return lines.read_bytes().count(b"\n") if lines.exists() else 0

    def go(self) -> None:
        while True:
            code = self.attempt()
            self.ends[code] += 1
            print(f"attempt {self.ends.total()} ended with {code}, after {where(self.run)}", flush=True)
            if code not in ALLOWED:
                raise SystemExit(f"an attempt ended with {code}:\n{micro.output(self.run)[-3000:]}")
            if code == 0:
                return

    def attempt(self) -> int:
        """Start the command, disturb it until it ends, and return its exit code."""
        pipe = self.run.with_suffix(".pipe")
        os.mkfifo(pipe)
        self.lost = threading.Event()
        reader = threading.Thread(target=self.copy, args=(pipe,))
        reader.start()
        process = micro.start(self.config, self.run, log=pipe)
        watched, next_fault = psutil.Process(process.pid), self.now() + self.draw.expovariate(1 / self.every)
        while (code := process.poll()) is None:
            time.sleep(0.1)
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                children = watched.children(recursive=True)
                self.sizes.append((watched.memory_info().rss / 2**20, watched.num_fds(), len(children)))
                if self.now() > next_fault:
                    self.inject(process, [child.pid for child in children])
                    next_fault = self.now() + self.draw.expovariate(1 / self.every)
        reader.join(timeout=60)
        if reader.is_alive():
            raise SystemExit(f"an attempt ended with {code}, and a process that it started still runs a minute later")
        pipe.unlink()
        return code

    def copy(self, path: Path) -> None:
        """Write what the command prints to its log, until it ends or its output is lost."""
        pipe = os.open(path, os.O_RDONLY)
        with self.run.with_suffix(".log").open("ab", buffering=0) as log:
            while not self.lost.is_set():
                if select.select([pipe], [], [], 0.2)[0]:
                    if not (part := os.read(pipe, 2**16)):
                        break
                    log.write(part)
        os.close(pipe)

    def inject(self, process: Started | subprocess.Popen, children: list[int]) -> None:
        fault = self.draw.choice(FAULTS)
        if fault in ("stop a worker", "kill a worker") and not children:
            return
        if fault == "lose output":
            self.lost.set()
        elif fault == "EIO":
            (self.config.parent / "eio").touch()
        elif fault == "clock":
            (self.config.parent / "clock").write_text(str(self.draw.uniform(-86400, 86400)))
        elif fault in ("stop the run", "stop a worker"):
            pid = process.pid if fault == "stop the run" else self.draw.choice(children)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.1, 3.0))
            os.kill(pid, signal.SIGCONT)
        elif fault == "kill a worker":
            os.kill(self.draw.choice(children), signal.SIGKILL)
        else:
            names = {"kill the run": signal.SIGKILL, "SIGHUP": signal.SIGHUP, "SIGTERM": signal.SIGTERM}
            process.send_signal(names[fault])
        self.faults[fault] += 1


def where(run: Path) -> str:
    """The last thing that a run printed of its progress."""
    lines = [line for line in micro.output(run).splitlines() if "OAR-G " in line or "sft " in line]
    return repr(lines[-1][:40]) if lines else "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=8.0, help="mean seconds between faults")
    parser.add_argument("--faults", type=int, default=0, help="at least so many, in place of --every")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = micro.ragged_config(micro.micro_config(Path(folder)))
        (config.parent / "flaky.py").write_text(PLUGIN)
        tree = yaml.safe_load(config.read_text())
        tree |= {"iterations": asked.iterations, "eval": {"every": 25, "batch": 8}}
        tree["checkpoint"]["every"] = 5
        tree["grading"]["plugins"].append(str(config.parent / "flaky.py"))
        tree["grading"]["workers"] = 2
        config.write_text(yaml.safe_dump(tree))
        whole, began = config.parent / "whole", time.monotonic()
        code, text = micro.finish(config, whole)
        if code:
            raise SystemExit(text[-3000:])
        print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
        every = 0.9 * asked.iterations / asked.faults if asked.faults else asked.every
        pace = {"every": every, "by_iteration": bool(asked.faults)}
        faults, ends, differing, seed = Counter[str](), Counter[int](), list[str](), asked.seed
        while not ends or (faults.total() < asked.faults and not differing):
            soak, began = Soak(config, config.parent / f"soak{seed}", seed=seed, **pace), time.monotonic()
            soak.go()
            differing = micro.differing(micro.result(whole), micro.result(soak.run))
            print(f"disturbed: {time.monotonic() - began:.0f} s, {asked.iterations} iterations, seed {seed}")
            faults, ends, seed = faults + soak.faults, ends + soak.ends, seed + 1
            third = max(len(soak.sizes) // 3, 1)
            for name, sizes in (("first", soak.sizes[:third]), ("last", soak.sizes[-third:])):
                memory, handles, children = (max(column) for column in zip(*sizes))
                print(f"{name} third: at most {memory:.0f} MB, {handles} descriptors, {children} children")
        print(f"{faults.total()} faults:", ", ".join(f"{count} x {name}" for name, count in sorted(faults.items())))
        print("attempts ended with:", ", ".join(f"{count} x {code}" for code, count in sorted(ends.items())))
        print("the end: " + (f"DIFFERS in {', '.join(differing)}" if differing else "the same, bit for bit"))
        return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
