"""Pipes, devices and links in a folder that somebody else made: nothing waits for them, nothing else is written."""

import os
import signal
import sys

import pytest
import yaml

import oarjax.evaluate.command
import oarjax.tools.replay.command
import oarjax.tools.study.command
import oarjax.training.command  # noqa: F401  # so that no alarm falls into imports
from oarjax.cli import main
from oarjax.report.command import write_report
from oarjax.storage.durable import Lines, StorageError, write_durably
from oarjax.storage.folder import locked

FOLDER = {
    "report": ["report", "{run}"],
    "status": ["status", "{run}"],
    "resume": ["train", "{run}/config.yaml", "run_dir={run}"],
    "study": ["study", "study_demo", "run_dir={run}"],
    "evaluate": ["evaluate", "{run}", "--data", "demo"],
    "replay": ["replay", "{run}/bad_batches/iteration-000002.safetensors"],
}


def hangs(*_):
    raise AssertionError("it waits for a pipe")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with a config, and an alarm for whoever waits for what it holds."""
    folder = tmp_path / "run"
    (folder / "bad_batches").mkdir(parents=True)
    tree = {
        "run_dir": str(folder),
        "iterations": 1,
        "device": "cpu",
        "policy": {"path": "builtin:arithmetic"},
        "data": {"train": {"source": "builtin:arithmetic"}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(120)
    yield folder
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "config.yaml", "facts.json", "checkpoints/000002/x"])
@pytest.mark.parametrize("command", FOLDER)
def test_a_pipe_in_a_run_folder_is_refused(command, name, run, monkeypatch, capsys):
    if command == "replay":  # which reads other files
        name = {"metrics.jsonl": "bad_batches/iteration-000002.safetensors"}.get(name, f"bad_batches/{name}")
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    arguments = [each.format(run=run) for each in FOLDER[command]]
    monkeypatch.setattr(sys, "argv", ["oarjax", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    error = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2, error
    if name != "config.yaml":  # else "holds no run"
        assert "expected a file, got a named pipe" in error
    assert path.is_fifo()


def test_links_are_replaced_or_refused_and_never_followed(run, tmp_path):
    names = ("report.html", "results.json", ".results.json.half", "samples.jsonl", "lock")
    page, results, half, samples, _ = theirs = [run / name for name in names]
    (tmp_path / "mine").write_text("mine")
    for link in theirs:
        link.symlink_to(tmp_path / "mine")
    write_report(run)
    write_durably(results, "theirs")
    assert (page.read_text()[:2], results.read_text(), half.is_symlink()) == ("<!", "theirs", False)
    with pytest.raises(StorageError, match=r"cannot write .*samples.jsonl: .*choose another path"):
        Lines(samples)
    with pytest.raises(StorageError, match=r"cannot write .*lock: .*choose another path"), locked(run):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_link_to_a_device_is_refused(run, monkeypatch, capsys):
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    monkeypatch.setattr(sys, "argv", ["oarjax", "report", str(run)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "metrics.jsonl: expected a file, got a device; remove it" in " ".join(capsys.readouterr().err.split())
