"""Rewards: the registry, the built-in comparisons, and agreement with labels, class by class."""

import json
import math

import numpy as np
import pytest
from sympy import Symbol, sqrt

from oarjax.grading import rewards
from oarjax.grading.rewards import (
    Sample,
    Unparseable,
    find_rewards,
    is_joint,
    load_plugins,
    reference_answer,
    reward,
)
from oarjax.grading.worker import grade_sample

SOLUTIONS = r"(?m)^A:[ \t]*([^\n]+)"  # the last line of the labelled GSM8K solutions


def sample(answer, extracted):
    return Sample(prompt="", completion="", answer=answer, extracted=extracted)


EQUAL = [
    ("18", "18"),
    ("1,000", "1000"),
    ("1000", "1,000.00"),
    ("18", r"\$18"),
    ("18", "18."),
    ("18", r"18 \text{ dollars}"),
    (r"\frac12", "0.5"),
    (r"12\frac{3}{5}", "63/5"),
    ("0.333333", r"\frac{1}{3}"),  # floats are equal to six places
    (r"2\sqrt{2}", r"\sqrt 8"),
    ("(x+1)^2", "x^2+2x+1"),
    ("5", "x=5"),
    ("x=5", "5"),
    ("(1,2)", "(1, 2)"),
    ("1,2", "2,1"),  # a list of solutions has no order
    (r"\text{(C)}", "C"),
    (r"\text{Monday}", "Monday"),
    (r"90^\circ", "90"),
    ("#### 7", "7"),
]
DIFFERENT = [
    ("18", "81"),
    ("18", "-18"),
    ("1,000", "1"),
    ("(1,2)", "(2,1)"),
    (r"\frac12", "0.51"),
    ("x+1", "x-1"),
    ("10^{100}", "10^{100}+1"),
    (r"\text{Monday}", r"\text{Tuesday}"),
]
KNOWN_MISSES = [  # (reference, answer, our value): what math-verify reads otherwise than a person would
    (r"\text{4:30 p.m.}", r"4:30 \text{ p.m.}", 0.0),  # a word beside a ratio
    ("1000", "1e3", 0.0),  # e is Euler's number
    ("[1,2)", r"1 \le x < 2", 0.0),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold, answer):
    assert rewards.same_value(sample(gold, answer)) == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold, answer):
    assert rewards.same_value(sample(gold, answer)) == 0.0


@pytest.mark.parametrize(("gold", "answer", "value"), KNOWN_MISSES)
def test_known_misses_are_still_misses(gold, answer, value):
    assert rewards.same_value(sample(gold, answer)) == value


@pytest.mark.parametrize("gold", ["18", "1,000", "-7", "0", "-0", "007", "12345678901234567890"])
@pytest.mark.parametrize("answer", ["18", "1000", "-7", "00", "7", "1,001", "12345678901234567891"])
def test_plain_numbers_have_the_verdict_of_math_verify(gold, answer):
    from math_verify import verify

    slow = verify(list(rewards._parsed(gold)), list(rewards._parsed(answer)), timeout_seconds=None, raise_on_error=True)
    assert rewards.same_value(sample(gold, answer)) == float(slow)


DECIMALS = [
    "0.5",
    ".5",
    "0.50",
    "7.0",
    "7",
    "+7",
    "1,000.00",
    "1000",
    "0.333333",
    "0.3333334",
    "-2.5",
    "2.5",
    "0.49999",
    "1e3",
]


@pytest.mark.parametrize("gold", DECIMALS)
def test_plain_decimals_have_the_verdict_of_math_verify(gold):
    """Decided without mathematics or left to it, never decided otherwise."""
    from math_verify import verify

    decided = 0
    for answer in DECIMALS:
        plain = rewards.plainly_equal(gold, answer)
        if plain is not None:
            sides = list(rewards._parsed(gold)), list(rewards._parsed(answer))
            assert plain == verify(*sides, timeout_seconds=None, raise_on_error=True), (gold, answer)
            decided += 1
    assert decided > 8 or gold == "1e3"


def test_numbers_of_any_length_are_compared_in_linear_time():
    long = "123456789" * 1000
    assert rewards.same_value(sample(long, "00" + long)) == 1.0
    assert rewards.same_value(sample(long, long + "0")) == 0.0
    assert rewards.same_value(sample(long, long[:-1] + "0")) == 0.0
    assert rewards.same_value(sample("7", "\uff17")) == 1.0  # a full-width 7
    with pytest.raises(Unparseable):
        rewards.same_value(sample("7", "x" * (rewards.MAX_LENGTH + 1)))


