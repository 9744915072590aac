"""Trackers: what each is given, one run id over a resume, none of them can stop a run, and no network by default."""

import importlib.machinery
import json
import math
import os
import shlex
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from oarjax.report.files import CompletionRow
from oarjax.report.trackers import TensorBoard, TrackedRun, Trackers, completions_table, run_id

ROW = CompletionRow(
    prompt="1+1?\x1b[2J",
    completion="# 2\n<b>*x*</b>\ud800",
    reward=math.nan,
    answer=None,
    verdict="timeout",
    rewards={"math": math.nan, "brief": 0.5},
    reference="2",
)


def run_of(folder: Path, **changes) -> TrackedRun:
    fields = {"folder": folder, "project": "tests", "name": "demo", "id": "0a1b2c3d", "config": {"optim": {"lr": 0.5}}}
    return TrackedRun(**(fields | changes))


def trackers(to, run, said=None, shown=None) -> Trackers:
    said, shown = [] if said is None else said, [] if shown is None else shown
    return Trackers(to, lambda: run, say=lambda key, text: said.append(text), show=shown.append)


def fake(name: str, **members) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    return module


def board_events(folder: Path) -> list:
    """Every event of a folder's TensorBoard files, in order."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:  # a record: length u64, its checksum u32, the event, its checksum u32
            size = int.from_bytes(content[:8], "little")
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


def wandb_records(file: Path) -> list:
    """Every record of a W&B run file: blocks of 32 KiB, of pieces with checksum u32, length u16 and type u8."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # what is left of a block is padding
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(file: Path) -> list[dict]:
    """What a W&B run file holds of each step."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(file)
        if record.HasField("history")
    ]


def test_the_table_is_printable_and_has_a_column_per_reward():
    columns, (cells,) = completions_table(3, [ROW])
    row = dict(zip(columns, cells, strict=True))
    assert columns[8:] == ["reward/brief", "reward/math"]
    assert (row["iteration"], row["reward"], row["reward/brief"], row["reward/math"]) == (3, None, 0.5, None)
    assert (row["prompt"], row["answer"], row["reference"]) == ("1+1?<U+001B>[2J", None, "2")
    assert row["completion"].endswith("<U+D800>")
    json.dumps(cells).encode()


def test_tensorboard_files_hold_the_finite_scalars_and_the_completions(tmp_path):
    with trackers(("jsonl", "tensorboard"), run_of(tmp_path)) as opened:
        opened.write(7, {"reward": 0.5, "loss": math.nan}, [ROW])
    values = [(event.step, value) for event in board_events(tmp_path / "tensorboard") for value in event.summary.value]
    (step, reward), (_, text) = values
    assert (step, reward.tag, reward.simple_value) == (7, "reward", 0.5)
    block = text.tensor.string_val[0].decode()
    assert text.tag.startswith("completions")
    assert "    # 2\n    <b>*x*</b><U+D800>" in block
    assert all(line.startswith("    ") for line in block.splitlines())  # an indented block: nothing in it is markup


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path):
    for first in (0, 4):
        board = TensorBoard(run_of(tmp_path / str(first), first=first))
        board.write(first + 1, {"loss": 1.0}, [])
        board.close()
    starts = [
        [(e.step, e.session_log.status) for e in board_events(tmp_path / name / "tensorboard") if e.session_log.status]
        for name in ("0", "4")
    ]
    assert starts == [[], [(5, 1)]]  # 1 is START: whatever earlier files hold from this step on is passed over


def test_a_run_keeps_its_id(tmp_path):
    found = run_id(tmp_path)
    assert len(found) == 8
    assert run_id(tmp_path) == found
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path / "other") != found


class Recorder:
    """A fake of W&B as far as it is used; ``fails`` is what raises."""

    def __init__(self, fails=""):
        self.fails, self.calls, self.dir = fails, [], "wandb/offline-run/files"

    def init(self, **options):
        return self._done("init", options)

    def define_metric(self, *names, **options):
        return self._done("define_metric", names, options)

    def log(self, record):
        return self._done("log", record)

    def finish(self):
        return self._done("finish")

    def _done(self, name, *what):
        if name == self.fails:
            raise OSError(f"{name} is broken")
        self.calls.append((name, *what))
        return self


def as_wandb(recorder: Recorder) -> types.ModuleType:
    return fake("wandb", init=recorder.init, Settings=lambda **options: options, Table=lambda columns, data: data)


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(tmp_path, monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "wandb", as_wandb(Recorder(fails)))
    said: list[str] = []
    with trackers(("wandb", "tensorboard"), run_of(tmp_path), said) as opened:
        for iteration in (1, 2):
            opened.write(iteration, {"loss": 1.0}, [])
    assert said == [f"report.to: wandb failed (OSError: {fails} is broken); continuing without it"]
    events = board_events(tmp_path / "tensorboard")
    assert [event.step for event in events if event.summary.value] == [1, 2]


def test_names_that_cannot_be_kept_stop_no_run(tmp_path):
    def nowhere():
        raise PermissionError("read-only")

    said: list[str] = []
    with Trackers(("tensorboard",), nowhere, say=lambda key, text: said.append(text), show=print) as opened:
        opened.write(1, {"loss": 1.0}, [])
    assert said == ["report.to: tensorboard failed (PermissionError: read-only); continuing without it"]


@pytest.mark.parametrize(
    ("asked", "mode", "resume"), [(None, "offline", None), ("", "offline", None), ("online", "online", "allow")]
)
def test_wandb_is_offline_unless_the_user_says_otherwise(tmp_path, monkeypatch, asked, mode, resume):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if asked is not None:
        monkeypatch.setenv("WANDB_MODE", asked)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    recorder, shown = Recorder(), []
    monkeypatch.setitem(sys.modules, "wandb", as_wandb(recorder))
    with trackers(("wandb",), run_of(tmp_path), shown=shown) as opened:
        opened.write(3, {"loss": 1.0, "kl": math.inf}, [ROW])
    options = recorder.calls[0][1]
    assert os.environ.get("WANDB_MODE") == (asked or None)  # W&B itself refuses an empty one
    assert (options["mode"], options["resume"], options["id"]) == (mode, resume, "0a1b2c3d")
    assert ("define_metric", ("*",), {"step_metric": "iteration"}) in recorder.calls
    (record,) = [call[1] for call in recorder.calls if call[0] == "log"]
    assert set(record) == {"iteration", "loss", "completions"}
    assert recorder.calls[-1] == ("finish",)
    assert (mode in shown[0], "wandb sync wandb/offline-run" in shown[0]) == (True, mode == "offline")


def test_commands_that_are_shown_can_be_pasted(tmp_path, monkeypatch):
    recorder, shown = Recorder(), []
    recorder.dir = "my runs/wandb/offline-run/files"
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", as_wandb(recorder))
    monkeypatch.setitem(sys.modules, "trackio", fake("trackio", init=lambda **_: recorder, finish=lambda: None))
    with trackers(("tensorboard", "wandb", "trackio"), run_of(tmp_path / "my runs", project="p q"), shown=shown):
        pass
    said = [shlex.split(line.partition(" it with: ")[2])[-1] for line in shown]
    assert said == [str(tmp_path / "my runs" / "tensorboard"), "my runs/wandb/offline-run", "p q"]


def test_a_package_that_is_not_there_is_a_warning_where_a_run_has_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    said: list[str] = []
    with trackers(("trackio",), run_of(tmp_path), said) as opened:
        opened.write(1, {"loss": 1.0}, [])
    assert said[0].startswith("report.to: trackio failed (ModuleNotFoundError: ")


# The packages themselves


@pytest.fixture
def no_network(monkeypatch):
    """Sockets to anywhere but this machine's own files are refused and remembered; a hub token is there to be used."""
    tried: list = []
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def refused(self, address):
        if self.family == socket.AF_UNIX:
            return connect(self, address)
        tried.append(address)
        raise OSError("no network in this test")

    def unknown(host, *args, **options):
        if host in (None, "localhost", "127.0.0.1", "::1"):
            return lookup(host, *args, **options)
        tried.append(host)
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    return tried


