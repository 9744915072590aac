"""Write report.html: a run on one self-contained page without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oarjax.errors import ConfigError
from oarjax.report.colours import SVG_DASHES, styles
from oarjax.report.curves import Panel, Record, drawn_panels, iteration_range, moving_mean, points
from oarjax.report.files import CompletionRow, cut, short
from oarjax.report.groups import TIMES, ShownCompletion, ShownGroup
from oarjax.report.html import write_html
from oarjax.report.summary import NOTE, SummaryRow, may_be_chance, summary_cells, summary_title
from oarjax.storage.durable import DISK, NO_PATH, cannot_write
from oarjax.system.json import number

WIDTH, HEIGHT = 340, 214  # of a chart, in its own units
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 40
SIZE = (WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM)
GRADED = "graded"
"""The usual verdict, which the page leaves out."""

LONGEST = 2000
"""Characters of a text on the page."""


class Line(NamedTuple):
    style: str  # CSS classes of its colour and dashes
    path: str  # SVG path of the (smoothed) curve
    raw: str  # path of the logged values, empty if the curve is not smoothed
    dots: list[tuple[str, str, str]]  # x, y, hover text


class Chart(NamedTuple):
    title: str
    lines: list[Line]
    x_ticks: list[tuple[str, str]]  # position, label
    y_ticks: list[tuple[str, str]]


class TokenPiece(NamedTuple):
    text: str
    style: str  # CSS background
    kind: str  # reasoning, answer or plain
    title: str


def write_page(
    path: Path,
    *,
    title: str,
    summary: Sequence[SummaryRow],
    method: str,
    records: Sequence[Record],
    completions: Sequence[tuple[int, CompletionRow]],
    config: Mapping[str, Any],
    facts: Mapping[str, object],
    groups: Sequence[ShownGroup] = (),
    shown: int = 6,
) -> None:
    """Write report.html.

    Args:
        path: of the HTML file.
        title: heading of the page.
        summary: rows of the final table; empty = no table.
        method: name of the credit method, for the curves.
        records: metrics by iteration.
        completions: (iteration, row); ``pick_completions`` selects the ones to show.
        config: the whole config as nested dicts, shown folded.
        facts: short ``key: value`` pairs such as device, policy, seconds.
        groups: whole groups, to read; those of up to twelve iterations, evenly spread, are shown.
        shown: maximum number of coloured completions on the page.

    Raises:
        ConfigError: ``path`` is a folder, or cannot be created.
        StorageError: the disk is full, unwritable or lost.
    """
    header, cells = summary_cells(summary) if summary else ([], [])
    runs = {method: records}
    try:
        write_html(
            path,
            "report/page.html",
            title=title,
            tiles=_tiles(summary) or _tiles_so_far(records),
            header=header,
            cells=cells,
            caption=summary_title(summary) if summary else "",
            note=NOTE,
            charts=[chart(panel, runs) for panel in drawn_panels(runs)],
            size=SIZE,
            scale=colour_scale(),
            groups=group_cards(groups),
            completions=[card(iteration, row) for iteration, row in pick_completions(completions, count=shown)],
            facts={k: str(v) for k, v in facts.items()},
            config=yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True) if config else "",
        )
    except OSError as error:
        if error.errno in DISK - NO_PATH:  # the storage fails, not the path
            raise cannot_write(path, error) from error
        raise ConfigError(
            f"report: cannot write {path}: {error.strerror}; expected a path for a file, pass another one with --out"
        ) from error


def pick_completions(
    completions: Sequence[tuple[int, CompletionRow]], *, count: int
) -> list[tuple[int, CompletionRow]]:
    """Pick half from the earliest iterations and half from the latest, preferring those with uneven weights."""
    uneven = [c for c in completions if len({w for w in c[1].weights if math.isfinite(w)}) > 1]
    pool = uneven if len(uneven) >= count else uneven + [c for c in completions if c not in uneven]
    early, late = pool[: count // 2], pool[count // 2 :]
    return sorted(early + late[max(len(late) - (count - count // 2), 0) :], key=lambda c: c[0])


def token_colour(weight: float) -> str:
    """Return a token's CSS background: blue towards 0, none at 1 or where not finite, orange towards 3 and above."""
    if not math.isfinite(weight) or weight == 1:
        return ""
    strength = min((weight - 1) / 2, 1.0) if weight > 1 else min(1 - weight, 1.0)
    return f"background: rgb(var(--{'boost' if weight > 1 else 'suppress'}) / {0.62 * strength:.2f})"


