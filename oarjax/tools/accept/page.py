"""Write report.html of ``oarjax accept``: every stage and check on one self-contained page without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from oarjax.report.files import visible
from oarjax.tools.accept.check import cells

TEMPLATE = Path(__file__).with_name("page.html")


def write_accept_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page of a report."""
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    stages = [
        {
            "title": visible(stage["title"]),
            "name": visible(stage["stage"]),
            "state": stage["state"],
            "seconds": f"{stage['seconds']:.1f}",
            "error": None if stage["error"] is None else visible(stage["error"]),
            "checks": [tuple(map(visible, cells(check))) for check in stage["checks"]],
        }
        for stage in report["stages"]
    ]
    html = template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        state=report["state"],
        summary=visible(report["summary"]),
        notable=[{name: visible(text) for name, text in each.items()} for each in report["notable"]],
        stages=stages,
    )
    path.write_text(html, encoding="utf-8", errors="replace")
