"""Write report.html of ``oarjax accept``: every stage and check on one self-contained page without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oarjax.report.html import write_html
from oarjax.tools.accept.check import cells


def write_accept_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page of a report."""
    stages = [
        stage | {"seconds": f"{stage['seconds']:.1f}", "checks": [cells(check) for check in stage["checks"]]}
        for stage in report["stages"]
    ]
    write_html(path, "tools/accept/page.html", **({"title": "oarjax accept"} | dict(report) | {"stages": stages}))
