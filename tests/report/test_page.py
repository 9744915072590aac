"""The report page and the curves: self-contained, escaped, and showing the numbers they were given."""

import math
import sys

import pytest
import yaml
from conftest import ROOT
from hostile_page import EVIL, Reader, completion, runs

from oarjax.cli import main
from oarjax.config.loading import load_config
from oarjax.report.colours import styles
from oarjax.report.curves import curves, drawn_panels, moving_mean, points
from oarjax.report.groups import ShownCompletion, ShownGroup
from oarjax.report.page import group_cards, nice_ticks, pick_completions, token_colour, token_pieces, write_page
from oarjax.report.summary import SummaryRow


def summary() -> list[SummaryRow]:
    rest = {"problems": 500, "ungraded": 0, "seconds": 70.0}
    nothing = {"change": None, "change_low": None, "change_high": None, "mean_length": None}
    return [
        SummaryRow(name="SFT policy", pass_at_1=0.7, low=0.66, high=0.74, **nothing, **rest),
        SummaryRow("OAR-G", 0.9, 0.87, 0.93, 20.0, 16.5, 23.5, mean_length=60.0, **rest),
    ]


def group(iteration: int, rewards: list[float], **changes) -> ShownGroup:
    fields = {"answer": None, "rewards": {"exact": 0.0, "brief": 0.25}, "advantage": 0.0, "verdict": "graded"}
    fields |= {"tokens": 9, "ended": False}
    own = {name: changes.pop(name) for name in ("prompt", "reference") if name in changes}
    rows = [ShownCompletion(reward=r, **({"completion": f"row {i}"} | fields | changes)) for i, r in enumerate(rewards)]
    return ShownGroup(iteration, own.get("prompt", "1+1?"), own.get("reference", "2"), rows)


def page(tmp_path, **changes) -> tuple[str, Reader]:
    fields = {
        "title": "demo",
        "summary": summary(),
        "method": "OAR-G",
        "records": runs()["OAR-G"],
        "completions": [(1, completion())],
        "config": {"seed": 0, "credit": {"method": "oar_g"}},
        "facts": {"device": "cpu"},
    }
    write_page(tmp_path / "new" / "report.html", **(fields | changes))
    html = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    return html, Reader(html)


def test_page_loads_nothing_and_runs_nothing(tmp_path):
    html, read = page(tmp_path)
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    assert not [a for a in read.attributes if a[1] in ("src", "href", "srcset") or a[1].startswith("on")]
    assert "://" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes
    assert ("meta", "name", "viewport") in read.attributes
    assert "prefers-color-scheme: dark" in html


def test_page_shows_the_numbers_it_was_given(tmp_path):
    _, read = page(tmp_path)
    for text in ("70.0% ±4.0", "90.0% ±3.0", "+20.0 ±3.5", "+20.0 points", "95% interval +16.5 to +23.5", "+0.75"):
        assert text in read.text
    assert "pass@1 on 500 held-out problems" in read.text
    assert "credit:\n  method: oar_g" in read.text
    assert "OAR-G, iteration 3: 0.530" in read.text  # a hover text of the reward's chart
    assert "OAR-G, iteration 4: 90.0%" in read.text
    assert "entropy, nats" not in read.text  # nothing was logged for it


def test_every_compared_method_has_its_cards_and_the_usual_verdict_is_left_out(tmp_path):
    grpo = SummaryRow("GRPO", 0.95, 0.9, 1.0, 25.0, 20.0, 30.0, 500, 0, None, 60.0)
    html, read = page(tmp_path, summary=[*summary(), grpo], completions=[(1, completion(verdict="graded"))])
    cards = read.text[: read.text.index("pass@1 on 500")]
    assert [cards.count(text) for text in ("OAR-G", "GRPO", "+20.0 points", "+25.0 points")] == [2, 2, 1, 1]
    assert "graded" not in read.text.replace("ungraded", "")
    assert "timeout" in page(tmp_path, completions=[(1, completion(verdict="timeout"))])[1].text
    assert 'data-label="change">+25.0' in html  # a narrow screen shows rows as lists
    assert html.count(">iteration</text>") == html.count("<svg ")
    assert "Seconds: of all iterations" in read.text


