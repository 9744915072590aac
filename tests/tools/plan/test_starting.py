"""Seconds until the first iteration, and the tables beside public figures, from plans made by hand."""

import pytest
from conftest import ROOT

from oarjax.config.loading import load_config
from oarjax.run.compile_ahead import MOST_THREADS
from oarjax.tools.plan.programs import evaluation_plan, rollout_plan, shapes_of
from oarjax.tools.plan.public import public_table
from oarjax.tools.plan.starting import cores_of, describe_starting, starting_of, starting_table
from oarjax.tools.plan.topology import find_slice

SAMPLING = ("prefill", "decode 256 rows, 1023 slots", "decode 256 rows, 128 slots", "take 2 of 4 prompts", "move rows")


def phase(name, seconds, programs=("",), **more):
    costs = {"name": name, "method": None, "compile_cpu_seconds": seconds * len(programs)}
    return costs | {"programs": [{"name": each, "cpu_seconds": seconds} for each in programs]} | more


PHASES = [phase("reshard", 2.0), phase("sample", 3.0, SAMPLING), phase("fused", 400.0), phase("apply", 8.0)]


def test_compiling_costs_the_windows_of_all_rows_and_the_longest_update_first():
    cfg, where = load_config(ROOT / "configs/qwen3-4b_v6e-16.yaml"), find_slice("v6e-16")
    rows = rollout_plan(shapes_of(cfg), cfg.rollout, blocks=4)
    evaluated = evaluation_plan(shapes_of(cfg), cfg.rollout, cfg.eval, blocks=4)
    found = starting_of(cfg.rollout, rows, where, PHASES, evaluated=evaluated)
    assert found is not None
    buckets, windows, lengths = 8, 4, 8  # rows 256, 128 .. 2 of a block; 128, 256, 512, 1023 slots; 128 .. 1024
    quarter = 3  # rows 128, 64, 32 in all
    assert found["first_cpu_seconds"] == 2 + 2 * (3 * 3 + windows * 3) + 400 + 8
    assert found["cpu_seconds"] == 2 + 8 + 2 * 3 * 3 + (buckets + quarter) * windows * 3 + lengths * 400
    assert found["programs"] == 2 + 2 * 3 + (buckets + quarter) * windows + lengths
    assert found["first_seconds"] == 400  # no program is compiled by two cores
    assert found["seconds"] == pytest.approx(max(found["cpu_seconds"] / MOST_THREADS, 400))
    assert starting_of(cfg.rollout, rows, where, PHASES[:-1], evaluated=evaluated) is None
    (sample,) = (p for p in PHASES if p["name"] == "sample")
    summed = sample | {"programs": [{"name": name} for name in SAMPLING]}  # of an older plan; all took 3 s here
    older = [summed if p is sample else p for p in PHASES]
    assert starting_of(cfg.rollout, rows, where, older, evaluated=evaluated) == found
    assert "at least 400 s." in describe_starting(found)
    (line,) = starting_table([{"config": "x", "starting": found}, {"config": "old"}])[4:]
    assert line.startswith("| x | ")
    assert line.endswith(f" {found['seconds']:,.0f} |")


def test_hosts_have_the_vendors_cores():
    assert {name: cores_of(find_slice(name)) for name in ("v5e-1", "v5e-8", "v5e-16", "v6e-8", "v5p-8")} == {
        "v5e-1": 24,
        "v5e-8": 224,
        "v5e-16": 112,
        "v6e-8": 180,
        "v5p-8": 208,
    }


def test_shares_of_the_peaks_stand_beside_public_ones():
    chip = {"name": "TPU v6e", "flops": 100.0, "bandwidth": 10.0}
    score = phase("score", 1, model=100.0, seconds_expected=4.0, seconds_compiler=1.0)
    update = phase("update", 1, model=300.0, seconds_expected=6.0, seconds_compiler=6.0)
    sample = phase("sample", 1, read=20.0, seconds_expected=5.0, seconds_compiler=5.0)
    found = {"config": "configs/x.yaml", "chips": 2, "chip": chip, "shapes": {"rows": 6, "completion": 10}}
    older = found | {"phases": [phase("update", 1, model=300.0, seconds_expected=6.0)]}
    (line,) = public_table([found | {"phases": [sample, score, update]}, older])[4:]
    assert line == (
        "| x.yaml | TPU v6e | 20% | 46% (MaxText, Llama 3.1 8B) | 6 | 40% | "
        "38 to 47% (sglang-jax), 53 to 59% (vLLM-TPU) |"
    )
