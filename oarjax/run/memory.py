"""Estimate the device memory of each phase of a run with the compiler, before the first update.

The programs are compiled for the largest shapes of the run, and JAX keeps them for iterations with these shapes, in
this process and, by the compilation cache, in the next. Sampling runs several programs, and those for fewer rows and
cache slots need less.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from oarjax.config.schema import Config
from oarjax.credit.registry import reads_reference
from oarjax.run.shapes import Part, Phase, PhaseProgram, ProgramShapes
from oarjax.storage.durable import write_durably
from oarjax.system.devices import DeviceError, memory_limit
from oarjax.system.processes import only_first

FILE = "memory.json"

HELPS: dict[Phase, tuple[str, ...]] = {
    "reshard": ("a higher rollout.tensor",),
    "sample": ("lower rollout.prompts", "a lower rollout.max_new", "a higher rollout.tensor"),
    "evaluate": ("a lower eval.batch", "lower eval.samples", "a higher rollout.tensor"),
    "score": ("a lower update.microbatch", "a lower policy.head_chunk", "a lower credit.masking.chunk"),
    "credit": ("lower rollout.prompts",),
    "update": ("a lower update.microbatch", "a lower policy.head_chunk"),
    "fused": ("a lower update.microbatch", "a lower policy.head_chunk", "update.fused=never"),
    "apply": (),
}
"""Remedies if a phase does not fit, the cheapest first."""


def remedy(phase: Phase, cfg: Config) -> str:
    """Suggest what to change if a phase of this run does not fit."""
    remedies = list(HELPS[phase])
    if phase == "sample" and cfg.rollout.cache == "policy":
        remedies.append("rollout.cache=int8")
    if phase in ("update", "fused") and cfg.policy.remat != "full":
        remedies.append("policy.remat=full")
    if phase in ("update", "fused", "apply") and cfg.optim.moments == "float32" and not cfg.optim.function:
        remedies.append("optim.moments=bfloat16")
    compares = cfg.loss.scores_reference or reads_reference(cfg.credit.method) or cfg.eval.kl == "on"
    if phase not in ("score", "credit") and compares and not cfg.lora.rank and cfg.loss.reference != "host":
        remedies.append("loss.reference=host")
    if phase in ("update", "fused", "apply") and not cfg.lora.rank:
        remedies.append("lora.rank=32")
    return f"try {', '.join(remedies)}, or more devices" if remedies else "use more devices"


class PhaseMemory(NamedTuple):
    """Bytes per device while one program of a phase runs."""

    phase: Phase
    resident: dict[Part, int]  # arrays that outlive the phase, by part
    peak: int  # with these, whether the program takes them or not
    program: str = ""  # its name, if the phase has several

    @property
    def title(self) -> str:
        return f"{self.phase}: {self.program}" if self.program else self.phase

    def fits(self, limit: int | None) -> bool:
        return limit is None or self.peak <= limit


def phase_memory(shapes: ProgramShapes, program: PhaseProgram) -> PhaseMemory:
    """Compile a program and add the memory of other arrays alive while it runs.

    Raises:
        DeviceError: the compiler reports that it does not fit.
    """
    compiled = fitting(shapes, program.phase, lambda: program.lower().compile())
    memory = compiled.memory_analysis()
    peak = peak_bytes(memory, platform=shapes.mesh.devices.flat[0].platform)
    other_bytes = shapes.beside(program, read=memory.argument_size_in_bytes)
    return PhaseMemory(program.phase, shapes.resident(program.phase), peak + other_bytes, program.name)


def fitting(shapes: ProgramShapes, phase: Phase, work: Callable[[], Any]) -> Any:
    """Compile a program of a phase.

    Raises:
        DeviceError: the compiler reports that it does not fit.
    """
    try:
        return work()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message, remedies = str(error).splitlines()[0], remedy(phase, shapes.cfg)
        raise DeviceError(f"phase {phase} does not fit: {message}; {remedies}") from error


def peak_bytes(memory: Any, *, platform: str) -> int:
    """Return the compiler's peak of one program; on a CPU, whose peak lacks temporaries, the sum as a bound."""
    if platform != "cpu":
        return memory.peak_memory_in_bytes
    buffers = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return buffers + memory.temp_size_in_bytes


def report_memory(shapes: ProgramShapes, folder: Path, console: Console) -> list[PhaseMemory]:
    """Compile every program, print the table, write memory.json, and warn of phases that will not fit.

    Raises:
        DeviceError: the compiler refuses a program for its size.
    """
    limit = memory_limit(shapes.mesh.local_devices[0])
    phases = [phase_memory(shapes, program) for program in shapes.programs()]
    console.print(memory_table(phases, limit))
    largest = {phase.phase: phase for phase in sorted(phases, key=lambda phase: phase.peak)}  # of a phase's programs
    for phase in largest.values():
        if limit is not None and not phase.fits(limit):
            console.print(
                f"phase {phase.title} needs {gib(phase.peak)} of {gib(limit)} GiB and will not fit; "
                f"{remedy(phase.phase, shapes.cfg)}",
                style="yellow",
            )
    tree = {"limit": limit, "phases": [phase._asdict() for phase in phases]}
    only_first(lambda: write_durably(folder / FILE, json.dumps(tree, indent=1)))
    return phases


def memory_table(phases: Iterable[PhaseMemory], limit: int | None) -> Table:
    """Tabulate the phases: resident arrays and peak."""
    of = "" if limit is None else f" of {gib(limit)}"
    table = Table(title=f"GiB per device{of}, estimated by the compiler", title_justify="left")
    for name in ("phase", "resident", "peak"):
        table.add_column(name, justify="right" if name == "peak" else "left")
    previous = ""
    for phase in phases:
        parts = "" if phase.phase == previous else ", ".join(f"{p} {gib(size)}" for p, size in phase.resident.items())
        previous = phase.phase
        table.add_row(phase.title, parts, gib(phase.peak), style=None if phase.fits(limit) else "yellow")
    return table


def memory_facts(folder: Path) -> dict[str, str]:
    """Return the highest peak of a run that wrote its table, for its page."""
    try:
        tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    top = max(tree["phases"], key=lambda phase: phase["peak"])
    of = "" if tree["limit"] is None else f" of {gib(tree['limit'])}"
    return {"peak memory": f"{gib(top['peak'])}{of} GiB per device, phase {PhaseMemory(**top).title}"}


def gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
