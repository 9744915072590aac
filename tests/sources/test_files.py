"""Rollouts from files: those of a record are trained on as they were drawn, and none that the run cannot have."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unsound
from rich.console import Console
from safetensors.numpy import load_file

from oarjax.config.loading import parse_config
from oarjax.data.hf import load_params, read_config
from oarjax.data.problems import Problem
from oarjax.data.rows import DataError
from oarjax.data.streams import Encoded
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import ConfigError
from oarjax.models.qwen import make_policy
from oarjax.report.files import read_metrics
from oarjax.rollout.logps import token_logps
from oarjax.rollout.source import Batch, requested, rollout_of
from oarjax.sources import records
from oarjax.sources.files import TAUGHT, RecordedRollouts, read_groups, recorded_files
from oarjax.sources.turns import Rules
from oarjax.storage.durable import read_lines
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
    files = recorded_files([str(tmp_path)], run=tmp_path / "run")
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
        *(({"row": row}, "line 2: expected iteration, attempt, row, turn as whole n") for row in ("1", [1], None, 1.5)),
        ({"iteration": "0"}, "line 2: expected iteration, attempt, row, turn as whole numbers from 0"),
        *(({"prompt": ids}, "line 2: expected prompt as whole numbers") for ids in (7, "7", [[7]], [7.0])),
        *(({"tokens": ids}, "line 2: expected tokens as whole numbers") for ids in ([1.5, 2], ["10", "2"], [2**40, 2])),
        *(({"problem": number}, "line 2: expected problem as a whole number") for number in ([9], "9", 9.0)),
        ({"version": -1}, "line 2: expected version as whole numbers from 0"),
        ({"whole_logps": [-1.0]}, "line 2: 1 whole_logps of 3 tokens"),
        ({"whole_logps": [0.5] * 3}, "line 2: whole_logps are not finite, or above 0: 0.5"),
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
        recorded_files([str(tmp_path / "nowhere")], run=tmp_path / "run")
    (own := tmp_path / "run" / "rollouts").mkdir(parents=True)
    (own / "000001.jsonl").write_text("")
    (others := tmp_path / "others").mkdir()
    (others / "000000.jsonl").write_text("")
    (others / "000001.jsonl").symlink_to(own / "000001.jsonl")
    for named in (own, others):
        with pytest.raises(DataError, match="records that this run writes and removes; set another run_dir"):
            recorded_files([str(named)], run=tmp_path / "run")


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


def test_a_teachers_log_probs_are_read_where_the_run_learns_from_them_and_needed_there(tmp_path):
    taught = [each | {"teacher_logps": [-0.25] * len(each["tokens"])} if "row" in each else each for each in LINES]
    (first, *_), plain = read(tmp_path, taught, needed=TAUGHT), read(tmp_path, taught)
    assert all(turn.teacher_logps is None for group in plain for turn in group.turns)
    stream = RecordedRollouts([first], prompts=1, bucket=4, pad_id=0)
    batch = Batch(next(stream)[0], jax.random.key(0), 1, 0, 2, 3)
    rollout = rollout_of(batch, requested(batch, stream.draw(batch)), pad_id=0)
    assert np.asarray(rollout.teacher_logps).tolist() == [[-0.25, -0.25, 0], [-0.25] * 3]
    request = batch.requests[1]
    assert np.asarray(records.turn_of(records.line_of(request, first.turns[1])).teacher_logps).tolist() == [-0.25] * 3
    for wrong, message in {
        None: "line 2: lacks teacher_logps",
        (-1.0,): "line 2: 1 teacher_logps of 3 tokens",
        (-1.0, None, -1.0): "line 2: teacher_logps are not finite, or above 0: nan",
        (-1.0, 0.5, -1.0): "line 2: teacher_logps are not finite, or above 0: 0.5",
    }.items():
        with pytest.raises(DataError, match=message):
            read(tmp_path, [taught[0], taught[1] | {"teacher_logps": wrong}], needed=TAUGHT)
    teacher = {"kl_beta": 1, "teacher": "recorded"}
    assert not config(loss=teacher).loss.scores_reference
    with pytest.raises(ConfigError, match=r"loss.teacher: recorded log-probs come with rollouts from files; set roll"):
        config(rollout={"from": []}, loss=teacher)
    with pytest.raises(ConfigError, match=r"loss.reference: host needs a reference, but loss.teacher holds none"):
        config(loss={**teacher, "reference": "host"})


@pytest.mark.slow
def test_recorded_log_probs_teach_what_their_policy_teaches(tmp_path, monkeypatch):
    """A run that learns from the teacher's folder, and one from what was recorded of it, on the same rollouts."""
    monkeypatch.setattr(records.Records, "prune", lambda self, before: None)
    small = {"hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16}
    policy, teacher = (write_builtin_policy(tmp_path / str(n), seed=n, **small, layers=n) for n in (1, 2))

    def trained(name, *, loss, **rollout):
        loss = {"off_policy": {"weighting": "none"}, **loss}
        tree = unsound.MICRO | {"run_dir": str(tmp_path / name), "policy": {"path": str(policy)}, "iterations": 2}
        tree |= {"rollout": unsound.MICRO["rollout"] | rollout, "loss": loss, "export": {"folder": "export"}}
        tree["update"] = unsound.MICRO["update"] | {"skip_zero_variance": False}
        command.train_once(parse_config(tree), Console(quiet=True), Stop())
        folder = tmp_path / name
        return load_file(folder / "export" / "model.safetensors"), read_metrics(folder / "metrics.jsonl")

    drawn, _ = trained("drawn", loss={})
    lines = [line for file in sorted((tmp_path / "drawn/rollouts").iterdir()) for line in read_lines(file)]
    taught = log_probs(teacher, lines := [line for line in lines if "tokens" in line])
    text = [json.dumps(line | {"teacher_logps": logps}) + "\n" for line, logps in zip(lines, taught, strict=True)]
    (tmp_path / "taught.jsonl").write_text("".join(text))
    files, loss = {"from": [str(tmp_path / "taught.jsonl")]}, {"kl_in": "token", "kl_beta": 0.5}
    scored, measured = trained("scored", loss={**loss, "teacher": str(teacher)}, **files)
    recorded, same = trained("recorded", loss={**loss, "teacher": "recorded"}, **files)
    assert [row["kl"] for row in same] == pytest.approx([row["kl"] for row in measured], rel=1e-3)
    moved = max(np.abs(scored[name] - drawn[name]).max() for name in drawn)
    assert max(np.abs(scored[name] - recorded[name]).max() for name in drawn) < 0.01 * moved


def log_probs(folder, lines):
    """Return the log-probs, at the temperature of the run, that a policy gives the tokens of recorded turns."""
    model, _ = read_config(folder)
    read = make_policy(model, compute_dtype=jnp.float32, remat="none")
    width, T = (max(len(line[name]) for line in lines) for name in ("prompt", "tokens"))
    tokens, valid = np.zeros((len(lines), width + T), np.int32), np.zeros((len(lines), width + T), bool)
    for row, line in enumerate(lines):
        at = slice(width - len(line["prompt"]), width + len(line["tokens"]))
        tokens[row, at], valid[row, at] = line["prompt"] + line["tokens"], True
    how = {"completion_length": T, "temperature": 1.0, "head_chunk": 64}
    logps, _ = token_logps(read, load_params(folder, model), jnp.asarray(tokens), jnp.asarray(valid), **how)
    return [logps[row, : len(line["tokens"])].tolist() for row, line in enumerate(lines)]


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
