"""``oarjax report``: write report.html from a run's files alone, while the run goes or after it. Imports no jax."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from oarjax.errors import ConfigError
from oarjax.report.files import make_console, read_completions, read_metrics
from oarjax.report.groups import read_shown
from oarjax.report.page import write_page
from oarjax.report.status import find_config, run_status
from oarjax.report.summary import read_summary
from oarjax.storage.durable import DamagedError, cannot_read, storage_errors, write_durably
from oarjax.storage.folder import saved_config

FACTS = "facts.json"
"""Below a run's folder: device, mesh, policy and so on, as its page shows them."""


def run(folder: Path, out: Path | None) -> None:
    """Write the page and print where it is.

    Raises:
        ConfigError: the folder holds no run, or ``out`` can be no file.
        StorageError: a file of the run is damaged, or the page cannot be written.
    """
    find_config(folder, command="report")
    if out is None and not os.access(folder, os.W_OK):
        raise ConfigError(f"report: {folder} cannot be written to; pass --out FILE to write the page elsewhere")
    make_console().print(f"report  {write_report(folder, out)}", markup=False)


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write a run's page from the files that are there; return its path."""
    cfg = saved_config(folder)
    compare = compare_command(folder, cfg.credit.method, held_out=cfg.data.eval is not None)
    summary = read_summary(folder / "summary.json")
    records, completions = read_metrics(folder / "metrics.jsonl"), read_completions(folder / "completions.jsonl")
    groups, facts = read_shown(folder), _facts(folder) | ({"compare with GRPO": compare} if compare else {})
    path = folder / "report.html" if out is None else out
    with storage_errors(path):
        if out is None:
            path.unlink(missing_ok=True)  # it may be somebody else's link
        write_page(
            path,
            title=folder.absolute().name,
            summary=summary,
            method=cfg.credit.label,
            records=records,
            completions=completions,
            groups=groups,
            config=cfg.model_dump(mode="json"),
            facts=facts,
        )
    return path


def compare_command(folder: Path, method: str, *, held_out: bool) -> str | None:
    """Return the command that trains a run's config beside plain GRPO; None for GRPO, or without held-out problems."""
    if method == "uniform" or not held_out:
        return None
    return shlex.join(["oarjax", "study", "study_grpo", f"base={folder / 'config.yaml'}", f"run_dir={folder}-study"])


def write_facts(folder: Path, facts: Mapping[str, object]) -> None:
    """Keep a run's facts for its page."""
    text = {name: str(value) for name, value in facts.items()}
    write_durably(folder / FACTS, json.dumps(text, indent=1) + "\n")


def _facts(folder: Path) -> dict[str, str]:
    """Read the facts, and how far the run is unless it has finished."""
    try:
        facts = dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        facts = {}
    except OSError as error:
        raise cannot_read(folder / FACTS, error) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{folder / FACTS} is not what a run wrote ({error}); remove it") from None
    status = run_status(folder)
    if not (folder / "summary.json").is_file():
        facts["state"] = f"{status.state}, iteration {status.iteration} of {status.iterations}"
    return {str(name): str(value) for name, value in facts.items()}
