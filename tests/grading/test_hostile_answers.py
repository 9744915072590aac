"""Hostile answers: a verdict for every one of them, nothing run, nothing opened, nothing rewarded by mistake."""

import importlib
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty_answers import Nasty, corpus

from oarjax.credit.answer_span import find_answers
from oarjax.credit.answer_text import extract_answer, find_extent
from oarjax.grading.grader import Grader
from oarjax.grading.no_eval import TextEvaluated, compile_arithmetic, forbid_evaluation, read_plain
from oarjax.grading.rewards import Sample, find_rewards
from oarjax.grading.worker import grade_sample
from oarjax.types import Grades

KNOWN = {"graded", "unparseable", "ungraded", "timeout", "crash"}
FUZZ = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def sample(completion, reference="7"):
    return Sample(prompt="", completion=completion, answer=reference)


def check(entries, grades: Grades) -> list[str]:
    """What is not as the corpus promises."""
    wrong = []
    for entry, reward, verdict, note in zip(entries, grades.per_reward["math"], grades.verdicts, grades.notes):
        known = verdict in ("graded", "unparseable")
        fits = {
            "right": verdict == "graded" and reward == 1,
            "wrong": known and reward == 0,
            "not right": reward != 1,
            None: True,
        }[entry.expected]
        if not fits or verdict not in KNOWN or math.isnan(reward) == known:
            wrong.append(f"{entry.name}: expected {entry.expected}, got {verdict} {reward} {note[:200]}")
    return wrong


REWARDS = (("math", 1.0), ("watched", 0.0))
WATCH = [str(Path(__file__).parent.parent / "golden" / "grading" / "watched.py")]
"""Workers are watched from inside: an event that an answer should not cause is a crash with its name."""


@pytest.fixture(scope="module")
def pool():
    """For answers that are quick on any machine: a deadline is no part of what is tested."""
    with Grader(REWARDS, plugins=WATCH, workers=2, deadline=120.0, memory_mb=1024) as grader:
        yield grader


@pytest.fixture(scope="module")
def strict():
    with Grader(REWARDS, plugins=WATCH, workers=2, deadline=3.0, memory_mb=1024) as grader:
        yield grader


def split(canary: str) -> tuple[list[Nasty], list[Nasty], list[Nasty]]:
    """The corpus: answers with a known verdict, code of which no part may run, and all the others."""
    parts: tuple[list[Nasty], list[Nasty], list[Nasty]] = ([], [], [])
    for entry in corpus(canary):
        code = canary in entry.completion + entry.reference
        parts[1 if code else 0 if entry.expected in ("right", "wrong") else 2].append(entry)
    return parts


def test_the_corpus_is_large():
    known, code, others = split("canary")
    assert Counter(entry.expected == "right" for entry in known)[True] >= 100
    assert len(known) >= 200
    assert len(code) > 100
    assert len(others) > 250


def test_answers_with_a_right_verdict_get_it(pool):
    entries = split("canary")[0]
    grades = pool.grade([sample(entry.completion, entry.reference) for entry in entries])
    assert check(entries, grades) == []


def test_injected_code_is_not_run(strict, tmp_path):
    canary = tmp_path / "canary"
    entries = split(str(canary))[1]
    grades = strict.grade([sample(entry.completion, entry.reference) for entry in entries])
    assert check(entries, grades) == []
    assert [note for note in grades.notes if "RuntimeError" in note] == []
    assert not canary.exists()


@pytest.mark.slow
def test_the_others_get_a_verdict_and_no_reward(tmp_path):
    """Those that may end at the deadline or at the memory limit: a new worker each."""
    entries = split(str(tmp_path / "canary"))[2]
    random.Random(0).shuffle(entries)
    start = time.monotonic()
    with Grader(REWARDS, plugins=WATCH, workers=2, deadline=0.5, memory_mb=1024) as grader:
        grades = grader.grade([sample(entry.completion, entry.reference) for entry in entries])
        again = grader.grade([sample(r"\boxed{7}"), sample(r"\boxed{8}")])
    print(grades.counts(), f"{time.monotonic() - start:.0f} s")
    assert check(entries, grades) == []
    assert [note for note in grades.notes if "RuntimeError" in note] == []
    np.testing.assert_array_equal(again.rewards, [1, 0])