@pytest.mark.parametrize("text", [r"\frac{", "???", "garbage {} \\frac", r"\frac{1}{0}", "__import__('os').getcwd()"])
def test_what_is_no_expression_is_named(text):
    with pytest.raises(Unparseable, match=r"the answer .* is not an expression") as caught:
        rewards.same_value(sample("5", text))
    assert caught.value.which == "answer"
    with pytest.raises(Unparseable, match=r"the reference .* is not an expression") as caught:
        rewards.same_value(sample(text, "5"))
    assert caught.value.which == "reference"


def test_an_empty_reference_is_named():
    with pytest.raises(Unparseable, match="the reference ''"):
        rewards.same_value(sample("", "5"))


def test_deep_expressions_are_not_compared():
    x = Symbol("x")
    for _ in range(99):
        x = sqrt(x + 1)  # two levels each
    assert rewards._depth(x) == rewards.MAX_DEPTH + 1
    assert rewards._depth(Symbol("x") + 1) == 2
    with pytest.raises(Unparseable):
        rewards.same_value(sample("y", r"\sqrt{" * 120 + "x" + "}" * 120))


def test_no_answer_is_worth_nothing():
    for function in find_rewards(["math", "exact", "format"]):
        assert function(sample("5", None)) == 0.0


def test_exact_and_format():
    exact, form = find_rewards(["exact", "format"])
    assert exact(sample("#### 1,234", "1234")) == 1.0
    assert exact(sample("x + 1", "x + 1")) == 1.0
    assert exact(sample("0.5", r"\frac12")) == 0.0
    assert form(sample("5", "wrong")) == 1.0


@pytest.mark.parametrize(
    ("text", "bare"),
    [("so 2+3=5\n#### 5", "5"), (r"thus \boxed{\frac12}.", r"\frac12"), (" 7. ", "7"), ("x", "x"), ("", "")],
)
def test_references_may_be_solutions(text, bare):
    assert reference_answer(text) == bare


def test_names_are_checked():
    # Other tests of this process may have registered rewards of their own between these.
    known = r"no reward is called 'maths'; known are .*exact, .*format.*math.*grading.plugins"
    with pytest.raises(ValueError, match=known):
        find_rewards(["math", "maths"])
    with pytest.raises(ValueError, match="reward 'math' is registered twice"):
        reward("math")(lambda sample: 1.0)


def test_plugins(data, tmp_path):
    path = str(data / "grading" / "hostile.py")
    load_plugins([path])
    load_plugins([path])  # a second time is fine
    assert find_rewards(["hostile"])[0](sample("", None)) == 1.0
    load_plugins(["json"])  # modules by name
    with pytest.raises(
        ValueError, match=r"grading.plugins: 'no_such_module' cannot be imported .*expected a Python file"
    ):
        load_plugins(["no_such_module"])
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ValueError, match=r"cannot be imported .ZeroDivisionError"):
        load_plugins([str(broken)])


def test_a_callable_object_is_registered_by_its_plugin(tmp_path):
    """As ``oarjax train`` does, which loads the plugins to check them and again for the grader."""
    paths = [tmp_path / f"{name}.py" for name in "ab"]
    for path in paths:
        path.write_text(
            "from oarjax.grading.judge import HttpJudge\nfrom oarjax.grading.rewards import reward\n\n"
            "reward('judge_of_a_plugin')(HttpJudge('http://localhost:1/'))\n"
        )
    for _ in range(2):
        load_plugins([str(paths[0])])
    assert is_joint("judge_of_a_plugin")
    with pytest.raises(ValueError, match=r"registered twice: in .*a\.py:HttpJudge and .*b\.py:HttpJudge; rename one"):
        load_plugins([str(paths[1])])


