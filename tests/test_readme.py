"""The README says only what runs."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import oarjax
from oarjax.config import load_config
from oarjax.credit.registry import METHODS
from oarjax.grading import rewards
from oarjax.study.config import load_study, make_plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_configs_are_valid_and_say_how_to_run_them(path):
    make_plan(load_study(path)) if path.name.startswith("study_") else load_config(path)
    assert path.read_text().startswith("# ")


def test_files_named_in_prose_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "tpu").glob("*.md")]
    sources = [path for folder in ("oarjax", "tests", "docs") for path in (ROOT / folder).rglob("*.py")]
    name = re.compile(r"(?<![\w/.-])(?:oarjax|tests|docs|tpu|notebooks)/[\w./-]+\.(?:py|md|ipynb|sh|json)\b")
    missing = {
        f"{path.relative_to(ROOT)}: {file}"
        for path in pages + sources
        for file in name.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / file).exists()
    }
    assert missing == set()


def test_configs_named_in_the_readme_exist():
    named = set(re.findall(r"configs/[\w.-]+\.yaml", README))
    assert named
    assert named <= {f"configs/{p.name}" for p in CONFIGS}


def test_the_example_keeps_the_mass_and_moves_it():
    blocks = [b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "import oarjax" in b]
    assert len(blocks) == 1
    names: dict = {}
    exec(blocks[0], names)
    out, advantages = np.asarray(names["token_advantages"]), np.asarray(names["advantages"])
    np.testing.assert_allclose(out.sum(1), advantages * 4, rtol=1e-5)  # GRPO's sum over the four tokens
    assert (np.abs(out[:, 2]) > np.abs(out[:, 0])).all()  # the important token got more


def test_functions_in_the_table_are_public():
    table = README[README.index("## 3. In your own loss") :]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    names = {n for row in rows for n in re.findall(r"`(\w+)`", row)}
    assert len(names) > 15
    assert names <= set(oarjax.__all__)


def test_methods_in_the_table_are_those_of_the_config():
    page = (ROOT / "docs/credit.md").read_text()
    table = page[page.index("| method | signals |") :].split("\n\n")[0]
    named = {
        n for row in table.splitlines() if row.startswith("| `") for n in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == set(METHODS)


def test_the_reward_gives_one_for_a_short_completion(monkeypatch):
    monkeypatch.setattr(rewards, "_registry", dict(rewards._registry))
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "@reward" in b]
    exec(block, names := {})
    sample = rewards.Sample(prompt="2+2=", completion="4", answer="4", ended=True, tokens=1)
    assert names["brief"](sample) == 1.0
    assert names["brief"](dataclasses.replace(sample, ended=False)) == 0.0


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 150
