"""Ask before importing code that a run's files name, unless it is known to be the user's; see docs/trust.md.

A config names Python code: rewards (grading.plugins), a credit method, a probe, a loss. ``oarjax train CONFIG`` runs
it, since the user names the config. Other commands read configs from run folders or kept batches, which somebody else
may have written. They trust a run if ``train`` recorded its id in the user's state folder, and if all code that its
config names is unchanged since.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from oarjax.config.learning import EnvironmentConfig
from oarjax.config.schema import Config
from oarjax.errors import UserError
from oarjax.storage.durable import cannot_read, write_durably
from oarjax.storage.folder import run_id
from oarjax.system.plugins import modules_beside, plugin_file


class UntrustedCode(UserError, RuntimeError):
    """Raised when a file names code that is not known to be the user's; names the code and how to allow it."""


def code_places(cfg: Config) -> list[str]:
    """Return the Python code that a config names, as "field=file.py:name", without importing it."""
    places = [f"grading.plugins={plugin}" for plugin in cfg.grading.plugins]
    environment = cfg.rollout.environment
    python = environment.settings.get("python") if environment and environment.taskset else None
    fields = {
        "credit.function": cfg.credit.function,
        "credit.marks": cfg.credit.marks,
        "credit.probe.function": cfg.credit.probe.function,
        "advantage.function": cfg.advantage.function,
        "loss.function": cfg.loss.function,
        "optim.function": cfg.optim.function,
        "sft.optim.function": cfg.sft and cfg.sft.optim.function,
        "rollout.environment.name": environment_code(environment),
        "rollout.environment.settings.python": python,
    }
    return places + [f"{field}={code}" for field, code in fields.items() if code is not None]


def environment_code(environment: EnvironmentConfig | None) -> str | None:
    """Return the class that rollout.environment names; None without one, and for built-in ones."""
    if environment is None or environment.name.startswith("builtin:"):
        return None
    if environment.taskset is None:
        return environment.name
    return environment.taskset.rpartition("/")[2].partition("@")[0].replace("-", "_")  # its module


def code_digests(places: Sequence[str]) -> dict[str, str]:
    """Return the ``code_digest`` of ``code_places``; nothing is imported.

    Raises:
        StorageError: a file exists but cannot be read.
    """
    return {code: code_digest(code.partition("=")[2]) for code in places}


def code_digest(code: str) -> str:
    """Return the SHA-256 of the code that a place (file.py, module, or either with :name) names, "absent" without any.

    Of a module or file in a package, and of a package, all Python files of the outermost package's folder count. Of a
    file, modules and packages beside it that it imports count too, and what these import there. Nothing is imported.

    Raises:
        StorageError: a file exists but cannot be read.
    """
    plugin = code if code.endswith(".py") or ":" not in code else code.rpartition(":")[0]
    file = plugin_file(plugin)
    if file is None:
        return "absent"
    digest = hashlib.sha256()
    package = file.parent
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    whole = set(package.rglob("*.py")) if (package / "__init__.py").is_file() else set[Path]()
    beside = whole.union(*modules_beside(file).values()) - {file}
    files = sorted(whole) if whole and not plugin.endswith(".py") else [file, *sorted(beside)]
    for path in files:
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise cannot_read(path, error) from error
    return digest.hexdigest()


def state_folder() -> Path:
    """Return the folder that records the user's runs: $XDG_STATE_HOME/oarjax, else ~/.local/state/oarjax."""
    home = os.environ.get("XDG_STATE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.local/state").expanduser()) / "oarjax"


def note_trusted(folder: Path, places: Sequence[str]) -> str | None:
    """Record a run folder and the code at ``places`` as trusted; runs without code need no record.

    Returns the reason if it could not be recorded, else None; a run does not depend on it.
    """
    digests = code_digests(places)
    run = run_id(folder)
    if not digests or run is None:
        return None
    path = state_folder() / "runs" / f"{run}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        notes = {**_noted(run), **digests}
        write_durably(path, json.dumps({"folder": str(folder.absolute()), "code": notes}, indent=1) + "\n")
    except OSError as error:
        return f"{path} cannot be written ({error}): commands that read this run will ask for --trust-code"
    return None


def _noted(run: str) -> dict[str, str]:
    if not re.fullmatch(r"[0-9a-f]{32}", run):  # part of a path that somebody else may have written
        return {}
    try:
        tree = json.loads((state_folder() / "runs" / f"{run}.json").read_text(encoding="utf-8"))
        return {str(code): str(digest) for code, digest in tree["code"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def is_trusted(folder: Path, digests: dict[str, str]) -> bool:
    """Return True if all this code was recorded for the run in ``folder``, with its current content."""
    noted = _noted(run_id(folder) or "")
    return all(digest != "absent" and noted.get(code) == digest for code, digest in digests.items())


def check_trust(places: Sequence[str], folder: Path, *, source: str, trusted: bool) -> None:
    """Check that a config names no code but the user's, or that the user allows it; call before anything is imported.

    Asks the user on a terminal; without a terminal it never waits.

    Args:
        places: the code that the config names, see ``code_places``.
        folder: the run that the config claims to belong to.
        source: the config's file, for the message.
        trusted: True with --trust-code.

    Raises:
        UntrustedCode: the config names other code; lists it.
    """
    digests = code_digests(places)
    if not digests or trusted or is_trusted(folder, digests):
        return
    codes = "; ".join(f"{code} ({digest[:12]})" for code, digest in digests.items())
    codes = codes.encode("unicode_escape").decode()  # it may hold a terminal's control characters
    if sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write(
            f"{source} names Python code that is not known to be yours:\n  {codes}\n"
            "It would run with all your rights. Run it? [y/N] "
        )
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    absent = next((code for code, digest in digests.items() if digest == "absent"), None)
    hint = f"; {absent} is not here: start the command in the folder that training was started in" if absent else ""
    raise UntrustedCode(
        f"{source} names Python code that is not known to be yours: {codes}. It would run with all your rights; read "
        f"it, and pass --trust-code to run it (docs/trust.md){hint}"
    )
