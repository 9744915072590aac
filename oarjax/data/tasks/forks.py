"""builtin:forks: a task whose completions hold a few choices that decide the reward, among filler that does not.

A prompt is k digits, ``37=``. Its completion has one segment per fork, each a choice and ``filler`` letters drawn
uniformly from 16, then the answer:

    copy    f..f X1 f..f X2 #### X1X2                  a choice is one of three letters of its own alphabet
    echo    f..f X1 f..f X1 f..f X2 f..f X2 #### X1X2  every choice is written twice, half of the filler before each
    chain   3+7=0; f..f 0+5=5; f..f #### 5             a choice is a running sum modulo 10; the prompt has k + 1 digits

A table defines the right letter for each digit of each fork. The supervised split chooses right with probability
``right`` and copies its choices into the answer, right or not, so a policy that is warmed up on it has only to learn
from its rewards to choose. Sampled filler adds gradient noise and carries no signal, and it is known which tokens are
filler. Credit per token can therefore help in this task, and its help can be measured.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import tempfile
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Literal

from oarjax.data.hf import write_random_checkpoint
from oarjax.data.tasks.arithmetic import MARKER, builtin_config, split_of, tokens_with, write_tokenizer

Kind = Literal["copy", "echo", "chain"]
SPLITS = ("train", "eval", "sft")
PAIRS = 20_000
"""Pairs of the sft split unless a limit is set."""
OPTIONS = 3
"""Letters of a fork's alphabet; in ``chain`` a choice is one of ten digits."""
FILLER = "abcdefghijklmnop"
CHOICES = "ABCDEFGHIJKL"
LETTERS = "0123456789+=; " + FILLER + CHOICES


def forks_rows(
    split: str, *, rows: int, kind: Kind, forks: int, filler: int, right: float, seed: int, uneven: float = 0.0
) -> list[dict[str, str]]:
    """Return problems of a split as ``question`` and ``answer`` fields.

    In train and eval every question comes once, with its right answer; ``rows`` selects the first questions, and
    repeats them if there are fewer (2 forks have 100 questions); 0 selects all. In sft questions are drawn at random,
    with filler and choices, ``rows`` times (0: ``PAIRS``), and the answer field is the completion to imitate. A hash
    of the question decides its split, as in builtin:arithmetic. ``uneven`` is added to ``right`` for half of the digits
    of every fork and subtracted for the others, so that questions differ in difficulty.

    Raises:
        ValueError: the split is unknown, or has no question; right + uneven or right - uneven is outside 0 .. 1.
    """
    if not 0 <= right - uneven <= right + uneven <= 1:
        raise ValueError(f"builtin:forks: right {right} and uneven {uneven} leave 0 .. 1; lower uneven")
    if split not in SPLITS:
        raise ValueError(f"builtin:forks has no split {split!r}; set one of {', '.join(SPLITS)}")
    digits = itertools.product("0123456789", repeat=forks + (kind == "chain"))
    questions = [q for q in ("".join(d) + "=" for d in digits) if split_of(q) == split]
    draw = random.Random(f"forks/{split}/{seed}")
    draw.shuffle(questions)
    if not questions:
        raise ValueError(f"builtin:forks has no question of {forks} forks for {split}; raise forks")
    if split != "sft":
        table = right_letters(seed)
        return [
            {"question": q, "answer": f"{MARKER} {right_answer(q, kind=kind, table=table)}"}
            for q in itertools.islice(itertools.cycle(questions), rows or len(questions))
        ]
    return [
        {"question": q, "answer": written_out(q, draw, kind=kind, filler=filler, right=right, seed=seed, uneven=uneven)}
        for q in draw.choices(questions, k=rows or PAIRS)
    ]


@functools.cache
def right_letters(seed: int) -> tuple[tuple[str, ...], ...]:
    """Return the right letter of every fork (4) and digit (10); each letter is right for 3 or 4 digits."""
    draw, table = random.Random(f"forks/table/{seed}"), []
    for first in range(0, len(CHOICES), OPTIONS):
        letters = [CHOICES[first + n % OPTIONS] for n in range(10)]
        draw.shuffle(letters)
        table.append(tuple(letters))
    return tuple(table)


