"""Train a run: iterate, write its files, show progress and evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from oarjax.config.inputs import DifficultyConfig
from oarjax.config.learning import AdvantageConfig
from oarjax.data.mixture import draw_share
from oarjax.data.problems import Problem
from oarjax.data.streams import Encoded
from oarjax.grading.grader import reads_answers
from oarjax.grading.pool import GraderError
from oarjax.grading.recorded import Grading
from oarjax.models.lora import all_params, without_adapters
from oarjax.report.console import OnceWarnings, PhaseTimer, Progress
from oarjax.report.files import CompletionRow, ShownTurn, read_metrics, show_completions, token_texts
from oarjax.rollout.source import Batch, Source
from oarjax.run.grades import written_turns
from oarjax.run.hints import played_turns
from oarjax.run.run import Run
from oarjax.sources.lagged import LaggedSource, PromptsAhead, why_in_turn
from oarjax.step.history import RewardHistory
from oarjax.step.host_callbacks import HostCallbacks
from oarjax.step.iteration import DrawnGroups, Iteration, iterate
from oarjax.step.minibatches import widest_prompt
from oarjax.step.sampling import batch_of_iteration
from oarjax.step.state import moving_reference
from oarjax.storage.stop import Stop
from oarjax.system.background import Background
from oarjax.system.devices import to_device_memory
from oarjax.training.health import Health
from oarjax.training.held_out import Evaluation, evaluate, measure_drift
from oarjax.training.run_files import RunFiles
from oarjax.training.start import Start
from oarjax.types import Grades, Params, PromptBatch


@dataclass(frozen=True)
class Trained:
    """The result of training a run."""

    folder: Path
    params: Params  # all that the policy reads, including adapters
    last: Evaluation | None
    seconds: float


def train(
    run: Run,
    grader: Grading,
    start: Start,
    folder: Path,
    stop: Stop | None = None,
    on_lines: Callable[[], object] | None = None,
) -> Trained:
    """Iterate from ``start``; metrics, completions and checkpoints go to ``folder``.

    A run with a checkpoint resumes, and ends as if it had never stopped. ``on_lines`` is called whenever its files have
    new lines.

    Raises:
        Stopped: ``stop`` was signalled; all finished iterations are saved.
        StorageError: a file cannot be written, and checkpoint.on_failure is stop.
    """
    cfg, console = run.cfg, run.console
    outside, history, difficulty = start.outside, history_of(cfg.advantage), cfg.data.difficulty
    compares, moves = cfg.advantage.method == "problem", cfg.loss.reference_every
    remembers = compares or difficulty is not None
    share = None if difficulty is None else drawn_shares(history, difficulty)
    stream, lagged = outside.recorded or run.prompts(share), None
    stream = PromptsAhead(stream) if cfg.update.lag else stream
    answers = cfg.credit.method != "uniform" or reads_answers([reward.name for reward in cfg.grading.rewards])
    timer, warnings, stop = PhaseTimer(), OnceWarnings(console, answers=answers), stop or Stop()
    if cfg.loss.off_policy.support == "whole":
        roll = cfg.rollout
        warnings.check_sampling(
            top_k=roll.top_k, top_p=roll.top_p, min_p=roll.min_p, repetition_penalty=roll.repetition_penalty
        )
    drifts = cfg.eval.kl != "off" and not cfg.rollout.recorded and (start.first is not None or cfg.lora.rank > 0)
    start_time = time.perf_counter()
    with stop.held(), ExitStack() as stack:
        stack.callback(outside.close)
        files = stack.enter_context(RunFiles(run, folder, warnings))
        state, first, last = files.resume(start.state, stream, history)
        grader = files.recording(grader)

        def batch_of(number: int, prompts: PromptBatch) -> Batch:
            return batch_of_iteration(state.key, number, prompts, rollout=cfg.rollout)

        if isinstance(stream, PromptsAhead):
            sizes, say = (cfg.update.lag, cfg.iterations), partial(console.print, markup=False)
            if (why := why_in_turn(outside.drawing, jax.process_count())) is not None:
                say(f"update.lag: {why}: rollouts are older, and nothing is faster; set 0, or see docs/rollouts.md")
            lagged = LaggedSource(*sizes, stream, batch_of, background=outside.drawing, say=say)
            stack.callback(lagged.close)

        def source(sampler: Source) -> Source:
            if outside.recorded is not None:
                return outside.recorded
            recorded = files.source(outside.drawing or sampler)
            return run.episodes(recorded, run.train) if lagged is None else lagged.bind(recorded)

        host = HostCallbacks(
            next_prompts=lambda: next(stream)[0],
            submit=partial(run.grading, grader, run.train.by_index, group=cfg.rollout.group_size),
            find_answers=run.find_answers,
            fetch=run.fetch,
            place=run.place,
            phase=_Phases(timer, stop, start.background, start.report_memory),
            probed=run.probed if cfg.credit.answer.source == "reference" else None,
            hints=run.hints,
            load_reference=to_device_memory,
            past=history.of if compares else None,
            source=source,
            prompt_step=run.prompt_step,
        )
        baseline, latest = (None if e is None else e.metrics["pass_at_1"] for e in (start.before, last))
        progress = stack.enter_context(
            Progress(
                cfg.iterations,
                label=cfg.credit.label,
                console=console,
                compiles=first < cfg.iterations,
                baseline=baseline,
                latest=None if latest == baseline else latest,  # of a run that resumes
                stop=stop,
            )
        )
        health = Health(run, folder, warnings)
        health.remember(read_metrics(folder / "metrics.jsonl"), until=first)
        host = host._replace(watch=health)
        if start.before is not None and first == 0:
            last = start.before
            files.write(0, last.metrics, [])
            if on_lines is not None:
                on_lines()
        timer.lap()
        rows: list[CompletionRow] = []
        tracing: _Trace | None = None
        for iteration in range(first + 1, cfg.iterations + 1):
            files.begin(iteration)
            if cfg.profile is not None and not tracing and cfg.profile[0] <= iteration <= cfg.profile[1]:
                tracing = stack.enter_context(closing(_Trace(folder / "profile")))
            position = stream.state()
            try:
                reference = moving_reference(state) if moves else start.reference
                state, done = iterate(state, reference, iteration, steps=run.steps, host=host, cfg=cfg)
            except _StoppedWithin:  # the state is still that after the iteration before
                if iteration > 1:
                    files.save(iteration - 1, state, position, history.state(), last, {}, now=True)
                stop.obey()
            if remembers:
                history.add(done.drawn.problems, done.drawn.grades.rewards)
            if moves and iteration % moves == 0:
                state = start.move(state)
            failure, drifted = health.after(iteration), dict[str, float]()
            if cfg.profile is not None and tracing and iteration >= cfg.profile[1]:
                tracing.close()
            if cfg.data.eval is not None and _due(iteration, cfg.iterations, every=cfg.eval.every):
                with timer.phase("evaluate"):
                    last = evaluate(run, grader, all_params(state))
                    if drifts:
                        first = start.first
                        first = without_adapters(all_params(state)) if first is None else host.load_reference(first)
                        size = {"width": widest_prompt(cfg.data, cfg.rollout), "microbatch": cfg.update.microbatch}
                        drifted = measure_drift(done.rollout, first, run.steps.drift, host, **size)
            phases = timer.lap()
            metrics = done.metrics | mixture_metrics(done.drawn, run.train) | start.meter.measure(done.metrics, phases)
            metrics["skipped_in_a_row"] = float(health.skipped_in_a_row)
            metrics["lr"] = float(np.asarray(run.schedule(max(int(state.step) - 1, 0))))
            if last is not None and "evaluate" in phases:
                metrics |= last.metrics | drifted
            rows = completion_rows(done, run.train.by_index, run.texts(done.rollout), run.table, cfg.report.completions)
            files.write(iteration, metrics, rows)
            files.write_groups(done)
            if on_lines is not None:
                on_lines()
            progress.update(iteration, metrics, phases)
            if iteration < cfg.iterations and (iteration == 1 or iteration % max(10, cfg.iterations // 10) == 0):
                show_completions(console, iteration, rows[:1])
            warnings.check(iteration, metrics)
            explain_grades(done.grades, warnings)
            if lagged is not None:
                lagged.settle()  # a checkpoint needs what is drawn ahead on the disk
            stopping = stop.asked()
            files.save(iteration, state, stream.state(), history.state(), last, metrics, now=stopping)
            if stopping:
                stop.obey()
            if failure:
                raise failure
        if last is None and run.held_out is not None:  # the run was already finished
            last = evaluate(run, grader, all_params(state))
    show_completions(console, cfg.iterations, rows)
    spent = sum(record.get("seconds/total", 0.0) for record in read_metrics(folder / "metrics.jsonl"))
    return Trained(folder, all_params(state), last, spent or time.perf_counter() - start_time)


def history_of(advantage: AdvantageConfig) -> RewardHistory:
    """Return an empty history of rewards by problem."""
    return RewardHistory(discount=advantage.discount, ddof=advantage.ddof)


def mixture_metrics(drawn: DrawnGroups, data: Encoded) -> dict[str, float]:
    """Return share and mean reward of each data set of a mixture; nothing where there is one."""
    if len(data.parts) < 2:
        return {}
    parts = np.array([data.part_of[int(problem)] for problem in drawn.problems])
    rewards = drawn.grades.rewards.reshape(len(parts), -1)
    metrics = {}
    for part in range(len(data.parts)):
        graded = rewards[parts == part]
        graded = graded[np.isfinite(graded)]
        metrics[f"mixture/{part}/share"] = float(np.mean(parts == part))
        metrics[f"mixture/{part}/reward"] = float(graded.mean()) if graded.size else float("nan")
    return metrics


def drawn_shares(history: RewardHistory, pools: DifficultyConfig) -> Callable[[int], float]:
    """Return the function that says in which share of its turns a problem is drawn, by its rewards so far."""
    return lambda problem: draw_share(history.mean(problem), **pools.model_dump())


def completion_rows(
    done: Iteration, problems: Mapping[int, Problem], texts: Sequence[str], table: Sequence[bytes], count: int
) -> list[CompletionRow]:
    """Collect the first completion of each of the first ``count`` groups, with its grades, advantage and weights."""
    rollout, group = done.rollout, len(texts) // len(done.problems)
    first = slice(0, count * group, group)
    plays = rollout.origin is not None and rollout.origin.rewards is not None
    turn_tokens, played = written_turns(rollout), played_turns(rollout, table) if plays else [[]] * len(texts)
    rows = []
    for b in range(len(texts))[first]:
        problem = problems[int(done.problems[b // group])]
        positions = np.flatnonzero(rollout.completion[b])
        ids = rollout.tokens[b, -rollout.completion.shape[1] :]
        rows.append(
            CompletionRow(
                prompt=problem.prompt,
                completion=texts[b],
                reward=float(done.grades.rewards[b]),
                answer=done.grades.answers[b],
                verdict=done.grades.verdicts[b],
                note=done.grades.notes[b],
                rewards={name: float(values[b]) for name, values in done.grades.per_reward.items()},
                advantage=float(done.advantages[b]),
                reference=problem.reference,
                tokens=token_texts([table[int(ids[t])] for t in positions]),
                weights=[float(w) for w in done.weights[b, positions]],
                is_reasoning=[bool(x) for x in done.span.reasoning[b, positions]],
                is_answer=[bool(x) for x in done.span.answer[b, positions]],
                turns=[
                    ShownTurn(len(tokens), turn.observed, turn.reward)
                    for tokens, turn in zip(turn_tokens[b], played[b])
                ],
            )
        )
    return rows


def _due(iteration: int, last: int, *, every: int) -> bool:
    """Return True if an evaluation follows this iteration: at intervals, and always after the last."""
    return iteration == last or (every > 0 and iteration % every == 0)


def explain_grades(grades: Grades, warnings: OnceWarnings) -> None:
    """Warn once a run of what crashed, what took too long, and of rewards that return no number.

    Raises:
        GraderError: every completion crashed, so that nothing can be learned; quotes the first exception.
    """
    for verdict, what in (
        ("crash", "grading crashed on"),
        ("timeout", "no verdict came in time for"),
        ("ungraded", "rewards gave no number for"),
    ):
        notes = [note for outcome, note in zip(grades.verdicts, grades.notes) if outcome == verdict]
        if notes and verdict == "crash" and len(notes) == len(grades.verdicts):
            raise GraderError(f"grading crashed on every completion, first with: {notes[0]}; mend it and run it again")
        if notes:
            message = f"{what} {len(notes)} of {len(grades.verdicts)} completions, first with: {notes[0]}"
            warnings.say(f"grades/{verdict}", message)


class _StoppedWithin(Exception):
    """Raised between the phases of an iteration that is to stop before it has changed the state."""


UNTIL_UPDATE = ("sample", "spans", "score", "credit", "update")
"""Phases before which an iteration may be given up: nothing of the state has changed yet."""


@dataclass
class _Phases:
    """Time the phases of iterations; between them, hear of a stop and of programs compiled in the background."""

    timer: PhaseTimer
    stop: Stop
    background: Background | None
    report: Callable[[], object] | None  # of memory; None once it has been called

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time a phase, unless the run is to stop: a notice may leave less time than an iteration takes.

        Raises:
            _StoppedWithin: it is.
            DeviceError: a program does not fit.
        """
        if name in UNTIL_UPDATE and self.stop.asked():
            raise _StoppedWithin
        if self.background is not None:
            self.background.check()
        if self.report is not None and name in ("score", "update"):  # rollouts need not wait for the update's programs
            self.report()
            self.report = None
        return self.timer.phase(name)


class _Trace:
    """Record a profiler trace for TensorBoard, XProf or Perfetto until ``close`` or the end of the run."""

    def __init__(self, folder: Path):
        jax.profiler.start_trace(str(folder))
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            jax.profiler.stop_trace()
