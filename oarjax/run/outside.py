"""Open what a run's rollouts come from in place of its own sampler: files, or an engine."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from oarjax.config.learning import RECORDED
from oarjax.data.rows import DataError
from oarjax.run.apart import ApartSource
from oarjax.run.run import Run
from oarjax.run.served import Served, served_weights
from oarjax.sources.engine import EngineSource
from oarjax.sources.files import NEEDED, TAUGHT, RecordedRollouts, read_groups, recorded_files
from oarjax.sources.turns import Rules
from oarjax.storage.folder import locked


class Outside(NamedTuple):
    """The replacement of a run's sampler; all None if there is none. ``stack``: what else is open for it."""

    stack: ExitStack
    recorded: RecordedRollouts | None = None
    engine: EngineSource | None = None
    apart: ApartSource | None = None  # its sampler, on devices of its own

    @property
    def drawing(self) -> EngineSource | ApartSource | None:
        """The source that draws while the run learns."""
        return self.engine or self.apart

    def probe(self) -> None:
        """Fail early on an engine that cannot draw."""
        if self.engine is not None:
            with closing(self):
                self.engine.probe()

    def close(self) -> None:
        """Stop waiting for an engine, free the devices that draw, and let go of the folder of an engine's weights."""
        if self.drawing is not None:
            self.drawing.close()
        self.stack.close()


def open_outside(run: Run) -> Outside:
    """Open what ``rollout.from``, ``rollout.engine`` or ``rollout.devices`` names.

    Raises:
        ConfigError: another run gives an engine its weights in the same folder.
        DataError: the files do not hold what the run needs.
    """
    cfg, rollout = run.cfg, run.cfg.rollout
    stack = ExitStack()
    rules = Rules(run.model.vocab_size, run.stop_ids, stops_at_text=bool(rollout.stop))
    if rollout.engine is not None:
        weights, say = None, partial(run.console.print, markup=False)
        if (folder := rollout.engine.weights) is not None:
            if run.first:
                stack.enter_context(locked(Path(folder).expanduser(), option="rollout.engine.weights=..."))
            served = Served(run.model, run.mesh, run.source, run.stop_ids, run.pad_id)
            parts = (rollout.engine, cfg.policy, cfg.lora, served, run.train.prompts)
            weights = served_weights(*parts, place=run.place, fetch=run.fetch)
        return Outside(stack, engine=EngineSource(rollout.engine, rollout, rules, weights=weights, say=say))
    if run.apart is not None:
        return Outside(stack, apart=ApartSource(run.apart, run.steps.rollout_params, run.fetch))
    if not rollout.recorded:
        return Outside(stack)
    files = recorded_files(rollout.recorded, run=run.folder)
    sizes = {"group_size": rollout.group_size, "max_new": rollout.max_new}
    needed = TAUGHT if cfg.loss.teacher == RECORDED else NEEDED
    groups = read_groups(files, run.train, **sizes, rules=rules, needed=needed)
    if len(groups) < cfg.iterations * rollout.prompts:
        raise DataError(
            f"rollout.from: expected iterations x rollout.prompts = {cfg.iterations * rollout.prompts} groups, got "
            f"{len(groups)}; lower iterations, or add files"
        )
    recorded = RecordedRollouts(groups, prompts=rollout.prompts, bucket=run.prompt_step, pad_id=run.pad_id)
    return Outside(stack, recorded)
