"""``oarjax bench --growth``: how time and memory of a step's phases grow as its sizes double, beside the arithmetic.

Time is CPU seconds of all threads where the work is on CPUs, which a busy machine disturbs least, else wall seconds.
Memory is what the compiler says that the largest program of a phase allocates: temporaries and new results.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from oarjax.costs import RowTokens, Work, iteration_flops
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.data.hf import write_random_checkpoint
from oarjax.models.decoder import Decoder
from oarjax.models.weights import decoder_of
from oarjax.run.shapes import ProgramShapes
from oarjax.tools.bench.measure import spread
from oarjax.tools.bench.work import Ours, Watch, WorkloadSizes, draw_tokens, watched

BASE = WorkloadSizes(prompt_tokens=64, new_tokens=64, reasoning=56, cue=4, answer=4, groups=4, group_size=4)
AXES = ("rows", "prompt", "completion", "group", "width")
PHASES = {"rollout": ("sample",), "score, OAR-G": ("score", "credit"), "update": ("accumulate", "apply")}
"""Phases of a step of OAR-G in two passes, and the programs of each. GRPO's rollout and update are the same."""
WORSE = 1.25
"""A ratio above the arithmetic's, times this, is marked; memory's is the FLOPs' ratio or 2, of what is as long."""


def doubled(axis: str, fields: dict[str, Any], shapes: WorkloadSizes) -> tuple[dict[str, Any], WorkloadSizes]:
    """Return a policy's config and the shapes of a step with one size twice as large; the same for ``base``."""
    s = shapes
    twice = {
        "rows": {"groups": 2 * s.groups},
        "prompt": {"prompt_tokens": 2 * s.prompt_tokens},
        "completion": {"new_tokens": 2 * s.new_tokens, "reasoning": s.reasoning + s.new_tokens},
        "group": {"group_size": 2 * s.group_size},
    }
    wide = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    wider = {name: 2 * fields[name] for name in wide} if axis == "width" else {}
    return fields | wider, replace(s, **twice.get(axis, {}))


def clocked(totals: dict[str, float]) -> Watch:
    """Wrap programs so that each call is waited for and adds its seconds to ``totals``."""
    clock = time.process_time if jax.devices()[0].platform == "cpu" else time.perf_counter

    def around(name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **static: Any) -> Any:
            jax.block_until_ready(args)
            start = clock()
            result = jax.block_until_ready(program(*args, **static))
            totals[name] = totals.get(name, 0.0) + clock() - start
            return result

        return run

    return watched([name for programs in PHASES.values() for name in programs], around)


def arithmetic(d: Decoder, shapes: WorkloadSizes, prompt_rows: int) -> dict[str, float]:
    """Count the model FLOPs of the phases."""
    s, rows = shapes, shapes.groups * shapes.group_size
    row = RowTokens(s.prompt_tokens, s.new_tokens, s.reasoning, prompt_rows)
    work = Work(row, prompts=s.groups, rows=rows, used=rows)
    flops = iteration_flops(d, work, resolve_method(CreditSettings(method="oar_g")))
    return dict(zip(PHASES, flops.values(), strict=True))


class Case:
    """Steps of one size."""

    def __init__(self, folder: Path, fields: dict[str, Any], shapes: WorkloadSizes):
        ours = Ours(folder, shapes, draw_tokens(fields["vocab_size"], shapes, seed=0))
        sections = {"credit": {"method": "oar_g"}, "data": {"max_prompt": shapes.prompt_tokens}}
        cfg = ours.changed(update={"fused": "never"}, **sections)
        run = ours.run_of(cfg)
        self.seconds: dict[str, float] = {}
        self.work = ours.iteration(cfg, watch=clocked(self.seconds))
        self.flops = arithmetic(decoder_of(ours.model), shapes, run.steps.prompt_rows)
        self.memory = allocated(ProgramShapes(run))

    def __call__(self) -> dict[str, float]:
        """Run a step and return the seconds of each phase."""
        self.seconds.clear()
        self.work()
        return {phase: sum(self.seconds[name] for name in programs) for phase, programs in PHASES.items()}


def allocated(shapes: ProgramShapes) -> dict[str, int]:
    """Return the bytes that the largest program of each phase allocates."""
    phases = dict(zip(("sample", "score", "update"), PHASES, strict=True))
    largest = dict.fromkeys(PHASES, 0)
    for program in shapes.programs():
        if program.phase in phases:
            memory, phase = program.lower().compile().memory_analysis(), phases[program.phase]
            size = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            largest[phase] = max(largest[phase], size)
    return largest


def measure_growth(
    fields: dict[str, Any], shapes: WorkloadSizes, *, repeats: int, status: Callable[[str], Any]
) -> dict[str, Any]:
    """Run the base and every doubled size in turn, and compare each with the base of the same turn."""
    cases: dict[str, Case] = {}
    with tempfile.TemporaryDirectory(prefix="oarjax-bench-") as scratch:
        for axis in ("base", *AXES):
            with status(f"growth: compiling {axis}"):
                its_fields, its_shapes = doubled(axis, fields, shapes)
                folder = write_random_checkpoint(Path(scratch) / axis, its_fields, seed=0)
                cases[axis] = Case(folder, its_fields, its_shapes)
                for _ in range(2):
                    cases[axis]()
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(repeats):
        with status(f"growth: run {number + 1} of {repeats}"):
            runs.append({axis: case() for axis, case in cases.items()})
    base = cases["base"]
    rows = [
        {
            "phase": phase,
            "axis": axis,
            "seconds": spread([run["base"][phase] for run in runs]),
            "time": spread([run[axis][phase] / run["base"][phase] for run in runs]),
            "memory": cases[axis].memory[phase] / base.memory[phase],
            "flops": cases[axis].flops[phase] / base.flops[phase],
        }
        for phase in base.flops
        for axis in AXES
    ]
    s = shapes
    what = f"{s.groups} x {s.group_size} ({s.prompt_tokens}+{s.new_tokens}), width {fields['hidden_size']}"
    return {"what": what, "bytes": base.memory, "rows": rows}


def table(result: Mapping[str, Any]) -> Table:
    """Tabulate phases by sizes: time, memory and, by arithmetic, FLOPs, each over the base's."""
    out = Table(
        title=f"Growth from {result['what']} as one size doubles: time, memory, FLOPs by arithmetic",
        title_justify="left",
        caption=f"A star: time over {WORSE} times the FLOPs' ratio, memory over {WORSE} times that ratio or 2.",
        caption_justify="left",
    )
    for name in ("phase", *AXES):
        out.add_column(name, no_wrap=True, justify="left" if name == "phase" else "right")
    for phase, size in result["bytes"].items():
        phase_rows = [r for r in result["rows"] if r["phase"] == phase]
        seconds = phase_rows[0]["seconds"]["median"]
        out.add_row(f"{phase}\n[dim]{seconds:.2g} s, {size / 2**20:.0f} MiB[/dim]", *map(_cell, phase_rows))
    return out


def _cell(row: Mapping[str, Any]) -> str:
    pairs = (row["time"]["median"], row["flops"]), (row["memory"], max(row["flops"], 2))
    parts = [f"{x:.2f}{'*' * (x > WORSE * bound)}" for x, bound in pairs]
    return "\n".join([*parts, f"{row['flops']:.2f}"])