# What would become code


def test_text_reaches_no_eval():
    import sympy

    forbid_evaluation()
    forbid_evaluation()
    for text in (
        "x+1",
        "f(1)",
        "__import__('os')",
        "exit",
        "sympify",
        "__doc__",
        "1_000",
        "0x10",
        "1j",
        "٣",
        "1 ",
        "1e",
    ):
        with pytest.raises(TextEvaluated, match="a grading worker parses only numbers and names"):
            read_plain(text)
        with pytest.raises(TextEvaluated):
            importlib.import_module("sympy.parsing.sympy_parser").eval_expr(text, {}, {})
    for text in (
        "7",
        "007",
        "12345678901234567890",
        "0.5",
        ".5",
        "5.",
        "1e5",
        "1E-5",
        "1.5e10",
        "0.30000000000000000001",
    ):
        assert sympy.Number(text) == read_plain(text)
    assert read_plain("7") == sympy.Integer(7)
    assert read_plain("0.5").is_Float
    with pytest.raises(TextEvaluated):
        sympy.sympify("x + 1")


def test_what_lambdify_writes_is_run_only_if_it_is_arithmetic():
    import sympy

    forbid_evaluation()
    x = sympy.Symbol("x")
    assert sympy.lambdify(x, sympy.sqrt(x) + x**2 / 3)(9.0) == pytest.approx(30)
    for name in (
        "__import__('os').getpid()",
        "open('x')",
        "abs.__class__",
        "y:=exec('1')",
        "[z for z in (1,)]",
        "'text'",
    ):
        with pytest.raises((TextEvaluated, SyntaxError)):
            sympy.lambdify(x, x + sympy.Symbol(name))
    for source in (
        "import os",
        "@exec\ndef f(x):\n    return x",
        "def f(x):\n    return exit(1)",
        "def f(x):\n    return x.y",
    ):
        with pytest.raises(TextEvaluated):
            compile_arithmetic(source, "f", "exec")


