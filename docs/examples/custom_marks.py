"""Custom marks on completions, for the methods that read them: EGCA, CriticSearch, SERL.

oarjax train configs/demo.yaml credit.method=egca credit.marks=docs/examples/custom_marks.py:first_wrong_sum
oarjax train configs/demo.yaml credit.method=critic_search credit.marks=docs/examples/custom_marks.py:labelled_steps
oarjax train configs/demo.yaml credit.method=serl credit.marks=docs/examples/custom_marks.py:labelled_steps

A function sees prompt, completion and reference answer and returns (start, end, value) in characters of the completion.
It runs in the trainer, so that it should be quick: call a compiler or a critic for a batch elsewhere, and look up here.
"""

import re

STEP = re.compile(r"(-?\d+) *([+-]) *(\d+) *= *(-?\d+)")
"""A step of a chain, such as 12 + 7 = 19."""


def _steps(completion: str) -> list[tuple[int, int, bool]]:
    """Return where each step stands, and whether it is right."""
    found = []
    for step in STEP.finditer(completion):
        a, sign, b, result = step.groups()
        right = int(a) + (int(b) if sign == "+" else -int(b)) == int(result)
        found.append((step.start(), step.end(), right))
    return found


def first_wrong_sum(prompt: str, completion: str, reference: str) -> list[tuple[int, int, float]]:
    """Mark the first step that is wrong; nothing where all are right."""
    return [(start, end, 1.0) for start, end, right in _steps(completion) if not right][:1]


def labelled_steps(prompt: str, completion: str, reference: str) -> list[tuple[int, int, float]]:
    """Mark every step as a turn, 1 where it is right and -1 where it is wrong."""
    return [(start, end, 1.0 if right else -1.0) for start, end, right in _steps(completion)]
