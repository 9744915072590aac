"""credit.html: every method's weights on the same completions, on one self-contained page without scripts.

Radio buttons and style rules alone switch the method, and a second one beside it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from oarjax.report.files import short
from oarjax.report.html import write_html
from oarjax.tools.lab.results import (
    BEST,
    LabCompletion,
    LabResult,
    legend,
    notes_of,
    shown_columns,
    table_cells,
    tables,
)

LEVELS = 8
"""Shades of each of the two colours."""


def write_lab_page(path: Path, result: LabResult) -> None:
    """Write credit.html, which opens on the first method."""
    names = [m.name for m in result.methods]
    write_html(
        path,
        "tools/lab/page.html",
        title=f"{result.title}: token credit",
        facts=result.facts,
        tables=[_table(part, title, columns) for title, columns, part in tables(result)],
        oracles={k: f"{100 * v.mean:.1f}%" for k, v in result.oracles.items() if math.isfinite(v.mean)},
        interval=result.interval,
        notes=notes_of(result),
        methods=names,
        levels=[(level, f"{0.62 * level / LEVELS:.2f}") for level in range(1, LEVELS + 1)],
        scale=[(f"{w:g}", level_class(w, method=None)) for w in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)],
        completions=[_card(c, names) for c in result.completions],
    )


def level_class(weight: float, *, method: int | None) -> str:
    """Return a weight's CSS class after its method's number: p1..p8 above 1 (p8 from 3 on), s1..s8 below, none at 1."""
    if not math.isfinite(weight):
        return ""
    strength = min((weight - 1) / 2, 1.0) if weight > 1 else 1 - max(weight, 0.0)
    level = round(LEVELS * strength)
    start = "" if method is None else f"m{method}"
    return f"{start}{'p' if weight > 1 else 's'}{level}" if level else ""


def token_title(c: LabCompletion, at: int, names: list[str]) -> str:
    """Return a token's hover text: its oracles, then every method's weight and score."""
    marks = [("direct: changing it changes the answer", c.direct), ("total: changing it changes the reward", c.total)]
    marks += [("holds a step's result", c.known), ("the first wrong step", c.wrong)]
    notes = [text for text, mask in marks if mask and mask[at]]
    if not c.is_reasoning[at]:
        notes.append("answer" if c.is_answer[at] else "outside the reasoning")
    lines = ["; ".join(notes)] if notes else []
    lines += [f"{name}: weight {short(c.weights[name][at])}, score {short(c.scores[name][at])}" for name in names]
    return "\n".join(lines)


def _card(c: LabCompletion, names: list[str]) -> dict[str, Any]:
    per_token = {"is_reasoning": c.is_reasoning, "is_answer": c.is_answer, "direct": c.direct, "total": c.total}
    lengths = {name: len(values) for name, values in per_token.items()}
    lengths |= {
        f"{kind} of {n}": len(v[n]) for kind, v in (("weights", c.weights), ("scores", c.scores)) for n in names
    }
    mismatches = {name: n for name, n in lengths.items() if n != len(c.tokens)}
    if mismatches:
        raise ValueError(f"completion: expected one entry per token in each field, {len(c.tokens)}, got {mismatches}")
    pieces = []
    for at, text in enumerate(c.tokens):
        classes = [level_class(c.weights[name][at], method=i) for i, name in enumerate(names)]
        if not c.is_reasoning[at]:
            classes = ["answer" if c.is_answer[at] else "plain"]
        classes += ["direct"] * c.direct[at] + ["total"] * c.total[at]
        pieces.append((text.replace("\n", "↵\n"), " ".join(filter(None, classes)), token_title(c, at, names)))
    return {
        "prompt": c.prompt,
        "reward": short(c.reward),
        "good": c.reward > 0,
        "answer": "none" if c.answer is None else c.answer[:80],
        "reference": None if c.reference is None else c.reference[:80],
        "pieces": pieces,
    }


def _table(result: LabResult, title: str, columns: Any) -> dict[str, Any]:
    table_columns = shown_columns(result, columns)
    return {
        "title": title,
        "header": ["method", *(c.heading for c in table_columns)],
        "lines": table_cells(result, table_columns),
        "best": BEST,
        "note": legend(result, table_columns),
    }
