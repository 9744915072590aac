"""Random sequences of accidents over run folders, against a fake trainer that uses the real run-folder code.

Whatever happens, a command ends in one of three ways: the run's end is bit for bit that of a run that nothing happened
to, or exit code 2 and no byte has changed, or exit code 75 and the same command resumes to that end. What it learns
from is drawn an iteration ahead by an older policy, and recorded: rollouts of any other policy would be another end.
OARJAX_STATEFUL chooses how many sequences are tried.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import unsound
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from oarjax.errors import UserError
from oarjax.rollout.source import Batch, Spent, Turn
from oarjax.run.export_target import check_new_folder
from oarjax.sources.lagged import LaggedSource, PromptsAhead
from oarjax.sources.records import RecordedSource, Records
from oarjax.storage import checkpoint, durable
from oarjax.storage.bad_batches import Header, read_bad_batch, write_bad_batch
from oarjax.storage.checkpoint import Checkpoints, finished
from oarjax.storage.durable import Failures, Lines, StorageError, check_guards, read_lines, write_durably
from oarjax.storage.folder import claim, locked, put_aside, refuse_another_run
from oarjax.storage.inputs import record_inputs
from oarjax.types import PromptBatch, TrainState

ITERATIONS, EVERY = 6, 2
CONFIGS = {seed: tiny.config(seed=seed, iterations=ITERATIONS, checkpoint__every=EVERY) for seed in (0, 1)}
ROWS = {"a": 0.25, "b": 0.75}


LAG = 1


def updated(w: np.ndarray, token: int, seed: int, rows: str) -> np.ndarray:
    return np.sin(w * np.float32(1.7) + np.float32(token + seed) * np.float32(ROWS[rows])).astype(np.float32)


def token_of(w: np.ndarray, n: int) -> int:
    """What a policy draws in an iteration."""
    return n + int(abs(float(w[0])) * 1000) % 97


def expected(seed: int, rows: str) -> list[float]:
    policies = [np.full(3, seed, np.float32)]
    for n in range(1, ITERATIONS + 1):
        policies.append(updated(policies[-1], token_of(policies[max(0, n - 1 - LAG)], n), seed, rows))
    return [float(w[0]) for w in policies[1:]]


# The fake trainer -------------------------------------------------------------------------------------------------


class Writer:
    """In the place of Orbax's: the arrays in one file, renamed into place; ``fault`` is raised by the next save."""

    fault: OSError | None = None

    def save(self, at: Path, tree: Any) -> None:
        half = at.with_name(f"{at.name}.orbax-checkpoint-tmp")
        half.mkdir()
        np.savez(half / "state.npz", *(np.asarray(leaf) for leaf in jax.tree.leaves(tree)))
        if Writer.fault is not None:
            raised, Writer.fault = Writer.fault, None
            raise raised
        half.rename(at)

    def wait_until_finished(self) -> None:
        pass

    def restore(self, at: Path, shapes: Any) -> Any:
        with np.load(at / "state.npz") as file:
            leaves = [jnp.asarray(file[f"arr_{i}"]) for i in range(len(file.files))]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def close(self) -> None:
        pass


class Numbered:
    """Prompts of iterations: their number, and the rows of the data."""

    def __init__(self, rows: str) -> None:
        self._rows, self._taken = rows, 0

    def __next__(self) -> tuple[PromptBatch, None]:
        self._taken += 1
        tokens, valid = np.array([[self._taken, ord(self._rows)]], np.int32), np.ones((1, 2), bool)
        return PromptBatch(tokens, valid, np.zeros(1, np.int32)), None  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def restore(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]


class Drawing:
    """A source that draws one token, by its policy."""

    together = False

    def sync(self, params: Any, version: int) -> None:
        self._w, self._version = params["w"], version

    def draw(self, batch: Batch, report: Any = None, *, rows: Any = None) -> list[Turn]:
        token, zeros = token_of(self._w, batch.iteration), np.zeros(1, np.float32)
        versions = np.full(1, self._version, np.int32)
        return [Turn(batch.requests[0].id, np.array([token], np.int32), zeros, versions, "length")]

    def spent(self) -> Spent:
        return Spent()

    def close(self) -> None:
        pass


