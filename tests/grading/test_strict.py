"""Answers that a policy could write to have several values taken for the right one."""

from contextlib import suppress

import pytest

from oarjax.grading import rewards
from oarjax.grading.rewards import Sample, Unparseable
from oarjax.grading.strict import has_extra_values, without_percent

HEDGES = [  # for the reference 7
    *("8=7", "0=7", "x=8=7", "x+8=7", "2x=7", "14/2=8=7", "7=7", "x=y=7", r"\pi=7", r"8\text{}=7", "x=8, x=7"),
    *(
        r"7\text{ (or 8)}",
        r"7 \text{ or } 8",
        r"7\text{ and }8",
        r"7\text{ not }8",
        r"7\mbox{ (8)}",
        r"7\mathrm{ or }8",
    ),
    *(r"7\text{ minus }1", r"\text{8}7", r"7\text{, 8}", r"8 \text{ but } 7", "7 or 8", "7 and 8"),
    *("7_{8}", "7_8", "{7}_{8}", "(7)_{8}", r"7_{\text{8}}"),
    *(r"7\%", "7%", r"7 \%", r"7\text{ percent}", r"7\text{ per cent}"),
    *(r"7\text{ million}", "7 million", r"7\text{ hundred}", "7 thousand"),
    *("7,8", "7, 8", "7;8", r"\{7,8\}", "(7,8)", "[7,8]", r"7\pm1", r"7 \pm 0.5", r"\{7\}\cup\{8\}"),
    *(r"$7$ and $8$", r"8 $7$", r"$8$ \text{final answer is} $7$", r"8 \text{ final answer is } $7$. I hope"),
    *(r"8 \(7\)", r"8 \[7\]", r"\boxed{7} 8", r"??? \frac{7}{1}", r"8 {} \\frac \frac{7}{1}", "8 [7] "),
    *(r"7 \neq 8", "7<8", r"7 \leq 7", "7:8", "7 8", r"7\,8", r"7 \quad 8", r"7 \\ 8", "7|8", r"7\ldots", "7, ..."),
]
FAIR = [  # (reference, answer): one value, written in other ways
    *(("7", "x=7"), ("7", "x = 7"), ("7", "x_1 = 7"), ("7", "f(3)=7"), ("7", "AB = 7"), ("7", r"\alpha=7")),
    *(("7", r"\text{Area}=7"), ("7", r"f^{-1}(x) = 7"), ("7", "$7$"), ("7", "$x=7$")),
    *(
        ("18", r"18 \text{ dollars}"),
        ("18", r"\$18"),
        ("7", r"7\text{ cm}^2"),
        ("7", r"7 \text{ m/s}"),
        ("90", r"90^\circ"),
    ),
    *(("x=7", "7"), ("x=7", "x=7"), ("y=2x+1", "y = 2x + 1"), ("2x+3y=6", "2x + 3y = 6"), ("x=1,y=2", "x=1,y=2")),
    *(("1,2", "x=1, x=2"), ("101_2", "101_2"), ("101_{2}", "101_2"), ("7%", "7"), ("7", "7 dozen")),
    *((r"15\%", "15%"), ("0.5", r"50\%"), (r"\frac{1}{4}", "25%"), (r"\text{7 or 8}", r"\text{7 or 8}")),
]


@pytest.mark.parametrize("answer", HEDGES)
def test_a_hedge_is_no_answer(answer):
    with suppress(Unparseable):  # worth nothing as well
        assert rewards.same_value(Sample(prompt="", completion="", answer="7", extracted=answer)) == 0.0


@pytest.mark.parametrize(("reference", "answer"), FAIR)
def test_one_value_may_be_written_in_many_ways(reference, answer):
    assert rewards.same_value(Sample(prompt="", completion="", answer=reference, extracted=answer)) == 1.0


def test_another_subscript_is_another_number():
    for answer in ("101_3", "101_{16}", "101_x"):
        assert rewards.same_value(Sample(prompt="", completion="", answer="101_2", extracted=answer)) == 0.0


def test_what_the_reference_has_too_may_be_there():
    assert not has_extra_values(r"7\text{ or }8", r"7 \text{ or } 8")
    assert has_extra_values(r"7\text{ or }8", r"7 \text{ or } 8 \text{ or } 9")
    assert not has_extra_values("x=7", "x=7")
    assert has_extra_values("x=7", "x=8=7")
    assert without_percent("7", r"7\%") == r"\frac{7}{100}"
    assert without_percent("7%", r"7\%") == r"7\%"
