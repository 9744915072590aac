"""The sentences of builtin:stories: problems and solutions are put together from them, and problems are read back.

A problem tells a start, events that change a number of things, facts that do not matter, and a question. Every fact is
one sentence with one or two numbers, in one of several forms. Imports nothing of the package.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WOMEN = ("Anna", "Clara", "Emma", "Julia", "Laura", "Maria", "Nora", "Sarah")
MEN = ("Adam", "David", "Felix", "Henry", "Jonas", "Lukas", "Martin", "Peter")
THINGS = ("apples", "buttons", "cards", "coins", "marbles", "nuts", "pencils", "shells", "stamps", "stickers")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")

FORMS = {
    "start": (
        "{n} keeps {x} {o} in a wooden box under the bed.",
        "At the start of the story {n} has {x} {o} at home.",
        "There are {x} {o} in the bag that {n} carries to school.",
        "{n} loves to collect {o} and owns {x} of them so far.",
        "On the first day {n} counts {x} {o} in a drawer.",
        "Last summer {n} was given {x} {o} by a kind neighbour.",
    ),
    "gain": (
        "On {d} {p} buys {x} more at the market.",
        "Then {p} finds {x} more behind the old door.",
        "A friend brings {x} more as a present on {d}.",
        "After lunch {p} wins {x} more in a game.",
        "In the evening {p} gets {x} more from an uncle.",
        "{d} is a lucky day that brings {x} more.",
    ),
    "loss": (
        "On {d} {p} gives {x} of them to a cousin.",
        "Then {x} of them fall into the deep river.",
        "After school {p} sells {x} of them to a teacher.",
        "In the evening {p} hands {x} of them to a brother.",
        "A dog runs off with {x} of them on {d}.",
        "{d} is an unlucky day and {x} of them break.",
    ),
    "times": (
        "By {d} the collection is {x} times as large as before.",
        "Then {p} trades until there are {x} times as many.",
        "A magic trick makes it {x} times as many on {d}.",
        "An aunt who is rich makes it {x} times as many.",
    ),
    "part": (
        "On {d} {p} makes {x} equal piles and keeps only one.",
        "Then {p} shares them among {x} people and gets one part.",
        "By {d} only one of {x} equal parts is left.",
        "A thief makes {x} equal parts and leaves just one.",
    ),
    "bags": (
        "On {d} {p} buys {k} bags with {x} in each bag.",
        "Then {k} boxes arrive that hold {x} each.",
        "A shop sends {k} packs of {x} as a present.",
        "In the evening {k} friends bring {x} more each.",
    ),
    "taken": (
        "On {d} {k} children come by and take {x} each.",
        "Then {p} fills {k} bags with {x} each and sells them.",
        "After that {k} birds steal {x} each from the garden.",
        "In the evening {p} gives {k} friends {x} each.",
    ),
    "more": (
        "In the end {f} has {x} more than {n} has.",
        "By then {f} owns {x} more than {n} does.",
        "Next door {f} has now {x} more than {n}.",
    ),
    "fewer": (
        "In the end {f} has {x} fewer than {n} has.",
        "By then {f} owns {x} fewer than {n} does.",
        "Next door {f} has now {x} fewer than {n}.",
    ),
    "missing": (
        "In the end {n} would like to have {x} of them.",
        "To fill an album {n} needs {x} of them in all.",
        "The plan of {n} is to own {x} of them.",
    ),
    "aside": (
        "The bus to the park takes {x} minutes on most days.",
        "The oldest sister of {f} is {x} years old.",
        "The shop near the school has been open for {x} years.",
        "There are {x} benches in the park behind the house.",
        "It has been raining for {x} days in the next town.",
        "A glass of milk costs {x} cents in the shop.",
        "The school book that {f} reads has {x} pages.",
        "In the street of {n} there are {x} tall trees.",
    ),
    "ask have": (
        "How many {o} does {n} have at the end?",
        "What is the number of {o} that {n} has now?",
        "Can you tell how many {o} are left now?",
    ),
    "ask both": (
        "How many {o} do {n} and {f} have together?",
        "What is the number of {o} that both have together?",
        "Can you tell how many {o} they have in all?",
    ),
    "ask missing": (
        "How many {o} does {n} still need?",
        "What is the number of {o} that are still missing?",
        "Can you tell how many {o} {n} has to find?",
    ),
}

INTROS = (
    "Let us solve this slowly and look only at facts that matter.",
    "We go through the story from its start and keep the number.",
    "The way to do this is to follow the facts in turn.",
    "Some facts of the story do not matter, so we skip them.",
    "I will read the story once more and do what it says.",
    "This looks like a long story, but it is easy to do.",
)
LEADS = (
    "Now we read the next fact and",
    "In this part of the story we",
    "The thing to do here is to",
    "If we read on from here, we",
    "At this point it is time to",
    "What happens next is that we have to",
    "Here the story says that we should",
    "We go on, and so we must",
)
TAILS = (
    "the two numbers:",
    "both of the numbers:",
    "as it says:",
    "and write it down:",
)
CLOSINGS = (
    "That is the number to keep in mind.",
    "We write this on paper and go on.",
    "So far the story was easy to follow.",
    "This is what we need in a moment.",
    "With that done, nothing was left out.",
    "Good, that fact is out of the way.",
    "We check the number, and it looks fine.",
    "Let us see what else there is.",
)
ENDS = (
    "There is nothing left to do, so the answer is",
    "This was the last step, and it gives us",
    "Now the question of the story is answered with",
    "We are at the end, and the answer is",
)

KEYWORDS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
"""The word of a solution that says what a step does, by the operation of its equation."""

EVENTS = {"gain": 1, "loss": 1, "times": 1, "part": 1, "bags": 2, "taken": 2}
"""Equations of each event."""
ENDINGS = {"have": 0, "missing": 1, "more": 2, "fewer": 2}
QUESTIONS = {"have": "ask have", "missing": "ask missing", "more": "ask both", "fewer": "ask both"}
PHRASINGS = 4
"""Choices of forms and of asides for every schema."""


class Fact(NamedTuple):
    """A sentence that counts, by its kind and its numbers."""

    kind: str
    numbers: tuple[int, ...]


class StoryTemplate(NamedTuple):
    """A problem without names, things and numbers: its facts in order, and the form of every sentence."""

    schema: tuple[str, ...]  # kinds of the facts after the start; the last is an ending
    sentences: tuple[tuple[str, int], ...]  # kind and form of every sentence, asides and question included


class Past(NamedTuple):
    """The result of an earlier equation of a solution."""

    step: int


class Equation(NamedTuple):
    a: int | Past
    operation: str
    b: int | Past


# Templates ---------------------------------------------------------------------------------------------------------


def schemas() -> Iterator[tuple[str, ...]]:
    """Generate the kinds of facts of every schema: 3 equations, or 4 where two people are compared.

    At most one fact multiplies or divides, and none does so right before ``have``, where answers would be few.
    """
    for ending, extra in ENDINGS.items():
        for length in (1, 2, 3):
            for events in itertools.product(EVENTS, repeat=length):
                scaled = [event in ("times", "part") for event in events]
                equations = extra + sum(EVENTS[event] for event in events)
                if not 3 <= equations <= 3 + (extra == 2) or sum(scaled) > 1 or (ending == "have" and scaled[-1]):
                    continue
                yield (*events, ending)


@functools.cache
def templates() -> tuple[StoryTemplate, ...]:
    """Return all templates, every schema in ``PHRASINGS`` distinct phrasings; always the same."""
    out = []
    for schema in schemas():
        draw = random.Random(f"stories/template/{'/'.join(schema)}")
        phrasings: dict[tuple[tuple[str, int], ...], None] = {}
        while len(phrasings) < PHRASINGS:
            facts = [kind for kind in schema if kind in FORMS]
            sentences = [(kind, draw.randrange(len(FORMS[kind]))) for kind in ("start", *facts)]
            for form in draw.sample(range(len(FORMS["aside"])), 1 + (len(facts) < 3 and draw.random() < 0.5)):
                sentences.insert(draw.randint(1, len(sentences)), ("aside", form))
            question = QUESTIONS[schema[-1]]
            phrasings[*sentences, (question, draw.randrange(len(FORMS[question])))] = None
        out += [StoryTemplate(schema, sentences) for sentences in phrasings]
    return tuple(out)


# Numbers -----------------------------------------------------------------------------------------------------------


def draw_facts(draw: random.Random, schema: Sequence[str], *, highest: int) -> list[Fact]:
    """Draw the numbers of a schema's facts, backwards from an answer that is uniform in 1..``highest``.

    Every number of problem and solution lies in 1..``highest``. Answers that no numbers lead to are drawn again.
    """
    while True:
        answer = draw.randint(1, highest)
        for _ in range(20):
            facts, total = [], answer
            for kind in reversed(schema):
                result = _before(draw, kind, total, highest)
                if result is None:
                    break
                numbers, total = result
                facts.append(Fact(kind, numbers))
            else:
                if total >= 2:
                    return [Fact("start", (total,)), *(fact for fact in reversed(facts) if fact.kind != "have")]


def _before(draw: random.Random, kind: str, after: int, highest: int) -> tuple[tuple[int, ...], int] | None:
    """Draw a fact's numbers and the total before it, from the total after it; None if they do not exist."""
    total_before: int
    if kind == "have":
        return (), after
    if kind == "gain":
        total_before = draw.randint(1, max(after - 1, 1))
        numbers = (after - total_before,)
    elif kind == "loss":
        total_before = draw.randint(min(after + 1, highest), highest)
        numbers = (total_before - after,)
    elif kind == "times":
        numbers = (draw.choice((2, 3)),)
        total_before = after // numbers[0] if after % numbers[0] == 0 else 0
    elif kind == "part":
        numbers = (draw.choice((2, 3)),)
        total_before = after * numbers[0]
    elif kind in ("bags", "taken"):
        numbers = (draw.randint(2, 4), draw.randint(2, 5))
        change = numbers[0] * numbers[1]
        total_before = after - change if kind == "bags" else after + change
        if change > highest:
            return None
    elif kind == "missing":
        total_before = draw.randint(1, max(highest - after, 1))
        numbers = (after + total_before,)
        if numbers[0] > highest:
            return None
    else:  # more, fewer: ``after`` is what both have together
        sign = 1 if kind == "more" else -1
        choices = [n for n in range(1, after) if sign * (after - 2 * n) >= 1]
        if not choices:
            return None
        total_before = draw.choice(choices)
        numbers = (sign * (after - 2 * total_before),)
    return (numbers, total_before) if min(numbers, default=1) >= 1 and 1 <= total_before <= highest else None


