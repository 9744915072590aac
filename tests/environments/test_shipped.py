"""The built-in environments: what the calculator computes, the guessing game's rules, Python in its sandbox."""

import json

import pytest

from oarjax.environments.contract import BUILT_IN, TurnOutcome, begin, load_environment, play, tool_schemas
from oarjax.environments.pool import Environments, Episode, Step
from oarjax.grading.sandbox import IsolationError, prove_isolation


def answer_of(name, settings=None, /, **arguments):
    """The result of one tool call of a built-in environment whose tool has the only schema."""
    environment = load_environment(name, settings)
    (tool,) = environment.tools
    call = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
    text = play(environment, begin(environment, {"question": "?"}, 0), call, seed=0, turn=1).text
    return text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37+25", "62"),
        ("62-80", "-18"),
        (" (1+2)*-3 ", "-9"),
        ("0.1+0.2", "3/10"),
        ("7/2", "7/2"),
        ("8/2", "4"),
        ("1/0", "division by zero"),
        ("2**9", "expected numbers, + - * / and parentheses"),
        ("__import__('os')", "expected numbers, + - * / and parentheses"),
        ("True+1", "expected numbers, + - * / and parentheses"),
        ("1+", "expected numbers, + - * / and parentheses"),
        ("(" * 150, "expected numbers, + - * / and parentheses"),
        ("1e999999", "expected numbers, + - * / and parentheses"),
        ("1" * 201, "an expression has at most 200 characters"),
    ],
)
def test_the_calculator(expression, value):
    said = answer_of("builtin:calculator", expression=expression)
    assert said == value or json.loads(said) == {"error": value}


def test_an_answer_ends_the_calculators_episode():
    environment = load_environment("builtin:calculator")
    assert play(environment, begin(environment, {}, 0), "#### 62", seed=0, turn=1) == TurnOutcome(None, 0.0, {})


def test_the_guessing_game():
    environment = load_environment("builtin:guess", {"highest": 9, "budget": 3})

    def game(*texts, **columns):
        instance = begin(environment, columns, 5)
        return [play(environment, instance, text, seed=5, turn=n) for n, text in enumerate(texts, start=1)]

    assert game("5", "8", " 7\n", hidden=7) == [TurnOutcome("higher"), TurnOutcome("lower"), TurnOutcome(None, 1.0, {})]
    assert game("what?", "-7", "8", hidden=7) == [
        TurnOutcome("number?"),
        TurnOutcome("number?"),
        TurnOutcome(None, 0.0, {}),
    ]
    found = [n for n in range(1, 10) if game(str(n)) == [TurnOutcome(None, 1.0, {})]]
    assert len(found) == 1  # without a column, the seed's
    assert game("9" * 10_000)[0].text == "number?"


def test_the_python_tool_runs_in_a_sandbox():
    try:
        prove_isolation()
    except IsolationError:
        with Environments("builtin:python", workers=1) as pool, pytest.raises(IsolationError):
            pool.advance([Episode({}, 0, ("done",))])
        return
    programs = {
        "print(6 * 7)": "42",
        "x = 1": "(no output, exit code 0)",
        "import sys; sys.exit(3)": "(no output, exit code 3)",
        "open('/etc/passwd')": "PermissionError",
        "print('x' * 9000)": "x" * 8000,
    }
    for code, said in programs.items():
        assert answer_of("builtin:python", code=code).endswith(said) or said in answer_of("builtin:python", code=code)
    assert "NameError" in answer_of("builtin:python", code="print(x)")
    assert "it took more than 0.5 s" in answer_of("builtin:python", {"seconds": 0.5}, code="while True: pass")


def test_they_have_schemas_and_run_in_workers():
    assert len(BUILT_IN) == 3
    for name in BUILT_IN:
        schemas = (
            [tool["function"] for tool in tool_schemas(load_environment(name))] if name != "builtin:python" else []
        )
        assert all(tool["description"] and tool["parameters"]["required"] for tool in schemas)
    with Environments("builtin:guess", {"highest": 9}, workers=1) as pool:
        assert pool.tools == []
        assert pool.advance([Episode({"hidden": 4}, 0, ("5",))]) == [Step("lower")]
