"""Write what ``oarjax bench --against torch`` measured into the table of equal lengths of docs/speed.md.

python docs/make_bench.py FILE    takes a JSON document of the command, alone on the machine, into docs/data/bench.json
python docs/make_bench.py         writes the table from the numbers that are there

oarjax bench --only W1,W2,W3,W4 --against torch --json > FILE
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from oarjax.tools.study.page import between, table

HERE = Path(__file__).resolve().parent
PAGE, FILE = HERE / "speed.md", HERE / "data" / "bench.json"
EQUAL = ("<!-- bench, equal lengths -->", "<!-- end of bench, equal lengths -->")


def main() -> None:
    """Take a document, and write the table."""
    if files := sys.argv[1:]:
        git = ["git", "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.check_output(git, cwd=HERE, text=True).strip()
        measured = rounded(json.loads(Path(files[0]).read_text(encoding="utf-8")))
        kept = {"commit": commit, "date": time.strftime("%Y-%m-%d"), **measured}
        FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def written(page: str) -> str:
    """Return the page with its table written anew."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    return between(page, *EQUAL, f"{machine(document)}\n\n{equal_table(document)}")


def machine(document: dict[str, Any]) -> str:
    """Say what a document was measured on."""
    v, peak = document["versions"], document["peak"]
    ours, theirs = (f"{peak[side] / 1e9:.0f}" for side in ("flops", "torch"))
    return (
        f"{document['threads']} CPU threads, medians of {document['repeats']} warm runs (minimum to maximum), ratios "
        f"pair by pair (torch {v['torch'].partition('+')[0]}, transformers {v['transformers']}, jax {v['jax']}; "
        f"products of 1,024 x 1,024 reach {ours} GFLOP/s by XLA and {theirs} by torch; "
        f"load {document['load_average_before']:.1f} before, {document['load_average_after']:.1f} after; commit "
        f"{document['commit']}, [numbers](data/bench.json)):"
    )


def equal_table(document: dict[str, Any]) -> str:
    """Tabulate work on completions of equal length: ours, and torch's seconds over ours."""
    sizes = [f"{model['parameters'] / 1e6:.1f}M" for model in document["models"]]
    rows = [["work", *(part for size in sizes for part in (f"oarjax, {size}", "torch / oarjax"))]]
    for found in zip(*(model["rows"] for model in document["models"])):
        cells = [f"{found[0]['name']}, {found[0]['what']}"]
        for row in found:
            value, more = row["ours"]["value"]["median"], row["ours"].get("updates_per_sequence")
            shown = f"{value:,.0f} tokens/s" if row["unit"] == "tokens/s" else f"{value:.3g} {row['unit']}"
            cells += [shown + (f" = {more:.2f} updates" if more else ""), spread(row["speedup"], ".1f")]
        rows.append(cells)
    return table(rows)


def spread(values: dict[str, float], form: str) -> str:
    """Write a median with its range."""
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


def rounded(value: Any) -> Any:
    """Round numbers to five digits, and leave single runs out of spreads."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items() if name != "runs"}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
