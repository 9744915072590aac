"""The policy against transformers' golden logits, and against itself: padding, cache, prefix, remat, dtypes."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import init

from oarjax.data.hf import load_params, read_config
from oarjax.models.policy import Policy, positions_of
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import Experts, QwenConfig, UnsupportedModel
from oarjax.rollout.check_policy import check_policy

KINDS = ["qwen2_tied", "qwen2_untied", "qwen2_yarn", "qwen3_tied", "qwen3_untied", "moe_untied", "delta_untied"]
KINDS += ["moe_delta_untied", "next_untied"]
TINY = QwenConfig(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=False,
    qkv_bias=True,
    o_bias=False,
    qk_norm=True,
    initializer_range=0.3,
)


def logits_of(policy: Policy, params, ids, valid):
    @jax.jit
    def forward(params, ids, valid):
        hidden, cache = policy.trunk(params, policy.embed(params, ids), positions_of(valid), valid)
        assert cache is None
        return policy.unembed(params, hidden)

    return forward(params, jnp.asarray(ids), jnp.asarray(valid))


def golden(folder, dtype, compute=None):
    cfg, folder = read_config(folder)
    return make_policy(cfg, compute_dtype=compute or dtype, remat="none"), load_params(folder, cfg, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_golden(kind, data, highest_precision):
    """In float64, to the rounding of the golden float32; in float32, no further from that than the golden ones are.

    Float32 against float32 has no bound that holds on every CPU: the delta net's golden logits are 7e-5 from ours in
    float64, and ours in float32 are 3e-5 to 8e-5 from it on the other side, by the order in which a machine adds. 40
    positions: beyond the 16 that YaRN stretches from.
    """
    want = np.load(data / "policy" / kind / "golden.npz")
    assert want["logits"].std() > 0.5  # the comparison means something

    def logits(dtype):
        policy, params = golden(data / "policy" / kind, dtype)
        return np.asarray(logits_of(policy, params, want["ids"], np.ones(want["ids"].shape, bool)), np.float64)

    with jax.enable_x64(True):
        exact = logits(jnp.float64)
    rounding = np.abs(want["logits"] - exact).max()
    assert rounding < 1e-4
    np.testing.assert_allclose(logits(jnp.float32), exact, atol=min(3 * rounding, 1e-4), rtol=0)


@pytest.mark.parametrize("case", [0, 2, 4])
def test_oar_models_in_float64(case, data, x64):
    """The published models of the OAR cases, whose float64 logits are known to 3e-14."""
    folder = data / "oar" / f"case{case}"
    want = np.load(folder / "arrays.npz")
    policy, params = golden(folder / "model", jnp.float64)
    got = logits_of(policy, params, want["ids_full"][None], np.ones((1, len(want["ids_full"])), bool))
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got[0], want["clean_logits_f64"], atol=1e-10, rtol=0)


def test_oar_model_in_float32(data, highest_precision):
    folder = data / "oar" / "case2"
    want = np.load(folder / "arrays.npz")
    policy, params = golden(folder / "model", jnp.float32)
    got = logits_of(policy, params, want["ids_full"][None], np.ones((1, len(want["ids_full"])), bool))
    np.testing.assert_allclose(got[0], want["clean_logits_f32"], atol=1e-4, rtol=0)


def test_bfloat16_is_near_float32(data):
    """bf16 operands, float32 everything else: logits of spread ~2 move by about a percent of it."""
    want = np.load(data / "policy" / "qwen3_tied" / "golden.npz")
    policy, params = golden(data / "policy" / "qwen3_tied", jnp.float32, compute=jnp.bfloat16)
    got = logits_of(policy, params, want["ids"], np.ones(want["ids"].shape, bool))
    assert got.dtype == jnp.float32
    assert policy.embed(params, jnp.asarray(want["ids"])).dtype == jnp.float32
    assert policy.init_cache(2, 3).k.dtype == jnp.bfloat16
    error = np.abs(got - want["logits"])
    assert 0 < np.median(error) < 0.03 * want["logits"].std()


@pytest.fixture(scope="module")
def tiny():
    """2 prompts of 5 (one left-padded by 2), 3 completions of 4 each, and the teacher-forced hidden states."""
    params = init(TINY, jax.random.key(0))
    policy = make_policy(TINY, remat="none")
    prompt = jax.random.randint(jax.random.key(1), (2, 5), 0, 31, jnp.int32)
    prompt_valid = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    completion = jax.random.randint(jax.random.key(2), (6, 4), 0, 31, jnp.int32)
    tokens = jnp.concatenate([jnp.repeat(prompt, 3, 0), completion], 1)
    valid = jnp.concatenate([jnp.repeat(prompt_valid, 3, 0), jnp.ones((6, 4), bool)], 1)
    trunk = jax.jit(policy.trunk)
    positions = positions_of(valid)
    hidden = trunk(params, policy.embed(params, tokens), positions, valid)[0]
    return SimpleNamespace(**locals())


def test_its_functions_agree(tiny):
    check_policy(tiny.policy, tiny.params, vocab_size=TINY.vocab_size, tolerance=1e-5)


def test_left_padding_changes_no_real_token(tiny):
    row, real = 0, np.asarray(tiny.valid[0])
    bare = tiny.trunk(
        tiny.params,
        tiny.policy.embed(tiny.params, tiny.tokens[row : row + 1, real]),
        tiny.positions[row : row + 1, real],
        jnp.ones((1, int(real.sum())), bool),
    )[0]
    np.testing.assert_allclose(tiny.hidden[row, real], bare[0], atol=1e-5)


def test_what_invalid_tokens_hold_changes_nothing(tiny):
    other = jnp.where(tiny.valid, tiny.tokens, (tiny.tokens + 7) % 31)
    assert (other != tiny.tokens).any()
    hidden = tiny.trunk(tiny.params, tiny.policy.embed(tiny.params, other), tiny.positions, tiny.valid)[0]
    real = np.asarray(tiny.valid)
    np.testing.assert_array_equal(hidden[real], tiny.hidden[real])
    assert np.isfinite(hidden).all()  # also at padding, which attends to nothing


def test_later_tokens_change_nothing_before_them(tiny):
    other = tiny.tokens.at[:, -1].add(1) % 31
    hidden = tiny.trunk(tiny.params, tiny.policy.embed(tiny.params, other), tiny.positions, tiny.valid)[0]
    np.testing.assert_array_equal(hidden[:, :-1], tiny.hidden[:, :-1])
    assert np.abs(hidden[:, -1] - tiny.hidden[:, -1]).max() > 0.01


def prefill(tiny):
    embeddings = tiny.policy.embed(tiny.params, tiny.prompt)
    cache = tiny.policy.init_cache(2, 5)
    return tiny.trunk(tiny.params, embeddings, positions_of(tiny.prompt_valid), tiny.prompt_valid, cache=cache)


def test_prefill_equals_teacher_forcing(tiny):
    hidden, cache = prefill(tiny)
    real = np.asarray(tiny.prompt_valid)
    np.testing.assert_allclose(hidden[real], tiny.hidden[::3, :5][real], atol=1e-5)
    assert int(cache.length) == 5
    np.testing.assert_array_equal(cache.valid, tiny.prompt_valid)


def test_slots_beyond_length_are_not_read(tiny):
    """A cache wound back by its length alone: stale slots, marked valid, stay unseen."""
    prefix = prefill(tiny)[1]
    embeddings = tiny.policy.embed(tiny.params, tiny.completion[:, :1])
    where = (tiny.positions[:, 5:6], jnp.ones((6, 1), bool))
    stale = tiny.policy.init_cache(6, 7)
    stale = stale.replace(k=stale.k + 3, v=stale.v + 3, valid=jnp.ones_like(stale.valid))
    hidden, _ = tiny.trunk(tiny.params, embeddings, *where, cache=stale, prefix=prefix)
    np.testing.assert_allclose(hidden, tiny.hidden[:, 5:6], atol=1e-5)


def test_an_invalid_decoded_token_is_not_attended_to(tiny):
    """A row that has ended keeps decoding pads: its neighbours and its cache do not notice."""
    prefix = prefill(tiny)[1]
    cache = tiny.policy.init_cache(6, 7)
    embeddings = tiny.policy.embed(tiny.params, tiny.completion[:, :1])
    _, cache = tiny.trunk(
        tiny.params, embeddings + 1, tiny.positions[:, 5:6], jnp.zeros((6, 1), bool), cache=cache, prefix=prefix
    )
    hidden, _ = tiny.trunk(
        tiny.params, embeddings, tiny.positions[:, 5:6], jnp.ones((6, 1), bool), cache=cache, prefix=prefix
    )
    np.testing.assert_allclose(hidden, tiny.hidden[:, 5:6], atol=1e-5)


def test_what_is_recomputed_or_unrolled_gives_the_same_gradients(tiny):
    def gradient(**options):
        policy = make_policy(TINY, **options)

        def loss(params):
            hidden, _ = policy.trunk(params, policy.embed(params, tiny.tokens), tiny.positions, tiny.valid)
            return (jax.nn.log_softmax(policy.unembed(params, hidden))[..., 3] * tiny.valid).mean()

        return jax.jit(jax.grad(loss))(tiny.params)

    none = gradient(remat="none")
    assert all(np.abs(leaf).max() > 0 for path, leaf in jax.tree.leaves_with_path(none) if "'k'" not in str(path))
    others = [{"remat": remat} for remat in ("dots", "projections", "attention", "full")]
    others += [{"remat": "attention", "unroll": 2}, {"remat": "none", "unroll": 5}]  # of three layers
    for options in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), none, gradient(**options))


def test_remat_policies_save_less(tiny):
    """What the backward pass is handed shrinks from none to full."""

    def saved(remat):
        policy = make_policy(TINY, remat=remat)

        def loss(params):
            return policy.trunk(params, policy.embed(params, tiny.tokens), tiny.positions, tiny.valid)[0].sum()

        residuals = jax.eval_shape(lambda p: jax.tree.leaves(jax.vjp(loss, p)[1]), tiny.params)
        return sum(r.size for r in residuals)

    sizes = [saved(remat) for remat in ("none", "dots", "projections", "attention", "full")]
    assert all(more > less for more, less in pairwise(sizes))


QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 64,
}
QWEN2 = {**QWEN3, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2}


DELTA = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
DELTA |= {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
DELTA |= {"linear_value_head_dim": 4, "linear_conv_kernel_dim": 4}
MIXED = {**DELTA, **MOE, "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
MIXED |= {"shared_expert_intermediate_size": 6}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 128}, "num_experts = 128: experts in a qwen3 are not supported"),
        (MOE | {"num_experts": None}, "field num_experts is missing"),
        (MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok = 5: expected 1 to num_experts = 4"),
        (MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]: dense layers among those with experts"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: dense layers"),
        *(
            (
                {"model_type": kind},
                f"model_type = '{kind}': this architecture is not supported; supported are .*qwen3_moe",
            )
            for kind in ("llama", "gemma3_text", "qwen4_exp", "qwen3_vl_moe", "qwen2_moe")
        ),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "expected Qwen3ForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .*quantised weights"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only silu"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, r"layer_types = \['sliding_attention'\]"),
        (
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
            r"window of 16 would act on layers 2\.\.3; set use_sliding_window to false",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic': only default and yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: in this family only whole"),
        ({"rope_theta": None}, "rope_theta is missing, at top level and in rope_parameters"),
        ({"head_dim": None}, "field head_dim is missing"),
        ({"head_dim": 5}, "head_dim = 5: rotary"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: it does not divide num_attention_heads = 4"),
        ({"num_key_value_heads": None}, "field num_key_value_heads is missing"),
        ({"rms_norm_eps": None}, "field rms_norm_eps is missing"),
        ({"model_type": None}, "field model_type is missing"),
        (
            DELTA | {"layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"]},
            "in every n-th layer",
        ),
        (DELTA | {"full_attention_interval": 5}, "full_attention_interval = 5: expected 2 to num_hidden_layers = 4"),
        (DELTA | {"head_dim": 4}, "partial_rotary_factor = 0.25: rotary embedding turns pairs"),
        (DELTA | {"linear_num_key_heads": 3}, "linear_num_key_heads = 3: it does not divide"),
        (DELTA | {"linear_conv_kernel_dim": None}, "field linear_conv_kernel_dim is missing"),
        ({"model_type": "qwen3_5", "architectures": None, "num_hidden_layers": None}, "field text_config is missing"),
        ({"model_type": "qwen3_vl", "architectures": None, "num_hidden_layers": None}, "field text_config is missing"),
        (MIXED | {"shared_expert_intermediate_size": None}, "field shared_expert_intermediate_size is missing"),
        (MIXED | {"num_experts": None}, "field num_experts is missing"),
        (MIXED | {"model_type": "qwen3_next", "architectures": None, "mlp_only_layers": [1]}, "dense layers among"),
        (DELTA | {"num_experts": 4}, "num_experts = 4: experts in a qwen3_5_text are not supported"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        QwenConfig.from_hf(QWEN3 | change)


@pytest.mark.parametrize("listed", [{}, {"layer_types": ["full_attention"] * 4}])
def test_a_sliding_window_of_a_mixture_acts_on_every_layer(listed):
    """Transformers' Qwen3 MoE reads neither max_window_layers nor layer_types."""
    moe = QWEN3 | {"model_type": "qwen3_moe", "architectures": None, "num_experts": 4, "num_experts_per_tok": 2}
    moe |= {"moe_intermediate_size": 8, "sliding_window": 16, "max_window_layers": 4, **listed}
    assert QwenConfig.from_hf(moe | {"use_sliding_window": False}).experts
    assert QwenConfig.from_hf(moe | {"use_sliding_window": True, "sliding_window": None}).experts
    with pytest.raises(UnsupportedModel, match="window of 16 would act on all 4 layers"):
        QwenConfig.from_hf(moe | {"use_sliding_window": True})


