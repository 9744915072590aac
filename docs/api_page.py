"""Write the site's page of everything in ``oarjax.__all__`` from the docstrings, when the site is built.

Nothing is imported but the package's table of names; signatures and docstrings are read by griffe.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

import oarjax

HERE = Path(__file__).resolve().parent
WIDTH = 100
HEAD = """# API reference

Everything that `import oarjax` offers, by the module that it lives in, from the docstrings. These names are
stable, see [what is stable](bring_your_own.md#what-is-stable). Axis letters: P prompts, G
rollouts per prompt, B = P * G rows, S prompt positions, T completion positions, N = S + T, V vocabulary, D width, M
microbatches of b rows.
"""


def page() -> str:
    """Return the whole reference as Markdown."""
    package = griffe.load("oarjax", search_paths=[str(HERE.parent)], docstring_parser="google")
    parts = [HEAD, contents()]
    for module, names in oarjax._HOME.items():
        home = package[module.removeprefix("oarjax.")]
        intro = home.docstring.value.split("\n\n")[0] if home.docstring else ""
        parts.append(f"## {module}\n\n{_prose(intro)}\n")
        parts += [_entry(home[name], name) for name in names]
    return "\n".join(parts)


def contents() -> str:
    """List the names by module, as links, and show how they go together."""
    lines = [
        f"- {module.removeprefix('oarjax.')}: " + ", ".join(f"[{name}](#{name.lower()})" for name in names)
        for module, names in oarjax._HOME.items()
    ]
    readme = (HERE.parent / "README.md").read_text(encoding="utf-8")
    example = next(b for b in re.findall(r"```python\n(.*?)\n```", readme, re.S) if "group_advantages" in b)
    return "\n".join(["## Contents", "", *lines, "", "## An example", "", _code(example), ""])


def _entry(thing: Any, name: str) -> str:
    if thing.is_function:
        return f"### {name}\n\n{_code(_signature(thing))}\n\n{_docstring(thing)}\n"
    if thing.is_class:
        members = [m for m in thing.functions.values() if not m.name.startswith("_") and m.docstring]
        members += [a for a in thing.attributes.values() if "property" in a.labels and a.docstring]
        methods = "".join(f"\n**`{_heading(m)}`**\n\n{_docstring(m)}\n" for m in members)
        return f"### {name}\n\n{_code(_fields(thing))}\n\n{_docstring(thing)}\n{methods}"
    return f"### {name}\n\n{_code(f'{name} = {thing.value}')}\n\n{_docstring(thing)}\n"


def _heading(member: Any) -> str:
    return _signature(member).replace("\n", " ") if member.is_function else f"{member.name}: {member.annotation}"


def _signature(function: Any) -> str:
    """As in the source: on one line where it fits, else one parameter a line."""
    line = function.signature().replace("'", '"')
    if len(line) <= WIDTH:
        return line
    single = function.signature(return_type=False).replace("'", '"')
    inside = single[len(function.name) + 1 : -1]
    result = line[len(single) :]
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(inside):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append(inside[start:at].strip())
            start = at + 1
    parts.append(inside[start:].strip())
    return "\n".join([f"{function.name}(", *(f"    {part}," for part in parts), f"){result}"])


def _fields(thing: Any) -> str:
    """Return the head of a class and its fields as they stand in the source, with their comments."""
    source = Path(thing.filepath).read_text(encoding="utf-8").splitlines()
    lines = [f"class {thing.name}({', '.join(map(str, thing.bases))}):" if thing.bases else f"class {thing.name}:"]
    for field in thing.attributes.values():
        if field.annotation is not None and "property" not in field.labels and not field.name.startswith("_"):
            lines += source[field.lineno - 1 : field.endlineno]
    return "\n".join(lines)


def _docstring(thing: Any) -> str:
    if thing.docstring is None:
        raise ValueError(f"{thing.path}: a public name without a docstring")
    parts = []
    for section in thing.docstring.parse("google"):
        if section.kind.value == "text":
            parts.append(_prose(section.value))
        else:
            items = [f"- {_item(item)}" for item in section.value]
            parts.append("\n".join([f"{section.kind.value.capitalize()}:", "", *items]))
    return "\n\n".join(parts)


def _item(item: Any) -> str:
    named = getattr(item, "name", None) or str(item.annotation)
    return f"`{named}`: {_prose(item.description)}"


def _prose(text: str) -> str:
    """Paragraphs as markdown; those with aligned columns as they stand."""
    paragraphs = [
        _code(part, "text") if re.search(r"\S {2,}\S", part) else re.sub(r"``(.+?)``", r"`\1`", part)
        for part in text.split("\n\n")
    ]
    return "\n\n".join(paragraphs)


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"
