"""builtin:guess and builtin:calculator: tasks of several turns, for the environments of the same names.

builtin:guess: find the hidden number of 1..31 in five guesses, each answered ``higher`` or ``lower``. Halving always
finds it. The prompt says nothing of the number, so all splits hold every number, and none can be learned by heart. The
supervised split halves with probability ``right`` and guesses at random otherwise.

builtin:calculator: the chained sums of builtin:arithmetic, with a calculator. In the supervised split a share of the
episodes (``written``) has it compute every step and then copies the last result; the rest answer at once, which a small
policy mostly gets wrong.

A demonstration is the column ``turns``: the policy's first turn, the observation after it, its second turn and so on,
ending with a turn of the policy. Calls, results and ``higher`` are single tokens of the tasks' tokenizer, which
has all printable ASCII besides, for what an environment may say of a wrong call.
"""

from __future__ import annotations

import itertools
import random
import re
import string
import tempfile
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

from oarjax.data.hf import write_random_checkpoint
from oarjax.data.tasks.arithmetic import MARKER, SIZES, arithmetic_rows, builtin_config, save_tokenizer

OPEN, CLOSE = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
RESULT = ("<tool_response>\n", "\n</tool_response>")
WORDS = ("higher", "lower", "number?")
LETTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
PIECES = (OPEN, CLOSE, *RESULT, *WORDS, MARKER)
VOCABULARY = 128


def guess_rows(
    split: str, *, rows: int, highest: int = 31, budget: int = 5, right: float = 0.5, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Generate problems of a split of builtin:guess: ``question``, ``answer`` and ``hidden``, the hidden number.

    Args:
        split: train, eval or sft; sft has ``turns`` as well.
        rows: their number; 0: every number once in eval, as many as builtin:arithmetic has in train and sft.
        highest: the number lies in 1..highest.
        budget: guesses of a demonstration.
        right: probability that a guess of a demonstration halves the numbers left; others are drawn from 1..highest.
        seed: of the order, and of the demonstrations.

    Raises:
        ValueError: the split is unknown.
    """
    _check("builtin:guess", split)
    draw = random.Random(f"guess/{split}/{seed}/{highest}")
    numbers: list[int] = []
    for _ in range(rows or (highest if split == "eval" else SIZES[split])):
        if not numbers:
            numbers = draw.sample(range(1, highest + 1), highest)
        hidden = numbers.pop()
        row = {"question": f"1-{highest}?", "answer": str(hidden), "hidden": hidden}
        yield row | ({"turns": _guesses(draw, hidden, highest, budget, right)} if split == "sft" else {})


def _guesses(draw: random.Random, hidden: int, highest: int, budget: int, right: float) -> list[str]:
    """Return the turns of a game, up to a hit or the last guess of the budget."""
    low, high, turns = 1, highest, []
    for guesses_left in reversed(range(budget)):
        guess = (low + high) // 2 if draw.random() < right else draw.randint(1, highest)
        turns.append(str(guess))
        if guess == hidden or not guesses_left:
            break
        turns.append("higher" if guess < hidden else "lower")
        low, high = (max(low, guess + 1), high) if guess < hidden else (low, min(high, guess - 1))
    return turns


def calculator_rows(
    split: str, *, rows: int, terms: int = 5, highest: int = 99, written: float = 0.5, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Generate problems of a split of builtin:calculator: ``question`` and ``answer`` as of builtin:arithmetic.

    Args:
        split: train, eval or sft; sft has ``turns`` as well.
        rows: their number; 0: as many as builtin:arithmetic has.
        terms: numbers per chain.
        highest: running totals lie in 0..highest.
        written: share of demonstrations that use the calculator.
        seed: of the problems.

    Raises:
        ValueError: the split is unknown, or has fewer problems than ``rows``.
    """
    _check("builtin:calculator", split)
    problems = arithmetic_rows(
        split, rows=rows or SIZES[split], terms=terms, highest=highest, written=written, seed=seed
    )
    for row in problems:
        yield row | ({"turns": _computed(row["answer"])} if split == "sft" else {})


def _computed(answer: str) -> list[str]:
    """Return the turns that compute the steps of a written-out answer: ``37+25=62;62-18=44;#### 44``."""
    *steps, last = answer.split(";")
    sides = [step.split("=") for step in steps]
    return [*itertools.chain(*((f"{OPEN}{term}{CLOSE}", result.join(RESULT)) for term, result in sides)), last]


def _check(task: str, split: str) -> None:
    if split not in SIZES:
        raise ValueError(f"{task} has no split {split!r}; set one of {', '.join(SIZES)}")


def write_turns_policy(folder: Path | str, *, seed: int) -> Path:
    """Write a random Qwen2 of 130,000 parameters with the tasks' tokenizer as an HF folder.

    Its weights have a standard deviation of .7 / sqrt(width), as those of builtin:forks.
    """
    width = 64
    fields = builtin_config(hidden=width, layers=3, heads=4, kv_heads=2, ffn=128, vocab=VOCABULARY)
    fields |= {"initializer_range": 0.7 / sqrt(width)}
    with tempfile.TemporaryDirectory() as scratch:
        pieces = "|".join(map(re.escape, PIECES))
        save_tokenizer(scratch, (*PIECES, *LETTERS), pieces=rf"{pieces}|[\s\S]")
        return write_random_checkpoint(Path(folder), fields, seed=seed, tokenizer=Path(scratch))
