"""What was drawn once is not drawn again: rollouts come back bit for bit, and only missing rows are drawn."""

import errno
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from oarjax.rollout.source import Batch, EndedRows, Spent, Turn
from oarjax.sources import records as module
from oarjax.sources.records import EndedTable, RecordedSource, Records
from oarjax.step.iteration import iterate
from oarjax.storage.durable import Failures, StorageError, read_lines
from oarjax.system.json import to_json
from oarjax.types import PromptBatch

PROMPTS = PromptBatch(np.array([[0, 5], [6, 7]], np.int32), np.array([[False, True], [True, True]]), np.array([8, 3]))  # type: ignore


def batch(iteration=3, attempt=0, seed=1) -> Batch:
    return Batch(PROMPTS, jax.random.key(seed), iteration, attempt, group_size=2, max_new=4)


class Rows:
    """Draws row by row, with noise that never comes again; dies after ``left`` rows."""

    together = False
    drawn = 0

    def __init__(self, left=100):
        self.left, self.asked = left, []

    def draw(self, batch, report: Any = None, *, rows: Any = None):
        table, turns = EndedTable(batch), []
        self.asked.append(rows.tolist())
        for b in reversed(rows.tolist()):
            if not self.left:
                raise ConnectionError("the engine died")
            self.left, Rows.drawn = self.left - 1, Rows.drawn + 1
            turns.append(turn(batch.requests[b].id, Rows.drawn))
            report(table.ended([turns[-1]]))
        return turns[::-1]

    def sync(self, params, version):
        pass

    def spent(self):
        return Spent()

    def close(self):
        pass


class Together(Rows):
    """Draws all rows, the same ones every time, and reports some of them in two batches."""

    together = True

    def draw(self, batch, report: Any = None, *, rows: Any = None):
        self.asked.append(rows.tolist())
        turns = [turn(request.id, request.id.row) for request in batch.requests]
        ended = EndedTable(batch)
        for rows_ended in ([2], [0, 3]):
            report(ended.ended([turns[b] for b in rows_ended])._replace(turns=()))
        return turns

    def spent(self):
        return Spent(steps=7, tokens=5.5, row_steps=8)


def turn(id, seed):
    draw = np.random.default_rng(seed)
    logps = -draw.random(3).astype(np.float32)
    logps[0] = [np.nan, np.inf, -np.inf, logps[0]][seed % 4]
    versions = np.array([1, 1, 2] if seed % 2 else [4, 4, 4], np.int32)
    experts = draw.integers(0, 9, (5, 2, 1)).astype(np.int32)
    finish = "stop" if seed % 3 else "length"
    return Turn(id, draw.integers(0, 99, 3).astype(np.int32), logps, versions, finish, logps * 2, experts)


@pytest.fixture
def recorded(tmp_path):
    """Make a recorded source as a run that starts again does."""

    def start(source, policy: Any = "stop"):
        said = []
        failures = Failures(policy, lambda key, text: said.append(text))
        return RecordedSource(source, Records(tmp_path / "r", failures=failures, say=said.append)), said

    return start


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.id, a.finish) == (b.id, b.finish)
        for x, y in zip(a, b):
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


def reports(source, batch):
    """Draw a batch; return its turns, and rows, tokens and ends of every report."""
    seen = []

    def report(news: EndedRows):
        seen.append(
            [(b, np.asarray(news.tokens)[b, :3].tolist(), bool(news.ended[b])) for b in sorted(news.rows.tolist())]
        )

    return source.draw(batch, report), seen


@pytest.mark.parametrize("kind", [Rows, Together])
def test_turns_come_back_bit_for_bit_and_are_reported_as_before(recorded, kind, monkeypatch):
    source, _ = recorded(kind())
    first, again = reports(source, batch()), reports(source, batch(attempt=1))  # a refill
    spent = source.spent()
    repeated, said = recorded(kind(left=0))
    for before, attempt in ((first, 0), (again, 1)):
        turns, seen = reports(repeated, batch(attempt=attempt))
        same(turns, before[0])
        assert seen == before[1]
    assert repeated.spent() == spent
    assert (repeated._source.asked, said) == ([], [])
    known = repeated._records.known(batch(), batch().requests)
    monkeypatch.setattr(Records, "known", lambda *_: known)
    monkeypatch.setattr(module, "is_first", lambda: False)  # where an engine's rows are not told as they come
    assert bool(reports(repeated, batch())[1]) == kind.together


