"""The table at the end of a run: pass@1 of each policy with an interval over problems, and the change it stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oarjax.report.files import visible

Z95 = 1.959963984540054  # the normal quantile of a two-sided 95% interval

NOTE = (
    "±: half of a 95% interval over problems, seeds averaged; how seeds differ is in the JSON. Change: points, paired "
    "by problem with the first row. Length: mean tokens of a completion."
)


@dataclass(frozen=True)
class SummaryRow:
    """One policy, or one method over several seeds. Shares are 0..1, changes are points (hundredths of pass@1)."""

    name: str
    pass_at_1: float
    low: float
    high: float
    change: float | None  # None for the row that the others are compared with
    change_low: float | None
    change_high: float | None
    by_seed: tuple[float, ...]  # pass@1 of each seed
    problems: int
    ungraded: int  # answers left out because they could not be graded
    mean_length: float | None  # tokens
    seconds: float | None  # of training, all seeds together


def summarise(
    name: str,
    scores: Float[np.ndarray, "problems seeds"],
    *,
    baseline: Float[np.ndarray, "problems seeds"] | None = None,
    mean_length: float | None = None,
    seconds: float | None = None,
) -> SummaryRow:
    """A row of the table from the share of right answers of each problem under each seed.

    Args:
        scores: 0..1; the mean over the samples of a problem. NaN = ungraded, left out and counted.
        baseline: the same problems and seeds before training; None for the baseline's own row.
    """
    low, high = pass_interval(scores)
    change = (None, None, None) if baseline is None else paired_change(scores, baseline)
    return SummaryRow(
        name=name,
        pass_at_1=float(np.nanmean(scores)),
        low=low,
        high=high,
        change=change[0],
        change_low=change[1],
        change_high=change[2],
        by_seed=tuple(float(s) for s in np.nanmean(scores, axis=0)),
        problems=scores.shape[0],
        ungraded=int(np.isnan(scores).sum()),
        mean_length=mean_length,
        seconds=seconds,
    )


def wilson_interval(share: float, count: float | int, *, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share from ``count`` independent trials, both ends within 0..1.

    Unlike share ± z * sqrt(share (1 - share) / count) it has a width where the share is 0 or 1.

    Raises:
        ValueError: count is not positive, or the share not within 0..1.
    """
    if not count > 0 or not 0 <= share <= 1:
        raise ValueError(f"wilson_interval: expected 0 <= share <= 1 and count > 0, got share={share}, count={count}")
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def pass_interval(scores: Float[np.ndarray, "problems seeds"], *, z: float = Z95) -> tuple[float, float]:
    """95% interval of the mean of ``scores`` over problems; the seeds (or samples) of a problem are not independent.

    Wilson's interval with the number of coin tosses whose mean would vary as the problems' means do: with 0/1 scores
    and one seed exactly the number of problems, never more than the number of scores.
    """
    known = ~np.isnan(scores)
    per_problem = np.nanmean(scores[known.any(axis=1)], axis=1)
    share, problems = float(np.nanmean(scores)), len(per_problem)
    spread = float(np.mean((per_problem - per_problem.mean()) ** 2))
    most = float(known.sum())
    if share in (0.0, 1.0):
        return wilson_interval(share, problems, z=z)
    count = most if spread == 0 else min(problems * share * (1 - share) / spread, most)
    return wilson_interval(share, count, z=z)


def paired_change(
    scores: Float[np.ndarray, "problems seeds"],
    baseline: Float[np.ndarray, "problems_before seeds_before"],
    *,
    z: float = Z95,
) -> tuple[float, float, float]:
    """Mean change in points and its 95% interval, from the differences of each problem's own means.

    Raises:
        ValueError: the two have different numbers of problems, or share none that was graded.
    """
    if scores.shape[0] != baseline.shape[0]:
        raise ValueError(f"paired_change: expected the same problems, got {scores.shape[0]} and {baseline.shape[0]}")
    both = ~np.isnan(scores).all(axis=1) & ~np.isnan(baseline).all(axis=1)
    if not both.any():
        raise ValueError("paired_change: no problem was graded in both runs; look at the grader's verdicts")
    differences = 100 * (np.nanmean(scores[both], axis=1) - np.nanmean(baseline[both], axis=1))
    mean = float(differences.mean())
    half = z * float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return mean, mean - half, mean + half


def summary_cells(rows: Sequence[SummaryRow]) -> tuple[list[str], list[list[str]]]:
    """Header and text cells of the table, for the terminal and for the page. ± is half the interval's width."""
    header = ["policy", "pass@1", "change", "seeds", "length", "seconds"]
    ungraded = any(row.ungraded for row in rows)
    cells = [
        [
            row.name,
            f"{100 * row.pass_at_1:.1f}% ±{50 * (row.high - row.low):.1f}",
            _change(row),
            str(len(row.by_seed)),
            "" if row.mean_length is None else f"{row.mean_length:.1f}",
            "" if row.seconds is None else f"{row.seconds:.0f}",
            *([str(row.ungraded)] if ungraded else []),
        ]
        for row in rows
    ]
    return header + (["ungraded"] if ungraded else []), cells


def summary_title(rows: Sequence[SummaryRow]) -> str:
    counts = sorted({row.problems for row in rows})
    return f"pass@1 on {' / '.join(f'{n:,}' for n in counts)} held-out problems"


def _change(row: SummaryRow) -> str:
    if row.change is None or row.change_low is None or row.change_high is None:
        return ""
    return f"{row.change:+.1f} ±{(row.change_high - row.change_low) / 2:.1f}"


def print_summary(console: Console, rows: Sequence[SummaryRow]) -> None:
    header, cells = summary_cells(rows)
    table = Table(
        title=summary_title(rows),
        title_justify="left",
        caption=NOTE,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for line in cells:
        table.add_row(*(Text(visible(cell)) for cell in line))
    console.print(table)


def write_summary(path: Path, rows: Sequence[SummaryRow]) -> None:
    """The table as JSON: {"note": ..., "rows": [the fields of SummaryRow]}; null where a number is not finite."""
    tree = [{k: _plain(v) for k, v in asdict(row).items()} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"note": NOTE, "rows": tree}, indent=2, allow_nan=False) + "\n")


def read_summary(path: Path) -> list[SummaryRow]:
    rows = json.loads(path.read_text())["rows"]
    return [SummaryRow(**(row | {"by_seed": tuple(row["by_seed"])})) for row in rows]


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
