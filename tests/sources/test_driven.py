"""Episodes that a program of others drives over HTTP: rows of what the policy wrote, whatever the program does."""

import json
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from oarjax.config.learning import EnvironmentConfig
from oarjax.environments import player as player_module
from oarjax.environments.player import Ended, Player, PlayerError, environment_settings
from oarjax.errors import ConfigError
from oarjax.rollout.source import Batch, requested, rollout_of
from oarjax.run.grades import last_states, turn_rewards, written_turns
from oarjax.sources.driven import DrivenEpisodes, DriverLink
from oarjax.sources.engine import ENDPOINT

LONG = 24


class Driver:
    """Plays every episode in a thread of its own, by a function (ask, task) -> reward, as a program of others would."""

    def __init__(self, plays, deadline=30.0):
        self.deadline, self.turns = deadline, 3
        self._plays, self.told, self.cancelled = plays, {}, []

    def start(self, url, token, ended):
        self._url, self._token, self._ended = url + ENDPOINT, token, ended

    def play(self, name, task):
        self.told[name] = []
        threading.Thread(target=self._one, args=(name, task), daemon=True).start()

    def cancel(self, name):
        self.cancelled.append(name)

    def close(self):
        pass

    def _one(self, name, task):
        def ask(ids, **params):
            body = {"model": name, "token_ids": ids, "sampling_params": {"temperature": 1.0, "top_k": -1, **params}}
            request = urllib.request.Request(self._url, json.dumps(body).encode())
            request.add_header("Authorization", f"Bearer {self._token}")
            with urllib.request.urlopen(request, timeout=60) as reply:
                (choice,) = json.loads(reply.read())["choices"]
            logps = [each["logprob"] for each in choice["logprobs"]["content"]]
            self.told[name].append((choice["token_ids"], logps))
            return choice["token_ids"]

        reward, failed, state = 0.0, "", {"rewards": {"r": 0.0}}
        try:
            reward = self._plays(ask, task)
            state["rewards"]["r"] = reward
        except urllib.error.HTTPError as error:
            failed = json.loads(error.read())["error"]["message"]
        except OSError as error:  # of a judge, say
            failed, state = f"{error}", None
        self._ended(Ended(name, reward, failed, state))


def two_turns(ask, task):
    """Say an id before the first turn and two between it and the second, which has three ids at most."""
    first = ask([*task["prompt"], 5])
    ask([*task["prompt"], 5, *first, 7, 8], max_tokens=3)
    return float(task["problem"])


@pytest.fixture(scope="module")
def made():
    cfg = tiny.config(rollout__max_new=LONG)
    policy, steps, state = tiny.build(cfg)
    return cfg, policy, steps, state


def draw(made, plays, **how):
    """Draw a batch of episodes: (rollout, driver)."""
    cfg, _, steps, state = made
    sampler = tiny.sampler(steps, state.params)
    batch = Batch(tiny.prompts(seed=0), jax.random.key(1), 1, 0, cfg.rollout.group_size, LONG)
    problems = np.repeat(np.asarray(batch.prompts.problem), cfg.rollout.group_size).tolist()
    prompts = dict(zip(problems, (request.tokens.tolist() for request in batch.requests)))
    driver = Driver(plays, **how)
    with closing(DriverLink(driver)) as link:
        task = lambda problem: {"problem": problem, "prompt": prompts[problem]}  # noqa: E731
        source = DrivenEpisodes(sampler, link, task, cfg.rollout, stop_ids=(tiny.STOP,), vocab=tiny.VOCAB)
        return rollout_of(batch, requested(batch, source.draw(batch)), pad_id=tiny.PAD), driver


