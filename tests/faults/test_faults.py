"""Whole runs that are killed, damaged, starved of disk or told to stop end as the run that nothing happened to.

``pytest -m slow tests/faults``, some three minutes of one core once programs are compiled. docs/reliability.md has the
results. Seeds are printed; OARJAX_FAULTS_SEED and OARJAX_FAULTS_KILLS choose others.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import micro
import numpy as np
import pytest
import starts
from conftest import virtual_devices
from safetensors.numpy import load_file

from oarjax.report.files import read_metrics
from oarjax.storage.manifest import damage

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("OARJAX_FAULTS_SEED", "0"))
KILLS = int(os.environ.get("OARJAX_FAULTS_KILLS", "4"))
OURS = re.compile(r'File "[^"]*/oarjax/(\w+/)*\w+\.py"')
"""A frame of this package in a traceback. Threads of Orbax's storage may still print some of their own when a write
fails: that their event loop is closed already, a race which changes nothing."""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return micro.micro_config(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def whole(config) -> Path:
    """The folder of a run that nothing happened to."""
    run = config.parent / "whole"
    code, text = micro.finish(config, run)
    assert code == 0, text
    assert damage(run / "checkpoints" / "000006") is None
    return run


@pytest.fixture
def stopped(whole, tmp_path) -> Path:
    """A copy of it as it was after iteration 4, but for lines that the others wrote later."""
    run = tmp_path / "run"
    copy(whole, run)
    return run


def copy(whole: Path, run: Path) -> None:
    shutil.copytree(whole, run, dirs_exist_ok=True)
    for name in ("export", "checkpoints/000006"):
        shutil.rmtree(run / name)


def assert_same(run: Path, whole: Path) -> None:
    assert micro.differing(micro.result(run), micro.result(whole)) == [], micro.output(run)


# Kill -9 ----------------------------------------------------------------------------------------------------------


KINDS = {
    "carrying": lambda config: micro.carrying_config(micro.ragged_config(config)),
    "episodes": micro.episodes_config,
}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments_it_ends_bit_for_bit_the_same(config, tmp_path, kind):
    """Runs one after another, each killed again and again until one attempt outlives its moment.

    Rows take turns in slots, with refills and rewards per group and async, and every attempt has another clock. Half of
    the kills fall on runs that carry much: adapters, a mixture of data sets, rewards of problems, a teacher, another
    optimizer; and half on episodes of adapters whose environment raises, floods, forks and exits. The moments
    are drawn one from each of as many equal parts of a run, so that every part of it meets a kill. Runs differ in the
    processor time that they take: by one that outlives its moment the others are measured anew. The first that carries
    much is told to stop in its warm start before.
    """
    config = KINDS[kind](config)
    code, text = micro.finish(config, whole := tmp_path / "whole")  # compiles the programs
    assert code == 0, text
    seconds, kills = micro.whole_run(config, tmp_path / "timed"), max(KILLS // 2, 1)
    assert_same(tmp_path / "timed", whole)
    print(f"seed {SEED}: {kills} kills in the {seconds:.1f} s of processor time that a whole run takes")
    draw = random.Random(f"{SEED} {kind}")
    moments = [(part + draw.random()) / kills for part in range(kills)]
    draw.shuffle(moments)
    runs, attempts = 1, 1
    run = tmp_path / "killed1"
    if kind == "carrying":
        told_to_stop_in_the_warm_start(config, run)
        attempts = 2
    process = micro.start(config, run)
    while moments:
        used = micro.kill_after(process, moments[0] * seconds)
        if used is None:
            print(f"run {runs}, killed after {moments.pop(0) * seconds:.1f} s, {where(run)}", flush=True)
            process, attempts = micro.start(config, run), attempts + 1
        else:
            ended(process, run, whole)
            seconds = used if attempts == 1 else seconds
            runs, attempts = runs + 1, 1
            process = micro.start(config, run := tmp_path / f"killed{runs}")
    ended(process, run, whole)
    assert kind != "carrying" or "resumes after step" in micro.output(tmp_path / "killed1")


def told_to_stop_in_the_warm_start(config: Path, run: Path) -> None:
    """Within an iteration: tests/training/test_resume.py and test_two_processes.py."""
    process = micro.start(config, run)
    micro.wait_for(process, run.with_suffix(".log"), "sft 20/40")
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=600) == 75, micro.output(run)
    assert "stopped; the same command resumes" in micro.output(run)
    assert (run / "sft.json").exists()
    assert not (run / "export").exists()
    assert not OURS.search(micro.output(run))


def ended(process: starts.Started | subprocess.Popen, run: Path, whole: Path) -> None:
    assert process.wait(timeout=600) == 0, micro.output(run)
    assert_same(run, whole)
    assert ".damaged" not in micro.output(run)  # a kill leaves unfinished checkpoints, never wrong ones


def where(run: Path) -> str:
    """How far a killed attempt had come, by the last that it printed."""
    lines = micro.output(run).strip().splitlines() or ["before anything was printed"]
    return f"at {lines[-1][:40]!r}"


def test_an_environment_that_hangs_costs_its_episodes_and_the_run_goes_on(config, tmp_path):
    run, classes = tmp_path / "run", Path(__file__).parent.parent / "golden" / "environments" / "classes.py"
    plays = f"rollout.environment={{name: '{classes}:Hangs', turns: 4, deadline: 2}}"
    changes = ("iterations=2", "sft=null", "credit.method=uniform", "update.refills=0", "eval.every=2")
    code, text = micro.finish(micro.episodes_config(config), run, plays, *changes, "grading.workers=4")
    assert code == 0, text
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["iteration"]]
    assert len(lines) == 2
    assert 0 < sum(line["episodes_failed"] for line in lines) < 2
    for line in lines:
        assert line["episodes_failed"] == pytest.approx(line["ungraded"])
    assert (run / "export" / "model.safetensors").exists()


# Damaged checkpoints ----------------------------------------------------------------------------------------------


def largest(folder: Path) -> Path:
    """The largest file that holds arrays."""
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(at: Path) -> None:
    path = largest(at)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_without_a_good_checkpoint_it_does_not_start_over(config, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = micro.result(run)
    for at in (run / "checkpoints").glob("0*"):
        flip(at)
    code, text = micro.finish(config, run)
    assert code == 2, text
    assert "no intact checkpoint is left, although the run had saved one" in text
    assert not OURS.search(text), text
    assert before == micro.result(run)


# Storage that fails, and the lock ---------------------------------------------------------------------------------


def can_mount() -> bool:
    """Whether this process may mount a disk of its own: root may, outside a locked container."""
    there = Path(tempfile.mkdtemp())  # several test processes ask at once
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", there], capture_output=True, check=False)
    if done.returncode == 0:
        subprocess.run(["umount", there], check=True)
    there.rmdir()
    return done.returncode == 0


CAN_MOUNT = os.geteuid() == 0 and can_mount()


@pytest.fixture
def disk(tmp_path):
    """A folder on a small disk of its own, where one can be mounted."""
    there = tmp_path / "disk"
    there.mkdir()
    if CAN_MOUNT:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", there], check=True)
    yield there
    while CAN_MOUNT and subprocess.run(["umount", "-l", there], capture_output=True, check=False).returncode == 0:
        pass


def intact(run: Path) -> None:
    assert damage(run / "checkpoints" / "000004") is None


def fill(there: Path) -> Path:
    """Leave no room on a disk."""
    filler = there / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def resumed(config: Path, run: Path, log: Path, *changes: str) -> starts.Started | subprocess.Popen:
    """Start the command, and return once it has read the checkpoint of iteration 4."""
    process = micro.start(config, run, *changes, log=log)
    micro.wait_for(process, log, "resuming after iteration 4")
    return process


def in_use(config: Path, run: Path, log: Path) -> None:
    """Refuse a second command while the first stands still, kill that, and find the folder free."""
    process = resumed(config, run, log)
    process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
    code, text = micro.finish(config, run, log=log.with_suffix(".second"))
    assert code == 2, text
    assert f"{run} is in use by process {process.pid} on " in text
    process.kill()
    process.wait()


def full(config: Path, run: Path, log: Path, policy: str) -> None:
    process = resumed(config, run, log, f"checkpoint.on_failure={policy}")
    filler = fill(run.parent)
    code, text = process.wait(timeout=600), log.read_text()
    filler.unlink()
    assert code == 75, text
    assert "error: cannot write " in text
    assert "No space left on device" in text
    assert not OURS.search(text), text
    assert ("OAR-G 6/6" in text) == (policy == "warn")  # and then the export has no room


def read_only(config: Path, run: Path, log: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", run.parent], check=True)
    code, text = micro.finish(config, run, log=log)
    subprocess.run(["mount", "-o", "remount,rw", run.parent], check=True)
    assert code == 75, text
    assert "Read-only file system" in text
    assert not OURS.search(text), text


def vanishing(config: Path, run: Path, log: Path) -> None:
    """Unmounted under a running run: an error, nothing on the disk below, and nothing lost on the one that went."""
    place = log.with_suffix(".mount")
    place.mkdir()
    subprocess.run(["mount", "--bind", run.parent, place], check=True)
    try:
        process = resumed(config, place / run.name, log)
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    code, text = process.wait(timeout=600), log.read_text()
    assert code == 75, text
    assert "nothing was written to its path since" in text
    assert not OURS.search(text), text
    assert list(place.iterdir()) == []


def files_that_may_not_grow(config: Path, run: Path, log: Path) -> None:
    """What a full disk is to those who may mount none: the system refuses to write beyond a size."""
    # To a pipe: the limit must not hit what is printed.
    process = subprocess.Popen(micro.command(config, run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 75, text
    assert "File too large" in text
    assert not OURS.search(text), text


ACCIDENTS: dict[str, Callable[[Path, Path, Path], None]] = {"in use": in_use}
if CAN_MOUNT:
    ACCIDENTS |= {f"full, {policy}": partial(full, policy=policy) for policy in ("stop", "warn")}
    ACCIDENTS |= {"read-only": read_only, "vanishing": vanishing}
else:
    ACCIDENTS |= {"no growth": files_that_may_not_grow}


def test_a_run_whose_storage_fails_again_and_again_ends_the_same(config, whole, disk, tmp_path):
    """The newest checkpoint is damaged, and put aside; then a command per accident begins where the one before did.

    Every kind of damage is told apart in tests/storage/test_checkpoint.py.
    """
    run = disk / "run"
    shutil.copytree(whole, run)
    flip(run / "checkpoints" / "000006")
    for number, (name, accident) in enumerate(ACCIDENTS.items()):
        print(name)
        accident(config, run, tmp_path / f"{number}.log")
        intact(run)
    damaged = (tmp_path / "0.log").read_text()
    assert "is not what was saved (its SHA-256 differs)" in damaged
    assert "It is now 000006.damaged; trying the previous one" in damaged
    code, text = micro.finish(config, run, log=tmp_path / "last.log")
    assert code == 0, text
    assert "resuming after iteration 4" in text
    assert_same(run, whole)


# Another config ---------------------------------------------------------------------------------------------------


def test_it_goes_on_on_another_mesh(config, whole, stopped):
    code, text = micro.finish(config, stopped, "mesh={data: 2, fsdp: 2, tensor: 2}", XLA_FLAGS=virtual_devices(8))
    assert code == 0, text
    assert "resuming after iteration 4" in text
    assert "mesh.fsdp was 1, is 2" in text
    assert "(allowed, but the run will not end bit for bit as it would have)" in text
    ours, theirs = (load_file(run / "export" / "model.safetensors") for run in (stopped, whole))
    start = load_file(whole / "start" / "model.safetensors")
    for name, values in theirs.items():
        moved = np.abs(values - start[name]).max()
        np.testing.assert_allclose(ours[name], values, atol=0.2 * moved + 1e-6)


def test_another_run_is_refused_with_what_may_differ(config, stopped):
    code, text = micro.finish(config, stopped, "optim.lr=0.5", "update.microbatch=4", "checkpoint.keep=5")
    assert code == 2
    assert "holds a run of another config (optim.lr was 0.001, is 0.5)" in text
    assert "these may differ: update.microbatch was 8, is 4 (allowed, but the run will not end bit for bit" in text
    assert "checkpoint.keep was 2, is 5; run_dir was " in text
    assert "(harmless)" in text
