"""Play episodes in a worker process, which holds the live instances (``oarjax/grading/serving.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oarjax.environments import contract
from oarjax.environments.contract import TurnOutcome
from oarjax.errors import UserError
from oarjax.grading.serving import Answer, Reply, last_line, serve
from oarjax.system.secrets import masked

MAX_NOTE = 500


def main(fd: int) -> None:
    """Serve until the parent closes the socket."""
    serve(fd, _prepare)


def _prepare(setup: dict[str, Any]) -> Answer:
    """Import the class; return the function that plays the turns of a call.

    A call has one reply per operation: ``reset`` begins the episode, ``play`` plays a turn and ``finish`` ends it
    without one. Once the episode is over or has failed, the operations left get the same reply. Otherwise its instance
    stays under the number that the call gave it in ``instance``, for a later call that begins with another operation.
    """
    environment = contract.load_environment(setup["name"], setup["settings"])
    instances: dict[int, Any] = {}

    def operate(operation: str, text: str, call: dict[str, Any], turn: int, instance: Any) -> tuple[Any, TurnOutcome]:
        if operation == "reset":
            return contract.begin(environment, call["columns"], call["seed"]), TurnOutcome("")
        if operation == "play":
            return instance, contract.play(environment, instance, text, seed=call["seed"], turn=turn)
        return instance, contract.finish(instance)

    def answer(call: dict[str, Any], emit: Reply) -> None:
        instance = instances.pop(call["instance"], None)
        reply: dict[str, Any] = {}
        for index, (operation, text) in enumerate(call["operations"]):
            turn = call["turn"] + index
            if not reply or isinstance(reply["text"], str):
                instance, reply = _guarded(lambda: operate(operation, text, call, turn, instance))  # noqa: B023
            if index == len(call["operations"]) - 1 and reply["text"] is not None:
                instances[call["instance"]] = instance
            emit(index, {"turn": turn, **reply})

    return answer


def _guarded(operate: Callable[[], tuple[Any, TurnOutcome]]) -> tuple[Any, dict[str, Any]]:
    """Return an instance and the reply after an operation, whatever it raises."""
    failed = refused = ""
    instance, outcome = None, TurnOutcome(None)
    try:
        instance, outcome = operate()
    except UserError as error:
        refused = masked(_text_of(error))
    except BaseException as error:  # a user's code: SystemExit and KeyboardInterrupt too
        failed = _described(error)
    text = outcome.text if outcome.text is None else masked(outcome.text)
    return instance, {
        "text": text,
        "reward": outcome.reward,
        "state": outcome.state,
        "failed": failed,
        "refused": refused,
    }


def _described(error: BaseException) -> str:
    """Return the kind, the text, and the last line that ran in the class's file."""
    text = f"{type(error).__name__}: {_text_of(error)}".removesuffix(": ")
    if (last := last_line(error)) is None:
        return text
    code, line = last
    return f"{text} ({Path(code.co_filename).name}, line {line}, in {code.co_name})"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:MAX_NOTE]
    except BaseException:  # its own code as well
        return ""