def test_numbers_read_without_eval_are_what_sympy_reads():
    """In a process where nothing has been closed."""
    import subprocess
    import sys

    script = """
import sympy
from oarjax.grading.no_eval import read_plain
numbers = ["7", "0", "12345678901234567890", "0.5", "5.", ".5", "007.5", "1e5", "1E5", "1.5E-7", "3.1415926535897932"]
for text in [*numbers, "3/2", "yotta", "x", "pi", "oo"]:
    theirs, ours = sympy.sympify(text), read_plain(text)
    assert theirs == ours and type(theirs) is type(ours), text
    assert not theirs.is_Float or theirs._prec == ours._prec, text
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


# Workers killed from outside


def test_killed_workers_are_replaced_and_nothing_is_called_wrong():
    answers = [sample(rf"\boxed{{\frac{{{2 * n}}}{{2}}}}", str(n + n % 2)) for n in range(1, 601)]
    draw = random.Random(5)
    with Grader((("math", 1.0),), workers=2, deadline=30.0) as grader:
        grader.grade(answers[:4])
        stop, killed = threading.Event(), []

        def kill() -> None:
            while not stop.wait(0.03 + 0.05 * draw.random()) and len(killed) < 8:
                for worker in list(grader.pools[0].workers):
                    if worker.state == "busy" and worker.process.pid not in killed:
                        os.kill(worker.process.pid, signal.SIGKILL)
                        killed.append(worker.process.pid)
                        break

        thread = threading.Thread(target=kill)
        thread.start()
        grades = grader.grade(answers)
        stop.set()
        thread.join()
    assert killed
    counts = grades.counts()
    assert set(counts) <= {"graded", "crash"}
    assert counts.get("crash", 0) <= len(killed) // 2  # a first loss is tried again
    right = np.array([n % 2 == 0 for n in range(1, 601)])
    known = ~np.isnan(grades.rewards)
    np.testing.assert_array_equal(grades.rewards[known] == 1, right[known])
    assert known.sum() >= 590


# Fuzzing

PIECES = st.sampled_from(
    [
        *(
            "\\boxed{",
            "\\fbox {",
            "{",
            "}",
            "\\{",
            "\\}",
            "\\\\",
            "(",
            ")",
            "[",
            "]",
            "####",
            "\n",
            " ",
            "<answer>",
            "</answer>",
        ),
        *(
            "\\frac",
            "\\sqrt",
            "^",
            "_",
            "\\text{",
            "\\left",
            "\\right",
            "\\%",
            "%",
            "$",
            "&",
            "=",
            "<",
            ",",
            ";",
            ":",
            "'",
        ),
        *(
            "\\begin{pmatrix}",
            "\\end{pmatrix}",
            "\\cup",
            "\\infty",
            "\\pm",
            "\\sum",
            "\\int",
            "\\sin",
            "\\variable{",
            "!",
        ),
        *("7", "-", "+", "*", "/", ".", "1,000", "x", "i", "e", "\\pi", "\ud800", "\x00", "\u202e", "７", "__import__"),
    ]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=25).map("".join), st.text(max_size=60))
STYLES = st.sampled_from(["boxed", "hash", "tag", "regex"])
PATTERN = r"= *([^\n]+)"


@FUZZ
@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=16))
def test_any_text_gets_a_verdict(strict, texts):
    grades = strict.grade([sample(rf"\boxed{{{text}}}", reference) for text, reference in texts])
    assert set(grades.verdicts) <= KNOWN
    for verdict, reward in zip(grades.verdicts, grades.rewards):
        assert math.isnan(reward) if verdict in ("ungraded", "timeout", "crash") else reward in (0, 1)


@FUZZ
@given(text=TEXTS, reference=TEXTS, style=STYLES)
def test_grading_never_raises(text, reference, style):
    pattern = PATTERN if style == "regex" else None
    functions = find_rewards(["exact", "format"])
    graded = grade_sample(sample(text, reference), functions, style=style, pattern=pattern)
    assert graded["verdict"] == "graded"
    assert set(graded["values"]) <= {0.0, 1.0}
    assert graded["values"][1] == (extract_answer(text, style=style, pattern=pattern) is not None)


@FUZZ
@given(text=TEXTS, style=STYLES)
def test_an_answer_lies_where_its_extent_says(text, style):
    pattern = PATTERN if style == "regex" else None
    extent = find_extent(text, style=style, pattern=pattern)
    found = extract_answer(text, style=style, pattern=pattern)
    assert (found is None) == (extent is None)
    if extent is not None:
        assert 0 <= extent.marker <= extent.start < extent.end <= len(text)
        assert found == text[extent.start : extent.end] == found.strip() != ""


@FUZZ
@given(
    rows=st.lists(st.lists(st.integers(-1, 300), max_size=30), min_size=1, max_size=4),
    style=STYLES,
    seed=st.integers(0, 99),
)
def test_spans_of_any_tokens(rows, style, seed):
    """Ids beyond the table, bytes that are no UTF-8, tokens that hold half a marker."""
    draw = random.Random(seed)
    pieces = [
        b"\\boxed{",
        b"\\box",
        b"ed{",
        b"}",
        b"{",
        b"####",
        b"##",
        b"<answer>",
        b"</answer>",
        b"= ",
        b"7",
        b" ",
        b"\n",
    ]
    table = [draw.choice(pieces) if draw.random() < 0.7 else bytes([draw.randrange(256)]) for _ in range(256)] + [
        b""
    ] * 8
    length = max(len(row) for row in rows)
    tokens = np.zeros((len(rows), length), np.int32)
    made = np.zeros((len(rows), length), bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], made[row, : len(ids)] = ids, True
    span = find_answers(tokens, made, table, style=style, pattern=PATTERN if style == "regex" else None)
    reasoning, answer, found = (np.asarray(part) for part in (span.reasoning, span.answer, span.has_answer))
    assert not (reasoning & answer).any()
    assert not ((reasoning | answer) & ~made).any()
    np.testing.assert_array_equal(answer.any(1), found)
