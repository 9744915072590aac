"""Rollouts from files: those of a record are trained on as they were drawn, and none that the run cannot have."""

import json

import jax
import numpy as np
import pytest
import unsound
from rich.console import Console

from oarjax.config.loading import parse_config
from oarjax.data.problems import Problem
from oarjax.data.rows import DataError
from oarjax.data.streams import Encoded
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import ConfigError
from oarjax.report.files import read_metrics
from oarjax.rollout.source import Batch
from oarjax.sources import records
from oarjax.sources.files import RecordedRollouts, read_groups, recorded_files
from oarjax.sources.turns import Rules
from oarjax.storage.stop import Stop
from oarjax.training import command

ENCODED = Encoded(
    (Problem("a", "1", 4, "", {}), Problem("b", "2", 9, "", {})), prompts=([5, 6], [7]), completions=(), dropped=0
)
RULES = Rules(vocab=50, stop_ids=(2,))


def line(row, prompt, tokens, **fields):
    logps = [-0.5 * n for n in range(1, len(tokens) + 1)]
    finish = "stop" if tokens[-1:] == [2] else "length"
    return {"row": row, "prompt": prompt, "tokens": tokens, "logps": logps, "finish": finish, **fields}


LINES = [
    line(0, [7], [10, 2], problem=9, version=3),
    line(1, [7], [11, 12, 13]),
    {"attempt": 0, "spent": {"steps": 3}},
    line(2, [5, 6], [14, 2]),
    line(3, [5, 6], [15, 16, 17]),
]


def read(folder, lines, **changes):
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return read_groups([path], ENCODED, **{"group_size": 2, "max_new": 3, "rules": RULES, **changes})


def test_groups_come_in_the_order_of_their_rows(tmp_path):
    replaced = line(1, [7], [11, 19, 2])  # the later line counts
    groups = read(tmp_path, [*reversed(LINES), replaced])
    assert [(group.problem.index, group.prompt) for group in groups] == [(9, [7]), (4, [5, 6])]
    stream = RecordedRollouts(groups, prompts=1, bucket=4, pad_id=0)
    drawn = []
    for iteration in (1, 2):
        prompts, problems = next(stream)
        assert [problem.index for problem in problems] == prompts.problem.tolist()
        batch = Batch(prompts, jax.random.key(0), iteration, 0, 2, 3)
        drawn.append(stream.draw(batch))
    assert [turn.tokens.tolist() for turns in drawn for turn in turns] == [[10, 2], [11, 19, 2], [14, 2], [15, 16, 17]]
    assert [turn.id[:3] for turns in drawn for turn in turns] == [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1)]
    assert drawn[0][0].versions.tolist() == [3, 3]
    assert np.allclose(drawn[0][0].logps, [-0.5, -1.0])
    with pytest.raises(DataError, match="2 groups are used up"):
        next(stream)
    resumed = RecordedRollouts(groups, prompts=1, bucket=4, pad_id=0)
    resumed.restore({"groups": 2, "position": 1})
    assert next(resumed)[0].problem.tolist() == [4]


def test_parquet_is_read_as_well(tmp_path):
    parquet, pyarrow = (pytest.importorskip(name) for name in ("pyarrow.parquet", "pyarrow"))
    parquet.write_table(pyarrow.Table.from_pylist([each for each in LINES if "row" in each]), tmp_path / "r.parquet")
    files = recorded_files([str(tmp_path)])
    for ours, theirs in zip(
        read_groups(files, ENCODED, group_size=2, max_new=3, rules=RULES), read(tmp_path, LINES), strict=True
    ):
        assert ours.prompt == theirs.prompt
        assert [turn.tokens.tolist() for turn in ours.turns] == [turn.tokens.tolist() for turn in theirs.turns]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logps": [-1.0]}, "line 2: 1 log-probs of 3 tokens"),
        ({"logps": None}, "line 2: lacks logps"),
        ({"tokens": [11, 12, 50]}, "ids reach from 11 to 50, the vocabulary from 0 to 49"),
        ({"tokens": [11, 2, 13]}, "tokens follow the stop id 2"),
        ({"finish": "stop"}, "finish is stop, but the last id 13"),
        ({"finish": "error"}, "finish 'error'"),
        ({"turn": 1}, "expected 2 completions of a prompt, one turn each"),
        ({"prompt": [5, 6]}, "expected 2 completions of a prompt"),
    ],
)
def test_what_the_policy_cannot_have_drawn_is_refused_with_its_line(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, [LINES[0], LINES[1] | change])


