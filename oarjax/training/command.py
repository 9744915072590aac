"""``oarjax train``: warm start, iterations, evaluation, export, report; with ``--compare`` or controls, those too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from oarjax.config import Config, ConfigError, load_config
from oarjax.credit.registry import choices, label
from oarjax.data.hf import export, remove_half_written
from oarjax.errors import UserError
from oarjax.grading.recorded import Grading
from oarjax.report.command import write_facts
from oarjax.report.console import banner, resumable, run_lines
from oarjax.report.files import make_console
from oarjax.run.adapters import plain_params
from oarjax.run.dry_run import try_rewards
from oarjax.run.export_target import check_export
from oarjax.run.hints import hints_of
from oarjax.run.inputs import check_inputs, pin_threads, seal_start
from oarjax.run.run import Run, open_run
from oarjax.storage.checkpoint import remove_all
from oarjax.storage.durable import DamagedError, cannot_read, check_guards, exists, storage_errors, write_durably
from oarjax.storage.folder import changed, claim, has_progress, locked, mend_id, put_aside, put_back, refuse_another_run
from oarjax.storage.stop import Stop
from oarjax.storage.trust import code_places, note_trusted
from oarjax.system.peers import resumes
from oarjax.system.processes import from_first, join_processes, only_first, peers_watched
from oarjax.training.held_out import Evaluation, evaluate, evaluation_from, plain_evaluation
from oarjax.training.results import show_results
from oarjax.training.run_files import check_checkpoint
from oarjax.training.trainer import Trained, train
from oarjax.training.warm_start import warm_start
from oarjax.types import Params


def run(config: Path, overrides: Sequence[str], *, compare: bool, seeds: str = "", restart: bool = False) -> None:
    """Train a config; with ``compare``, also its controls, from the same start, once per seed.

    ``restart`` moves the contents of the run's folder aside first.
    """
    console = make_console()
    cfg = load_config(config, list(overrides))
    if seeds and not compare:
        raise ConfigError("--seeds needs --compare; for a single run set seed=N")
    if compare and cfg.data.eval is None:
        raise ConfigError("data.eval: --compare needs held-out problems; set data.eval")
    folder = _compared(cfg.run_dir) if compare else _folder(cfg.run_dir)
    with Stop() as stop, _put_aside(cfg, folder, console) if restart else nullcontext():
        if not restart:
            pin_threads(next(folder.glob("seed*"), folder) if compare else folder)
        progress = partial(has_progress, folder)
        with peers_watched(progress), resumes(progress):
            if compare:
                _compare(cfg, _seeds(seeds) or [cfg.seed], console, stop)
            else:
                train_once(cfg, console, stop)


@contextmanager
def _put_aside(cfg: Config, folder: Path, console: Console) -> Iterator[None]:
    """Move a run's folder aside; move it back if the new run is refused before it begins."""
    for name, given in (("policy.path", cfg.policy.path), ("lora.start", cfg.lora.start)):
        if given is not None and folder in Path(given).expanduser().absolute().parents:
            raise ConfigError(f"{name}: {given} lies in the run that --restart moves aside; set another run_dir=...")
    join_processes(**cfg.distributed.model_dump())
    moved: list[Path | None] = []
    only_first(lambda: moved.append(put_aside(folder)))
    aside = next(iter(moved), None)
    if aside is not None:
        console.print(f"the previous run of {folder} is now in {aside}", markup=False)
    try:
        yield
    except UserError:
        if aside is not None and put_back(aside, folder):
            console.print(f"and back in {folder}, since the new run was refused", markup=False)
        raise


def _seeds(text: str) -> list[int]:
    """Parse ``0,1,2`` as numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and len(part) <= 18 for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--seeds: expected different whole numbers such as 0,1,2, got {text!r}")
    return [int(part) for part in parts]


def train_once(cfg: Config, console: Console, stop: Stop, on_lines: Callable[[], object] | None = None) -> None:
    """Train a run from its start to its report; for ``on_lines`` see ``oarjax.training.trainer.train``."""
    folder = Path(cfg.run_dir).expanduser()
    changes = refuse_another_run(folder, cfg)
    with ExitStack() as stack:
        run = open_run(cfg, console, hold=partial(_hold, stack, folder, cfg))
        stack.enter_context(resumable(console, folder))
        stack.enter_context(storage_errors(folder))
        check_checkpoint(run, folder)
        controls = {name: _with_method(run, name) for name in cfg.report.controls if name != cfg.credit.method}
        for where, each in (("", run), *(("report.controls: ", control) for control in controls.values())):
            _check_credit(each, where)
        if run.first:
            changes += check_inputs(run)
        if cfg.export.folder is not None:
            target = folder / cfg.export.folder
            only_first(lambda: remove_half_written(target))
            only_first(lambda: check_export(run, target))
        banner(console, run_lines(cfg, run.facts()))
        if changes.words():
            console.print(f"resuming with a changed config or changed inputs: {changes.words()}", markup=False)
        with run.grader() as grader:
            try_rewards(run, grader)
            if run.first and exists(folder / "start" / "config.json"):
                seal_start(folder, folder / "start")
            only_first(lambda: _claim(folder, cfg, console))  # only now: a run that is refused changes nothing
            only_first(lambda: write_facts(folder, run.facts()))
            start, before = start_policy(run, grader, stop)
            trained = train(run, grader, start, before, folder, stop, on_lines, keep_start=bool(controls))
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
            runs = {cfg.credit.method: [trained]}
            for name, control in controls.items():
                console.rule(label(name, cfg.credit.permuted_of))
                runs[name] = [_train_in_own_folder(control, grader, start, before, stop)]
        check_guards(folder)
        if run.first:
            show_results(run, folder, [before], runs)


def _check_credit(run: Run, where: str) -> None:
    """Build a run's credit method, and find what it reads beside rollouts, before anything is written."""
    run.check_credit(where)
    try:
        hints_of(run)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from error


