"""A study reports damaged, removed and foreign files with a remedy that works, and says on a signal how to resume."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.errors import ConfigError
from oarjax.storage.durable import DamagedError
from oarjax.storage.folder import refuse_another_run
from oarjax.storage.inputs import add_inputs, check_files, record_inputs
from oarjax.storage.stop import RESUMABLE, Stopped
from oarjax.tools.study import command
from oarjax.tools.study.config import load_study, make_plan
from oarjax.tools.study.jobs import study_remedy
from oarjax.tools.study.worker import read_before, write_before
from oarjax.training.held_out import Evaluation

ARITHMETIC = {"source": "builtin:arithmetic", "arithmetic": {"terms": 2}}


@pytest.fixture
def file(tmp_path):
    """A study of one arm and one seed, with a warm start."""
    base = {
        "device": "cpu",
        "run_dir": "unused",
        "policy": {"path": "builtin:arithmetic"},
        "data": {"template": "plain", "train": ARITHMETIC, "eval": ARITHMETIC | {"split": "eval", "limit": 4}},
        "sft": {"data": ARITHMETIC | {"split": "sft"}, "steps": 3},
        "grading": {"rewards": [{"name": "exact"}]},
    }
    tree = {"run_dir": str(tmp_path / "st"), "base": base, "arms": {"GRPO": {}}, "seeds": [0]}
    path = tmp_path / "st.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def hold(folder: Path, cfg: Config) -> None:
    """Write what a run has once its warm start has finished."""
    (folder / "start").mkdir(parents=True)
    (folder / "start" / "config.json").write_text("{}")
    (folder / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))


@pytest.mark.parametrize("text", ["", "[1]", '{"scores": [1.0]}', '{"scores": [1.0], "length": {}, "truncated": 0}'])
def test_a_damaged_evaluation_of_a_start_names_a_remedy(tmp_path, text):
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(DamagedError, match=r"(?s)json is not the evaluation that was written .*; remove it, and"):
        read_before(path)


def test_the_evaluation_of_a_start_is_written_durably(tmp_path, monkeypatch):
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.append(number), fsync(number)))
    write_before(tmp_path / "before.json", Evaluation(np.array([0.5]), 3.0, 0.0))
    assert len(synced) == 2  # the file and its folder
    before = read_before(tmp_path / "before.json")
    assert before is not None
    assert (list(before.scores), before.length) == ([0.5], 3.0)
    assert json.loads((tmp_path / "before.json").read_text())["scores"] == [0.5]


@pytest.mark.parametrize(("warm", "folder"), [(True, "start"), (False, "policy")])
def test_a_start_without_its_policy_is_made_again(file, tmp_path, warm, folder):
    plan = make_plan(load_study(file, [] if warm else ["base.sft=null"]))
    policy = tmp_path / "st" / "seed0" / folder / "config.json"
    policy.parent.mkdir(parents=True)
    policy.write_text("{}")
    (tmp_path / "st" / "seed0" / "before.json").write_text("null")
    assert [job.name for job in command.tasks(plan)] == ["seed 0, GRPO"]
    policy.unlink()
    assert [job.name for job in command.tasks(plan)] == ["seed 0, start", "seed 0, GRPO"]


def test_a_folder_of_another_config_is_refused_with_a_remedy_that_a_study_has(file, tmp_path):
    plan = make_plan(load_study(file))
    home = tmp_path / "st" / "seed0"
    hold(home, plan.starts[0])
    with pytest.raises(ConfigError) as refused:
        command.run(file, ["base.optim.lr=0.5"], jobs=0)
    assert "holds a run of another config (optim.lr was 1e-06, is 0.5); set another run_dir=..." in str(refused.value)
    assert f", or remove {home} to start over" in str(refused.value)
    assert "--restart" not in str(refused.value)


def test_no_refusal_of_a_run_is_left_with_the_remedy_that_a_study_lacks(file, tmp_path):
    cfg = make_plan(load_study(file)).starts[0]
    home = Path(cfg.run_dir)
    hold(home, cfg)
    record_inputs(home, {"rows/data.train": "a"})
    add_inputs(home, {"start/config.json": "b"})
    other = parse_config(cfg.model_dump(mode="json") | {"seed": 7})
    for refuse in (
        lambda: refuse_another_run(home, other),
        lambda: record_inputs(home, {"rows/data.train": "c"}),
        lambda: check_files(home, {"start/config.json": home / "start" / "config.json"}),
    ):
        with pytest.raises((ConfigError, DamagedError)) as refused:
            refuse()
        assert "--restart" in str(refused.value)
        message = study_remedy(str(refused.value), home)
        assert f"or remove {home} to start over" in message
        assert "--restart" not in message


WORKER = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
sys.stdin.readline()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_workers_and_says_how_to_resume(file, tmp_path, monkeypatch, capsys, number):
    script, started = tmp_path / "worker.py", tmp_path / "pid"
    script.write_text(WORKER)
    monkeypatch.setattr(command, "WORKER", (sys.executable, str(script), str(started)))
    # Without a handler of the study the test must fail, not end.
    before = {each: signal.signal(each, lambda *_: sys.exit(128)) for each in (signal.SIGTERM, signal.SIGHUP)}

    def send() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        with pytest.raises(SystemExit) as stopped:
            command.run(file, [], jobs=1)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert isinstance(stopped.value, Stopped)
    assert stopped.value.code == RESUMABLE
    said = " ".join(capsys.readouterr().out.split())
    assert f"stopped; the same command resumes with what is in {tmp_path / 'st'}" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