def fresh(w: np.ndarray, n: int) -> TrainState:
    return TrainState(jnp.asarray(n, jnp.int32), {"w": jnp.asarray(w)}, (), jax.random.key(0))


def train(folder: Path, seed: int, rows: str) -> Generator[int, str | None, None]:
    """What ``oarjax train`` does with a run folder, in its order; yields after every iteration, "stop" stops it."""
    cfg = CONFIGS[seed]
    with ExitStack() as stack:
        refuse_another_run(folder, cfg)
        stack.enter_context(locked(folder))
        refuse_another_run(folder, cfg)
        check_new_folder(folder / "export", field="export.folder", remedy="give another export.folder")
        record_inputs(folder, {"rows/data.train": rows, "version/jax": "1"})
        claim(folder, cfg)
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", keep=10))
        first, position, w = 0, 0, np.full(3, seed, np.float32)
        said: list[str] = []
        failures = Failures("stop", lambda key, text: None)
        records = Records(folder / "rollouts", failures=failures, say=said.append)
        prompts, key = PromptsAhead(Numbered(rows)), jax.random.key(seed)
        lagged = LaggedSource(LAG, ITERATIONS, prompts, lambda n, p: Batch(p, key, n, 0, 1, 1), say=said.append)
        newest = checkpoints.trusted(lambda text: None)
        if newest is not None:
            state, record = checkpoints.restore(newest, like=fresh(w, 0))
            first, position, w = newest, record["position"], np.asarray(state.params["w"])
            prompts.restore(record["data"])
            assert int(state.step) == newest
        lines = stack.enter_context(closing(Lines(folder / "metrics.jsonl", position=position)))
        told = yield first
        for n in range(first + 1, ITERATIONS + 1):
            source = lagged.bind(RecordedSource(Drawing(), records))
            source.sync({"w": w}, n - 1)
            (turn,) = source.draw(Batch(next(prompts)[0], key, n, 0, 1, 1))
            assert said == []
            w = updated(w, int(turn.tokens[0]), seed, rows)
            lines.write({"iteration": n, "w": float(w[0])})
            if n % EVERY == 0 or told:
                checkpoints.save(n, fresh(w, n), {"position": lines.sync(), "data": prompts.state()})
                checkpoints.settle()
                records.prune(min(checkpoints.finished()))
            if told:
                return
            told = yield n
        check_guards(folder / "export")
        (folder / "export").mkdir(exist_ok=True)
        write_durably(folder / "export" / "config.json", json.dumps({"w": w.tolist()}))
        write_durably(folder / "summary.json", json.dumps({"w": w.tolist()}))


def study(folder: Path) -> Generator[int, str | None, None]:
    """What ``oarjax study`` holds while its workers train the runs below its folder, each as ``train`` does."""
    with locked(folder):
        while True:
            yield 0


@dataclass
class Process:
    """A command that is running, with what it remembers of its locks: in truth every process has its own."""

    steps: Generator[int, str | None, None]
    believes: Path  # where it was started
    guards: dict[Path, Callable[[], None]]
    done: int = 0
    notes: bytes | None = None  # checkpoints.json before its last save


@dataclass
class Run:
    """What is known of a run folder from outside."""

    seed: int
    rows: str
    process: Process | None = None
    undo: Callable[[Path], object] | None = None  # of what makes it refuse to start


def everything(folder: Path) -> dict[str, bytes]:
    if not folder.exists():
        return {}
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def saved(folder: Path) -> list[Path]:
    return sorted(
        p for p in (folder / "checkpoints").glob("0*") if p.name.isdecimal() and (p / "manifest.json").exists()
    )


