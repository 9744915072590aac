"""``oarjax accept``: its verdicts, a fault in every stage, workers that hang or die, and the whole on this CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, TESTS, virtual_devices
from hostile_page import EVIL, Reader

from oarjax.storage.checkpoint import Checkpoints
from oarjax.tools.accept import command, device, kernels, numerics, programs, runs
from oarjax.tools.accept.check import at_least, at_most, holds, not_applicable
from oarjax.tools.accept.page import write_accept_page
from oarjax.tools.accept.setting import Peaks, Setting, peaks_of
from oarjax.tools.accept.stages import STAGES, Stage, StageError, chosen, state_of


def test_bounds():
    assert at_least("x", 2.0, 2.0).state == at_most("x", 2.0, 2.0).state == "ok"
    assert at_least("x", 1.9, 2.0).state == at_most("x", 2.1, 2.0).state == "failed"
    assert at_most("x", -math.inf, 2.0).state == at_least("x", math.nan, 2.0).state == "failed"
    assert at_least("x", 3.0, 2.0).ratio == 1.5
    assert state_of([], None) == state_of([holds("x", True)], "boom") == "failed"
    assert state_of([not_applicable("x", "cpu")], None) == "not applicable"
    assert state_of([not_applicable("x", "cpu"), holds("y", True)], None) == "ok"


def test_stages_by_name():
    assert [stage.name for stage in chosen("phases, facts")] == ["facts", "phases"]
    assert chosen("") == STAGES
    with pytest.raises(StageError, match="warp is no stage; accepted: facts"):
        chosen("warp")


def test_peaks_of_devices():
    assert peaks_of("TPU v5 lite") == Peaks(197e12, 819e9, 45e9)
    assert peaks_of("NVIDIA H200") == Peaks(989e12, 4800e9, None)
    assert peaks_of("cpu") == Peaks(None, None, None)


# A fault in every stage --------------------------------------------------------------------------------------------


def full_disk(patch):
    patch.setattr(device.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))


def wrong_product(patch):
    patch.setattr(device, "multiplied", lambda x, y: (x @ y) * 1.05)


def wrong_kernel(patch):
    right = kernels.splash
    patch.setattr(kernels, "splash", lambda q, k, v, valid, **more: right(q, k, v, jnp.ones_like(valid), **more))


def biased_draw(patch):
    patch.setattr(numerics, "VOCABULARY", 4096)  # the fault shows in any vocabulary
    right = numerics.draw_token

    def biased(logits, uniforms, **more):
        return right(logits, uniforms**1.3, **more)

    patch.setattr(numerics, "draw_token", biased)


def forgetful_cache(patch):
    """Pretend that the second compilation finds nothing in the cache."""
    calls = iter([(9.0, 5, {"score": 1}), (9.0, 5, {"score": 1})])
    patch.setattr(programs, "_compile", lambda s: next(calls))


def cold_process(patch):
    patch.setattr(programs, "_compile", lambda s: (9.0, 5, {"score": 1}))


def not_a_number(patch):
    patch.setattr(programs, "iterate", lambda state, *_, **__: (state, SimpleNamespace(metrics={"loss": np.nan})))
    patch.setattr(programs, "_rate_of_products", lambda: 1e10)


def train_nothing(cfg, console, stop, seen=None) -> None:
    """Write what a run would, with a reward that falls."""
    folder = runs.Path(cfg.run_dir)
    (folder / "export").mkdir(parents=True, exist_ok=True)
    (folder / "export" / "model.safetensors").write_text(str(folder))
    records = [{"iteration": n, "reward": 1 / n, "seconds/total": 1.0} for n in range(1, 21)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    for _ in records:
        if seen is not None:
            seen()


def no_learning(patch):
    patch.setattr(runs, "train_once", train_nothing)


def other_export(patch):
    patch.setattr(runs, "train_once", train_nothing)
    patch.setattr(runs.os, "kill", lambda *_: (_ for _ in ()).throw(runs.Stopped()))


def altered_arrays(patch):
    right = Checkpoints.restore

    def restore(self, iteration, like):
        state, record = right(self, iteration, like)
        return runs.TrainState(state.step, {"w": state.params["w"] + 1}, state.opt_state, state.key), record

    patch.setattr(Checkpoints, "restore", restore)


FAULTS: dict[str, tuple[Any, str]] = {  # stage -> fault, the check that notices it
    "facts": (full_disk, "free disk"),
    "peaks": (wrong_product, "error of bfloat16 products"),
    "attention": (wrong_kernel, "forward"),
    "numerics": (biased_draw, "draws of"),
    "compilation": (forgetful_cache, "programs compiled again"),
    "next_process": (cold_process, "programs compiled again"),
    "phases": (not_a_number, "every metric is finite"),
    "iterations": (no_learning, "the reward rises"),
    "resume": (other_export, "both exports are equal"),
    "storage": (altered_arrays, "the restored state"),
}


@pytest.fixture
def setting(tmp_path):
    folder = tmp_path / "files"
    (folder / "run" / "export").mkdir(parents=True)
    (folder / "run" / "export" / "model.safetensors").write_text("another")
    (folder / programs.FILE).write_text('{"cold": 9.0}')
    return Setting(folder, None, "cpu", Peaks(None, None, None))


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_fault_turns_its_stage_red(stage, setting, monkeypatch):
    fault, name = FAULTS[stage.name]
    fault(monkeypatch)
    checks = stage.load()(setting)
    assert state_of(checks, None) == "failed"
    assert [check.name for check in checks if check.state == "failed" and name in check.name], checks


def test_a_device_below_its_peak_is_red(setting):
    """What is not applicable on a CPU is a bound where the peak is known."""
    slow = device.peaks(Setting(setting.folder, None, "cpu", Peaks(1e18, 1e18, 1e18)))
    assert [check.name for check in slow if check.state == "failed"] == [
        "bfloat16 products, of peak",
        "copies in memory, of peak",
    ]


# The command -------------------------------------------------------------------------------------------------------


WORKER = """
import json, sys, time
sys.stdin.readline()
for line in sys.stdin:
    if "hang" in line: time.sleep(600)
    if "die" in line: sys.exit(3)
    check = {"name": "x", "state": "ok", "value": 1, "unit": "", "bound": None, "ratio": None, "note": ""}
    print(json.dumps({"checks": [check], "error": None}), flush=True)