def colour_scale() -> list[tuple[float, str]]:
    """Return the legend's weights with their colours."""
    return [(weight, token_colour(weight)) for weight in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)]


def token_pieces(row: CompletionRow) -> list[TokenPiece]:
    """Split a completion into tokens with colour, kind and hover text; one piece if its tokens are unknown.

    Raises:
        ValueError: the per-token fields differ in length.
    """
    if not row.tokens:
        return [TokenPiece(row.completion, "", "plain", "")]
    lengths = {"tokens": len(row.tokens), "weights": len(row.weights)}
    lengths |= {"is_reasoning": len(row.is_reasoning) or len(row.tokens)}
    lengths |= {"is_answer": len(row.is_answer) or len(row.tokens)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"completion row: expected one entry per token in each field, got {lengths}")
    reasoning = row.is_reasoning or [True] * len(row.tokens)
    answer = row.is_answer or [False] * len(row.tokens)
    pieces = [
        TokenPiece(
            text.replace("\n", "↵\n"),
            token_colour(weight),
            "answer" if a else "reasoning" if r else "plain",
            f"weight {short(weight)}" + (", answer" if a else "" if r else ", outside the reasoning"),
        )
        for text, weight, r, a in zip(row.tokens, row.weights, reasoning, answer)
    ]
    return with_turns(pieces, row) if row.turns else pieces


def with_turns(pieces: Sequence[TokenPiece], row: CompletionRow) -> list[TokenPiece]:
    """Put before the tokens of every turn its number, reward and mean weight, and what the environment had said."""
    parts, start = [], 0
    for index, turn in enumerate(row.turns, start=1):
        end = start + turn.tokens
        weights = row.weights[start:end]
        mean = short(sum(weights) / len(weights)) if weights else "-"
        text = "\n" * (index > 1) + (turn.observed.rstrip("\n") + "\n" if turn.observed else "")
        head = f"turn {index}, reward {short(turn.reward)}, weight {mean}: "
        parts += [TokenPiece(cut(text, LONGEST), "", "plain", "the environment"), TokenPiece(head, "", "turn", "")]
        parts, start = [*parts, *pieces[start:end]], end
    return [piece for piece in parts if piece.text]


def card(iteration: int, row: CompletionRow) -> dict[str, Any]:
    """Collect the template's fields of a completion."""
    chips = []
    chips += [(name, short(value)) for name, value in row.rewards.items() if len(row.rewards) > 1]
    if math.isfinite(row.advantage):
        chips.append(("advantage", f"{row.advantage:+.2f}"))
    chips.append(("answer", row.answer[:80] if row.answer is not None else "none found"))
    if row.reference is not None:
        chips.append(("expected", row.reference[:80]))
    return {
        "iteration": iteration,
        "verdict": row.verdict if row.verdict != GRADED else "",
        "reward": short(row.reward),
        "good": row.reward > 0,
        "chips": chips,
        "prompt": row.prompt,
        "pieces": token_pieces(row),
    }


