"""A run that was stopped and started again ends as one that was not."""

import os
import signal

import jax
import numpy as np
import pytest
from conftest import CACHE
from rich.console import Console

from oarjax.config.loading import load_config
from oarjax.data.hf import load_params, read_config
from oarjax.errors import ConfigError
from oarjax.report.files import read_metrics
from oarjax.rollout.source import SamplerSource
from oarjax.storage import folder as run_folder
from oarjax.storage.checkpoint import finished
from oarjax.storage.stop import Stop, Stopped
from oarjax.training import command, trainer

SMALL = [
    "sft.steps=3",
    "sft.batch=16",
    "sft.microbatch=16",
    "sft.data.limit=64",
    "data.train.limit=20",
    "data.eval.limit=16",
    "rollout.prompts=8",
    "rollout.group_size=2",
    "rollout.max_new=16",
    "update.microbatch=16",
    "eval.batch=16",
    "report.html=false",
    f"compilation_cache={CACHE}",
    "checkpoint.every=1",
    "credit.method=uniform",
    "optim.schedule=constant",
    "grading.workers=1",
]


CARRIED = ["optim.function=optax.lion", "loss.kl_beta=.01", "loss.reference_every=1", "loss.entropy_target=9"]
"""Another optimizer, a reference that moves and a coefficient that adapts: all in the optimizer's state."""
CARRIED += [
    "data.mixture=[{source: builtin:arithmetic, limit: 9, weight: 0.5, rewards: [exact], arithmetic: {terms: 2}}]"
]
CARRIED += ["grading.rewards=[{name: math}, {name: exact}]", "data.train.rewards=[math]"]
CARRIED += ["data.difficulty={easy_above: 0.5, easy_share: 0.5, hard_below: 0.4, hard_share: 0.5}"]


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_within_an_iteration_saves_the_one_before_and_ends_the_same(
    tmp_path, data, monkeypatch
):
    def config(folder):
        settings = [*SMALL, "checkpoint.every=10", "iterations=4", f"run_dir={folder}", *CARRIED]
        return load_config(data.parent.parent / "configs/demo.yaml", settings)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command.train_once(config(whole), Console(quiet=True), Stop())

    phase, seen = trainer._Phases.__call__, []

    def signalled(self, name):
        seen.append(name)
        if seen.count("update") == 3:  # the third iteration has drawn and graded its rollouts, and would learn
            os.kill(os.getpid(), signal.SIGTERM)
        return phase(self, name)

    with monkeypatch.context() as patch, Stop() as stop:
        patch.setattr(trainer._Phases, "__call__", signalled)
        with pytest.raises(Stopped):
            command.train_once(config(parts), Console(quiet=True), stop)
    assert (seen.count("update"), seen[-1]) == (3, "update")
    assert list(finished(parts / "checkpoints")) == [2]
    assert [row["iteration"] for row in read_metrics(parts / "metrics.jsonl")] == [0, 1, 2]
    drawn, draw = [], SamplerSource.draw

    def counted(self, batch, *args, **rows):
        drawn.append(batch.iteration)
        return draw(self, batch, *args, **rows)

    monkeypatch.setattr(SamplerSource, "draw", counted)
    verdicts = (parts / "verdicts" / "000003.jsonl").read_bytes()
    command.train_once(config(parts), Console(quiet=True), Stop())
    assert drawn == [4]  # the third one's were recorded, and so were their verdicts
    assert (parts / "verdicts" / "000003.jsonl").read_bytes() == verdicts

    model, _ = read_config(whole / "export")
    a, b = load_params(whole / "export", model), load_params(parts / "export", model)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_array_equal(x, y)
    timeless = [
        [
            {k: v for k, v in row.items() if not k.startswith(("seconds", "time", "tokens_per_second", "mfu"))}
            for row in m
        ]
        for m in (read_metrics(whole / "metrics.jsonl"), read_metrics(parts / "metrics.jsonl"))
    ]
    assert timeless[0] == timeless[1]
    assert (whole / "completions.jsonl").read_text() == (parts / "completions.jsonl").read_text()


def timeless(folder):
    """Metrics without what a clock said."""
    clocks = ("seconds", "time", "tokens_per_second", "mfu")
    return [
        {name: value for name, value in row.items() if not name.startswith(clocks)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def test_the_config_of_a_moved_run_does_not_begin_it_anew(tmp_path, data):
    demo, moved = data.parent.parent / "configs/demo.yaml", tmp_path / "moved"
    run_folder.claim(tmp_path / "here", load_config(demo, [f"run_dir={tmp_path / 'here'}"]))
    (tmp_path / "here").rename(moved)
    with pytest.raises(ConfigError, match=f"pass run_dir={moved} to go on with it"):
        command.run(moved / "config.yaml", ["iterations=8"])
    assert not (tmp_path / "here").exists()


def test_another_config_does_not_touch_a_run(tmp_path, data):
    demo = data.parent.parent / "configs/demo.yaml"
    cfg = load_config(demo, [f"run_dir={tmp_path}", "optim.lr=0.25"])
    run_folder.claim(tmp_path, cfg)
    (tmp_path / "start").mkdir()
    run_folder.refuse_another_run(tmp_path, cfg)  # the same command may go on
    other = load_config(demo, [f"run_dir={tmp_path}", "optim.lr=0.5"])
    with pytest.raises(ConfigError, match=r"another config \(optim\.lr was 0\.25, is 0\.5\); set another run_dir"):
        run_folder.refuse_another_run(tmp_path, other)
    shown = load_config(demo, [f"run_dir={tmp_path}", "optim.lr=0.25", "report.html=false"])
    run_folder.refuse_another_run(tmp_path, shown)  # what a run learns does not depend on it
    moved = load_config(demo, ["run_dir=elsewhere", "optim.lr=0.25"])
    run_folder.refuse_another_run(tmp_path, moved)  # the folder was
    (tmp_path / "start").rmdir()
    run_folder.refuse_another_run(tmp_path, other)  # nothing to lose yet
