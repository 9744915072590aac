"""Draw docs/demo.svg, the moving picture of the README: the live lines of the demo, then its report.

python docs/make_moving.py            reads docs/data/demo_run.json
python docs/make_moving.py RUN        first writes docs/data/demo_run.json from the folder of a finished run of the demo

The figures are a run's own; only time passes faster. The lines come from the live display itself
(``oarjax.report.console.Progress``). The picture loads nothing, moves by CSS, and stands still where a reader asks for
it.
"""

from __future__ import annotations

import io
import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from oarjax.report.console import LIVE, Progress
from oarjax.report.files import CompletionRow, read_completions, read_metrics
from oarjax.report.page import token_pieces
from oarjax.report.summary import SummaryRow, read_summary, summary_cells

HERE = Path(__file__).resolve().parent
DATA, PICTURE = HERE / "data" / "demo_run.json", HERE / "demo.svg"

WIDTH, HEIGHT, LEFT = 820, 330, 26
FRAME, REPORT = 0.45, 7.0
"""Seconds that a frame of the live lines and the report stay."""

METRICS = {name for row in LIVE for name in row}
PHASES = ("sample", "grade_wait", "update", "evaluate", "other", "total")


def recorded(run: Path) -> dict[str, Any]:
    """Return what the picture shows of a run: its metrics, its table and its last completion of uneven weights."""
    records = [
        {name: round(value, 4) for name, value in record.items() if name in METRICS or name == "iteration"}
        | {f"seconds/{p}": round(record[f"seconds/{p}"], 2) for p in PHASES if f"seconds/{p}" in record}
        for record in read_metrics(run / "metrics.jsonl")
    ]
    rows = [row for _, row in read_completions(run / "completions.jsonl") if row.reward and len(set(row.weights)) > 2]
    last = rows[-1]
    names = ("prompt", "completion", "reward", "answer", "verdict", "tokens", "is_reasoning", "is_answer", "reference")
    completion = {name: getattr(last, name) for name in names} | {"weights": [round(w, 2) for w in last.weights]}
    table = [vars(row) for row in read_summary(run / "summary.json")]
    return {"records": records, "summary": table, "completion": completion | {"advantage": round(last.advantage, 2)}}


def live_lines(records: list[dict[str, Any]], total: int) -> list[tuple[int, list[str]]]:
    """Return the lines below the bar after every iteration, as the live display writes them."""
    shown = []
    shape = io.StringIO()
    with Progress(total, console=Console(file=shape, width=400), baseline=records[0]["pass_at_1"]) as progress:
        for record in records[1:]:
            shape.truncate(shape.seek(0))
            phases = {name: record[f"seconds/{name}"] for name in PHASES if f"seconds/{name}" in record}
            progress.update(record["iteration"], record, phases)
            values = re.split(r"  +", shape.getvalue().strip())[1:]
            first = sum(name in record or name == "pass_at_1" for name in LIVE[0])
            rest = len(values) - sum(seconds >= 0.05 or name == "total" for name, seconds in phases.items())
            shown.append((record["iteration"], ["   ".join(values[a:b]) for a, b in ((0, first), (first, rest))]))
            shown[-1][1].append("   ".join(values[rest:]))
    return shown


def clock(seconds: float) -> str:
    """Write a duration as the bar does."""
    return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f}:{seconds % 60:02.0f}"


