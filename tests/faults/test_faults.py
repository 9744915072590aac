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
    processor time that they take: a moment which a whole run outlives comes a fifth sooner in the next.
    """
    config = KINDS[kind](config)
    code, text = micro.finish(config, whole := tmp_path / "whole")  # compiles the programs
    assert code == 0, text
    seconds, kills = micro.whole_run(config, tmp_path / "timed"), max(KILLS // 2, 1)
    assert_same(tmp_path / "timed", whole)
    print(f"seed {SEED}: {kills} kills in the {seconds:.1f} s of processor time that a whole run takes")
    draw = random.Random(f"{SEED} {kind}")
    moments = [(part + draw.random()) / kills * seconds for part in range(kills)]
    draw.shuffle(moments)
    runs, attempts = 1, 1
    process = micro.start(config, run := tmp_path / "killed1")
    while moments:
        if micro.kill_after(process, moments[0]):
            print(f"run {runs}, killed after {moments.pop(0):.1f} s, {where(run)}", flush=True)
            process, attempts = micro.start(config, run), attempts + 1
        else:
            ended(process, run, whole)
            moments[0] *= 0.8 if attempts == 1 else 1.0
            runs, attempts = runs + 1, 1
            process = micro.start(config, run := tmp_path / f"killed{runs}")
    ended(process, run, whole)


def ended(process: starts.Started, run: Path, whole: Path) -> None:
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
    changes = ("iterations=2", "credit.method=uniform", "update.refills=0", "eval.every=2", "grading.workers=4")
    code, text = micro.finish(micro.episodes_config(config), run, plays, *changes)
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


def test_a_damaged_newest_checkpoint_is_put_aside(config, whole, tmp_path):
    """Every kind of damage is told apart in tests/storage/test_checkpoint.py."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    flip(run / "checkpoints" / "000006")
    code, text = micro.finish(config, run)
    assert code == 0, text
    assert "is not what was saved (its SHA-256 differs)" in text
    assert "It is now 000006.damaged; trying the previous one" in text
    assert "resuming after iteration 4" in text
    assert_same(run, whole)


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


# Disks ------------------------------------------------------------------------------------------------------------


def can_mount() -> bool:
    """Whether this process may mount a disk of its own: root may, outside a locked container."""
    there = Path(tempfile.mkdtemp())  # several test processes ask at once
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", there], capture_output=True, check=False)
    if done.returncode == 0:
        subprocess.run(["umount", there], check=True)
    there.rmdir()
    return done.returncode == 0


CAN_MOUNT = os.geteuid() == 0 and can_mount()


def mounting(test):
    """Leave a test away where it could not mount its disk."""
    return test if CAN_MOUNT else None


def without_mounts(test):
    """Leave a test away where a mounted disk shows more."""
    return None if CAN_MOUNT else test


@pytest.fixture
def disk(tmp_path):
    """A folder on a small disk of its own."""
    there = tmp_path / "disk"
    there.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", there], check=True)
    yield there
    while subprocess.run(["umount", "-l", there], capture_output=True, check=False).returncode == 0:
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


@mounting
@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_full_disk(config, whole, disk, tmp_path, policy):
    run, log = disk / "run", tmp_path / "log"
    copy(whole, run)
    process = micro.start(config, run, f"checkpoint.on_failure={policy}", log=log)
    micro.wait_for(process, log, "resuming after iteration 4")
    filler = fill(disk)
    code, text = process.wait(timeout=600), log.read_text()
    assert code == 75, text
    assert "error: cannot write " in text
    assert "No space left on device" in text
    assert not OURS.search(text), text
    assert ("OAR-G 6/6" in text) == (policy == "warn")  # and then the export has no room
    intact(run)
    filler.unlink()
    code, text = micro.finish(config, run)
    assert code == 0, text
    assert_same(run, whole)


@without_mounts
def test_files_that_may_not_grow(config, whole, stopped):
    """What a full disk is to those who may mount none: the system refuses to write beyond a size."""
    # To a pipe: the limit must not hit what is printed.
    process = subprocess.Popen(
        micro.command(config, stopped), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 75, text
    assert "File too large" in text
    assert not OURS.search(text), text
    intact(stopped)
    code, text = micro.finish(config, stopped)
    assert code == 0, text
    assert_same(stopped, whole)


@mounting
def test_a_disk_that_has_become_read_only(config, whole, disk, tmp_path):
    run, log = disk / "run", tmp_path / "log"
    copy(whole, run)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    code, text = micro.finish(config, run, log=log)
    assert code == 75, text
    assert "Read-only file system" in text
    assert not OURS.search(text), text
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    intact(run)
    assert micro.finish(config, run)[0] == 0
    assert_same(run, whole)


@mounting
def test_a_mount_that_vanishes(config, whole, tmp_path):
    """Unmounted under a running run: an error, nothing on the disk below, and nothing lost on the one that went."""
    disk, back = tmp_path / "disk", tmp_path / "back"
    disk.mkdir()
    back.mkdir()
    copy(whole, back / "run")
    subprocess.run(["mount", "--bind", back, disk], check=True)
    process = micro.start(config, disk / "run", log=tmp_path / "vanish.log")
    try:
        micro.wait_for(process, tmp_path / "vanish.log", "resuming after iteration 4")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    code = process.wait(timeout=600)
    text = (tmp_path / "vanish.log").read_text()
    assert code == 75, text
    assert "nothing was written to its path since" in text
    assert not OURS.search(text), text
    assert list(disk.iterdir()) == []
    intact(back / "run")
    code, text = micro.finish(config, back / "run")
    assert code == 0, text
    assert_same(back / "run", whole)


# Being told to stop, and the lock ---------------------------------------------------------------------------------


def test_told_to_stop_in_the_warm_start_it_saves_and_says_75(config, whole, tmp_path):
    """Within an iteration: tests/training/test_resume.py and test_two_processes.py."""
    run = tmp_path / "run"
    process = micro.start(config, run)
    micro.wait_for(process, run.with_suffix(".log"), "sft 20/40")
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=600) == 75, micro.output(run)
    assert "stopped; the same command resumes" in micro.output(run)
    assert (run / "sft.json").exists()
    assert not (run / "export").exists()
    assert not OURS.search(micro.output(run))
    code, text = micro.finish(config, run)
    assert code == 0, text
    assert "resumes after step" in text
    assert_same(run, whole)


def test_a_run_in_use_is_refused_and_a_killed_one_is_not(config, whole, stopped):
    process = micro.start(config, stopped)
    micro.wait_for(process, stopped.with_suffix(".log"), "resuming after iteration 4")
    process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
    code, text = micro.finish(config, stopped)
    assert code == 2, text
    assert f"{stopped} is in use by process {process.pid} on " in text
    process.kill()
    process.wait()
    assert micro.finish(config, stopped)[0] == 0
    assert_same(stopped, whole)


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