def equations(facts: Sequence[Fact]) -> list[Equation]:
    """Return the equations that solve a problem, in order."""
    out: list[Equation] = []
    total: int | Past = 0

    def step(a: int | Past, operation: str, b: int | Past) -> Past:
        out.append(Equation(a, operation, b))
        return Past(len(out) - 1)

    for kind, numbers in facts:
        if kind == "start":
            total = numbers[0]
        elif kind in ("bags", "taken"):
            total = step(total, "+" if kind == "bags" else "-", step(numbers[0], "*", numbers[1]))
        elif kind in ("more", "fewer"):
            total = step(total, "+", step(total, "+" if kind == "more" else "-", numbers[0]))
        elif kind == "missing":
            total = step(numbers[0], "-", total)
        else:
            total = step(total, {"gain": "+", "loss": "-", "times": "*", "part": "/"}[kind], numbers[0])
    return out


def compute(operation: str, a: int, b: int) -> int | None:
    """Return the result of an equation; None if it is no whole number."""
    if operation == "/":
        return a // b if b and a % b == 0 else None
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


def solve(equations: Sequence[Equation]) -> list[tuple[int, str, int, int]]:
    """Compute equations in order: (a, operation, b, result)."""
    out: list[tuple[int, str, int, int]] = []
    for equation in equations:
        a, b = (out[x.step][3] if isinstance(x, Past) else x for x in (equation.a, equation.b))
        result = compute(equation.operation, a, b)
        if result is None:
            raise ValueError(f"{a} {equation.operation} {b} is not a whole number")
        out.append((a, equation.operation, b, result))
    return out


