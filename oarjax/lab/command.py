"""``oarjax credit``: compare methods by the tokens that they credit, their cost, and what decides the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from oarjax.config import BUILTIN_POLICIES, Config, ConfigError, changed, load_config
from oarjax.lab.completions import draw_completions, saved_completions
from oarjax.lab.lab import run_lab
from oarjax.lab.minibatch_gradients import measure_gradients
from oarjax.lab.page import write_lab_page
from oarjax.lab.plot import plot_lab
from oarjax.lab.programs import as_method, make_programs
from oarjax.lab.results import LabResult, lab_json, print_lab, write_lab
from oarjax.lab.saved_rollouts import Format, SavedRollout, read_rollouts
from oarjax.report.files import make_console, visible
from oarjax.training.run import open_run


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
    saved = None if rollouts is None else read_rollouts(rollouts, form)
    console = Console(stderr=True, quiet=True) if as_json else make_console()
    result = measure_credit(cfg, console, saved, gradients=gradients)
    if as_json:
        print(lab_json(result))
    else:
        print_lab(console, result)
        console.print(f"written to {Path(cfg.run_dir).expanduser()}", markup=False)


def measure_credit(
    cfg: Config, console: Console, saved: Sequence[SavedRollout] | None = None, *, gradients: bool = False
) -> LabResult:
    """Run the lab on new completions, or on saved ones, and write its files to the run folder.

    ``gradients``: compare the methods' minibatch gradients too, on rollouts of data.train drawn for it.

    Raises:
        ConfigError: the policy does not exist, or the config extracts no answers to measure by.
    """
    check_policy(cfg)
    check_answers(cfg)
    session = open_run(cfg, console)
    for name, value in session.facts().items():
        console.print(f"{name:<12}{visible(str(value))}", markup=False)
    for name, changes in cfg.lab.methods.items():
        as_method(session, changed(cfg.credit, changes)).check_credit(f"lab.methods.{name}: ")
    params = session.load()
    programs = make_programs(session, params)
    with console.status("completions"):
        drawn = draw_completions(session, programs) if saved is None else saved_completions(session, saved)
    with session.grader() as grader:
        result = run_lab(session, programs, grader, drawn)
        if gradients:
            result = replace(result, gradients=measure_gradients(session, params, grader))
    write_lab(session.folder / "credit.json", result)
    if cfg.report.html:
        plot_lab(session.folder / "credit.png", result)
        write_lab_page(session.folder / "credit.html", result)
    return result


def check_policy(cfg: Config) -> None:
    """Check that a run's export exists, so that a missing one is not taken for a hub name.

    Raises:
        ConfigError: it does not; names the command that creates it.
    """
    path = Path(cfg.policy.path).expanduser()
    if cfg.policy.path in BUILTIN_POLICIES or path.is_dir() or path.name not in ("export", "start"):
        return
    name = path.parent.name
    raise ConfigError(
        f"policy.path: {path} does not exist yet; it is the export of a run, train it first: "
        f"oarjax train configs/{name}.yaml"
    )


def check_answers(cfg: Config) -> None:
    """Check that answers are extracted from the completions, which the lab measures by.

    Raises:
        ConfigError: they are not.
    """
    answer = cfg.credit.answer
    if answer.style == "none":
        raise ConfigError("credit.answer.style: none, and the lab measures by answers; set the style of your answers")
    if answer.source != "own":
        raise ConfigError(f"credit.answer.source: {answer.source}, and the lab reads the completions' own; set own")