def test_idle_sliding_window_is_accepted():
    """Qwen2.5 ships sliding_window and max_window_layers with the window switched off, or acting on no layer."""
    off = QwenConfig.from_hf({**QWEN2, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2})
    none = QwenConfig.from_hf({**QWEN2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4})
    listed = QwenConfig.from_hf({**QWEN2, "layer_types": ["full_attention"] * 4})
    assert off == none == listed


def test_biases_norms_and_head_dim():
    two = QwenConfig.from_hf({k: v for k, v in QWEN2.items() if k != "head_dim"} | {"attention_bias": False})
    assert (two.qkv_bias, two.o_bias, two.qk_norm, two.head_dim) == (True, False, False, 2)
    three = QwenConfig.from_hf(QWEN3)
    assert (three.qkv_bias, three.o_bias, three.qk_norm, three.head_dim) == (False, False, True, 4)
    biased = QwenConfig.from_hf({**QWEN3, "attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_the_text_part_of_a_vision_config():
    """Sizes from text_config, the tied head from above it, the pattern by interval or by list."""
    text = QwenConfig.from_hf({**QWEN3, **DELTA})
    assert (text.attention_layers, text.delta_layers, text.rotary_dim, text.prefix) == ((3,), (0, 1, 2), 2, "model.")
    listed = {**QWEN3, **DELTA, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    assert QwenConfig.from_hf(listed) == text
    whole = {"model_type": "qwen3_5", "text_config": listed, "tie_word_embeddings": True, "vision_config": {}}
    outer = QwenConfig.from_hf(whole)
    assert outer == replace(text, tie_word_embeddings=True, prefix="model.language_model.")


def test_experts_under_either_name():
    """transformers 5 writes num_local_experts; one expert's width is the config's own field."""
    cfg = QwenConfig.from_hf({**QWEN3, **MOE})
    assert (cfg.experts, cfg.intermediate_size) == (Experts(count=4, per_token=2, normalised=False), 8)
    renamed = {k: v for k, v in {**QWEN3, **MOE, "num_local_experts": 4}.items() if k != "num_experts"}
    assert QwenConfig.from_hf(renamed) == cfg


def test_rope_theta_in_either_place():
    inside = {k: v for k, v in QWEN3.items() if k != "rope_theta"} | {"rope_parameters": {"rope_theta": 1000000}}
    assert QwenConfig.from_hf(inside) == QwenConfig.from_hf(QWEN3)


def test_yarn_defaults():
    """original length from max_position_embeddings; attention factor 0.1 ln 4 + 1 = 1.13863."""
    yarn = QwenConfig.from_hf({**QWEN3, "rope_scaling": {"type": "yarn", "factor": 4}}).yarn
    assert yarn is not None
    assert yarn.original_max_position == 64
    assert yarn.attention_factor == pytest.approx(1.138629436)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)


def test_golden_configs_are_of_their_kind(data):
    kinds = {k: QwenConfig.from_hf(json.loads((data / "policy" / k / "config.json").read_text())) for k in KINDS}
    assert {k for k, c in kinds.items() if c.tie_word_embeddings} == {"qwen2_tied", "qwen2_yarn", "qwen3_tied"}
    assert {k for k, c in kinds.items() if c.yarn} == {"qwen2_yarn", "qwen3_untied"}
    assert all(c.head_dim != c.hidden_size // c.num_attention_heads for k, c in kinds.items() if "qwen3" in k)
