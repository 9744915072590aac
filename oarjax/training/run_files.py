"""Write a run's files while it iterates (metrics, completions, rollouts, verdicts, checkpoints), and resume from them.

A checkpoint records the lengths of the other files. A run that resumes from it truncates them to these lengths, so that
they end with each line once, as if the run had never stopped.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.config.section import changed
from oarjax.data.hf import commit_of
from oarjax.data.streams import PromptStream
from oarjax.errors import ConfigError
from oarjax.grading.grader import local_digests
from oarjax.grading.recorded import Grading, RecordedGrader, setup_of
from oarjax.report.command import write_facts
from oarjax.report.console import OnceWarnings
from oarjax.report.files import CompletionRow, CompletionsWriter, Metrics, MetricsWriter
from oarjax.report.groups import group_table, shows_groups, write_groups, write_shown
from oarjax.report.trackers import TrackedRun, Trackers, run_id
from oarjax.rollout.source import Source
from oarjax.run.adapters import trained_shapes
from oarjax.run.run import Run
from oarjax.sources.files import RecordedRollouts
from oarjax.sources.lagged import PromptsAhead
from oarjax.sources.records import RecordedSource, Records
from oarjax.step.history import RewardHistory
from oarjax.step.iteration import Iteration
from oarjax.step.programs import make_optimizer
from oarjax.storage.checkpoint import Checkpoints, arrays, check_arrays, finished
from oarjax.storage.durable import Failures, StorageError, read_lines, storage_errors
from oarjax.storage.folder import record_config, refuse_another_config
from oarjax.storage.folder import run_id as saved_id
from oarjax.storage.manifest import misplaced
from oarjax.system.processes import from_first, only_first
from oarjax.training.held_out import Evaluation, evaluation_from, plain_evaluation
from oarjax.types import TrainState


class RunFiles:
    """Write the files of a run. Use as a context manager, and call ``resume`` first.

    Args:
        warnings: prints a problem with a file, and what was done about it.

    Raises:
        StorageError: from any method, if a file cannot be written and checkpoint.on_failure is stop.
    """

    def __init__(self, run: Run, folder: Path, warnings: OnceWarnings):
        self._run, self._cfg, self._folder, self._warnings = run, run.cfg.checkpoint, folder, warnings
        self._failures = Failures(self._cfg.on_failure, warnings.say)
        self._verdicts: RecordedGrader | None = None
        self._rollouts: Records | None = None
        self._best, self._iteration = -math.inf, 0
        self._stack = ExitStack()

    def __enter__(self) -> RunFiles:
        self._checkpoints = Checkpoints(
            self._folder / "checkpoints", keep=self._cfg.keep, metric=self._cfg.best
        ).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._stack, self._failures.handled():
            self._checkpoints.__exit__(*error)

    def resume(
        self, state: TrainState, stream: PromptStream | PromptsAhead | RecordedRollouts, history: RewardHistory
    ) -> tuple[TrainState, int, Evaluation | None]:
        """Return state, iteration and evaluation of the newest checkpoint that can be trusted.

        The stream of prompts and the history of rewards go to where they were.

        Without a checkpoint return the state unchanged and iteration 0.

        Raises:
            StorageError: there were checkpoints, and none can be trusted.
        """
        first, last, positions = 0, None, {"metrics": 0, "completions": 0}
        newest = self._checkpoints.trusted(self._say)
        if newest is not None:
            self._check_base(self._checkpoints.finished()[newest]["record"].get("commit"))
            state, record = self._checkpoints.restore(newest, like=state)
            stream.restore(record["data"])
            history.restore(record.get("history", {}))
            first, last, positions = newest, evaluation_from(record["evaluation"]), record["positions"]
            self._show_rate(int(state.step), record["config"]["iterations"])
            self._best = max(self._checkpoints.scores().values(), default=-math.inf)
            if self._cfg.best is not None and (metrics := self._checkpoints.other_metrics()):
                self._say(
                    f"checkpoint.best changed from {', '.join(metrics)} to {self._cfg.best}: earlier scores do not "
                    "count for the best checkpoint"
                )
            if record["version"] != version("oarjax"):
                self._say(f"the checkpoint was written by oarjax {record['version']}, this is {version('oarjax')}")
        for name in ("metrics", "completions"):  # fails on a damaged line before anything is truncated
            for _ in read_lines(self._folder / f"{name}.jsonl"):
                pass
        report, writes = self._run.cfg.report, self._run.first
        with storage_errors(self._folder):
            only_first(self._record)
        if newest is not None:
            where = self._folder / "checkpoints"
            self._run.console.print(f"resuming after iteration {first}, from {where}", markup=False)
        self._metrics = self._stack.enter_context(
            MetricsWriter(self._folder if writes and "jsonl" in report.to else None, position=positions["metrics"])
        )
        texts = self._folder / "completions.jsonl" if writes else None
        self._completions = self._stack.enter_context(CompletionsWriter(texts, position=positions["completions"]))
        for name, short in (("metrics", self._metrics.short), ("completions", self._completions.short)):
            if short:
                self._say(f"{name}.jsonl: the last {short} bytes up to iteration {first} are missing; lines were lost")
        self._trackers = self._stack.enter_context(
            Trackers(
                report.to if writes else (),
                lambda: self._tracked(first),
                say=self._warnings.say,
                show=lambda line: self._run.console.print(line, markup=False, soft_wrap=True),
            )
        )
        return state, first, last

    def _show_rate(self, step: int, iterations: int) -> None:
        """Print the learning rate of a run that is longer than at its checkpoint, and what it was."""
        cfg = self._run.cfg
        if cfg.iterations != iterations:
            schedules = (make_optimizer(c)[1] for c in (changed(cfg, iterations=iterations), cfg))
            was, rate = (float(np.asarray(schedule(step))) for schedule in schedules)
            self._run.console.print(
                f"iterations was {iterations}, is {cfg.iterations}: the learning rate after {step} updates is "
                f"{rate:.3g}, was {was:.3g} (optim.schedule={cfg.optim.schedule})",
                markup=False,
            )

    def _record(self) -> None:
        """Write the config and the facts of this start, now that the run resumes."""
        record_config(self._folder, self._run.cfg.model_dump(mode="json"))
        write_facts(self._folder, self._run.facts())

    def _tracked(self, first: int) -> TrackedRun:
        """Return the run's names for trackers; they stay the same when it resumes."""
        report, folder = self._run.cfg.report, self._folder
        config = self._run.cfg.model_dump(mode="json")
        return TrackedRun(folder, report.project, report.name or folder.absolute().name, run_id(folder), config, first)

    def recording(self, grader: Grading) -> Grading:
        """Wrap a grader to write verdicts to disk before they are used; without checkpoints return it unchanged."""
        if self._cfg.every == 0:
            return grader
        cfg = self._run.cfg
        settings = {"grading": cfg.grading.model_dump(mode="json", exclude={"workers"})}
        settings["answer"] = asdict(cfg.credit.answer)
        settings["local"] = local_digests([r.name for r in cfg.grading.rewards])
        self._verdicts = RecordedGrader(
            grader,
            self._folder / "verdicts",
            setup=setup_of(settings, cfg.grading.plugins),
            failures=self._failures,
            say=self._say,
            part=jax.process_index(),
        )
        return self._verdicts

    def source(self, source: Source) -> Source:
        """Wrap a source to write rollouts to disk before they are used; without checkpoints return it unchanged."""
        if self._cfg.every == 0:
            return source
        if self._rollouts is None:
            self._rollouts = Records(self._folder / "rollouts", failures=self._failures, say=self._say)
        return RecordedSource(source, self._rollouts)

    def begin(self, iteration: int) -> None:
        """Begin an iteration; the verdicts and groups from now on belong to it.

        Raises:
            StorageError: the checkpoint in the background could not be written.
        """
        self._iteration = iteration
        if self._verdicts is not None:
            self._verdicts.begin(iteration)
        with self._failures.handled():
            self._settle(wait=False)

    def write(self, iteration: int, metrics: Metrics, rows: list[CompletionRow]) -> None:
        with self._failures.handled():
            self._metrics.write(iteration, metrics)
            self._completions.write(iteration, rows)
        self._trackers.write(iteration, metrics, rows)

    def write_groups(self, done: Iteration) -> None:
        """Write the iteration's groups where they are due: some for the report, all of them as Parquet."""
        run, report, iteration = self._run, self._run.cfg.report, self._iteration
        writes_groups = report.groups > 0 and iteration % report.groups == 0
        writes_shown = report.completions > 0 and shows_groups(iteration, run.cfg.iterations)
        if not (run.first and (writes_groups or writes_shown)):
            return
        problems = [run.train.by_index[int(number)] for number in done.problems]
        table = group_table(
            iteration,
            done.rollout,
            done.grades,
            done.advantages,
            prompts=[problem.prompt for problem in problems],
            references=[problem.reference for problem in problems],
            texts=run.texts(done.rollout),
        )
        with self._failures.handled():
            if writes_groups:
                write_groups(self._folder, iteration, table)
            if writes_shown:
                write_shown(self._folder, iteration, table, count=report.completions)

    def save(
        self,
        iteration: int,
        state: TrainState,
        data: dict[str, Any],
        history: dict[str, Any],
        last: Evaluation | None,
        metrics: Metrics,
        *,
        now: bool,
    ) -> None:
        """Write a checkpoint if it is due: at intervals, after the last iteration, and at the best evaluation so far.

        ``data`` is the position in the prompts, ``history`` the rewards so far by problem. With ``now`` write the
        checkpoint in any case unless it is there, and wait until it is complete.
        """
        every, score = self._cfg.every, float(metrics.get(self._cfg.best or "", math.nan))
        best = score > self._best  # False for NaN: not evaluated
        due = every > 0 and (best or iteration % every == 0 or iteration == self._run.cfg.iterations)
        if not (now or due):
            return
        with self._failures.handled():
            self._settle()
        with self._failures.handled():
            # The first process wrote the manifest: others may not see it yet, and saving takes all of them.
            if now and from_first(lambda: int(iteration in self._checkpoints.finished())):
                return
            positions = {"metrics": self._metrics.sync(), "completions": self._completions.sync()}
            record = {
                "version": version("oarjax"),
                "config": self._run.cfg.model_dump(mode="json"),
                "commit": commit_of(self._run.source),
                "data": data,
                "history": history,
                "evaluation": plain_evaluation(last),
                "positions": positions,
            }
            self._checkpoints.save(iteration, state, record, score=score if best else None)
            if best:
                self._best = score
            if now:
                self._settle()
        newest = sorted(self._checkpoints.finished())[-self._cfg.keep :]  # the best one may be from long ago
        oldest = min(newest, default=0)
        rollouts = None if self._cfg.rollouts == "all" else self._rollouts
        for records in filter(None, (self._verdicts, rollouts)):
            with self._failures.handled(), storage_errors(self._folder):
                records.prune(oldest)

    def _settle(self, *, wait: bool = True) -> None:
        """Settle the checkpoint that is being written; if it failed, the best is one that was written."""
        try:
            self._checkpoints.settle(wait=wait)
        except StorageError:
            self._best = max(self._checkpoints.scores().values(), default=-math.inf)
            raise

    def _check_base(self, commit: str | None) -> None:
        """Refuse adapters whose base weights have changed since the run began."""
        cfg, current = self._run.cfg, commit_of(self._run.source)
        if cfg.lora.rank and cfg.sft is None and commit != current and None not in (commit, current):
            raise ConfigError(
                f"policy.path: expected {cfg.policy.path} at commit {commit}, on which this run's adapters were "
                f"trained, got {current}; set policy.revision={commit}"
            )

    def _say(self, text: str) -> None:
        self._warnings.say(text, text)


