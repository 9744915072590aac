"""builtin:stories: word problems in sentences, with solutions of free phrasing, and the truth about every word.

A problem has 40 to 80 words: a start, two to four facts that change a number of things, one or two facts that do not
matter, and a question. Its solution has 80 to 250 words and one equation per step:

    ... Here the story says that we should subtract as it says: 12 - 4 = 8. We check the number, and it looks fine. ...
    We are at the end, and the answer is \\boxed{5}.

A template is a schema (which facts, in which order, and what is asked) and a phrasing (the form of every sentence, and
which facts do not matter); names, things, days and numbers are drawn. A hash of the template decides whether it is
held out: eval has only templates that train and sft never show. Answers are drawn uniformly from 1 to ``highest``, as
far as the schema allows.

What decides a solution is known: the words add, subtract, multiply and divide, and the four parts of each equation. The
phrases around them are drawn at random, carry no signal, and name neither an operation nor a number.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path

from oarjax.data.hf import write_random_checkpoint
from oarjax.data.tasks.arithmetic import MARKER, SPECIAL, builtin_config, save_tokenizer, split_of, tokens_with
from oarjax.data.tasks.stories_grammar import (
    CLOSINGS,
    DAYS,
    ENDS,
    FORMS,
    INTROS,
    KEYWORDS,
    LEADS,
    MEN,
    TAILS,
    THINGS,
    WOMEN,
    StoryTemplate,
    draw_facts,
    equations,
    explain,
    read,
    solve,
    tell,
    templates,
)

SIZES = {"train": 20_000, "eval": 1000, "sft": 20_000}
"""Problems of each split unless a limit is set."""
HIGHEST = 99
"""Largest number that is one token."""
PIECES = r" [-+*/=] |\\boxed\{| ?[A-Za-z]+|[0-9]+|[\s\S]"
"""A token: an operator with its spaces, the opening of the box, a word with the space before it, a number, a mark."""
STEP = re.compile(rf"\b({'|'.join(KEYWORDS.values())})\b|([0-9]+) ([-+*/]) ([0-9]+) = ([0-9]+)")


def stories_rows(
    split: str, *, rows: int, highest: int, right: float, written: float, seed: int
) -> Iterator[dict[str, str]]:
    """Generate ``rows`` distinct problems of a split, as ``question`` and ``answer`` fields; 0 for ``SIZES``.

    In train and eval the answer field holds the right answer. In sft it is the completion to imitate: a solution with
    probability ``written``, whose steps are right with probability ``right`` each, else the right answer alone in its
    box. Templates of eval are held out; a hash of the question divides all others among train and sft.

    Raises:
        ValueError: the split is unknown.
    """
    if split not in SIZES:
        raise ValueError(f"builtin:stories has no split {split!r}; set one of {', '.join(SIZES)}")
    draw = random.Random(f"stories/{split}/{seed}/{highest}")
    eligible = [template for template in templates() if held_out(template) == (split == "eval")]
    questions: set[str] = set()
    while len(questions) < (rows or SIZES[split]):
        template = draw.choice(eligible)
        facts = draw_facts(draw, template.schema, highest=highest)
        question = tell(draw, template, facts, highest=highest)
        if question in questions or (split != "eval" and (split_of(question) == "sft") != (split == "sft")):
            continue
        questions.add(question)
        answer = str(solve(equations(facts))[-1][3])
        if split != "sft":
            yield {"question": question, "answer": f"{MARKER} {answer}"}
        elif draw.random() < written:
            yield {"question": question, "answer": explain(draw, facts, right=right, highest=highest)}
        else:
            yield {"question": question, "answer": f"\\boxed{{{answer}}}."}


def held_out(template: StoryTemplate) -> bool:
    """Tell templates that only eval shows, one in eight, by a hash of a text that no name in this package changes."""
    text = f"Template(schema={template.schema!r}, sentences={template.sentences!r})"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % 8 == 7


def story_tokens(question: str, tokens: Sequence[str]) -> tuple[list[bool], list[bool], list[bool]]:
    """Mark the tokens of a completion that hold results, those that decide, and those of its first mistake.

    Results are the numbers after =. The words of ``KEYWORDS`` and all four parts of each equation decide. A mistake is
    a word or a part that the solution of the problem does not have at this step; + and * may have their numbers in
    either order. A completion that stops early, and one without steps, have no mistake marked.
    """
    text = "".join(tokens).partition("\\boxed")[0]
    expected = solve(equations(read(question)))
    results: list[tuple[int, int]] = []
    deciding: list[tuple[int, int]] = []
    mistakes: list[tuple[int, int]] = []
    number = 0
    for match in STEP.finditer(text):
        step = expected[number] if number < len(expected) else None
        if match[1]:
            deciding.append(match.span())
            mistakes += [match.span()] * (step is None or match[1] != KEYWORDS[step[1]])
            continue
        parts = (int(match[2]), match[3], int(match[4]), int(match[5]))
        if step is not None and step[1] in "+*" and parts[:3] == (step[2], step[1], step[0]):
            step = (step[2], step[1], step[0], step[3])
        mistakes += [match.span(2 + n) for n in range(4) if step is None or parts[n] != step[n]]
        deciding += [match.span(2 + n) for n in range(4)]
        results.append(match.span(5))
        number += 1
    return tokens_with(tokens, results), tokens_with(tokens, deciding), tokens_with(tokens, mistakes[:1])


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """Return the tokens of all problems and solutions: words after a space, words at the start, marks, numbers."""
    solution = (*INTROS, *LEADS, *TAILS, *CLOSINGS, *ENDS, *KEYWORDS.values())
    forms = [re.sub(r"\{[a-z]\}", "0", form) for kind in FORMS.values() for form in kind]
    words: dict[str, None] = {}
    for text in (*solution, *forms, *WOMEN, *MEN, *THINGS, *DAYS, "he", "she"):
        for piece in re.findall(PIECES, text) + re.findall(PIECES, f" {text}"):
            words[piece] = None
    words |= dict.fromkeys((*(f" {sign} " for sign in (*KEYWORDS, "=")), "\\boxed{", "}", " ", "."))
    words = dict.fromkeys(word for word in words if not word.isdecimal())
    after_space = [word for word in words if re.fullmatch(" [A-Za-z]+", word)]
    return (*after_space, *(word for word in words if word not in after_space), *map(str, range(HIGHEST + 1)))


def write_stories_policy(folder: Path | str, *, seed: int) -> Path:
    """Write a random Qwen2 of 0.4 million parameters with a word-level tokenizer as an HF folder.

    Its weights have a standard deviation of .7 / sqrt(width), as those of builtin:forks.
    """
    width, size = 96, len(SPECIAL) + len(vocabulary())
    fields = builtin_config(hidden=width, layers=3, heads=4, kv_heads=2, ffn=256, vocab=-(-size // 64) * 64)
    fields |= {"initializer_range": 0.7 / sqrt(width)}
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(scratch, vocabulary(), pieces=PIECES)
        return write_random_checkpoint(Path(folder), fields, seed=seed, tokenizer=Path(scratch))
