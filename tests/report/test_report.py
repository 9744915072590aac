"""Metrics and completions files, printable text, progress, timing, warnings, and the table with its intervals."""

import contextlib
import io
import json
import math
import os
import re
import signal
import time

import numpy as np
import pytest
from conftest import ROOT
from rich.console import Console

from oarjax.config.loading import load_config
from oarjax.config.section import flatten
from oarjax.report.console import OnceWarnings, PhaseTimer, Progress, banner, run_lines
from oarjax.report.files import (
    CompletionRow,
    CompletionsWriter,
    MetricsWriter,
    ShownTurn,
    make_console,
    read_completions,
    read_metrics,
    short,
    show_completions,
    token_texts,
    visible,
)
from oarjax.report.page import token_pieces
from oarjax.report.summary import (
    print_summary,
    read_summary,
    summarise,
    summary_cells,
    write_summary,
)
from oarjax.storage.durable import DamagedError, StorageError
from oarjax.storage.stop import Stop, Stopped


def console(**options) -> Console:
    return Console(file=io.StringIO(), **options)


def printed(c: Console) -> str:
    assert isinstance(c.file, io.StringIO)
    return c.file.getvalue()


def row(**changes) -> CompletionRow:
    fields = {"prompt": "1+1?", "completion": "2", "reward": 1.0, "answer": "2", "verdict": "graded"}
    return CompletionRow(**(fields | changes))


# Metrics


