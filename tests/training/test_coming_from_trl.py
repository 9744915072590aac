"""The oarjax half of docs/coming_from_trl.md runs, and its tables name fields and metrics that exist."""

import json
import re
import sys

import pyarrow.parquet as parquet
import pytest
import yaml
from conftest import CACHE, ROOT

from oarjax.cli import main
from oarjax.config.loading import parse_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.report.fields import field_rows

PAGE = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")


def block(first_line):
    text = PAGE[PAGE.index(first_line) :]
    return text[: text.index("```")]


def our_names(heading, pattern):
    """Names in the second column of the table below a heading."""
    section = PAGE[PAGE.index(heading) :].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in section.splitlines() if row.startswith("|")]
    return [name for row in rows for name in re.findall(pattern, row)]


@pytest.mark.slow
def test_the_run_of_the_page(tmp_path, monkeypatch, capsys):
    """Its config and rewards as they stand, on a tiny policy and its characters, for two iterations."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(block("# my_rewards.py"))
    policy = write_builtin_policy(tmp_path / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    rows = [{"question": f"{n}+1=", "answer": f"{n}+1={n + 1}#### {n + 1}"} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = yaml.safe_load(block("# gsm8k.yaml"))
    parse_config(tree)
    tree |= {"iterations": 2, "device": "cpu", "compilation_cache": str(CACHE), "export": {"folder": None}}
    tree["policy"] = {"path": str(policy)}
    tree["data"] |= {
        "template": "plain",
        "prompt_format": "{prompt}",
        "max_prompt": 24,
        "train": {"source": "rows.jsonl"},
    }
    tree["rollout"] |= {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 8, "completion_bucket": 12}
    tree["grading"]["workers"] = 1
    tree["report"] |= {"to": ["jsonl"], "groups": 1, "html": False}
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(sys, "argv", ["oarjax", "train", "gsm8k.yaml"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (None, 0), capsys.readouterr().err
    folder = tmp_path / "runs" / "gsm8k"
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == 2
    assert logged[0]["reward/brief"] == 1  # within 12 tokens
    assert logged[0]["reward"] == pytest.approx(logged[0]["reward/correct"] + 0.1)
    groups = parquet.read_table(folder / "groups" / "000002.parquet").to_pydict()
    assert groups["group"] == [row // 4 for row in range(16)]
    # Every metric that the page names without a condition is there.
    table = PAGE[PAGE.index("## Metrics") :]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("|")
        for name in re.findall(r"`([\w/]+)`", row.split("|")[2])
    }
    optional = {"kl", "sampler_weight", "sampler_masked", "drifted", "sampler_gap", "clip_low", "clip_high", "entropy"}
    optional |= {"grad_norm", "loss", "skipped"}  # of an update; two iterations of equal rewards have none
    assert {name.replace("NAME", "brief") for name in named} - optional - {"verdict/brief"} <= logged[0].keys()


def test_the_fields_of_the_page_exist():
    table = PAGE[PAGE.index("## Settings") : PAGE.index("## Metrics")]
    fields = {row.path for row in field_rows()}
    known = fields | {field.rpartition(".")[0] for field in fields}  # and their sections
    named = [
        n
        for row in table.splitlines()
        if row.startswith("|")
        for n in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row.split("|")[2])
    ]
    assert len(named) > 20
    assert [name for name in named if name not in known and not name.endswith(".rewards")] == []
