"""What a run folder is gone on with: its checkpoints, its config, its model. Device programs and grader are fakes."""

import copy
import io
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_config_fields as fakes
import tiny
from conftest import ROOT

import oarjax.training.command
from oarjax.config.loading import load_config, parse_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import ConfigError
from oarjax.grading.recorded import RecordedGrader
from oarjax.storage import folder as run_folder
from oarjax.storage.checkpoint import Checkpoints
from oarjax.storage.durable import Lines, StorageError, read_lines, write_durably
from oarjax.storage.folder import has_progress
from oarjax.storage.manifest import read_manifest, write_manifest
from oarjax.storage.stop import Stop, Stopped
from oarjax.training import run_files
from oarjax.training.extension import check_longer
from oarjax.training.run_files import RunFiles


def of_fakes(**changes):
    """A config whose run is made of fakes, in the current folder."""
    return parse_config(copy.deepcopy(fakes.BASE) | {"checkpoint": {"every": 1}} | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a policy, and one with its finished run beside it, to copy."""
    folder = tmp_path_factory.mktemp("finished")
    write_builtin_policy(folder / "new" / "policies" / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    shutil.copytree(folder / "new", folder / "done")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "done")
        fakes.command(of_fakes())
    return folder


@pytest.fixture
def config(finished, tmp_path, monkeypatch):
    shutil.copytree(finished / "new", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return of_fakes


@pytest.fixture
def nothing_compiled(monkeypatch):
    def never(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(oarjax.training.command, "start_policy", never)


@pytest.fixture
def run(config, finished, tmp_path):
    shutil.copytree(finished / "done" / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_compiled(run, config, nothing_compiled):
    shutil.rmtree("policies/tiny")
    write_builtin_policy("policies/tiny", seed=0, hidden=8, layers=1, heads=2, kv_heads=1, ffn=16)
    with pytest.raises(
        ConfigError, match=r"checkpoint run/checkpoints/000002 is of another model or optimizer: params/"
    ):
        fakes.command(config())


def test_the_checkpoints_own_config_counts_where_the_folders_is_gone(run, config, nothing_compiled):
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"run, checkpoint 000002 holds a run of another config \(seed was 0, is 1\)"):
        fakes.command(config(seed=1))


def test_a_finished_run_only_reports_again(run, config):
    before = (run / "metrics.jsonl").read_text(), (run / "completions.jsonl").read_text()
    log, *_ = fakes.command(config())
    assert [entry for entry in log if entry[0] in ("sample", "evaluate", "sft")] == []
    assert before == ((run / "metrics.jsonl").read_text(), (run / "completions.jsonl").read_text())


def test_a_run_of_a_falling_rate_is_extended_only_when_asked(config):
    """It goes on from its checkpoint with the longer schedule's rates, and says the rate where it is."""
    falling = {"optim": {"schedule": "linear", "warmup": 0, "lr": 1.0}}
    fakes.command(config(**falling))
    longer, shown = config(**falling, iterations=4), io.StringIO()
    with pytest.raises(ConfigError, match=r"iterations was 2, is 4\); rates by optim.schedule=linear end with .*--ext"):
        fakes.command(longer)
    log, *_, metrics, _ = fakes.command(longer, extend=True, shown=shown)
    assert "iterations was 2, is 4: the learning rate after 2 updates is 0.5, was 0 (optim.schedule=linear)" in (
        " ".join(shown.getvalue().split())
    )
    assert len([entry for entry in log if entry[0] == "sample"]) == 2
    assert [row["iteration"] for row in metrics] == [0, 1, 2, 3, 4]
    shutil.rmtree("run/checkpoints/000004")  # as if it had been killed before: the same command needs no option
    fakes.command(longer)
    with pytest.raises(ConfigError, match=r"\(iterations was 4, is 3\); --extend takes more, not fewer"):
        fakes.command(config(**falling, iterations=3), extend=True)


def test_nothing_is_extended_where_nothing_was_kept(run, config, nothing_compiled):
    with pytest.raises(ConfigError, match="--extend: expected a run in none, found none"):
        fakes.command(config(run_dir="none"), extend=True)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="iterations: expected 2, at which run ended without a checkpoint, got 3"):
        fakes.command(config(iterations=3))
    assert (run / "metrics.jsonl").exists()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))  # killed before its first checkpoint
    (run / "start").mkdir(exist_ok=True)
    assert has_progress(run)
    check_longer(run, 3, extend=True)


def test_a_checkpoint_that_fails_costs_no_other(config, monkeypatch):
    """It fails in the background, and is told when the next one is due."""
    settle, told = Checkpoints.settle, []

    def fails_once(self, **how):
        settle(self, **how)
        if self.newest() == 1 and not told:
            told.append(1)
            raise StorageError("the disk is full")

    monkeypatch.setattr(Checkpoints, "settle", fails_once)
    *_, checkpoints, _, _, _ = fakes.command(config(checkpoint={"every": 1, "on_failure": "warn"}))
    assert told
    assert "000002" in checkpoints