def test_groups_come_by_iteration_with_the_lowest_rewards_first(tmp_path):
    html, read = page(tmp_path, groups=[group(1, [1.0, 0.0]), group(9, [1.0, 1.0]), group(9, [1.0, 0.0, math.nan])])
    switches = [value for tag, name, value in read.attributes if tag == "input" and name == "id"]
    assert switches == ["i1", "i9"]
    assert html.count(" checked>") == 1
    assert html.index('id="i9" checked') > 0  # opens on the last
    last = read.text[read.text.rindex("mean reward 0.500 of 3 completions") :]
    assert last.index("row 2") < last.index("row 1") < last.index("row 0")  # ungraded, wrong, right
    assert last.index("mean reward 1.000 of 2 completions") > last.index("row 0")
    for text in ("brief 0.250", "cut at 9 tokens", "answer none found"):
        assert text in " ".join(last.split())


def test_groups_of_many_iterations_are_thinned_out_evenly():
    shown = [number for number, _ in group_cards([group(n, [1.0]) for n in range(1, 24)])]
    assert shown == list(range(1, 24, 2))


def test_several_rewards_have_a_curve_each_and_seconds_leave_the_first_iteration_out(tmp_path):
    records = [{"iteration": n, "reward": 1.0, "reward/a": 0.5, "reward/b": 0.5} for n in (1, 2)]
    for record, seconds in zip(records, (90.0, 2.0)):
        record["seconds/training"] = seconds
    _, read = page(tmp_path, records=records)
    assert "mean of reward a" in read.text
    assert "mean of reward b" in read.text
    assert "iteration 2: 2.000" in read.text
    assert "iteration 1: 90.0" not in read.text
    assert "mean of reward exact" not in page(tmp_path, records=[{"iteration": 1, "reward/exact": 1.0}])[1].text


def test_a_method_has_the_same_colour_among_any_others():
    alone, among = styles(["OAR-G"]), styles(["GRPO", "OAR-P", "OAR-G permuted", "mine", "OAR-G", "OAR-G noisy"])
    assert alone == [among[4]] == [(1, 0)]
    assert among[5] == (1, 1)  # shares the colour, but not the dashes
    assert len({colour for colour, _ in among[:5]}) == 5
    assert styles(["a", "b"]) == [(0, 0), (1, 0)]


def test_a_run_in_progress_shows_its_evaluations(tmp_path):
    records = [{"iteration": 0, "pass_at_1": 0.25}, {"iteration": 5, "pass_at_1": 0.5}, {"iteration": 6, "reward": 1.0}]
    _, read = page(tmp_path, summary=[], records=records)
    assert "25.0%held-out pass@1 before" in read.text.replace("\n", "")
    assert "50.0%held-out pass@1, iteration 5" in read.text.replace("\n", "")


@pytest.mark.parametrize(
    "where", ["prompt", "completion", "answer", "verdict", "reference", "tokens", "title", "groups", "rest"]
)
def test_untrusted_text_stays_text_everywhere(tmp_path, where):
    changes = {}
    if where == "title":
        changes["title"] = EVIL
    elif where == "rest":
        changes |= {"facts": {EVIL: EVIL}, "config": {EVIL: EVIL}, "method": EVIL}
        changes["summary"] = [*summary(), SummaryRow(EVIL, *[0.5] * 6, 2, 0, None, None)]
    elif where == "groups":
        changes["groups"] = [group(1, [0.0], prompt=EVIL, reference=EVIL, completion=EVIL, answer=EVIL, verdict=EVIL)]
    elif where == "tokens":
        changes["completions"] = [(1, completion(tokens=[EVIL] * 4))]
    else:
        tokens = {"tokens": ()} if where == "completion" else {}
        changes["completions"] = [(1, completion(**{where: EVIL}, **tokens))]
    _, read = page(tmp_path, **changes)
    assert not {"script", "img"} & set(read.tags)
    assert not [a for a in read.attributes if a[1].startswith("on")]
    assert '<script>alert(1)</script>"onload="x\' </pre>' in read.text
    if where != "answer" and where != "reference":  # those are cut at 80 characters
        assert "{{ 7 * 7 }}<U+202E><U+001B>[2J" in read.text
    assert not {"\u202e", "\x1b"} & set(read.text)


def test_lone_surrogates_do_not_break_the_file(tmp_path):
    _, read = page(tmp_path, completions=[(1, completion(prompt="a\ud83db"))])
    assert "a<U+D83D>b" in read.text


