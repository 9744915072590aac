"""W7 of ``oarjax bench``: grade answers as those of a rollout, on solutions of grade-school problems, per second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

from oarjax.grading.grader import Grader
from oarjax.grading.rewards import Sample
from oarjax.tools.bench.measure import WARM_UP, Compilations, measure, spread

ANSWERS = 2000
GOAL = 500
"""Answers per second on two cores."""

FORMS: tuple[tuple[float, Callable[[int], str]], ...] = (
    (0.80, lambda n: str(n)),
    (0.05, lambda n: f"{n}.00"),
    (0.05, lambda n: rf"\${n}"),
    (0.05, lambda n: rf"{n}\text{{ apples}}"),
    (0.03, lambda n: rf"\frac{{{2 * n}}}{{2}}"),
    (0.02, lambda n: f"x = {n}"),
)
"""How a policy writes a whole number, with shares; only the first two need no mathematics."""


def draw_solutions(count: int, *, seed: int) -> list[Sample]:
    """Draw short solutions that end in a box, half of them right."""
    draw = np.random.default_rng(seed)
    shares = [share for share, _ in FORMS]
    samples = []
    for form in draw.choice(len(FORMS), count, p=shares):
        a, b = (int(n) for n in draw.integers(2, 500, 2))
        answer = a + b + int(draw.integers(2))
        text = f"There are {a} apples and {b} more.\nTogether that makes {a} + {b} = {answer}.\n"
        box = FORMS[form][1](answer)
        samples.append(Sample(prompt="", completion=text + rf"The answer is \boxed{{{box}}}.", answer=f"#### {a + b}"))
    return samples


def bench_grading(*, workers: int, repeats: int, compiled: Compilations, answers: int = ANSWERS) -> dict[str, Any]:
    """Time warm workers on new answers in every run, so that no cache helps."""
    batches = iter([draw_solutions(answers, seed=seed) for seed in range(WARM_UP + repeats + 1)])
    with Grader((("math", 1.0),), workers=workers) as grader:
        result = measure({"ours": lambda: grader.grade(next(batches))}, repeats=repeats, compiled=compiled)["ours"]
        grades = grader.grade(next(batches))
    return {
        "workload": "W7",
        "name": "grading",
        "what": f"{answers} answers, reward math, {workers} workers",
        "unit": "answers/s",
        "goal": GOAL,
        "verdicts": grades.counts(),
        "right": float(np.nanmean(grades.rewards)),
        "ours": result.summary() | {"value": spread([answers / s for s in result.seconds])},
    }


def table(result: dict[str, Any]) -> Table:
    """Tabulate one row, within 80 columns."""
    value = result["ours"]["value"]
    out = Table(title=f"{result['workload']}: {result['what']}", title_justify="left")
    for heading in ("answers/s", "min-max", "goal on 2 cores", "verdicts"):
        out.add_column(heading, justify="right", no_wrap=True)
    verdicts = ", ".join(f"{name} {count}" for name, count in result["verdicts"].items())
    out.add_row(f"{value['median']:,.0f}", f"{value['min']:,.0f}-{value['max']:,.0f}", f"{result['goal']}", verdicts)
    return out
