"""Random sequences of accidents with the real trainer: every one ends bit for bit as a run that nothing happened to.

The runs draw with their own sampler, with a lag of two iterations, and with an engine and a lag of one, where the
accidents are the engine's too. It answers the same way when it is asked again: so any row that comes from another
policy than the schedule says shows. One policy and one grader for all of them. ``tests/storage/test_stateful.py`` has
the longer sequences, with several folders and a fake trainer; ``tests/faults`` kills real processes.
OARJAX_STATEFUL_REAL chooses how many sequences are tried, OARJAX_STATEFUL_SEED which.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stub_engine
import unsound

from oarjax.config.loading import parse_config
from oarjax.data.hf import export, load_params, read_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.report.files import read_metrics
from oarjax.run.inputs import check_inputs
from oarjax.run.run import open_run
from oarjax.sources import records
from oarjax.sources.engine import EngineError
from oarjax.storage import checkpoint
from oarjax.storage.durable import StorageError
from oarjax.storage.folder import claim, locked, refuse_another_run
from oarjax.storage.stop import Stop, Stopped
from oarjax.training import trainer
from oarjax.training.start import prepare

pytestmark = pytest.mark.slow

SEQUENCES = int(os.environ.get("OARJAX_STATEFUL_REAL", "12"))
SEED = int(os.environ.get("OARJAX_STATEFUL_SEED", "0"))
ITERATIONS = 6
ACCIDENTS = ["full disk", "full record", "cut record", "flip", "unfinished", "half a line", "move", "copy"]
LAGS = {"sampler": 0, "lag": 2, "engine": 1}
CLOCKS = ("seconds", "time", "tokens_per_second", "mfu", "sync", "rows_redrawn")


class Killed(Exception):
    pass


class World:
    """The parts that all runs share, and what ends an attempt early."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, kind: str, stack: contextlib.ExitStack):
        policy = write_builtin_policy(folder / "policy", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
        tree = unsound.MICRO | {"run_dir": str(folder / "none"), "policy": {"path": str(policy)}}
        tree |= {"iterations": ITERATIONS, "checkpoint": {"every": 2, "keep": 2}}
        tree["update"] = tree["update"] | {"lag": LAGS[kind]}
        self.lag, self.engine = LAGS[kind], None
        if kind == "engine":
            model = read_config(policy)[0]
            served = export(folder / "served", model, load_params(policy, model), source=policy, untie=True)
            self.engine = stack.enter_context(stub_engine.engine(served, repeats=True))
            self.served = self.engine.params
            where = {"url": f"http://127.0.0.1:{self.engine.server_port}", "weights": str(folder / "weights")}
            tree["rollout"] = tree["rollout"] | {"engine": where | {"dtype": "float32", "retries": 0, "drill": 3}}
        self.run = open_run(parse_config(tree))
        self.start, self.grader = self.run.load(), self.run.grader()
        self.stop, self.act, self.left = Stop(), "", 0
        iterate = trainer.iterate

        def counted(*args, **kwargs):
            self.left -= 1
            if self.left == 0 and self.act == "kill":
                raise Killed
            if self.left == 0 and self.act == "stop":
                self.stop._signalled = True
            return iterate(*args, **kwargs)

        patch.setattr(trainer, "iterate", counted)

    def attempt(self, folder: Path, act: str = "", after: int = 0) -> object:
        """Train in a folder until the end or until something happens; return the params of a run that has ended."""
        self.stop, self.act, self.left = Stop(), act, after
        if self.engine is not None:
            self.engine.params, self.engine.paths[:] = self.served, []  # it has started anew, too
            self.engine.refuse = lambda paths: 500 if act == "engine" and len(paths) > after else 0
        refuse_another_run(folder, self.run.cfg)
        with locked(folder):
            refuse_another_run(folder, self.run.cfg)
            check_inputs(self.run, folder)
            claim(folder, self.run.cfg)
            try:
                params = jax.tree.map(jnp.copy, self.start)  # whose memory the state reuses
                start = prepare(self.run, params, None, folder)
                params = trainer.train(self.run, self.grader, start, folder, self.stop).params
            except (Killed, Stopped, EngineError):
                return None
            assert not act or act == "engine" or self.left > 0, f"{act} did nothing"
            return params


@pytest.fixture(scope="module", params=LAGS)
def world(tmp_path_factory, request) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        made = World(tmp_path_factory.mktemp("real"), patch, request.param, stack)
        with made.grader:
            yield made


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return result(folder, world.attempt(folder))


def result(folder: Path, params: object) -> list[object]:
    records = read_metrics(folder / "metrics.jsonl")
    lines = [{name: value for name, value in record.items() if not name.startswith(CLOCKS)} for record in records]
    return [lines, (folder / "completions.jsonl").read_text(), *map(np.asarray, jax.tree.leaves(params))]


def sealed(folder: Path) -> list[Path]:
    found = (folder / "checkpoints").glob("0*")
    return sorted(at for at in found if at.name.isdecimal() and (at / "manifest.json").exists())


def recorded(folder: Path, lag: int) -> list[Path]:
    """Return the records without which a run ends the same: not those that a checkpoint rests on."""
    drawn = sorted((folder / "rollouts").glob("*.jsonl"))
    return [
        path for path in drawn if lag == 0 or int(path.stem) > lag + max([0, *(int(at.name) for at in sealed(folder))])
    ]


def flip(at: Path) -> None:
    path = max(at.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("number", range(SEQUENCES // len(LAGS)))
def test_any_sequence_of_accidents_ends_the_same(world, whole, tmp_path, monkeypatch, number):
    draw = random.Random(f"{SEED} {number}")
    folder = tmp_path / "run"
    for _ in range(draw.randint(2, 4)):
        act = draw.choice(["stop", "kill", *ACCIDENTS, *([] if world.engine is None else ["engine"] * 4)])
        print(act)
        if act in ("stop", "kill"):
            world.attempt(folder, act, draw.randint(1, ITERATIONS))
        elif act == "engine":
            world.attempt(folder, act, draw.randint(0, 250))
        elif act == "full disk":
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint.ocp.StandardCheckpointer, "save", full)
                with contextlib.suppress(StorageError):
                    world.attempt(folder)
        elif act == "full record":
            with monkeypatch.context() as patch:
                patch.setattr(records.Lines, "write", full_after(draw.randint(0, 40), records.Lines.write))
                with contextlib.suppress(StorageError):
                    world.attempt(folder)
        elif act == "cut record" and (cut := recorded(folder, world.lag)):
            os.truncate(at := draw.choice(cut), draw.randint(0, at.stat().st_size))
        elif act in ("flip", "unfinished") and len(sealed(folder)) > 1:
            flip(sealed(folder)[-1]) if act == "flip" else (sealed(folder)[-1] / "manifest.json").unlink()
        elif act == "half a line" and folder.exists():
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(b'{"iteration": 9')
        elif act in ("move", "copy") and folder.exists():
            new = folder.with_name(f"{folder.name}x")
            folder.rename(new) if act == "move" else shutil.copytree(folder, new)
            folder = new
    ours = result(folder, world.attempt(folder))
    assert len(ours) == len(whole)
    assert ours[:2] == whole[:2]
    for mine, theirs in zip(ours[2:], whole[2:]):
        np.testing.assert_array_equal(mine, theirs)  # type: ignore[arg-type]


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_after(count: int, write: Callable[..., None]) -> Callable[..., None]:
    """Return ``Lines.write`` as it is on a disk that is full after ``count`` lines of rollouts."""
    left = [count]

    def writes(self: records.Lines, record: dict[str, object]) -> None:
        if self.path.parent.name == "rollouts":
            left[0] -= 1
            if left[0] < 0:
                raise StorageError(f"cannot write {self.path}: No space left on device")
        write(self, record)

    return writes
