"""Worker of ``oarjax study``: compute warm starts and runs, one after another, in one process.

``python -m oarjax.tools.study.worker`` reads a task per line and answers each with a line, see ``study.jobs``.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from oarjax.config.inputs import PolicyConfig
from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.config.section import changed
from oarjax.errors import UserError
from oarjax.grading.grader import Grader
from oarjax.report.files import ShownConsole
from oarjax.run.compile_ahead import compiled_ahead
from oarjax.run.inputs import check_inputs
from oarjax.run.run import Run, open_run
from oarjax.step.steps import Steps
from oarjax.storage.checkpoint import remove_all
from oarjax.storage.durable import DamagedError, cannot_read, storage_errors, write_durably
from oarjax.storage.folder import locked, refuse_another_run
from oarjax.storage.stop import Stop
from oarjax.storage.trust import code_digests, code_places
from oarjax.tools.study.jobs import study_remedy
from oarjax.training.command import claim_folder, start_policy
from oarjax.training.held_out import Evaluation, evaluation_from, plain_evaluation
from oarjax.training.start import prepare
from oarjax.training.trainer import train

BEFORE = "before.json"
"""File in a seed's folder with the finished evaluation of its start."""


def main() -> None:
    """Serve until the standard input ends; ``WORKER`` of the command ends this process with its parent."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not mix with the replies
    with ExitStack() as stack:
        graders, programs = Graders(stack), LentPrograms()
        for line in sys.stdin:
            replies.write(json.dumps({"error": attempt(json.loads(line), graders, programs)}) + "\n")
            replies.flush()


def attempt(task: dict[str, Any], graders: Graders, programs: LentPrograms) -> str | None:
    """Run a task; return its error, None on success. A user's error comes without a traceback."""
    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        console = ShownConsole(file=log, width=160, highlight=False, markup=False)
        try:
            cfg = parse_config(task["config"])
            if task["kind"] == "start":
                make_start(cfg, console, graders, programs)
            else:
                train_run(cfg, Path(task["home"]), console, graders, programs)
        except UserError as error:
            programs.forget()
            return study_remedy(str(error), folder)
        except Exception:
            programs.forget()
            return traceback.format_exc()
        finally:
            gc.collect()
    return None


class LentPrograms:
    """The device programs of the last run, for a next run that differs in seed and folder alone."""

    def __init__(self) -> None:
        self._last: tuple[Any, Steps] | None = None

    def lend(self, run: Run) -> None:
        """Give a run the last one's programs, traced and compiled, if they are its own; else forget them."""
        of = changed(run.cfg, run_dir="any", seed=0), run.model, code_digests(code_places(run.cfg))
        if self._last is not None and self._last[0] == of:
            run.steps = self._last[1]
        else:
            self.forget()
            self._last = of, run.steps

    def forget(self) -> None:
        """Free the programs; whoever needs them again reads them from the compilation cache."""
        self._last = None
        jax.clear_caches()


class Graders:
    """Grading processes, shared by runs with the same grading settings."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._graders: dict[str, Grader] = {}

    def of(self, run: Run) -> Grader:
        """Return the grader of a run's settings, started on first use."""
        cfg = run.cfg
        settings = cfg.grading.model_dump_json() + repr(cfg.credit.answer)
        if settings not in self._graders:
            self._graders[settings] = self._stack.enter_context(run.grader())
        return self._graders[settings]


def make_start(cfg: Config, console: Console, graders: Graders, programs: LentPrograms) -> None:
    """Create and evaluate the policy that all runs of a seed start from, in the seed's folder."""
    with locked(Path(cfg.run_dir)):
        run = open_run(cfg, console)
        _claim(run, Path(cfg.run_dir), console)
        programs.lend(run)
        _, evaluation = start_policy(run, graders.of(run))
        write_before(run.folder / BEFORE, evaluation)


def train_run(cfg: Config, home: Path, console: Console, graders: Graders, programs: LentPrograms) -> None:
    """Train a run from the seed's start, and remove its checkpoints at the end."""
    folder = Path(cfg.run_dir)
    policy = _start_of(cfg.policy, home, warm=cfg.sft is not None)
    run = open_run(changed(cfg, run_dir=str(home), policy=policy, sft=None), console)
    run = run.with_config(cfg)
    params, stop = run.load(), Stop()
    with locked(folder):
        _claim(run, folder, console)
        programs.lend(run)
        with compiled_ahead(run, evaluates_first=False) as background:
            start = prepare(run, params, read_before(home / BEFORE), folder, background)
            train(run, graders.of(run), start, folder, stop)
        remove_all(folder / "checkpoints")
        for records in ("rollouts", "verdicts"):
            shutil.rmtree(folder / records, ignore_errors=True)


def _claim(run: Run, folder: Path, console: Console) -> None:
    """Create a run's folder, or resume it with the same config and inputs; call with its lock held."""
    refuse_another_run(folder, run.cfg)
    if changes := check_inputs(run, folder).words():
        console.print(f"resuming with other inputs: {changes}")
    claim_folder(folder, run.cfg, console)


def _start_of(policy: PolicyConfig, home: Path, *, warm: bool) -> PolicyConfig:
    """Return the policy section that reads the seed's start: after its warm start, if there is one."""
    if not warm and not policy.path.startswith("builtin:"):
        return policy
    return changed(policy, path=str(home / ("start" if warm else "policy")), tokenizer=None, revision=None)


def write_before(path: Path, before: Evaluation | None) -> None:
    """Write the start's evaluation as JSON, durably. NaN (ungraded) is null.

    Raises:
        StorageError: it cannot be written.
    """
    with storage_errors(path):
        write_durably(path, json.dumps(plain_evaluation(before)))


def read_before(path: Path) -> Evaluation | None:
    """Read the start's evaluation.

    Raises:
        DamagedError: the file differs from what was written.
        StorageError: it cannot be read.
    """
    try:
        return evaluation_from(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not the evaluation that was written ({type(error).__name__}: {error}); remove it, and the same "
            "command writes it again"
        ) from None
