"""Rows that a script has in Python are read as those of a file."""

import json

import pytest

from oarjax.config.inputs import DatasetConfig
from oarjax.data.problems import load_problems
from oarjax.data.rows import DataError, local_rows

ROWS = [{"question": "1+1=", "answer": 2, "level": "easy"}, {"question": "2+2=", "answer": 4, "level": "easy"}]


class Dataset:
    """Rows as ``datasets.Dataset`` gives them: a new iterator each time."""

    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


def source(name: str) -> DatasetConfig:
    return DatasetConfig(source=name)


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), Dataset(ROWS)])
def test_they_are_the_problems_of_a_file(rows, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(ROWS))
    with local_rows("data", rows) as name:
        problems = load_problems(source(name))
        assert problems == load_problems(source(name))  # as often as a run asks
    assert problems == load_problems(source(str(file)))
    assert [p.columns for p in problems] == ROWS


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": ROWS, "test": ROWS}, r"expected rows, got a dict of 'train', 'test'; pass one of its values"),
        (iter(ROWS), r"expected a list of dicts or a datasets.Dataset, got a list_iterator; pass list\(rows\)"),
        ("rows.csv", "got a str"),
        (7, "got a int"),
    ],
)
def test_what_are_no_rows_is_refused_at_once(rows, message):
    with pytest.raises(DataError, match=message), local_rows("data", rows):
        pass


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "data.train.source: python:data holds no rows"),
        ([*ROWS, "3+3="], "python:data row 2: expected a mapping of columns to values, got a str; of a DataFrame"),
        ([{"problem": "1+1=", "answer": "2"}], "row 0: no field 'question', only 'problem', 'answer'; set data.train"),
        (
            [{"ask": "1+1=", "is": "2"}],
            "row 0: no fields 'question' and 'answer', only 'ask', 'is'; set data.train.prom",
        ),
        ([{"question": [1], "answer": "2"}], r"message 0 is 1; expected a role"),
        ([{"question": "?", "answer": "2", "image": object()}], "row 0: field 'image' holds a picture"),
    ],
)
def test_they_pass_the_checks_of_a_file(rows, message):
    with local_rows("data", rows) as name, pytest.raises(DataError, match=message):
        load_problems(source(name))


def test_a_later_command_says_where_they_were():
    with local_rows("eval_data", ROWS) as name:
        pass
    with pytest.raises(
        DataError, match=r"data.eval.source: python:eval_data are the rows that oarjax.train\(cfg, eval_"
    ):
        load_problems(source(name), where="data.eval")