def sealed(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*")) or (folder / "checkpoints.json").exists()


def faulty(real: Callable[..., Any], name: str, number: int) -> Callable[..., Any]:
    def look(path: Any, *args: Any, **options: Any) -> Any:
        if Path(path).name == name:
            raise OSError(number, "injected", str(path))
        return real(path, *args, **options)

    return look


def remove_export(folder: Path) -> None:
    at = folder / "export"
    shutil.rmtree(at) if at.is_dir() else at.unlink()


@contextmanager
def failing(name: str, number: int) -> Iterator[None]:
    """Let every look at files and folders of this name fail."""
    with ExitStack() as stack:
        for owner, call in ((os, "listdir"), (Path, "stat"), (Path, "read_bytes"), (Path, "read_text")):
            stack.enter_context(mock.patch.object(owner, call, faulty(getattr(owner, call), name, number)))
        yield


NAMES = st.sampled_from(["x", "y", "z", "study/arm"])
HEADER = {"kind": "iteration", "number": 1, "minibatch": 1, "step": 0, "wrong": {"update": ["loss"]}, "probe": "last"}
HEADER |= {"key": [0, 0], "key_impl": "threefry2x32", "config_file": "", "policy": "", "compute_dtype": "float32"}
HEADER |= {"platform": "cpu", "versions": {}, "params": None}
TARGETS = ["export", "metrics.jsonl", "checkpoints", "start/policy", "lock", "curve1.png", ".half", "..", "."]
"""Values of export.folder; the first may be."""


class Folders(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.stack.enter_context(mock.patch.object(os, "fsync"))
        writer = SimpleNamespace(StandardCheckpointer=Writer, utils=checkpoint.ocp.utils)
        self.stack.enter_context(mock.patch.object(checkpoint, "ocp", writer))
        Writer.fault = None
        self.runs: dict[str, Run] = {}
        self.study: Process | None = None
        (self.root / "study").mkdir()

    def within(self, process: Process, act: Callable[[], Any]) -> Any:
        with mock.patch.object(durable, "_guards", process.guards):
            return act()

    def attempt(self, process: Process, count: int) -> Exception | None:
        """Take steps of a process, and return what ended it."""
        notes = process.believes / "checkpoints.json"
        for _ in range(count):
            process.notes = notes.read_bytes() if notes.exists() else None
            try:
                process.done = self.within(process, lambda: next(process.steps))
            except (UserError, StopIteration) as error:
                return error
        return None

    def idle(self, name: str) -> bool:
        return name in self.runs and self.runs[name].process is None

    # Commands -----------------------------------------------------------------------------------------------------

    @initialize(count=st.integers(0, ITERATIONS))
    def begin(self, count):
        """Start a run and go some way: few accidents mean anything to an empty folder."""
        self.start("x", 0, "a")
        if count:
            self.advance("x", count, None)

    @rule(name=NAMES, seed=st.sampled_from([0, 1]), rows=st.sampled_from("ab"))
    def start(self, name, seed, rows):
        folder, run, before = self.root / name, self.runs.get(name), everything(self.root / name)
        process = Process(train(folder, seed, rows), folder, {})
        fixed = run is not None and sealed(folder)
        refused = run is not None and (
            run.process is not None or (fixed and (run.seed, run.rows) != (seed, rows)) or (run.undo is not None)
        )
        error = self.attempt(process, 1)
        if error is not None:
            assert refused, error
            assert isinstance(error, UserError)
            assert error.exit_code == 2
            assert everything(folder) == before
            return
        assert not refused
        self.runs[name] = Run(seed, rows, process)

    @rule(
        name=NAMES,
        number=st.sampled_from([errno.EIO, errno.ESTALE, errno.EACCES]),
        unreadable=st.sampled_from(["checkpoints", "config.yaml", "inputs.json", "run.json", "manifest.json"]),
    )
    def start_on_failing_storage(self, name, number, unreadable):
        folder = self.root / name
        if not self.idle(name) or not sealed(folder) or self.runs[name].undo is not None:
            return
        if unreadable == "manifest.json" and not saved(folder):
            return
        run, before = self.runs[name], everything(folder)
        process = Process(train(folder, run.seed, run.rows), folder, {})
        with failing(unreadable, number), pytest.raises(StorageError) as e:
            self.within(process, lambda: next(process.steps))
        assert e.value.exit_code == 75
        assert everything(folder) == before

    @rule(name=NAMES, count=st.integers(1, 4), fault=st.sampled_from([None, None, None, errno.ENOSPC, errno.EIO]))
    def advance(self, name, count, fault):
        run = self.runs.get(name)
        if run is None or run.process is None:
            return
        folder, process, before = self.root / name, run.process, everything(self.root)
        Writer.fault = None if fault is None else OSError(fault, "injected")
        error = self.attempt(process, count)
        if isinstance(error, StopIteration):
            run.process = None
            self.ended(folder, run)
        elif error is not None:
            assert fault is not None or process.believes != folder
            assert isinstance(error, StorageError)
            assert error.exit_code == 75
            run.process = None
        Writer.fault = None
        if process.believes != folder:  # it cannot know where its folder is, and writes nowhere
            assert run.process is None
            assert everything(self.root) == before

    @rule(name=NAMES)
    def stop(self, name):
        run = self.runs.get(name)
        if run is None or run.process is None:
            return
        process, before = run.process, everything(self.root)
        moved = process.believes != self.root / name
        with pytest.raises(StorageError if moved else StopIteration):
            self.within(process, lambda: process.steps.send("stop"))
        assert not moved or everything(self.root) == before
        run.process = None

    @rule(name=NAMES, left=st.sampled_from(["nothing", "half a line", "half a record", "half a folder", "no manifest"]))
    def kill(self, name, left):
        run = self.runs.get(name)
        if run is None or run.process is None:
            return
        folder, process = self.root / name, run.process
        self.within(process, process.steps.close)
        run.process = None
        if left == "half a line":
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(b'{"iteration": 1')
        elif left == "half a record":
            at = folder / "rollouts" / f"{process.done + LAG + 1:06d}.jsonl"
            with at.open("ab") as file:
                file.write(b'{"iteration": ')
        elif left == "half a folder":
            (folder / "checkpoints" / "000009.orbax-checkpoint-tmp").mkdir(exist_ok=True)
        elif left == "no manifest" and saved(folder) and saved(folder)[-1].name == f"{process.done:06d}":
            (saved(folder)[-1] / "manifest.json").unlink()
            if process.notes is None:
                (folder / "checkpoints.json").unlink()
            else:
                (folder / "checkpoints.json").write_bytes(process.notes)

    @rule()
    def begin_a_study(self):
        """A second one in the folder is refused; arms that train, or that another command trains, do not matter."""
        before, process = everything(self.root), Process(study(self.root / "study"), self.root / "study", {})
        error = self.attempt(process, 1)
        assert everything(self.root) == before
        if self.study is not None:
            assert isinstance(error, UserError)
            assert error.exit_code == 2
            return
        assert error is None
        self.study = process

    @rule()
    def end_a_study(self):
        """By its end or by a kill: the system frees the lock."""
        if self.study is not None:
            self.within(self.study, self.study.steps.close)
            self.study = None

    @rule(name=NAMES)
    def restart(self, name):
        """``train --restart`` puts aside what nobody uses."""
        folder, run, before = self.root / name, self.runs.get(name), everything(self.root)
        if run is None:
            return
        if run.process is not None:
            with pytest.raises(UserError, match="in use") as e:
                put_aside(folder)
            assert e.value.exit_code == 2
        else:
            aside = put_aside(folder)
            assert aside is not None
            assert not folder.exists()
            aside.rename(folder)
        assert everything(self.root) == before

    @rule()
    def restart_in_the_folder_of_a_study(self):
        """It is no run's, and stays."""
        before, folder = everything(self.root), self.root / "study"
        if set(os.listdir(folder)) - {"lock"}:
            with pytest.raises(UserError, match="is not the folder of a run"):
                put_aside(folder)
        else:
            assert put_aside(folder) is None
        assert everything(self.root) == before

    @rule(name=NAMES)
    def replay(self, name):
        """Read a kept batch and the checkpoints beside it, whatever happens there: that writes nothing."""
        folder = self.root / name
        if name not in self.runs:
            return
        batch = folder / "bad_batches" / "iteration-000001.safetensors"
        if not batch.exists():
            cfg = CONFIGS[self.runs[name].seed].model_dump(mode="json")
            write_bad_batch(batch.parent, Header(**HEADER, config=cfg), unsound.evidence(), keep=1)
        before = everything(self.root)
        header, _ = read_bad_batch(batch)
        assert header.config["seed"] == self.runs[name].seed
        finished(folder / "checkpoints")
        assert everything(self.root) == before

    @rule(name=NAMES, folder=st.sampled_from(TARGETS))
    def export_to(self, name, folder):
        """Names of the run's own files are refused by the config, before any folder is looked at."""
        before, refused = everything(self.root), folder != TARGETS[0]
        with pytest.raises(ValueError, match=r"export\.folder") if refused else contextlib.nullcontext():
            tiny.config(run_dir=str(self.root / name), export__folder=folder)
        assert everything(self.root) == before

    @rule(name=NAMES, kind=st.sampled_from(["file", "folder", "fifo"]))
    def take_the_place_of_the_export(self, name, kind):
        folder = self.root / name
        if not self.idle(name) or self.runs[name].undo is not None or (folder / "export").exists():
            return
        if kind == "file":
            (folder / "export").write_text("mine")
        elif kind == "fifo":
            os.mkfifo(folder / "export")
        else:
            (folder / "export").mkdir()
            (folder / "export" / "mine").write_text("")
        self.runs[name].undo = remove_export

    # Accidents with folders ---------------------------------------------------------------------------------------

    @rule(name=NAMES, to=NAMES)
    def move(self, name, to):
        if name not in self.runs or to in self.runs:
            return
        (self.root / name).rename(self.root / to)
        self.runs[to] = self.runs.pop(name)  # a process of it lives on, and holds the lock

    @rule(name=NAMES, to=NAMES)
    def copy(self, name, to):
        if self.idle(name) and to not in self.runs and self.runs[name].undo is None:
            shutil.copytree(self.root / name, self.root / to)
            self.runs[to] = Run(self.runs[name].seed, self.runs[name].rows)

    @rule(name=NAMES, how=st.sampled_from(["swap", "rename", "foreign"]), other=NAMES)
    def put_checkpoints_elsewhere(self, name, how, other):
        if not self.idle(name) or self.runs[name].undo is not None or not (here := saved(self.root / name)):
            return

        def rename(before: str, after: str) -> Callable[[Path], object]:
            return lambda folder: (folder / "checkpoints" / before).rename(folder / "checkpoints" / after)

        def swap(folder: Path) -> None:
            for before, after in ((here[0].name, "t"), (here[-1].name, here[0].name), ("t", here[-1].name)):
                rename(before, after)(folder)

        folder = self.root / name
        if how == "swap" and len(here) > 1:
            swap(folder)
            self.runs[name].undo = swap
        elif how == "rename":
            rename(here[-1].name, "000099")(folder)
            self.runs[name].undo = rename("000099", here[-1].name)
        elif how == "foreign" and other in self.runs:
            theirs, run_json = saved(self.root / other), self.root / other / "run.json"
            new = folder / "checkpoints" / theirs[-1].name if theirs else folder
            if theirs and run_json.read_bytes() != (folder / "run.json").read_bytes() and not new.exists():
                shutil.copytree(theirs[-1], new)
                self.runs[name].undo = lambda folder: shutil.rmtree(folder / "checkpoints" / new.name)

    @rule(name=NAMES)
    def undo(self, name):
        run = self.runs.get(name)
        if run is not None and run.undo is not None:
            run.undo(self.root / name)
            run.undo = None

    @rule(name=NAMES)
    def flip_a_bit_of_the_newest(self, name):
        if self.idle(name) and self.runs[name].undo is None and len(here := saved(self.root / name)) > 1:
            content = bytearray((here[-1] / "state.npz").read_bytes())
            content[len(content) // 2] ^= 1
            (here[-1] / "state.npz").write_bytes(content)

    # The end ------------------------------------------------------------------------------------------------------

    def ended(self, folder: Path, run: Run) -> None:
        wanted = expected(run.seed, run.rows)
        lines = [(line["iteration"], line["w"]) for line in read_lines(folder / "metrics.jsonl")]
        assert lines == list(enumerate(wanted, 1))
        assert json.loads((folder / "summary.json").read_text())["w"][0] == wanted[-1]

    def teardown(self):
        try:
            self.end_a_study()
            for process in [run.process for run in self.runs.values() if run.process]:
                self.within(process, process.steps.close)
            for name, run in self.runs.items():
                if run.undo is not None:
                    run.undo(self.root / name)
                process = Process(train(self.root / name, run.seed, run.rows), self.root / name, {})
                assert isinstance(self.attempt(process, 2 * ITERATIONS), StopIteration)
                self.ended(self.root / name, run)
        finally:
            self.stack.close()


Folders.TestCase.settings = settings(
    max_examples=int(os.environ.get("OARJAX_STATEFUL", "20")),
    stateful_step_count=12,
    deadline=None,
    derandomize="OARJAX_STATEFUL" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)
TestFolders = Folders.TestCase
