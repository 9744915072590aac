"""The projection by hand on round numbers, and its FLOPs against those that programs execute."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from oarjax.credit.oar_f import fisher_importance
from oarjax.credit.oar_g import gradient_importance
from oarjax.credit.oar_l import local_importance
from oarjax.credit.oar_p import masked_token_importance
from oarjax.credit.probe import outcome_probe
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import init_params
from oarjax.plan.credit_costs import (
    PROJECTED,
    QWEN_7B,
    Chip,
    Decoder,
    Run,
    clean_flops,
    credit_flops,
    decode_seconds,
    fisher_flops,
    gradient_flops,
    local_flops,
    masked_flops,
    pass_flops,
    projection,
    rollout_share_for,
    update_flops,
)
from oarjax.plan.jaxpr_flops import executed_flops
from oarjax.types import AnswerSpan

D = Decoder(layers=2, trunk_params=1000.0, head_params=100.0, heads_width=8, kv_width=4)
R = Run(
    prompt=4, completion=8, answer=2, group=2, replica_rows=4, replica_chips=2, bytes_per_number=2, mfu=0.5,
    decode_mfu=0.25, bandwidth_share=0.5, recomputed=1.0,
)  # fmt: skip


def test_a_pass_by_hand():
    # 3 * (2 * 1000 + 4 * 2 * 8 * 5) + 2 * 100 * 2
    assert pass_flops(D, tokens=3, context=5, read=2) == 3 * (2000 + 320) + 400


def test_update_by_hand():
    # 12 tokens of 6 positions on average, four forwards' worth of the layers, three of the head at 8 positions.
    assert update_flops(D, R) == 4 * 12 * (2000 + 64 * 6) + 3 * 200 * 8
    assert update_flops(D, replace(R, recomputed=0)) == 3 * 12 * (2000 + 64 * 6) + 3 * 200 * 8


def test_decoding_is_bound_by_memory_or_by_products():
    # Per step: weights 1100 * 2; a position has 2 * 2 * 4 * 2 = 32 bytes: 4 rows of 4 on average, 2 prompts of 4.
    step_bytes = 2200 + 32 * (16 + 8)
    step_flops = 4 * (2000 + 64 * 8 + 200)
    prefill = (4 * (2000 + 64 * 2) + 200) / (1e6 * 0.5) / 2
    slow_memory, fast_memory = Chip("a", 1e6, 1e3, 1, 1), Chip("b", 1e6, 1e12, 1, 1)
    assert decode_seconds(D, slow_memory, R) == pytest.approx(prefill + step_bytes / (2 * 1e3 * 0.5) * 8 * 2 / 4)
    assert decode_seconds(D, fast_memory, R) == pytest.approx(prefill + step_flops / (2 * 1e6 * 0.25) * 8 * 2 / 4)


def test_masking_by_hand():
    # Two buckets: 4 tokens with 8 positions of context 4 + 4, 2 with 4 of 4 + 6; a logit row each.
    exact = 4 * (8 * (2000 + 64 * 8) + 200) + 2 * (4 * (2000 + 64 * 10) + 200)
    assert masked_flops(D, R, share=1.0, buckets=2) == clean_flops(D, R) + exact
    assert masked_flops(D, R, share=0.5, buckets=2) == clean_flops(D, R) + exact / 2
    assert local_flops(D, R, window=1, answers=2) == clean_flops(D, R) + 6 * (4 * (2000 + 64 * 16) + 200)


def test_overhead_is_one_plus_credit_over_a_step():
    chip = PROJECTED[0]
    plain = decode_seconds(QWEN_7B, chip, Run()) + update_flops(QWEN_7B, Run()) / (chip.flops * 0.4)
    found, flops = projection(QWEN_7B, chip, Run()), credit_flops(QWEN_7B, Run())
    assert found.keys() == flops.keys()
    assert found["OAR-P"] == pytest.approx(1 + flops["OAR-P"] / (chip.flops * 0.4) / plain)
    assert found["OAR-G, 1 draw"] < found["OAR-G, 4 draws"] < found["screened OAR-P, 20%"] < found["OAR-P"]


def test_rollout_share_for_a_goal_gives_that_goal():
    share = rollout_share_for(1.1, D, R, flops=update_flops(D, R))
    assert share == pytest.approx(0.9)  # credit as dear as the update is a tenth of ten updates
    assert rollout_share_for(3.0, D, R, flops=update_flops(D, R)) == 0


def test_qwen_7b_has_as_many_parameters_as_its_card_says():
    embedding = QWEN_7B.head_params
    assert QWEN_7B.trunk_params == pytest.approx(6.53e9, rel=0.002)  # 6.53 billion without embeddings
    assert QWEN_7B.trunk_params + QWEN_7B.head_params + embedding == pytest.approx(7.61e9, rel=0.002)


SMALL = QwenConfig.from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)
SIZES = Decoder(
    layers=2,
    trunk_params=2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256),
    head_params=64 * 32,
    heads_width=64,
    kv_width=32,
)
STEP = Run(prompt=5, completion=16, answer=4, recomputed=0)
MASKING = {"mask_id": 0, "chunk": 1}
NOISE = {"estimator": "linearised", "sigma": 1e-3}


@pytest.mark.parametrize(
    ("attribution", "options", "flops"),
    [
        (
            gradient_importance,
            NOISE | {"draws": 1},
            partial(gradient_flops, draws=1),
        ),
        (
            gradient_importance,
            NOISE | {"draws": 4},
            partial(gradient_flops, draws=4),
        ),
        (fisher_importance, {"mask_id": 0, "outcomes": 3, "sampled": 0}, partial(fisher_flops, outcomes=3)),
        (masked_token_importance, MASKING | {"buckets": 4}, partial(masked_flops, share=1.0, buckets=4)),
        (local_importance, MASKING | {"window": 2, "answers": 4}, partial(local_flops, window=2, answers=4)),
    ],
)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_programs_execute(attribution, options, flops, remat):
    """Within a tenth: attention here is dense, not half; chunks of several suffixes start at the longest."""
    tokens = jax.random.randint(jax.random.key(1), (1, 21), 1, 32)
    place = jnp.arange(16)[None]
    span = AnswerSpan(place < 12, place >= 12, jnp.ones(1, bool))
    keyed = attribution in (gradient_importance, fisher_importance)
    keys = [jax.random.split(jax.random.key(0), 1)] if keyed else []
    policy = make_policy(SMALL, remat=remat)
    probe = outcome_probe("answer_mean", temperature=1.0)

    def scores(params):
        return attribution(policy, params, tokens, jnp.ones(tokens.shape, bool), span, *keys, probe=probe, **options)

    params = init_params(SMALL, jax.random.key(0), dtype=jnp.float32)
    expected = flops(SIZES, replace(STEP, recomputed=1 if remat == "full" else 0))
    assert executed_flops(scores, params) == pytest.approx(expected, rel=0.1)
