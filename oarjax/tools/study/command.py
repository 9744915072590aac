"""``oarjax study``: train arms and seeds of one run config in worker processes, then write tables and figures.

Workers use the devices; this process touches none.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from oarjax.config.inputs import BUILTIN_POLICIES
from oarjax.config.schema import Config
from oarjax.errors import ConfigError
from oarjax.report.console import resumable
from oarjax.report.figures import NOT_DRAWN, can_draw
from oarjax.report.files import make_console, read_metrics
from oarjax.storage.durable import exists, refuse_special, storage_errors, write_durably
from oarjax.storage.folder import locked, refuse_another_run
from oarjax.storage.stop import Stop
from oarjax.system.json import to_json
from oarjax.tools.study.config import StudyConfig, StudyPlan, load_study
from oarjax.tools.study.figures import draw_curves, draw_frontier
from oarjax.tools.study.jobs import Job, Outcome, StudyError, cores, run_jobs, study_remedy
from oarjax.tools.study.page import around, budget_text, machine, markdown, paste
from oarjax.tools.study.records import add_records, read_records
from oarjax.tools.study.results import collect, finished, plan_so_far, record_of

WORKER = (
    sys.executable,
    "-c",
    "import os; from oarjax.grading.process_tree import end_with; end_with(int(os.environ['OARJAX_STUDY'])); "
    "from oarjax.tools.study.worker import main; main()",
)
"""A worker follows its parent before it imports jax: a killed study leaves no run that writes to its folder."""


def run(
    config: Path, overrides: Sequence[str], *, quick: bool = False, jobs: int | None = None, page: Path | None = None
) -> None:
    """Train the unfinished runs, and write study.json, study.md, curves.png and frontier.png.

    Args:
        jobs: runs at once; None = one per core on a CPU, else 1; 0 = only collect results.
        page: a Markdown page to paste the results into, with the figures beside it.

    Raises:
        ConfigError: the study or one of its runs is invalid.
        PageError: ``page`` has no marks to paste between.
        Stopped: a signal stopped the study; its workers have ended.
        StudyError: runs failed; the results hold the others.
        RecordsError: the study's records cannot be read.
    """
    console = make_console()
    study = load_study(config, list(overrides), quick=quick)
    refuse_special(Path(study.run_dir).expanduser())
    plan = plan_so_far(study)
    for cfg in [*plan.starts.values(), *(planned.config for planned in plan.runs)]:
        _refuse_another_run(cfg)
    if page is not None:
        around(page, plan.root.name)
    workers = _workers(plan, jobs)
    command_line = shlex.join(["oarjax", "study", str(config), *overrides, *(["--quick"] if quick else [])])
    with locked(plan.root, option="run_dir=...") if workers else nullcontext():
        _run(study, plan, workers, command_line, page, console)


def _run(study: StudyConfig, plan: StudyPlan, workers: int, shown: str, page: Path | None, console: Console) -> None:
    """Train what is left and write the results; call with the study's folder locked."""
    todo: list[Job] = []
    failed: list[Outcome] = []
    is_printed = False
    while not failed:
        if study.choose is not None and len(plan.arms) == len(study.arms) and not is_printed:
            console.print(budget_text(collect(plan)["budget"]), markup=False, soft_wrap=True)
            is_printed = True
        todo = tasks(plan) if workers else []
        starts = sum(job.task["kind"] == "start" for job in todo)
        later = f", then {plan.total - len(plan.runs)} that confirm" if plan.total > len(plan.runs) else ""
        console.print(
            f"{plan.total} runs, {len(todo) - starts} to do after {starts} warm start{'s' * (starts != 1)}{later}, "
            f"{workers} at a time, in {plan.root}",
            markup=False,
        )
        report = _reporter(console, plan, len(todo))
        with resumable(console, plan.root), Stop():
            outcomes = run_jobs(todo, WORKER, workers=workers, log=plan.root, report=report)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        record_finished(plan, {outcome.name: outcome.seconds for outcome in outcomes})
        planned, plan = len(plan.runs), plan_so_far(study)
        if len(plan.runs) == planned or not workers:
            break
    write_results(plan, command=shown, failed=[outcome.name for outcome in failed], page=page, console=console)
    if failed:
        raise StudyError(
            f"{len(failed)} of {len(todo)} failed; the same command retries them:\n"
            + "\n".join(f"  {outcome.name}: {_last_line(outcome.error or '')}" for outcome in failed)
        )


def record_finished(plan: StudyPlan, seconds: Mapping[str, float]) -> None:
    """Add the finished runs that are not in the study's records yet.

    Args:
        seconds: that jobs took, by name; of other runs the seconds of their iterations count.
    """
    if plan.study.records is None:
        return
    path = Path(plan.study.records).expanduser()
    records, new_records = read_records(path), []
    values = {
        run.config.run_dir: value
        for name, by_value in plan.trials.items()
        for value, runs in zip(plan.tried[name], by_value)
        for run in runs
    }
    for run in plan.runs:
        if run.digest not in records and finished(run):
            took = seconds.get(f"seed {run.seed}, {run.name}", math.nan)
            new_records.append(record_of(run, values.get(run.config.run_dir), took))
    add_records(path, new_records)


