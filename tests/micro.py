"""Start, stop and compare whole runs of seconds: warm start, refills, minibatches, evaluations, checkpoints, export."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml
from conftest import CACHE
from starts import Started

from oarjax.data.hf import write_random_checkpoint
from oarjax.data.hf_files import read_fields
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.data.tasks.turns import write_turns_policy
from oarjax.report.files import read_metrics

ITERATIONS = 6
CLOCKS = ("seconds", "time", "tokens_per_second", "mfu", "decode_")
"""Beginnings of names of what may differ: times, and work of drawing; a resumed run draws no recorded turn again."""


def micro_config(folder: Path) -> Path:
    """Write the config of a micro run, with its policy beside it."""
    policy = write_builtin_policy(folder / "policy", seed=0, hidden=16, layers=1, heads=2, kv_heads=2, ffn=16)
    terms = {"terms": 2, "highest": 40}
    task = {"source": "builtin:arithmetic", "arithmetic": terms}
    tree: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "iterations": ITERATIONS,
        "device": "cpu",
        "compilation_cache": str(CACHE),
        "policy": {"path": str(policy), "remat": "none"},
        "data": {
            "template": "plain",
            "max_prompt": 16,
            "train": task | {"split": "train", "limit": 40},
            "eval": task | {"split": "eval", "limit": 8},
        },
        "sft": {
            "data": {
                "source": "builtin:arithmetic",
                "split": "sft",
                "limit": 64,
                "arithmetic": {**terms, "written": 0.0},
            },
            "steps": 40,
            "batch": 8,
            "microbatch": 8,
            "max_length": 32,
        },
        "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 16, "completion_bucket": 12},
        "grading": {"rewards": [{"name": "exact"}, {"name": "format", "weight": 0.1}], "workers": 1},
        "credit": {"answer": {"style": "hash"}},
        "update": {"epochs": 2, "minibatches": 2, "microbatch": 8, "refills": 1},
        "optim": {"lr": 1e-3},
        "eval": {"every": 3, "batch": 8},
        "checkpoint": {"every": 2, "warm_start": 10},
        "report": {"completions": 2, "html": False},
    }
    (folder / "micro.yaml").write_text(yaml.safe_dump(tree))
    return folder / "micro.yaml"


KINDS = """
import asyncio
import os
import time
from oarjax import reward

real = time.time
time.time = lambda shift=os.getpid() * 7919 % 172800 - 86400: real() + shift


@reward("shortest", per="group")
def shortest(samples):
    return [float(s.tokens == min(s.tokens for s in samples)) for s in samples]


@reward("waited")
async def waited(sample):
    await asyncio.sleep(0.001 * (sample.tokens % 7))
    return float(sample.tokens % 3 == 0)
"""


def ragged_config(config: Path) -> Path:
    """Write beside a micro config one whose rows take turns in fewer slots, with rewards of groups and async ones.

    The clock of every process is wrong by up to a day, so that it jumps whenever the run is started again.
    """
    plugin, tree = config.with_name("kinds.py"), yaml.safe_load(config.read_text())
    plugin.write_text(KINDS)
    tree["rollout"] |= {"slots": 8, "segment": 4}
    others = [{"name": "shortest", "weight": 0.1}, {"name": "waited", "weight": 0.1}]
    tree["grading"] |= {"plugins": [str(plugin)], "rewards": [*tree["grading"]["rewards"], *others]}
    config.with_name("ragged.yaml").write_text(yaml.safe_dump(tree))
    return config.with_name("ragged.yaml")


def carrying_config(config: Path) -> Path:
    """Write beside a ragged config one whose runs carry more: adapters, a mixture, rewards of problems, a teacher.

    The teacher is in the host's memory; optimizer and coefficient of the entropy have states of their own.
    """
    tree = yaml.safe_load(config.read_text())
    teacher = write_builtin_policy(
        config.with_name("teacher"), seed=1, hidden=24, layers=2, heads=2, kv_heads=2, ffn=16
    )
    tree["lora"] = {"rank": 2, "alpha": 4, "targets": ["q", "v"]}
    tree["loss"] = {"teacher": str(teacher), "reference": "host", "kl_in": "token", "kl_beta": 0.1}
    tree["loss"] |= {"entropy_target": 9}
    tree["iterations"] = 4
    tree["optim"] |= {"function": "optax.lion"}
    tree["update"]["skip_zero_variance"] = False
    tree["advantage"] = {"method": "problem", "scale": "problem"}
    train = tree["data"]["train"] | {"limit": 8}
    tree["data"] |= {"train": train, "mixture": [train | {"limit": 5, "weight": 0.5, "rewards": ["exact", "waited"]}]}
    tree["data"] |= {"difficulty": {"easy_above": 0.5, "easy_share": 0.3, "hard_below": 0.4, "hard_share": 0.7}}
    config.with_name("carrying.yaml").write_text(yaml.safe_dump(tree))
    return config.with_name("carrying.yaml")


UNRULY = """
import os


