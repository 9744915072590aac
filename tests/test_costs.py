"""FLOPs by hand on round numbers, against those that programs execute, and the same in metrics and plans."""

from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT

from oarjax.config.changes import changed
from oarjax.config.loading import load_config
from oarjax.costs import (
    RowTokens,
    Work,
    adapted_update_flops,
    clean_flops,
    fisher_flops,
    gradient_flops,
    iteration_flops,
    local_flops,
    masked_flops,
    pass_flops,
    sampling_flops,
    scoring_flops,
    update_flops,
)
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings, MaskingSettings, ScreenSettings
from oarjax.models.decoder import Decoder
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of, init_params
from oarjax.tools.plan.jaxpr_flops import executed_flops
from oarjax.tools.plan.programs import shapes_of
from oarjax.tools.plan.published_sizes import PUBLISHED
from oarjax.tools.plan.sums import ANSWER, model_flops
from oarjax.training.meter import Meter
from oarjax.types import AnswerSpan, Rollout

D = Decoder(layers=2, trunk_params=1000.0, head_params=100.0, heads_width=8, kv_width=4)
R = RowTokens(prompt=4, completion=8, reasoning=6)


def test_a_pass_by_hand():
    # 3 * (2 * 1000 + 4 * 2 * 8 * 5) + 2 * 100 * 2
    assert pass_flops(D, tokens=3, context=5, read=2) == 3 * (2000 + 320) + 400
    assert scoring_flops(D, R) == 12 * (2000 + 64 * 6) + 8 * 200
    # 2 prompts of 4 that see 2 on average and give one distribution each; 6 rows of 7 fed tokens that see 8.
    prefill, decode = 4 * (2000 + 64 * 2) + 200, 7 * (2000 + 64 * 8) + 7 * 200
    assert sampling_flops(D, prompts=2, rows=6, prompt=4, completion=8) == 2 * prefill + 6 * decode


def test_updates_by_hand():
    # 12 tokens of 6 positions on average, three forwards' worth of the layers and of the head at 8 positions.
    assert update_flops(D, R) == 3 * 12 * (2000 + 64 * 6) + 3 * 200 * 8
    assert update_flops(D, R, recomputed=1) == 4 * 12 * (2000 + 64 * 6) + 3 * 200 * 8
    # Matrices and head forward and back to the activations; attention's two products have two derivatives each.
    linear, attention = 12 * 2000 + 8 * 200, 12 * 64 * 6
    assert adapted_update_flops(D, R, adapters=10) == 2 * linear + 3 * attention + 6 * 10 * 12


def test_a_prompt_that_rows_share_counts_once():
    pair = replace(R, prompt_rows=2)
    prompt, own = 4 * (2000 + 64 * 2), 8 * (2000 + 64 * 8)
    assert scoring_flops(D, pair) == prompt / 2 + own + 8 * 200
    assert update_flops(D, pair, recomputed=1) == 4 * (prompt / 2 + own) + 3 * 200 * 8
    linear, attention = 10 * 2000 + 8 * 200, prompt / 2 + own - 10 * 2000
    assert adapted_update_flops(D, pair, adapters=10) == 2 * linear + 3 * attention + 6 * 10 * 10
    d = Decoder(layers=0, trunk_params=1.0, head_params=0, heads_width=1, kv_width=1)
    work = Work(
        RowTokens(10, 5, prompt_rows=5), prompts=1, rows=5, used=5, old_logps=True, teacher=True, reference=True
    )
    # log-probs of the policy and of the reference 7 positions each, under the teacher's own prompts 15
    uniform = iteration_flops(d, work, resolve_method(CreditSettings(method="uniform")))
    assert (uniform["score"], uniform["update"]) == (5 * 2 * (7 + 7 + 15), 5 * 3 * 2 * 7)
    shared = iteration_flops(d, work, resolve_method(CreditSettings(method="oar_g")))
    assert shared["score"] == 5 * 2 * (7 + 2 * 5 + 7 + 15)
    exact = resolve_method(CreditSettings(method="oar_p"))
    alone = replace(work, row=work.row.alone)
    assert iteration_flops(d, work, exact)["score"] == iteration_flops(d, alone, exact)["score"] - 5 * 2 * 8