def test_one_sample_with_several_rewards(data):
    load_plugins([str(data / "grading" / "hostile.py")])
    functions = find_rewards(["math", "format", "hostile"])

    def graded(completion, answer="3"):
        return grade_sample(
            Sample(prompt="", completion=completion, answer=answer), functions, style="boxed", pattern=None
        )

    assert graded(r"ok \boxed{3}") == {"values": [1.0, 1.0, 1.0], "verdict": "graded", "extracted": "3", "note": ""}
    assert graded("ok")["values"] == [0.0, 0.0, 1.0]
    odd = graded(r"ok \boxed{???}")
    assert odd["values"] == [0.0, 1.0, 1.0]
    assert odd["verdict"] == "unparseable"
    np.testing.assert_array_equal(graded(r"ok \boxed{3}", answer=r"\frac{")["values"], [np.nan, 1, 1])
    assert graded(r"ok \boxed{3}", answer=r"\frac{")["verdict"] == "ungraded"
    raised = graded(r"raise \boxed{3}", answer=r"\frac{")
    assert raised["verdict"] == "crash"  # the worst of the three
    assert "KeyError: 'no such thing'" in raised["note"]
    assert "the reference" in raised["note"]
    assert graded(r"infinite \boxed{3}")["verdict"] == "crash"
    assert graded(r"nan \boxed{3}")["verdict"] == "ungraded"
    assert "RecursionError" in graded(r"recurse \boxed{3}")["note"]
    assert "MemoryError" in graded(r"huge \boxed{3}")["note"]


def agreement(rows):
    """Disagreements with the labels among what was graded, and the references that could not be read."""
    functions = find_rewards(["math"])
    wrong, unread = [], []
    for row in rows:
        item = Sample(prompt="", completion=row["completion"], answer=row["answer"])
        pattern = SOLUTIONS if row["style"] == "regex" else None
        grade = grade_sample(item, functions, style=row["style"], pattern=pattern)
        value = grade["values"][0]
        if math.isnan(value):
            unread.append(row["answer"])
        elif bool(value) != row["label"]:
            wrong.append((row["answer"], grade["extracted"], row["label"]))
    return wrong, unread


MANGLED = "4:30p.."
"""A reference in the labelled outputs that its publisher's normaliser spoilt ("4:30 p.m."). The outputs say 4:30 p.m.
and are labelled wrong; we grade neither right nor wrong and say that the reference is no expression."""


def test_agreement_with_labels(data):
    rows = [json.loads(line) for line in (data / "grading" / "labelled.jsonl").read_text().splitlines()]
    wrong, unread = agreement(rows)
    assert len(rows) == 24
    assert not wrong
    assert unread == [MANGLED]


def test_agreement_with_all_labels(shared):
    rows = []
    for line in (shared / "data" / "gsm8k_model_solutions.jsonl").read_text().splitlines():
        problem = json.loads(line)
        gold = problem["ground_truth"].rsplit("A: ", 1)[1]
        for solver in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            one = problem[solver]
            rows.append({"style": "regex", "completion": one["solution"], "answer": gold, "label": one["is_correct"]})
    for line in (shared / "data" / "math_model_outputs.jsonl").read_text().splitlines():
        problem = json.loads(line)
        rows += [
            {"style": "boxed", "completion": text, "answer": problem["gt"], "label": label}
            for text, label in zip(problem["outputs"], problem["score"])
        ]
    wrong, unread = agreement(rows)
    assert len(rows) == 3040
    assert not wrong
    assert unread == [MANGLED] * 8
    assert len(wrong) + len(unread) <= 0.01 * len(rows)  # counting the ungraded as disagreement


def test_a_plugin_may_import_its_rewards_of_trls_signature(tmp_path):
    (tmp_path / "others_of_trl.py").write_text(
        "def taken(completions, **columns):\n    return [2.0] * len(completions)\n"
    )
    (tmp_path / "takes_others.py").write_text("from others_of_trl import taken\n")
    rewards.load_plugins([str(tmp_path / "takes_others.py")])
    (function,) = rewards.find_rewards(["taken"])
    assert (function([Sample("1+1=", "2", "2")]), rewards.calls_of("taken")) == ([2.0], "batch")


def test_a_function_that_needs_trls_trainer_is_refused_once_it_is_named(tmp_path):
    (tmp_path / "mixed.py").write_text(
        "def plain_of_two(completions, **columns):\n    return [1.0 for _ in completions]\n\n\n"
        "def of_trainer(completions, trainer_state):\n    return [0.0 for _ in completions]\n"
    )
    load_plugins([str(tmp_path / "mixed.py")])
    assert len(find_rewards(["plain_of_two"])) == 1
    with pytest.raises(ValueError, match="'of_trainer': trainer_state is not available here"):
        find_rewards(["of_trainer"])