def test_other_problems_and_half_groups_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"line 1: data.train has no such prompt"):
        read(tmp_path, [line(n, [8], [10, 2]) for n in range(2)])
    with pytest.raises(DataError, match=r"line 1: data.train has no such prompt"):
        read(tmp_path, [line(n, [7], [10, 2], problem=4) for n in range(2)])
    with pytest.raises(DataError, match=r"line 4: 1 completions, expected rollout.group_size = 2"):
        read(tmp_path, LINES[:4])
    with pytest.raises(DataError, match="expected 1 to 2 tokens, got 3"):
        read(tmp_path, LINES, max_new=2)
    with pytest.raises(DataError, match=r"expected a .jsonl or .parquet file"):
        recorded_files([str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rollout": {"top_k": 3}},
            "rollout.from: log-probs are those after rollout.top_k, .* set loss",
        ),
        ({"rollout": {"repetition_penalty": 1.1}}, "rollout.from: the loss cannot follow rollout.repetition_penalty"),
        ({"policy": {"path": "p", "router": "replay"}}, "rollout.from: brings no choices of experts"),
        ({"update": {"refills": 1}}, "rollout.from: no fresh prompts can be drawn; set update.refills=0"),
    ],
)
def test_settings_that_recorded_rollouts_cannot_follow_are_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def config(**fields):
    tree = {"run_dir": "r", "policy": {"path": "p"}, "data": {"train": {"source": "s"}}, **fields}
    tree["rollout"] = {"from": ["a.jsonl"], **tree.get("rollout", {})}
    return parse_config(tree)


def test_the_sampler_is_corrected_for_unless_the_config_says_otherwise():
    assert config().loss.off_policy.weighting == "token_truncate"
    assert config(loss={"off_policy": {"max_drift": 0.5}}).loss.off_policy.weighting == "token_truncate"
    assert config(loss={"off_policy": "icepop"}).loss.off_policy.weighting == "token_mask"
    assert config(loss={"off_policy": {"weighting": "none"}}).loss.off_policy.weighting == "none"
    assert config(rollout={"from": []}).loss.off_policy.weighting == "none"
    assert parse_config(config().model_dump(mode="json")) == config()


@pytest.mark.slow
def test_a_run_from_the_records_of_another_ends_the_same(tmp_path, monkeypatch):
    """They bring prompts and rollouts; another kind of file would change what is learned."""
    monkeypatch.setattr(records.Records, "prune", lambda self, before: None)
    policy = write_builtin_policy(tmp_path / "policy", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)

    def metrics(name, **rollout):
        tree = unsound.MICRO | {"run_dir": str(tmp_path / name), "policy": {"path": str(policy)}, "iterations": 3}
        tree |= {"rollout": unsound.MICRO["rollout"] | rollout, "loss": {"off_policy": {"weighting": "none"}}}
        command.train_once(parse_config(tree), Console(quiet=True), Stop())
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        clocks = ("seconds", "time", "tokens_per_second", "mfu", "decode")
        return [{key: value for key, value in row.items() if not key.startswith(clocks)} for row in rows]

    drawn = metrics("drawn")
    assert len(drawn) == 3
    assert metrics("recorded", **{"from": [str(tmp_path / "drawn" / "rollouts")]}) == drawn
    assert not (tmp_path / "recorded" / "rollouts").exists()