class Unruly:
    def reset(self, hidden, seed):
        self._hidden, self._seed, self._turn = hidden, seed, 0

    def step(self, text):
        self._turn += 1
        match (len(text) + self._seed + 3 * self._turn) % 16:
            case 0:
                raise RuntimeError("out of order")
            case 1:
                return b"bytes"
            case 2:
                return "paid", float("nan")
            case 3:
                os._exit(3)
            case 4:
                return "9" * 70_000
            case 5:
                os.fork()
        guess = int(text) if text.isdigit() and len(text) < 9 else 0
        if guess == self._hidden:
            return None, 1.0
        return "higher" if guess < self._hidden else "lower", 0.1 * (guess > 0)
"""


def episodes_config(config: Path) -> Path:
    """Write beside a micro config one of episodes whose environment misbehaves, with credit by turns.

    Moments of the adapters are bfloat16.
    """
    plugin, tree = config.with_name("unruly.py"), yaml.safe_load(config.read_text())
    plugin.write_text(UNRULY)
    turns = write_turns_policy(config.with_name("turns"), seed=0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields = read_fields(turns) | sizes | {"num_key_value_heads": 2}
    tree["policy"]["path"] = str(write_random_checkpoint(config.with_name("small"), fields, seed=0, tokenizer=turns))
    for name, part in {"train": tree["data"], "eval": tree["data"], "data": tree["sft"]}.items():
        part[name] = {"source": "builtin:guess", "split": "sft" if name == "data" else name, "limit": 8}
    tree["rollout"] |= {"max_new": 24, "completion_bucket": 24}
    tree["rollout"]["environment"] = {"name": f"{plugin}:Unruly", "turns": 4, "deadline": 300}
    tree["grading"]["rewards"] = [{"name": "environment"}]
    tree["lora"] = {"rank": 2, "alpha": 4, "targets": ["q", "v"]}
    tree["optim"] |= {"moments": "bfloat16"}
    tree["iterations"] = 4
    tree["credit"] = {"method": "turn_rewards", "turn_rewards": {"discount": 0.5}, "answer": {"style": "none"}}
    config.with_name("episodes.yaml").write_text(yaml.safe_dump(tree))
    return config.with_name("episodes.yaml")


def command(config: Path, run: Path, *changes: str) -> list[str]:
    return [sys.executable, "-m", "oarjax.cli", *arguments(config, run, *changes)]


def arguments(config: Path, run: Path, *changes: str) -> list[str]:
    return ["train", str(config), f"run_dir={run}", *changes]


def start(
    config: Path, run: Path, *changes: str, log: Path | None = None, **environment: str
) -> Started | subprocess.Popen:
    """The command in a process of its own; what it prints goes to a file beside the run's folder.

    With an environment of its own it is a process from the beginning, otherwise a fork of one that has its imports.
    """
    log = log or run.with_suffix(".log")
    if not environment:
        return Started(arguments(config, run, *changes), log=log, environment={"COLUMNS": "1000"})
    with log.open("ab") as file:
        return subprocess.Popen(
            command(config, run, *changes),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"COLUMNS": "1000"} | environment,
        )


def finish(config: Path, run: Path, *changes: str, log: Path | None = None, **environment: str) -> tuple[int, str]:
    """Run the command to its end; return the exit code, and all output for this folder so far."""
    code = start(config, run, *changes, log=log, **environment).wait(timeout=600)
    return code, (log or run.with_suffix(".log")).read_text(errors="replace")


def output(run: Path) -> str:
    return run.with_suffix(".log").read_text(errors="replace")


def kill_after(process: Started | subprocess.Popen, seconds: float) -> float | None:
    """Kill it with signal 9 once it has used so many seconds of processor; where it ended before, return what it used.

    CPU time, so that its progress does not depend on the load of the machine.
    """
    used = 0.0
    while process.poll() is None:
        used = max(used, cpu_seconds(process.pid))
        if used >= seconds:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return None
        time.sleep(0.005)
    return used


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, over all its threads."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0


def whole_run(config: Path, run: Path, *changes: str) -> float:
    """Run the command to its end; return its CPU time."""
    process, seconds = start(config, run, *changes), 0.0
    while process.poll() is None:
        seconds = max(seconds, cpu_seconds(process.pid))
        time.sleep(0.005)
    if process.returncode != 0:
        raise AssertionError(output(run))
    return seconds


def wait_for(process: Started | subprocess.Popen, path: Path, text: str = "", *, seconds: float = 300) -> None:
    """Return once a file is there and holds a text, while the process is running."""
    end = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"{path} never held {text!r}; exit code {process.poll()}")
        time.sleep(0.02)


def result(run: Path) -> dict[str, Any]:
    """Collect all that must be the same, bit for bit, however often a run was stopped."""
    metrics = [
        {name: value for name, value in record.items() if not name.startswith(CLOCKS)}
        for record in read_metrics(run / "metrics.jsonl")
    ]
    lines = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "parameters": (run / "export" / "model.safetensors").read_bytes(),
        "start": (run / "start" / "model.safetensors").read_bytes(),
        "metrics": metrics,
        "lines of metrics": lines,
        "completions": (run / "completions.jsonl").read_text(),
        "start's evaluation": json.loads((run / "start.json").read_text()),
        "summary": [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in json.loads((run / "summary.json").read_text())["rows"]
        ],
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in a if a[name] != b[name]]