def test_metrics_lines_are_strict_json_and_flushed(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(1, {"reward": 0.5, "loss": math.nan, "gap": -math.inf, "n": 3})
        (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # before close
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record.pop("time") > 1e9
    assert record == {"iteration": 1, "reward": 0.5, "loss": None, "gap": None, "n": 3.0}


def test_metrics_take_numpy_scalars(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": np.float32(0.25)})
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["reward"] == 0.25


def test_half_written_line_is_left_out_and_dropped_on_reopening(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "reward": 0.5}\n{"iteration": 2, "rew')
    assert [r["iteration"] for r in read_metrics(path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {"reward": 0.75})
    assert [(r["iteration"], r["reward"]) for r in read_metrics(path)] == [(1, 0.5), (2, 0.75)]


def test_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iter\n{"iteration": 3}\n')
    with pytest.raises(StorageError, match=r"metrics.jsonl, line 2: not JSON .* or remove the line to resume"):
        read_metrics(path)


def test_lines_of_one_iteration_merge_and_a_resumed_run_replaces_what_it_repeats(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.1})
        writer.write(2, {"reward": 0.2})
        writer.write(2, {"pass_at_1": 0.7})
        writer.write(3, {"reward": 0.3})
    with MetricsWriter(tmp_path) as writer:  # resumed from the checkpoint of iteration 1
        writer.write(2, {"reward": 0.9})
    assert [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        {"iteration": 1, "reward": 0.1},
        {"iteration": 2, "reward": 0.9, "pass_at_1": 0.7},
    ]


def test_no_file_has_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_reserved_names_are_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="metric name 'time' is reserved"):
        writer.write(1, {"time": 2.0})


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MetricsWriter(None) as writer:
        writer.write(1, {"loss": 2.0})
        assert writer.sync() is None
    assert not list(tmp_path.iterdir())


# Completions and untrusted text


def test_completions_round_trip(tmp_path):
    rows = [
        row(completion="a\u2028b\ud800", reward=math.nan, rewards={"math": math.nan, "format": 0.5}, answer=None),
        row(
            tokens=["1", "2"],
            weights=[0.5, 1.5],
            is_reasoning=[True, False],
            is_answer=[False, True],
            advantage=-1.0,
            turns=(ShownTurn(1, "", 0.0), ShownTurn(1, "\nhigher\n", 1.0)),
        ),
    ]
    with CompletionsWriter(tmp_path / "completions.jsonl") as writer:
        writer.write(3, rows)
    lines = (tmp_path / "completions.jsonl").read_bytes().splitlines()
    assert len(lines) == 2
    assert b"NaN" not in lines[0]
    (n, first), (_, second) = read_completions(tmp_path / "completions.jsonl")
    assert (n, first.completion, first.answer) == (3, "a\u2028b\ud800", None)
    assert math.isnan(first.reward)
    assert math.isnan(first.rewards["math"])
    assert second == rows[1]
    (tmp_path / "completions.jsonl").write_bytes(lines[1].replace(b'"tokens": 1', b'"tokens": 2'))
    with pytest.raises(DamagedError, match="its turns have other tokens"):
        read_completions(tmp_path / "completions.jsonl")
    pieces = token_pieces(rows[1])
    assert "".join(piece.text for piece in pieces) == (
        "turn 1, reward 0.000, weight 0.500: 1\n\nhigher\nturn 2, reward 1.000, weight 1.500: 2"
    )
    assert [piece.kind for piece in pieces] == ["turn", "reasoning", "plain", "turn", "answer"]


def test_a_resumed_run_leaves_each_completion_once(tmp_path):
    path = tmp_path / "completions.jsonl"
    with CompletionsWriter(path) as writer:
        for iteration in (1, 2, 3):
            writer.write(iteration, [row(completion=f"first {iteration}")])
            if iteration == 2:
                position = writer.sync()
    with path.open("a") as file:
        file.write('{"iteration": 4, "comp')  # cut by a kill
    with CompletionsWriter(path, position=position) as writer:
        writer.write(3, [row(completion="again 3")])
    found = [(n, r.completion) for n, r in read_completions(path)]
    assert found == [(1, "first 1"), (2, "first 2"), (3, "again 3")]


def test_visible_spells_out_what_a_terminal_would_act_on_or_hide():
    assert visible("a\tb\nc é 数") == "a\tb\nc é 数"
    assert visible("\x1b[31m\r\x00\x9b") == "<U+001B>[31m<U+000D><U+0000><U+009B>"
    assert visible("\u202e\u2066\u200b\u2028\ufeff") == "<U+202E><U+2066><U+200B><U+2028><U+FEFF>"
    assert visible("\ud800") == "<U+D800>"


def test_token_texts_give_a_split_character_to_its_last_token():
    assert token_texts([b"a", b"\xe6\x95", b"\xb0b", b"\xffc"]) == ["a", "", "数b", "\ufffdc"]
    assert token_texts([b"x\xe6", b"\x95"]) == ["x", "\ufffd"]  # cut in the middle of a character
    assert token_texts([]) == []


def test_shown_completions_are_not_markup_and_cannot_drive_the_terminal():
    c = console(width=2000, force_terminal=True, color_system=None)
    show_completions(c, 4, [row(completion="[red]x[/red] [/nope] \x1b[2J" + "y" * 700, answer="[b]\r")])
    out = printed(c)
    assert "[red]x[/red] [/nope] <U+001B>[2J" in out
    assert "answer [b]<U+000D>" in out
    assert "\x1b[2J" not in out
    assert "... (132 more characters)" in out  # 700 + 32 before them - 600


def test_console_survives_an_encoding_without_the_character():
    raw = io.BytesIO()
    c = make_console(io.TextIOWrapper(raw, encoding="ascii"))
    c.print("±5 数", markup=False)
    c.file.flush()
    assert raw.getvalue() == b"\\xb15 \\u6570\n"


# Progress, phases, warnings, banner


def test_progress_is_one_plain_line_per_update_where_there_is_no_terminal():
    c = console(width=20)
    with Progress(3, label="oar_g", console=c) as progress:
        progress.update(1, {"reward": 0.5, "length": 41.26, "entropy": math.nan}, {"sample": 1.24, "total": 2.0})
        progress.update(3, {"reward": 1.0, "ess": 0.8, "grad_norm": 3.0, "zero_variance": 0.25}, {"grade": 0.01})
    assert printed(c).splitlines() == [
        "oar_g 1/3  reward 0.500  length 41.3  entropy n/a  sample 1.2s  total 2.0s",
        "oar_g 3/3  reward 1.000  equal groups 25%  grad norm 3.000  ESS 0.800",
    ]


def test_progress_shows_compiling_the_baseline_and_the_latest_evaluation():
    c = console()
    with Progress(3, label="oar_g", console=c, compiles=True, baseline=0.456) as progress:
        progress.update(1, {"reward": 0.5})
        progress.update(2, {"reward": 0.5, "pass_at_1": 0.736, "truncated": 0.1})
        progress.update(3, {"reward": 0.5})
    assert printed(c).splitlines() == [
        "oar_g compiling: the first one takes longer",
        "oar_g 1/3  reward 0.500  pass@1 45.6%",
        "oar_g 2/3  reward 0.500  pass@1 45.6% to 73.6%  truncated 10%",
        "oar_g 3/3  reward 0.500  pass@1 45.6% to 73.6%",
    ]


def test_a_resumed_run_shows_its_last_evaluation():
    c = console()
    with Progress(3, label="oar_g", console=c, baseline=0.456, latest=0.736) as progress:
        progress.update(3, {"reward": 0.5})
    assert printed(c).splitlines() == ["oar_g 3/3  reward 0.500  pass@1 45.6% to 73.6%"]


def test_a_log_says_that_the_first_step_is_not_done(monkeypatch):
    monkeypatch.setattr("oarjax.report.console.MINUTE", 0.01)
    out = io.StringIO()
    with Progress(2, label="oar_g", console=Console(file=out, width=100), compiles=True) as progress:
        while "still in its first step, 2 min" not in out.getvalue():
            time.sleep(0.01)
        progress.update(1, {"reward": 0.5})
        time.sleep(0.05)
        said = out.getvalue()
        time.sleep(0.05)
    assert out.getvalue() == said


def test_progress_every_keeps_first_and_last_line():
    c = console()
    with Progress(7, label="sft", console=c, every=4) as progress:
        for n in range(1, 8):
            progress.update(n, {"loss": 1.5, "entropy": 2})
    assert printed(c).splitlines() == [f"sft {n}/7  loss 1.500  entropy 2.000" for n in (1, 5, 7)]


@pytest.mark.parametrize("width", [120, 9, 1])
def test_live_progress_survives_any_width(width):
    c = console(force_terminal=True, width=width)
    with Progress(2, console=c, compiles=True) as progress:
        progress.update(1, {"reward": 0.5, "length": 40.0}, {"sample": 1.0, "update": 2.0, "total": 3.0})
        progress.console.print("between")
    assert "\x1b[?25h" in printed(c)  # the cursor is back
    if width == 120:
        assert "reward 0.500   length 40.0" in printed(c)
        assert "sample 1.0s   update 2.0s   total 3.0s" in printed(c)


def test_a_signal_stays_below_the_live_bar(capfd):
    c = console(force_terminal=True, width=120)
    with Stop() as stop, contextlib.suppress(Stopped), stop.held(), Progress(2, console=c, stop=stop) as progress:
        os.kill(os.getpid(), signal.SIGTERM)
        progress.update(1, {"reward": 0.5})
    last = printed(c).rpartition("reward 0.500")[2]
    assert "SIGTERM: saves after this phase; signal again ends now and loses unsaved work" in last
    assert capfd.readouterr().err == ""  # written nowhere else, or the bar would be drawn over it


def test_phases_add_up_and_inner_time_is_not_counted_twice():
    now = iter([0.0, 1.0, 2.0, 5.0, 6.0, 10.0, 10.0]).__next__
    timer = PhaseTimer(now)  # 0
    with timer.phase("update"), timer.phase("grade"):  # 1 .. 6 and 2 .. 5
        pass
    assert timer.lap() == {"grade": 3.0, "update": 2.0, "other": 5.0, "total": 10.0}  # at 10
    assert timer.lap() == {"other": 0.0, "total": 0.0}  # at 10


def test_a_phase_that_raises_is_still_counted():
    timer = PhaseTimer(iter([0.0, 1.0, 3.0, 3.0]).__next__)
    with pytest.raises(RuntimeError), timer.phase("sample"):
        raise RuntimeError
    assert timer.lap() == {"sample": 2.0, "other": 1.0, "total": 3.0}


@pytest.mark.parametrize(
    ("metrics", "remedy"),
    [
        ({"truncated": 0.25}, "25% of completions were cut at rollout.max_new .* raise rollout.max_new"),
        ({"zero_variance": 1.0}, "every group had equal rewards"),
        ({"ungraded": 0.5}, "grading.deadline"),
        ({"ungraded": 1.0, "zero_variance": 1.0}, "could not be graded"),  # and of no group that its rewards are equal
        ({"no_answer": 0.9}, "credit.answer.style"),
        ({"sampler_gap": 0.2}, "differ by 0.2"),
    ],
)
def test_warnings_say_once_what_to_change(metrics, remedy):
    c = console(width=500)
    warnings = OnceWarnings(c)
    (text,) = warnings.check(2, metrics)
    assert text.startswith("iteration 2: ")
    assert re.search(remedy, text)
    assert warnings.check(3, metrics) == []
    assert printed(c).count("warning:") == 1


def test_entropy_collapse_is_measured_from_the_first_value():
    warnings = OnceWarnings(console())
    assert warnings.check(1, {"entropy": 0.5}) == []
    assert warnings.check(2, {"entropy": 0.06}) == []
    assert len(warnings.check(3, {"entropy": 0.04})) == 1


def test_healthy_metrics_warn_of_nothing():
    healthy = {"truncated": 0.2, "zero_variance": 0.9, "entropy": 0.4, "ungraded": 0.0, "grad_norm": 1.0}
    assert OnceWarnings(console()).check(1, healthy) == []


def test_top_k_and_top_p_warn_while_training():
    c = console(width=500)
    OnceWarnings(c).check_sampling(top_k=0, top_p=1.0)
    assert printed(c) == ""
    OnceWarnings(c).check_sampling(top_k=0, top_p=0.9)
    assert "set top_k=0, top_p=1 and min_p=0 for training" in printed(c)


def test_banner_lists_facts_as_text():
    c = console(width=100)
    banner(c, {"device": "cpu [x2]", "stop ids": (1, 2)})
    assert [" ".join(line.split()) for line in printed(c).splitlines()] == ["device: cpu [x2]", "stop ids: (1, 2)"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!s]*.yaml")), ids=lambda p: p.stem)
def test_a_run_is_described_in_twelve_lines(path):
    cfg, c = load_config(path), console(width=120)
    names = ("device", "mesh", "policy", "trains", "computes in", "train", "held out")
    banner(c, run_lines(cfg, dict.fromkeys(names, "as it is") | {"run folder": cfg.run_dir}))
    lines = printed(c).splitlines()
    assert len(lines) <= 12
    assert f"{cfg.rollout.prompts} prompts x {cfg.rollout.group_size} completions" in printed(c)
    assert f"{cfg.run_dir}/config.yaml" in lines[-1]


def test_flatten_keeps_leaves_under_dotted_paths():
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.000"), (0.1234, "0.123"), (12.34, "12.3"), (1234.5, "1,234"), (1e-5, "1.0e-05"), (math.inf, "n/a")],
)
def test_short_numbers(value, text):
    assert short(value) == text


# Summary


def test_change_is_in_points_and_paired_by_problem():
    # differences in points: 100, 0, 50, 50: mean 50, std (ddof 1) sqrt(5000 / 3), over sqrt(4), times z = 1.959964
    after, before = np.array([1.0, 1.0, 1.0, 0.5]), np.array([0.0, 1.0, 0.5, 0.0])
    half = 1.959964 * math.sqrt(5000 / 3) / 2
    row = summarise("after", after, baseline=before)
    assert (row.change, row.change_low, row.change_high) == pytest.approx((50.0, 50 - half, 50 + half))


def test_a_run_whose_answers_were_not_graded_still_has_a_summary(tmp_path):
    nothing, known = np.full(2, np.nan), np.array([1.0, 0.0])
    rows = [summarise("start", known), summarise("last", nothing, baseline=known)]
    cells = summary_cells(rows)[1][1]
    assert cells[:3] == ["last", "n/a", ""]
    write_summary(tmp_path / "summary.json", rows)
    assert json.loads((tmp_path / "summary.json").read_text())["rows"][1]["pass_at_1"] is None
    assert summary_cells(read_summary(tmp_path / "summary.json")) == summary_cells(rows)
    single = summarise("one problem", np.array([1.0]), baseline=np.array([0.0]))
    assert summary_cells([single])[1][0][2] == "+100.0"


def test_rewards_outside_0_to_1_have_students_interval():
    # -1, -1, 1, -0.5: mean -.375, deviation .9464 over sqrt(4), times t(.975, 3) = 3.1824
    row = summarise("after", np.array([-1.0, -1.0, 1.0, -0.5]))
    half = 3.18244630528371 * np.std([-1, -1, 1, -0.5], ddof=1) / 2
    assert (row.pass_at_1, row.low, row.high) == pytest.approx((-0.375, -0.375 - half, -0.375 + half))


def test_a_change_that_may_be_chance_is_said_to_be():
    before, after = np.tile([0.0, 1.0, 1.0], 4), np.tile([1.0, 1.0, 0.0], 4)
    for scores, said in ((after, True), (np.ones(12), False), (before, False)):  # alike everywhere: no interval
        c = console(width=80)
        print_summary(c, [summarise("start", before), summarise("last", scores, baseline=before)])
        assert ("last: the change may be chance" in printed(c)) == said


def test_summary_prints_within_80_columns_and_reads_back(tmp_path):
    before = np.tile([0.5, 0.0, 0.0], 40)
    after = np.tile([1.0, 1.0, np.nan], 40)
    rows = [
        summarise("SFT policy", before, mean_length=30.0),
        summarise("OAR-G [bold]", after, baseline=before, mean_length=61.25, seconds=70.4),
    ]
    assert (rows[1].pass_at_1, rows[1].ungraded, rows[1].problems) == (1.0, 40, 120)
    assert rows[1].change == pytest.approx(75.0)  # differences .5 and 1
    c = console(width=80)
    print_summary(c, rows)
    out = printed(c)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "pass@1 on 120 held-out problems" in out
    (line,) = [line for line in out.splitlines() if "OAR-G" in line]
    assert re.split(r"\s{2,}", line.strip()) == [
        "OAR-G [bold]",
        "100.0% ±2.3",
        "+75.0 ±5.5",
        "61.2",
        "70",
        "40",
    ]
    write_summary(tmp_path / "summary.json", rows)
    assert read_summary(tmp_path / "summary.json") == rows
    saved = json.loads((tmp_path / "summary.json").read_text())
    saved["rows"] = [row | {"by_seed": [row["pass_at_1"]]} for row in saved["rows"]]  # a field of older runs
    (tmp_path / "summary.json").write_text(json.dumps(saved))
    assert read_summary(tmp_path / "summary.json") == rows
