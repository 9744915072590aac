"""One config per run folder, one process at a time, and nothing is written into a folder that is another's by now."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import pytest
import tiny
import yaml

from oarjax.errors import ConfigError
from oarjax.storage.bad_batches import write_params
from oarjax.storage.checkpoint import Checkpoints
from oarjax.storage.durable import FolderTaken, Lines, StorageError, write_durably
from oarjax.storage.folder import (
    SHOWN,
    claim,
    differences,
    locked,
    mend_id,
    put_aside,
    record_config,
    refuse_another_run,
    run_id,
    saved_config,
)
from oarjax.storage.manifest import write_manifest
from oarjax.types import TrainState


def everything(folder):
    """Path -> content of all files but locks."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def test_a_changed_field_is_taken_until_there_is_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    with locked(run):
        claim(run, tiny.config())
        first = run_id(run)
        (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
        (run / "start.json").write_text("{}")
        claim(run, tiny.config(optim__lr=0.5))
        assert not (run / "metrics.jsonl").exists()
        assert not (run / "start.json").exists()
        assert run_id(run) == first
        (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
        claim(run, tiny.config(optim__lr=0.5))
        assert (run / "metrics.jsonl").exists()  # of the same config
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "000001").mkdir()
        before = everything(run)
        with pytest.raises(
            ConfigError, match=r"another config \(optim.lr was 0.5, is 0.01\); set another run_dir=..., "
        ):
            claim(run, tiny.config())
        assert everything(run) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_not_one_without_checkpoints(tmp_path, monkeypatch, number):
    """Else another config would be taken, and the run's lines removed."""
    claim(tmp_path, tiny.config())
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (tmp_path / "checkpoints" / "000001").mkdir(parents=True)
    (tmp_path / "lost+found").mkdir()
    before, listdir = everything(tmp_path), os.listdir

    def fails(folder):
        if folder.name in ("checkpoints", "lost+found") and folder.exists():
            raise OSError(number, "injected", str(folder))
        return listdir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fails)
        with pytest.raises(StorageError, match=r"cannot read .*checkpoints: .*injected"):
            claim(tmp_path, tiny.config(seed=1))
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        claim(tmp_path, tiny.config(seed=1))
    assert before.keys() - everything(tmp_path).keys() == {tmp_path / "metrics.jsonl"}


@pytest.mark.parametrize(
    ("every", "lines", "refused"), [(0, 1, True), (0, 0, False), (2, 3, False), (2, 4, True), (2, 0, False)]
)
def test_lines_are_progress_where_nothing_else_will_be_saved(tmp_path, every, lines, refused):
    claim(tmp_path, tiny.config(checkpoint__every=every))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"iteration": {n + 1}}}\n' for n in range(lines)))
    if refused:
        with pytest.raises(ConfigError, match="seed was 0, is 1"):
            refuse_another_run(tmp_path, tiny.config(checkpoint__every=every, seed=1))
    else:
        assert refuse_another_run(tmp_path, tiny.config(checkpoint__every=every, seed=1)).words() == ""


def test_the_list_of_differences_is_short(tmp_path):
    changes = {"optim__lr": 0.5, "optim__warmup": 3, "seed": 4, "rollout__max_new": 20, "iterations": 3}
    changes |= {"rollout__prompts": 8, "rollout__group_size": 2, "health__stop_after": 9, "loss__kl_beta": 0.1}
    found = differences(tiny.config().model_dump(mode="json"), tiny.config(**changes))
    refused = len(changes) - 1
    assert len(found.refused) == refused > SHOWN
    claim(tmp_path, tiny.config())
    (tmp_path / "start").mkdir()
    with pytest.raises(ConfigError) as error:
        refuse_another_run(tmp_path, tiny.config(**changes))
    assert str(error.value).count(" was ") == SHOWN + 1  # and the harmless one
    assert f" and {refused - SHOWN} more)" in str(error.value)


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "\ud800"])
def test_a_config_that_is_none_is_a_message(tmp_path, text):
    (tmp_path / "start").mkdir()
    (tmp_path / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"config\.yaml is not the config that the run wrote .*put a good copy there"):
        refuse_another_run(tmp_path, tiny.config())


@pytest.mark.parametrize("replaced", [False, True])
def test_a_moved_folder_is_not_written_to_at_its_old_path(tmp_path, replaced):
    run = tmp_path / "run"
    state = TrainState(jnp.int32(0), {}, (), jax.random.key(0))
    with locked(run):
        claim(run, tiny.config())
        lines = Lines(run / "metrics.jsonl")
        lines.write({"iteration": 1})
        with Checkpoints(run / "checkpoints", keep=1) as checkpoints:
            run.rename(tmp_path / "moved")
            if replaced:
                with locked(run):  # what another process would do
                    claim(run, tiny.config(seed=1))
                    (run / "checkpoints").mkdir()
            before = everything(run)
            for write in (
                lambda: write_durably(run / "summary.json", "{}"),
                lambda: lines.write({"iteration": 2}),
                lambda: Lines(run / "completions.jsonl"),
                lambda: write_params(run / "bad_batches", {}, kind="sft", step=1),
                lambda: checkpoints.save(1, state, {}),
                lambda: Checkpoints(run / "sft", keep=1),
            ):
                with pytest.raises(FolderTaken, match="moved, replaced or unmounted while this process used it"):
                    write()
            assert everything(run) == before
            assert run.exists() == replaced
    write_durably(tmp_path / "moved" / "after.json", "{}")  # nobody holds it any more