def check_checkpoint(run: Run, folder: Path) -> None:
    """Check that this run can resume from the newest checkpoint in a folder; compiles nothing.

    Raises:
        ConfigError: the checkpoint belongs to another config, model or run, or was renamed; names the differences.
    """
    checkpoints = finished(folder / "checkpoints")
    if not checkpoints:
        return
    for iteration in checkpoints:
        if (problem := misplaced(folder / "checkpoints" / f"{iteration:06d}", saved_id(folder))) is not None:
            raise ConfigError(f"run_dir: {problem}")
    newest = max(checkpoints)
    saved, what = checkpoints[newest]["record"]["config"], f"{folder}, checkpoint {newest:06d}"
    refuse_another_config(saved, run.cfg, what=what, extend=True)  # else the folder's config has been refused
    params = trained_shapes(run.cfg.lora, run.model)
    state = jax.eval_shape(
        lambda p: TrainState(jnp.zeros((), jnp.int32), p, run.optimizer.init(p), jax.random.key(0)), params
    )
    check_arrays(folder / "checkpoints" / f"{newest:06d}", checkpoints[newest]["arrays"], arrays(state))


def restored_state(run: Run, checkpoint: Path) -> TrainState:
    """Read a checkpoint's state into a run's training layout, without resuming the run.

    Args:
        run: with the source, optimizer and adapters of the run that wrote the checkpoint.

    Raises:
        ConfigError: the checkpoint belongs to another model.
    """
    state = run.new_state(run.load(), copy=False)
    with Checkpoints(checkpoint.parent, keep=1) as checkpoints:
        return checkpoints.restore(int(checkpoint.name), like=state)[0]