"""


def test_a_stage_that_hangs_or_dies_is_red_and_the_next_one_runs(tmp_path, monkeypatch):
    start = subprocess.Popen
    monkeypatch.setattr(command.subprocess, "Popen", lambda _, **more: start([sys.executable, "-c", WORKER], **more))
    stages = [Stage(name, name, "", 60) for name in ("one", "hang", "two", "die", "three")]
    with command.Workers({}, tmp_path / "log") as workers:
        results = [workers.run(s, timeout=1.0 if s.name == "hang" else 60.0) for s in stages]
    assert [r["state"] for r in results] == ["ok", "failed", "ok", "failed", "ok"]
    assert results[1]["error"] == "not done within 1 s"
    assert "the process ended" in results[3]["error"]


def test_the_page_shows_everything_and_runs_nothing(tmp_path):
    check = at_most(EVIL, 2.0, 1.0, note=EVIL)._asdict()
    results = [
        {"stage": "x", "title": EVIL, "state": "failed", "seconds": 1.0, "checks": [check], "error": EVIL},
        {"stage": "y", "title": "y", "state": "not applicable", "seconds": 1.0, "checks": [], "error": None},
    ]
    write_accept_page(tmp_path / "report.html", command.document(results))
    page = Reader((tmp_path / "report.html").read_text())
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "2 stages: 1 failed, 1 not applicable" in page.text
    assert not [value for _, name, value in page.attributes if name in ("src", "onload")]


ALLOWED = ("peak", "reduce", "products", "copies", "time", "bucket", "estimated", "memory", "against plan")
"""What may be not applicable on a CPU: thresholds of peaks, kernels' times, and buckets that are not there."""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_whole_on_this_cpu(devices, tmp_path):
    """Every stage is green, on one device or on eight; what is not applicable is what a CPU cannot be asked."""
    wide = {"facts", "peaks", "phases", "storage"}
    names = [stage.name for stage in STAGES if (stage.name in wide) == (devices == 8)]
    stages = ["--only", ",".join(names)]
    environment = {"XLA_FLAGS": virtual_devices(devices)}
    done = subprocess.run(
        [sys.executable, "-m", "oarjax.cli", "accept", "--out", "report.json", "--device", "cpu", *stages],
        cwd=tmp_path,
        env=dict(os.environ) | environment | {"PYTHONPATH": f"{ROOT}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (tmp_path / "report.json").is_file(), done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    red = [(s["stage"], s["error"], [c for c in s["checks"] if c["state"] == "failed"]) for s in report["stages"]]
    assert report["state"] == "ok", [stage for stage in red if stage[1] or stage[2]]
    assert done.returncode == 0
    assert [stage["stage"] for stage in report["stages"]] == names
    assert f"{len(names)} stages: {len(names)} ok" in (tmp_path / "report.html").read_text()
    skipped = [c["name"] for s in report["stages"] for c in s["checks"] if c["state"] == "not applicable"]
    assert not [name for name in skipped if not any(word in name for word in ALLOWED)]
    if devices == 8:
        assert any("all-reduce over tensor adds up" in c["name"] for s in report["stages"] for c in s["checks"])
