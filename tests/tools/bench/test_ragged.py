"""W8 to W11 on a policy that is too small to be fast: what they report, and that all sides do the same work."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from test_bench import PEAK, TINY

from oarjax.data.hf import write_random_checkpoint
from oarjax.rollout import row_schedule
from oarjax.tools.bench import ragged_step, ragged_update, sides
from oarjax.tools.bench.measure import counted_compilations, warm
from oarjax.tools.bench.ragged import ALONE, BEFORE, Ragged, TorchSettings, bench_ragged, ragged_config
from oarjax.tools.bench.ragged_step import OURS, RaggedIterations, bench_ragged_step
from oarjax.tools.bench.ragged_update import FINER, PADDED, RaggedUpdates, bench_ragged_update, draw_rows

SMALL = Ragged(rows=16, prompt_tokens=4, max_new=8, stops=6, bucket=4, finer=2, answer=2)
VOCAB = TINY["vocab_size"]
TORCH = TorchSettings(threads=1, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def short():
    """Drop rows of completions as short as SMALL's, as the benchmark's own long ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_schedule, "SHORT", 2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("policy") / "p", TINY | {"initializer_range": 0.3}, seed=0)


@pytest.fixture(scope="module")
def updates(folder):
    return RaggedUpdates(folder, SMALL)


@pytest.fixture(scope="module")
def iterations(folder):
    return RaggedIterations(folder, VOCAB, SMALL, "oar_g")


def measured(bench, folder, against=None):
    with counted_compilations() as compiled:
        found = bench(folder, VOCAB, SMALL, repeats=2, compiled=compiled, peak=PEAK, against=against)
    assert json.loads(json.dumps(found)) == found
    return found


def test_ragged_rollout(folder):
    found = measured(bench_ragged, folder)
    assert found["compilations"] > 3
    assert all(1 < length < 8 for length in found["mean_length"]["runs"])  # completions differ in length
    (row,) = found["rows"]
    for name in ("occupancy", "padding", "share_of_peak"):
        assert all(0 < share < 1 for share in row[name]["runs"]), name
    tokens = [16 * length for length in found["mean_length"]["runs"]]
    assert row["tokens_per_second"]["runs"] == pytest.approx([n / s for n, s in zip(tokens, row["seconds"]["runs"])])


@pytest.mark.slow
def test_ragged_updates_take_less_where_rows_are_sorted(updates):
    """All sides see the same rows: the same log-probs and weights, from fewer positions."""
    ours = updates
    draw = draw_rows(VOCAB, SMALL, seed=0)
    works, padding = ours.works(draw)
    assert 0 <= padding[FINER] < padding["by length"] < padding[PADDED] < 1
    after = {}
    for side, work in works["update"].items():
        ours.state = ours.run.new_state(ours.params)
        work()
        after[side] = jax.device_get(ours.state.opt_state)  # Adam's first step is a sign; its moments are gradients
    for side in (FINER, PADDED):
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), after["by length"], after[side])
    logps = {}
    for side, work in works["log-probs"].items():
        (plan, _) = ours.plans(draw)[side]
        logps[side] = plan.collect([work().old_logps], np.zeros(draw.completion.shape, np.float32)) * draw.completion
    for side in (FINER, PADDED):
        np.testing.assert_allclose(logps["by length"], logps[side], atol=1e-5)
    assert (logps[PADDED] < 0).sum() == draw.lengths.sum()


