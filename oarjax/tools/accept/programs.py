"""Stages of a run's programs: time their compilation, cold, warm and in the next process, and each phase."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.data.tasks.arithmetic import builtin_config
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import init_params
from oarjax.report.console import PhaseTimer
from oarjax.run.layout import param_shardings
from oarjax.run.memory import phase_memory
from oarjax.run.run import Run, open_run
from oarjax.run.shapes import ProgramShapes
from oarjax.step.host_callbacks import GradedAtOnce, HostCallbacks
from oarjax.step.iteration import iterate
from oarjax.system.devices import memory_limit
from oarjax.tools.accept.check import Check, at_most, holds, measured, not_applicable, quick
from oarjax.tools.accept.setting import RATES, Peaks, StageSetting, best_seconds, mesh, mesh_sizes, run_config
from oarjax.tools.bench.work import WorkloadSizes, half_right, spans
from oarjax.tools.plan.programs import shapes_of
from oarjax.tools.plan.published_sizes import PUBLISHED
from oarjax.tools.plan.sums import model_flops, read_bytes
from oarjax.types import PromptBatch

SLOWER = {"tpu": 2.5, "gpu": 10.0}
"""A phase is slow above this multiple of its arithmetic at the measured rates of products and copies. The plan expects
2.1 times the arithmetic at the data sheet's rates for this policy on a v5e: passes over memory between the products.
On an H100 it was 5.7 to 9.0 times: docs/gpu.md says of what."""
FILE = "compilation.json"
REPEATS = 5


def compilation(s: StageSetting) -> list[Check]:
    """Compile a run's programs with an empty cache, then from it; the memory estimates must fit."""
    jax.clear_caches()
    cold, cold_misses, sizes = _compile(s)
    jax.clear_caches()
    warm, warm_misses, _ = _compile(s)
    (s.folder / FILE).write_text(json.dumps({"cold": cold}))
    limit = memory_limit(jax.local_devices()[0])
    checks = [
        measured("cold", cold, unit="s", note=f"{cold_misses} programs"),
        measured("warm", warm, unit="s"),
        holds("an empty cache is filled", cold_misses > 0, value=cold_misses),
        at_most("programs compiled again by the same process", warm_misses, 0),
    ]
    for phase, size in sizes.items():
        name = f"estimated peak of {phase}"
        if limit is None:
            checks.append(not_applicable(name, "a CPU states no limit", value=size / 2**20, unit="MiB"))
        else:
            checks.append(at_most(name, size / 2**30, limit / 2**30, unit="GiB"))
    return checks


def next_process(s: StageSetting) -> list[Check]:
    """Compile the same programs in another process: all must come from the cache."""
    record = s.folder / FILE
    if not record.is_file():
        return [holds("the stage compilation has filled the cache", False)]
    seconds, misses, _ = _compile(s)
    cold = json.loads(record.read_text())["cold"]
    return [
        at_most("programs compiled again by another process", misses, 0),
        measured("of the cold time", seconds / cold, note=f"{seconds:.2f} s"),
    ]


def _compile(s: StageSetting) -> tuple[float, int, dict[str, int]]:
    """Return the seconds to compile the run's programs, how many were not in the cache, and their peaks in bytes."""
    run = open_run(run_config(s, "compiled-run", iterations=1))
    # Small programs count too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with _misses() as misses:
        start = time.perf_counter()
        sizes: dict[str, int] = {}
        shapes = ProgramShapes(run)
        for program in shapes.programs():
            sizes[program.phase] = max(sizes.get(program.phase, 0), phase_memory(shapes, program).peak)
        return time.perf_counter() - start, misses(), sizes


@contextmanager
def _misses():
    """Count the programs that JAX did not find in its cache."""
    events: list[str] = []

    def count_event(event: str, **_: Any) -> None:
        events.append(event.rsplit("/", 1)[-1])

    monitoring.register_event_listener(count_event)
    try:
        yield lambda: events.count("compile_requests_use_cache") - events.count("cache_hits")
    finally:
        monitoring.unregister_event_listener(count_event)


def phases(s: StageSetting) -> list[Check]:
    """Run an iteration on random tokens several times, and compare each phase with its arithmetic at measured rates."""
    cfg = phase_config(s)
    model = QwenConfig.from_hf(builtin_config() if s.small else PUBLISHED["Qwen/Qwen2.5-0.5B"])
    run = Run(cfg, model=model, mesh=mesh(), stop_ids=(), pad_id=0)
    timer, folder = PhaseTimer(), s.folder / "trace"
    host = host_of(run, timer.phase)
    shardings = param_shardings(model, run.mesh)
    params = jax.jit(lambda key: init_params(model, key), out_shardings=shardings)(jax.random.key(0))
    state, laps, metrics = run.new_state(params, copy=False), [], []
    for number in range(1, REPEATS + 2):
        trace = jax.profiler.trace(str(folder)) if number == REPEATS + 1 else nullcontext()
        timer.lap()
        with trace:
            state, iteration = iterate(state, None, number, steps=run.steps, host=host, cfg=cfg)
        laps.append(timer.lap())
        metrics.append(iteration.metrics)
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0]
    finite = all(np.isfinite(list(values.values())).all() for values in metrics)
    checks = [
        holds("every metric is finite", bool(finite)),
        holds("the trace has files", bool(files), value=len(files)),
        _peak_memory(s, ProgramShapes(run)),
    ]
    rates = _measured_rates(s)
    for name in [name for name in ("sample", "score", "update") if name in laps[-1]]:
        seconds = statistics.median(lap[name] for lap in laps[1:])
        one_pass = name == "update" and "score" not in laps[-1]
        planned = planned_seconds(rates, cfg, model, "fused" if one_pass else name)
        note = f"{seconds:.4g} s, {planned:.4g} s at the measured rates"
        if s.small or s.peaks.flops is None:
            checks.append(not_applicable(f"{name} against plan", note, value=seconds / planned))
        else:
            checks.append(quick(f"{name} against plan", seconds / planned, SLOWER[s.platform], note=note))
        if name == "sample":
            checks += _decoding(cfg, model, seconds, rates)
    return checks