def test_only_missing_rows_are_drawn(recorded):
    source, _ = recorded(Rows(left=3))
    with pytest.raises(ConnectionError):
        reports(source, batch())
    resumed, _ = recorded(Rows())
    before = Rows.drawn
    turns, seen = reports(resumed, batch())
    assert resumed._source.asked == [[0]]
    assert Rows.drawn == before + 1
    same(turns[1:], [turn(batch().requests[b].id, before - b + 1) for b in (1, 2, 3)])
    assert [[row for row, *_ in rows] for rows in seen] == [[3], [2], [1], [0]]
    assert resumed.spent().metrics()["rows_redrawn"] == 1
    last, _ = recorded(Rows(left=0))
    same(reports(last, batch())[0], turns)


def test_a_batch_that_is_drawn_together_is_drawn_whole(recorded, tmp_path):
    source, _ = recorded(Together())
    turns, _ = reports(source, batch())
    spent, path = source.spent(), tmp_path / "r" / "000003.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])  # killed while writing
    resumed, said = recorded(Together())
    same(reports(resumed, batch())[0], turns)
    assert (resumed._source.asked, said) == ([[2, 3]], [])
    assert resumed.spent() == spent  # the same rows: nothing is another
    assert len(list(read_lines(path))) == 2 + 4 + 1


@pytest.mark.parametrize(
    "other", [batch(seed=2), batch()._replace(prompts=replace(PROMPTS, tokens=PROMPTS.tokens + 1))]
)
def test_rollouts_of_other_prompts_or_keys_are_drawn_again(recorded, other):
    source, _ = recorded(Rows())
    source.draw(batch())
    changed, said = recorded(Rows())
    changed.draw(other)
    assert changed._source.asked == [[0, 1, 2, 3]]
    assert "of other prompts or keys" in said[0]
    again, _ = recorded(Rows(left=0))
    again.draw(other)  # later lines count


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": 0},
        b"nonsense\n\n",
        {"attempt": 0, "row": 0, "tokens": [1]},
        *({"row": row} for row in ("0", [0], -1, True)),
        *({"tokens": ids} for ids in ([1.5, 2, 3], ["1", "2", "3"], [1, 2, 2**40])),
        {"tokens": [1] * 99, "logps": [-1.0] * 99, "whole_logps": None},
        {"whole_logps": [-1.0]},
        {"experts": [1, 2, 3]},
        {"version": "3"},
        {"report": "0"},
        {"attempt": 0, "spent": {"steps": "7"}},
        {"attempt": 0, "spent": {"steps": None}},
        {"attempt": 0, "spent": 7},
    ],
)
def test_a_damaged_record_is_drawn_again(recorded, tmp_path, wrong):
    source, _ = recorded(Rows())
    source.draw(batch())
    path = tmp_path / "r" / "000003.jsonl"
    if isinstance(wrong, dict):
        whole = {} if "attempt" in wrong else next(iter(read_lines(path)))
        wrong = to_json(whole | wrong).encode() + b"\n"
    path.write_bytes(wrong + path.read_bytes())
    repeated, said = recorded(Rows())
    repeated.draw(batch())
    assert "cannot be read" in said[0]
    assert repeated._source.asked == [[0, 1, 2, 3]]


def test_old_records_go(recorded, tmp_path):
    source, _ = recorded(Rows())
    for iteration in (1, 2, 3):
        source.draw(batch(iteration))
    source._records.prune(2)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["000003.jsonl"]


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_full_disk_stops_the_run_before_it_learns_or_is_a_warning(recorded, policy, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(module, "sync_folder", full)
    source, said = recorded(Together(), policy)
    if policy == "stop":
        with pytest.raises(StorageError, match="no space left"):
            source.draw(batch())
    else:
        assert len(source.draw(batch())) == 4
        assert "Continuing without" in said[0]


def some_groups_equal(rollout):
    rewards = tiny.even_tokens(rollout)
    rewards[:8] = 0
    return rewards


def test_an_iteration_is_repeated_from_its_record_bit_for_bit(recorded):
    cfg = tiny.config(update__refills=2, advantage__scale="batch")
    ends = []

    def fails(*_, **__):
        raise AssertionError("drawn again")

    for sampler in (None, fails):
        _, steps, state = tiny.build(cfg)
        steps = steps if sampler is None else steps._replace(sample=sampler)
        host = tiny.host(some_groups_equal)._replace(source=lambda source: recorded(source)[0])
        state, done = iterate(state, None, 1, steps=steps, host=host, cfg=cfg)
        ends.append((jax.device_get(state.params), done.metrics))
    jax.tree.map(np.testing.assert_array_equal, ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert ends[0][1]["groups_drawn"] > cfg.rollout.prompts  # refilled
    assert ends[0][1]["decode_steps"] > 0
