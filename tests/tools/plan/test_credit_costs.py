"""The projection by hand on round numbers."""

import pytest

from oarjax.costs import update_flops
from oarjax.models.decoder import Decoder
from oarjax.system.chips import Chip
from oarjax.tools.plan.credit_costs import (
    PROJECTED,
    QWEN_7B,
    Assumptions,
    credit_flops,
    decode_seconds,
    projection,
    rollout_share_for,
)

D = Decoder(layers=2, trunk_params=1000.0, head_params=100.0, heads_width=8, kv_width=4)
R = Assumptions(
    prompt=4, completion=8, answer=2, group=2, replica_rows=4, replica_chips=2, bytes_per_number=2, mfu=0.5,
    decode_mfu=0.25, bandwidth_share=0.5, recomputed=1.0,
)  # fmt: skip


def test_decoding_is_bound_by_memory_or_by_products():
    # Per step: weights 1100 * 2; a position has 2 * 2 * 4 * 2 = 32 bytes: 4 rows of 4 on average, 2 prompts of 4.
    step_bytes = 2200 + 32 * (16 + 8)
    step_flops = 4 * (2000 + 64 * 8 + 200)
    prefill = (4 * (2000 + 64 * 2) + 200) / (1e6 * 0.5) / 2
    slow_memory, fast_memory = Chip("a", 1e6, 1e3, 1, 1, 1), Chip("b", 1e6, 1e12, 1, 1, 1)
    assert decode_seconds(D, slow_memory, R) == pytest.approx(prefill + step_bytes / (2 * 1e3 * 0.5) * 8 * 2 / 4)
    assert decode_seconds(D, fast_memory, R) == pytest.approx(prefill + step_flops / (2 * 1e6 * 0.25) * 8 * 2 / 4)


def test_overhead_is_one_plus_credit_over_a_step():
    chip = PROJECTED[0]
    plain = decode_seconds(QWEN_7B, chip, Assumptions()) + update_flops(QWEN_7B, Assumptions().row, recomputed=1) / (
        chip.flops * 0.4
    )
    found, flops = projection(QWEN_7B, chip, Assumptions()), credit_flops(QWEN_7B, Assumptions())
    assert found.keys() == flops.keys()
    assert found["OAR-P"] == pytest.approx(1 + flops["OAR-P"] / (chip.flops * 0.4) / plain)
    assert found["OAR-G, 1 draw"] < found["OAR-G, 4 draws"] < found["screened OAR-P, 20%"] < found["OAR-P"]


def test_rollout_share_for_a_goal_gives_that_goal():
    share = rollout_share_for(1.1, D, R, flops=update_flops(D, R.row, recomputed=1))
    assert share == pytest.approx(0.9)  # credit as dear as the update is a tenth of ten updates
    assert rollout_share_for(3.0, D, R, flops=update_flops(D, R.row, recomputed=1)) == 0


def test_qwen_7b_has_as_many_parameters_as_its_card_says():
    embedding = QWEN_7B.head_params
    assert QWEN_7B.trunk_params == pytest.approx(6.53e9, rel=0.002)  # 6.53 billion without embeddings
    assert QWEN_7B.trunk_params + QWEN_7B.head_params + embedding == pytest.approx(7.61e9, rel=0.002)
