"""builtin:stories: its grammar, the truth about its solutions, its tokenizer and its policy."""

import hashlib
import random
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from oarjax.config.inputs import DatasetConfig
from oarjax.data.hf import read_config
from oarjax.data.problems import load_problems, reference_answer
from oarjax.data.rows import DataError
from oarjax.data.tasks.stories import HIGHEST, held_out, stories_rows, story_tokens, vocabulary, write_stories_policy
from oarjax.data.tasks.stories_grammar import (
    FORMS,
    Fact,
    draw_facts,
    equations,
    explain,
    read,
    schemas,
    solve,
    tell,
    templates,
)
from oarjax.data.tasks.truth import token_truth
from oarjax.data.tokenizer import encode, load_tokenizer, stop_ids, text_of, token_bytes
from oarjax.models.weights import parameter_count

QUESTION = (
    "Anna keeps 12 nuts in a wooden box under the bed. On Monday she buys 2 bags with 3 in each bag. "
    "The bus to the park takes 7 minutes on most days. By Friday only one of 3 equal parts is left. "
    "How many nuts does Anna have at the end?"
)
STEPS = "So we multiply as it says: 2 * 3 = 6. Then add: 12 + 6 = 18. Now divide: 18 / 3 = 6. It is \\boxed{6}."


def rows(split, count, *, highest=20, right=1.0, written=1.0, seed=0):
    return list(stories_rows(split, rows=count, highest=highest, right=right, written=written, seed=seed))


PATTERNS = {
    (kind, n): re.compile(re.sub(r"\\\{[a-z]\\\}", "[A-Za-z0-9]+", re.escape(form)))
    for kind, forms in FORMS.items()
    for n, form in enumerate(forms)
}


def template_of(question):
    """The template of a problem: the one whose sentences, in their order, are its own."""
    sentences = re.split(r"(?<=[.?]) ", question)
    return tuple(next(key for key, pattern in PATTERNS.items() if pattern.fullmatch(s)) for s in sentences)


def test_there_are_hundreds_of_templates_all_different():
    every = templates()
    assert len(every) == 344
    assert len(set(every)) == len({template.sentences for template in every}) == 344
    assert len(set(schemas())) == 86
    assert {template.schema for template in every} == set(schemas())
    assert 30 < sum(map(held_out, every)) < 60


def test_problems_and_solutions_have_their_lengths_and_every_equation_is_right():
    draw = random.Random(0)
    for template in templates():
        for highest in (20, 99):
            facts = draw_facts(draw, template.schema, highest=highest)
            problem = tell(draw, template, facts, highest=highest)
            assert 40 <= len(problem.split()) <= 80, problem
            assert read(problem) == facts
            solution = explain(draw, facts, right=1.0, highest=highest)
            assert 80 <= len(solution.split()) <= 250, solution
            steps = [step.groups() for step in re.finditer(r"(\d+) ([-+*/]) (\d+) = (\d+)", solution)]
            for a, sign, b, result in steps:
                value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign]
                assert value == int(result)
                assert all(1 <= int(x) <= highest for x in (a, b, result))
            assert [(int(a), sign, int(b), int(c)) for a, sign, b, c in steps] == solve(equations(facts))
            assert solution.endswith(f"\\boxed{{{steps[-1][3]}}}.")


def test_stories_are_solved_by_what_happens_in_them():
    facts = [Fact("start", (10,)), Fact("taken", (2, 3)), Fact("times", (2,)), Fact("fewer", (1,))]
    assert solve(equations(facts)) == [(2, "*", 3, 6), (10, "-", 6, 4), (4, "*", 2, 8), (8, "-", 1, 7), (8, "+", 7, 15)]
    assert solve(equations([Fact("start", (5,)), Fact("missing", (9,))])) == [(9, "-", 5, 4)]
    assert read(QUESTION) == [Fact("start", (12,)), Fact("bags", (2, 3)), Fact("part", (3,))]
    with pytest.raises(ValueError, match=r"no problem of builtin:stories has the sentence 'A cat sleeps.'"):
        read("A cat sleeps.")


def test_templates_of_the_evaluation_are_never_shown_in_training():
    known = {template.sentences for template in templates() if not held_out(template)}
    unseen = {template.sentences for template in templates() if held_out(template)}
    shown = {split: rows(split, 400) for split in ("train", "sft", "eval")}
    for split, examples in shown.items():
        assert {template_of(row["question"]) for row in examples} <= (unseen if split == "eval" else known)
    questions = {split: {row["question"] for row in examples} for split, examples in shown.items()}
    assert all(len(each) == 400 for each in questions.values())
    assert not questions["train"] & questions["sft"]
    assert len({template_of(q) for q in questions["eval"]}) > 30
    assert rows("train", 5) == shown["train"][:5]
    assert rows("train", 5, seed=1) != shown["train"][:5]


@pytest.mark.parametrize(("split", "digest"), [("train", "20f33ef424f0936e"), ("eval", "82ed40500fc885c2")])
def test_the_problems_are_those_of_the_published_race(split, digest):
    questions = "\n".join(row["question"] for row in rows(split, 50))
    assert hashlib.blake2b(questions.encode(), digest_size=8).hexdigest() == digest