def test_the_best_checkpoint_is_one_that_was_written(config, monkeypatch):
    """A failure that shows when the next iteration begins takes its score with it."""
    best, begin = [], RunFiles.begin

    def scored(self, iteration):
        self._best = 0.8
        begin(self, iteration)
        best.append(self._best)

    def fails_in_the_second(self, *, wait=True):
        if not wait and best:
            raise StorageError("the disk is full")

    monkeypatch.setattr(RunFiles, "begin", scored)
    monkeypatch.setattr(Checkpoints, "settle", fails_in_the_second)
    monkeypatch.setattr(Checkpoints, "scores", lambda self: {})
    monkeypatch.setattr(Checkpoints, "save", lambda self, *given, score: None)
    fakes.command(config(checkpoint={"every": 1, "on_failure": "warn"}))
    assert best == [0.8, -math.inf]


def test_verdicts_are_kept_for_the_newest_checkpoints_alone(config, monkeypatch):
    """The best checkpoint, from long ago, would keep those of every later iteration."""
    pruned = []
    monkeypatch.setattr(Checkpoints, "best", lambda self: 1)
    monkeypatch.setattr(RecordedGrader, "prune", lambda self, before: pruned.append(before))
    *_, checkpoints, _, _, _ = fakes.command(config(iterations=4, checkpoint={"every": 1, "keep": 1}))
    assert [name for name in checkpoints if name.startswith("0")] == ["000001", "000004"]
    assert pruned[-1] >= 3  # the last one is written in the background


def test_files_are_cut_to_what_the_checkpoint_knows(run, config):
    """Lines of an iteration that was not saved are written again, once."""
    before = fakes.logged(run / "metrics.jsonl"), (run / "completions.jsonl").read_text()
    shutil.rmtree(run / "checkpoints" / "000002")
    fakes.command(config())
    assert before == (fakes.logged(run / "metrics.jsonl"), (run / "completions.jsonl").read_text())


def test_lost_lines_and_another_version_are_told(run, config, monkeypatch, capsys):
    manifest = run / "checkpoints" / "000001" / "manifest.json"
    shutil.rmtree(run / "checkpoints" / "000002")
    assert json.loads(manifest.read_text())["record"]["record"]["version"]
    (run / "metrics.jsonl").write_text("")
    monkeypatch.setattr(run_files, "version", lambda name: "9.9")
    said = []
    monkeypatch.setattr(run_files.RunFiles, "_say", lambda self, text: said.append(text))
    fakes.command(config())
    assert "metrics.jsonl: the last" in said[1]
    assert "bytes up to iteration 1 are missing; lines were lost" in said[1]
    assert said[0].endswith("this is 9.9")


def test_what_may_differ_and_what_may_not():
    demo = ROOT / "configs/demo.yaml"
    before = load_config(demo, ["optim.schedule=constant"]).model_dump(mode="json")

    def differ(*overrides):
        return run_folder.differences(before, load_config(demo, ["optim.schedule=constant", *overrides]))

    assert differ() == ([], [], [])
    assert differ("report.html=false", "checkpoint.keep=9").harmless == [
        "checkpoint.keep was 2, is 9",
        "report.html was true, is false",
    ]
    padded = ("rollout.completion_bucket=16", "sft.completion_bucket=16")
    assert differ("mesh.data=1", "update.microbatch=64", "rollout.tensor=1", *padded).rounding == [
        "mesh.data was -1, is 1",
        "rollout.completion_bucket was 32, is 16",
        "rollout.tensor was null, is 1",
        "sft.completion_bucket was 8, is 16",
        "update.microbatch was 32, is 64",
    ]
    assert differ("plan.topology=v5e-8", "lab.problems=7").harmless == [
        "lab.problems was 100, is 7",
        "plan.topology was null, is 'v5e-8'",
    ]
    credit = before["credit"] | {"fipo": before["credit"]["fipo"] | {"gamma": 0.99}}
    unread = run_folder.differences(before | {"credit": credit}, load_config(demo, ["optim.schedule=constant"]))
    assert unread.harmless == [f"credit.fipo.gamma was 0.99, is {2 ** (-1 / 32)!r}"]
    assert not unread.refused
    several = ["update.epochs=2", "credit.method=fipo"]
    fipo = load_config(demo, several).model_dump(mode="json")
    fipo["credit"]["fipo"]["gamma"] = 0.99
    assert len(run_folder.differences(fipo, load_config(demo, several)).refused) == 1
    older = {name: section for name, section in before.items() if name != "lora"}  # saved before there was such a field
    assert run_folder.differences(older, load_config(demo, ["optim.schedule=constant"])) == ([], [], [])
    assert differ("rollout.temperature=0.5").refused == ["rollout.temperature was 1.0, is 0.5"]
    assert differ("iterations=40").rounding == ["iterations was 30, is 40"]
    assert differ("iterations=20").refused == ["iterations was 30, is 20"]
    assert run_folder.differences(before, load_config(demo, ["iterations=40"])).refused == [
        "iterations was 30, is 40",
        "optim.schedule was 'constant', is 'linear'",
    ]


