"""Render every HTML page and notebook cell: one shell (``shell.html``), its colours and styles, and the escaping.

A page's template extends the shell and holds only its own content. Every value in a template passes ``visible`` and
HTML escaping. Pages load nothing and run nothing; the shell's content policy enforces that.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from oarjax.report.colours import DARK, LIGHT
from oarjax.report.files import visible


def render(template: str, **values: Any) -> str:
    """Render a template, named by its path below the package, such as ``report/page.html``."""
    return _environment().get_template(template).render(values)


def write_html(path: Path, template: str, **values: Any) -> None:
    """Render a page into a file.

    Args:
        path: of the file; its folder is created if missing.
        template: as for ``render``.
        values: ``title`` of the page, ``facts`` to show below it, and what the template reads.
    """
    html = render(template, **({"facts": {}} | values))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lone surrogates of a broken tokenizer cannot be written as UTF-8; ``visible`` has escaped all others.
    path.write_text(html, encoding="utf-8", errors="replace")


@cache
def _environment() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1], encoding="utf-8"),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {"light": LIGHT, "dark": DARK}
    return templates


def _printable(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
