"""Environments in workers: hostile classes cost their episodes alone; replays, live instances and where they live."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from oarjax.environments.pool import Environments, Episode, Step
from oarjax.errors import ConfigError, UserError
from oarjax.grading.pool import GraderError

CLASSES = str(Path(__file__).parent.parent / "golden" / "environments" / "classes.py")
DEADLINE = 2.0  # generous for good turns on a busy machine; they take a millisecond


def environments(name, settings=None, **limits):
    return Environments(f"{CLASSES}:{name}", settings, **{"workers": 2, "deadline": DEADLINE} | limits)


def pids(pool):
    return [worker.process.pid for worker in pool._pool.workers]


def played(pool, episodes):
    """Play episodes turn by turn; return the steps of each."""
    steps = [[] for _ in episodes]
    open_rows = list(range(len(episodes)))
    turn = 1
    while open_rows := [row for row in open_rows if len(episodes[row].texts) >= turn]:
        heard = [tuple(step.text for step in steps[row]) for row in open_rows]
        asked = [
            episodes[row]._replace(texts=episodes[row].texts[:turn], observations=h) for row, h in zip(open_rows, heard)
        ]
        for row, step in zip(open_rows, pool.advance(asked)):
            steps[row].append(step)
        open_rows = [row for row in open_rows if steps[row][-1].text is not None]
        turn += 1
    return steps


STORIES = [Episode({"topic": topic}, seed, ("4", "go", "8", "end 5")) for topic in ("tea", "war") for seed in (1, 2)]


@pytest.fixture(scope="module")
def live():
    with environments("Story", {"ends": 0.5}) as pool:
        yield played(pool, STORIES)


def test_episodes_are_played_turn_by_turn(live):
    for episode, steps in zip(STORIES, live):
        assert [step.reward for step in steps] == [4.0, 0.0, 8.0, 5.5]
        assert [step.failed for step in steps] == [""] * 4
        assert steps[3].text is None
        for turn, step in enumerate(steps[:3], start=1):
            told = f"{episode.columns['topic']} {episode.seed} {episode.texts[turn - 1]} turn {turn} "
            assert step.text.startswith(told)
    assert len({steps[0].text.split()[-1] for steps in live}) == 2  # random numbers, by the seed alone


def test_another_process_gives_the_same_steps(live):
    """As of a resumed run: every turn is the first that its worker hears of."""
    asked = [e._replace(texts=e.texts[:turn]) for e in STORIES for turn in range(1, 5)]
    with environments("Story", {"ends": 0.5}) as pool:
        steps = pool.advance(asked[::-1])[::-1]
    assert steps == [step for steps in live for step in steps]


def test_a_killed_worker_gives_the_same_steps(live):
    with environments("Story", {"ends": 0.5}, workers=1) as pool:
        for turn in range(1, 5):
            heard = [tuple(step.text for step in steps[: turn - 1]) for steps in live]
            steps = pool.advance([e._replace(texts=e.texts[:turn], observations=h) for e, h in zip(STORIES, heard)])
            assert steps == [of_episode[turn - 1] for of_episode in live]
            pool._pool.workers[0].process.kill()


def test_a_turn_goes_to_the_worker_that_holds_its_episode():
    with environments("Where") as pool:
        episodes = [Episode({}, seed, ("a", "b", "c", "end")) for seed in range(12)]
        homes = [[step.text.split() for step in steps[:-1]] for steps in played(pool, episodes)]
        for rows in homes:
            assert len({pid for pid, *_ in rows}) == 1
            assert [turns for _, _, turns, _ in rows] == ["1", "2", "3"]
        resets = {}
        for rows in homes:
            for pid, count, *_ in rows:
                resets[pid] = max(resets.get(pid, 0), int(count))
        assert sum(resets.values()) == 12  # none was played twice
        assert not any(worker.held for worker in pool._pool.workers)


def test_equal_episodes_have_instances_of_their_own():
    with environments("Where", workers=1) as pool:
        same = [Episode({}, 0, ("a", "b"))] * 3
        first, second = (pool.advance([e._replace(texts=e.texts[:turn]) for e in same]) for turn in (1, 2))
        assert [step.text.split()[2] for step in first + second] == ["1"] * 3 + ["2"] * 3
        assert second[-1].text.split()[1] == "3"


def test_an_episode_that_the_caller_ends_is_closed_with_its_final_reward():
    with environments("Where", workers=1) as pool:
        episode = Episode({}, 0, ("a",))
        heard = pool.advance([episode])[0].text
        assert pool.finish([episode._replace(observations=(heard,)), Episode({}, 1, ())]) == [Step(None, state={})] * 2
        assert not pool._pool.workers[0].held
        assert pool.advance([episode])[0].text.split()[1:] == ["3", "1", "2"]  # 3 resets, 1 turn, 2 closed
    with environments("Story", {"ends": 3}, workers=1) as pool:
        assert pool.finish([Episode({}, 0, ("4",))]) == [Step(None, 3.0, state={})]


def test_a_class_that_is_not_replayable_fails_where_its_instance_is_lost():
    with environments("OneWay", workers=1) as pool:
        assert not pool.replayable
        episode = Episode({}, 0, ("a", "b", "c"))
        assert pool.advance([episode._replace(texts=("a",))])[0].text
        assert pool.advance([episode._replace(texts=("a", "b"))])[0].text
        pool._pool.workers[0].process.kill()
        lost, ok, dies = pool.advance([episode, Episode({}, 1, ("a",)), Episode({}, 2, ("die",))])
        assert lost._replace(failed="") == Step(None)
        assert lost.failed in (
            "crash: its instance is lost, and its class says replayable = False",
            "crash: the worker ended with exit code -9",  # noticed only after the turn was sent
        )
        assert ok.text.split()[2] == "1"
        assert dies == Step(None, 0.0, "crash: the worker ended with exit code 9")


def test_a_replay_that_goes_another_way_is_noticed():
    with environments("Undeclared", workers=1) as pool:
        (step,) = pool.advance([Episode({}, 0, ("a", "b"), ("what it said before",))])
        assert step.text is None
        assert step.failed.startswith("crash: turn 1, played again, got another observation; set replayable = False")
    with environments("Where", workers=1) as pool:
        (step,) = pool.advance([Episode({}, 0, ("end", "b"))])
        assert step.failed.startswith("crash: turn 1, played again, ended the episode")


FAILING = {
    "quit": "crash: SystemExit: 3",
    "interrupt": "crash: KeyboardInterrupt (classes.py, line ",
    "raise": f"crash: RuntimeError: {'x' * 500}",
    "recurse": "crash: RecursionError: ",
    "bytes": "crash: TypeError: step returned b'bytes' of type bytes, expected a text or None",
    "number": "crash: TypeError: step returned 3 of type int, expected a text or None",
    "triple": "crash: TypeError: step returned ('a', 1.0, 2.0) of type tuple",
    "reward nan": "crash: ValueError: step returned the reward nan, expected a finite number",
    "reward -inf": "crash: ValueError: step returned the reward -inf, expected a finite number",
    "reward 1e39": "crash: ValueError: step returned the reward 1e+39, expected a finite number",
    "huge": "crash: OverflowError: ",
    "words": "crash: TypeError: step returned the reward 'much' of type str, expected a number",
    "exit": "crash: the worker ended with exit code 7",
}
HARMLESS = {
    "flood": "x" * 2**20 + "\n[5 more characters]",
    "surrogate": "? and \0",
    "print": "said print",
    "stdin": "''",
    "secret": "***",
    "fork": "said fork",
    "orphan": "said orphan",
}
KILLING = {
    "daemon": "timeout: no answer within 2 s",
    "hog": "crash: used more than 200 MB of memory",
    "forge": "crash: the worker sent ",
    "close": "crash: the worker ended with exit code ",
}


def second_turns(pool, texts):
    """Play episodes whose second turn is one of the texts, a harmless one between any two; return the texts' steps."""
    episodes = [Episode({}, seed, ("a", text)) for seed, text in enumerate(t for text in texts for t in (text, "b"))]
    assert pool.advance([e._replace(texts=("a",)) for e in episodes]) == [Step("said a")] * len(episodes)
    steps = pool.advance([e._replace(observations=("said a",)) for e in episodes])
    assert steps[1::2] == [Step("said b")] * len(texts)
    return steps[::2]