@functools.cache
def easy_digits(seed: int) -> tuple[frozenset[int], ...]:
    """Return the 5 digits of every fork (4) that ``uneven`` makes easy."""
    draw = random.Random(f"forks/easy/{seed}")
    return tuple(frozenset(draw.sample(range(10), 5)) for _ in range(len(CHOICES) // OPTIONS))


def right_answer(question: str, *, kind: Kind, table: Sequence[Sequence[str]]) -> str:
    """Return the answer of a question: the right letters, or in ``chain`` the sum of its digits modulo 10."""
    digits = [int(d) for d in question.removesuffix("=")]
    return str(sum(digits) % 10) if kind == "chain" else "".join(table[i][d] for i, d in enumerate(digits))


def written_out(
    question: str, draw: random.Random, *, kind: Kind, filler: int, right: float, seed: int, uneven: float = 0.0
) -> str:
    """Draw a completion. Each choice is right with the probability of its digit, else one of the others, uniformly."""
    table, digits = right_letters(seed), [int(d) for d in question.removesuffix("=")]
    easy = easy_digits(seed)

    def draw_filler(length: int) -> str:
        return "".join(draw.choices(FILLER, k=length))

    def choose(fork: int, digit: int, right_option: str, options: str) -> str:
        chance = right + (uneven if digit in easy[fork] else -uneven)
        return right_option if draw.random() < chance else draw.choice(options.replace(right_option, ""))

    text, answer = "", ""
    if kind == "chain":
        total = digits[0]
        for fork, digit in enumerate(digits[1:]):
            next_digit = choose(fork, digit, str((total + digit) % 10), "0123456789")
            text += f"{total}+{digit}={next_digit};{draw_filler(filler)}"
            total, answer = int(next_digit), next_digit
    else:
        for fork, digit in enumerate(digits):
            letter = choose(fork, digit, table[fork][digit], CHOICES[OPTIONS * fork : OPTIONS * (fork + 1)])
            lengths = [filler] if kind == "copy" else [filler // 2, filler - filler // 2]
            text += "".join(draw_filler(length) + letter for length in lengths)
            answer += letter
    return f"{text}{MARKER} {answer}"


def fork_tokens(question: str, tokens: Sequence[str], *, kind: Kind, seed: int) -> tuple[list[bool], list[bool]]:
    """Mark the tokens of a completion that choose, and the tokens of its first mistake.

    A choice is the first letter of a fork's alphabet before the answer (in ``echo`` the second letter is a copy), or in
    ``chain`` the result of a step. A mistake is a choice that is not right for the question; in ``chain`` it is a
    result that is not the sum of its step, or a term that is not the running total or the next digit. Without a mistake
    nothing is marked.
    """
    text = "".join(tokens).partition(MARKER)[0]
    forks: list[tuple[int, int]] = []
    mistakes: list[tuple[int, int]] = []
    digits = question.removesuffix("=")
    if kind == "chain":
        total = digits[:1]
        for n, step in enumerate(re.finditer(r"([0-9])\+([0-9])=([0-9])", text), start=1):
            next_digit = str((int(step[1]) + int(step[2])) % 10)
            expected = (total, digits[n : n + 1], next_digit)
            mistakes += [step.span(part) for part in (1, 2, 3) if step[part] != expected[part - 1]]
            forks.append(step.span(3))
            total = step[3]
    else:
        table = right_letters(seed)
        for fork, digit in enumerate(digits):
            choice = re.search(f"[{CHOICES[OPTIONS * fork : OPTIONS * (fork + 1)]}]", text)
            if choice:
                forks.append(choice.span())
                mistakes += [choice.span()] * (choice[0] != table[fork][int(digit)])
    return tokens_with(tokens, forks), tokens_with(tokens, sorted(mistakes)[:1])


def write_forks_policy(folder: Path | str, *, seed: int) -> Path:
    """Write a random Qwen2 of 20,000 parameters with a character-level tokenizer as an HF folder.

    Its weights have a standard deviation of .7 / sqrt(width): from Qwen's .02, so narrow a policy does not learn to
    copy its choices.
    """
    width = 32
    fields = builtin_config(hidden=width, layers=2, heads=4, kv_heads=2, ffn=64, vocab=64)
    fields |= {"initializer_range": 0.7 / sqrt(width)}
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(scratch, letters=LETTERS)
        return write_random_checkpoint(Path(folder), fields, seed=seed, tokenizer=Path(scratch))
