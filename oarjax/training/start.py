"""Prepare what the iterations start from: the state, the reference policy, a meter, and the table of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from oarjax.run.memory import report_memory
from oarjax.run.outside import Outside, open_outside
from oarjax.run.run import Run
from oarjax.run.shapes import ProgramShapes
from oarjax.run.teacher import read_teacher
from oarjax.step.state import reference_mover
from oarjax.system.background import Background
from oarjax.system.devices import peak_flops, to_host_memory
from oarjax.training.held_out import Evaluation
from oarjax.training.meter import Meter
from oarjax.types import Params, TrainState


class Start(NamedTuple):
    """Hold what the iterations start from; a checkpoint's state replaces ``state`` when a run resumes."""

    state: TrainState
    reference: Params | None  # None: nothing compares with it, adapters' frozen weights serve, or the state holds it
    first: Params | None  # those of the start, where the divergence from it is measured or scores compare with it
    move: Callable[[TrainState], TrainState]  # makes the policy the reference that the state holds
    before: Evaluation | None  # of the policy; None without data.eval
    meter: Meter
    outside: Outside  # rollouts from files or an engine
    background: Background | None = None  # compiles the run's programs
    report_memory: Callable[[], object] | None = None  # to be called before the first update


def prepare(
    run: Run, params: Params, before: Evaluation | None, folder: Path, background: Background | None = None
) -> Start:
    """Create the state, which reuses the memory of ``params`` unless they are the reference.

    The memory of the programs is reported now, or later where the background still compiles them.

    Raises:
        DeviceError: a program does not fit the devices.
        DataError: the files of rollout.from do not hold what the run needs.
    """
    loss, first = run.cfg.loss, None
    teacher = read_teacher(loss.teacher, run.cfg.policy, run.mesh)
    compares = run.credit.needs_reference(kl=loss.scores_reference) and not loss.reference_every and teacher is None
    if (compares or run.cfg.eval.kl == "on") and run.cfg.lora.rank == 0:
        first = to_host_memory(params) if loss.reference == "host" else params
    state = run.new_state(params, copy=first is params)
    meter = Meter(run.cfg, run.model, run.credit, peak_flops(run.compute_dtype)[0], run.steps.prompt_rows)
    reference = first if compares else None
    if teacher is not None:
        reference = teacher.load(run.cfg.policy, run.mesh)
        reference = to_host_memory(reference) if loss.reference == "host" else reference
    report = partial(report_memory, ProgramShapes(run), folder, run.console) if run.wants_memory else None
    if report is not None and background is None:
        with run.console.status("compiling the largest programs"):
            report()
        report = None
    mover, outside = reference_mover(run.layout), open_outside(run)
    return Start(state, reference, first, mover, before, meter, outside, background, report)
