"""Show the results at the end of a run: the table, the curves and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from oarjax.credit.registry import label
from oarjax.credit.settings import CreditSettings
from oarjax.report.command import curve_of, folders_of, write_facts, write_report
from oarjax.report.curves import curves
from oarjax.report.figures import NOT_DRAWN, can_draw
from oarjax.report.summary import SummaryRow, print_summary, summarise, write_summary
from oarjax.run.memory import memory_facts
from oarjax.run.run import Run
from oarjax.storage.checkpoint import best
from oarjax.training.held_out import Evaluation
from oarjax.training.trainer import Trained


def show_results(
    run: Run, folder: Path, befores: Sequence[Evaluation | None], runs: Mapping[str, Sequence[Trained]]
) -> None:
    """Print the table of held-out accuracy; write summary.json, the curves and report.html."""
    cfg, console = run.cfg, run.console
    rows = _table(befores, runs, cfg.credit, start="SFT policy" if cfg.sft else "start")
    if rows:
        print_summary(console, rows)
        write_summary(folder / "summary.json", rows)
    for trained in chain.from_iterable(runs.values()):
        for name in best_checkpoint(trained.folder, cfg.checkpoint.best).values():
            checkpoint = trained.folder / name
            written = f"oarjax export {str(checkpoint).split(' (')[0]} FOLDER"
            console.print(f"best    {checkpoint}; as a policy: {written}", markup=False, soft_wrap=True)
    if not cfg.report.html:
        return
    shown = next(iter(runs.values()))[0]
    write_facts(folder, run.facts() | memory_facts(shown.folder) | best_checkpoint(shown.folder, cfg.checkpoint.best))
    if can_draw():
        curves({name: curve_of(places) for name, places in folders_of(folder, cfg).items()}, folder)
    else:
        console.print(f"curves  {NOT_DRAWN}", markup=False)
    write_report(folder)
    console.print(f"report  {folder / 'report.html'}", markup=False)


def best_checkpoint(run: Path, metric: str | None) -> dict[str, str]:
    """Return a run's checkpoint with the best evaluation and its score; an empty dict if ``metric`` is None."""
    winner = None if metric is None else best(run / "checkpoints", metric)
    return {} if winner is None else {"best checkpoint": f"checkpoints/{winner[0]:06d} ({metric} {winner[1]:.3f})"}


def _table(
    befores: Sequence[Evaluation | None], runs: Mapping[str, Sequence[Trained]], credit: CreditSettings, *, start: str
) -> list[SummaryRow]:
    known = [b for b in befores if b is not None]
    if not known:
        return []
    baseline = np.stack([b.scores for b in known], axis=1)
    rows = [summarise(start, baseline, mean_length=float(np.mean([b.length for b in known])))]
    for method, trained in runs.items():
        lasts = [t.last for t in trained if t.last is not None]
        rows.append(
            summarise(
                label(method, credit.permuted_of, credit.function),
                np.stack([e.scores for e in lasts], axis=1),
                baseline=baseline,
                mean_length=float(np.mean([e.length for e in lasts])),
                seconds=sum(t.seconds for t in trained),
            )
        )
    return rows
