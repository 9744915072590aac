"""credit.html: switchable without scripts, and safe whatever the text."""

import math

import pytest
from hostile_page import EVIL, Reader
from lab_result import completion, result

from oarjax.tools.lab.page import level_class, token_title, write_lab_page
from oarjax.tools.lab.results import MethodResult


def page(tmp_path, **changes):
    write_lab_page(tmp_path / "new" / "credit.html", result(**changes))
    html = (tmp_path / "new" / "credit.html").read_text(encoding="utf-8")
    return html, Reader(html)


def test_page_loads_nothing_and_runs_nothing(tmp_path):
    html, read = page(tmp_path)
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    assert not [a for a in read.attributes if a[1] in ("src", "href", "srcset") or a[1].startswith("on")]
    assert "://" not in html
    assert "url(" not in html
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes


def test_every_method_has_a_switch_and_its_own_colours(tmp_path):
    html, read = page(tmp_path)
    switches = [value for tag, name, value in read.attributes if tag == "input" and name == "id"]
    assert switches == ["a0", "a1", "a2", "bn", "b0", "b1", "b2"]  # a method, and another one beside it
    assert html.count(" checked>") == 2
    assert html.index("<fieldset>") > html.index("<main>")  # a focused switch is beside what it changes: no jump
    classes = [value for tag, name, value in read.attributes if tag == "span" and name == "class"]
    assert "m0s7 m1p8 total" in classes  # the first token: weights 0.1 and 3
    assert "m0p4 direct total" in classes  # the second: 1.9 and 1
    for rule in ("main:has(#a0:checked) .first .m0s7,", "main:has(#b1:checked) .second .m1p8 {"):
        assert rule in html


def test_hovering_shows_every_methods_numbers(tmp_path):
    _, read = page(tmp_path)
    titles = [value for tag, name, value in read.attributes if tag == "span" and name == "data-tip"]
    assert len(titles) == 4
    assert read.attributes.count(("span", "tabindex", "0")) == 4  # by keyboard and touch, too
    assert titles[1].splitlines() == [
        "direct: changing it changes the answer; total: changing it changes the reward; holds a step's result",
        "OAR-P: weight 1.900, score 2.500",
        "OAR-G, 16 draws: weight 1.000, score 0.250",
        "uniform (GRPO): weight 1.000, score 0.000",
    ]
    assert titles[3].startswith("answer\n")


def test_tables_are_there(tmp_path):
    _, read = page(tmp_path)
    for text in ("-0.25 ±.10", "best possible", "12.3 ±100", "direct 8.6%", "percentile bootstrap over 100 problems"):
        assert text in read.text
    assert read.tags.count("table") == 3


@pytest.mark.parametrize("where", ["prompt", "answer", "reference", "tokens", "title", "rest"])
def test_untrusted_text_stays_text(tmp_path, where):
    changes = {}
    if where == "title":
        changes["title"] = EVIL
    elif where == "tokens":
        changes["completions"] = [completion(tokens=[EVIL] * 4)]
    elif where == "rest":
        changes |= {"facts": {EVIL: EVIL}, "methods": [MethodResult(EVIL, {}, {})]}
        changes["completions"] = [completion(scores={EVIL: [0.0] * 4}, weights={EVIL: [1.0] * 4})]
    else:
        changes["completions"] = [completion(**{where: EVIL})]
    _, read = page(tmp_path, **changes)
    assert not {"script", "img"} & set(read.tags)
    assert not [a for a in read.attributes if a[1].startswith("on")]
    assert '<script>alert(1)</script>"onload="x\' </pre>' in read.text
    if where not in ("answer", "reference"):  # those are cut at 80 characters
        assert "{{ 7 * 7 }}<U+202E><U+001B>[2J" in read.text
    everything = read.text + "".join(str(a) for a in read.attributes)
    assert not {"\u202e", "\x1b"} & set(everything)


def test_lone_surrogates_do_not_break_the_file(tmp_path):
    _, read = page(tmp_path, completions=[completion(prompt="a\ud83db")])
    assert "a<U+D83D>b" in read.text


def test_page_without_completions(tmp_path):
    _, read = page(tmp_path, completions=[])
    assert "article" not in read.tags


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(1.0, ""), (1.05, ""), (2.0, "m3p4"), (3.0, "m3p8"), (9.0, "m3p8"), (0.5, "m3s4"), (0.0, "m3s8"), (math.nan, "")],
)
def test_colours_diverge_from_one(weight, expected):
    assert level_class(weight, method=3) == expected


def test_every_field_has_one_entry_per_token(tmp_path):
    with pytest.raises(ValueError, match=r"expected one entry per token in each field, 4, got \{'direct': 1"):
        page(tmp_path, completions=[completion(direct=[True])])


def test_title_of_a_completion_where_nothing_is_known():
    title = token_title(completion(known=[], direct=[False] * 4, total=[False] * 4), 0, ["OAR-P"])
    assert title == "OAR-P: weight 0.100, score 0.125"
