"""Open what a run's rollouts come from in place of its own sampler."""

from __future__ import annotations

from oarjax.data.rows import DataError
from oarjax.run.run import Run
from oarjax.sources.files import RecordedRollouts, read_groups, recorded_files
from oarjax.sources.turns import Rules


def open_recorded(run: Run) -> RecordedRollouts | None:
    """Read the rollouts that ``rollout.from`` names; None without it.

    Raises:
        DataError: the files do not hold what the run needs.
    """
    cfg, rollout = run.cfg, run.cfg.rollout
    if not rollout.recorded:
        return None
    rules = Rules(run.model.vocab_size, run.stop_ids, stops_at_text=bool(rollout.stop))
    files, sizes = recorded_files(rollout.recorded), {"group_size": rollout.group_size, "max_new": rollout.max_new}
    groups = read_groups(files, run.train, **sizes, rules=rules)
    if len(groups) < cfg.iterations * rollout.prompts:
        raise DataError(
            f"rollout.from: expected iterations x rollout.prompts = {cfg.iterations * rollout.prompts} groups, got "
            f"{len(groups)}; lower iterations, or add files"
        )
    return RecordedRollouts(groups, prompts=rollout.prompts, bucket=run.prompt_step, pad_id=run.pad_id)