def test_a_lock_file_that_was_removed_holds_nothing(tmp_path):
    with locked(tmp_path):
        (tmp_path / "lock").unlink()
        with pytest.raises(FolderTaken):
            write_durably(tmp_path / "x", "")
        with locked(tmp_path):
            pass


def test_a_folder_is_put_aside_whole_and_only_where_nobody_uses_it(tmp_path):
    run = tmp_path / "run"
    assert put_aside(run) is None
    for name in ("run.old", "run.old-2"):
        with locked(run):
            claim(run, tiny.config())
        before, first = sorted(p.name for p in run.iterdir()), run_id(run)
        assert put_aside(run) == tmp_path / name
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == before
        assert run_id(tmp_path / name) == first
        assert not run.exists()
    for place in (run, run / "seed0"):
        claim(place, tiny.config())
    with locked(run / "seed0"), pytest.raises(ConfigError, match="seed0 is in use by process"):
        put_aside(run)
    assert run.exists()


def test_a_folder_of_other_files_is_not_put_aside(tmp_path):
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "sub" / "lock").write_text("mine")
    with pytest.raises(ConfigError, match=r"project is not the folder of a run \(it has no config.yaml\)"):
        put_aside(project)
    claim(project, tiny.config())
    assert put_aside(project) == tmp_path / "project.old"
    assert (tmp_path / "project.old" / "sub" / "lock").read_text() == "mine"  # no run's lock


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    for place in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(ConfigError, match=r"run_dir: cannot write to .*run"), locked(place):
            pass


def test_a_lost_id_is_that_of_the_checkpoints(tmp_path):
    claim(tmp_path, tiny.config())
    first = run_id(tmp_path)
    for name in ("000001", "000002"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        write_manifest(tmp_path / "checkpoints" / name, {"run": first, "iteration": int(name)})
    (tmp_path / "run.json").unlink()
    claim(tmp_path, tiny.config())
    assert run_id(tmp_path) == first


def test_no_id_is_guessed_where_checkpoints_are_of_several_runs(tmp_path):
    """A new one would refuse all of them for ever, also once the foreign one is removed."""
    claim(tmp_path, tiny.config())
    for name in ("000001", "000002"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        write_manifest(tmp_path / "checkpoints" / name, {"run": name * 5, "iteration": int(name)})
    (tmp_path / "run.json").write_text("")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=r"several runs \(00000100, 00000200\); remove those that were copied there"):
        mend_id(tmp_path)
    assert everything(tmp_path) == before
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigError, match="several runs"):
        claim(tmp_path, tiny.config())


def test_the_config_of_a_run_with_progress_is_written_once_it_resumes(tmp_path):
    claim(tmp_path, tiny.config())
    (tmp_path / "start").mkdir()
    before = everything(tmp_path)
    claim(tmp_path, tiny.config(checkpoint__keep=9))
    assert everything(tmp_path) == before
    record_config(tmp_path, tiny.config(checkpoint__keep=9).model_dump(mode="json"))
    assert saved_config(tmp_path).checkpoint.keep == 9


def test_the_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    claim(tmp_path, tiny.config())
    (tmp_path / "start").mkdir()
    path = type(tmp_path)
    read = path.read_text

    def stale(self, *args, **kwargs):
        if self.name == "config.yaml":
            raise OSError(116, "Stale file handle", str(self))
        return read(self, *args, **kwargs)

    monkeypatch.setattr(path, "read_text", stale)
    with pytest.raises(
        StorageError, match=r"cannot read .*config\.yaml: .*Stale file handle.*nothing was changed"
    ) as e:
        refuse_another_run(tmp_path, tiny.config(seed=1))
    assert e.value.exit_code == 75


def test_a_damaged_id_counts_as_none(tmp_path):
    for text in ("", "[]", '{"id": 3}', json.dumps({"id": None})):
        (tmp_path / "run.json").write_text(text)
        assert run_id(tmp_path) is None
    assert yaml.safe_load((claim(tmp_path / "new", tiny.config()) / "config.yaml").read_text())["seed"] == 0
    assert len(run_id(tmp_path / "new") or "") == 32


@pytest.mark.parametrize("controls", [[], ["uniform"]])
def test_a_run_whose_config_has_a_removed_field_resumes(tmp_path, controls):
    cfg = tiny.config()
    known = claim(tmp_path, cfg) / "config.yaml"
    tree = yaml.safe_load(known.read_text())
    tree["report"]["controls"] = controls
    known.write_text(yaml.safe_dump(tree))
    (tmp_path / "checkpoints.json").write_text("{}")
    assert saved_config(tmp_path) == cfg
    assert refuse_another_run(tmp_path, cfg).words() == ""
    with pytest.raises(ConfigError, match="seed was 0, is 1"):
        refuse_another_run(tmp_path, tiny.config(seed=1))
