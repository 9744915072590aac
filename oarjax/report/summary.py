"""Summarise a run in a table: pass@1 of each policy with an interval over problems, and its paired change."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oarjax.report.files import visible
from oarjax.stats import clustered_share_interval, mean_interval, paired_difference
from oarjax.storage.durable import DamagedError, cannot_read, storage_errors, write_durably
from oarjax.system.json import number, to_json

NOTE = (
    "±: half of a 95% interval over problems. Change: points, paired by problem with the first row. Length: mean "
    "tokens of a completion. Seconds: of all iterations, compiling and evaluations included, the warm start not."
)


@dataclass(frozen=True)
class SummaryRow:
    """One policy. Shares are 0..1, changes are points (hundredths of pass@1)."""

    name: str
    pass_at_1: float
    low: float
    high: float
    change: float | None  # None for the baseline's row, or if no problem was graded in both
    change_low: float | None
    change_high: float | None
    problems: int
    ungraded: int  # answers left out because they could not be graded
    mean_length: float | None  # tokens
    seconds: float | None  # of training


def summarise(
    name: str,
    scores: Float[np.ndarray, "problems"],
    *,
    baseline: Float[np.ndarray, "problems"] | None = None,
    mean_length: float | None = None,
    seconds: float | None = None,
) -> SummaryRow:
    """Summarise the share of right answers of each problem as a row of the table.

    Args:
        scores: the mean over a problem's samples; NaN = ungraded, left out and counted. Of rewards outside 0..1 the
            mean has Student's interval over problems.
        baseline: the same problems before training; None for the baseline's row.
    """
    shares = not (np.nanmin(scores, initial=0) < 0 or np.nanmax(scores, initial=1) > 1)
    accuracy = clustered_share_interval(scores[:, None]) if shares else mean_interval(scores)
    change = None if baseline is None else paired_difference(100 * scores, 100 * baseline, quantile="normal")
    change = change if change and change.count else None  # no problem was graded in both
    return SummaryRow(
        name=name,
        pass_at_1=accuracy.mean,
        low=accuracy.low,
        high=accuracy.high,
        change=change.mean if change else None,
        change_low=change.low if change else None,
        change_high=change.high if change else None,
        problems=scores.shape[0],
        ungraded=int(np.isnan(scores).sum()),
        mean_length=mean_length,
        seconds=seconds,
    )


def summary_cells(rows: Sequence[SummaryRow]) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and cells, for the terminal and the page. ± is half the interval's width."""
    header = ["policy", "pass@1", "change", "length", "seconds"]
    ungraded = any(row.ungraded for row in rows)
    cells = [
        [
            row.name,
            f"{100 * row.pass_at_1:.1f}% ±{50 * (row.high - row.low):.1f}" if math.isfinite(row.pass_at_1) else "n/a",
            _change(row),
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
    if row.change is None:
        return ""
    half = (number(row.change_high) - number(row.change_low)) / 2
    return f"{row.change:+.1f}" + (f" ±{half:.1f}" if math.isfinite(half) and half else "")


def may_be_chance(row: SummaryRow) -> bool:
    """Return whether the interval of a row's change holds 0 and has a width."""
    low, high = number(row.change_low), number(row.change_high)
    return low <= 0 <= high and low < high


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
    for row in rows:
        if may_be_chance(row):
            text = (
                f"{row.name}: the change may be chance, its interval holds 0; more problems or eval.samples narrow it"
            )
            console.print(Text(visible(text)))


def write_summary(path: Path, rows: Sequence[SummaryRow]) -> None:
    """Write the table as JSON: {"note": ..., "rows": [fields of SummaryRow]}; null for a number that is not finite.

    Raises:
        StorageError: the file cannot be written.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, to_json({"note": NOTE, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def read_summary(path: Path) -> list[SummaryRow]:
    """Read the table back; no rows without a file.

    Raises:
        DamagedError: the file is not what a run wrote.
        StorageError: it cannot be read.
    """
    try:
        return [_row(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is not what a run wrote ({error}); put a good copy there, or remove it") from None


def _row(saved: Mapping[str, Any]) -> SummaryRow:
    values = {field.name: saved[field.name] for field in fields(SummaryRow)}
    for name in ("pass_at_1", "low", "high"):  # null where no answer was graded
        values[name] = number(values[name])
    return TypeAdapter(SummaryRow).validate_python(values)
