"""Show the results at the end of a run: the table, the curves and the page."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from oarjax.report.command import compare_command, write_facts, write_report
from oarjax.report.curves import curves
from oarjax.report.figures import NOT_DRAWN, can_draw
from oarjax.report.files import read_metrics
from oarjax.report.summary import print_summary, summarise, write_summary
from oarjax.run.memory import memory_facts
from oarjax.run.run import Run
from oarjax.storage.checkpoint import best
from oarjax.training.held_out import Evaluation
from oarjax.training.trainer import Trained


def show_results(run: Run, folder: Path, before: Evaluation | None, trained: Trained) -> None:
    """Print the table of held-out accuracy; write summary.json, the curves and report.html."""
    cfg, console, method = run.cfg, run.console, run.cfg.credit.label
    if before is not None and trained.last is not None:
        rows = [
            summarise("start" if cfg.sft is None else "SFT policy", before.scores, mean_length=before.length),
            summarise(
                method,
                trained.last.scores,
                baseline=before.scores,
                mean_length=trained.last.length,
                seconds=trained.seconds,
            ),
        ]
        print_summary(console, rows)
        write_summary(folder / "summary.json", rows)
    if compare := compare_command(folder, cfg.credit.method, held_out=cfg.data.eval is not None):
        console.print(f"compare with plain GRPO from the same start: {compare}", markup=False, soft_wrap=True)
    facts = best_checkpoint(folder, cfg.checkpoint.best)
    for name in facts.values():
        checkpoint = folder / name
        command = f"oarjax export {quote(str(checkpoint).split(' (')[0])} FOLDER"
        console.print(f"best    {checkpoint}; as a policy: {command}", markup=False, soft_wrap=True)
    if not cfg.report.html:
        return
    write_facts(folder, run.facts() | memory_facts(folder) | facts)
    if can_draw():
        curves({method: read_metrics(folder / "metrics.jsonl")}, folder)
    else:
        console.print(f"curves  {NOT_DRAWN}", markup=False)
    write_report(folder)
    console.print(f"report  {folder / 'report.html'}", markup=False)


def best_checkpoint(run: Path, metric: str | None) -> dict[str, str]:
    """Return a run's checkpoint with the best evaluation and its score; an empty dict if ``metric`` is None."""
    winner = None if metric is None else best(run / "checkpoints", metric)
    return {} if winner is None else {"best checkpoint": f"checkpoints/{winner[0]:06d} ({metric} {winner[1]:.3f})"}
