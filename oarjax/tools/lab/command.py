"""``oarjax credit``: compare methods by the tokens that they credit, their cost, and what decides the answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from oarjax.config.changes import changed
from oarjax.config.inputs import BUILTIN_POLICIES
from oarjax.config.loading import load_config
from oarjax.config.schema import Config
from oarjax.credit.settings import AnswerSettings
from oarjax.errors import ConfigError
from oarjax.report.figures import NOT_DRAWN, can_draw
from oarjax.report.files import make_console, visible
from oarjax.run.run import open_run
from oarjax.system.json import to_json
from oarjax.tools.lab.completions import sample_completions, saved_completions
from oarjax.tools.lab.episodes import measure_episodes, print_episodes, write_episodes
from oarjax.tools.lab.lab import run_lab
from oarjax.tools.lab.minibatch_gradients import measure_gradients
from oarjax.tools.lab.page import write_lab_page
from oarjax.tools.lab.plot import plot_lab
from oarjax.tools.lab.programs import make_programs, with_method
from oarjax.tools.lab.results import LabResult, lab_json, print_lab, write_lab
from oarjax.tools.lab.saved_rollouts import Format, SavedRollout, read_rollouts


def run(
    config: Path,
    overrides: list[str],
    as_json: bool,
    rollouts: Path | None,
    form: Format = "auto",
    *,
    gradients: bool = False,
) -> None:
    cfg = load_config(config, overrides)
    if cfg.rollout.environment is not None and rollouts is None and not gradients:
        console = make_console(sys.stderr if as_json else None)
        check_policy(cfg.policy.path)
        check_answers(cfg.credit.answer)
        with _user_prints(as_json):
            episodes = measure_episodes(open_run(cfg, console))
        folder = Path(cfg.run_dir).expanduser()
        write_episodes(folder, episodes, shown=cfg.lab.shown, html=cfg.report.html)
        if as_json:
            print(to_json(asdict(episodes), indent=1))
        else:
            print_episodes(console, episodes)
            console.print(f"written to {folder}", markup=False)
        return
    saved = None if rollouts is None else read_rollouts(rollouts, form)
    console = make_console(sys.stderr if as_json else None)
    with _user_prints(as_json):
        result = measure_credit(cfg, console, saved, gradients=gradients)
    if as_json:
        print(lab_json(result))
    else:
        print_lab(console, result)
        console.print(f"written to {Path(cfg.run_dir).expanduser()}", markup=False)


def _user_prints(as_json: bool) -> AbstractContextManager[object]:
    """Return a context in which a user's methods and probes may print: on stderr, if stdout is one JSON document."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def measure_credit(
    cfg: Config, console: Console, saved: Sequence[SavedRollout] | None = None, *, gradients: bool = False
) -> LabResult:
    """Run the lab on new completions, or on saved ones, and write its files to the run folder.

    ``gradients``: also compare the methods' minibatch gradients, on new rollouts of data.train.

    Raises:
        ConfigError: the policy does not exist, or the config extracts no answers or plays episodes.
    """
    if cfg.rollout.environment is not None:
        raise ConfigError(
            "rollout.environment: saved rollouts, gradients and credit_lab are of single turns; set null, or run "
            "oarjax credit without options, which shows episodes turn by turn"
        )
    check_policy(cfg.policy.path)
    check_answers(cfg.credit.answer)
    run = open_run(cfg, console)
    for name, value in run.facts().items():
        console.print(f"{name:<12}{visible(str(value))}", markup=False)
    for name, changes in cfg.lab.methods.items():
        with_method(run, changed(cfg.credit, changes)).check_credit(f"lab.methods.{name}: ")
    params = run.load()
    programs = make_programs(run, params)
    with console.status("completions"):
        completions = sample_completions(run, programs) if saved is None else saved_completions(run, saved)
    with run.grader() as grader:
        result = run_lab(run, programs, grader, completions)
        if gradients:
            result = replace(result, gradients=measure_gradients(run, params, grader))
    write_lab(run.folder / "credit.json", result)
    if cfg.report.html:
        if can_draw():
            plot_lab(run.folder / "credit.png", result)
        else:
            console.print(f"credit.png is {NOT_DRAWN}", markup=False)
        write_lab_page(run.folder / "credit.html", result)
    return result


def check_policy(policy: str) -> None:
    """Check that a run's export exists, so that a missing folder is not mistaken for a Hugging Face name.

    Raises:
        ConfigError: it does not exist; the message names the command that creates it.
    """
    path = Path(policy).expanduser()
    if policy in BUILTIN_POLICIES or path.is_dir() or path.name not in ("export", "start"):
        return
    alone = " iterations=0" if path.name == "start" else ""  # the warm start needs no iteration
    raise ConfigError(
        f"policy.path: {path} does not exist yet; a run writes it, so train it first: "
        f"oarjax train configs/{path.parent.name}.yaml{alone}"
    )


def check_answers(answer: AnswerSettings) -> None:
    """Check that answers are extracted from the completions: the lab needs them.

    Raises:
        ConfigError: credit.answer extracts no answers, or not from the completions.
    """
    if answer.style == "none":
        raise ConfigError("credit.answer.style: the lab needs answers, got none; set the style of your answers")
    if answer.source != "own":
        raise ConfigError(
            f"credit.answer.source: the lab reads the answers of the completions, got {answer.source}; set own"
        )
