"""A user's environment classes, good and bad; loaded by path in tests of environments."""

import asyncio
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Literal, Optional

from oarjax.errors import UserError


class TrlCounter:
    """Counts, in the shape of TRL's environment_factory classes; it knows nothing of this package."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self._start = kwargs["start"]
        self._value = self._start
        self.reward = 0.0
        return None

    def increment(self, step: int, note: str | None = None) -> int:
        """
        Increment the counter.

        Args:
            step: Value to add to the counter.
            note: Why.

        Returns:
            The counter's value.
        """
        if self._value > 100:
            raise ValueError("Game over.")
        self._value += step
        self.reward = float(self._value - self._start)
        return self._value

    def describe(self) -> dict:
        """Describe the counter."""
        return {"value": self._value}


class GetReward(TrlCounter):
    """Newer classes of TRL score themselves."""

    def get_reward(self) -> float:
        return 7.0


class Story:
    """Writes what it was given; a number in a text is the turn's reward, and ``end`` ends the episode."""

    def __init__(self, ends: float = 10.0):
        self._ends, self._turns = ends, 0

    def reset(self, topic: str = "none", seed: int = -1) -> None:
        self._told = f"{topic} {seed}"

    def step(self, text: str):
        self._turns += 1
        if text == "end":
            return None
        if text == "end 5":
            return None, 5.0
        noise = random.random()
        told = f"{self._told} {text} turn {self._turns} {noise:.6f} process {os.getpid()}".rpartition(" process")[0]
        return (told, float(text)) if text.isdigit() else told

    def reward(self) -> float:
        return self._ends


class Where:
    """Says which process it lives in, how many resets there were in it, and how often it was closed."""

    resets = 0
    closed = 0

    def reset(self) -> None:
        Where.resets += 1
        self._turns = 0

    def step(self, text: str) -> str | None:
        self._turns += 1
        if text == "die":
            os._exit(9)
        return None if text == "end" else f"{os.getpid()} {Where.resets} {self._turns} {Where.closed}"

    def close(self) -> None:
        Where.closed += 1


class OneWay(Where):
    replayable = False


class Undeclared(Where):
    """Never says the same twice, and does not say so."""

    def step(self, text: str) -> str | None:
        return str(time.monotonic_ns())


class Hostile:
    """Misbehaves on command."""

    def reset(self, word: str = "") -> None:
        if word:
            self.step(word)

    def step(self, text: str):
        word, _, rest = text.partition(" ")
        match word:
            case "exit":
                os._exit(7)
            case "quit":
                sys.exit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "raise":
                raise RuntimeError("x" * 10_000)
            case "recurse":
                return self.step(text)
            case "bytes":
                return b"bytes"
            case "number":
                return 3
            case "triple":
                return "a", 1.0, 2.0
            case "reward":
                return "paid", float(rest)
            case "huge":
                return "paid", 10**400
            case "words":
                return "paid", "much"
            case "flood":
                return "x" * (2**20 + 5)
            case "surrogate":
                return "\ud800 and \0"
            case "print":
                print("noise" * 1000)
                os.write(1, b"noise")
            case "stdin":
                return repr(sys.stdin.read())
            case "secret":
                return os.environ["OARJAX_TEST_API_KEY"]
            case "fork":
                os.fork()
            case "orphan":
                if os.fork() == 0:
                    time.sleep(600)
            case "daemon":
                if os.fork() == 0:
                    os.setsid()
                    Path(rest).write_text(str(os.getpid()))
                time.sleep(600)
            case "hog":
                hog = []
                while True:
                    hog.append(bytearray(b"x") * 10_000_000)
            case "forge":
                for fd in range(3, 64):
                    try:
                        os.write(fd, struct.pack("!i", 8) + b'{"turn":')
                    except OSError:
                        continue
                time.sleep(600)
            case "close":
                os.closerange(3, 64)
        return f"said {text}"

    def reward(self) -> float:
        return 1.0


class Hangs:
    """Ends an episode at once, or never where the hidden number is a multiple of 3."""

    def reset(self, hidden: int) -> None:
        self._hangs = hidden % 3 == 0

    def step(self, text: str) -> tuple[None, float]:
        if self._hangs:
            time.sleep(600)
        return None, 1.0


class Bill:
    """Returns what is no reward at the end."""

    def reset(self, kind: str) -> None:
        self._kind = kind

    def step(self, text: str) -> str | None:
        return None

    def reward(self):
        return {"nan": float("nan"), "none": None, "text": "1", "good": True}[self._kind]


class State:
    """Has attributes of all kinds."""

    shared = "not its own"

    def reset(self, **columns) -> None:
        self.found, self._secret, self.client, self.text = ["a", 1], 1, object(), "x" * 100_000
        self.reward = 3

    @property
    def share(self) -> float:
        return 0.5

    @property
    def broken(self) -> float:
        raise RuntimeError

    def step(self, text: str) -> str | None:
        return None


class Talker:
    def reset(self, **columns):
        return "Hello, what do you want?"

    def step(self, text: str) -> str | None:
        return None


class Stopper:
    def reset(self, **columns) -> None:
        raise UserError("no licence; install one")

    def step(self, text: str) -> str | None:
        return None


class Tooled:
    """Tools with types, and methods that are none."""

    def reset(self, **columns) -> None:
        pass

    def take(
        self,
        amount: int,
        share: float = 1.0,
        tags: list[str] | None = None,
        mode: Literal["all", "some"] = "all",
        where: Optional[dict[str, int]] = None,  # noqa: UP045
    ) -> str:
        """Take some.

        Args:
            amount: How many.
            share: Of the whole.
            tags: Their names.
            mode: How.
            where: Places.
        """
        return f"{amount} {share} {tags}" + (f" {mode} {where}" if where else "")

    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("out of order")

    def raw(self) -> bytes:
        """Return bytes."""
        return b"raw"

    def long(self) -> str:
        """Return a long text."""
        return "y" * 2**20

    def _hidden(self) -> str:
        return "never"

    @staticmethod
    def helper(x):
        return x


class NoDocstring:
    def reset(self) -> None: ...

    def tool(self, x: int) -> str:
        return str(x)


class NoTypes:
    def reset(self) -> None: ...

    def tool(self, x) -> str:
        """Do something."""
        return str(x)


class Async:
    def reset(self) -> None: ...

    async def tool(self) -> str:
        """Do something."""
        await asyncio.sleep(0)
        return ""


class Generic:
    def reset(self) -> None: ...

    def step(self, action: str) -> str:
        return action


class NoReset:
    def step(self, text: str) -> str | None: ...


class Nothing:
    def reset(self) -> None: ...


class Undescribed:
    def reset(self) -> None: ...

    def tool(self, x: int) -> str:
        """Do something."""
        return str(x)


not_a_class = 3
