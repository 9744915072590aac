"""What was graded once is not graded again, and nothing else is taken for it."""

import errno
from concurrent.futures import Future

import numpy as np
import pytest

from oarjax.grading import recorded as verdicts
from oarjax.grading.recorded import RecordedGrader, setup_of
from oarjax.grading.rewards import Sample
from oarjax.storage.durable import Failures, StorageError
from oarjax.types import Grades


class Counting:
    """A grader whose rewards are how many samples it has graded, so that a second look gives another verdict."""

    def __init__(self):
        self.graded = 0

    def submit(self, samples):
        done: Future[Grades] = Future()
        rewards = np.asarray([np.nan, *range(self.graded, self.graded + len(samples) - 1)], np.float32) / 3
        self.graded += len(samples)
        n = len(samples)
        done.set_result(Grades(rewards, {"a": rewards}, ["graded"] * n, [None, *["2"] * (n - 1)], [""] * n))
        return done


def samples(text="x"):
    return [
        Sample(prompt="1+1=", completion=f"{text}{n}\u2028\ud800", answer="2", ended=True, tokens=n) for n in range(3)
    ]


@pytest.fixture
def grading(tmp_path):
    """Make a recorded grader as a run that starts again does: (it, the grader behind it, what it says)."""

    def start(setup="same", policy="stop"):
        behind, said = Counting(), []
        failures = Failures(policy, lambda key, text: said.append(text))
        recorded = RecordedGrader(behind, tmp_path / "v", setup=setup, failures=failures, say=said.append)
        return recorded, behind, said

    return start


def test_verdicts_come_back_bit_for_bit(grading):
    recorded, _, _ = grading()
    recorded.begin(1)
    first, second = (recorded.submit(samples(text)).result() for text in "ab")  # a refill
    again, behind, said = grading()
    again.begin(1)
    for text, before in (("a", first), ("b", second)):
        after = again.submit(samples(text)).result()
        np.testing.assert_array_equal(after.rewards, before.rewards)
        np.testing.assert_array_equal(after.per_reward["a"], before.per_reward["a"])
        assert after.rewards.dtype == np.float32
        assert (after.verdicts, after.answers, after.notes) == (before.verdicts, before.answers, before.notes)
    again.submit(samples("c")).result()  # one that it had not come to
    assert (behind.graded, said) == (3, [])


def test_a_reward_that_overflows_comes_back_as_it_was(grading):
    recorded, behind, _ = grading()
    values = np.asarray([np.inf, -np.inf, np.nan], np.float32)
    behind.submit = lambda samples: finished_with(values)
    recorded.begin(1)
    for attempt in (recorded, grading()[0]):
        attempt.begin(1)
        after = attempt.submit(samples()).result()
        np.testing.assert_array_equal(after.rewards, values)
        np.testing.assert_array_equal(after.per_reward["a"], values)


def finished_with(values):
    done: Future[Grades] = Future()
    done.set_result(Grades(values, {"a": values}, ["graded"] * 3, [None] * 3, [""] * 3))
    return done


@pytest.mark.parametrize(("texts", "graded_again", "verdict"), [("a", 3, "graded"), ("ab", 0, "crash")])
def test_crashes_are_kept_unless_every_one_was(grading, texts, graded_again, verdict):
    """A run whose rewards all crash stops, and grades again once they are mended."""
    recorded, behind, _ = grading()
    grade, nan = behind.submit, np.full(3, np.nan, np.float32)
    crashed: Future[Grades] = Future()
    crashed.set_result(Grades(nan, {"a": nan}, ["crash"] * 3, [None] * 3, ["KeyError"] * 3))
    behind.submit = lambda samples: crashed if samples[0].completion[0] == "a" else grade(samples)
    for text in texts:
        recorded.submit(samples(text)).result()
    again, behind, _ = grading()
    assert again.submit(samples("a")).result().verdicts == [verdict] * 3
    assert behind.graded == graded_again


def test_other_completions_or_rewards_are_graded_again_with_a_word(grading):
    recorded, _, _ = grading()
    recorded.begin(1)
    recorded.submit(samples()).result()
    for setup, text, iteration, words in (("same", "y", 1, 1), ("other", "x", 1, 1), ("same", "x", 2, 0)):
        again, behind, said = grading(setup)
        again.begin(iteration)
        again.submit(samples(text)).result()
        assert behind.graded == 3
        assert len(said) == words
        assert all(
            "v/000001.jsonl: these verdicts are of other completions or rewards; grading" in word for word in said
        )


def test_a_line_cut_by_a_kill_counts_as_none(grading, tmp_path):
    recorded, _, _ = grading()
    recorded.begin(1)
    recorded.submit(samples("a")).result()
    recorded.submit(samples("b")).result()
    path = tmp_path / "v" / "000001.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    for graded in (3, 0):  # and the line that replaces it is whole
        again, behind, _ = grading()
        again.begin(1)
        for text in "ab":
            again.submit(samples(text)).result()
        assert behind.graded == graded


def test_unreadable_verdicts_are_graded_again(grading, tmp_path):
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "000001.jsonl").write_text('{"digest": \n{"digest": "x"}\n')
    recorded, behind, said = grading()
    recorded.begin(1)
    recorded.submit(samples()).result()
    assert behind.graded == 3
    assert "000001.jsonl cannot be read" in said[0]


def test_old_verdicts_go_but_not_the_starts(grading, tmp_path):
    recorded, _, _ = grading()
    for iteration in range(5):
        recorded.begin(iteration)
        recorded.submit(samples()).result()
    recorded.prune(3)
    assert sorted(p.name for p in (tmp_path / "v").iterdir()) == ["000000.jsonl", "000004.jsonl"]


def test_a_full_disk_stops_or_warns(grading, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(verdicts, "sync_folder", full)
    recorded, _, said = grading(policy="stop")
    with pytest.raises(StorageError, match=r"cannot write .*000000\.jsonl: .*No space left on device"):
        recorded.submit(samples()).result()
    recorded, _, said = grading(policy="warn")
    recorded.begin(7)
    assert recorded.submit(samples()).result().rewards[1] == 0
    assert "checkpoint.on_failure is warn" in said[0]


def test_a_setup_knows_the_text_of_its_plugins(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text("a")
    before = setup_of({"deadline": 5}, [str(plugin), "module"])
    assert before == setup_of({"deadline": 5}, [str(plugin), "module"])
    plugin.write_text("b")
    assert len({before, setup_of({"deadline": 5}, [str(plugin), "module"]), setup_of({"deadline": 6}, [])}) == 3
