"""builtin:forks: its completions, their truth per token, its tokenizer and its policy."""

import random
import re
from collections import Counter

import jax
import numpy as np
import pytest

from oarjax.config.inputs import DatasetConfig
from oarjax.data.hf import load_params, read_config
from oarjax.data.problems import load_problems, reference_answer
from oarjax.data.rows import DataError
from oarjax.data.tasks import forks as task
from oarjax.data.tasks.arithmetic import first_wrong_step
from oarjax.data.tasks.forks import (
    CHOICES,
    FILLER,
    easy_digits,
    fork_tokens,
    forks_rows,
    right_answer,
    right_letters,
    write_forks_policy,
    written_out,
)
from oarjax.data.tasks.truth import token_truth
from oarjax.data.tokenizer import encode, load_tokenizer, stop_ids, text_of, token_bytes
from oarjax.models.weights import parameter_count

SHAPES = {
    "copy": rf"[{FILLER}]{{8}}([A-C])[{FILLER}]{{8}}([D-F])#### \1\2",
    "echo": rf"(?:[{FILLER}]{{4}}([A-C])[{FILLER}]{{4}}\1)(?:[{FILLER}]{{4}}([D-F])[{FILLER}]{{4}}\2)#### \1\2",
    "chain": rf"\d\+\d=(\d);[{FILLER}]{{8}}\1\+\d=(\d);[{FILLER}]{{8}}#### \2",
}


def rows(split, count=0, *, kind="copy", forks=2, filler=8, right=0.45, seed=0):
    return forks_rows(split, rows=count, kind=kind, forks=forks, filler=filler, right=right, seed=seed)


def marked(question, text, kind="copy", seed=0):
    """The tokens, one a character, that choose and that first go wrong, as (place, character)."""
    found = fork_tokens(question, list(text), kind=kind, seed=seed)
    return [[(n, text[n]) for n, mark in enumerate(marks) if mark] for marks in found]


@pytest.mark.parametrize("kind", SHAPES)
def test_completions_have_their_kinds_shape(kind):
    for row in rows("sft", 200, kind=kind):
        assert re.fullmatch(SHAPES[kind], row["answer"]), row
        assert re.fullmatch(r"\d{3}=" if kind == "chain" else r"\d\d=", row["question"])


@pytest.mark.parametrize("kind", SHAPES)
def test_with_every_choice_right_the_answer_is_the_reference(kind):
    """And with one wrong choice in a completion that is otherwise right it is not, and the truth finds that one."""
    draw, table = random.Random(0), right_letters(0)
    for question in (row["question"] for row in rows("train", 20, kind=kind)):
        text = written_out(question, draw, kind=kind, filler=3, right=1.0, seed=0)
        assert reference_answer(text) == right_answer(question, kind=kind, table=table)
        assert len(marked(question, text, kind)[0]) == 2
        assert marked(question, text, kind)[1] == []
        wrong = written_out(question, draw, kind=kind, filler=3, right=0.0, seed=0)
        assert marked(question, wrong, kind)[1] == marked(question, wrong, kind)[0][:1]


def test_uneven_forks_have_easy_and_hard_digits_and_the_same_mean():
    table, easy = right_letters(3), easy_digits(3)
    pairs = forks_rows("sft", rows=8000, kind="copy", forks=2, filler=1, right=0.45, seed=3, uneven=0.35)
    found: dict[bool, list[bool]] = {True: [], False: []}
    for row in pairs:
        for fork, (digit, letter) in enumerate(zip(row["question"], reference_answer(row["answer"]))):
            found[int(digit) in easy[fork]].append(table[fork][int(digit)] == letter)
    assert np.mean(found[True]) == pytest.approx(0.8, abs=0.02)  # over four standard deviations
    assert np.mean(found[False]) == pytest.approx(0.1, abs=0.015)
    assert [len(digits) for digits in easy] == [5] * 4
    even = forks_rows("sft", rows=50, kind="copy", forks=2, filler=1, right=0.45, seed=3)
    assert even == rows("sft", 50, filler=1, seed=3)
    with pytest.raises(ValueError, match=r"right 0.45 and uneven 0.5 leave 0 .. 1; lower uneven"):
        forks_rows("sft", rows=1, kind="copy", forks=2, filler=1, right=0.45, seed=3, uneven=0.5)


def test_choices_are_right_as_often_as_asked():
    table = right_letters(3)
    found = [(row["question"], reference_answer(row["answer"])) for row in rows("sft", 4000, seed=3)]
    right = [[table[i][int(q[i])] == a[i] for i in range(2)] for q, a in found]
    assert np.mean(right, 0) == pytest.approx([0.45, 0.45], abs=0.03)  # four standard deviations
    assert np.mean(np.all(right, 1)) == pytest.approx(0.2025, abs=0.03)
    filler = Counter(letter for row in rows("sft", 1000) for letter in row["answer"] if letter in FILLER)
    assert len(filler) == 16
    assert max(filler.values()) < 1.15 * min(filler.values())


def test_the_table_leaves_no_letter_unused():
    for seed in range(5):
        for fork, letters in enumerate(right_letters(seed)):
            counts = Counter(letters)
            assert set(counts) == set(CHOICES[3 * fork : 3 * fork + 3])
            assert sorted(counts.values()) == [3, 3, 4]
    assert right_letters(0) != right_letters(1)


