"""``oarjax train``: warm start, iterations, evaluation, export, report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from shlex import quote

from rich.console import Console

from oarjax.config.loading import load_config
from oarjax.config.schema import Config
from oarjax.data.hf import export, remove_half_written
from oarjax.errors import ConfigError, UserError
from oarjax.grading.recorded import Grading
from oarjax.report.command import write_facts
from oarjax.report.console import banner, resumable, run_lines
from oarjax.report.files import make_console
from oarjax.run.adapters import plain_params
from oarjax.run.compile_ahead import compiled_ahead
from oarjax.run.dry_run import try_rewards
from oarjax.run.export_target import check_export
from oarjax.run.inputs import check_inputs, pin_threads, seal_start
from oarjax.run.outside import open_outside
from oarjax.run.run import Run, open_run
from oarjax.storage.checkpoint import remove_all
from oarjax.storage.durable import (
    DamagedError,
    cannot_read,
    check_guards,
    exists,
    refuse_special,
    storage_errors,
    write_durably,
)
from oarjax.storage.folder import ID, claim, has_progress, locked, mend_id, put_aside, put_back, refuse_another_run
from oarjax.storage.stop import Stop
from oarjax.storage.trust import code_places, note_trusted
from oarjax.system.background import Background
from oarjax.system.devices import choose_platform
from oarjax.system.peers import resumes
from oarjax.system.processes import from_first, join_processes, only_first, peers_watched
from oarjax.training.extension import check_longer
from oarjax.training.held_out import Evaluation, evaluate, evaluation_from, plain_evaluation
from oarjax.training.results import show_results
from oarjax.training.run_files import check_checkpoint
from oarjax.training.start import prepare
from oarjax.training.trainer import train
from oarjax.training.warm_start import warm_start
from oarjax.types import Params


def run(config: Path, overrides: Sequence[str], *, restart: bool = False, extend: bool = False) -> None:
    """Train a config; ``restart`` moves the contents of the run's folder aside first. See also ``train_once``."""
    if restart and extend:
        raise ConfigError("--extend: goes on with a run, and --restart begins it anew; pass one of them")
    console = make_console()
    cfg = load_config(config, list(overrides))
    folder = _folder(cfg.run_dir)
    if not any(override.startswith("run_dir=") for override in overrides):
        _refuse_moved(config, folder)
    with Stop() as stop, _put_aside(cfg, folder, console) if restart else nullcontext():
        if not restart:
            refuse_special(folder)
            pin_threads(folder)
        progress = partial(has_progress, folder)
        with peers_watched(progress), resumes(progress):
            train_once(cfg, console, stop, extend=extend)


def _refuse_moved(config: Path, folder: Path) -> None:
    """Refuse the config of a run that was moved: training would begin anew where the run was."""
    home = config.expanduser().absolute().parent
    if config.name != "config.yaml" or not (home / ID).is_file() or home.resolve() == folder.resolve():
        return
    if not has_progress(folder):
        raise ConfigError(
            f"run_dir: {config} is of the run in {home}, and its run_dir is {folder}, where there is none; pass "
            f"run_dir={quote(str(home))} to go on with it, or another run_dir=... to start one"
        )


@contextmanager
def _put_aside(cfg: Config, folder: Path, console: Console) -> Iterator[None]:
    """Move a run's folder aside; move it back if the new run is refused before it begins."""
    for name, path in (("policy.path", cfg.policy.path), ("lora.start", cfg.lora.start)):
        if path is not None and folder in Path(path).expanduser().absolute().parents:
            raise ConfigError(f"{name}: {path} lies in the run that --restart moves aside; set another run_dir=...")
    join_processes(**cfg.distributed.model_dump())
    choose_platform(cfg.device)  # before anything asks JAX for the number of this process
    folders: list[Path | None] = []
    only_first(lambda: folders.append(put_aside(folder)))
    aside = next(iter(folders), None)
    if aside is not None:
        console.print(f"the previous run of {folder} is now in {aside}", markup=False)
    try:
        yield
    except UserError:
        if aside is not None and put_back(aside, folder):
            console.print(f"and back in {folder}, since the new run was refused", markup=False)
        raise


