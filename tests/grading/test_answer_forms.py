"""How often ``math`` accepts answers as people write them, and answers that only look right."""

from pathlib import Path

import pytest
import yaml

from oarjax.grading.bounds import MAX_NESTING, exceeds_bounds
from oarjax.grading.everyday import bare, in_percent, is_unit, with_commas, without_unit
from oarjax.grading.rewards import Sample, Unparseable, find_rewards

FORMS = yaml.safe_load((Path(__file__).parent / "answer_forms.yaml").read_text(encoding="utf-8"))
LEGITIMATE, HOSTILE = FORMS["legitimate"], FORMS["hostile"]


def value(answer, reference, **settings):
    (math,) = find_rewards(["math"], {"math": settings})
    try:
        return math(Sample(prompt="", completion="", answer=reference, extracted=answer))
    except Unparseable as error:
        return 0.0 if error.which == "answer" else float("nan")


def filled(forms, values, templates="templates", n="8"):
    return [template.format(n=n, u=value, w=value) for template in forms[templates] for value in forms[values]]


def test_legitimate_forms_are_right():
    answers = LEGITIMATE["named"] + filled(LEGITIMATE, "units")
    missed = [answer for answer in answers if value(answer, "8") != 1]
    print(f"legitimate: {len(answers) - len(missed)} of {len(answers)} are right")
    assert len(set(answers)) == len(answers) >= 200
    assert not missed


def test_hostile_forms_are_not():
    answers = HOSTILE["named"] + filled(HOSTILE, "words")
    accepted = [answer for answer in answers for share in (False, True) if value(answer, "7", percent_as_unit=share)]
    print(f"hostile: {len(accepted)} of {len(answers)} are right")
    assert len(set(answers)) == len(answers) >= 200
    assert not accepted


def test_a_unit_makes_no_other_number_right():
    wrong = [template.format(n=9, u=unit) for template in FORMS["wrong"] for unit in LEGITIMATE["units"]]
    assert not [answer for answer in wrong if value(answer, "8")]


@pytest.mark.parametrize("answer", FORMS["percent"])
def test_per_cent_is_a_unit_where_asked(answer):
    assert value(answer, "25", percent_as_unit=True) == 1
    assert value(answer, "25") == 0
    assert value(answer, "0.25") == ("cent" not in answer and "eggs" not in answer)  # a share, as ever
    assert value(answer, "2500", percent_as_unit=True) == 0


@pytest.mark.parametrize(("reference", "answer"), FORMS["pairs"])
def test_lists_and_numbers_in_other_words(reference, answer):
    assert value(answer, reference) == 1


def test_bounds_are_of_the_text_alone():
    for answer in (
        "2^{2^{2^2}}",
        "x^{2023}",
        "(x+1)^{100}",
        "2^{1000}",
        "100!",
        r"\binom{100}{50}",
        "10^{100}+1",
        "(x^2-1)^{10}",
    ):
        assert not exceeds_bounds(answer), answer
    for answer in (
        r"\cos 20^\circ\cos 40^\circ",
        r"\sum_{k=1}^{9} k",
        "(-2)^{1000}",
        r"\sqrt{12345}",
        r"\sin 1+" * 9 + "1",
    ):
        assert not exceeds_bounds(answer), answer
    for answer in (
        "(1+x)^{100}(1-x)^{100}",
        r"\sum_{i=1}^{99}\sum_{j=1}^{99} ij",
        r"\sum^{1}_{k=-10^9} k",
        "10^ {10^4}",
    ):
        assert exceeds_bounds(answer), answer
    for answer in ("2^{20000}", "1001!", "5!!!", r"\Gamma(10^{9})", r"\exp(\exp(\exp(9)))", "7" * 4001, "-" * 11 + "7"):
        assert exceeds_bounds(answer), answer
    assert not exceeds_bounds("(" * MAX_NESTING + "7" + ")" * MAX_NESTING)
    assert exceeds_bounds("(" * (MAX_NESTING + 1))


def test_parts():
    assert bare("**The answer is $8$.**") == "8"
    assert bare(r"\boxed{1} + \boxed{2}") == r"\boxed{1} + \boxed{2}"
    assert without_unit("8 eggs") == "8"
    assert without_unit("2x") is None
    assert without_unit("e^0") == "e^0"  # for math-verify
    assert without_unit("8 and a half") is None
    assert in_percent("8 percent of all") == "8"
    assert in_percent("8% or 9%") is None
    assert with_commas("1, 2 or 3") == "1, 2, 3"
    assert is_unit("")
    assert not is_unit("eggs " * 9)