def text(x: float, y: float, words: str, style: str = "", **attributes: str) -> str:
    """Write a line of text."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" class="{style}"{more}>{escape(words)}</text>'


def terminal(data: dict[str, Any]) -> list[str]:
    """Draw the frames of the live display, each a group; the first waits for the compiler."""
    records, total = data["records"], data["records"][-1]["iteration"]
    frames, spent = [], 0.0
    for done, lines in [(0, ["compiling: the first one takes longer"]), *live_lines(records, total)]:
        spent += records[done].get("seconds/total", 0.0)
        left = clock(spent / done * (total - done)) if done else "-:--:--"
        bar = 360 * done / total
        parts = [
            text(LEFT, 104, "OAR-G", "mono"),
            '<rect x="80" y="98" width="360" height="3" class="track"/>',
            f'<rect x="80" y="98" width="{bar:.1f}" height="3" class="{"done" if done == total else "bar"}"/>',
            text(454, 104, f"{done}/{total}", "mono green"),
            text(524, 104, clock(spent), "mono yellow"),
            text(600, 104, f"left {left}", "mono cyan"),
        ]
        styles = ("mono bold", "mono bold", "mono dim") if done else ("mono dim",)
        parts += [text(LEFT, 130 + 24 * n, line, style) for n, (line, style) in enumerate(zip(lines, styles))]
        frames.append("".join(parts))
    return frames


def report(data: dict[str, Any]) -> str:
    """Draw the report: its cards, two curves and a completion coloured by its weights."""
    rows = [SummaryRow(**row) for row in data["summary"]]
    _, cells = summary_cells(rows)
    before, after = rows
    change = f"{after.change:+.1f} points", f"95% interval {after.change_low:+.1f} to {after.change_high:+.1f}"
    cards = [
        (before.name, cells[0][1].split(" ")[0], "held-out pass@1 before"),
        (after.name, cells[1][1].split(" ")[0], "held-out pass@1 after"),
        (f"change by {after.name}", *change),
    ]
    parts = [f'<rect x="0" y="34" width="{WIDTH}" height="{HEIGHT - 34}" class="page"/>']
    for n, (label, number, below) in enumerate(cards):
        x = LEFT + n * 262
        parts.append(f'<rect x="{x}" y="48" width="248" height="82" rx="10" class="card"/>')
        parts += [
            text(x + 16, 70, label, "label"),
            text(x + 16, 98, number, "number"),
            text(x + 16, 119, below, "soft"),
        ]
    curves = (("mean reward", "reward", 0.2, 1), ("held-out pass@1 (%)", "pass_at_1", 0.4, 0.8))
    for n, (title, metric, low, high) in enumerate(curves):
        x = LEFT + n * 200
        points = [(r["iteration"], r[metric]) for r in data["records"] if metric in r]
        last = data["records"][-1]["iteration"]
        line = " ".join(f"{x + 14 + 158 * i / last:.1f},{296 - 100 * (v - low) / (high - low):.1f}" for i, v in points)
        parts.append(f'<rect x="{x}" y="142" width="186" height="176" rx="10" class="card"/>')
        parts += [text(x + 14, 164, title, "label"), f'<polyline points="{line}" class="line"/>']
        parts.append(text(x + 93, 312, "iteration", "soft", text_anchor="middle"))
    parts.append('<rect x="426" y="142" width="368" height="176" rx="10" class="card"/>')
    parts += [text(440, 164, "completion, coloured by token weight", "label")]
    row = CompletionRow(**data["completion"])
    parts.append(text(440, 190, row.prompt, "mono soft"))
    x, y, step = 440, 216, 8.4
    for piece in token_pieces(row):
        word = piece.text.replace("↵\n", "")
        wide = step * len(word)
        if x + wide > 786:
            x, y = 440, y + 26
        if found := re.search(r"--(\w+)\) / ([\d.]+)", piece.style):
            colour = f'class="{found[1]}" opacity="{found[2]}"'
            parts.append(f'<rect x="{x:g}" y="{y - 14}" width="{wide:g}" height="19" rx="2" {colour}/>')
        style = "mono ink answer" if piece.kind == "answer" else "mono ink"
        parts.append(text(x, y, word, style, textLength=f"{wide:g}"))
        x += wide
    note = f"reward {row.reward:g}   expected {row.reference}   orange: more credit, blue: less"
    parts.append(text(440, 306, note, "soft"))
    return "".join(parts)


STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #1b1f24; }
.mono { font: 13.5px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.mono { white-space: pre; fill: #d9dee5; } .bold { font-weight: 700; } .dim { fill: #8b96a3; }
.green { fill: #4cc495; } .yellow { fill: #d9b13b; } .cyan { fill: #62b5e8; }
.track { fill: #3a4250; } .bar { fill: #e0527a; } .done { fill: #4cc495; }
.window { fill: #12161c; } .dot { fill: #3a4250; }
.page { fill: #f6f7f9; } .card { fill: #fff; stroke: #e1e4e8; }
.label { font-weight: 600; } .number { font-size: 26px; font-weight: 650; }
.soft { fill: #5b6470; font-size: 12px; } .mono.soft { fill: #5b6470; font-size: 13.5px; } .ink { fill: #1b1f24; }
.line { fill: none; stroke: #c24e00; stroke-width: 2; stroke-linejoin: round; }
.boost { fill: #e6780a; } .suppress { fill: #2882d2; }
.answer { text-decoration: underline; font-weight: 700; }
@media (prefers-color-scheme: dark) {
  .page { fill: #101317; } .card { fill: #181c22; stroke: #2a3038; } .report text, .ink { fill: #e6e9ed; }
  .report .soft, .mono.soft { fill: #98a2ae; } .line { stroke: #f0803c; }
}
.frame, .report { visibility: hidden; }
@media (prefers-reduced-motion: reduce) { .report { visibility: visible; } }
"""


def picture(data: dict[str, Any]) -> str:
    """Return the SVG."""
    frames = terminal(data)
    whole = len(frames) * FRAME + REPORT
    shown = "@keyframes {} {{ 0% {{ visibility: visible; }} {:.3f}%, 100% {{ visibility: hidden; }} }}"
    moves = [
        shown.format("frame", 100 * FRAME / whole),
        shown.format("report", 100 * REPORT / whole),
        "@media (prefers-reduced-motion: no-preference) {",
        f".frame {{ animation: frame {whole:g}s step-end infinite; }}",
        f".report {{ animation: report {whole:g}s step-end infinite; animation-delay: {len(frames) * FRAME:g}s; }}",
        *(f".f{n} {{ animation-delay: {n * FRAME:g}s; }}" for n in range(len(frames))),
        "}",
    ]
    first, last = (f"{row['pass_at_1']:.1%}" for row in data["summary"])
    said = f"The live lines of oarjax train demo, then its report: held-out pass@1 rises from {first} to {last}"
    name = text(WIDTH / 2, 22, "runs/demo/report.html", "mono dim", text_anchor="middle")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">',
            f"<style>{STYLE}{chr(10).join(moves)}</style>",
            '<clipPath id="c"><rect width="100%" height="100%" rx="10"/></clipPath><g clip-path="url(#c)">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" class="window"/>',
            *(f'<circle cx="{20 + 18 * n}" cy="17" r="5" class="dot"/>' for n in range(3)),
            text(LEFT, 70, "$ oarjax train demo", "mono green"),
            *(f'<g class="frame f{n}">{frame}</g>' for n, frame in enumerate(frames)),
            f'<g class="report">{report(data)}{name}</g>',
            "</g></svg>\n",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        DATA.write_text(json.dumps(recorded(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(picture(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