def test_rows_hold_what_was_drawn_and_arrival_changes_no_token(made):
    rollout, driver = draw(made, two_turns)
    width = rollout.tokens.shape[1] - LONG
    twice = 0
    for b, told in enumerate(driver.told.values()):
        turns, logps = [ids for ids, _ in told], np.float32([logp for _, logps in told for logp in logps])
        assert written_turns(rollout)[b] == turns
        row = [5, *turns[0], *([7, 8, *turns[1]] if len(turns) == 2 else [])]
        assert rollout.tokens[b, width : width + len(row)].tolist() == row
        assert rollout.completion[b].sum() == sum(map(len, turns))
        np.testing.assert_array_equal(rollout.filtered_logps[b][rollout.completion[b]], logps)
        assert rollout.ended[b] == (len(turns) == 2 and turns[1][-1] == tiny.STOP)  # else it was cut
        twice += len(turns) == 2 and len(turns[1]) <= 3
    assert twice > len(rollout.ended) / 2
    assert [sum(gains) for gains in turn_rewards(rollout)] == [float(s["rewards"]["r"]) for s in last_states(rollout)]
    _, policy, _, state = made
    whole = tiny.logps_of(policy, state.params, rollout, temperature=1.0)
    np.testing.assert_allclose(whole, np.where(rollout.completion, rollout.behaviour_logps, 0), atol=2e-5)

    def late(ask, task):
        time.sleep(0.2 * (task["problem"] % 2))
        return two_turns(ask, task)

    again, _ = draw(made, late)
    np.testing.assert_array_equal(again.tokens, rollout.tokens)
    np.testing.assert_array_equal(again.completion, rollout.completion)


def test_what_a_program_may_do_wrong_costs_its_episode_alone(made):
    def fork(ask, prompt):
        first = ask(prompt)
        ask([*prompt, (first[0] + 1) % tiny.VOCAB, 7])

    def hot(ask, prompt):
        ask(prompt, temperature=0.7)

    def hang(ask, prompt):
        ask(prompt)
        time.sleep(3)

    def go_on(ask, prompt):
        row = prompt
        while True:
            row = [*row, *ask(row), 7]

    def unjudged(ask, prompt):
        try:
            go_on(ask, prompt)
        except urllib.error.HTTPError:  # the limit
            raise OSError("the judge is gone") from None

    def never(ask, prompt):
        pass

    wrongs = [fork, hot, hang, go_on, never, unjudged]
    numbers = iter(range(100))
    lock, kinds = threading.Lock(), {}

    def plays(ask, task):
        with lock:
            number = next(numbers)
        kinds[number] = wrongs[number % len(wrongs)]
        kinds[number](ask, task["prompt"])
        return 1.0

    rollout, driver = draw(made, plays, deadline=1.0)
    failed = dict(zip(driver.told, map(bool, rollout.origin.failed)))
    kinds = dict(zip(driver.told, (kinds[n] for n in range(len(kinds)))))
    for name, kind in kinds.items():
        assert failed[name] == (kind in (fork, hot, hang, unjudged)), kind
        assert len(driver.told[name]) == {fork: 1, hot: 0, hang: 1, never: 0}.get(kind, len(driver.told[name]))
        assert (name in driver.cancelled) == (kind in (fork, hot, hang))
    for b, kind in enumerate(kinds.values()):
        if kind is go_on:
            turns = len(written_turns(rollout)[b])
            assert rollout.ended[b] == (turns == 3 and rollout.extent[b].sum() < LONG)


def test_a_driver_that_plays_nothing_stops_the_run(made):
    with pytest.raises(
        PlayerError, match=r"no episode asks for a turn: temperature: the run draws with 1\.0, got 0\.5"
    ):
        draw(made, lambda ask, task: ask(task["prompt"], temperature=0.5))


PROCESS = """#!{python}
import json, os, sys, time
setup = json.loads(sys.stdin.readline())
print("a line of a program", 3, sep="\\n", flush=True)
print(json.dumps({ready}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["task"].get("dies"):
        sys.exit(3)
    if asked["task"].get("sleeps"):
        time.sleep(60)
    state = {{"turns": setup["environment"]["agent"]["max_turns"], "direct": os.environ["NO_PROXY"]}}
    end = {{"reward": 2.0, "failed": "", "state": {{**state, "apart": os.getpgid(0) == os.getpid()}}}}
    print(json.dumps({{"ended": asked["play"], **end}}), flush=True)
"""