@pytest.mark.slow
def test_wandb_writes_an_offline_run_under_one_id(tmp_path, monkeypatch, no_network):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said, shown = [], []
    for first in (0, 1):  # killed after iteration 2, gone on with after iteration 1
        with trackers(("wandb",), run_of(tmp_path, first=first), said, shown) as opened:
            for iteration in range(first + 1, 3):
                opened.write(iteration, {"loss": 1.0 / iteration, "kl": math.nan}, [ROW])
    assert not said
    assert not no_network
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-0a1b2c3d.wandb"))
    assert len(files) == 2
    assert all(str(file.parent) in line for file, line in zip(files, shown))
    assert [[step["iteration"] for step in history(file)] for file in files] == [[1, 2], [2]]
    step = history(files[1])[0]
    assert (step["loss"], "kl" in step) == (0.5, False)
    (table,) = files[1].parent.glob("files/media/table/completions_*.table.json")
    held = json.loads(table.read_text())
    assert (held["columns"][0], held["data"][0][:2]) == ("iteration", [2, "1+1?<U+001B>[2J"])
    configs = [record.run.config.update for record in wandb_records(files[0]) if record.HasField("run")]
    assert {"optim": {"lr": 0.5}} in [{u.key: json.loads(u.value_json)} for update in configs for u in update]


