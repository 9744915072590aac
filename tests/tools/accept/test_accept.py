"""``oarjax accept``: its verdicts, a fault in every stage, workers that hang or die, and the whole on this CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, TESTS, virtual_devices
from hostile_page import EVIL, Reader
from jax.sharding import Mesh
from typer.testing import CliRunner

from oarjax.cli import app
from oarjax.models import delta_net
from oarjax.storage.checkpoint import Checkpoints
from oarjax.tools.accept import command, device, kernels, numerics, policies, programs, runs
from oarjax.tools.accept.check import at_least, at_most, fast, holds, not_applicable, quick
from oarjax.tools.accept.page import write_accept_page
from oarjax.tools.accept.setting import Peaks, StageSetting, peaks_of
from oarjax.tools.accept.stages import STAGES, Stage, StageError, chosen, state_of


def test_bounds():
    assert at_least("x", 2.0, 2.0).state == at_most("x", 2.0, 2.0).state == "ok"
    assert at_least("x", 1.9, 2.0).state == at_most("x", 2.1, 2.0).state == "failed"
    assert at_most("x", -math.inf, 2.0).state == at_least("x", math.nan, 2.0).state == "failed"
    assert at_least("x", 3.0, 2.0).ratio == 1.5
    assert state_of([], None) == state_of([holds("x", True)], "boom") == "failed"
    assert state_of([not_applicable("x", "cpu")], None) == "not applicable"
    assert state_of([not_applicable("x", "cpu"), holds("y", True)], None) == "ok"


def test_a_speed_near_its_bound_is_slow_and_no_failure():
    assert [fast("x", value, 1.0).state for value in (1.0, 0.99, 0.6, 0.59, math.nan)] == [
        "ok",
        "slow",
        "slow",
        "failed",
        "failed",
    ]
    assert [quick("x", value, 0.9).state for value in (0.9, 1.0, 1.5, 1.51)] == ["ok", "slow", "slow", "failed"]
    assert state_of([holds("x", True), fast("y", 0.7, 1.0)], None) == "slow"
    results = [
        {"stage": name, "title": name, "state": check.state, "seconds": 1.0, "checks": [check._asdict()], "error": None}
        for name, check in (("a", fast("x", 0.7, 1.0)), ("b", fast("y", 0.1, 1.0)), ("c", fast("z", 2.0, 1.0)))
    ]
    assert command.document(results[:1])["state"] == "slow"
    report = command.document(results)
    assert report["summary"] == "3 stages: 1 failed, 1 slow, 1 ok"
    assert [(each["state"], each["stage"]) for each in report["notable"]] == [("failed", "b"), ("slow", "a")]


def test_stages_by_name():
    assert [stage.name for stage in chosen("phases, facts")] == ["facts", "phases"]
    assert chosen("") == STAGES
    with pytest.raises(StageError, match="unknown stage warp; accepted: facts"):
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
    patch.setattr(kernels, "SMALL", kernels.SMALL[:1])  # the fault shows at any width, and in this kernel alone
    patch.setattr(kernels, "_decode", lambda *_, **__: [])
    right = kernels.splash
    patch.setattr(kernels, "splash", lambda q, k, v, valid, **more: right(q, k, v, jnp.ones_like(valid), **more))


def biased_draw(patch):
    patch.setattr(numerics, "VOCABULARY", 4096)  # the fault shows in any vocabulary
    right = numerics.draw_token

    def biased(logits, uniforms, **more):
        return right(logits, uniforms**1.3, **more)

    patch.setattr(numerics, "draw_token", biased)


def wrong_gradient(patch):
    patch.setattr(policies, "KINDS", policies.KINDS[:1])
    right, factors = policies.scored, iter((1.01, 1.0))  # the device, then the CPU

    def off(*given):
        logps, gradient = right(*given)
        factor = next(factors)
        return logps, policies.jax.tree.map(lambda x: x * factor, gradient)

    patch.setattr(policies, "scored", off)


def forgetful_state(patch):
    """Let the state of delta nets lose its decay where tokens are decoded one by one."""
    right = delta_net.recurrent
    patch.setattr(delta_net, "recurrent", lambda q, k, v, decay, *rest: right(q, k, v, 0 * decay, *rest))


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
    "policies": (wrong_gradient, "experts: gradients"),
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
    return StageSetting(folder, None, "cpu", Peaks(None, None, None))


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_fault_turns_its_stage_red(stage, setting, monkeypatch):
    fault, name = FAULTS[stage.name]
    fault(monkeypatch)
    checks = stage.load()(setting)
    assert state_of(checks, None) == "failed"
    assert [check.name for check in checks if check.state == "failed" and name in check.name], checks


@pytest.mark.slow
def test_a_wrong_decode_of_delta_nets_is_red(setting, monkeypatch):
    """Without the fault it is green: ``test_the_whole_on_this_cpu``."""
    monkeypatch.setattr(policies, "KINDS", [kind for kind in policies.KINDS if kind.name == "delta nets"])
    monkeypatch.setattr(policies, "scored", lambda *_: (np.zeros(1), [np.zeros(1)]))  # is not what decodes
    forgetful_state(monkeypatch)
    failed = [check.name for check in policies.policies(setting) if check.state == "failed"]
    assert failed == ["delta nets: sampler against scorer"]


def test_a_device_below_its_peak_is_red(setting):
    """What is not applicable on a CPU is a bound where the peak is known."""
    slow = device.peaks(StageSetting(setting.folder, None, "cpu", Peaks(1e18, 1e18, 1e18)))
    assert [check.name for check in slow if check.state == "failed"] == [
        "bfloat16 products, of what can be reached",
        "copies in memory, of what can be reached",
    ]


def test_a_gpu_compares_exports_where_its_sums_have_an_order(setting, monkeypatch):
    other_export(monkeypatch)
    gpu = StageSetting(setting.folder, None, "gpu", setting.peaks)
    name = "both exports are equal"
    monkeypatch.setenv("XLA_FLAGS", "")
    free = {check.name: check for check in runs.resume(gpu)}
    assert (free[name].state, free[name].value) == ("not applicable", False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exclude_nondeterministic_ops=true")
    assert {check.name: check.state for check in runs.resume(gpu)}[name] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocked", "cudnn"])
def test_attention_of_gpus_is_compared(kind, setting, monkeypatch):
    """Here XLA takes the place of cuDNN's kernels, and gets their mask."""
    monkeypatch.setattr("oarjax.kernels.splash.CUDNN", "xla")
    monkeypatch.setattr(kernels, "ON_GPUS", ((kind, 64, 130),))
    gpu = StageSetting(setting.folder, None, "gpu", setting.peaks)
    compared = [check for check in kernels.attention(gpu) if check.state != "measured"]
    assert [check.state for check in compared] == ["ok"] * 3, compared
    right = kernels.splash
    monkeypatch.setattr(kernels, "splash", lambda q, k, v, valid, **more: right(q, k, 1.1 * v, valid, **more))
    # The forward pass, which both derivatives contain, is enough to see a fault by.
    monkeypatch.setattr(kernels, "_three", lambda f, inputs, *_: dict.fromkeys(kernels.ERRORS, (jax.jit(f)(*inputs),)))
    assert "failed" in [check.state for check in kernels.attention(gpu)]


