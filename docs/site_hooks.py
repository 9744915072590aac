"""Hooks of mkdocs: write the references when the site is built, and turn formulas into MathML.

The reference of the API, of the config and of the commands, and the pages that lie outside docs/ (contributing,
changes, Cloud TPU scripts) are made here and committed nowhere. Links to source files become their names.
"""

from __future__ import annotations

import html
import json
import re
import runpy
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

OUTSIDE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "tpu.md": "tpu/README.md",
    "what_gets_credit.md": "notebooks/what_gets_credit.ipynb",
    "compose_losses.md": "notebooks/compose_losses.ipynb",
}
"""Pages of the site and the files that they are made of."""
MEASURED = {
    *("results.md", "results_appendix.md", "race.md", "race2.md", "gradients.md", "plans.md", "cost.md", "speed.md"),
    *("credit_lab.md", "paper.md", "changelog.md", "contributing.md", "what_gets_credit.md", "compose_losses.md"),
}
"""Pages of numbers and of changes, whose many words would come first in a search."""
ASKED = ("install.md", "bring_your_own.md", "troubleshooting.md")
"""Pages that say how to do a thing."""
HEADINGS = {"optim": "optim: learning rate and AdamW"}
"""Headings of sections of the config by what people search for; their anchors stay the sections' names."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?:|#|mailto:)[^)#\s]+)(#[^)\s]*)?\)")
OUTPUT = re.compile(r"<p>output (\w+) (\d+) of the notebook</p>")
BADGE = re.compile(r"\[!\[Open in Colab\][^\n]*\n")
MATH = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made: references, and files from outside docs/."""
    pages = {"api.md": api(), "config_reference.md": config_reference(), "commands.md": commands()}
    pages |= {name: text_of(ROOT / source) for name, source in OUTSIDE.items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Point links at pages of the site; a link to a file that is not on it becomes the file's name."""
    name = page.file.src_uri
    page.meta["search"] = {"boost": 0.1 if name in MEASURED else 4 if name in ASKED else 1}
    source = OUTSIDE.get(page.file.src_uri)
    folder = (ROOT / source).parent if source else (HERE / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = (folder / target).resolve()
        name = next((name for name, outside in OUTSIDE.items() if path == ROOT / outside), None)
        if name is None and path.is_relative_to(HERE):
            name = path.relative_to(HERE).as_posix()
        if name is not None and (files.get_file_from_path(name) or not path.exists()):
            return f"[{text}]({name}{anchor})"  # a page that does not exist is an error of the strict build
        if not path.exists():
            raise ValueError(f"{page.file.src_uri}: the link {target} leads nowhere")
        return text if text.startswith("`") else f"{text} (`{path.relative_to(ROOT).as_posix()}`)"

    return LINK.sub(link, markdown)


def text_of(path: Path) -> str:
    """Return a file as Markdown; of a notebook its cells, with a mark for each cell's output."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    parts = []
    for number, cell in enumerate(json.loads(text)["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(BADGE.sub("", source))
        elif "find_spec(" not in source:  # the installation
            parts.append(f"```python\n{source}\n```")
            parts += [f"output {path.stem} {number} of the notebook"] if cell["outputs"] else []
    return "\n\n".join(parts)


def output_of(match: re.Match[str]) -> str:
    """Return the HTML of a cell's output."""
    cells = json.loads((ROOT / "notebooks" / f"{match[1]}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output["data"].get("text/html", "")) for output in cells[int(match[2])]["outputs"])


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Turn formulas into MathML, which browsers show without a script, and put notebooks' outputs in their places."""
    content = OUTPUT.sub(output_of, content)
    if page.file.src_uri in ("config_reference.md", "commands.md"):  # see extra.css
        content = content.replace("<table>", '<div class="fields"><table>').replace("</table>", "</table></div>")

    def formula(match: re.Match[str]) -> str:
        text = html.unescape(match.group(2)).strip()
        block = match.group(1) == "div"
        return convert(text[2:-2].strip(), display="block" if block else "inline")  # without \( \) or \[ \]

    return MATH.sub(formula, content)


def api() -> str:
    """Write the reference of the public names, with a table of contents."""
    return str(runpy.run_path(str(HERE / "api_page.py"))["page"]())


def config_reference() -> str:
    """Write a table of every section of a config."""
    from oarjax.report.fields import field_rows, markdown

    sections: dict[str, list[Any]] = {}
    for row in field_rows():
        sections.setdefault(row.path.split(".")[0] if "." in row.path else "A run", []).append(row)
    parts = [
        "# Config reference\n\nEvery field with its default, accepted values and meaning, from the types of "
        "`oarjax/config/`. `oarjax config SECTION` prints the same; any field can be set on the command line: "
        "`oarjax train demo rollout.group_size=16`.\n"
    ]
    for name, rows in sections.items():
        parts.append(f"## {HEADINGS.get(name, name)} {{ #{name.replace(' ', '-').lower()} }}\n\n{markdown(rows)}\n")
    return "\n".join(parts)


def commands() -> str:
    """Write the help of every subcommand."""
    import typer

    from oarjax.cli import app

    group: Any = typer.main.get_command(app)
    parts = ["# Command line\n\nAs `oarjax COMMAND --help` prints it.\n"]
    for name, command in group.commands.items():
        about = (command.help or "").replace("\\[", "[").strip()
        params = [p for p in command.params if p.name != "help"]
        arguments = [p.metavar or p.name.upper() for p in params if p.param_type_name == "argument"]
        usage = " ".join(["oarjax", name, "[OPTIONS]", *arguments])
        rows = [_parameter(p) for p in params]
        table = "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])
        example = f"\n\n{command.epilog}" if command.epilog else ""
        parts.append(f"## {name}\n\n```text\n{usage}\n```\n\n{about}{_code(example)}\n\n{table}\n")
    return "\n".join(parts)


def _parameter(parameter: Any) -> str:
    """Write a row of a command's table."""
    option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if option else parameter.metavar or parameter.name.upper()
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    default = "" if shown in (None, False, "") or callable(shown) else str(getattr(shown, "value", shown))
    about = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\\[", "[")
    return f"| `{name}` | {about} | {default} |"


def _code(example: str) -> str:
    return re.sub(r"Example: (.+)", r"Example: `\1`", example)