# Texts -------------------------------------------------------------------------------------------------------------


def tell(draw: random.Random, template: StoryTemplate, facts: Sequence[Fact], *, highest: int) -> str:
    """Write a problem by a template; draws its names, things and days, and the numbers of its asides."""
    women = draw.random() < 0.5
    name, thing = draw.choice(WOMEN if women else MEN), draw.choice(THINGS)
    friend = draw.choice([person for person in (*WOMEN, *MEN) if person != name])
    facts_left, out = list(facts), []
    for kind, form in template.sentences:
        numbers = (draw.randint(2, highest),)
        if facts_left and kind == facts_left[0].kind:
            numbers = facts_left.pop(0).numbers
        slots = {"n": name, "f": friend, "o": thing, "p": "she" if women else "he", "d": draw.choice(DAYS)}
        out.append(FORMS[kind][form].format(**slots, x=numbers[-1], k=numbers[0]))
    return " ".join(out)


def read(problem: str) -> list[Fact]:
    """Return the facts of a problem that count, in order: the inverse of ``tell``.

    Raises:
        ValueError: a sentence has none of the forms.
    """
    facts = []
    for sentence in re.split(r"(?<=[.?]) ", problem):
        for kind, pattern in _patterns():
            if match := pattern.fullmatch(sentence):
                if kind != "aside" and not kind.startswith("ask"):
                    facts.append(Fact(kind, tuple(map(int, match.groups()))))
                break
        else:
            raise ValueError(f"no problem of builtin:stories has the sentence {sentence!r}")
    return facts


