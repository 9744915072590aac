"""What would end a run late ends it before anything is trained: rewards that fail, an export that cannot be written."""

import errno
import shutil
import sys
import tempfile
from types import SimpleNamespace

import micro
import pytest

from oarjax.cli import main
from oarjax.config.loading import load_config
from oarjax.errors import ConfigError, UserError
from oarjax.grading.pool import GraderError
from oarjax.report.files import make_console
from oarjax.run.dry_run import try_rewards
from oarjax.run.export_target import check_export
from oarjax.run.run import open_run
from oarjax.storage.durable import StorageError
from oarjax.storage.stop import Stop
from oarjax.training.command import train_once

PLUGIN = """
import os
import time
from oarjax.grading.rewards import reward

@reward("raises")
def raises(sample):
    raise KeyError("no such column")

@reward("picky")
def picky(sample):
    return float(len(sample.extracted) > 0)

@reward("ends")
def ends(sample):
    os._exit(3)

@reward("slow")
def slow(sample):
    time.sleep(60)

@reward("odd")
def odd(sample):
    return -1.0 if sample.extracted else 1.0
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    (folder / "mine.py").write_text(PLUGIN)
    return micro.micro_config(folder)


@pytest.fixture
def tried(config, capfd):
    """What is printed while these rewards are tried."""

    def attempt(*overrides):
        run = open_run(load_config(config, [f"grading.plugins=[{config.parent / 'mine.py'}]", *overrides]))
        run.console = make_console(sys.stdout)
        with run.grader() as grader:
            try_rewards(run, grader)
        return capfd.readouterr().out

    return attempt


def test_a_program_that_plays_episodes_is_started(tried, tmp_path):
    rows = tmp_path / "rows.jsonl"
    environment = f"rollout.environment={{name: verifiers:x, settings: {{python: {tmp_path}/none}}}}"
    rewards, data = "grading.rewards=[{name: environment}]", f"data.train={{source: {rows}}}"
    for task, message in (('""', "expected a task of verifiers in the column task"), ("{}", "/none cannot be started")):
        rows.write_text(f'{{"question": "1+2=", "answer": "-", "task": {task}}}\n' * 8)
        with pytest.raises(UserError, match=message):
            tried(environment, rewards, data, "credit.method=uniform")


def test_sound_rewards_are_silent(tried):
    assert tried("grading.rewards=[{name: exact}, {name: math}, {name: format}]") == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "raises",
            r"on the reference answer .* reward 'raises' \(.*mine\.py, line 8\) raised KeyError: 'no such column'",
        ),
        ("picky", r"on nonsense .* reward 'picky' \(.*mine\.py, line 12\) raised TypeError: "),
        ("ends", r"on the reference answer .* the worker ended with exit code 3; fix the reward"),
    ],
)
def test_a_reward_that_fails_is_an_error(tried, name, says):
    with pytest.raises(GraderError, match=says):
        tried(f"grading.rewards=[{{name: exact}}, {{name: {name}}}]")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["grading.rewards=[{name: slow}]", "grading.deadline=0.2"], "has no grade (no verdict within 0.2 s)"),
        (["grading.rewards=[{name: odd}]"], "gets -1 (odd -1) and nonsense 1"),
        (
            ["grading.rewards=[{name: exact}]", "credit.answer={style: regex, pattern: 'A: (.+)'}"],
            "is not graded as right (exact 0)",
        ),
    ],
)
def test_an_odd_verdict_is_a_warning_in_one_line(tried, overrides, says):
    text = tried(*overrides)
    assert text.startswith("warning: the reference answer of the first training problem ")
    assert says in text
    assert text.count("\n") == 1


def test_the_command_tries_them_before_the_warm_start(config, tmp_path, monkeypatch, capsys):
    def begin(*_):
        raise AssertionError("the warm start has begun")

    monkeypatch.setattr("oarjax.training.command.start_policy", begin)
    changes = (f"grading.plugins=[{config.parent / 'mine.py'}]", "grading.rewards=[{name: raises}]")
    monkeypatch.setattr(sys, "argv", ["oarjax", "train", str(config), f"run_dir={tmp_path / 'run'}", *changes])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "reward 'raises'" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["serl", "rlsd"])
def test_a_method_that_lacks_something_is_refused_before_the_warm_start(config, tmp_path, method):
    cfg = load_config(config, [f"run_dir={tmp_path / 'run'}", f"credit.method={method}", "grading.plugins=[]"])
    with pytest.raises(UserError, match=r"^credit\.(marks|teacher): "):
        train_once(cfg, make_console(), Stop())
    assert not (tmp_path / "run" / "config.yaml").exists()


# The export -------------------------------------------------------------------------------------------------------


def fails(number):
    def raises(*_, **__):
        raise OSError(number, "injected")

    return raises


def test_an_export_that_cannot_be_written_is_an_error(config, tmp_path, monkeypatch):
    run = open_run(load_config(config, [f"run_dir={tmp_path / 'run'}"]))
    target = run.folder / "deep" / "export"
    check_export(run, target)
    assert not target.parent.exists()
    for number, kind in ((errno.EROFS, ConfigError), (errno.EACCES, ConfigError), (errno.ENOSPC, StorageError)):
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", fails(number))
        with pytest.raises(kind, match="cannot write"):
            check_export(run, target)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(StorageError, match=r"will take .* GB, and its disk has 1e-07 GB"):
        check_export(run, target)
    monkeypatch.undo()
    target.mkdir(parents=True)
    check_export(run, target)
    (target / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="exists and is not a policy that may be replaced"):
        check_export(run, target)
    (target / "config.json").touch()  # an earlier export
    check_export(run, target)
    file = run.folder / "export"
    file.touch()
    with pytest.raises(ConfigError, match="exists and is not a policy that may be replaced"):
        check_export(run, file)