def train_once(
    cfg: Config,
    console: Console,
    stop: Stop,
    on_lines: Callable[[], object] | None = None,
    *,
    extend: bool = False,
) -> None:
    """Train a run from its start to its report.

    Args:
        on_lines: see ``oarjax.training.trainer.train``.
        extend: a run that resumes may have more iterations, even if this changes its learning rates.
    """
    folder = Path(cfg.run_dir).expanduser()
    changes = refuse_another_run(folder, cfg, extend=extend)
    check_longer(folder, cfg.iterations, extend=extend)
    with ExitStack() as stack:

        def hold() -> None:  # another command may have written since the first check
            stack.enter_context(locked(folder))
            refuse_another_run(folder, cfg, extend=extend)

        run = open_run(cfg, console, hold=hold)
        stack.enter_context(resumable(console, folder))
        stack.enter_context(storage_errors(folder))
        check_checkpoint(run, folder)
        open_outside(run).probe()
        if run.first:
            changes += check_inputs(run)
        if cfg.export.folder is not None:
            target = folder / cfg.export.folder
            only_first(lambda: remove_half_written(target))
            only_first(lambda: check_export(run, target))
        banner(console, run_lines(cfg, run.facts()))
        if changes.words():
            console.print(f"resuming with a changed config or changed inputs: {changes.words()}", markup=False)
        stack.callback(lambda: (played := vars(run).get("environments")) and played.close())  # if it was started
        with run.grader() as grader:
            try_rewards(run, grader)
            warmed = exists(folder / "start" / "config.json")
            if run.first and warmed:
                seal_start(folder, folder / "start")
            # only now: a run that is refused changes nothing
            only_first(lambda: claim_folder(folder, cfg, console, extend=extend))
            only_first(lambda: has_progress(folder) or write_facts(folder, run.facts()))
            evaluates = run.held_out is not None and not exists(folder / "start.json")
            ahead = compiled_ahead(run, evaluates_first=evaluates, warm_start=cfg.sft is not None and not warmed)
            background = stack.enter_context(ahead)
            params, start_evaluation = start_policy(run, grader, stop, background)
            trained = train(
                run, grader, prepare(run, params, start_evaluation, folder, background), folder, stop, on_lines
            )
            if cfg.export.folder is not None:
                target = folder / cfg.export.folder
                check_guards(target)
                export(
                    target,
                    run.model,
                    plain_params(cfg.lora, trained.params, run.layout.params, dtype=cfg.export.dtype),
                    source=run.source,
                    dtype=cfg.export.dtype,
                    stop_ids=run.stop_ids,
                )
                console.print(f"policy  {target}", markup=False)
        check_guards(folder)
        if run.first:
            show_results(run, folder, start_evaluation, trained)


def claim_folder(folder: Path, cfg: Config, console: Console, *, extend: bool = False) -> None:
    """Create the run's folder, or resume it, and record its code as trusted, since the user's command names it."""
    mended = mend_id(folder)
    claim(folder, cfg, extend=extend)
    for problem in filter(None, (mended, note_trusted(folder, code_places(cfg)))):
        console.print(problem, markup=False)


def _folder(run_dir: str) -> Path:
    """Return the run's folder as an absolute path, which has a name.

    Raises:
        ConfigError: it is the root of the file system.
    """
    folder = Path(os.path.abspath(Path(run_dir).expanduser()))
    if not folder.name:
        raise ConfigError(f"run_dir: expected a folder for the run's files, got {run_dir}; set another run_dir=...")
    return folder


def start_policy(
    run: Run, grader: Grading, stop: Stop | None = None, background: Background | None = None
) -> tuple[Params, Evaluation | None]:
    """Return the policy to train from, after the warm start if there is one, and its evaluation.

    Both are saved in the run's folder, and read from it when the run resumes. ``background`` begins to compile after
    the first step of the warm start, if it has not before.
    """
    cfg, stop = run.cfg, stop or Stop()
    if cfg.sft is None:
        params = run.load()
    else:
        warm = run.folder / "start"
        only_first(lambda: remove_half_written(warm))
        if from_first(lambda: exists(warm / "config.json")):
            run.console.print(f"reading the finished warm start from {warm}", markup=False)
            only_first(lambda: seal_start(run.folder, warm))
            params = run.load(source=warm)
        else:
            params = warm_start(run, run.load(), stop, on_step=None if background is None else background.start)
            export(warm, run.model, params, source=run.source)
            only_first(lambda: seal_start(run.folder, warm))
        only_first(lambda: remove_all(run.folder / "sft"))
    # A resumed warm start may have had no step left.
    if background is not None:
        background.start()
    stop.check()
    if run.held_out is None:
        return params, None
    start_file = run.folder / "start.json"
    if from_first(lambda: exists(start_file)):
        try:
            return params, evaluation_from(json.loads(start_file.read_text(encoding="utf-8")))
        except OSError as error:
            raise cannot_read(start_file, error) from error
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(
                f"{start_file} is not the evaluation that was written ({type(error).__name__}: {error}); put a good "
                "copy there, or remove it to evaluate the start again"
            ) from None
    start_evaluation = evaluate(run, grader, params)
    only_first(lambda: write_durably(start_file, json.dumps(plain_evaluation(start_evaluation))))
    stop.check()
    return params, start_evaluation