def test_masking_by_hand():
    # Two buckets: 4 tokens with 8 positions of context 4 + 4, 2 with 4 of 4 + 6; a logit row each.
    exact = 4 * (8 * (2000 + 64 * 8) + 200) + 2 * (4 * (2000 + 64 * 10) + 200)
    assert masked_flops(D, R, share=1.0, buckets=2) == clean_flops(D, R) + exact
    assert masked_flops(D, R, share=0.5, buckets=2) == clean_flops(D, R) + exact / 2
    assert local_flops(D, R, window=1, answers=2, padded=True) == clean_flops(D, R) + 6 * (4 * (2000 + 64 * 16) + 200)
    # Two tokens see 4 + 3 on average, two answers all 12.
    assert local_flops(D, R, window=1, answers=2) == clean_flops(D, R) + 6 * (2 * 2448 + 2 * 2768 + 200)


def test_exact_suffixes_are_the_limit_of_many_buckets():
    row = RowTokens(prompt=40, completion=1000, reasoning=800)
    fine = masked_flops(D, row, share=1.0, buckets=4000)
    assert masked_flops(D, row, share=1.0) == pytest.approx(fine, rel=2e-3)
    d = Decoder(layers=0, trunk_params=1.0, head_params=0, heads_width=1, kv_width=1)
    own = clean_flops(d, row)
    again = (masked_flops(d, row, share=1.0, buckets=8) - own) / (masked_flops(d, row, share=1.0) - own)
    assert again == pytest.approx(662.5 / 600, rel=0.01)  # suffixes of 600 on average start half a bucket too early


def test_an_iteration_by_hand():
    """One parameter in the layers, no attention, no head: 2 per token and pass."""
    d = Decoder(layers=0, trunk_params=1.0, head_params=0, heads_width=1, kv_width=1)
    work = Work(RowTokens(10, 5), prompts=1, rows=4, used=2, epochs=2, old_logps=True, reference=True)
    found = iteration_flops(d, work, resolve_method(CreditSettings(method="uniform")))
    assert found == {"sample": 2 * (10 + 4 * 4), "score": 2 * 2 * (15 + 15), "update": 2 * 2 * 3 * 2 * 15}
    entropies = Work(RowTokens(10, 5), prompts=1, rows=4, used=2, measured=True)
    assert iteration_flops(d, entropies, resolve_method(CreditSettings(method="entropy")))["score"] == 2 * 2 * 15
    gradient = iteration_flops(d, work, resolve_method(CreditSettings(method="oar_g")))["score"]
    shared = Work(RowTokens(10, 5), prompts=1, rows=4, used=2, fused=True)
    assert iteration_flops(d, shared, resolve_method(CreditSettings(method="oar_g")))["score"] == 2 * 2 * 2 * 5
    assert gradient == 2 * 2 * (15 + 2 * 5 + 15)  # the clean pass serves old log-probs, the reference has its own


# Against programs -----------------------------------------------------------------------------------------------------

SMALL = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
LONG = RowTokens(prompt=5, completion=16, reasoning=12)


def executed(remat: Literal["none", "full"] = "none", **credit) -> float:
    """What scoring one row of LONG's lengths executes."""
    model = QwenConfig.from_hf(SMALL)
    policy = make_policy(model, remat=remat)
    tokens, place = jax.random.randint(jax.random.key(1), (1, 21), 1, 32), jnp.arange(16)[None]
    span = AnswerSpan(place < 12, place >= 12, jnp.ones(1, bool))
    made = jnp.ones((1, 16), bool)
    rollout = Rollout(tokens, jnp.ones((1, 21), bool), made, jnp.zeros((1, 16)), jnp.zeros((1, 16)), jnp.ones(1, bool))
    score = resolve_method(changed(CreditSettings(), credit)).scorer(policy, temperature=1.0, pad_id=0)
    params = init_params(model, jax.random.key(0), dtype=jnp.float32)
    keys = jax.random.split(jax.random.key(0), 1)
    return executed_flops(lambda p: score(p, rollout, span, keys, "answer_mean").importance, params)


CASES = [
    {"method": "oar_g"},
    {"method": "oar_g", "draws": 4},
    {"method": "oar_f", "fisher": {"outcomes": 3}},
    {"method": "oar_l", "masking": {"chunk": 1}, "local": {"window": 1, "answers": 4}},
    {"method": "permuted", "permuted_of": "oar_g"},
    {"method": "grail"},
]


