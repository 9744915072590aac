"""Write the repository's address into README, notebooks, site, pyproject.toml and CITATION.cff.

python docs/make_address.py    writes ``ADDRESS``; without one, the texts say to start from a checkout

Change ``ADDRESS`` here, nowhere else. A test compares the files with what this script writes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ADDRESS = ""
"""What git clone takes, as https://github.com/OWNER/NAME; empty until there is one."""

ROOT = Path(__file__).resolve().parent.parent
COLAB = "https://colab.research.google.com/github"
NEEDS = "Python 3.11 or newer, on Linux (on Windows in WSL)"
VENV = "python3 -m venv .venv && . .venv/bin/activate\n"

PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "README.md": (
        (
            f"{NEEDS}. In a clone, or an unpacked archive, of this repository:\n\n```bash\n{VENV}",
            f"{NEEDS}:\n\n```bash\ngit clone {{address}} oarjax && cd oarjax\n{VENV}",
        ),
        (
            "The badges open Colab's list of GitHub notebooks; give it this repository's address. In your own",
            "In your own",
        ),
    ),
    "docs/index.md": (
        (
            f"In a clone, or an unpacked archive, of the repository ([install](install.md)):\n\n```bash\n{VENV}",
            f"[Install](install.md) and train:\n\n```bash\ngit clone {{address}} oarjax && cd oarjax\n{VENV}",
        ),
    ),
    "docs/install.md": (
        (
            f"install from a clone or an unpacked archive of the repository, in its folder:\n\n```bash\n{VENV}",
            f"install from a clone of the repository:\n\n```bash\ngit clone {{address}} oarjax && cd oarjax\n{VENV}",
        ),
    ),
    "docs/for_notebooks.md": (
        (
            "In Colab choose *File, Open notebook, GitHub* and give this repository's address. The first cell",
            "In Colab choose *File, Open notebook, GitHub* and give {address}. The first cell",
        ),
    ),
    "mkdocs.yml": (("docs_dir: docs\n", "docs_dir: docs\nrepo_url: {address}\n"),),
    "pyproject.toml": (("[project.scripts]\n", '[project.urls]\nRepository = "{address}"\n\n[project.scripts]\n'),),
    "CITATION.cff": (("license: Apache-2.0\n", 'license: Apache-2.0\nrepository-code: "{address}"\n'),),
    **{
        f"notebooks/{name}.ipynb": (('REPOSITORY = \\"\\"  #', 'REPOSITORY = \\"{address}\\"  #'),)
        for name in ("colab_tpu", "compose_losses", "kaggle_lora_7b", "what_gets_credit")
    },
}
"""The text of each file without an address, and with one."""

BADGE = re.compile(rf"\]\({re.escape(COLAB)}[^)]*\)")
NOTEBOOK = re.compile(r"notebooks/(\w+)\.ipynb")


def colab(name: str, address: str) -> str:
    """Return where a notebook's badge leads: Colab's list of notebooks, or the notebook where Colab can read it."""
    owner = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?", address)
    return f"{COLAB}/{owner[1]}/blob/main/notebooks/{name}.ipynb" if owner else COLAB


def rewritten(path: str, text: str, *, before: str, address: str) -> str:
    """Return a file's text with ``address`` in the place of ``before``; either may be empty.

    Raises:
        ValueError: the file lacks the text that is to change, or has it twice.
    """
    for without, with_address in PLACES[path]:
        old, new = (with_address.format(address=a) if a else without for a in (before, address))
        if text.count(old) != 1:
            raise ValueError(f"{path}: expected once, found {text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if name := NOTEBOOK.search(path) or NOTEBOOK.search(line):
            lines[number] = BADGE.sub(f"]({colab(name[1], address)})", line)
    return "\n".join(lines)


def written(root: Path = ROOT) -> str:
    """Return the address that the files have now, "" without one."""
    found = re.search(r'^\[project\.urls\]\nRepository = "(.+)"$', (root / "pyproject.toml").read_text("utf-8"), re.M)
    return found[1] if found else ""


def write(address: str, root: Path = ROOT) -> None:
    """Write an address into every file, all or none.

    Raises:
        ValueError: it is no address, or a file lacks a text.
    """
    if address and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address):
        raise ValueError(f"ADDRESS: expected https://HOST/OWNER/NAME, or nothing, got {address!r}")
    before = written(root)
    texts = {path: rewritten(path, (root / path).read_text("utf-8"), before=before, address=address) for path in PLACES}
    for path, text in texts.items():
        (root / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        write(ADDRESS)
    except ValueError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{', '.join(PLACES)}: {ADDRESS or 'no address'}\n")
