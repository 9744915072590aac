"""Tell where the time of W9's update goes by kind of operation, ours and torch's.

python docs/make_profile.py --measure  profiles both, alone on the machine, into docs/data/bench_profile.json
python docs/make_profile.py            writes the table of docs/speed.md from the numbers that are there

Each side runs the update by length of the draws of ``oarjax bench --only W9``, warm, under its own profiler: JAX's,
whose events are the instructions of compiled programs, and torch's, whose events are its operators. The time of an
event is without that of the events within it. XLA hands products and sums to the same library, as fusions of one name:
the programs' text says which of them multiply matrices.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from oarjax.tools.study.page import between, table

HERE = Path(__file__).resolve().parent
PAGE, DATA = HERE / "speed.md", HERE / "data" / "bench_profile.json"
MARKS = ("<!-- profile of W9 -->", "<!-- end of profile of W9 -->")
DRAWS = 8
LIBRARY = "ynn_fusion"
PRODUCT, SUM = f"{LIBRARY}, product", f"{LIBRARY}, sum"
OTHER = "other arithmetic of elements"
KINDS = {  # by the first pattern that an operation's name has
    "attention in one operator": r"scaled_dot_product",
    "matrix products": rf"{PRODUCT}|^dot|mm$",
    "sums, softmax and log-probabilities": rf"{SUM}|exponential|reduce|softmax|nll_loss|aten::(exp|sum|mean)",
    "masks, copies, zeros, gathers and scatters": (
        r"select|broadcast|copy|transpose|bitcast|pad|slice|concatenate|gather|scatter|iota|"
        r"aten::(fill_|zero|zeros|empty|cat|clone|index|embedding|contiguous|where|to$|_to_copy|view|reshape|t$)"
    ),
}
Events = Iterable[tuple[int, float, float, str]]


def main() -> None:
    """Profile if told to, and write the table."""
    if sys.argv[1:] == ["--measure"]:
        DATA.write_text(json.dumps(profiled(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def profiled() -> dict[str, Any]:
    """Return both sides' seconds on the clock in every draw, and by operation on average."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import torch

    from oarjax.data.hf import write_random_checkpoint
    from oarjax.tools.bench.command import LONG_MODEL, threads
    from oarjax.tools.bench.measure import seconds_of
    from oarjax.tools.bench.ragged import RAGGED
    from oarjax.tools.bench.ragged_against import RaggedTorch
    from oarjax.tools.bench.ragged_update import OURS, RaggedUpdates, draw_rows

    seconds: dict[str, list[float]] = {"oarjax": [], "torch": []}
    operations: dict[str, defaultdict[str, float]] = {side: defaultdict(float) for side in seconds}
    with tempfile.TemporaryDirectory(prefix="oarjax-profile-") as scratch:
        programs = Path(scratch) / "programs"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={programs} --xla_dump_hlo_as_text"
        folder = write_random_checkpoint(Path(scratch) / "policy", LONG_MODEL, seed=0)
        ours = RaggedUpdates(folder, RAGGED)
        theirs = RaggedTorch(folder, ours.run.cfg, threads=threads(), device="cpu")
        for seed in range(1, DRAWS + 1):
            draw = draw_rows(LONG_MODEL["vocab_size"], RAGGED, seed=seed)
            plan, rollout = ours.plans(draw)[OURS]
            ids = theirs.placed(draw.ids)[:, : RAGGED.prompt_tokens + int(draw.lengths.max())]
            advantages = theirs.placed(draw.advantages)
            update = partial(theirs.update, ids, draw.lengths, advantages, by_length=True)
            trace = partial(of_jax, Path(scratch) / str(seed), programs)
            for side, work, profile in (
                ("oarjax", ours.update(draw, plan, rollout), trace),
                ("torch", update, of_torch),
            ):
                work()  # warm
                seconds[side].append(round(seconds_of(work), 4))
                for name, value in profile(work).items():
                    operations[side][name] += value / DRAWS
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    return {
        "commit": subprocess.check_output(git, cwd=HERE, text=True).strip(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"jax": jax.__version__, "torch": torch.__version__.partition("+")[0]},
        "threads": threads(),
        "seconds": seconds,
        "operations": {side: {n: v for n, s in of.items() if (v := round(s, 5))} for side, of in operations.items()},
    }