TRACKIO = """
import json, sys
from oarjax.report.trackers import TrackedRun, Trackers
from oarjax.report.files import CompletionRow
import socket
tried = []
def refused(self, address):
    tried.append(str(address))
    raise OSError("no network in this test")
socket.socket.connect = refused
def unknown(host, *args, **options):
    tried.append(str(host))
    raise socket.gaierror("no network in this test")
socket.getaddrinfo = unknown
row = CompletionRow(prompt="1+1?", completion="2", reward=1.0, answer="2", verdict="graded", rewards={"math": 1.0})
said, shown = [], []
from pathlib import Path
for first in (0, 1):
    run = TrackedRun(Path(sys.argv[1]), "tests", "demo", "0a1b2c3d", {"optim": {"lr": 0.5}}, first)
    with Trackers(("trackio",), lambda: run, say=lambda key, text: said.append(text), show=shown.append) as opened:
        for iteration in range(first + 1, 3):
            opened.write(iteration, {"loss": 1.0 / iteration}, [row])
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("tests")
print(json.dumps([said, shown, tried, runs, SQLiteStorage.get_logs("tests", runs[0])], default=str))
"""


@pytest.mark.slow
def test_trackio_writes_its_local_database_under_one_name(tmp_path):
    """In a process of its own: trackio looks up where it writes when it is imported."""
    there = {k: v for k, v in os.environ.items() if not k.startswith(("TRACKIO_", "HF_HUB_OFFLINE"))}
    there |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_TOKEN": "hf_of_nobody"}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path)], env=there, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said, shown, tried, runs, logs = json.loads(done.stdout)  # nothing but the last line: trackio is kept quiet
    assert (said, tried, runs) == ([], [], ["demo-0a1b2c3d"])
    assert "trackio show --project tests" in shown[0]
    assert [(log["step"], log["loss"]) for log in logs] == [(1, 1.0), (2, 0.5), (2, 0.5)]
    table = logs[0]["completions"]
    assert (table["_type"], table["_value"][0]["completion"]) == ("trackio.table", "2")
    assert list((tmp_path / "trackio").glob("tests*"))