@pytest.mark.slow
def test_an_iteration_and_the_one_before_make_the_same_completions(iterations):
    now, before = (iterations(side, 1) for side in (OURS, BEFORE))
    assert now.lengths.tolist() == before.lengths.tolist()
    assert len(set(now.lengths.tolist())) > 2
    assert before.occupancy < now.occupancy <= 1
    assert now.padding < before.padding < 1
    assert iterations(OURS, 2).lengths.tolist() != now.lengths.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "works", "ways"),
    [
        (bench_ragged, ["rollout"], ["oarjax"]),
        (bench_ragged_update, ["update", "log-probs"], ["by length", "by length, finer", "to the longest"]),
        (bench_ragged_step, ["OAR-G"], ["now", "before"]),
    ],
)
def test_every_side_is_reported_beside_the_first(folder, updates, iterations, monkeypatch, bench, works, ways):
    pytest.importorskip("torch", reason="torch is not installed (extra parity)")
    monkeypatch.setattr(ragged_update, "RaggedUpdates", lambda *_: updates)
    monkeypatch.setattr(ragged_step, "RaggedIterations", lambda *_: iterations)
    monkeypatch.setattr(ragged_step, "CREDIT", {"OAR-G": "oar_g"})
    found = measured(bench, folder, TORCH)
    ways += ["generate"] if bench is bench_ragged else ["torch, by length", "torch, to the longest"]
    assert [(r["name"], r["side"]) for r in found["rows"]] == [(work, side) for work in works for side in ways]
    for row, first in zip(found["rows"], [r for r in found["rows"] if r["side"] == ways[0] for _ in ways]):
        pairs = zip(row["seconds"]["runs"], first["seconds"]["runs"])
        assert row["times_first"]["runs"] == [a / b for a, b in pairs]
        assert all(0 < share <= 1 for share in row["occupancy"]["runs"])
        assert row["padding"] is None if row["side"] == "generate" else max(row["padding"]["runs"]) < 1
        flops = [a * b * 1e12 for a, b in zip(row["share_of_peak"]["runs"], row["seconds"]["runs"])]
        assert flops == pytest.approx(
            [a * b * 1e12 for a, b in zip(first["share_of_peak"]["runs"], first["seconds"]["runs"])]
        )
    assert sides.table(found).row_count == len(ways) * len(works)


def test_long_prompts_are_compared_with_one_prompt_per_row(folder):
    ours = RaggedIterations(folder, VOCAB, replace(SMALL, prompt_tokens=32, compared=ALONE), "uniform")
    assert {side: steps.prompt_rows for side, steps in ours.sides.items()} == {"now": 4, "prompt per row": 1}


@pytest.mark.slow
def test_torch_does_the_same_work(folder, updates):
    """Completions of our lengths, and our log-probs in both ways."""
    pytest.importorskip("torch", reason="torch is not installed (extra parity)")
    from oarjax.tools.bench.ragged_against import RaggedTorch

    other = RaggedTorch(folder, ragged_config(SMALL), **TORCH._asdict())
    draw = draw_rows(VOCAB, SMALL, seed=1)
    ids = draw.ids[:, : SMALL.prompt_tokens]
    completions = other.complete(ids, draw.lengths).numpy()[:, SMALL.prompt_tokens :]
    longest = draw.lengths.max()
    assert completions.shape == (16, longest)
    assert not completions[np.arange(longest) >= draw.lengths[:, None]].any()  # padding, and nothing else after the end
    plan, _ = updates.plans(draw)["by length"]
    scores = updates.works(draw)[0]["log-probs"]["by length"]()
    want = plan.collect([scores.old_logps], np.zeros(draw.completion.shape, np.float32))
    for by_length in (True, False):
        rows = other.placed(draw.ids)[:, : SMALL.prompt_tokens + longest]
        found = other.log_probs(rows, draw.lengths, by_length=by_length)
        for (chosen, _), logps in zip(other.microbatches(draw.lengths, by_length=by_length), found):
            mask = draw.completion[chosen][:, : logps.shape[1]]
            np.testing.assert_allclose(logps.numpy()[mask], want[chosen][:, : logps.shape[1]][mask], atol=2e-5)


def test_a_run_that_compiles_is_run_again():
    with counted_compilations() as compiled:
        events = [2, 1, 0]  # programs that each run compiles

        def work():
            compiled.count += events.pop(0)
            return len(events)

        assert warm(work, compiled) == 0
        with pytest.raises(RuntimeError, match="ten runs of the same work each compiled a program"):
            warm(lambda: vars(compiled).update(count=compiled.count + 1), compiled)
