"""Fail if a page of the built site would load something from another host, or has no title.

python .ci/site.py FOLDER
"""

import re
import sys
from pathlib import Path

LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b(?![^>]*canonical)[^>]*\bhref="(?:https?:)?//'
)


def main(folder: str) -> int:
    """Check every page; print those that load something."""
    pages = sorted(Path(folder).rglob("*.html"))
    bad = [page for page in pages if LOADED.search(page.read_text(encoding="utf-8"))]
    bad += [
        style for style in Path(folder).rglob("*.css") if re.search(r"url\((?:https?:)?//|@import", style.read_text())
    ]
    for page in bad:
        print(f"{page}: loads something from another host")
    print(f"site: {len(pages)} pages, {len(bad)} that load something from another host")
    return int(bool(bad) or len(pages) < 20)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