def test_no_answer_is_frequent_enough_to_guess():
    """Neither over all problems, nor by the best guess for each schema, nor by any number of the problem."""
    answers, by_schema, hits = Counter(), defaultdict(Counter), Counter()
    problems = rows("eval", 1500)
    for row in problems:
        answer = int(reference_answer(row["answer"]))
        answers[answer] += 1
        by_schema[tuple(fact.kind for fact in read(row["question"]))][answer] += 1
        numbers = [int(n) for n in re.findall(r"\d+", row["question"])]
        sums = {"largest": max(numbers), "last": numbers[-1], "first": numbers[0], "sum": sum(numbers)}
        hits.update(name for name, guess in sums.items() if guess == answer)
    assert max(answers.values()) < 0.1 * len(problems)
    assert sum(max(counts.values()) for counts in by_schema.values()) < 0.15 * len(problems)  # in-sample: biased up
    assert max(hits.values()) < 0.1 * len(problems)


def marked(text, question=QUESTION):
    """The pieces of a completion, one character each, that hold results, decide and are the first mistake."""
    marks = story_tokens(question, list(text))
    return [re.findall(r"\S+", "".join(c if m else " " for c, m in zip(text, mask))) for mask in marks]


def test_the_truth_of_a_right_solution():
    results, deciding, mistake = marked(STEPS)
    assert results == ["6", "18", "6"]
    assert deciding == ["multiply", "2", "*", "3", "6", "add", "12", "+", "6", "18", "divide", "18", "/", "3", "6"]
    assert mistake == []
    assert marked(STEPS.replace("2 * 3", "3 * 2").replace("12 + 6", "6 + 12"))[2] == []
    assert marked(STEPS.partition("Now")[0])[2] == []  # cut short
    assert marked("\\boxed{6}.") == [[], [], []]


@pytest.mark.parametrize(
    ("right", "wrong", "mistake"),
    [
        ("2 * 3 = 6", "2 * 3 = 8", "8"),
        ("12 + 6 = 18", "12 + 6 = 17", "17"),
        ("12 + 6", "12 + 7", "7"),
        ("add: 12 + 6 = 18", "subtract: 12 - 6 = 6", "subtract"),
        ("12 + 6 = 18", "12 - 6 = 6", "-"),
        ("18 / 3", "3 / 18", "3"),
        ("It is", "We add 6 + 7 = 13. It is", "add"),
        ("So we multiply", "So we add", "add"),
    ],
)
def test_the_first_mistake_of_a_corrupted_solution(right, wrong, mistake):
    corrupted = STEPS.replace(right, wrong, 1)
    assert corrupted != STEPS
    assert marked(corrupted)[2] == [mistake]
    *_, last = np.flatnonzero(story_tokens(QUESTION, list(corrupted))[2])
    assert last >= next(n for n, (a, b) in enumerate(zip(corrupted, STEPS)) if a != b)


def test_slips_are_found_where_they_were_made():
    """Without slips no solution has a mistake; with slips the marked step is the first that differs from the truth."""
    wrong = 0
    for row in rows("sft", 150, right=0.8):
        truth = solve(equations(read(row["question"])))
        steps = [
            (int(a), sign, int(b), int(c))
            for a, sign, b, c in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", row["answer"])
        ]
        differ = [n for n, (mine, right) in enumerate(zip(steps, truth, strict=True)) if mine != right]
        mask = story_tokens(row["question"], list(row["answer"]))[2]
        assert any(mask) == bool(differ)
        if differ:
            before = row["answer"][: mask.index(True)]
            assert len(re.findall(r" = \d+\.", before)) == differ[0]
            wrong += 1
    assert 0.35 < wrong / 150 < 0.75  # 1 - .8^3 to 1 - .8^4, and a fifth of the slips beyond
    assert not any(any(story_tokens(r["question"], list(r["answer"]))[2]) for r in rows("sft", 50))


def test_sources_and_truth():
    def load(**changes):
        return load_problems(DatasetConfig.model_validate({"source": "builtin:stories", "split": "eval"} | changes))

    assert len(load()) == 1000
    assert [p.reference for p in load(limit=3)] == [reference_answer(r["answer"]) for r in rows("eval", 3)]
    bare = load(split="sft", limit=40, stories={"written": 0.5})
    assert 5 < sum(p.answer.startswith("\\boxed{") for p in bare) < 35
    with pytest.raises(DataError, match=r"builtin:stories has no split 'test'; set one of train, eval, sft"):
        load(split="test")
    truth = token_truth(DatasetConfig(source="builtin:stories"), QUESTION, ["add", ": ", "2", " + ", "3", " = ", "5"])
    assert truth is not None
    assert [np.flatnonzero(marks).tolist() for marks in truth] == [[6], [0, 2, 3, 4, 6], [0]]


def test_the_tokenizer_spells_every_problem_and_solution(tmp_path):
    folder = write_stories_policy(tmp_path / "policy", seed=1)
    cfg, _ = read_config(folder)
    tokenizer = load_tokenizer(folder)
    table = token_bytes(tokenizer, cfg.vocab_size)
    assert stop_ids(folder, tokenizer) == (0, 2)
    used = set()
    for row in rows("sft", 300, highest=HIGHEST, right=0.7) + rows("eval", 300, highest=HIGHEST):
        for text in row.values():
            if text.startswith("####"):
                continue
            ids = encode(tokenizer, text)
            assert text_of(ids, table) == text
            used |= set(ids)
    assert len(vocabulary()) == len(set(vocabulary())) < cfg.vocab_size
    assert len(used) > 0.75 * len(vocabulary())
    assert 300_000 < parameter_count(cfg) < 500_000
