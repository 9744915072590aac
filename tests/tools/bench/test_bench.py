"""``oarjax bench`` on tiny shapes: the document's fields, counted programs, and that both sides do the same work.

Nothing here looks at how long anything took.
"""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import Array
from rich.console import Console
from typer.testing import CliRunner

from oarjax.cli import app
from oarjax.costs import pass_flops
from oarjax.data.hf import write_random_checkpoint
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.models.qwen_config import QwenConfig
from oarjax.tools.bench import command as bench
from oarjax.tools.bench import grading as bench_grading
from oarjax.tools.bench import measure
from oarjax.tools.bench import project as bench_project
from oarjax.tools.bench import step as bench_step
from oarjax.tools.bench.work import Ours, WorkloadSizes, draw_tokens, half_constant, half_right, make_rows, spans

TINY = bench.COMMON | {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
}
PEAK = measure.Peak(1e12, "assumed")
SHAPES = WorkloadSizes(
    prompts=4, prompt_tokens=3, new_tokens=8, credit_rows=2, reasoning=4, cue=1, answer=2, groups=2, group_size=2
)


def run_tiny(workloads: list[str], against: str | None = None) -> dict:
    return bench.bench_model(
        "tiny", TINY, SHAPES, workloads=workloads, repeats=2, peak=PEAK, against=against, console=Console(quiet=True)
    )


@pytest.mark.slow
def test_every_row_runs_warm_and_is_reported_beside_torch():
    """A rollout without torch: ``test_rollout_in_tokens_per_second_and_no_program_when_warm``."""
    torch = bench.importlib.util.find_spec("torch")  # the extra parity
    found = run_tiny(["W1", "W2", "W3", "W4"], against=torch and "torch")
    assert [(r["workload"], r["name"]) for r in found["rows"]] == [
        ("W1", "rollout"),
        ("W2", "update"),
        ("W2", "log-probs"),
        ("W3", "OAR-G linearised"),
        ("W3", "OAR-G noisy"),
        ("W3", "OAR-P"),
        ("W4", "iteration"),
    ]
    for row in found["rows"]:
        ours = row["ours"]
        assert len(ours["seconds"]["runs"]) == 2
        assert ours["compilations"] >= 1
        assert ours["compilations_warm"] == 0, f"{row['name']} compiles anew when warm"
        assert ours["peak_rss_mb"] > 0
        assert ours["share_of_peak"]["runs"] == [row["model_flops"] / s / 1e12 for s in ours["seconds"]["runs"]]
        if torch:
            pairs = zip(row["torch"]["seconds"]["runs"], ours["seconds"]["runs"])
            assert row["speedup"]["runs"] == pytest.approx([x / y for x, y in pairs])
        else:
            assert row["speedup"] is None
        assert ("updates_per_sequence" in ours) == (row["workload"] == "W3")
    assert json.loads(json.dumps(found)) == found


def test_shares_need_a_peak_that_is_the_same_after_the_work():
    share = measure.spread([0.25])
    found = {"name": "x", "rows": [{"ours": {"share_of_peak": share, "seconds": 1.0}}]}
    assert measure.settled(found, PEAK, PEAK._replace(flops=0.95e12)) == found | {"peak_after": 0.95e12}
    for other in (0.8e12, 1.2e12):
        dropped = measure.settled(found, PEAK, PEAK._replace(flops=other))
        assert dropped == {
            "name": "x",
            "rows": [{"ours": {"share_of_peak": None, "seconds": 1.0}}],
            "peak_after": other,
        }
    assert [measure.share_text(each) for each in (share, None)] == ["25.0%", "-"]


def test_multiples_of_the_update():
    rows = [
        {"workload": "W2", "name": "update", "ours": {"seconds": {"median": 8.0}}},
        {"workload": "W3", "name": "OAR-P", "ours": {"value": {"median": 6.0}}},
    ]
    bench.add_multiples(rows, sequences=4)
    assert rows[1]["ours"]["updates_per_sequence"] == 3.0  # 6 s per sequence, 8 / 4 = 2 s per sequence


def test_runs_alternate_after_the_warm_up():
    calls = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    with measure.counted_compilations() as compiled:
        found = measure.measure(sides, repeats=3, compiled=compiled)
    assert "".join(calls) == "aabb" + "ababab"
    assert found["a"].compilations == found["a"].compilations_warm == 0
    assert len(found["b"].seconds) == len(found["b"].cpu_seconds) == 3