def test_adapters_go_on_only_over_the_commit_that_they_began_with():
    def check(commit, folder, **changes):
        run = SimpleNamespace(cfg=tiny.config(**changes), source=Path(folder))
        RunFiles._check_base(SimpleNamespace(_run=run), commit)

    here = "hub/models--Qwen--Qwen2.5-7B/snapshots/bbb"
    with pytest.raises(ConfigError, match=r"at commit aaa, .*, got bbb; set policy.revision=aaa"):
        check("aaa", here, lora__rank=2)
    check("bbb", here, lora__rank=2)
    check("aaa", here)  # every weight is in the checkpoint
    check(None, "some/folder", lora__rank=2)


def test_a_line_is_written_whole_or_not_at_all(tmp_path):
    lines = Lines(tmp_path / "x.jsonl")
    lines.write({"a": 1})
    position = lines.sync()

    class Full:
        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, data):
            file.write(data[:3])
            raise OSError(28, "No space left on device")

    file, lines._file = lines._file, Full()
    with pytest.raises(StorageError, match=r"cannot write .*x\.jsonl: .*No space left on device; free space, or make"):
        lines.write({"b": 2})
    lines._file = file
    lines.write({"c": float("nan")})
    lines.close()
    assert list(read_lines(tmp_path / "x.jsonl")) == [{"a": 1}, {"c": None}]
    again = Lines(tmp_path / "x.jsonl", position=position)
    assert (again.short, list(read_lines(tmp_path / "x.jsonl"))) == (0, [{"a": 1}])
    again.close()
    assert Lines(tmp_path / "x.jsonl", position=position + 5).short == 5


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    write_durably(tmp_path / "x", "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "x", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


@pytest.mark.parametrize("name", ["metrics", "completions"])
def test_a_damaged_line_is_told_before_anything_is_touched(run, config, name):
    shutil.rmtree(run / "checkpoints" / "000002")
    path = run / f"{name}.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    for damage in (b'{"iteration": 1, "rew\n', b"\xff\xfe\n", b"[1]\n"):
        path.write_bytes(first + damage + b"".join(rest))
        files = {p: p.read_bytes() for p in run.rglob("*.jsonl")}
        with pytest.raises(StorageError, match=rf"{name}\.jsonl, line 2: not JSON \(.*; put a good copy .* or remove"):
            fakes.command(config())
        assert files == {p: p.read_bytes() for p in run.rglob("*.jsonl")}
    path.write_bytes(first + b"".join(rest))
    fakes.command(config())
    assert (run / "export").is_dir()


def test_scores_of_two_metrics_are_not_compared(run, config, monkeypatch):
    for at in sorted((run / "checkpoints").glob("0*")):
        manifest = at / "manifest.json"
        noted = read_manifest(at) | {"score": 1e9, "metric": "maj_at_k"}
        manifest.unlink()
        write_manifest(at, noted)
    said = []
    monkeypatch.setattr(run_files.RunFiles, "_say", lambda self, text: said.append(text))
    fakes.command(config(checkpoint={"every": 1, "best": "pass_at_1"}))
    assert said == [
        "checkpoint.best changed from maj_at_k to pass_at_1: earlier scores do not count for the best checkpoint"
    ]


def test_a_stop_in_the_last_step_of_a_warm_start_saves_it(config, monkeypatch):
    whole, steps = fakes.fake_sft_steps, []

    def counted(log, *args, **kwargs):
        update = whole(log, *args, **kwargs).update
        return SimpleNamespace(update=lambda *given: (steps.append(1), update(*given))[1])

    monkeypatch.setattr(fakes, "fake_sft_steps", counted)
    sft = config(sft=fakes.BASE["sft"] | {"steps": 3})
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "asked", lambda self: len(steps) == 3)
        with pytest.raises(Stopped):
            fakes.command(sft)
    fakes.command(sft)
    assert len(steps) == 3


def test_a_warm_start_of_another_config_is_refused(config, tmp_path, monkeypatch):
    sft = fakes.BASE["sft"] | {"steps": 3}
    saving = {"every": 1, "warm_start": 1}
    whole = fakes.fake_sft_steps

    def fails_in_the_third(log, *args, **kwargs):
        steps = whole(log, *args, **kwargs)

        def failing(*given):
            if sum(entry[0] == "sft" for entry in log) == 2:
                raise KeyboardInterrupt
            return steps.update(*given)

        return SimpleNamespace(update=failing)

    with monkeypatch.context() as patch:
        patch.setattr(fakes, "fake_sft_steps", fails_in_the_third)
        with pytest.raises(KeyboardInterrupt):
            fakes.command(config(sft=sft, checkpoint=saving))
    for name in ("config.yaml", "sft.json"):  # a kill between the first checkpoint and the note of it leaves none
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ConfigError, match=r"sft, checkpoint 000002 holds a run of another config \(seed was 0"):
        fakes.command(config(sft=sft, checkpoint=saving, seed=1))
    log, *_ = fakes.command(config(sft=sft, checkpoint=saving))
    assert sum(entry[0] == "sft" for entry in log) < 3