def phase_config(s: StageSetting) -> Config:
    """Return the config whose phases are timed: one chip's share of a 0.5B run, or the demo's policy on a CPU."""
    count = len(jax.devices())
    sizes = {"prompts": count, "group_size": 4, "max_new": 24} if s.small else {"prompts": 16 * count, "max_new": 384}
    rows = sizes["prompts"] * sizes.get("group_size", 8)
    return parse_config(
        {
            "run_dir": str(s.folder / "phases"),
            "policy": {"path": "unused", "remat": "none" if s.small else "full"},
            "mesh": mesh_sizes(),
            "data": {"max_prompt": 16 if s.small else 256, "train": {"source": "unused"}},
            "rollout": {"group_size": 8, **sizes},
            "update": {"microbatch": rows if s.small else 8 * count, "skip_zero_variance": False},
        }
    )


def host_of(run: Run, phase: Any) -> HostCallbacks:
    """Supply random prompts, half of every group right, and the same reasoning for every row."""
    cfg = run.cfg
    group, length = cfg.rollout.group_size, cfg.rollout.max_new
    shapes = WorkloadSizes(reasoning=length - 8)
    ids = np.random.default_rng(0).integers(1, run.model.vocab_size, (cfg.rollout.prompts, cfg.data.max_prompt))
    numbers: Any = np.arange(len(ids), dtype=np.int32)
    tokens: Any = ids.astype(np.int32)
    prompts = PromptBatch(tokens, np.ones(ids.shape, bool), numbers)  # type: ignore[arg-type]

    def timed(name: str) -> AbstractContextManager[Any]:
        return phase(name)

    return HostCallbacks(
        next_prompts=lambda: prompts,
        submit=lambda batch: GradedAtOnce(lambda rollout: lambda: half_right(len(rollout.ended), group)),
        find_answers=lambda rollout: spans(len(rollout.ended), length, shapes),
        fetch=run.fetch,
        place=run.place,
        phase=timed,
    )


def planned_seconds(rates: Peaks, cfg: Config, model: QwenConfig, name: str) -> float:
    """Return the seconds of a phase at these rates without overlap; an update recomputes its forward."""
    count = len(jax.devices())
    repeats = 4 / 3 if name in ("update", "fused") and cfg.policy.remat == "full" else 1.0
    products = repeats * model_flops(name, model, cfg) / (count * (rates.flops or 1.0))
    if name != "sample" or rates.bandwidth is None:
        return products
    return max(
        products, read_bytes(model, shapes_of(cfg), cfg.rollout, chips=count, tensor=1, expert=1) / rates.bandwidth
    )


def _decoding(cfg: Config, model: QwenConfig, seconds: float, rates: Peaks) -> list[Check]:
    """State how fast rows are decoded, and the share of the memory's measured speed that this needs."""
    count, tokens = len(jax.devices()), cfg.rollout.prompts * cfg.rollout.group_size * cfg.rollout.max_new
    checks = [measured("decoded tokens per second and device", tokens / seconds / count)]
    if rates.bandwidth is not None:
        bytes_read = read_bytes(model, shapes_of(cfg), cfg.rollout, chips=count, tensor=1, expert=1)
        note = "weights and keys and values at full length"
        checks.append(measured("of the memory's speed, decoding", bytes_read / seconds / rates.bandwidth, note=note))
    return checks


def _measured_rates(s: StageSetting) -> Peaks:
    """Return the rates that the stage peaks measured; without it the data sheet's, or those of a small product."""
    record = s.folder / RATES
    if record.is_file():
        rates = json.loads(record.read_text())
        return Peaks(rates["products"], None if s.small else rates["copies"], s.peaks.link)
    if s.peaks.flops is not None:
        return s.peaks
    return Peaks(_rate_of_products(), None, None)


def _rate_of_products() -> float:
    """Measure the products of this machine, if no data sheet is known."""
    x = jnp.ones((512, 512), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    return 2 * 512**3 / best_seconds(lambda: product(x), repeats=5)


def _peak_memory(s: StageSetting, shapes: ProgramShapes) -> Check:
    """Compare the peak of memory in use with the largest estimate."""
    name = "memory in use over estimate"
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if s.small or peak is None:
        return not_applicable(name, "this device does not report its memory")
    estimate = max(phase_memory(shapes, program).peak for program in shapes.programs())
    note = f"{peak / 2**30:.3g} GiB, estimated {estimate / 2**30:.3g} GiB"
    return at_most(name, peak / estimate, 1.1, note=note)