@pytest.mark.slow
def test_rounding_to_bfloat16_lies_below_its_bound():
    small = numerics.small_policy()
    exact, rounded = (numerics.logps_of(small, numerics.scorer(small, d), jax.devices()[0]) for d in numerics.GAP)
    check = numerics.rounded(rounded - exact)
    assert (check.state, round(check.value, 3)) == ("ok", 0.049)


EIGHT = """
import os, sys
from types import SimpleNamespace

if "oarjax.tools.accept.worker" in sys.orig_argv:
    from oarjax.tools.accept import device, setting
    from oarjax.tools.accept.setting import Peaks

    measure, place, unsound = device.on_device, device.place_of, "UNSOUND" in os.environ
    chips = [SimpleNamespace(id=n, coords=(n % 2, n // 2, 0)) for n in range(8)]
    device.place_of = lambda d: place(chips[d.id])
    device.coordinates = lambda d: chips[d.id].coords
    device.TPU_KINDS = {"cpu": "v5e"}
    setting.peaks_of = lambda kind: Peaks(1.0, 1.0, 1.0)  # which a virtual device reaches by far

    def on_device(s, d):  # the machine's load is no fault of a device
        digest, _ = measure(s, d)
        return ("other" if unsound and d.id == 3 else digest), (9.0 if unsound and d.id == 5 else 1.0)

    hosts = device.between_hosts
    device.on_device, device.between_hosts = on_device, lambda s, _: hosts(s, device.jax.devices()[::4])
"""
"""Run in the worker: virtual devices become the chips of a v5e-8 on two hosts, with a data sheet that they exceed."""


def accepted(folder, stages, patch, **environment):
    """Run ``oarjax accept`` on eight virtual chips; return its exit code, report and output."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(EIGHT)
    patch.chdir(folder)
    environment |= {"XLA_FLAGS": virtual_devices(8), "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{folder}:{ROOT}"}
    for name, value in environment.items():
        patch.setenv(name, value)
    done = CliRunner().invoke(app, ["accept", "--device", "cpu", "--only", ",".join(stages)])
    assert (folder / "report.json").is_file(), done.output
    return done.exit_code, json.loads((folder / "report.json").read_text()), done.stdout


ALLOWED = ("peak", "reduce", "products", "copies", "time", "bucket", "estimated", "memory", "against plan", "slowest")
ALLOWED += ("hosts", "forward and backward", "equal results on every device")
"""What may be not applicable on a CPU: thresholds of peaks, kernels' times, buckets and devices that are not there."""
WIDE = ("phases", "storage")
"""Stages that are run on eight devices; the others are run on one."""


