"""W8 on a policy that is too small to be fast: what it reports, and torch's completions of the same lengths."""

import numpy as np
import pytest
from test_bench import TINY

from oarjax.bench.measure import counted_compilations
from oarjax.bench.ragged import Ragged, bench_ragged, table, torch_generate
from oarjax.data.hf import write_random_checkpoint

SMALL = Ragged(rows=8, prompt_tokens=4, max_new=8, stops=6)


def test_ragged_rollout(tmp_path):
    folder = write_random_checkpoint(tmp_path / "p", TINY, seed=0)
    with counted_compilations() as compiled:
        found = bench_ragged(folder, TINY["vocab_size"], SMALL, repeats=2, compiled=compiled, torch_threads=None)
    assert found["compilations"] > 3
    assert found["compilations_warm"] == 0
    made = found["useful_tokens"]["runs"]
    assert all(8 < tokens < 64 for tokens in made)  # completions differ in length
    for name in ("occupancy", "padding", "share_of_peak"):
        assert all(0 < share < 1 for share in found["ours"][name]["runs"]), name
    assert all(1 <= steps < 8 for steps in found["ours"]["decode_steps"]["runs"])
    assert table(found).row_count == 1


@pytest.mark.slow
def test_generate_makes_completions_of_our_lengths(tmp_path):
    folder = write_random_checkpoint(tmp_path / "p", TINY, seed=0)
    ids = np.random.default_rng(0).integers(6, TINY["vocab_size"], (8, 4)).astype(np.int32)
    lengths = np.array([1, 2, 3, 4, 5, 5, 2, 7])
    made = np.asarray(torch_generate(folder, ids, SMALL, threads=1)(lengths))[:, 4:]
    assert made.shape == (8, 7)
    assert not made[np.arange(7) >= lengths[:, None]].any()  # padding, and nothing else after the end
