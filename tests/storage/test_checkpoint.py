"""Checkpoints come back bit for bit, or are put aside with a word."""

import errno
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from oarjax.errors import ConfigError
from oarjax.storage import checkpoint, manifest
from oarjax.storage.checkpoint import Checkpoints, remove_all
from oarjax.storage.durable import StorageError, in_mounted_bucket
from oarjax.storage.manifest import damage, write_manifest, write_seal
from oarjax.types import TrainState


def state(value: float, width: int = 3) -> TrainState:
    params = {"layers": {"kernel": jnp.full((2, width), value), "half": jnp.full(4, value, jnp.bfloat16)}}
    return TrainState(jnp.int32(7), params, optax.adamw(1e-3).init(params), jax.random.key(5))


def save(folder, iterations, *, keep=2, scores=()):
    with Checkpoints(folder, keep=keep) as checkpoints:
        for n in iterations:
            checkpoints.save(n, state(n / 3), {"at": n}, score=dict(scores).get(n))


def trusted(folder):
    """The newest checkpoint that can be trusted, and what was said about others."""
    said = []
    with Checkpoints(folder, keep=2) as checkpoints:
        return checkpoints.trusted(said.append), said


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_state_comes_back_bit_for_bit(tmp_path):
    assert trusted(tmp_path / "c") == (None, [])
    save(tmp_path / "c", (1, 2, 3))
    with Checkpoints(tmp_path / "c", keep=2) as again:
        assert again.trusted(print) == 3
        found, record = again.restore(3, like=state(0.0))
    assert record == {"at": 3}
    assert jax.random.key_data(found.key).tolist() == jax.random.key_data(jax.random.key(5)).tolist()
    saved = state(1.0)
    assert jax.tree.structure(found) == jax.tree.structure(saved)
    for a, b in zip(
        jax.tree.leaves((found.step, found.params, found.opt_state)),
        jax.tree.leaves((saved.step, saved.params, saved.opt_state)),
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert names(tmp_path / "c") == ["000002", "000003"]


def test_the_best_is_kept_besides_the_newest(tmp_path):
    save(tmp_path / "c", range(1, 7), keep=1, scores={1: 0.2, 2: 0.9, 3: 0.9, 5: 0.5})
    assert names(tmp_path / "c") == ["000002", "000006"]


def largest(folder):
    """The largest file of arrays: how they are divided into files, and so whether the manifest is larger, differs."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return max(files, key=lambda path: path.stat().st_size)


def truncate(at):
    path = largest(at)
    path.write_bytes(path.read_bytes()[:-1])


def flip(at):
    path = largest(at)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def flip_manifest(at):
    path = at / "manifest.json"
    path.write_text(path.read_text().replace('"at": 2', '"at": 3'))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (truncate, r"has \d+ bytes, but \d+ were saved"),
        (flip, "is not what was saved .its SHA-256 differs"),
        (lambda at: largest(at).unlink(), "is missing"),
        (flip_manifest, "manifest.json is not what was saved"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, harm, says):
    save(tmp_path / "c", (1, 2))
    harm(tmp_path / "c" / "000002")
    found, (said,) = trusted(tmp_path / "c")
    assert found == 1
    assert said.startswith("checkpoint 000002 cannot be trusted: ")
    assert said.endswith("It is now 000002.damaged; trying the previous one")
    assert re.search(says, said), said
    assert names(tmp_path / "c") == ["000001", "000002.damaged"]


def test_an_unfinished_one_is_put_aside(tmp_path):
    save(tmp_path / "c", (1, 2))
    (tmp_path / "c" / "000002" / "manifest.json").unlink()
    half = tmp_path / "c" / "000003.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c" / "000002", half)
    found, said = trusted(tmp_path / "c")
    assert found == 1
    assert "000003.orbax-checkpoint-tmp: this checkpoint was being written when the run ended" in said[0]
    assert "000002 cannot be trusted: manifest.json is missing: it was not finished. It is now 000002.unf" in said[1]
    assert names(tmp_path / "c") == ["000001", "000002.unfinished"]


def swap(folder):
    (folder / "000001").rename(folder / "x")
    (folder / "000002").rename(folder / "000001")
    (folder / "x").rename(folder / "000002")


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (
            lambda c: (c / "000002").rename(c / "000009"),
            r"000009 is of iteration 2: it was renamed; give .* 000002 again",
        ),
        (swap, r"00000\d is of iteration \d: it was renamed"),
        (lambda c: shutil.copytree(c / "000002", c / "000003"), r"000003 is of iteration 2"),
        (
            lambda c: (c.parent / "run.json").write_text('{"id": "other"}'),
            r"00000\d belongs to run first, but this is run",
        ),
    ],
)
def test_a_checkpoint_that_is_in_another_place_is_refused_and_nothing_touched(tmp_path, move, says):
    (tmp_path / "run.json").write_text('{"id": "first"}')
    save(tmp_path / "c", (1, 2))
    trusted(tmp_path / "c")
    move(tmp_path / "c")
    before = names(tmp_path / "c")
    with pytest.raises(ConfigError, match=says):
        trusted(tmp_path / "c")
    assert names(tmp_path / "c") == before


@pytest.mark.parametrize("where", ["manifest.json", "array", "listing"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_one_that_cannot_be_read_is_not_damaged(tmp_path, monkeypatch, where, number):
    save(tmp_path / "c", (1, 2))
    before = names(tmp_path / "c")
    path = type(tmp_path)
    target = largest(tmp_path / "c" / "000002") if where == "array" else tmp_path / "c" / "000002" / where
    opened, listdir = path.open, os.listdir

    def fails(self, *args, **kwargs):
        if self == target:
            raise OSError(number, "injected", str(self))
        return opened(self, *args, **kwargs)

    def unlisted(folder):
        if where == "listing":
            raise OSError(number, "injected", str(folder))
        return listdir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(path, "open", fails)
        patch.setattr(path, "read_bytes", lambda self: fails(self, "rb").read())
        patch.setattr(os, "listdir", unlisted)
        with pytest.raises(StorageError, match=r"cannot read .*injected.*; nothing was changed") as error:
            trusted(tmp_path / "c")
        assert error.value.exit_code == 75
    assert names(tmp_path / "c") == before
    assert trusted(tmp_path / "c") == (2, [])


def test_before_the_first_is_no_loss_but_after_it_is(tmp_path):
    save(tmp_path / "c", (1,))
    lost = "no intact checkpoint is left, although the run had saved one. Mount the folder again or put a good"
    flip(tmp_path / "c" / "000001")
    with pytest.raises(StorageError, match=lost) as error:
        trusted(tmp_path / "c")
    assert error.value.exit_code == 2
    assert names(tmp_path / "c") == ["000001"]
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(StorageError, match=r"to start over from the beginning, remove c and c\.json in "):
        trusted(tmp_path / "c")
    remove_all(tmp_path / "c")
    assert trusted(tmp_path / "c") == (None, [])


def test_a_failed_write_is_told_once_and_leaves_the_one_before(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.settle()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_manifest", full)
            checkpoints.save(2, state(2), {})
            with pytest.raises(StorageError, match=r"cannot write .*c/000002: .*No space left on device; free space"):
                checkpoints.settle()
        assert names(tmp_path / "c") == ["000001"]
        checkpoints.save(3, state(3), {})  # there is space again
    assert names(tmp_path / "c") == ["000003"]


def test_every_process_hashes_its_own_files(tmp_path, monkeypatch):
    """Of three processes the third wrote nothing; the manifest is the one that a single process writes."""
    names = ["d/root", "manifest.ocdbt", "ocdbt.process_0/d/a", "ocdbt.process_1/d/b", "ocdbt.process_1/d/c"]
    for folder in (tmp_path / "one", tmp_path / "many"):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
    write_manifest(tmp_path / "one", {"iteration": 1})
    hashed, digest = [], manifest._digest
    monkeypatch.setattr(manifest, "SEAL_SECONDS", 20)
    monkeypatch.setattr(manifest, "_digest", lambda path: hashed.append(path.name) or digest(path))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(write_manifest, tmp_path / "many", {"iteration": 1}, processes=3)
        write_seal(tmp_path / "many", process=2, processes=3)
        assert not (tmp_path / "many" / "manifest.json").exists()  # it waits for everybody
        assert set(hashed) <= {"root", "manifest.ocdbt", "a"}
        write_seal(tmp_path / "many", process=1, processes=3)
        first.result(timeout=20)
    both = [(tmp_path / folder / "manifest.json").read_text() for folder in ("one", "many")]
    assert both[0] == both[1]
    assert sorted(hashed) == ["a", "b", "c", "manifest.ocdbt", "root"]
    assert damage(tmp_path / "many") is None
    assert not list((tmp_path / "many").glob("seal-*"))
    monkeypatch.setattr(manifest, "SEAL_SECONDS", 0)
    with pytest.raises(OSError, match=r"seal-0001\.json did not come within 0 s"):
        write_manifest(tmp_path / "many", {}, processes=2)


def test_in_a_mounted_bucket_nothing_is_renamed(tmp_path, monkeypatch):
    """A bucket may copy a folder to rename it: the checkpoint is written where it stays, and read as any other."""
    mounts = tmp_path / "mounts"
    mounts.write_text("rootfs / ext4 rw 0 0\nmy-bucket /home/me/my\\040bucket fuse.gcsfuse rw 0 0\n")
    assert in_mounted_bucket(Path("/home/me/my bucket/runs/a"), mounts)
    assert not in_mounted_bucket(Path("/home/me/other"), mounts)
    assert not in_mounted_bucket(tmp_path, tmp_path / "absent")
    save(tmp_path / "c", (1,))
    monkeypatch.setattr(checkpoint, "in_mounted_bucket", lambda folder: True)
    renamed, rename = [], os.rename
    monkeypatch.setattr(os, "rename", lambda *a, **k: renamed.append(a) or rename(*a, **k))
    save(tmp_path / "c", (2,))
    assert renamed == []
    assert (tmp_path / "c" / "000002" / "commit_success.txt").is_file()
    with Checkpoints(tmp_path / "c", keep=2) as again:
        assert again.trusted(print) == 2
        for n in (1, 2):  # the first from before
            found, _ = again.restore(n, like=state(0.0))
            np.testing.assert_array_equal(found.params["layers"]["kernel"], state(n / 3).params["layers"]["kernel"])


def test_a_mount_that_is_gone_is_not_written_below(tmp_path):
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.settle()
        (tmp_path / "c").rename(tmp_path / "gone")
        with pytest.raises(StorageError, match=r"cannot write .*c/000002: .*No such file or directory"):
            checkpoints.save(2, state(2), {})
        (tmp_path / "c").mkdir()
        checkpoints._device += 1
        with pytest.raises(StorageError, match=r"another device than at the start: was its disk unmounted\?"):
            checkpoints.save(2, state(2), {})
    assert names(tmp_path / "c") == []
    assert names(tmp_path / "gone") == ["000001"]


def test_another_model_is_refused(tmp_path):
    save(tmp_path / "c", (1,))
    with (
        Checkpoints(tmp_path / "c", keep=1) as checkpoints,
        pytest.raises(
            ConfigError, match=r"another model or optimizer: params/layers/kernel is float32\[2, 3\] there and float32"
        ),
    ):
        checkpoints.restore(1, like=state(1.0, width=5))


def test_a_folder_that_cannot_be_created_leaves_no_thread_waiting(tmp_path, monkeypatch):
    """Orbax's threads would wait minutes for it, and hold a process that has reported the error."""
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        before, mkdir = set(threading.enumerate()), os.mkdir

        def forbidden(path, *more, **named):
            if "000001" in os.fspath(path):
                raise PermissionError(errno.EPERM, "Operation not permitted", os.fspath(path))
            mkdir(path, *more, **named)

        monkeypatch.setattr(os, "mkdir", forbidden)
        with pytest.raises(StorageError, match="Operation not permitted"):
            checkpoints.save(1, state(1), {})
        assert not [thread for thread in set(threading.enumerate()) - before if "orbax" in type(thread).__module__]