def green(folder, report, names):
    """All stages of these names are green; what is not applicable is what a CPU cannot be asked."""
    red = [(s["stage"], s["error"], [c for c in s["checks"] if c["state"] == "failed"]) for s in report["stages"]]
    assert report["state"] == "ok", [stage for stage in red if stage[1] or stage[2]]
    assert [stage["stage"] for stage in report["stages"]] == names
    assert f"{len(names)} stages: {len(names)} ok" in (folder / "report.html").read_text()
    skipped = [c["name"] for s in report["stages"] for c in s["checks"] if c["state"] == "not applicable"]
    assert not [name for name in skipped if not any(word in name for word in ALLOWED)]


@pytest.mark.slow
def test_healthy_chips_are_accepted_and_a_wrong_and_a_slow_one_are_named(tmp_path, monkeypatch):
    """All-reduces are compared with the links of their axis: a pair has one, a block of 2 x 4 closes a ring."""
    names = ["facts", "peaks", *WIDE]
    code, report, _ = accepted(tmp_path / "healthy", names, monkeypatch)
    assert (code, report["notable"]) == (0, [])
    green(tmp_path / "healthy", report, names)
    facts, peaks = ({c["name"]: c for c in stage["checks"]} for stage in report["stages"][:2])
    assert facts["machine"]["value"]
    assert facts["time"]["value"].startswith("20")
    assert "device 6 at 0,3,0; device 7 at 1,3,0" in facts["devices of this host"]["value"]
    reached = {name: check["note"] for name, check in peaks.items() if name.endswith("of what can be reached")}
    assert all(peaks[name]["state"] == "ok" for name in reached)
    assert len(reached) == 5  # products, copies, and all-reduces over both axes and between hosts
    assert peaks["equal results on every device"]["state"] == "ok"
    assert all(peaks[f"all-reduce over {axis} adds up"]["state"] == "ok" for axis in ("tensor", "hosts"))

    code, report, said = accepted(tmp_path / "unsound", names[:2], monkeypatch, UNSOUND="1")
    assert (code, report["state"]) == (1, "failed")
    wrong, slow = (each["text"] for each in report["notable"])
    assert wrong == "equal results on every device: no, bound yes; others on device 3 at 1,1,0"
    assert slow == "slowest device over the median: 9, bound 1.1; device 5 at 1,2,0"
    assert "others on device 3 at 1,1,0" in " ".join(said.split())


@dataclass(frozen=True)
class Chip:
    """Stand for a chip of a v5e-8, 2 x 4."""

    id: int
    slice_index: int = 0
    device_kind: str = "TPU v5 lite"

    @property
    def coords(self) -> tuple[int, int, int]:
        return (self.id % 2, self.id // 2, 0)


def test_a_ring_has_two_links_and_a_line_one():
    """The whole block is a ring, a row of four a line."""
    chips = np.asarray([Chip(i) for i in range(8)], dtype=object)
    whole, rows = Mesh(chips, ("fsdp",)), Mesh(chips.reshape(4, 2), ("fsdp", "tensor"))
    found = [device.ways_over(*each) for each in ((whole, "fsdp"), (rows, "fsdp"), (rows, "tensor"))]
    assert [ways.ring for ways in found if ways] == [2, 1, 1]
    apart = np.asarray([Chip(i, slice_index=i // 4) for i in range(8)], dtype=object)
    assert device.ways_over(Mesh(apart, ("fsdp",)), "fsdp") is None


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
    class Impatient(subprocess.Popen):
        """Wait a moment, not seconds, for a worker to end by itself before it is killed."""

        def wait(self, timeout=None):
            return super().wait(timeout and 0.2)

    start = partial(Impatient, [sys.executable, "-c", WORKER])
    monkeypatch.setattr(command.subprocess, "Popen", lambda _, **more: start(**more))
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


FEW = """
import sys

if "oarjax.tools.accept.worker" in sys.orig_argv:
    from oarjax.tools.accept import kernels, runs

    kernels.SMALL, runs.ITERATIONS = kernels.SMALL[:1], 10
"""
"""Run in the worker: one width of heads and ten iterations go the same way as two and twenty."""


@pytest.mark.slow
def test_the_whole_on_this_cpu(tmp_path):
    """Every stage is green; the ones that are not here are so in the test of healthy chips."""
    names = [stage.name for stage in STAGES if stage.name not in WIDE]
    (tmp_path / "sitecustomize.py").write_text(FEW)
    stages = ["--out", "report.json", "--device", "cpu", "--only", ",".join(names)]
    done = subprocess.run(
        [sys.executable, "-m", "oarjax.cli", "accept", *stages],
        cwd=tmp_path,
        env=dict(os.environ) | {"XLA_FLAGS": virtual_devices(1), "PYTHONPATH": f"{tmp_path}:{ROOT}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (tmp_path / "report.json").is_file(), done.stderr[-3000:]
    green(tmp_path, report := json.loads((tmp_path / "report.json").read_text()), names)
    assert done.returncode == 0
    (count,) = (c["value"] for s in report["stages"] for c in s["checks"] if c["name"] == "all iterations are recorded")
    assert count == 10  # the worker ran the few