def group_cards(groups: Sequence[ShownGroup]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Collect the template's fields of groups by iteration, those with the lowest mean reward first.

    Within a group, completions without a grade come first, then those with the lowest rewards.
    """
    cards = []
    iterations = sorted({group.iteration for group in groups})
    last, count = len(iterations) - 1, min(len(iterations), TIMES)
    for iteration in [iterations[round(i * last / max(count - 1, 1))] for i in range(count)]:
        subset = [group for group in groups if group.iteration == iteration]
        cards.append((iteration, [_group_card(g) for g in sorted(subset, key=lambda g: _by_reward(g.mean_reward))]))
    return cards


def _by_reward(reward: float) -> float:
    """Return the place of a reward in an order from low to high; one without a grade comes first."""
    return reward if math.isfinite(reward) else -math.inf


def _group_card(group: ShownGroup) -> dict[str, Any]:
    rows = sorted(group.completions, key=lambda row: _by_reward(row.reward))
    prompt = " ".join(group.prompt.split())
    return {
        "mean": short(group.mean_reward),
        "reference": cut(group.reference, 80),
        "short": cut(prompt, 100),
        "prompt": cut(group.prompt, LONGEST),
        "rows": [
            {
                "reward": short(row.reward),
                "good": row.reward > 0,
                "verdict": row.verdict if row.verdict != GRADED else "",
                "chips": _chips(row),
                "text": cut(row.completion, LONGEST),
            }
            for row in rows
        ],
    }


def _chips(row: ShownCompletion) -> list[tuple[str, str]]:
    rewards = [(name, short(value)) for name, value in row.rewards.items() if len(row.rewards) > 1]
    limit = [] if row.ended else [("cut at", f"{row.tokens} tokens")]
    return [*rewards, ("advantage", f"{row.advantage:+.2f}"), ("answer", cut(row.answer or "none found", 80)), *limit]


def _tiles(summary: Sequence[SummaryRow]) -> list[tuple[str, str, str]]:
    """Return (label, number, caption) for the first policy and, two each, for those compared with it."""
    if not summary:
        return []
    first = summary[0]
    tiles = [(first.name, f"{100 * first.pass_at_1:.1f}%", "held-out pass@1 before")]
    compared = [row for row in summary[1:] if row.change is not None]
    for row in compared:
        tiles.append((row.name, f"{100 * row.pass_at_1:.1f}%", "held-out pass@1 after"))
        low, high = number(row.change_low), number(row.change_high)
        if not math.isfinite(low):
            span = "one problem: no interval"
        elif low == high:
            span = f"alike on each of {row.problems} problems: no interval"
        else:
            span = f"95% interval {low:+.1f} to {high:+.1f}" + (": may be chance" if may_be_chance(row) else "")
        tiles.append((f"change by {row.name}", f"{row.change:+.1f} points", span))
    return tiles


def _tiles_so_far(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Return tiles for the evaluations of a run before it has finished: the start's and the latest."""
    evaluations = points(records, "pass_at_1")
    tiles = [("start", f"{100 * y:.1f}%", "held-out pass@1 before") for _, y in evaluations[:1]]
    latest = evaluations[1:][-1:]
    return tiles + [("so far", f"{100 * y:.1f}%", f"held-out pass@1, iteration {x:.0f}") for x, y in latest]


def chart(panel: Panel, runs: Mapping[str, Sequence[Record]]) -> Chart:
    """Convert a panel's curves to a chart's units."""
    scale = 100 if panel.percent else 1
    curves = [[(x, scale * y) for x, y in points(rows, panel.metric, first=panel.first)] for rows in runs.values()]
    ys = [y for line in curves for _, y in line] + ([0.0] if panel.from_zero else [])
    first, last = iteration_range(runs)
    x_ticks = nice_ticks(first, last, count=5, whole=True)
    y_ticks = nice_ticks(min(ys), max(ys), count=4)
    low, high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - first) / ((last - first) or 1) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def trace(line: Sequence[tuple[float, float]]) -> str:
        return "M" + " L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in line)

    lines = []
    for style, (name, line) in zip(line_classes(list(runs)), zip(runs, curves)):
        if not line:
            continue
        smooth = list(zip([x for x, _ in line], moving_mean([y for _, y in line])))
        unit = "%" if panel.percent else ""
        dots = [(f"{px(x):.1f}", f"{py(y):.1f}", f"{name}, iteration {x:.0f}: {short(y)}{unit}") for x, y in line]
        lines.append(Line(style, trace(smooth), "" if smooth == line else trace(line), dots))
    return Chart(
        panel.title + (" (%)" if panel.percent else ""),
        lines,
        [(f"{px(x):.1f}", f"{x:,.0f}") for x in x_ticks if first <= x <= last],
        [(f"{py(y):.1f}", f"{y:,.10g}") for y in y_ticks],
    )


def line_classes(names: Sequence[str]) -> list[str]:
    """Return the CSS classes of runs' lines: c0 to c7 for the colour, d0 to d3 for the dashes."""
    return [f"c{colour} d{variant % len(SVG_DASHES)}" for colour, variant in styles(names)]


def nice_ticks(low: float, high: float, *, count: int, whole: bool = False) -> list[float]:
    """Return about ``count`` round numbers, from at or below ``low`` to at or above ``high``."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= count)
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * k, 12) for k in range(first, max(last, first + 1) + 1)]


def _plain(tree: Any) -> Any:
    """Convert nested values to types that YAML can write."""
    if isinstance(tree, Mapping):
        return {str(k): _plain(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(v) for v in tree]
    return tree if tree is None or isinstance(tree, bool | int | float | str) else str(tree)
