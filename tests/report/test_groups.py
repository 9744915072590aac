"""Completions of whole groups: as Parquet, and as JSON for the report."""

import errno

import numpy as np
import pyarrow.parquet as parquet
import pytest

from oarjax.report.command import _facts
from oarjax.report.groups import group_table, read_shown, shows_groups, write_groups, write_shown
from oarjax.storage.durable import DamagedError, StorageError
from oarjax.types import Grades, Rollout


def table():
    completion = np.arange(3) < np.array([1, 3, 2, 2])[:, None]
    zeros = np.zeros((4, 3), np.float32)
    rollout = Rollout(np.zeros((4, 5), np.int32), np.ones((4, 5), bool), completion, zeros, zeros, completion[:, 2])
    rewards = np.float32([1, 0, np.nan, 0.5])
    grades = Grades(rewards, {"math": rewards, "brief": rewards * 2}, ["graded"] * 4, ["7", None, "8", ""], [""] * 4)
    texts = ["a", "b\u2028\n", "<c>", "\ud7ff"]
    return group_table(
        3, rollout, grades, np.float32([1, -1, 0, 0]), prompts=["p", "q"], references=["7", "8"], texts=texts
    )


def test_every_completion_of_every_group_is_there(tmp_path):
    path = write_groups(tmp_path, 3, table())
    assert path == tmp_path / "groups" / "000003.parquet"
    read = parquet.read_table(path).to_pydict()
    assert list(read) == [
        "iteration", "group", "prompt", "completion", "answer", "reference", "reward", "reward/math", "reward/brief",
        "advantage", "verdict", "note", "tokens", "ended",
    ]  # fmt: skip
    assert read["group"] == [0, 0, 1, 1]
    assert read["prompt"] == ["p", "p", "q", "q"]
    assert read["completion"] == table()["completion"]
    assert read["reward"] == [1, 0, None, 0.5]
    assert read["reward/brief"] == [2, 0, None, 1]
    assert read["answer"] == ["7", None, "8", ""]
    assert (read["tokens"], read["ended"]) == ([1, 3, 2, 2], [False, True, False, False])
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_full_disk_is_a_storage_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(StorageError, match=r"000003\.parquet"):
        write_groups(tmp_path, 3, table())


def test_the_first_groups_of_an_iteration_are_kept_for_the_report(tmp_path):
    assert read_shown(tmp_path) == []
    write_shown(tmp_path, 12, table(), count=5)
    path = write_shown(tmp_path, 3, table(), count=1)
    first, *others = read_shown(tmp_path)
    assert [g.iteration for g in (first, *others)] == [3, 12, 12]
    assert (first.prompt, first.reference, first.mean_reward) == ("p", "7", 0.5)
    assert [row.completion for row in others[1].completions] == table()["completion"][2:]
    assert np.isnan(others[1].completions[0].reward)
    assert others[1].mean_reward == 0.5  # of what could be graded
    row = first.completions[0]
    assert (row.rewards, row.tokens, row.ended) == ({"math": 1.0, "brief": 2.0}, 1, False)
    path.write_text("{}")
    with pytest.raises(DamagedError, match=r"000003\.json is not what a run wrote"):
        read_shown(tmp_path)
    path.unlink()
    path.mkdir()  # root reads any file, so permissions would not do
    with pytest.raises(StorageError, match=r"cannot read .*000003\.json: .*; choose another path"):
        read_shown(tmp_path)


def test_facts_that_cannot_be_read_are_not_damaged(tmp_path):
    (tmp_path / "facts.json").mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*facts\.json"):
        _facts(tmp_path)


@pytest.mark.parametrize(("iterations", "shown"), [(3, 3), (30, 16), (1000, 14)])
def test_groups_are_kept_of_about_twelve_iterations(iterations, shown):
    chosen = [n for n in range(1, iterations + 1) if shows_groups(n, iterations)]
    assert chosen[0] == 1
    assert chosen[-1] == iterations
    assert len(chosen) == shown
