"""Times and FLOPs by hand on round numbers."""

import pytest

from oarjax.costs import RowTokens
from oarjax.models.decoder import Decoder
from oarjax.system.chips import CHIPS, Chip
from oarjax.tools.plan.roofline import (
    Reached,
    decoding_bytes,
    executed_fused_flops,
    executed_update_flops,
    expected_seconds,
    kernel_flops,
    roofline,
    utilisation,
)

CHIP = Chip("round", flops=1e3, bandwidth=1e2, link=1e1, memory=1e9, clock=1e1)
D = Decoder(layers=2, trunk_params=1000.0, head_params=100.0, heads_width=8, kv_width=4)
R = RowTokens(prompt=4, completion=8)


def test_times_in_turn_and_together():
    times = roofline(CHIP, flops=4000, sent=60, read=200)
    assert (times.products, times.memory, times.links) == (4, 2, 3)  # both directions of a ring: 60 / 20
    assert (times.in_turn, times.together) == (7, 4)
    assert roofline(CHIP, flops=1000, sent=60, read=500).in_turn == 5 + 3
    assert utilisation(CHIP, model_flops=16_000, chips=8, seconds=4) == 0.5


def test_executed_flops_of_an_update_by_its_remat():
    linear, attention, head = 12 * 2000, 12 * 64 * 12, 8 * 200  # the whole square: 12 queries, 12 keys

    def found(remat, passes):
        return executed_update_flops(D, R, remat=remat, stored=100, attended=12, attention_passes=passes)

    assert found("none", 3) == 3 * linear + 3 * attention + 4 * head
    assert found("dots", 4) == 3 * linear + 4 * attention + 4 * head
    assert found("attention", 4) == found("full", 4)  # which differ in what they store
    assert found("full", 4) == 4 * linear - 2 * 100 * 12 + 4 * attention + 4 * head


def test_scores_in_the_same_pass_add_a_push_and_a_pull_through_the_completion():
    """Attention's are kernels, which count by themselves."""
    own = 8 * 2000  # the layers over 8 tokens
    settings = {"attended": 12, "attention_passes": 0}
    for remat, again in (("none", 0), ("dots", 0), ("full", own - 2 * 100 * 8)):
        update = executed_update_flops(D, R, remat=remat, stored=100, **settings)
        for draws in (1, 4):
            fused = executed_fused_flops(D, R, remat=remat, stored=100, draws=draws, **settings)
            assert fused - update == 2 * (draws * own + again)


def test_expected_seconds_by_the_shares_that_are_assumed():
    reached = Reached(products=0.5, memory=0.5, kernels=0.25)
    sizes = {"flops": 1500, "kernels": 500, "moved": 100, "passed": 50, "links": 3}
    assert expected_seconds(CHIP, reached, **sizes) == 1000 / 500 + 500 / 250 + 50 / 50 + 3
    assert expected_seconds(CHIP, reached, **sizes | {"moved": 500}) == 500 / 50 + 50 / 50 + 3  # bound by memory


def test_kernels_compute_the_blocks_that_are_seen():
    q, k = (2, 4, 1024, 64), (2, 2, 1024, 64)
    product = 2 * 2 * 4 * 64 * 512 * 512  # of a block, over rows and heads
    find = lambda name, *shapes: kernel_flops(name, [(1, 1, 1), *shapes], block=lambda n: 512)  # noqa: E731
    assert find("splash_mha_fwd_segmented", q, k, k) == 2 * 3 * product  # 1 + 2 of 2 x 2 blocks
    assert find("splash_mha_dq", q, k, k) == 3 * 3 * product
    assert find("splash_mha_dkv", q, k, k) == 4 * 3 * product
    draws = find("vmap_attention_tangent_", q, k, k, (2, 1024), q, (3, *q), (3, *k), (3, *k))
    assert draws == 3 * find("attention_tangent", q, k, k, (2, 1024), q, q, k, k) == 3 * 5 * 3 * product
    one_row = find("splash_mha_fwd_segmented", q[1:], k[1:], k[1:])
    assert one_row == find("splash_mha_fwd_segmented", q, k, k) / q[0]
    longer = (2, 2, 1536, 64)  # a prefix of 512 keys before the queries' own
    assert find("splash_mha_fwd", q, longer, longer) == 2 * (2 + 3) * product
    assert find("ragged-dot-none", (48,), (64, 8), (16, 8, 3)) == 2 * 64 * 8 * 3  # rows are multiplied once each
    assert find("ragged-dot-metadata", (16,)) == 0
    eighth = kernel_flops("ragged-dot-none", [(48,), (64, 8), (16, 8, 3)], block=lambda n: 512, experts=128)
    assert eighth == 2 * 64 / 8 * 8 * 3  # the other rows are other chips'
    rows = "decode_attention_rows", [(9,), (1, 64, 7, 128), (28, 1, 64, 128, 1024), (28, 1, 64, 1024, 128)]
    assert kernel_flops(*rows, block=lambda n: 512, slots=300) == 2 * 2 * 64 * 7 * 128 * 300
    assert kernel_flops(*rows, block=lambda n: 512) == 2 * 2 * 64 * 7 * 128 * 1024
    rows[1].append((28, 1, 64, 2, 1024))  # steps of int8
    assert kernel_flops(*rows, block=lambda n: 512) == 2 * 2 * 64 * 7 * 128 * 1024
    assert find("delta_step") == 0
    with pytest.raises(ValueError, match="kernel flash: expected one of splash_mha_fwd"):
        find("flash", q, k)


def test_decoding_reads_weights_and_all_slots():
    assert decoding_bytes(weights=100, rows=3, prompts=2, prompt=5, completion=10, slots=6, position=4) == 10 * (
        100 + 4 * (18 + 10)
    )
    sizes = {"weights": 0, "rows": 3, "prompts": 2, "prompt": 5, "completion": 10, "slots": 6, "position": 0}
    assert decoding_bytes(**sizes, state=7) == 10 * 2 * 3 * 7  # read and written


def test_the_chips_are_the_data_sheets():
    flops = {name: chip.flops / 1e12 for name, chip in CHIPS.items()}
    assert flops == {"v5e": 197, "v5p": 459, "v6e": 918, "v4": 275, "v7x": 2307 / 2}
