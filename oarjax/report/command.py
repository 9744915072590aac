"""``oarjax report``: write report.html from a run's files alone, while the run goes or after it. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from oarjax.config import Config, ConfigError, load_config
from oarjax.credit.registry import label
from oarjax.report.curves import Record, average
from oarjax.report.files import make_console, read_completions, read_metrics
from oarjax.report.groups import read_shown
from oarjax.report.page import write_page
from oarjax.report.status import run_status
from oarjax.report.summary import read_summary
from oarjax.storage.durable import DamagedError, cannot_read, storage_errors, write_durably

FACTS = "facts.json"
"""Below a run's folder: device, mesh, policy and so on, as its page shows them."""


def run(folder: Path, out: Path | None) -> None:
    """Write the page and print where it is.

    Raises:
        ConfigError: the folder holds no run, or ``out`` can be no file.
        StorageError: a file of the run is damaged, or the page cannot be written.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"report: {folder} holds no run (no config.yaml); pass the run_dir of oarjax train")
    make_console().print(f"report  {write_report(folder, out)}", markup=False)


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write a run's page, or that of the runs of --compare, from the files that are there; return its path."""
    cfg, out = load_config(folder / "config.yaml"), out or folder / "report.html"
    runs = folders_of(folder, cfg)
    first = next(iter(runs.values()))[0]
    summary = folder / "summary.json"
    with storage_errors(out):
        write_page(
            out,
            title=folder.absolute().name,
            summary=read_summary(summary) if summary.is_file() else [],
            runs={name: curve_of(each) for name, each in runs.items()},
            completions=read_completions(first / "completions.jsonl"),
            groups=read_shown(first),
            config=cfg.model_dump(mode="json"),
            facts=_facts(folder, first),
        )
    return out


def folders_of(folder: Path, cfg: Config) -> dict[str, list[Path]]:
    """List the folders of a run and its controls by the name of their method; of --compare, one for every seed."""
    seeds = sorted(folder.glob("seed*/"))
    found: dict[str, list[Path]] = {} if seeds else {_label(cfg.credit.method, cfg): [folder]}
    methods = [cfg.credit.method, *cfg.report.controls, "uniform", "permuted"] if seeds else cfg.report.controls
    for method in dict.fromkeys(methods):
        places = [place for seed in seeds or [folder] if ((place := seed / method) / "config.yaml").is_file()]
        if places:
            found[_label(method, cfg)] = places
    return found or {_label(cfg.credit.method, cfg): [folder]}


def curve_of(folders: Sequence[Path]) -> list[Record]:
    """Read a method's metrics, averaged over its seeds."""
    records = [read_metrics(folder / "metrics.jsonl") for folder in folders]
    return list(records[0]) if len(records) == 1 else list(average(records))


def write_facts(folder: Path, facts: Mapping[str, object]) -> None:
    """Keep a run's facts for its page."""
    text = {name: str(value) for name, value in facts.items()}
    write_durably(folder / FACTS, json.dumps(text, indent=1) + "\n")


def _facts(folder: Path, first: Path) -> dict[str, str]:
    """Read the facts, and how far the run is unless it has finished."""
    try:
        facts = dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        facts = {}
    except OSError as error:
        raise cannot_read(folder / FACTS, error) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{folder / FACTS} is not what a run wrote ({error}); remove it") from None
    status = run_status(first)
    if not (folder / "summary.json").is_file():
        facts["state"] = f"{status.state}, iteration {status.iteration} of {status.iterations}"
    return {str(name): str(value) for name, value in facts.items()}


def _label(method: str, cfg: Config) -> str:
    return label(method, cfg.credit.permuted_of, cfg.credit.function)