@pytest.mark.parametrize("credit", CASES, ids=lambda c: "-".join(map(str, c.values()))[:20])
def test_what_programs_execute(credit):
    """Within 5%: attention is dense here where the count is causal, 1.2% of these sizes, more in derivatives."""
    cfg = changed(CreditSettings(), credit)
    d = decoder_of(QwenConfig.from_hf(SMALL))
    expected = resolve_method(cfg).forwards(LONG, d) * clean_flops(d, LONG)
    assert executed(**credit) == pytest.approx(expected, rel=0.05)


def test_what_masking_executes():
    """Within 5% of the count in buckets, whose limit of many buckets is the model's count; that is less."""
    cfg = CreditSettings(method="oar_p", masking=MaskingSettings(chunk=1, buckets=4))
    d = decoder_of(QwenConfig.from_hf(SMALL))
    found = executed(method="oar_p", masking={"chunk": 1, "buckets": 4})
    assert found == pytest.approx(masked_flops(d, LONG, share=1.0, buckets=4), rel=0.05)
    model = resolve_method(cfg).forwards(LONG, d)
    # 12 tokens, 15 to 4 inputs from each on: 114 positions beside the clean pass over 21, and hardly any head.
    assert model == pytest.approx((21 + 114) / 21, rel=0.01)
    assert model * clean_flops(d, LONG) < found


def test_screening_adds_up():
    d = decoder_of(QwenConfig.from_hf(SMALL))
    exact = masked_flops(d, LONG, share=0.2) / clean_flops(d, LONG)
    for by, estimate in (("random", 1), ("oar_l", None), ("oar_f", None), ("oar_g", None)):
        cfg = CreditSettings(method="oar_screened", screen=ScreenSettings(by=by))
        estimate = estimate or resolve_method(replace(cfg, method=by)).forwards(LONG, d)
        shared = 1 if by in ("random", "oar_l") else 0  # the clean pass
        assert resolve_method(cfg).forwards(LONG, d) == pytest.approx(exact + estimate - shared)


@pytest.mark.slow
def test_what_programs_execute_again():
    """Within 5% with remat full: the layers' forward again, but for each layer's last product, which nothing reads."""
    d = decoder_of(QwenConfig.from_hf(SMALL))
    last = 2.0 * SMALL["num_hidden_layers"] * SMALL["hidden_size"] * SMALL["intermediate_size"] * LONG.completion
    for credit, flops in (
        ({"method": "oar_f"}, fisher_flops(d, LONG, outcomes=4, recomputed=1) - last),
        ({"method": "oar_g"}, gradient_flops(d, LONG, draws=1, recomputed=1) - 2 * last),  # a push and a pull
    ):
        assert executed("full", **credit) == pytest.approx(flops, rel=0.05), credit


@pytest.mark.parametrize("name", ["demo", "qwen2.5-7b_v5p-32"])
@pytest.mark.parametrize(
    "changes", [["update.fused=never"], ["credit.method=oar_p", "update.epochs=2", "loss.kl_beta=0.1"]]
)
def test_metrics_and_plan_count_alike(name, changes):
    """The step of a plan, whose score and update are two passes, and metrics of the same lengths: within 1%."""
    cfg = load_config(ROOT / "configs" / f"{name}.yaml", changes)
    sizes = SMALL if cfg.policy.path.startswith("builtin") else PUBLISHED[cfg.policy.path]
    model, s = QwenConfig.from_hf(sizes), shapes_of(cfg)
    metrics = {
        "groups_drawn": float(s.prompts),
        "prompt_tokens": float(s.rows * s.prompt),
        "completion_tokens": float(s.rows * s.completion),
        "reasoning_length": float(max(s.completion - ANSWER, 0)),
        "rows_used": float(s.rows),
    }
    minibatches, updates = cfg.update.minibatches, cfg.update.minibatches * cfg.update.epochs
    planned = {"reshard": 1, "sample": 1, "score": minibatches, "update": updates}
    step = sum(times * model_flops(phase, model, cfg) for phase, times in planned.items())
    assert Meter(cfg, model, resolve_method(cfg.credit), 1.0).flops(metrics) == pytest.approx(step, rel=0.01)
