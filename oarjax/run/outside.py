"""Open what a run's rollouts come from in place of its own sampler: files, or an engine."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from oarjax.config.learning import RECORDED
from oarjax.data.rows import DataError
from oarjax.run.run import Run
from oarjax.run.served import Served, served_weights
from oarjax.sources.engine import EngineSource
from oarjax.sources.files import NEEDED, TAUGHT, RecordedRollouts, read_groups, recorded_files
from oarjax.sources.turns import Rules
from oarjax.system.processes import only_first


class Outside(NamedTuple):
    """The replacement of a run's sampler; both None if there is none."""

    recorded: RecordedRollouts | None
    engine: EngineSource | None

    def probe(self) -> None:
        """Fail early on an engine that cannot draw; the first process asks."""
        if self.engine is not None:
            only_first(self.engine.probe)
            self.engine.close()

    def close(self) -> None:
        """Stop waiting for an engine."""
        if self.engine is not None:
            self.engine.close()


def open_outside(run: Run) -> Outside:
    """Open what ``rollout.from`` or ``rollout.engine`` names.

    Raises:
        DataError: the files do not hold what the run needs.
    """
    cfg, rollout = run.cfg, run.cfg.rollout
    rules = Rules(run.model.vocab_size, run.stop_ids, stops_at_text=bool(rollout.stop))
    if rollout.engine is not None:
        weights, say = None, partial(run.console.print, markup=False)
        if rollout.engine.weights is not None:
            served = Served(run.model, run.mesh, run.source, run.stop_ids, run.pad_id)
            parts = (rollout.engine, cfg.policy, cfg.lora, served, run.train.prompts)
            weights = served_weights(*parts, place=run.place, fetch=run.fetch)
        return Outside(None, EngineSource(rollout.engine, rollout, rules, weights=weights, say=say))
    if not rollout.recorded:
        return Outside(None, None)
    files, sizes = recorded_files(rollout.recorded), {"group_size": rollout.group_size, "max_new": rollout.max_new}
    needed = TAUGHT if cfg.loss.teacher == RECORDED else NEEDED
    groups = read_groups(files, run.train, **sizes, rules=rules, needed=needed)
    if len(groups) < cfg.iterations * rollout.prompts:
        raise DataError(
            f"rollout.from: expected iterations x rollout.prompts = {cfg.iterations * rollout.prompts} groups, got "
            f"{len(groups)}; lower iterations, or add files"
        )
    recorded = RecordedRollouts(groups, prompts=rollout.prompts, bucket=run.prompt_step, pad_id=run.pad_id)
    return Outside(recorded, None)