def _with_method(run: Run, method: str) -> Run:
    """Return the run with another credit method and no controls."""
    cfg = run.cfg
    return run.with_config(
        changed(cfg, credit=replace(cfg.credit, method=method), report=changed(cfg.report, controls=()))
    )


def _train_in_own_folder(run: Run, grader: Grading, start: Params, before: Evaluation | None, stop: Stop) -> Trained:
    """Train a run in a folder named for its method, below the run's folder; the result has no params."""
    folder = run.folder / run.cfg.credit.method
    only_first(partial(_claim, folder, run.cfg, run.console))
    return replace(train(run, grader, start, before, folder, stop), params={})  # frees memory for the next run


def _hold(stack: ExitStack, folder: Path, cfg: Config) -> None:
    """Lock the run's folder before anything is written; one process locks it for all processes that share it.

    Another command may have written to it since the first check, so it is checked again under the lock.
    """
    stack.enter_context(locked(folder))
    refuse_another_run(folder, cfg)


def _claim(folder: Path, cfg: Config, console: Console) -> None:
    """Create the run's folder, or resume it, and record its code as trusted, since the user's command names it."""
    mended = mend_id(folder)
    claim(folder, cfg)
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


def _compared(run_dir: str) -> Path:
    """Return the folder of the runs of --compare."""
    root = _folder(run_dir)
    return root.with_name(f"{root.name}-compare")


def _compare(cfg: Config, seeds: list[int], console: Console, stop: Stop) -> None:
    """Train every method from the same warm start, with the same prompts and noise, seed by seed."""
    root = _compared(cfg.run_dir)
    if cfg.credit.method in choices("permuted_of"):
        cfg = changed(cfg, credit=replace(cfg.credit, permuted_of=cfg.credit.method))
    refuse_another_run(root, cfg)
    methods = list(dict.fromkeys([cfg.credit.method, *cfg.report.controls, "uniform", "permuted"]))
    befores: list[Evaluation | None] = []
    runs: dict[str, list[Trained]] = {name: [] for name in methods}
    run: Run | None = None
    with ExitStack() as stack:
        for seed in seeds:
            hold = partial(_hold, stack, root, cfg) if seed == seeds[0] else None
            run = open_run(changed(cfg, seed=seed, run_dir=str(root / f"seed{seed}")), console, hold=hold)
            first = seed == seeds[0]
            if first:
                only_first(lambda: claim(root, cfg))
                banner(console, run_lines(cfg, run.facts()))
            with storage_errors(run.folder), run.grader() as grader:
                if first:
                    try_rewards(run, grader)
                if run.first and (changes := check_inputs(run).words()):
                    console.print(f"resuming with changed inputs: {changes}", markup=False)
                if first:
                    only_first(partial(write_facts, root, run.facts()))
                start, before = start_policy(run, grader, stop)
                befores.append(before)
                for method in methods:
                    console.rule(f"seed {seed}, {label(method, cfg.credit.permuted_of, cfg.credit.function)}")
                    runs[method].append(_train_in_own_folder(_with_method(run, method), grader, start, before, stop))
                del start
        if run is not None and run.first:
            show_results(run, root, befores, runs)


def start_policy(run: Run, grader: Grading, stop: Stop | None = None) -> tuple[Params, Evaluation | None]:
    """Return the policy to train from, after the warm start if there is one, and its evaluation.

    Both are saved in the run's folder, and read from it when the run resumes.
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
            params = warm_start(run, run.load(), stop)
            export(warm, run.model, params, source=run.source)
            only_first(lambda: seal_start(run.folder, warm))
        only_first(lambda: remove_all(run.folder / "sft"))
    stop.check()
    if run.held_out is None:
        return params, None
    known = run.folder / "start.json"
    if from_first(lambda: exists(known)):
        try:
            return params, evaluation_from(json.loads(known.read_text(encoding="utf-8")))
        except OSError as error:
            raise cannot_read(known, error) from error
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(
                f"{known} is not the evaluation that was written ({type(error).__name__}: {error}); put a good copy "
                "there, or remove it to evaluate the start again"
            ) from None
    before = evaluate(run, grader, params)
    only_first(lambda: write_durably(known, json.dumps(plain_evaluation(before))))
    stop.check()
    return params, before