def test_spread_and_pairs():
    assert measure.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [3.0, 1.0, 2.0]}
    a, b = measure.TimedRuns(seconds=[4.0, 9.0]), measure.TimedRuns(seconds=[2.0, 3.0])
    assert bench.pairwise(a, b)["runs"] == [2.0, 3.0]


def test_work_is_what_the_rows_say():
    rows = {r.name: r for r in make_rows(QwenConfig.from_hf(TINY), SHAPES)}
    assert rows["rollout"].amount == 32
    assert rows["OAR-P"].amount == 2
    assert rows["update"].flops == 3 * rows["log-probs"].flops
    # Attention 2 * (16 * 16 + 16 * 16) per layer (q and o, k and v of 2 heads), MLP 3 * 16 * 24, head 16 * 40.
    d = Decoder(
        layers=2, trunk_params=2 * (4 * 16 * 16 + 3 * 16 * 24), head_params=16 * 40, heads_width=16, kv_width=16
    )
    assert rows["log-probs"].flops == pass_flops(d, tokens=44, context=5.5, read=44)
    span = spans(3, 8, SHAPES)
    assert np.asarray(span.reasoning).sum(1).tolist() == [4, 4, 4]
    assert np.flatnonzero(np.asarray(span.answer)[0]).tolist() == [5, 6]
    assert half_right(6, 3).rewards.tolist() == [1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "mega"], "--model: expected nano, micro or both, got mega"),
        (["--only", "W2,W12"], "--only: expected some of W1,W2,W3,W4,W6,W7,W8,W9,W10,W11, got W12"),
        (["--against", "trl"], "--against: expected torch, got trl"),
    ],
)
def test_bad_options_say_what_is_accepted(options, message):
    result = CliRunner().invoke(app, ["bench", *options])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == message


def test_missing_torch_names_the_extra(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'torch is not installed; pip install "oarjax\[parity\]"'):
        bench.run("nano", "", 1, False, "torch")


