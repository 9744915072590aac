"""Pipes and devices in a folder that somebody else made: one message and exit code 2, and nothing waits for them."""

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


def test_a_link_to_a_device_is_refused(run, monkeypatch, capsys):
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    monkeypatch.setattr(sys, "argv", ["oarjax", "report", str(run)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "metrics.jsonl: expected a file, got a device; remove it" in " ".join(capsys.readouterr().err.split())
