"""Saved completions: text, ids, and what is wrong with a line."""

import json

import pytest

from oarjax.host.problems import DataError
from oarjax.host.report import CompletionRow, CompletionsWriter
from oarjax.host.saved_rollouts import SavedRollout, read_rollouts


def saved(tmp_path, *lines):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_text_and_ids(tmp_path):
    path = saved(
        tmp_path,
        {"prompt": "1+1=", "completion": "#### 2", "reference": 2},
        "",
        {"prompt_ids": [1, 2], "prompt": "unused", "completion_ids": [3], "extra": None},
    )
    assert read_rollouts(path) == [SavedRollout("1+1=", "#### 2", "2"), SavedRollout([1, 2], [3], None)]


def test_completions_of_a_run_are_read(tmp_path):
    with CompletionsWriter(tmp_path / "completions.jsonl") as writer:
        writer.write(3, [CompletionRow("1+1=", "#### 3", 0.0, "3", "graded", reference="2")])
    assert read_rollouts(tmp_path / "completions.jsonl") == [SavedRollout("1+1=", "#### 3", "2")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"line 2: not JSON"),
        ("[1]", r"line 2: expected an object, got list"),
        ({"prompt": "x"}, r'line 2: no completion; each line needs "prompt"'),
        ({"prompt": "", "completion": "y"}, r"line 2: no prompt"),
        ({"prompt_ids": ["a"], "completion": "y"}, r"line 2: prompt_ids: expected a list of token ids, got \['a'\]"),
        ({"prompt": "x", "completion_ids": []}, r"line 2: completion_ids: expected a list of token ids, got \[\]"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, says):
    with pytest.raises(DataError, match=says):
        read_rollouts(saved(tmp_path, {"prompt": "x", "completion": "y"}, line))


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(DataError, match=r"--rollouts: no file .*none\.jsonl; give a JSONL file"):
        read_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no rollouts"):
        read_rollouts(saved(tmp_path, ""))