def tasks(plan: StudyPlan) -> list[Job]:
    """List a job for every missing start and every unfinished run that the study asks for now."""
    tried = [run for values in plan.trials.values() for runs in values for run in runs]
    unfinished = [planned for planned in (plan.runs if plan.study.confirm else tried) if not finished(planned)]
    seeds = dict.fromkeys(planned.seed for planned in unfinished)
    started_seeds = [seed for seed in seeds if _started(plan.starts[seed])]
    jobs = [
        Job(
            f"seed {seed}, start",
            {"kind": "start", "folder": plan.starts[seed].run_dir, "config": plan.starts[seed].model_dump(mode="json")},
        )
        for seed in seeds
        if seed not in started_seeds
    ]
    return jobs + [
        Job(
            f"seed {planned.seed}, {planned.name}",
            {
                "kind": "run",
                "folder": planned.config.run_dir,
                "home": str(planned.home),
                "config": planned.config.model_dump(mode="json"),
            },
            needs=f"seed {planned.seed}, start",
            like=planned.name,
        )
        for planned in unfinished
    ]


def _started(cfg: Config) -> bool:
    """Return True if a seed's folder holds all that its runs read: the start's evaluation and a policy made there."""
    home = Path(cfg.run_dir).expanduser()
    policy = "start" if cfg.sft is not None else "policy" if cfg.policy.path in BUILTIN_POLICIES else None
    return exists(home / "before.json") and (policy is None or exists(home / policy / "config.json"))


def _refuse_another_run(cfg: Config) -> None:
    """Refuse a folder that holds another run, with a remedy that a study has.

    Raises:
        ConfigError: lists the fields that differ.
    """
    folder = Path(cfg.run_dir).expanduser()
    try:
        refuse_another_run(folder, cfg)
    except ConfigError as error:
        raise ConfigError(study_remedy(str(error), folder)) from None


def write_results(
    plan: StudyPlan, *, command: str, failed: Sequence[str], page: Path | None, console: Console
) -> dict[str, Any]:
    """Collect the finished runs, write the files, and return the tree of study.json."""
    tree = {"command": command, "machine": machine(), "failed": list(failed)} | collect(plan)
    plan.root.mkdir(parents=True, exist_ok=True)
    with storage_errors(plan.root):
        write_durably(plan.root / "study.json", to_json(tree, indent=1) + "\n")
    figures: dict[str, Path] = {}
    name = plan.root.name.replace("-", "_")
    if not can_draw():
        console.print(f"figures  {NOT_DRAWN}", markup=False)
    if tree["arms"] and can_draw():
        draw_curves(tree, plan.root / "curves.png")
        figures[f"{name}.png"] = plan.root / "curves.png"
    sweep = tree.get("sweep")
    if sweep is not None and sweep["cells"] and len(sweep["fields"]) == 2 and can_draw():
        draw_frontier(sweep, plan.root / "frontier.png")
        figures[f"{name}_frontier.png"] = plan.root / "frontier.png"
    text = markdown(tree, command=command, figures=[path.name for path in figures.values()])
    with storage_errors(plan.root):
        write_durably(plan.root / "study.md", text)
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"results  {plan.root / 'study.json'}", markup=False)
    if page is not None:
        paste(page, plan.root.name, markdown(tree, command=command, figures=list(figures)), figures)
        console.print(f"pasted into  {page}", markup=False)
    return tree


def _workers(plan: StudyPlan, jobs: int | None) -> int:
    if jobs is not None:
        return jobs
    on_cpu = all(cfg.device == "cpu" for cfg in plan.starts.values())
    return len(cores()) if on_cpu else 1


def _reporter(console: Console, plan: StudyPlan, total: int) -> Callable[[Outcome, int], None]:
    """Return a function that prints a line for each job at its end."""
    start = time.monotonic()
    folders = {f"seed {planned.seed}, {planned.name}": planned.config.run_dir for planned in plan.runs}
    until = "left" if plan.total == len(plan.runs) else "left until the values are chosen"

    def report(outcome: Outcome, left: int) -> None:
        count = total - left
        if outcome.error is None:
            record_finished(plan, {outcome.name: outcome.seconds})
        line = f"[{count}/{total}] {outcome.name}: "
        if outcome.error is not None:
            console.print(line + "FAILED", markup=False)
            console.print(outcome.error.rstrip(), markup=False, soft_wrap=True)
            return
        line += f"{outcome.seconds:.0f} s"
        if outcome.name in folders:  # a warm start says nothing of how long runs take
            records = read_metrics(Path(folders[outcome.name]) / "metrics.jsonl")
            shares = [r["pass_at_1"] for r in records if r.get("pass_at_1") is not None]
            line += f", pass@1 {100 * shares[0]:.1f}% -> {100 * shares[-1]:.1f}%" if shares else ""
            line += f"; about {(time.monotonic() - start) / count * left / 60:.0f} min {until}"
        console.print(line, markup=False)

    return report


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if text.startswith("Traceback") and lines else "\n    ".join(lines)
