"""Play tasks of ``verifiers`` (0.4) against the token server of a run, one process for all episodes.

It imports nothing of oarjax, so any Python that has verifiers can run it, in an environment of its own::

    PYTHON verifiers_player.py tasks reverse-text > tasks.jsonl    # rows for data.train
    PYTHON verifiers_player.py play                                # what a run starts; JSON lines in and out

The first line in is the setup: ``environment`` (verifiers' EnvConfig), ``url``, ``tokenizer`` and ``renderer``; the
token is in OARJAX_TOKEN. Then ``{"play": name, "task": {...}}`` and ``{"cancel": name}``. Out come ``{"ready": true}``,
and for each name its reward, why it failed ("" if it did not) and what is known of its end.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from typing import Any

MOST_TASKS = 100_000


def main(arguments: list[str]) -> None:
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # what a task or its programs print must not get into it
    os.dup2(2, 1)
    match arguments:
        case ["tasks", name, *count]:
            write_tasks(name, int(count[0]) if count else MOST_TASKS, out)
        case ["play"]:
            asyncio.run(play(out))
        case _:
            raise SystemExit("verifiers_player.py tasks TASKSET [COUNT], or play")


def environment_config(settings: dict[str, Any]) -> Any:
    from verifiers.v1.utils.loaders import resolve_env_config

    return resolve_env_config(settings)


def write_tasks(name: str, count: int, out: Any) -> None:
    """Write a line per task of a taskset: its prompt as ``question``, an answer that nothing reads, and the task."""
    from itertools import islice

    from verifiers.v1.utils.loaders import load_environment

    env = load_environment(environment_config({"taskset": {"id": name}}))
    for task in islice(env.taskset, count):
        row = {"question": task.data.prompt_text, "answer": "-", "task": task.data.model_dump(mode="json")}
        out.write(json.dumps(row) + "\n")


async def play(out: Any) -> None:
    """Play episodes until standard input ends."""
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running: dict[str, asyncio.Task[None]] = {}

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    setup = json.loads(await lines.readline())
    try:
        from verifiers.v1.utils.loaders import load_environment

        env = load_environment(environment_config(setup["environment"]))
    except Exception as error:
        send({"refused": f"{type(error).__name__}: {error}"})
        return
    async with env.serving():
        send({"ready": True})
        while line := await lines.readline():
            message = json.loads(line)
            if "play" in message:
                name = message["play"]
                running[name] = asyncio.create_task(one(env, setup, name, message["task"], send))
                running[name].add_done_callback(lambda task, name=name: running.pop(name, None))
            elif message["cancel"] in running:
                running[message["cancel"]].cancel()
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def one(env: Any, setup: dict[str, Any], name: str, task: dict[str, Any], send: Any) -> None:
    """Play one episode; the policy is asked under the episode's name, as a model."""
    from verifiers.v1.clients import ModelContext, TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    try:
        client = TrainClientConfig(
            base_url=setup["url"] + "/v1",
            api_key_var="OARJAX_TOKEN",
            renderer=setup["renderer"],
            renderer_model_name=setup["tokenizer"],
        )
        kind = type(env.taskset).task_type()
        built = kind(kind.data_type().model_validate(task), env.config.taskset.task)
        (slot,) = env.slots(built)
        episode = await env.run_slot(slot, ModelContext(client=client, model=name, sampling=SamplingConfig()))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reward = float(sum(trace.reward for trace in episode.traces))
        failed = "" if episode.ok else "; ".join(f"{error.type}: {error.message}" for error in errors) or "not ok"
        if not math.isfinite(reward):
            reward, failed = 0.0, failed or f"its reward is {reward}"
        state = {
            "rewards": {key: value.score for trace in episode.traces for key, value in trace.rewards.items() if value},
            "metrics": {key: value for trace in episode.traces for key, value in trace.metrics.items()},
            "stop": [trace.stop_condition for trace in episode.traces],
        }
        send({"ended": name, "reward": reward, "failed": failed[:2000], "state": state})
    except asyncio.CancelledError:
        send({"ended": name, "reward": 0.0, "failed": "cancelled", "state": None})
        raise
    except Exception as error:
        send({"ended": name, "reward": 0.0, "failed": f"{type(error).__name__}: {error}"[:2000], "state": None})


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # tasksets lie there, and beside this file are modules of other names
    main(sys.argv[1:])
