"""``oarjax train``: warm start, iterations, evaluation, export, report; with ``--compare`` the controls as well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from oarjax.cli.evaluate import Evaluation, evaluate
from oarjax.cli.results import METHODS, show_results
from oarjax.cli.session import Session, facts, lay_out, open_session
from oarjax.cli.trainer import Trained, train
from oarjax.cli.warm_start import warm_start
from oarjax.config import Config, ConfigError, load_config
from oarjax.host.grade import Grader
from oarjax.host.hf import export
from oarjax.host.progress import banner, flatten
from oarjax.host.report import make_console
from oarjax.steps import make_optimizer, make_steps
from oarjax.types import Params


def run(config: Path, overrides: Sequence[str], *, compare: bool, seeds: str = "") -> None:
    """Train as the config says; with ``compare``, also the controls, from the same start, once per seed."""
    console = make_console()
    cfg = load_config(config, list(overrides))
    if seeds and not compare:
        raise ConfigError("--seeds goes with --compare; for one run set seed=N")
    if compare and cfg.data.eval is None:
        raise ConfigError("data.eval: --compare needs held-out problems")
    if compare:
        _compare(cfg, _seeds(seeds) or [cfg.seed], console)
    else:
        _train_once(cfg, console)


def _seeds(text: str) -> list[int]:
    """``0,1,2`` as numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--seeds: expected different whole numbers such as 0,1,2, got {text!r}")
    return [int(part) for part in parts]


def _train_once(cfg: Config, console: Console) -> None:
    folder = Path(cfg.run_dir).expanduser()
    _refuse_another_run(folder, cfg)
    session = open_session(cfg, console)
    _claim(folder, cfg)
    banner(console, facts(session), cfg.model_dump(mode="json", exclude_defaults=True))
    with session.grader() as grader:
        start, before = _start(session, grader)
        trained = train(session, grader, start, before, folder)
    if cfg.export.folder is not None:
        target = folder / cfg.export.folder
        export(target, session.model, trained.params, source=session.source, dtype=cfg.export.dtype)
        console.print(f"policy  {target}", markup=False)
    show_results(session, folder, [before], {cfg.credit.method: [trained]})


def _compare(cfg: Config, seeds: list[int], console: Console) -> None:
    """Every method from the same warm start, with the same prompts and the same noise, seed by seed."""
    root = Path(cfg.run_dir).expanduser()
    root = root.with_name(f"{root.name}-compare")
    _refuse_another_run(root, cfg)
    methods = list(dict.fromkeys([cfg.credit.method, "uniform", "permuted"]))
    befores: list[Evaluation | None] = []
    runs: dict[str, list[Trained]] = {name: [] for name in methods}
    session: Session | None = None
    for seed in seeds:
        session = open_session(_with(cfg, seed=seed, run_dir=str(root / f"seed{seed}")), console)
        if seed == seeds[0]:
            _claim(root, cfg)
            banner(console, facts(session), cfg.model_dump(mode="json", exclude_defaults=True))
        with session.grader() as grader:
            start, before = _start(session, grader)
            befores.append(before)
            for method in methods:
                console.rule(f"seed {seed}, {METHODS[method]}")
                same = _with(session.cfg, credit=_with(cfg.credit, method=method))
                folder = _claim(session.folder / method, same)
                runs[method].append(train(session.with_config(same), grader, start, before, folder))
    if session is not None:
        show_results(session, root, befores, runs)


def _start(session: Session, grader: Grader) -> tuple[Params, Evaluation | None]:
    """The policy to train from, after the warm start where there is one, and how good it is."""
    cfg = session.cfg
    tx, _ = make_optimizer(cfg)
    layout = lay_out(session, tx)
    params = session.load(layout)
    if cfg.sft is not None:
        warm = session.folder / "start"
        if (warm / "config.json").is_file():
            session.console.print(f"the warm start is read from {warm}", markup=False)
            params = session.load(layout, source=warm)
        else:
            params = warm_start(session, params)
            export(warm, session.model, params, source=session.source)
    if session.held_out is None:
        return params, None
    steps = make_steps(session.policy, tx, layout, cfg, stop_ids=session.stop_ids, pad_id=session.pad_id)
    return params, evaluate(session, steps, grader, params)


def _with(section: Any, **changes: Any) -> Any:
    """A config section with fields changed, validated again."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section)(**(fields | changes))


HARMLESS = ("compilation_cache", "profile", "checkpoint.", "report.", "export.", "grading.workers", "eval.batch")
"""Fields that may differ when a run goes on: they do not change what it learns."""


def _refuse_another_run(folder: Path, cfg: Config) -> None:
    """The same command goes on with its run; any other must not touch one that has got anywhere."""
    known = folder / "config.yaml"
    if not known.exists() or not any(any(folder.glob(part)) for part in ("start", "checkpoints/*", "seed*/start")):
        return
    before, now = flatten(yaml.safe_load(known.read_text())), flatten(cfg.model_dump(mode="json"))
    changed = [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(before | now)
        if before.get(name) != now.get(name) and not name.startswith(HARMLESS)
    ]
    if changed:
        raise ConfigError(
            f"run_dir: {folder} holds a run of another config ({'; '.join(changed)}); "
            "give another run_dir=..., or that config to go on with it"
        )


def _claim(folder: Path, cfg: Config) -> Path:
    """Make the run's folder and write its whole config there."""
    _refuse_another_run(folder, cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"run_dir: cannot write to {folder}: {error}; give another run_dir=...") from error
    return folder
