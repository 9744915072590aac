"""Log a run to experiment trackers too: TensorBoard, Weights & Biases and trackio behind one interface.

All of them are local by default: W&B writes an offline run below the run's folder unless ``WANDB_MODE`` is set, and
trackio writes its local database unless ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` is set. A tracker never stops
a run: a failing tracker is reported once and then left out. Only the first host should open trackers.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from oarjax.report.files import CompletionRow, Metrics, short, visible
from oarjax.storage.durable import write_durably
from oarjax.system.json import to_plain

PACKAGES = {"tensorboard": ("tensorboardX", "log"), "wandb": ("wandb", "wandb"), "trackio": ("trackio", "trackio")}
"""Name in ``report.to`` -> its package, and the extra that installs it."""

COLUMNS = ("iteration", "prompt", "completion", "reward", "answer", "reference", "verdict", "advantage")
"""First columns of the completions table, followed by one per reward function."""


class Tracker(Protocol):
    """Receives a run's curves and completions."""

    where: str  # shown to the user: where it writes, and how to view it

    def write(self, iteration: int, metrics: Mapping[str, float], rows: Sequence[CompletionRow]) -> None:
        """Record an iteration's finite metrics and some of its completions."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """A run's names for trackers. ``id`` stays the same when the run resumes."""

    folder: Path
    project: str
    name: str
    id: str
    config: dict[str, Any]
    first: int = 0  # the iteration after which it resumes


def run_id(folder: Path) -> str:
    """Return the trackers' id of a run folder, created on the first call and kept in its tracking.json.

    Raises:
        OSError, ValueError: tracking.json cannot be written, or holds no id.
    """
    file = folder / "tracking.json"
    if not file.exists():
        write_durably(file, json.dumps({"id": secrets.token_hex(4)}) + "\n")
    return str(json.loads(file.read_text(encoding="utf-8"))["id"])


class Trackers:
    """Log to several trackers, none of which can stop the run. Use as a context manager.

    Args:
        to: names in ``OPEN``; others are ignored.
        run: creates the run's names; called once if there is a tracker to open.
        say: prints a warning under a key, once per key.
        show: prints where a tracker writes.
    """

    def __init__(
        self,
        to: Sequence[str],
        run: Callable[[], TrackedRun],
        *,
        say: Callable[[str, str], object],
        show: Callable[[str], object],
    ):
        self._say = say
        self._open: dict[str, Tracker] = {}
        names: TrackedRun | None = None
        for name in to:
            if name not in OPEN:
                continue
            with self._failures_of(name):
                names = names or run()
                self._open[name] = OPEN[name](names)
                show(f"{name:<12}{visible(self._open[name].where)}")

    def write(self, iteration: int, metrics: Metrics, rows: Sequence[CompletionRow]) -> None:
        values = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        for name, tracker in list(self._open.items()):
            with self._failures_of(name):
                tracker.write(iteration, values, rows)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        for name, tracker in list(self._open.items()):
            with self._failures_of(name):
                tracker.close()

    @contextlib.contextmanager
    def _failures_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no error of a tracker may stop the run
            self._open.pop(name, None)
            self._say(
                f"tracker {name}",
                f"report.to: {name} failed ({type(error).__name__}: {visible(str(error))}); continuing without it",
            )


# Each tracker -----------------------------------------------------------------------------------------------------


class TensorBoard:
    """Write event files to the folder ``tensorboard``. TensorBoard hides the iterations that a resumed run repeats."""

    def __init__(self, run: TrackedRun):
        from tensorboardX import SummaryWriter

        folder = run.folder / "tensorboard"
        self.where = f"{folder}; view it with: tensorboard --logdir {shlex.quote(str(folder))}"
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.first + 1 if run.first else None)

    def write(self, iteration: int, metrics: Mapping[str, float], rows: Sequence[CompletionRow]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        if rows:
            self._writer.add_text("completions", "\n\n---\n\n".join(map(_as_markdown, rows)), iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Log to a W&B run whose x axis is the iteration, so that a resumed run may repeat iterations."""

    def __init__(self, run: TrackedRun):
        if not os.environ.get("WANDB_MODE"):
            os.environ.pop("WANDB_MODE", None)  # W&B rejects an empty value
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no crash reports over the network
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            dir=str(run.folder),
            config=run.config,
            mode=mode,  # type: ignore[arg-type]
            resume="allow" if mode == "online" else None,  # offline files of one id are joined by wandb sync
            settings=wandb.Settings(console="off", silent=True, login_timeout=30),
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        self.where = f"run {run.id} of project {run.project}, {mode}"
        if mode == "offline":
            self.where += f"; upload it with: wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"

    def write(self, iteration: int, metrics: Mapping[str, float], rows: Sequence[CompletionRow]) -> None:
        record: dict[str, Any] = {"iteration": iteration, **metrics}
        if rows:
            columns, data = completions_table(iteration, rows)
            record["completions"] = self._wandb.Table(columns=columns, data=data)
        self._run.log(record)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Log to a run in trackio's local database (``TRACKIO_DIR``), resumed by its name."""

    def __init__(self, run: TrackedRun):
        import trackio

        self._trackio: Any = trackio
        with _quiet(), _no_hub():
            self._run: Any = trackio.init(
                project=run.project, name=f"{run.name}-{run.id}", config=run.config, resume="allow", embed=False
            )
        self.where = f"run {run.name}-{run.id}; view it with: trackio show --project {shlex.quote(run.project)}"

    def write(self, iteration: int, metrics: Mapping[str, float], rows: Sequence[CompletionRow]) -> None:
        record: dict[str, Any] = dict(metrics)
        if rows:
            columns, data = completions_table(iteration, rows)
            record["completions"] = self._trackio.Table(columns=columns, data=data)
        self._run.log(record, step=iteration)

    def close(self) -> None:
        with _quiet():
            self._trackio.finish()  # leaves nothing to do at exit


OPEN: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


# Their input ------------------------------------------------------------------------------------------------------


def completions_table(iteration: int, rows: Sequence[CompletionRow]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and cells of sampled completions: printable text, None for numbers that are not finite."""
    rewards = sorted({name for row in rows for name in row.rewards})
    cells = [
        [
            iteration,
            visible(row.prompt),
            visible(row.completion),
            to_plain(row.reward),
            _text(row.answer),
            _text(row.reference),
            visible(row.verdict),
            to_plain(row.advantage),
            *(to_plain(row.rewards.get(name)) for name in rewards),
        ]
        for row in rows
    ]
    return [*COLUMNS, *(f"reward/{name}" for name in rewards)], cells


def _as_markdown(row: CompletionRow) -> str:
    """Format a completion as an indented block, in which Markdown ignores markup."""
    head = f"reward {short(row.reward)}, {row.verdict}, answer {row.answer}, expected {row.reference}"
    block = visible("\n\n".join([head, row.prompt, row.completion]))
    return textwrap.indent(block, "    ", lambda line: True)


def _text(value: str | None) -> str | None:
    return None if value is None else visible(value)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Suppress a package's output."""
    return contextlib.redirect_stdout(io.StringIO())


@contextlib.contextmanager
def _no_hub() -> Iterator[None]:
    """Keep trackio off the network, where it looks up the user's name even for a local run."""
    from huggingface_hub import constants

    if os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"):
        yield
        return
    was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
