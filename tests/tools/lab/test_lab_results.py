"""Tables and JSON of the credit lab."""

import dataclasses
import io
import json
import math

import pytest
from lab_result import completion, figures, result
from rich.console import Console

from oarjax.stats import Interval
from oarjax.tools.lab.plot import plot_lab
from oarjax.tools.lab.results import (
    AGREEMENT,
    COSTS,
    MethodResult,
    cell,
    lab_json,
    print_lab,
    read_lab,
    table_cells,
    write_lab,
)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Interval(0.5678, 0.52, 0.60, 9), "0.57 ±.04"),
        (Interval(-0.5, -0.6, -0.4, 9), "-0.50 ±.10"),
        (Interval(25.44, 25.0, 26.0, 9), "25.4 ±.5"),
        (Interval(1234.0, 1200.0, 1300.0, 9), "1,234 ±50"),
        (Interval(0.5, math.nan, math.nan, 1), "0.50"),
        (Interval(math.nan, math.nan, math.nan, 0), "n/a"),
        (None, ""),
    ],
)
def test_cells(found, text):
    assert cell(found) == text


def printed(found):
    stream = io.StringIO()
    print_lab(Console(file=stream, width=80), found)
    return stream.getvalue()


def test_tables_fit_80_columns_and_say_what_they_show():
    out = printed(result())
    assert max(map(len, out.splitlines())) <= 80
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert "-0.25 ±.10" in out
    assert "0.97 ±.01" in lines["best possible"]
    assert "12.3" in out, "seconds are shown as milliseconds"
    assert "what the top 10% of the reasoning holds" in out
    assert "direct 8.61 ±.61%" in out
    assert "two draws" in out
    assert "Completions: 6 with an answer, out of 12." in printed(
        result(facts={"completions": "6 with an answer, out of 12"})
    )
    assert all(line.startswith("OAR-G, 16 draws ") for line in out.splitlines() if "OAR-G" in line)


def test_columns_that_nobody_has_are_left_out():
    without = {k: v for k, v in figures().items() if not k.endswith("_known") and k != "repeat"}
    out = printed(result(methods=[MethodResult("OAR-P", {}, without)]))
    assert "computed" not in out
    assert "two draws" not in out


def test_untrusted_names_stay_text():
    out = printed(result(methods=[MethodResult("[bold]x\x1b[2J\u202e", {}, figures())]))
    assert "[bold]x<U+001B>[2J<U+202E>" in out.replace("\n", "") or "[bold]x<U+001B>" in out
    assert "\x1b" not in out


def test_cells_of_a_method_without_a_figure_are_blank():
    rows = table_cells(result(methods=[MethodResult("a", {}, {})]), COSTS)
    assert rows == [["a", *[""] * len(COSTS)]]
    assert table_cells(result(), AGREEMENT)[-1] == ["best possible", "", "", "0.97 ±.01", "", ""]


def test_json_round_trip(tmp_path):
    evil = "</script>\u2028\ud83d\x1b{{ 7 * 7 }}"
    found = result(completions=[completion(prompt=evil, tokens=[evil] * 4, reward=math.nan, answer=None)])
    write_lab(tmp_path / "new" / "credit.json", found)
    text = (tmp_path / "new" / "credit.json").read_text()
    assert text.isascii()
    assert "NaN" not in text
    assert json.loads(text)["completions"][0]["reward"] is None
    again = read_lab(tmp_path / "new" / "credit.json")
    assert again.completions[0].prompt == evil
    assert repr(again) == repr(found)  # NaN is not equal to itself
    assert lab_json(again) == lab_json(found)
    assert dataclasses.replace(again, completions=[]) != dataclasses.replace(found, title="x", completions=[])


@pytest.mark.parametrize("found", [result(), result(methods=[]), result(methods=[MethodResult("x", {}, {})], best={})])
def test_plot_draws_what_there_is(tmp_path, found):
    plot_lab(tmp_path / "new" / "credit.png", found)
    content = (tmp_path / "new" / "credit.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000
