"""A real environment of verifiers, two turns of each of 8 episodes, by a tiny policy with Qwen's tokenizer.

    OARJAX_VERIFIERS=PYTHON pytest -m slow tests/sources/verifiers_by_hand.py

PYTHON has verifiers 0.4 and uv; the first time uv fetches the packages of its chat program.
"""

import json
import os
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from oarjax.config.loading import parse_config
from oarjax.environments import player
from oarjax.rollout.source import Batch, requested, rollout_of
from oarjax.run.grades import last_states, turn_rewards
from oarjax.run.run import open_run
from oarjax.training.held_out import turns_of_problems

PYTHON = os.environ["OARJAX_VERIFIERS"]
LONG = 48


@pytest.mark.slow
def test_eight_episodes_of_verifiers_are_rows_of_two_turns(shared, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)  # the taskset's
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")  # uv's
    script = Path(player.__file__).with_name("verifiers_player.py")
    rows = subprocess.run([PYTHON, script, "tasks", "two_turns_taskset", "2"], check=True, capture_output=True).stdout
    (tmp_path / "tasks.jsonl").write_bytes(rows)
    assert [json.loads(row)["task"]["wanted"] for row in rows.splitlines()] == [10, 11]
    settings = {
        "python": PYTHON,
        "renderer": {"name": "qwen3", "thinking_retention": "all"},
        "agent": {"sampling": {"max_tokens": 6}},  # random tokens do not stop
    }
    tasks = {"source": str(tmp_path / "tasks.jsonl")}
    tree = {
        "run_dir": str(tmp_path / "run"),
        "iterations": 1,
        "policy": {"path": "builtin:random", "tokenizer": str(shared / "tokenizer"), "remat": "none"},
        "data": {"template": "chat", "max_prompt": 64, "train": tasks, "eval": tasks},
        "rollout": {
            **{"prompts": 2, "group_size": 4, "max_new": LONG, "prompt_bucket": 64, "completion_bucket": LONG},
            "environment": {"name": "verifiers:two_turns_taskset", "turns": 2, "deadline": 300, "settings": settings},
        },
        "grading": {"rewards": [{"name": "environment"}]},
        "credit": {"method": "uniform", "answer": {"style": "none"}},
        "update": {"microbatch": 8},
        "eval": {"samples": 4, "batch": 2},
    }
    run = open_run(parse_config(tree))
    params = run.load()
    sampling, place = run.steps.rollout_params(params), partial(run.place, layout="prompts")
    source = turns_of_problems(run.steps, sampling, place, run.fetch)
    batch = Batch(next(run.prompts())[0], jax.random.key(1), 1, 0, 4, LONG)
    with closing(run.environments):
        drawn = run.episodes(source, run.train).draw(batch)
    rollout = rollout_of(batch, requested(batch, drawn), pad_id=run.pad_id)
    assert not rollout.origin.failed.any()
    assert rollout.origin.turns.max(1).tolist() == [1] * 8
    for b, (first, second) in enumerate(zip(drawn[::2], drawn[1::2])):
        assert (first.id.row, second.id.row, second.id.turn) == (b, b, 1)
        assert rollout.completion[b].sum() == len(first.tokens) + len(second.tokens) <= 12
        said = run.tokenizer.decode(second.observed)
        assert "<|im_start|>user\nThat had " in said
        assert said.endswith("characters. Again.<|im_end|>\n<|im_start|>assistant\n")
        assert turn_rewards(rollout)[b][1] == pytest.approx(last_states(rollout)[b]["rewards"]["closeness"])
    whole = tiny.logps_of(run.policy, params, rollout, temperature=1.0)
    gap = whole - np.where(rollout.completion, rollout.behaviour_logps, 0)
    assert np.abs(gap).max() < 1e-4
    print(f"log-probs differ by {np.abs(gap).max():.2g} at most")