def test_a_path_that_can_hold_no_page_is_the_users_error(tmp_path, monkeypatch, capfd):
    run, folder, text = tmp_path / "run", tmp_path / "folder", tmp_path / "text"
    run.mkdir()
    folder.mkdir()
    text.write_text("")
    cfg = load_config(ROOT / "configs" / "demo.yaml")
    (run / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    broken = tmp_path / "broken.html"
    broken.symlink_to(tmp_path / "none" / "report.html")
    for out, cause in [
        (folder, "Is a directory"),
        (text / "report.html", "File exists"),
        (text / "x" / "report.html", "Not a directory"),
        (broken, "No such file or directory"),
    ]:
        monkeypatch.setattr(sys, "argv", ["oarjax", "report", str(run), "--out", str(out)])
        with pytest.raises(SystemExit, match=r"^2$"):
            main()
        message = " ".join(capfd.readouterr().err.split())
        expected = f"report: cannot write {out}: {cause}; expected a path for a file, pass another one with --out"
        assert "".join(expected.split()) in "".join(message.split())
        assert "Traceback" not in message
    assert text.read_text() == ""


def test_page_of_a_run_without_anything(tmp_path):
    _, read = page(tmp_path, summary=[], records=[], completions=[], config={}, facts={})
    assert {"svg", "table", "article", "details"}.isdisjoint(read.tags)


def test_tokens_carry_colour_kind_and_weight():
    pieces = token_pieces(completion())
    assert [p.kind for p in pieces] == ["reasoning", "reasoning", "plain", "answer"]
    assert [p.text for p in pieces] == ["1+1", "=2↵\n", "#### ", "2"]
    assert [p.title for p in pieces] == [
        "weight 0.100",
        "weight 1.900",
        "weight 1.000, outside the reasoning",
        "weight 1.000, answer",
    ]
    assert [bool(p.style) for p in pieces] == [True, True, False, False]


def test_tokens_and_weights_must_have_one_length():
    with pytest.raises(ValueError, match=r"one entry per token in each field, got .*'weights': 1"):
        token_pieces(completion(weights=[1.0]))


def test_token_colour_diverges_from_one_and_stops_at_three():
    assert token_colour(1.0) == token_colour(math.nan) == ""
    assert token_colour(0.0) == "background: rgb(var(--suppress) / 0.62)"
    assert token_colour(2.0) == "background: rgb(var(--boost) / 0.31)"
    assert token_colour(3.0) == token_colour(7.5) == "background: rgb(var(--boost) / 0.62)"


def test_picked_completions_are_early_and_late_with_uneven_weights():
    even = completion(weights=[1.0] * 4)
    many = [(n, completion() if n % 2 else even) for n in range(1, 21)]
    assert [n for n, _ in pick_completions(many, count=4)] == [1, 3, 17, 19]
    assert [n for n, _ in pick_completions([(n, even) for n in range(9)], count=4)] == [0, 1, 7, 8]
    assert [n for n, _ in pick_completions(many[:3], count=4)] == [1, 2, 3]
    assert pick_completions(many, count=0) == []


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.62, 0.91, [0.6, 0.7, 0.8, 0.9, 1.0]),
        (-3.0, 3.0, [-4.0, -2.0, 0.0, 2.0, 4.0]),
        (5.0, 5.0, [4.0, 6.0]),
        (0.0, 0.0, [0.0, 0.25]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, ticks):
    assert nice_ticks(low, high, count=4) == pytest.approx(ticks)


def test_iteration_ticks_are_whole():
    assert nice_ticks(0.0, 3.0, count=5, whole=True) == [0, 1, 2, 3]


def test_points_leave_gaps_out_and_panels_need_points():
    records = [{"iteration": 1, "reward": None}, {"iteration": 2}, {"iteration": 3, "reward": 0.5}]
    assert points(records, "reward") == [(3.0, 0.5)]
    assert [p.metric for p in drawn_panels({"a": records, "b": []})] == ["reward"]


def test_moving_mean_keeps_short_series_and_narrows_at_the_ends():
    short = [1.0, 5.0, 2.0]
    assert moving_mean(short) == short
    line = [float(n) for n in range(30)]  # half a window of 1
    assert moving_mean(line)[:2] == [0.5, 1.0]
    assert moving_mean(line)[-1] == 28.5


def test_curves_write_every_panel_and_all_of_them_together(tmp_path):
    files = curves(runs(), tmp_path / "curves")
    assert [f.name for f in files] == ["curves.png", "curve_reward.png", "curve_pass_at_1.png"]
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000  # something was drawn


def test_curves_of_nothing_are_one_empty_picture(tmp_path):
    assert [f.name for f in curves({"a": []}, tmp_path)] == ["curves.png"]


def test_missing_matplotlib_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "oarjax\[log\]"'):
        curves(runs(), tmp_path)
