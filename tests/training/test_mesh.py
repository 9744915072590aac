"""The same command on eight virtual devices and on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import virtual_devices

from oarjax.report.files import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = [
    "sft.steps=3",
    "sft.batch=16",
    "sft.microbatch=16",
    "sft.data.limit=64",
    "data.train.limit=64",
    "data.eval.limit=16",
    "iterations=2",
    "rollout.prompts=8",
    "rollout.group_size=4",
    "rollout.max_new=16",
    "update.microbatch=8",
    "eval.batch=16",
    "report.html=false",
]


REWARD = """
from oarjax.grading.rewards import reward


@reward("even_length")
def even_length(sample):
    return float(sample.tokens % 2 == 0)
"""


def train(folder: Path, devices: int, *overrides: str) -> tuple[list[dict], str]:
    plugin = folder.with_suffix(".py")
    plugin.write_text(REWARD)
    reward = ["grading.rewards=[{name: even_length}]", f"grading.plugins=[{plugin}]"]
    command = [sys.executable, "-m", "oarjax.cli", "train", str(ROOT / "configs/demo.yaml")]
    command += [*SMALL, *reward, *overrides]
    done = subprocess.run(
        [*command, f"run_dir={folder}"],
        env=os.environ | {"XLA_FLAGS": virtual_devices(devices), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(folder / "metrics.jsonl"), (folder / "completions.jsonl").read_text()


@pytest.mark.slow
def test_eight_devices_train_as_one_does(tmp_path):
    one, texts = train(tmp_path / "one", 1)
    eight, same_texts = train(tmp_path / "eight", 8, "mesh={data: 2, fsdp: 2, tensor: 2}")
    assert len(one) == len(eight) == 3
    for a, b in zip(one[1:], eight[1:]):
        assert (a["reward"], a["length"], a["rows_used"]) == (b["reward"], b["length"], b["rows_used"])
        assert a["rows_used"] > 0
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["entropy"] == pytest.approx(b["entropy"], rel=1e-5)
    drawn = [[json.loads(line)["completion"] for line in t.splitlines()] for t in (texts, same_texts)]
    assert drawn[0] == drawn[1]


def test_a_mesh_that_does_not_fit_is_refused(tmp_path):
    command = [sys.executable, "-m", "oarjax.cli", "train", str(ROOT / "configs/demo.yaml"), "mesh.tensor=3"]
    done = subprocess.run(
        [*command, f"run_dir={tmp_path}"],
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "does not multiply to the 1 devices here" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
