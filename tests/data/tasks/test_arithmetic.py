"""The built-in task, its tokenizer and its policy."""

import json
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.data.hf import load_params, read_config
from oarjax.data.problems import reference_answer
from oarjax.data.tasks.arithmetic import (
    SIZES,
    arithmetic_problem,
    arithmetic_rows,
    builtin_config,
    computed_tokens,
    split_of,
    write_builtin_policy,
    write_tokenizer,
)
from oarjax.data.tokenizer import encode, load_tokenizer, pad_id, stop_ids, text_of, token_bytes
from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy


def rows(split, count=300, *, terms=5, highest=99, written=0.5, seed=0):
    return list(arithmetic_rows(split, rows=count, terms=terms, highest=highest, written=written, seed=seed))


def test_steps_lead_from_the_question_to_the_answer():
    """Every step starts at the total before it, is true, and together they spell the question."""
    draw = random.Random(0)
    for _ in range(200):
        question, steps, answer = arithmetic_problem(draw, terms=4, highest=30)
        chain = [step.split("=") for step in steps.rstrip(";").split(";")]
        assert len(chain) == 3
        total = chain[0][0].partition("+")[0].partition("-")[0]
        spelled = total
        for left, right in chain:
            assert left.startswith(total)
            assert str(eval(left)) == right
            assert 0 <= int(right) <= 30
            spelled += left.removeprefix(total)
            total = right
        assert (f"{spelled}=", total) == (question, answer)
        assert str(eval(question[:-1])) == answer


def test_computed_tokens_are_the_digits_of_results():
    text = "37+25=62;62-18=4;"
    found = computed_tokens([*text, "####", " ", "4"])
    assert [i for i, x in enumerate(found) if x] == [6, 7, 15]
    # Whatever the tokens: one that holds part of a result counts; an unfinished step has none.
    assert computed_tokens(["37+25", "=6", "2;62", "-18=4"]) == [False, True, True, False]
    assert computed_tokens(["####", " 4"]) == [False, False]
    assert computed_tokens([]) == []


def test_answers_are_spread_evenly():
    """A guess knows nothing: 20 answers over 4,000 problems are 200 each, 70 off is five standard deviations."""
    counts = Counter(reference_answer(row["answer"]) for row in rows("train", 4000, highest=19))
    assert len(counts) == 20
    assert max(abs(count - 200) for count in counts.values()) < 70


def test_splits_share_no_question():
    """Whatever the seed; short chains, so that chance alone would make them meet."""
    by_split = {
        split: {row["question"] for seed in (0, 1) for row in rows(split, 150, terms=2, highest=49, seed=seed)}
        for split in SIZES
    }
    assert not by_split["train"] & by_split["eval"]
    assert not by_split["train"] & by_split["sft"]
    assert not by_split["eval"] & by_split["sft"]
    assert all(split_of(question) == split for split, questions in by_split.items() for question in questions)


def test_no_question_comes_twice_and_the_order_is_the_seeds():
    first = rows("train")
    assert len({row["question"] for row in first}) == 300
    assert rows("train") == first
    assert rows("train", 100) == first[:100]  # a limit takes the first ones
    assert rows("train", seed=1) != first


def test_habits_are_mixed_in_the_sft_split_only():
    shares = {w: np.mean(["=" in row["answer"] for row in rows("sft", written=w)]) for w in (0.0, 0.5, 1.0)}
    assert shares[0.0] == 0
    assert shares[1.0] == 1
    assert abs(shares[0.5] - 0.5) < 0.12  # four standard deviations of 300 draws
    for row in rows("sft", 50):
        assert row["answer"].rpartition("#### ")[2] == str(eval(row["question"][:-1]))
    assert all("=" in row["answer"] for split in ("train", "eval") for row in rows(split, 50, written=0.0))


def test_too_few_problems_is_an_error():
    with pytest.raises(ValueError, match=r"fewer than 100 problems of 2 numbers up to 3 for eval \(found \d\)"):
        rows("eval", 100, terms=2, highest=3)
    with pytest.raises(ValueError, match=r"no split 'test'; set one of train, eval, sft"):
        rows("test")


def test_tokenizer_spells_every_problem(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    table = token_bytes(tokenizer, 32)
    for row in rows("sft", 50):
        for text in row.values():
            ids = encode(tokenizer, text)
            assert text_of(ids, table) == text
            assert tokenizer.decode(ids) == text
            assert len(ids) == len(text) - 3 * text.count("####")  # one token for the marker
    assert stop_ids(tmp_path, tokenizer) == (0, 2)
    assert pad_id(tokenizer) == 0


def test_policy_is_read_back_as_any_checkpoint(tmp_path):
    """config, tensors and tokenizer from the folder alone; the same seed gives the same weights."""
    folder = write_builtin_policy(tmp_path / "policy", seed=1, hidden=32, layers=2, ffn=48)
    cfg, where = read_config(folder)
    assert where == folder
    tokenizer = load_tokenizer(folder)
    assert len(token_bytes(tokenizer, cfg.vocab_size)) == 32
    assert stop_ids(folder, tokenizer) == (0, 2)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2

    params = load_params(folder, cfg)
    again = load_params(write_builtin_policy(tmp_path / "again", seed=1, hidden=32, layers=2, ffn=48), cfg)
    other = load_params(write_builtin_policy(tmp_path / "other", seed=2, hidden=32, layers=2, ffn=48), cfg)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, params, other)))

    policy = make_policy(cfg)
    tokens = jnp.asarray([encode(tokenizer, "1+2=")])
    valid = jnp.ones(tokens.shape, bool)
    hidden, _ = policy.trunk(params, policy.embed(params, tokens), positions_of(valid), valid)
    logits = policy.unembed(params, hidden)
    assert logits.shape == (1, 4, 32)
    assert np.isfinite(logits).all()


def test_vocabulary_must_hold_the_tokenizer():
    with pytest.raises(ValueError, match=r"vocab: expected at least 27, the tokenizer's size, got 20"):
        builtin_config(vocab=20)
