"""Tell where the time of W9's update goes by kind of operation, ours and torch's.

python docs/make_profile.py          profiles both, alone on the machine, into docs/data/bench_profile.json, and
python docs/make_profile.py --table  writes the table of docs/speed.md from the numbers that are there

Each side runs the update by length of the draws of ``oarjax bench --only W9``, warm, under its own profiler: JAX's,
whose events are the instructions of compiled programs, and torch's, whose events are its operators. The time of an
event is without that of the events within it.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from oarjax.tools.study.page import between, table

HERE = Path(__file__).resolve().parent
PAGE, DATA = HERE / "speed.md", HERE / "data" / "bench_profile.json"
MARKS = ("<!-- profile of W9 -->", "<!-- end of profile of W9 -->")
DRAWS = 8
OTHER = "other arithmetic of elements"
KINDS = {  # by the first pattern that an operation's name has
    "attention in one operator": r"scaled_dot_product",
    "matrix products, with what is fused into them": r"^ynn_fusion|^dot|mm$",
    "softmax and log-probabilities": r"exponential|softmax|nll_loss|aten::exp|logsumexp",
    "sums": r"reduce|aten::sum|aten::mean",
    "masks, copies, zeros, gathers and scatters": (
        r"select|broadcast|copy|transpose|bitcast|pad|slice|concatenate|gather|scatter|iota|"
        r"aten::(fill_|zero|zeros|empty|cat|clone|index|embedding|contiguous|where|to$|_to_copy|view|reshape|t$)"
    ),
}
Events = Iterable[tuple[int, float, float, str]]


def main() -> None:
    """Profile unless told not to, and write the table."""
    if sys.argv[1:] != ["--table"]:
        DATA.write_text(json.dumps(profiled(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def profiled() -> dict[str, Any]:
    """Return both sides' seconds on the clock and by operation in every draw."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import torch

    from oarjax.data.hf import write_random_checkpoint
    from oarjax.tools.bench.command import LONG_MODEL
    from oarjax.tools.bench.ragged import RAGGED
    from oarjax.tools.bench.ragged_against import RaggedTorch
    from oarjax.tools.bench.ragged_update import OURS, RaggedUpdates, draw_rows

    sides: dict[str, list[dict[str, Any]]] = {"oarjax": [], "torch": []}
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="oarjax-profile-") as scratch:
        folder = write_random_checkpoint(Path(scratch) / "policy", LONG_MODEL, seed=0)
        ours = RaggedUpdates(folder, RAGGED)
        theirs = RaggedTorch(folder, ours.run.cfg, threads=threads, device="cpu")
        for seed in range(1, DRAWS + 1):
            draw = draw_rows(LONG_MODEL["vocab_size"], RAGGED, seed=seed)
            plan, rollout = ours.plans(draw)[OURS]
            ids = theirs.placed(draw.ids)[:, : RAGGED.prompt_tokens + int(draw.lengths.max())]
            advantages = theirs.placed(draw.advantages)
            work = partial(theirs.update, ids, draw.lengths, advantages, by_length=True)
            trace = partial(of_jax, Path(scratch) / str(seed))
            sides["oarjax"].append(measured(ours.update(draw, plan, rollout), trace))
            sides["torch"].append(measured(work, of_torch))
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    return {
        "commit": subprocess.check_output(git, cwd=HERE, text=True).strip(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"jax": jax.__version__, "torch": torch.__version__.partition("+")[0]},
        "threads": threads,
        "draws": sides,
    }


def measured(work: Callable[[], Any], profile: Callable[[Callable[[], Any]], Mapping[str, float]]) -> dict[str, Any]:
    """Return seconds of warm ``work`` without a profiler, and by operation with it."""
    work()
    began = time.perf_counter()
    work()
    clock = time.perf_counter() - began
    operations = {name: round(s, 6) for name, s in profile(work).items() if s > 0}
    return {"seconds": round(clock, 4), "operations": operations}


def of_jax(folder: Path, work: Callable[[], Any]) -> dict[str, float]:
    """Return seconds by instruction of the programs that run while ``work`` does, instructions of one stem together."""
    import jax

    with jax.profiler.trace(str(folder)):
        work()
    (file,) = folder.rglob("*.trace.json.gz")
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    found = (e for e in events if e.get("ph") == "X" and "hlo_op" in e.get("args", {}))
    return own_seconds((e["tid"], e["ts"], e["dur"], re.sub(r"[.\d]+$", "", e["name"])) for e in found)


def of_torch(work: Callable[[], Any]) -> dict[str, float]:
    """Return seconds by operator that runs while ``work`` does."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        work()
    return {event.key: event.self_cpu_time_total / 1e6 for event in found.key_averages()}


def own_seconds(events: Events) -> dict[str, float]:
    """Return seconds by name of (thread, start, length, name) in microseconds, less those of the events within each."""
    own, threads = Counter[str](), defaultdict[int, list[tuple[float, float, str]]](list)
    for thread, start, length, name in events:
        threads[thread].append((start, -length, name))
    for found in threads.values():
        around: list[tuple[float, str]] = []
        for start, shorter, name in sorted(found):
            while around and around[-1][0] <= start:
                around.pop()
            if around:
                own[around[-1][1]] += shorter  # type: ignore[assignment]
            own[name] -= shorter  # type: ignore[assignment]
            around.append((start - shorter, name))
    return {name: value / 1e6 for name, value in own.items()}


def kind(name: str) -> str:
    """Return the kind of an operation."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def by_kind(draws: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return each kind's share of all operations' time, the mean of the draws, times the median of the clock."""
    shares: dict[str, list[float]] = defaultdict(list)
    for draw in draws:
        seconds = Counter[str]()
        for name, value in draw["operations"].items():
            seconds[kind(name)] += value
        for name in (*KINDS, OTHER):
            shares[name].append(seconds[name] / sum(seconds.values()))
    return {name: statistics.fmean(values) for name, values in shares.items()}


def written(page: str) -> str:
    """Return the page with its table written anew."""
    made = json.loads(DATA.read_text(encoding="utf-8"))
    clocks = {side: statistics.median(draw["seconds"] for draw in draws) for side, draws in made["draws"].items()}
    shares = {side: by_kind(draws) for side, draws in made["draws"].items()}
    rows = [["seconds of W9's update", *clocks]]
    rows += [[name, *(f"{shares[side][name] * clocks[side]:.2f}" for side in clocks)] for name in (*KINDS, OTHER)]
    rows.append(["on the clock, without a profiler", *(f"{clock:.2f}" for clock in clocks.values())])
    v = made["versions"]
    said = (
        f"Medians of {DRAWS} draws on {made['threads']} CPU threads; each side's clock is divided as its profiler "
        f"divides its operations (jax {v['jax']}, torch {v['torch']}, commit {made['commit']}, "
        "`python docs/make_profile.py`, [numbers](data/bench_profile.json)):"
    )
    return between(page, *MARKS, f"{said}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
