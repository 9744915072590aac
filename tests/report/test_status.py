"""How far a run has got, from the files of runs that are starting, going on, done or not there."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from oarjax.cli import app
from oarjax.errors import ConfigError
from oarjax.report import command as report
from oarjax.report.status import duration, run_status
from oarjax.storage.durable import DamagedError

ROOT = Path(__file__).parents[2]


def run_folder(tmp_path, records=(), **files):
    (tmp_path / "config.yaml").write_text("iterations: 4\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    return tmp_path


def line(iteration, **fields):
    return {"iteration": iteration, "time": 100.0 + iteration, **fields}


def test_a_run_in_the_middle(tmp_path):
    records = [
        line(0, pass_at_1=0.25),
        line(1, reward=0.5, **{"seconds/total": 90.0}),  # compiles
        line(2, reward=None, **{"seconds/total": 10.0}),
        line(3, reward=1.0, pass_at_1=0.5, skipped_in_a_row=2.0, **{"seconds/total": 20.0}),
    ]
    machine = '{"inputs": {"device/count": "64", "device/kind": "TPU v5 lite"}}'
    for name in ("000001", "000002", "000003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name != "000003":  # which is still being written
            (tmp_path / "checkpoints" / name / "manifest.json").touch()
    s = run_status(run_folder(tmp_path, records, checkpoints="cut", inputs=machine), now=163.0)
    assert (s.devices, s.device_hours) == ("64 x TPU v5 lite", 64 * 120 / 3600)
    (tmp_path / "inputs.json").write_text("{}")
    assert run_status(tmp_path).device_hours is None
    assert (s.state, s.iteration, s.iterations, s.checkpoint) == ("training", 3, 4, 2)
    assert (s.reward, s.pass_at_1, s.evaluated_at) == (0.75, 0.5, 3)
    assert (s.seconds_per_iteration, s.seconds_left, s.seconds_spent) == (20.0, 20.0, 120.0)
    assert (s.seconds_since_written, s.skipped_in_a_row) == (60.0, 2)
    (tmp_path / "metrics.jsonl").unlink()
    s = run_status(tmp_path)
    assert (s.state, s.iteration, s.reward) == ("training", 2, None), "the checkpoints are there"


def test_a_run_that_has_only_begun(tmp_path):
    s = run_status(run_folder(tmp_path))
    assert (s.state, s.iteration, s.reward, s.seconds_left, s.checkpoint) == (
        "before the first iteration",
        0,
        None,
        None,
        None,
    )
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("sft: {steps: 250}\n")
    (tmp_path / "sft" / "100").mkdir(parents=True)
    assert run_status(tmp_path).state == "warm start, 0 of 250 steps saved"
    (tmp_path / "sft" / "100" / "manifest.json").touch()
    assert run_status(tmp_path).state == "warm start, 100 of 250 steps saved"


def test_a_run_whose_process_has_ended(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = run_folder(tmp_path, [line(1, reward=1.0)])
    for pid, host, state in (
        (ended.pid, socket.gethostname(), "stopped in: training; the same command resumes"),
        (os.getpid(), socket.gethostname(), "training"),
        (ended.pid, "another host", "training"),
        ("x", socket.gethostname(), "training"),
    ):
        (folder / "lock").write_text(json.dumps({"pid": pid, "host": host}))
        assert run_status(folder).state == state


def test_a_finished_run(tmp_path):
    folder = run_folder(tmp_path, [line(4, reward=1.0)])
    assert run_status(folder).state == "all iterations done, not yet exported"
    (folder / "summary.json").write_text("{}")
    assert run_status(folder).state == "finished"


def test_no_run_is_an_error_that_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        run_status(tmp_path)


def test_a_report_of_a_folder_that_is_only_read_goes_elsewhere(tmp_path, monkeypatch):
    folder = run_folder(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to any
    with pytest.raises(ConfigError, match=r"cannot be written to; pass --out FILE to write the page elsewhere"):
        report.run(folder, None)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": [{}]}', '{"rows": [{"name": 3}]}', '{"rows": 1}'])
def test_a_damaged_file_leaves_the_page_as_it_was(tmp_path, text):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text((ROOT / "configs" / "demo.yaml").read_text())
    report.run(folder, None)
    before = (folder / "report.html").read_text()
    (folder / "summary.json").write_text(text)
    with pytest.raises(DamagedError, match=r"summary.json is not what a run wrote .* put a good copy there, or remove"):
        report.run(folder, None)
    assert (folder / "report.html").read_text() == before


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min"), (3661, "1 h 1 min"), (86400 * 2 + 60, "2 d 1 min"), (-3, "0 s")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_command(tmp_path, capsys):
    folder = run_folder(tmp_path, [line(1, reward=0.5, **{"seconds/total": 7.0})])
    app(["status", str(folder), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["seconds_left"] == 21.0
    app(["status", str(folder)], standalone_mode=False)
    text = capsys.readouterr().out
    assert "1 of 4" in text
    assert "21 s" in text
