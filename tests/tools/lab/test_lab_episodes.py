"""``oarjax credit`` on episodes."""

import io
import json

import numpy as np
import pytest
import yaml
from conftest import ROOT
from rich.console import Console

from oarjax.credit.registry import METHODS
from oarjax.tools.lab.command import run
from oarjax.tools.lab.episodes import (
    EpisodesResult,
    LabEpisode,
    LabTurn,
    by_turn,
    print_episodes,
    with_observations,
    write_episodes,
)
from oarjax.types import AnswerSpan, Origin, Rollout


def test_observations_before_the_answer_are_units_of_their_own():
    """A row of turns of 2, 1 and 2 tokens, observations of 1 and 2 before the last two, and a place of padding."""
    written = np.array([[1, 1, 0, 1, 0, 0, 1, 1, 0]], bool)
    extent = np.array([[1, 1, 1, 1, 1, 1, 1, 1, 0]], bool)
    turns = np.array([[0, 0, 1, 1, 2, 2, 2, 2, 0]], np.int32)
    zeros, prompt = np.zeros((1, 9), np.float32), np.ones((1, 1), bool)
    valid, origin = np.concatenate([prompt, extent], 1), Origin(turns, turns, np.zeros(1, np.int32))
    tokens = np.zeros((1, 10), np.int32)
    rollout = Rollout(tokens, valid, written, zeros, zeros, ended=prompt[0], origin=origin)
    answer = np.array([[0, 0, 0, 0, 0, 0, 1, 1, 0]], bool)
    span = AnswerSpan(reasoning=np.array([[1, 1, 0, 1, 0, 0, 0, 0, 0]], bool), answer=answer, has_answer=prompt[0])
    found = with_observations(rollout, span)
    assert found.reasoning.tolist() == [[True] * 6 + [False] * 3]
    assert found.units[found.reasoning].tolist() == [1, 1, 2, 3, 4, 4]
    early = AnswerSpan(reasoning=np.zeros((1, 9), bool), answer=written & (turns == 1), has_answer=prompt[0])
    assert with_observations(rollout, early).reasoning.tolist() == [[False, False, True] + [False] * 6]


def test_episodes_are_shown_turn_by_turn(tmp_path):
    said = "[red]high<er>[/red]\x1b"
    turns = [LabTurn("", 0.0, "16", 0.3, 0.6, 0.0, {"m": 1.5}), LabTurn(said, 0.2, "24", 0.0, np.nan, 1.0, {"m": 1.0})]
    result = EpisodesResult("policy", {}, [LabEpisode("1-31?", "24", "24", 1.0, turns)])
    assert by_turn(result) == "Mean share of the importance before the answer: turn 1 60% in 1 episodes."
    out = Console(file=io.StringIO(), width=120)
    print_episodes(out, result)
    text = out.file.getvalue()
    assert "[red]high<er>[/red]" in text
    assert "\x1b" not in text
    assert "60%" in text
    write_episodes(tmp_path, result, shown=1, html=True)
    page = (tmp_path / "credit.html").read_text()
    assert "high&lt;er&gt;" in page
    assert page.count("<tr>") == 3
    (episode,) = json.loads((tmp_path / "credit.json").read_text())["episodes"]
    assert episode["turns"][1]["observed_importance"] == 0.2
    assert episode["turns"][1]["share"] is None


@pytest.mark.slow
def test_a_policy_plays_episodes_for_the_lab(tmp_path, capsys):
    tree = yaml.safe_load((ROOT / "configs" / "guess.yaml").read_text())
    tree["rollout"] |= {"max_new": 16, "completion_bucket": 16}
    tree["credit"] = {"method": "turn_rewards", "answer": {"style": "regex", "pattern": "[^ ]"}}
    tree |= {"run_dir": str(tmp_path), "sft": None, "eval": {"batch": 4, "samples": 4}}
    tree |= {"lab": {"problems": 3, "batch": 3}}
    tree["data"]["eval"]["limit"] = 4
    tree |= {"device": "cpu", "report": {"html": False}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    run(tmp_path / "c.yaml", [], True, None)
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "credit.json").read_text())
    assert len(found["episodes"]) == 3
    turns = [turn for episode in found["episodes"] for turn in episode["turns"]]
    assert any(turn["importance"] > 0 for turn in turns)
    assert all(set(turn["weights"]) == {METHODS["turn_rewards"].label} for turn in turns)