def test_splits_share_no_question_and_give_each_once(monkeypatch):
    monkeypatch.setattr(task, "PAIRS", 30)
    train, held_out = ({r["question"] for r in rows(split)} for split in ("train", "eval"))
    pairs = {r["question"] for r in rows("sft", 300)}
    assert len(train) == len(rows("train"))
    assert len(train) + len(held_out) + len(pairs) == 100
    assert not train & (held_out | pairs)
    assert not held_out & pairs
    assert [r["question"] for r in rows("train", 5)] == [r["question"] for r in rows("train")[:5]]
    assert rows("train", seed=1) != rows("train")
    assert len(rows("sft")) == 30
    assert len(rows("eval", forks=3)) > 100


def test_sources_and_mistakes():
    def load(**changes):
        return load_problems(DatasetConfig.model_validate({"source": "builtin:forks", "split": "eval"} | changes))

    assert [p.reference for p in load(limit=3)] == [reference_answer(r["answer"]) for r in rows("eval", 3)]
    assert len(load(forks={"kind": "chain"})[0].prompt) == 4
    again = load(limit=50)
    assert (again[14].prompt, again[14].index) == (again[0].prompt, 14)
    with pytest.raises(DataError, match=r"builtin:forks has no split 'test'; set one of train, eval, sft"):
        load(split="test")


def test_choices_and_the_first_wrong_one_are_marked():
    a, d = right_letters(0)[0][3], right_letters(0)[1][7]
    other = next(x for x in "ABC" if x != a)
    assert marked("37=", f"ab{a}cd{d}#### {a}{d}") == [[(2, a), (5, d)], []]
    assert marked("37=", f"ab{other}cd{d}#### {a}{d}") == [[(2, other), (5, d)], [(2, other)]]
    # Cut short, out of order, written twice, none: the first of each alphabet before the answer.
    assert marked("37=", f"ab{other}") == [[(2, other)], [(2, other)]]
    assert marked("37=", f"{a}{other}{d}x", "echo") == [[(0, a), (2, d)], []]
    assert marked("37=", f"abc#### {other}{d}") == [[], []]


def test_the_first_wrong_step_of_a_chain_is_its_sum_or_its_copy():
    assert marked("375=", "3+7=0;ab0+5=5;cd#### 5", "chain") == [[(4, "0"), (12, "5")], []]
    assert marked("375=", "3+7=1;ab1+5=6;cd#### 6", "chain") == [[(4, "1"), (12, "6")], [(4, "1")]]
    assert marked("375=", "3+7=0;ab1+5=6;cd#### 6", "chain")[1] == [(8, "1")]
    assert marked("375=", "3+7=0;ab0+4=4;cd#### 4", "chain")[1] == [(10, "4")]


def test_tokens_of_several_characters_count_whole():
    a, d = right_letters(0)[0][3], right_letters(0)[1][7]
    tokens = ["ab" + a, "c", "d" + d, "#### ", a + d]
    assert fork_tokens("37=", tokens, kind="copy", seed=0)[0] == [True, False, True, False, False]


def test_the_first_wrong_step_of_a_sum():
    def wrong(question, text):
        return [n for n, mark in enumerate(first_wrong_step(question, list(text))) if mark]

    assert wrong("37+25-18=", "37+25=62;62-18=44;#### 44") == []
    assert wrong("37+25-18=", "37+25=61;61-18=43;#### 43") == [6, 7]
    assert wrong("37+25-18=", "37+25=62;61-18=43;#### 43") == [9, 10]
    assert wrong("37+25-18=", "37+25=62;62-17=45;#### 45") == [11, 12, 13]
    assert wrong("37+25=", "37+25=62;62-1=61;#### 61") == [11, 12]  # a step that the question does not have
    assert wrong("37+25-18=", "#### 44") == []


def test_truth_of_both_tasks_and_of_others():
    sums = DatasetConfig(source="builtin:arithmetic")
    found = token_truth(sums, "3+9=", list("3+9=11;#### 11"))
    assert found is not None
    assert [np.flatnonzero(marks).tolist() for marks in found] == [[4, 5], [0, 4, 5], [4, 5]]
    forks = DatasetConfig.model_validate({"source": "builtin:forks", "forks": {"kind": "chain"}})
    found = token_truth(forks, "375=", list("3+7=1;1+5=6;#### 6"))
    assert found is not None
    assert [np.flatnonzero(marks).tolist() for marks in found] == [[4, 10], [4, 10], [4]]
    assert token_truth(DatasetConfig(source="rows.jsonl"), "", ["a"]) is None


def test_policy_reads_back_and_spells_every_completion(tmp_path):
    folder = write_forks_policy(tmp_path / "policy", seed=1)
    cfg, _ = read_config(folder)
    tokenizer = load_tokenizer(folder)
    table = token_bytes(tokenizer, cfg.vocab_size)
    assert stop_ids(folder, tokenizer) == (0, 2)
    for kind in SHAPES:
        for row in rows("sft", 20, kind=kind):
            ids = encode(tokenizer, row["question"] + row["answer"])
            assert text_of(ids, table) == row["question"] + row["answer"]
            assert len(ids) == len(row["question"] + row["answer"]) - 3  # the marker is one token
    assert 19_000 < parameter_count(cfg) < 22_000
    (embedding,) = (x for x in jax.tree.leaves(load_params(folder, cfg)) if x.shape == (64, 32))
    assert np.std(embedding) == pytest.approx(0.7 / np.sqrt(32), rel=0.05)
