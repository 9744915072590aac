"""What an environment class is: TRL's shape and whole turns, calls and their mistakes, schemas, refusals."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from oarjax.config.loading import parse_config
from oarjax.data.tokenizer import load_tokenizer
from oarjax.environments import contract
from oarjax.environments.contract import TurnOutcome, begin, finish, fits, load_environment, play, tool_schemas
from oarjax.errors import ConfigError, UserError
from oarjax.grading.rewards import Sample, find_rewards, load_plugins

CLASSES = str(Path(__file__).parent.parent / "golden" / "environments" / "classes.py")


def load(name, settings=None):
    return load_environment(f"{CLASSES}:{name}", settings)


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def result(text):
    return f"<tool_response>\n{text}\n</tool_response>"


def said(environment, instance, text):
    """What a single call returned."""
    observation = play(environment, instance, text, seed=0, turn=1).text
    assert observation.startswith("<tool_response>\n")
    assert observation.endswith("\n</tool_response>")
    return observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


def test_a_class_of_trl_runs_as_it_stands():
    environment = load("TrlCounter")
    instance = begin(environment, {"start": 4, "prompt": "Count."}, 0)
    turn = f"<think>{call('increment', step=50)}</think>I add twice.{call('increment', step=2)}{call('describe')}"
    first = play(environment, instance, turn, seed=0, turn=1)
    assert first == TurnOutcome(f"{result(6)}\n{result({'value': 6})}", 0.0)
    assert play(environment, instance, call("increment", step=95, note=None), seed=0, turn=2).text == result(101)
    assert said(environment, instance, call("increment", step=1)) == '{"error": "Game over."}'
    assert play(environment, instance, "It is 101.", seed=0, turn=4) == TurnOutcome(None, 97.0, {"reward": 97.0})
    newer = load("GetReward")
    assert play(newer, begin(newer, {"start": 4}, 0), "Done.", seed=0, turn=1) == TurnOutcome(
        None, 7.0, {"reward": 0.0}
    )


def test_mistakes_of_the_policy_are_observations():
    environment = load("Tooled")
    instance = begin(environment, {}, 0)
    assert said(environment, instance, call("take", amount=3, share=1, tags=["a"])) == "3 1 ['a']"
    assert said(environment, instance, call("take", amount=3, tags=None, where={"a": 1})) == "3 1.0 None all {'a': 1}"
    assert "take: argument where must be " in said(environment, instance, call("take", amount=3, where="a"))
    assert (
        said(environment, instance, '<tool_call>{"name": "fail", "arguments": ') == '{"error": "the call is not JSON"}'
    )
    wrong = {
        '{"name": "take"': "the call is not JSON",
        "[" * 100_000: "the call is not JSON",
        "[1]": "a call needs a name and arguments",
        '{"name": 3, "arguments": {}}': "a call needs a name and arguments",
        '{"name": "take", "arguments": "3"}': "the arguments of a call are an object",
        '{"name": "take"}': "take: missing a required argument: 'amount'",
        '{"name": "take", "arguments": {"amount": 1, "self": 2}}': "take: multiple values for argument 'self'",
        '{"name": "take", "arguments": {"amount": 1, "b": 2}}': "take: got an unexpected keyword argument 'b'",
        '{"name": "take", "arguments": {"amount": "1"}}': "take: argument amount must be int",
        '{"name": "take", "arguments": {"amount": true}}': "take: argument amount must be int",
        '{"name": "take", "arguments": {"amount": 1, "tags": "a"}}': "take: argument tags must be list[str] | None",
        '{"name": "take", "arguments": {"amount": 1, "mode": 1}}': "take: argument mode must be Literal['all', 'some']",
        **{
            f'{{"name": "{name}"}}': f"no tool is called {name}; there are fail, long, raw, take"
            for name in ("_hidden", "helper", "reset", "__init__", "tooled")
        },
    }
    for body, message in wrong.items():
        answer = said(environment, instance, f"<tool_call>{body}</tool_call>")
        assert json.loads(answer) == {"error": message}, body[:100]
    assert json.loads(said(environment, instance, f"<tool_call>{call('take', amount=1)[12:-13]}")) == {
        "error": "the call has no </tool_call>"
    }


def test_failures_of_a_tool_are_no_observations():
    environment = load("Tooled")
    instance = begin(environment, {}, 0)
    with pytest.raises(RuntimeError, match="out of order"):
        play(environment, instance, call("fail"), seed=0, turn=1)
    with pytest.raises(TypeError, match=r"raw returned b'raw' of type bytes, expected a text"):
        play(environment, instance, call("raw"), seed=0, turn=1)


def test_floods_are_cut():
    environment = load("Tooled")
    instance = begin(environment, {}, 0)
    whole = play(environment, instance, call("long"), seed=0, turn=1).text
    assert whole == result("y" * 2**20)
    both = play(environment, instance, call("long") + call("take", amount=1), seed=0, turn=1).text
    cut = result("y" * 2**19 + f"\n[{2**19} more characters]")
    assert both == f"{cut}\n{result('1 1.0 None')}"
    many = play(environment, instance, call("take", amount=1) * 1000, seed=0, turn=1).text
    assert many.count(result("1 1.0 None")) == contract.MAX_CALLS
    assert many.endswith(result('{"error": "936 more calls were not made"}'))


def test_whole_turns_with_rewards():
    environment = load("Story", {"ends": 2})
    instance = begin(environment, {"topic": "tea", "other": 1}, 5)
    first = play(environment, instance, "3", seed=5, turn=1)
    assert first.text.startswith("tea 5 3 turn 1 ")
    assert first.reward == 3.0
    assert play(environment, instance, "so", seed=5, turn=2).reward == 0.0
    end = play(environment, instance, "end 5", seed=5, turn=3)
    assert end == TurnOutcome(None, 7.0, {})  # the turn's reward and the final one
    assert play(environment, begin(environment, {}, 0), "end", seed=0, turn=1) == TurnOutcome(None, 2.0, {})
    assert finish(begin(environment, {}, 0)) == TurnOutcome(None, 2.0, {})


def test_a_column_named_seed_comes_before_the_seed():
    environment = load("Story")
    texts = [play(environment, begin(environment, row, 7), "x", seed=7, turn=1).text for row in ({}, {"seed": 3})]
    assert [text.split()[1] for text in texts] == ["7", "3"]


def test_global_random_numbers_are_those_of_the_seed_and_the_turn():
    environment = load("Story")

    def noise(seed, turn):
        return play(environment, begin(environment, {}, seed), "x", seed=seed, turn=turn).text.split()[-1]

    assert noise(1, 1) == noise(1, 1)
    assert len({noise(1, 1), noise(2, 1), noise(1, 2)}) == 3


@pytest.mark.parametrize(("kind", "error"), [("nan", ValueError), ("none", TypeError), ("text", TypeError)])
def test_a_final_reward_is_a_finite_number(kind, error):
    environment = load("Bill")
    with pytest.raises(error, match=r"reward returned the reward .*, expected a"):
        play(environment, begin(environment, {"kind": kind}, 0), "", seed=0, turn=1)
    assert play(environment, begin(environment, {"kind": "good"}, 0), "", seed=0, turn=1).reward == 1.0


def test_the_state_at_the_end_is_what_is_public_and_plain():
    environment = load("State")
    end = finish(begin(environment, {}, 0))
    assert end.state == {"found": ["a", 1], "share": 0.5, "reward": 3}


def test_a_reset_that_talks_is_refused():
    with pytest.raises(UserError, match=r"Talker: reset returned 'Hello.*; put what it says into the prompt column"):
        begin(load("Talker"), {}, 0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("NoDocstring", {}, "tool tool has no docstring; write one, or rename it to _tool"),
        ("NoTypes", {}, "tool tool has no type for x; annotate the arguments"),
        ("Async", {}, "tool tool is async; make it a plain method"),
        ("Generic", {}, r"tool step has no docstring; write step\(self, text\) for whole turns, or one"),
        ("NoReset", {}, "has no method reset; add one"),
        ("Nothing", {}, r"has neither step\(self, text\) nor a public method as a tool; add one"),
        ("Story", {"end": 3}, r"does not take the settings \{'end': 3\}: got an unexpected keyword argument 'end'"),
        ("not_a_class", {}, "expected a type, got .* of type int"),
        ("Nowhere", {}, "defines no Nowhere"),
    ],
)
def test_classes_that_are_none_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=f"^environment: .*{message}"):
        load(name, settings)


def test_names_are_checked():
    with pytest.raises(
        ConfigError, match=r"my\.field: expected file\.py:name or module:name, got 'guess'; built in are .*"
    ):
        load_environment("guess", field="my.field")


def test_schemas_are_those_of_chat_templates():
    (increment,) = [s["function"] for s in tool_schemas(load("TrlCounter")) if s["function"]["name"] == "increment"]
    assert increment["description"] == "Increment the counter."
    assert increment["parameters"] == {
        "type": "object",
        "properties": {
            "step": {"type": "integer", "description": "Value to add to the counter."},
            "note": {"type": "string", "nullable": True, "description": "Why."},
        },
        "required": ["step"],
    }
    assert tool_schemas(load("Story")) == []
    with pytest.raises(ConfigError, match=r"environment: .*Undescribed: tool tool: .*; see Args in its docstring"):
        tool_schemas(load("Undescribed"))


def test_types_of_arguments():
    good = [(1, int), (1, float), (None, int | None), ([1], list[int]), ({}, dict[str, int]), ("a", "a"), (3, object)]
    assert all(fits(value, hint) for value, hint in good)
    assert not any(fits(value, hint) for value, hint in [(1.0, int), (True, float), ("1", int | None), ({}, list)])


def test_observations_are_as_qwens_template_writes_results_of_tools(shared):
    tokenizer = load_tokenizer(shared / "tokenizer")
    environment = load("Tooled")
    turn = f"I take two.\n{call('take', amount=1)}\n{call('take', amount=2)}"
    observation = play(environment, begin(environment, {}, 0), turn, seed=0, turn=1).text
    chat = [
        {"role": "user", "content": "Take two."},
        {"role": "assistant", "content": turn},
        *({"role": "tool", "content": f"{amount} 1.0 None"} for amount in (1, 2)),
    ]
    text = tokenizer.apply_chat_template(chat, tools=tool_schemas(environment), tokenize=False)
    assert isinstance(text, str)
    assert text.endswith(f"{turn}<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n")
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in text  # as ``CALL`` reads it


def test_the_page_leads_from_a_class_of_trl_to_a_config(tmp_path, monkeypatch):
    """Its files as they stand: the class plays a row of the dataset, the reward reads it, and the config is one."""
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")

    def block(first_line):
        return page[page.index(first_line) :].partition("```")[0]

    monkeypatch.chdir(tmp_path)
    for name in ("shop.py", "shop_rewards.py"):
        (tmp_path / name).write_text(block(f"# {name}"))
    row = json.loads(block('{"question": "Buy two teas'))
    cfg = parse_config(yaml.safe_load(block("# shop.yaml")))
    environment = load_environment(cfg.rollout.environment.name)
    instance = begin(environment, row, 0)
    assert said(environment, instance, call("price", item="tea")) == "250 cents"
    assert "there is no gold" in said(environment, instance, call("price", item="gold"))
    assert said(environment, instance, call("buy", item="tea", count=2)) == "bought"
    last = play(environment, instance, "Done.", seed=0, turn=4)
    assert (last.text, last.reward, last.state) == (None, 1.0, {"reward": 1.0})
    load_plugins(cfg.grading.plugins)
    sample = Sample(prompt=row["question"], completion="Done.", answer=row["answer"], environment=last.state)
    assert find_rewards(["bought"])[0]([sample]) == [1.0]