def check_failed(steps, failures):
    for step, (text, failed) in zip(steps, failures.items()):
        assert step._replace(failed="") == Step(None), text
        assert step.failed.startswith(failed), (text, step.failed)


def test_hostile_turns_cost_only_themselves(monkeypatch, capfd):
    monkeypatch.setenv("OARJAX_TEST_API_KEY", "not-to-be-seen-1234")
    with environments("Hostile", memory_mb=200) as pool:
        steps = second_turns(pool, [*FAILING, *HARMLESS])
        check_failed(steps, FAILING)
        assert steps[len(FAILING) :] == [Step(text) for text in HARMLESS.values()]
        assert len(steps[list(FAILING).index("raise")].failed) < 600
        before = pids(pool)
    assert "noise" not in capfd.readouterr().out
    assert not any(psutil.pid_exists(pid) for pid in before)


@pytest.mark.slow
def test_turns_that_end_or_stop_their_worker_cost_only_themselves(tmp_path):
    daemon = tmp_path / "daemon"
    with environments("Hostile", memory_mb=200) as pool:
        steps = second_turns(pool, [f"{text} {daemon}" for text in KILLING])
        check_failed(steps, KILLING)
        (in_reset,) = pool.advance([Episode({"word": "exit"}, 0, ("a",))])
        assert in_reset.failed == FAILING["exit"]
        assert pool.advance([Episode({}, 0, ("a", "b"))]) == [Step("said b")]
        assert len(pids(pool)) == 2
    with suppress(psutil.NoSuchProcess):  # killed, but perhaps not reaped yet
        assert psutil.Process(int(daemon.read_text())).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("name", "message"),
    [("Talker", "reset returned 'Hello, what do you want"), ("Stopper", "no licence; install one")],
)
def test_a_class_that_cannot_run_stops_the_run(name, message):
    with environments(name, workers=1) as pool, pytest.raises(UserError, match=message):
        pool.advance([Episode({}, 0, ("a",))])


def test_mistakes_are_named_before_any_worker_starts():
    with pytest.raises(ConfigError, match=r"rollout\.environment: .*Story does not take the settings"):
        environments("Story", {"endless": 1}, field="rollout.environment")
    with environments("Where", workers=1) as pool, pytest.raises(ValueError, match="at least one turn"):
        pool.advance([Episode({}, 0, ())])
    with pytest.raises(GraderError, match="closed"):
        pool.advance([Episode({}, 0, ("a",))])


def test_settings_and_columns_cross_as_json():
    row = {"topic": {"deep": [1, None, "ü"]}}
    with environments("Story", {"ends": 1.5}, workers=1) as pool:
        (step,) = pool.advance([Episode(row, 3, ("9",))])
        assert step.text.startswith("{'deep': [1, None, 'ü']} 3 9 turn 1 ")
