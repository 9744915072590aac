"""The README says only what runs."""

import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from conftest import CACHE, ROOT

import oarjax
from oarjax.config.loading import load_config
from oarjax.credit.registry import METHODS
from oarjax.report.files import read_metrics
from oarjax.tools.study.config import load_study, make_plan

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


def block(words: str, language: str = "python") -> str:
    """Return the README's only code block that holds these words."""
    (found,) = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.S) if words in b]
    return found


def test_configs_named_in_the_readme_are_shipped():
    page = (ROOT / "docs/for_tpu.md").read_text()
    table = page[page.index("| policy | slice |") :].split("\n\n")[0]
    commands = re.findall(r"^(?:.*&& )?oarjax (?:train|plan) (\S+)", README, re.M)
    named = {*re.findall(r"`([\w.-]+)`", table), *commands}
    assert {"demo", "qwen2.5-7b_v5e-64"} <= named <= {p.stem for p in CONFIGS}


def test_the_example_keeps_the_mass_and_moves_it():
    names: dict = {}
    exec(block("group_advantages"), names)
    out, advantages = np.asarray(names["token_advantages"]), np.asarray(names["advantages"])
    np.testing.assert_allclose(out.sum(1), advantages * 4, rtol=1e-5)  # GRPO's sum over the four tokens
    assert (np.abs(out[:, 2]) > np.abs(out[:, 0])).all()  # the important token got more


def test_functions_in_the_table_are_public():
    page = (ROOT / "docs/for_researchers.md").read_text()
    table = page[page.index("| step | function |") :].split("\n\n")[0]
    names = {n for row in table.splitlines() for n in re.findall(r"`(\w+)`", row)}
    assert len(names) > 15
    assert names <= set(oarjax.__all__)


def test_methods_in_the_table_are_those_of_the_config():
    page = (ROOT / "docs/credit.md").read_text()
    table = page[page.index("| method | signals |") :].split("\n\n")[0]
    named = {
        n for row in table.splitlines() if row.startswith("| `") for n in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == set(METHODS)


@pytest.mark.slow
def test_the_reward_trains_the_demo_by_the_command_beside_it(tmp_path):
    (tmp_path / "my_rewards.py").write_text(block("@reward"))
    command = shlex.split(block("my_rewards.py", "bash").replace("\\\n", " "))
    assert command[:3] == ["oarjax", "train", "demo"]
    tiny = ["policy.path=builtin:arithmetic", "data.eval=null", "iterations=1", "rollout.prompts=2", "eval.every=0"]
    tiny += ["credit.method=uniform", "report.html=false", "export.folder=null", f"compilation_cache={CACHE}"]
    tiny += ["update.microbatch=16"]
    done = subprocess.run(
        [sys.executable, "-m", "oarjax.cli", *command[1:], *tiny],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (record,) = read_metrics(tmp_path / "runs/brief/metrics.jsonl")
    assert 0 <= record["reward/brief"] <= 1


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 150
