"""Start the process that plays tasks of ``verifiers``, and send it episodes (``verifiers_player.py``, in any Python).

``rollout.environment.name: verifiers:TASKSET`` names one; its settings are verifiers' own, except ``python`` (of an
environment with verifiers in it) and ``renderer``, which turns chats into ids.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from oarjax.config.learning import VERIFIERS, EnvironmentConfig
from oarjax.errors import ConfigError, UserError

STARTING = 300.0
"""Seconds in which the process must be ready."""
CLOSING = 10.0
"""Seconds in which it must end once its input has."""


class PlayerError(UserError, RuntimeError):
    """Raised when the process cannot play. Exit code 75: the same command plays unfinished episodes from reset."""

    exit_code = 75


class Ended(NamedTuple):
    """The end of an episode.

    Attributes:
        name: that it was begun with.
        reward: what its task gave, 0.0 if it failed.
        failed: "", or why it has no reward.
        state: the task's rewards and metrics by name.
    """

    name: str
    reward: float
    failed: str
    state: dict[str, Any] | None


def environment_settings(name: str, settings: Mapping[str, Any], turns: int) -> dict[str, Any]:
    """Return verifiers' EnvConfig: one agent that chats, in this machine's processes, unless ``settings`` differ.

    Raises:
        ConfigError: a setting has another form than that of verifiers.
    """
    for key, kind in (("python", str), ("agent", dict), ("taskset", dict)):
        if not isinstance(settings.get(key, kind()), kind):
            what = "a path" if kind is str else "fields in {...}"
            raise ConfigError(f"rollout.environment.settings.{key}: expected {what}, got {settings[key]!r:.60}")
    fields = {key: value for key, value in settings.items() if key not in ("python", "renderer")}
    plain = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": turns}
    agents = {} if "id" in fields else {"agent": {**plain, **fields.get("agent", {})}}
    return {**fields, **agents, "taskset": {"id": name.removeprefix(VERIFIERS), **fields.get("taskset", {})}}


class Player:
    """The process that plays episodes of a taskset.

    Args:
        tokenizer: folder or name of the policy's.
    """

    def __init__(self, environment: EnvironmentConfig, tokenizer: str) -> None:
        settings = environment.settings
        self.deadline, self.turns, self._name = environment.deadline, environment.turns, environment.name
        self._setup = {
            "environment": environment_settings(self._name, settings, self.turns),
            "renderer": settings.get("renderer"),
            "tokenizer": str(Path(tokenizer).resolve()) if Path(tokenizer).exists() else tokenizer,
        }
        self._python = os.path.expanduser(settings.get("python", sys.executable))
        self._process: subprocess.Popen[str] | None = None

    def start(self, url: str, token: str, ended: Callable[[Ended | None], object]) -> None:
        """Start the process; it asks the token server at ``url``.

        Args:
            ended: called with the end of every episode, from another thread; with None once the process has ended.

        Raises:
            ConfigError: it cannot be started, or does not know the taskset.
        """
        script = str(Path(__file__).with_name("verifiers_player.py"))
        direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        direct = direct if direct == "*" else f"{direct},127.0.0.1".lstrip(",")  # our server is behind no proxy
        try:
            process = subprocess.Popen(
                [self._python, script, "play"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OARJAX_TOKEN": token, "NO_PROXY": direct, "no_proxy": direct},
                start_new_session=True,  # Ctrl-C is for the run, which plays its episodes to their end
            )
        except OSError as error:
            raise ConfigError(
                f"rollout.environment.settings.python: {self._python} cannot be started ({error.strerror}); name the "
                "Python of an environment with verifiers in it"
            ) from None
        self._process, ready, news = process, threading.Event(), []
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    message = dict(json.loads(line))
                except (ValueError, TypeError):
                    sys.stderr.write(line)  # another program than ours printed it
                    continue
                if "ended" in message:
                    ended(Ended(message["ended"], message["reward"], message["failed"], message["state"]))
                else:
                    news.append(message)
                    ready.set()
            ready.set()
            ended(None)

        threading.Thread(target=read, name="verifiers", daemon=True).start()
        self._send({**self._setup, "url": url}, STARTING)
        if not ready.wait(STARTING) or not news or "refused" in news[0]:
            why = news[0]["refused"] if news else "it ended, or was not ready in time; see above"
            self.close()
            raise ConfigError(
                f"rollout.environment: {self._python} does not play {self._name}: {why}; install verifiers 0.4 and the "
                "taskset there, or name another settings.python"
            )

    def play(self, name: str, task: Mapping[str, Any]) -> None:
        """Begin an episode; its requests have its name as their model.

        Raises:
            PlayerError: the process does not read its input.
        """
        self._send({"play": name, "task": dict(task)}, self.deadline)

    def cancel(self, name: str) -> None:
        """End an episode, if it still goes on; see ``play``."""
        self._send({"cancel": name}, self.deadline)

    def _send(self, message: dict[str, Any], seconds: float) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        pipe, until = self._process.stdin.fileno(), time.monotonic() + seconds
        unsent = memoryview(json.dumps(message, default=str).encode() + b"\n")
        look = select.poll()
        look.register(pipe, select.POLLOUT)
        while unsent:
            if not look.poll(1000 * max(until - time.monotonic(), 0)):
                raise PlayerError(
                    f"rollout.environment: the process that plays {self._name} reads no input for {seconds:g} seconds; "
                    "raise rollout.environment.deadline if it was only busy, and start the same command again"
                )
            try:
                unsent = unsent[os.write(pipe, unsent) :]
            except BlockingIOError:
                continue
            except OSError:  # it has ended, which the reading thread tells
                return

    def close(self) -> None:
        """End the process: its input ends, and what does not follow is killed."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=CLOSING)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
