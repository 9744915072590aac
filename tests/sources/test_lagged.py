"""Rollouts drawn ahead: by which policy is a schedule, whatever is faster, and a resumed run has the same ones."""

import shutil
import threading
from contextlib import suppress
from typing import Any

import jax
import numpy as np
import pytest
from judge_server import serving
from test_engine import STOP, VOCAB, Engine

from oarjax.config.learning import EngineConfig, RolloutConfig
from oarjax.config.loading import parse_config
from oarjax.errors import ConfigError
from oarjax.rollout.source import Batch, Spent, Turn
from oarjax.sources.engine import EngineError, EngineSource
from oarjax.sources.lagged import LaggedSource, PromptsAhead, why_in_turn
from oarjax.sources.records import EndedTable, RecordedSource, Records
from oarjax.sources.turns import Rules
from oarjax.step.sampling import batch_of_iteration
from oarjax.storage.durable import Failures
from oarjax.types import PromptBatch

LAST = 6
ROLLOUT = RolloutConfig(prompts=2, group_size=2, max_new=4)


class Counted:
    """A stream of prompts whose position is their number."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        tokens = np.full((2, 1), self.position, np.int32)
        return PromptBatch(tokens, np.ones((2, 1), bool), np.array([0, 1], np.int32)), None  # type: ignore[arg-type]

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


class Noisy:
    """Draws row by row, with noise that never comes again; dies after ``left`` rows. In a thread if it is ``held``.

    With ``rest`` it waits after so many rows until it is cancelled.
    """

    together = False
    noise = np.random.default_rng(0)

    def __init__(self, left=10**6, held: Any = None):
        self.left, self.held, self.version, self.given, self.asked = left, held, 0, -1, []
        self.rest, self.rows, self.waits, self.cancelled = -1, [], threading.Event(), False

    def sync(self, params, version):
        self.version = version

    def ready(self):
        self.given = self.version

    def cancel(self):
        self.cancelled, self.left = True, 0
        self.held.set()

    def draw(self, batch, report: Any = None, *, rows):
        table, turns = EndedTable(batch), []
        self.asked.append((batch.iteration, self.version))
        self.rows.append(list(rows))
        for b in rows:
            if len(turns) == self.rest and self.held is not None:
                self.held.clear()
                self.waits.set()
            if self.held is not None:
                self.held.wait(20)
            if self.left == 0:
                raise ConnectionError("the engine died")
            self.left -= 1
            drawn = self.noise.integers(3, 99, 3).astype(np.int32)
            versions = np.full(3, self.version, np.int32)
            turns.append(Turn(batch.requests[b].id, drawn, -self.noise.random(3).astype("f"), versions, "length"))
            report(table.ended([turns[-1]]))
        return turns

    def spent(self):
        return Spent(steps=1)

    def close(self):
        pass


class Run:
    """What a trainer does with rollouts, without learning: begins after ``first`` iterations."""

    def __init__(self, folder, source, *, lag, first=0, position=None, background=None, last=LAST):
        self.prompts, self.source, self.done, self.said = PromptsAhead(Counted()), source, first, []
        if position is not None:
            self.prompts.restore(position)
        records = Records(folder / "rollouts", failures=Failures("stop", print), say=print)
        self.recorded = RecordedSource(source, records)
        self.lagged = LaggedSource(lag, last, self.prompts, self.batch_of, background=background, say=self.said.append)

    def batch_of(self, iteration, prompts):
        return batch_of_iteration(jax.random.key(3), iteration, prompts, rollout=ROLLOUT)

    def iterate(self):
        """Return the turns of the next iteration, while further ones are drawn."""
        source, self.done = self.lagged.bind(self.recorded), self.done + 1
        source.sync(None, self.done - 1)
        return source.draw(self.batch_of(self.done, next(self.prompts)[0]))

    def until(self, last):
        turns = []
        while self.done < last:
            turns.append(self.iterate())
            self.lagged.settle()
        return turns


def words(turns):
    return [(turn.id, turn.tokens.tolist(), turn.logps.tolist(), turn.versions.tolist()) for turn in turns]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("lag", [1, 2, 3, 9])
def test_every_iteration_has_its_version_and_is_drawn_once(tmp_path, lag, threaded):
    source = Noisy()
    run = Run(tmp_path, source, lag=lag, background=source if threaded else None)
    turns = run.until(LAST)
    expected = [max(0, i - 1 - lag) for i in range(1, LAST + 1)]
    assert [{int(v) for turn in each for v in turn.versions} for each in turns] == [{v} for v in expected]
    assert [turn.id.iteration for each in turns for turn in each[:1]] == list(range(1, LAST + 1))
    assert source.asked == list(zip(range(1, LAST + 1), expected))  # in order, nothing twice, nothing after the last
    assert run.lagged.spent().steps == LAST
    assert run.said == []


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("saved", [0, 1, 3, LAST - 1])
def test_a_run_that_is_killed_anywhere_draws_nothing_again(tmp_path, lag, saved):
    """It resumes from the checkpoint of iteration ``saved``, and dies after each row in turn."""
    first = Run(tmp_path, Noisy(), lag=lag)
    before, position = first.until(saved), first.prompts.state()
    assert position == {"position": saved}
    for left in range(0, 4 * (LAST - saved), 3):
        folder = shutil.copytree(tmp_path / "rollouts", tmp_path / str(left) / "rollouts").parent
        dying = Run(folder, Noisy(left), lag=lag, first=saved, position=position)
        seen = []
        with suppress(ConnectionError):  # not if all of it was recorded
            while dying.done < LAST:
                seen.append(dying.iterate())
                dying.lagged.settle()
        resumed = Run(folder, Noisy(), lag=lag, first=saved, position=position)
        after = resumed.until(LAST)
        for ours, theirs in zip(after, seen):
            assert words(ours) == words(theirs)
        versions = [int(each[0].versions[0]) for each in [*before, *after]]
        assert versions == [max(0, i - 1 - lag) for i in range(1, LAST + 1)]
        assert resumed.said == []
        asked = [iteration for iteration, _ in dying.source.asked + resumed.source.asked]
        assert len(asked) - len(set(asked)) <= 1  # only the iteration in which it died


def test_an_engine_draws_while_the_trainer_learns_and_is_waited_for(tmp_path):
    source = Noisy(held=threading.Event())
    source.held.set()
    run = Run(tmp_path, source, lag=1, background=source)
    run.iterate()
    run.lagged.settle()
    source.held.clear()
    assert words(run.iterate())  # though iteration 3 cannot be drawn yet
    assert (source.given, source.asked[-1][0]) == (1, 2) or source.asked[-1] == (3, 1)
    assert 3 not in run.lagged._held
    threading.Timer(0.05, source.held.set).start()
    run.lagged.settle()
    assert 3 in run.lagged._held


def test_it_is_said_why_nothing_overlaps():
    assert why_in_turn(Noisy(), 1) is None
    assert "on the devices that learn" in str(why_in_turn(None, 1))
    assert "2 processes draws and learns in turn" in str(why_in_turn(Noisy(), 2))


def test_what_goes_wrong_in_the_background_is_raised_in_the_trainer(tmp_path):
    source = Noisy(left=6)
    run = Run(tmp_path, source, lag=1, background=source)
    run.iterate()
    with pytest.raises(ConnectionError, match="the engine died"):
        run.lagged.settle()
    run.lagged.settle()  # once


def test_closing_gives_up_what_is_being_drawn(tmp_path):
    """The rows that are recorded are those that a resumed run has, and nothing is written afterwards."""
    source = Noisy(held=threading.Event())
    run = Run(tmp_path, source, lag=1, background=source)
    source.held.set()
    run.until(1)
    position, source.rest = run.prompts.state(), 1
    run.iterate()
    assert source.waits.wait(20)  # for its second row of iteration 3; only ``cancel`` ends that
    run.lagged.close()
    assert source.cancelled
    assert all(thread.name != "lagged" for thread in threading.enumerate())
    record = tmp_path / "rollouts" / "000003.jsonl"
    assert record.read_text().count("\n") == 1
    resumed = Run(tmp_path, Noisy(), lag=1, first=1, position=position)
    assert len(resumed.until(3)[-1]) == 4
    assert list(resumed.source.rows[0]) == [1, 2, 3]


def test_an_engine_gives_up_a_draw_that_is_cancelled():
    """Requests in flight, which would be waited for until their deadline, end."""
    asked = threading.Event()

    def never(number, request, right):
        asked.set()
        return b"drip"

    prompts = PromptBatch(np.array([[5]], np.int32), np.ones((1, 1), bool), np.zeros(1, np.int32))  # type: ignore[arg-type]
    batch = Batch(prompts, jax.random.key(1), 1, 0, group_size=2, max_new=4)
    with serving(Engine, asked=[], fault=never) as server:
        cfg = EngineConfig(url=f"http://127.0.0.1:{server.server_port}", deadline=60.0)
        source, raised = EngineSource(cfg, RolloutConfig(max_new=4), Rules(VOCAB, (STOP,))), []

        def draw():
            try:
                source.draw(batch)
            except EngineError as error:
                raised.append(str(error))

        thread = threading.Thread(target=draw)
        thread.start()
        assert asked.wait(20)
        source.cancel()
        thread.join(20)
        assert not thread.is_alive()
        (said,) = raised
        assert said.startswith("rollout.engine: 0 of 2 rows were drawn, then the run stopped; the same command")
        with pytest.raises(EngineError, match="then the run stopped"):
            source.draw(batch)


def test_rollouts_whose_records_are_lost_are_drawn_anew_and_it_is_said(tmp_path):
    first = Run(tmp_path, Noisy(), lag=2)
    first.until(3)
    (tmp_path / "rollouts" / "000005.jsonl").unlink()
    resumed = Run(tmp_path, Noisy(), lag=2, first=3, position=first.prompts.state())
    turns = resumed.until(LAST)
    assert [int(each[0].versions[0]) for each in turns] == [1, 3, 3]
    assert [text.split(":")[1] for text in resumed.said] == [
        " the rollouts of iteration 5 are drawn after 3 iterations and not 2"
    ]


def test_prompts_that_are_read_ahead_do_not_move_the_position():
    prompts = PromptsAhead(Counted())
    assert prompts.state() == {"position": 0}
    assert int(prompts.ahead(2).tokens[0, 0]) == 3
    assert prompts.state() == {"position": 0}
    assert int(next(prompts)[0].tokens[0, 0]) == 1
    assert prompts.state() == {"position": 1}
    assert int(prompts.ahead(0).tokens[0, 0]) == 2
    prompts.restore({"position": 1})
    assert int(next(prompts)[0].tokens[0, 0]) == 2


def config(**fields):
    tree = {"run_dir": "r", "policy": {"path": "p"}, "data": {"train": {"source": "s"}}, "update": {"lag": 1}}
    return parse_config(tree | fields)


def test_a_lag_is_corrected_for_unless_the_config_says_otherwise():
    off = config().loss.off_policy
    assert (off.weighting, off.max_drift) == ("token_truncate", 0.2)
    assert config(loss={"off_policy": {"max_drift": None}}).loss.off_policy.max_drift is None
    assert config(loss={"off_policy": {"weighting": "none"}}).loss.off_policy.max_drift is None
    assert config(update={"lag": 0}).loss.off_policy.weighting == "none"
    assert parse_config(config().model_dump(mode="json")) == config()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"update": {"lag": 1, "refills": 1}}, "set update.refills=0"),
        ({"data": {"train": {"source": "s"}, "difficulty": {"easy_above": 0.9}}}, "set data.difficulty=null"),
        ({"rollout": {"from": ["a.jsonl"]}}, "rollouts come from files"),
        ({"rollout": {"environment": {"name": "builtin:guess"}}}, "hold no episodes"),
        ({"checkpoint": {"every": 0}}, "set checkpoint.every"),
    ],
)
def test_what_cannot_be_drawn_ahead_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=f"(?s)update.lag: 1, and .*{message}"):
        config(**fields)