def of_jax(folder: Path, programs: Path, work: Callable[[], Any]) -> dict[str, float]:
    """Return seconds by instruction of the programs that run while ``work`` does, instructions of one stem together."""
    import jax

    with jax.profiler.trace(str(folder)):
        work()
    (file,) = folder.rglob("*.trace.json.gz")
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    runs = defaultdict[str, list[dict[str, Any]]](list)  # one execution of a program each
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            runs[event["args"]["run_id"]].append(event)
    stem, library, own = re.compile(r"[.\d]+$"), library_calls(programs), defaultdict[str, float](float)
    for run in runs.values():
        calls = program_of({e["name"] for e in run if e["name"].startswith(LIBRARY)}, library)
        named = ((e["tid"], e["ts"], e["dur"], calls.get(e["name"]) or stem.sub("", e["name"])) for e in run)
        for name, seconds in own_seconds(named).items():
            own[name] += seconds
    return own


def program_of(calls: set[str], library: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    """Return the calls of the program, of every bucket's, that has these and as few others as any."""
    fits = sorted((of for of in library if calls <= of.keys()), key=len)
    if not fits or any(of != fits[0] for of in fits if len(of) == len(fits[0])):
        raise ValueError(f"{len(fits)} programs have these calls of the library, and they differ: {sorted(calls)}")
    return fits[0]


def library_calls(programs: Path) -> list[dict[str, str]]:
    """Return what the fusions that XLA hands to its library compute, by name, for every program of the folder."""
    found: list[dict[str, str]] = [{}]
    for file in programs.glob("*after_optimizations.txt"):
        text = file.read_text(encoding="utf-8")
        bodies = dict(re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
        calls = re.findall(rf"%?({LIBRARY}[\w.]*) = [^\n]*calls=%?([\w.-]+)", text)
        found.append({name: PRODUCT if " dot(" in bodies[called] else SUM for name, called in calls})
    return found


def of_torch(work: Callable[[], Any]) -> dict[str, float]:
    """Return seconds by operator that runs while ``work`` does."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        work()
    return {event.key: event.self_cpu_time_total / 1e6 for event in found.key_averages()}


def own_seconds(events: Events) -> dict[str, float]:
    """Return seconds by name of (thread, start, length, name) in microseconds, less those of the events within each."""
    own = defaultdict[str, float](float)
    threads = defaultdict[int, list[tuple[float, float, str]]](list)
    for thread, start, length, name in events:
        threads[thread].append((start, -length, name))
    for found in threads.values():
        around: list[tuple[float, str]] = []
        for start, shorter, name in sorted(found):
            while around and around[-1][0] <= start:
                around.pop()
            if around:
                own[around[-1][1]] += shorter
            own[name] -= shorter
            around.append((start - shorter, name))
    return {name: value / 1e6 for name, value in own.items()}


def kind(name: str) -> str:
    """Return the kind of an operation."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def shares(operations: Mapping[str, float]) -> dict[str, float]:
    """Return each kind's share of the time of all operations."""
    by_kind = dict.fromkeys((*KINDS, OTHER), 0.0)
    for name, value in operations.items():
        by_kind[kind(name)] += value / sum(operations.values())
    return by_kind


def written(page: str) -> str:
    """Return the page with its table written anew."""
    made = json.loads(DATA.read_text(encoding="utf-8"))
    clocks = {side: statistics.median(values) for side, values in made["seconds"].items()}
    parts = {side: shares(operations) for side, operations in made["operations"].items()}
    rows = [["seconds of W9's update", *clocks]]
    rows += [[name, *(f"{parts[side][name] * clocks[side]:.2f}" for side in clocks)] for name in (*KINDS, OTHER)]
    rows.append(["on the clock, without a profiler", *(f"{clock:.2f}" for clock in clocks.values())])
    v = made["versions"]
    said = (
        f"Medians of {len(made['seconds']['oarjax'])} draws on {made['threads']} CPU threads; each side's clock is "
        f"divided as its profiler divides its operations (jax {v['jax']}, torch {v['torch']}, commit {made['commit']}, "
        "`python docs/make_profile.py`, [numbers](data/bench_profile.json)):"
    )
    return between(page, *MARKS, f"{said}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