@functools.cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Return the forms as patterns whose groups are the numbers."""
    out = []
    for kind, forms in FORMS.items():
        for form in forms:
            parts = re.split(r"\{([a-z])\}", form)
            text = "".join(
                re.escape(part) if n % 2 == 0 else "([0-9]+)" if part in "xk" else "[A-Za-z]+"
                for n, part in enumerate(parts)
            )
            out.append((kind, re.compile(text)))
    return out


def explain(draw: random.Random, facts: Sequence[Fact], *, right: float, highest: int) -> str:
    """Write a solution with free phrasing; each step is right with probability ``right``.

    A slip changes the result, the second number or the operation of an equation, and the steps after it go on from
    there. If the numbers then no longer work out, a result is drawn at random.
    """
    numbers = [number for fact in facts for number in fact.numbers]
    results: list[int] = []
    text = [draw.choice(INTROS)]
    for equation in equations(facts):
        a, b = (results[x.step] if isinstance(x, Past) else x for x in (equation.a, equation.b))
        operation, slip = equation.operation, None
        if draw.random() >= right:
            slip = draw.choice(("result", "number", "operation"))
        if slip == "number":
            b = draw.choice([n for n in (*numbers, *range(1, highest + 1)) if n != b])
        if slip == "operation":
            operation = {"+": "-", "-": "+", "*": "+", "/": "-"}[operation]
        result = compute(operation, a, b)
        if slip == "result" or result is None or not 0 <= result <= highest:
            result = draw.choice([n for n in range(1, highest + 1) if n != result])
        results.append(result)
        lead, tail, closing = draw.choice(LEADS), draw.choice(TAILS), draw.choice(CLOSINGS)
        text.append(f"{lead} {KEYWORDS[operation]} {tail} {a} {operation} {b} = {result}. {closing}")
    return " ".join([*text, f"{draw.choice(ENDS)} \\boxed{{{results[-1]}}}."])
