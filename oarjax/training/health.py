"""Watch a run's numbers: keep batches that are not finite, and stop the run after too many skipped updates."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

import oarjax
from oarjax.errors import UserError
from oarjax.report.console import OnceWarnings
from oarjax.run.run import Run
from oarjax.step.host_callbacks import PhaseRecord
from oarjax.step.metrics import NONFINITE, QUANTITIES
from oarjax.step.minibatches import trim_evidence
from oarjax.storage.bad_batches import FOLDER, Header, write_bad_batch, write_params
from oarjax.types import AnswerSpan, Evidence, Mean, Params, Rollout, TrainBatch, TrainState


class UnhealthyRun(UserError, RuntimeError):
    """Raised after too many skipped updates in a row: says where and why, and the command that replays it."""

    everywhere = True


class Health:
    """Watch iterations: pass it as their ``watch``, and call ``after`` once an iteration's files are written.

    Every host calls it alike; the first one writes.
    """

    def __init__(self, run: Run, folder: Path, warnings: OnceWarnings):
        self._run, self._cfg, self._folder, self._warnings = run, run.cfg.health, folder, warnings
        self.skipped_in_a_row = 0
        self._wrong: dict[str, list[str]] = {}  # in this iteration: phase -> quantities
        self._updates = 0  # in this iteration
        self._settled = 0  # batches kept of which no update was skipped
        self._kept: tuple[str, int, bool] | None = None  # newest tried: kind, number, whether skipped
        self._path: Path | None = None  # of the newest that could be written
        self._step = 0
        self._met: tuple[str, int] | None = None  # kind and step of the newest params
        self._params: str | None = None

    def __call__(self, record: PhaseRecord) -> None:
        """Look for values that are not finite in a phase of a minibatch."""
        self.look("iteration", record)

    def look(self, kind: str, record: PhaseRecord) -> None:
        """Look as ``__call__`` does, for a ``kind`` of training: iteration or sft."""
        faults = {name: mean.total for name, mean in record.metrics.items() if name.startswith(NONFINITE)}
        totals = self._run.fetch(faults)
        names = [name for name in QUANTITIES if totals.get(f"{NONFINITE}{name}", 0) > 0]
        skipped = record.phase == "update" and bool(names)
        if record.phase == "update":
            self._updates += 1
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not names:
            return
        quantities = self._wrong.setdefault(record.phase, [])
        quantities += [name for name in names if name not in quantities]
        self._step = int(self._run.fetch(record.state.step))
        if not self._wanted(kind, record.iteration, skipped):
            return
        self._kept = (kind, record.iteration, skipped)
        self._settled += not skipped
        try:
            self._path = self._keep(kind, record)
        except OSError as error:
            self._warnings.say(
                "batch not kept",
                f"{kind} {record.iteration}: {_listed(self._wrong)} not finite, and the batch could not be kept "
                f"({error}); free some space, or set health.bad_batches=0",
            )
        else:
            self._warnings.say(
                "batch kept",
                f"{kind} {record.iteration}: {_listed(self._wrong)} not finite; see where it begins with: "
                f"oarjax replay {shlex.quote(str(self._path))}",
            )

    def imitated(
        self, number: int, batch: TrainBatch, used: Int[np.ndarray, ""], metrics: dict[str, Mean], state: TrainState
    ) -> UnhealthyRun | None:
        """Look at a step of the warm start, keep its batch if it was skipped, and count; see ``after``."""
        mask = np.asarray(batch.completion)
        values, none = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, bool)
        numbers = np.arange(mask[..., 0].size, dtype=np.int32).reshape(mask.shape[:2])
        rows: dict[str, Any] = {"tokens": batch.tokens, "valid": batch.valid, "completion": mask, "ended": mask.any(-1)}
        rows |= {"behaviour_logps": values, "filtered_logps": values}
        rollout = Rollout(**rows)
        evidence = Evidence(rollout, AnswerSpan(none, none, none.any(-1)), numbers, used)  # type: ignore[arg-type]
        self.look("sft", PhaseRecord("update", number, 0, metrics, state, "last", evidence))
        return self.after(number, "sft")

    def remember(self, records: Iterable[Mapping[str, Any]], *, until: int) -> None:
        """Resume the count from what the run logged up to an iteration."""
        earlier = [record for record in records if record["iteration"] <= until]
        self._warnings.remember(earlier)
        if earlier:
            self.skipped_in_a_row = int(earlier[-1].get("skipped_in_a_row") or 0)

    def after(self, number: int, kind: str = "iteration") -> UnhealthyRun | None:
        """End an iteration; return the error to stop the run with once its files are written, or None.

        The run stops after ``health.stop_after`` skipped updates in a row. An iteration without an update counts as one
        where the sampler's log-probs are not finite: broken params give equal completions, whose groups of equal
        rewards are left out.
        """
        faults, updates, self._wrong, self._updates = self._wrong, self._updates, {}, 0
        if updates == 0 and "sample" in faults:
            self.skipped_in_a_row += 1
        if not faults or not 0 < self._cfg.stop_after <= self.skipped_in_a_row:
            return None
        see = f"set health.bad_batches to keep such batches for oarjax replay, and lower {_rate(kind)}"
        if self._path is not None:
            see = f"see where it begins with: oarjax replay {shlex.quote(str(self._path))}"
        return UnhealthyRun(
            f"{kind} {number}, optimizer step {self._step}, {_listed(faults)} not finite: nothing could be learned in "
            f"{self.skipped_in_a_row} updates in a row (health.stop_after={self._cfg.stop_after}), so the run stops, "
            f"with the parameters of step {self._step}; {see}"
        )

    def _wanted(self, kind: str, number: int, skipped: bool) -> bool:
        """Keep one batch per iteration, that of its first skipped update if there is one; of the others only a few."""
        keep = self._cfg.bad_batches
        if keep == 0 or self._kept == (kind, number, True):
            return False
        return skipped or (self._settled < keep and self._kept != (kind, number, False))

    def _keep(self, kind: str, record: PhaseRecord) -> Path:
        run, folder, key = self._run, self._folder / FOLDER, record.state.key
        step_key = (kind, self._step)
        fits = _megabytes(record.state.params) <= self._cfg.params_mb
        params = run.fetch(record.state.params) if fits and step_key != self._met else None
        self._met = step_key  # on every host, so that all fetch alike
        evidence, numbers = run.fetch((record.evidence, jax.random.key_data(key)))
        if not run.first:
            return folder
        if params is not None:
            self._params = None  # until it is written
            self._params = write_params(folder, params, kind=kind, step=self._step)
        header = Header(
            kind=kind,
            number=record.iteration,
            minibatch=record.minibatch,
            step=self._step,
            wrong=dict(self._wrong),
            probe=record.probe,
            key=numbers.tolist(),
            key_impl=str(jax.random.key_impl(key)),
            config=run.cfg.model_dump(mode="json"),
            config_file=str(self._folder / "config.yaml"),
            policy=str(run.source.absolute()),
            compute_dtype=str(run.compute_dtype),
            platform=jax.default_backend(),
            versions={"oarjax": oarjax.__version__, "jax": jax.__version__},
            params=self._params if fits else None,
        )
        return write_bad_batch(folder, header, trim_evidence(evidence), keep=self._cfg.bad_batches)


def _listed(wrong: dict[str, list[str]]) -> str:
    return "; ".join(f"phase {phase}: {', '.join(names)}" for phase, names in wrong.items()) or "phase update: loss"


def _rate(kind: str) -> str:
    return "sft.optim.lr" if kind == "sft" else "optim.lr"


def _megabytes(params: Params) -> float:
    return sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20
