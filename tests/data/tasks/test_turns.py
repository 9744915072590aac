"""builtin:guess and builtin:calculator: rows, demonstrations that their environments confirm, tokenizer and policy."""

import itertools
import re
from collections import Counter

import pytest

from oarjax.config.inputs import DatasetConfig
from oarjax.data.hf import read_config
from oarjax.data.problems import load_problems
from oarjax.data.rows import DataError
from oarjax.data.tasks.arithmetic import arithmetic_rows, split_of
from oarjax.data.tasks.turns import PIECES, calculator_rows, guess_rows, write_turns_policy
from oarjax.data.tokenizer import encode, load_tokenizer, stop_ids, text_of, token_bytes
from oarjax.environments.contract import begin, load_environment, play


def confirmed(name, row):
    """Play a demonstration; check that its observations are what the environment says, and return the last step."""
    environment = load_environment(name)
    instance = begin(environment, row, 0)
    outcome = None
    for turn, (text, heard) in enumerate(itertools.zip_longest(row["turns"][::2], row["turns"][1::2]), start=1):
        outcome = play(environment, instance, text, seed=0, turn=turn)
        assert outcome.text == heard
    return outcome


def test_every_split_of_guess_holds_every_number():
    for split, rows in {"train": 62, "eval": 0, "sft": 31}.items():
        numbers = [row["hidden"] for row in guess_rows(split, rows=rows)]
        assert Counter(numbers) == dict.fromkeys(range(1, 32), max(rows, 31) // 31)
    (row,) = guess_rows("train", rows=1, highest=1)
    assert row == {"question": "1-1?", "answer": "1", "hidden": 1}
    first, again, other = (list(guess_rows("train", rows=31, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_demonstrations_of_guess_are_games():
    halving, mixed = (list(guess_rows("sft", rows=310, right=right)) for right in (1.0, 0.5))
    assert [confirmed("builtin:guess", row).reward for row in halving] == [1.0] * 310  # five halvings of 31
    hits = sum(confirmed("builtin:guess", row).reward for row in mixed) / 310
    assert 0.2 < hits < 0.5  # room for a policy to rise
    assert {len(row["turns"]) for row in mixed} == {1, 3, 5, 7, 9}


def test_calculator_has_the_sums_of_arithmetic():
    limits = {"terms": 3, "highest": 30, "written": 0.5, "seed": 2}
    for split in ("train", "eval", "sft"):
        rows = list(calculator_rows(split, rows=20, **limits))
        assert [{n: row[n] for n in ("question", "answer")} for row in rows] == list(
            arithmetic_rows(split, rows=20, **limits)
        )
        assert {split_of(row["question"]) for row in rows} == {split}
        assert all(("turns" in row) == (split == "sft") for row in rows)


def test_demonstrations_of_the_calculator_are_computed():
    rows = list(calculator_rows("sft", rows=40))
    for row in rows:
        assert confirmed("builtin:calculator", row).text is None
        assert row["turns"][-1] == row["answer"].rpartition(";")[2]
    calls = Counter(len(row["turns"]) // 2 for row in rows)
    assert set(calls) == {0, 4}
    assert re.fullmatch(
        r'<tool_call>\{"name": "calculate", "arguments": \{"expression": "\d+[+-]\d+"\}\}</tool_call>',
        next(row["turns"][0] for row in rows if len(row["turns"]) > 1),
    )


@pytest.mark.parametrize("rows", [guess_rows, calculator_rows])
def test_an_unknown_split_is_named(rows):
    with pytest.raises(ValueError, match=r"has no split 'test'; set one of train, eval, sft"):
        next(rows("test", rows=1))


def test_they_are_sources_of_data():
    problems = load_problems(DatasetConfig(source="builtin:guess", split="sft", limit=3))
    assert [sorted(p.columns) for p in problems] == [["answer", "hidden", "question", "turns"]] * 3
    assert len(load_problems(DatasetConfig(source="builtin:guess", split="eval"))) == 31
    arithmetic = {"terms": 2, "written": 1.0}
    config = DatasetConfig.model_validate(
        {"source": "builtin:calculator", "split": "sft", "limit": 4, "arithmetic": arithmetic}
    )
    assert [len(p.columns["turns"]) for p in load_problems(config)] == [3] * 4
    with pytest.raises(DataError, match="builtin:guess has no split 'test'"):
        load_problems(DatasetConfig(source="builtin:guess", split="test"))


def test_the_tokenizer_has_a_token_per_call_and_loses_nothing(tmp_path):
    folder = write_turns_policy(tmp_path / "policy", seed=0)
    tokenizer = load_tokenizer(folder)
    for piece in PIECES:
        assert len(encode(tokenizer, piece)) == 1
    config, _ = read_config(folder)
    table = token_bytes(tokenizer, config.vocab_size)
    row = next(row for row in calculator_rows("sft", rows=9) if len(row["turns"]) > 1)
    for turn in (*row["turns"], '{"error": "the call is not JSON"}', row["question"], "1-31?", "|~\\ x\n"):
        assert text_of(encode(tokenizer, turn), table) == turn
    assert len(encode(tokenizer, row["turns"][0])) < 9
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    assert stop_ids(folder, tokenizer)
