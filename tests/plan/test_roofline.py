"""Times and FLOPs by hand on round numbers."""

import pytest

from oarjax.costs import CHIPS, Chip, Decoder, Row
from oarjax.plan.roofline import (
    decoding_bytes,
    executed_update_flops,
    kernel_flops,
    roofline,
    utilisation,
)

CHIP = Chip("round", flops=1e3, bandwidth=1e2, link=1e1, memory=1e9)
D = Decoder(layers=2, trunk_params=1000.0, head_params=100.0, heads_width=8, kv_width=4)
R = Row(prompt=4, completion=8)


def test_times_in_turn_and_together():
    times = roofline(CHIP, flops=4000, sent=60, read=200)
    assert (times.products, times.memory, times.links) == (4, 2, 3)  # both directions of a ring: 60 / 20
    assert (times.in_turn, times.together) == (7, 4)
    assert roofline(CHIP, flops=1000, sent=60, read=500).in_turn == 5 + 3
    assert utilisation(CHIP, model_flops=16_000, chips=8, seconds=4) == 0.5


def test_executed_flops_of_an_update_by_its_remat():
    linear, attention, head = 12 * 2000, 12 * 64 * 12, 8 * 200  # the whole square: 12 queries, 12 keys

    def found(remat, passes):
        return executed_update_flops(D, R, remat=remat, last_product=100, attended=12, attention_passes=passes)

    assert found("none", 3) == 3 * linear + 3 * attention + 4 * head
    assert found("dots", 4) == 3 * linear + 4 * attention + 4 * head
    assert found("full", 4) == 4 * linear - 2 * 100 * 12 + 4 * attention + 4 * head


def test_kernels_compute_the_blocks_that_are_seen():
    q, k = (2, 4, 1024, 64), (2, 2, 1024, 64)
    product = 2 * 2 * 4 * 64 * 512 * 512  # of a block, over rows and heads
    find = lambda name, *shapes: kernel_flops(name, [(1, 1, 1), *shapes], block=lambda n: 512)  # noqa: E731
    assert find("splash_mha_fwd_segmented", q, k, k) == 2 * 3 * product  # 1 + 2 of 2 x 2 blocks
    assert find("splash_mha_dq", q, k, k) == 3 * 3 * product
    assert find("splash_mha_dkv", q, k, k) == 4 * 3 * product
    one_row = find("splash_mha_fwd_segmented", q[1:], k[1:], k[1:])
    assert one_row == find("splash_mha_fwd_segmented", q, k, k) / q[0]
    longer = (2, 2, 1536, 64)  # a prefix of 512 keys before the queries' own
    assert find("splash_mha_fwd", q, longer, longer) == 2 * (2 + 3) * product
    assert find("ragged-dot-none", (48,), (64, 8), (16, 8, 3)) == 2 * 64 * 8 * 3  # rows are multiplied once each
    assert find("ragged-dot-metadata", (16,)) == 0
    with pytest.raises(ValueError, match="kernel flash: expected one of splash_mha_fwd"):
        find("flash", q, k)


def test_decoding_reads_weights_and_all_slots():
    assert decoding_bytes(weights=100, rows=3, prompts=2, prompt=5, completion=10, position=4) == 10 * (
        100 + 4 * (30 + 10)
    )
    sizes = {"weights": 0, "rows": 3, "prompts": 2, "prompt": 5, "completion": 10, "position": 0}
    assert decoding_bytes(**sizes, state=7) == 10 * 2 * 3 * 7  # read and written


def test_the_chips_are_the_data_sheets():
    assert {name: chip.flops / 1e12 for name, chip in CHIPS.items()} == {"v5e": 197, "v5p": 459, "v6e": 918, "v4": 275}