def test_json_is_one_document_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(bench, "MODELS", {"nano": TINY})
    monkeypatch.setattr(bench, "WorkloadSizes", lambda: SHAPES)
    monkeypatch.setattr(bench.jax.config, "update", lambda *_: None)  # the tests keep their compilation cache
    bench.run("nano", "w2", 1, True, None)
    document = json.loads(capsys.readouterr().out)
    assert document["threads"] >= 1
    assert [r["name"] for r in document["models"][0]["rows"]] == ["update", "log-probs"]
    (found,) = document["models"]
    monkeypatch.setattr(bench, "bench_model", lambda *_, **__: found)  # the same once more, as a table
    monkeypatch.setattr(bench, "machine_peak", lambda: PEAK)
    bench.run("nano", "W2", 1, False, None)
    out = capsys.readouterr().out
    assert "log-probs" in out
    assert "of peak" in out
    assert "GFLOP/s of float32 matrix products" in " ".join(out.split())


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_what_was_measured_before_it_was_stopped_is_printed(monkeypatch, capsys, number):
    """By Ctrl-C, or by SIGTERM, whose handler stands again afterwards."""

    def interrupted(*_, **__):
        yield {"workload": "W8"}
        if number is None:
            raise KeyboardInterrupt
        signal.raise_signal(number)

    monkeypatch.setattr(bench, "bench_of_ragged", interrupted)
    monkeypatch.setattr(bench.jax.config, "update", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        bench.run("nano", "W8", 1, True, None)
    document = json.loads(capsys.readouterr().out)
    assert document["ragged"] == [{"workload": "W8"}]
    assert document["stopped"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def both(tmp_path) -> tuple:
    pytest.importorskip("torch", reason="torch is not installed (extra parity)")
    from oarjax.tools.bench.against import Torch

    folder: Path = write_random_checkpoint(tmp_path / "tiny", TINY | {"initializer_range": 0.3}, seed=0)
    tokens = draw_tokens(40, SHAPES, seed=0)
    ours = Ours(folder, SHAPES, tokens)
    return ours, Torch(folder, SHAPES, tokens, ours.cfg, threads=1, device="cpu"), tokens


@pytest.mark.slow
def test_both_sides_compute_the_same(both):
    import torch

    ours, other, tokens = both
    rows = torch.as_tensor(tokens.rows, dtype=torch.long)
    mine: Array = ours.works["log-probs"]().old_logps
    np.testing.assert_allclose(np.asarray(mine).reshape(4, 8), other.log_probs(rows).numpy(), atol=2e-5)
    masked = np.asarray(ours.works["OAR-P"]().importance).reshape(2, 7)[:, :4]
    credit = torch.as_tensor(tokens.credit, dtype=torch.long)
    theirs = np.stack([other.masked_importance(ids).numpy() for ids in credit])
    np.testing.assert_allclose(masked, theirs, atol=1e-4 * theirs.max())
    assert other.gradient_importance(credit).shape == (2, 4)


def test_rollout_in_tokens_per_second_and_no_program_when_warm():
    (row,) = run_tiny(["W1"])["rows"]
    assert (row["name"], row["unit"], row["speedup"]) == ("rollout", "tokens/s", None)
    ours = row["ours"]
    assert ours["compilations"] == 4  # the empty cache, prefill, decode and finish
    assert ours["compilations_warm"] == 0
    assert ours["value"]["runs"] == pytest.approx([32 / s for s in ours["seconds"]["runs"]])  # 4 rows of 8 tokens


@pytest.mark.slow
def test_steps_of_every_method_are_beside_grpo_with_and_without_skipping(tmp_path, monkeypatch):
    names = ("GRPO", "OAR-G, 1 draw", "OAR-P", "soft reward")
    monkeypatch.setattr(bench_step, "METHODS", {k: bench_step.METHODS[k] for k in names})
    runs, run_of = {}, Ours.run_of  # steps of one config, counted and timed, share what they compile
    monkeypatch.setattr(Ours, "run_of", lambda s, cfg: runs.setdefault(cfg.model_dump_json(), run_of(s, cfg)))
    folder = write_random_checkpoint(tmp_path / "tiny", TINY, seed=0)
    setting = bench_step.StepSetting(TINY, SHAPES, microbatch=2)
    with measure.counted_compilations() as compiled:
        found = bench_step.bench_steps(
            "tiny", setting, folder, repeats=2, compiled=compiled, peak=PEAK, status=Console(quiet=True).status
        )
    rows = found["rows"]
    assert [(r["method"], r["rows"], r["goal"]) for r in rows] == [
        ("OAR-G, 1 draw", "all", 1.3),
        ("OAR-P", "all", 6.0),
        ("soft reward", "all", None),
        ("OAR-G, 1 draw", "half skipped", None),
        ("OAR-P", "half skipped", None),
        ("soft reward", "half skipped", None),
    ]
    for row in rows:
        assert row["flops_of_grpo"] > 1
        assert len(row["of_grpo"]["runs"]) == 2
    passes = (0, ["fused_add"]), (1, ["score", "accumulate"])  # OAR-G scores and updates in one pass
    for place, names in passes:
        every, skipped = rows[place]["executed_flops"], rows[place + 3]["executed_flops"]
        assert every["sample"] == skipped["sample"]
        assert every["apply"] == skipped["apply"]
        for name in names:
            assert every[name] == 2 * skipped[name] > 0
    assert rows[2]["executed_flops"] == rows[5]["executed_flops"]  # soft rewards score every row
    assert rows[0]["grpo"]["executed_flops"]["score"] == 0
    assert json.loads(json.dumps(found)) == found


def test_solutions_are_half_right_in_the_shares_they_should_be():
    samples = bench_grading.draw_solutions(1000, seed=0)
    assert samples == bench_grading.draw_solutions(1000, seed=0)
    plain = sum(s.completion.rpartition("{")[2].removesuffix("}.").isdigit() for s in samples)
    assert 0.75 < plain / 1000 < 0.85
    assert sum(share for share, _ in bench_grading.FORMS) == pytest.approx(1)


@pytest.mark.slow
def test_grading_is_timed_on_answers_that_all_get_a_verdict(capsys):
    with measure.counted_compilations() as compiled:
        found = bench_grading.bench_grading(workers=1, repeats=2, compiled=compiled, answers=64)
    assert found["verdicts"] == {"graded": 64}
    assert 0.3 < found["right"] < 0.7
    assert found["ours"]["value"]["runs"] == pytest.approx([64 / s for s in found["ours"]["seconds"]["runs"]])
    assert json.loads(json.dumps(found)) == found
    Console().print(bench_grading.table(found))
    assert "graded 64" in capsys.readouterr().out


def test_every_second_group_is_constant():
    assert half_constant(8, 2).rewards.tolist() == [1, 0, 1, 1, 1, 0, 1, 1]


def test_projection_prints_methods_beside_goals(capsys):
    bench.run("nano", "", 1, True, None, True)
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(json.dumps(bench_project.document()))
    assert document["methods"]["OAR-P"]["goal"] == 2.0
    bench.run("nano", "", 1, False, None, True)
    assert "screened OAR-P" in capsys.readouterr().out
