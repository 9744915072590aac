"""The docs say what the code says: messages, links, the site's pages, the version."""

import json
import re
import runpy
import tomllib

import numpy as np
import pytest
import yaml
from conftest import ROOT

import oarjax
from oarjax.config.loading import load_config

DOCS = ROOT / "docs"
MADE = {"api.md", "config_reference.md", "commands.md", "contributing.md", "changelog.md", "tpu.md"}
MADE |= {"what_gets_credit.md", "compose_losses.md"}
"""Pages that docs/site_hooks.py makes when the site is built."""


def test_every_message_of_troubleshooting_is_one_of_ours():
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "oarjax").rglob("*.py")))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # literals that continue on the next line
    rows = [line for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    messages = [re.match(r"\| `([^`]+)` \|", row).group(1) for row in rows]
    assert len(messages) > 15
    assert [message for message in messages if message not in sources] == []


def test_links_lead_somewhere():
    pages = [*DOCS.glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if not target.startswith(("http", "mailto")) and target not in MADE and not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_navigation_names_pages_that_exist():
    def pages(tree):
        for entry in tree:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages(value)

    named = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(named) == len(set(named)) > 30
    assert set(named) <= {path.name for path in DOCS.glob("*.md")} | MADE


def test_the_moving_picture_is_drawn_from_the_records_beside_it():
    made = runpy.run_path(str(DOCS / "make_moving.py"))
    data = json.loads(made["DATA"].read_text(encoding="utf-8"))
    drawn = made["picture"](data)
    assert made["PICTURE"].read_text(encoding="utf-8") == drawn
    iterations = data["records"][-1]["iteration"]
    assert drawn.count('class="frame ') == iterations + 1
    before, after = (row["pass_at_1"] for row in data["summary"])
    assert f"pass@1 {before:.1%} to {after:.1%}" in drawn  # the last frame's line
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|<script|<image|@import|url\((?!#)", drawn)
    assert "prefers-reduced-motion: reduce" in drawn


def test_the_version_has_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"] == {"path": "oarjax/__init__.py"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == oarjax.__version__
    assert f"## {oarjax.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def within(page, first, last):
    return (DOCS / f"{page}.md").read_text(encoding="utf-8").split(first)[1].split(last)[0].strip()


def test_tables_of_gradients_are_computed_from_their_data():
    made = runpy.run_path(str(DOCS / "make_deciding.py"))
    assert within("gradients", made["FIRST"], made["LAST"]) == made["tables"]().strip()


def test_what_is_said_of_the_second_race_is_computed_from_its_records():
    """Its tables, the one of signed values, and every interval and detectable effect that a sentence names."""
    made = runpy.run_path(str(DOCS / "make_race2.py"))
    told = made["tasks"]()
    tables = within("race2", made["FIRST"], made["LAST"])
    assert tables == made["tables"](told).strip()
    assert within("credit", *made["OF_CREDIT"]) == made["signed_table"](told).strip()

    def named(text, *patterns):
        return {tuple(map(float, np.atleast_1d(found))) for p in patterns for found in re.findall(p, text)}

    number = r"(\d*\.?\d+)"
    interval = rf"{number}%? ±{number}"
    prose = (DOCS / "race2.md").read_text(encoding="utf-8").replace(tables, "")
    prose += (DOCS / "results.md").read_text(encoding="utf-8").split("**A [second race]")[1].split("\n\n")[0]
    assert len(named(prose, interval)) > 40
    assert named(prose, interval) <= named(tables, interval)
    detected = named(prose, rf"{number} detected", rf"{number} could be detected")
    assert len(detected) > 5
    assert detected <= named(tables, rf"detects {number}", rf"detect {number} points")


@pytest.mark.parametrize(
    ("script", "name", "page"),
    [
        ("make_power", "appendix", "results_appendix"),
        ("make_power", "results", "results"),
        ("make_bench", "written", "speed"),
        ("make_bench", "steps", "cost"),
        ("make_profile", "written", "speed"),
    ],
)
def test_tables_within_a_page_are_computed_from_their_data(script, name, page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / f"{script}.py"))[name](text) == text


def test_the_papers_config_is_the_7b_one_with_the_released_loss():
    """What is the paper's or its code's differs from our config for the same policy and slice; all else is the same."""
    ours, paper = (load_config(ROOT / f"configs/{name}qwen2.5-7b_v5e-64.yaml") for name in ("", "paper_"))
    assert (paper.loss.aggregation, paper.loss.clip_low, paper.loss.clip_high) == ("grpo", 0.2, 0.2)
    assert (paper.loss.kl_beta, paper.loss.entropy_bonus) == (0, 0)
    credit = paper.credit
    assert (credit.estimator, credit.sigma, credit.draws, credit.gate.tau, credit.gate.boost) == (
        "noisy",
        1e-3,
        1,
        0.4,
        2,
    )
    assert (credit.probe.warmup_mode, credit.probe.mode) == ("last", "answer_mean")
    same = ("policy", "data", "rollout", "optim", "update", "advantage", "grading")
    assert [name for name in same if getattr(ours, name) != getattr(paper, name)] == []
