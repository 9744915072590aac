"""Put outputs into the notebooks that need no chip, so that they can be read without running them.

python docs/make_notebooks.py FOLDER    FOLDER has each NAME.ipynb as it was run, from the first cell to the last

Every output keeps its HTML; where it is coloured by styles, which GitHub removes, a picture of it follows as PNG. Needs
Chromium. A test runs both notebooks with their tiny switch.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("compose_losses", "what_gets_credit")
WIDTH, HEIGHT = 900, 2400
"""Of the window in which an output is drawn; what is blank below it is cut off."""


def picture(html: str) -> str:
    """Draw an output on a white page, and return it as PNG in base64."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        page.write_text(f'<meta charset="utf-8"><body style="background:#fff;margin:0">{html}', encoding="utf-8")
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
        size = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}", f"--user-data-dir={folder}/profile"]
        subprocess.run([browser, *quiet, *size, page.as_uri()], check=True, capture_output=True, timeout=120)
        drawn = Image.open(shot).convert("RGB")
    end = ImageChops.invert(drawn).getbbox()[3]
    target = io.BytesIO()
    drawn.crop((0, 0, WIDTH, end + 12)).quantize(64).save(target, format="png", optimize=True)
    return base64.b64encode(target.getvalue()).decode()


def shown(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a cell's outputs without what is of this machine, and with a picture after each that is HTML."""
    kept = []
    for output in outputs:
        data = output.get("data", {})
        if "text/html" not in data:
            raise SystemExit(f"an output that is not HTML: {str(output)[:200]}")
        html = "".join(data["text/html"])
        kept.append({"output_type": "display_data", "metadata": {}, "data": {"text/html": html.splitlines(True)}})
        kept.append({"output_type": "display_data", "metadata": {}, "data": {"image/png": picture(html)}})
    return kept


def main(folder: Path) -> None:
    """Write the outputs of every notebook into the one of this repository, whose cells must be the same."""
    for name in NAMES:
        target = ROOT / "notebooks" / f"{name}.ipynb"
        notebook, run = (json.loads(path.read_text(encoding="utf-8")) for path in (target, folder / target.name))
        count = 0
        for cell, done in zip(notebook["cells"], run["cells"], strict=True):
            if cell["cell_type"] == "code":
                count += 1
                cell["execution_count"], cell["outputs"] = count, shown(done["outputs"])
        target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