@pytest.fixture
def player(tmp_path):
    """Make a player whose process says that it is ready, or something else, and ends every episode at once."""

    def make(ready):
        path = tmp_path / "python"
        path.write_text(PROCESS.format(python=sys.executable, ready=ready))
        path.chmod(0o755)
        settings = {"python": str(path)}
        return Player(EnvironmentConfig(name="verifiers:words", turns=4, settings=settings), str(tmp_path))

    return make


def test_a_process_plays_and_its_end_is_told(player, monkeypatch):
    monkeypatch.setenv("no_proxy", "intern")
    news, made = queue.Queue(), player({"ready": True})
    with closing(made):
        made.start("http://127.0.0.1:1", "token", news.put)
        made.play("a", {"prompt": "x"})
        assert news.get(timeout=30) == Ended("a", 2.0, "", {"turns": 4, "direct": "intern,127.0.0.1", "apart": True})
        made.play("b", {"dies": True})
        assert news.get(timeout=30) is None
        made.play("c", {})  # in vain, and no error: its end was told


def test_a_process_that_reads_no_input_stops_the_run(player, monkeypatch):
    """Its pipe holds 64 KiB; what it does read arrives whole."""
    monkeypatch.setattr(player_module, "CLOSING", 0.1)
    news, made = queue.Queue(), player({"ready": True})
    with closing(made):
        made.start("http://127.0.0.1:1", "token", news.put)
        made.play("long", {"prompt": "x" * 10**6})
        assert news.get(timeout=30).name == "long"
        made.play("last", {"sleeps": True})
        made.deadline = 0.2
        with pytest.raises(PlayerError, match=r"verifiers:words reads no input for 0\.2 seconds; raise rollout"):
            made.play("long", {"prompt": "x" * 2**17})


@pytest.mark.parametrize(
    ("ready", "message"), [({"refused": "ModuleNotFoundError: words"}, "ModuleNotFoundError: words"), (None, "words")]
)
def test_a_process_that_does_not_play_says_why(player, tmp_path, ready, message):
    made = player(ready)
    if ready is None:
        (tmp_path / "python").unlink()
    with closing(made), pytest.raises(ConfigError, match=message if ready else "cannot be started"):
        made.start("http://127.0.0.1:1", "token", lambda ended: None)


def test_prints_of_a_taskset_and_of_its_programs_are_not_among_what_is_sent(tmp_path):
    (tmp_path / "verifiers/v1/utils").mkdir(parents=True)
    (tmp_path / "verifiers/v1/utils/loaders.py").write_text(
        "import os\nresolve_env_config = dict\n"
        "def load_environment(config):\n    print('by the task')\n    os.system('echo by a program')\n"
        "    return type('Env', (), {'taskset': []})\n"
    )
    script = Path(player_module.__file__).with_name("verifiers_player.py")
    done = subprocess.run([sys.executable, script, "tasks", "x"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == ""
    assert sorted(done.stderr.splitlines()) == ["by a program", "by the task"]


@pytest.mark.parametrize("settings", [{"python": 3}, {"agent": None}, {"taskset": "x"}])
def test_settings_of_another_form_are_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"rollout.environment.settings.{name}: expected .*, got"):
        Player(EnvironmentConfig(name="verifiers:words", settings=settings), "tokenizer")


def test_settings_are_those_of_verifiers_and_name_what_it_plays():
    made = environment_settings("verifiers:words", {"python": "x", "renderer": {"name": "qwen3"}}, 4)
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    assert made == {"agent": agent, "taskset": {"id": "words"}}
    own = environment_settings("verifiers:words", {"id": "user-sim", "taskset": {"split": "a"}}, 4)
    assert own == {"id": "user-sim", "taskset": {"id": "words", "split": "a"}}
