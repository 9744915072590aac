"""Live against transformers on torch (extra parity), and how the golden files in tests/golden/policy were made.

``python tests/models/test_parity.py FOLDER`` writes them again: one checkpoint per kind of model with random weights
(norms not 1, biases not 0, matrices large enough that logits spread over several nats), 2 rows of ids and the
float32 logits that transformers gives with eager attention.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
QWEN2 = {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MOE = {
    **SMALL,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "rope_theta": 1e6,
    "moe_intermediate_size": 20,
}
DELTA = {
    **SMALL,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "rms_norm_eps": 1e-4,  # narrow heads are now and then almost 0: 1e-6 would show the rounding in them
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
MOE_DELTA = {
    **{name: value for name, value in DELTA.items() if name != "intermediate_size"},
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "rms_norm_eps": 1e-2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
}
NEXT = {**DELTA, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "rms_norm_eps": 1e-2}
KINDS = {
    "qwen2_tied": {**QWEN2, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen2_untied": {
        **QWEN2,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
    },
    "qwen2_yarn": {**QWEN2, "tie_word_embeddings": True, "rope_theta": 1e4, "rope_scaling": YARN},
    "qwen3_tied": {**QWEN3, "tie_word_embeddings": True, "head_dim": 12, "rope_theta": 1e6},
    "qwen3_untied": {
        **QWEN3,
        "tie_word_embeddings": False,
        "head_dim": 10,
        "attention_bias": True,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_theta": 1e4, "beta_fast": 8.0, "truncate": False, "mscale": 0.7, **YARN}
        | {"mscale_all_dim": 0.4},
    },
    "moe_untied": {
        **MOE,
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "moe_tied": {
        **MOE,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "delta_untied": {**DELTA, "tie_word_embeddings": False, "num_hidden_layers": 6},
    "delta_tied": {
        **DELTA,
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "num_key_value_heads": 1,
    },
    "moe_delta_untied": {
        **MOE_DELTA,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "moe_delta_tied": {
        **MOE_DELTA,
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "shared_expert_intermediate_size": 28,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "next_untied": {
        **NEXT,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "next_tied": {
        **NEXT,
        "tie_word_embeddings": True,
        "num_hidden_layers": 5,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
}


def torch_model(fields: dict, seed: int):
    """A transformers model with random weights: normal matrices, norms that multiply by about 1, biases around 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(json.dumps(fields)))
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=random)
            if "norm" in name:
                centred = "linear_num_key_heads" in fields and "linear_attn" not in name  # times 1 + w
                tensor.copy_(0.2 * noise + (not centred))
            else:
                tensor.copy_(noise * (0.3 if "bias" in name else 0.6 if "conv1d" in name else 0.25))
    return model


def torch_logits(model, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


def make_golden(folder: Path) -> None:
    """Write the golden files."""
    for seed, (kind, fields) in enumerate(KINDS.items()):
        model = torch_model(fields, seed)
        ids = np.random.default_rng(seed).integers(0, SMALL["vocab_size"], (2, 40), dtype=np.int32)
        model.save_pretrained(folder / kind)  # under the names of a checkpoint
        (folder / kind / "generation_config.json").unlink(missing_ok=True)
        (folder / kind / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
        np.savez_compressed(folder / kind / "golden.npz", ids=ids, logits=torch_logits(model, ids))


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra parity)")


WITH_GRADIENTS = ("moe_tied", "qwen2_untied", "qwen3_untied", "moe_delta_tied", "next_untied")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("delta_tied", *WITH_GRADIENTS)])
def test_logits_equal_transformers(kind, torch, tmp_path, highest_precision):
    """Other seeds and ids than the golden files', through save_pretrained and our loader; delta_tied: see vision.

    Other kinds' logits come with their gradients, below.
    """
    model = torch_model(KINDS[kind], seed=100)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(7).integers(0, 64, (2, 30), dtype=np.int32)
    np.testing.assert_allclose(our_logits(tmp_path, ids), torch_logits(model, ids), atol=1e-4, rtol=0)


@pytest.fixture
def all_in_float64(torch, x64, monkeypatch):
    """What transformers casts to float32 becomes float64 too."""
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


IN_LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in WITH_GRADIENTS[1:]]


@pytest.mark.parametrize("kind", [WITH_GRADIENTS[0], *IN_LONG])
def test_logits_and_gradients_equal_transformers(kind, torch, tmp_path, highest_precision, request):
    """Of the mean log-probability of the next token, by every tensor of a checkpoint; the balance loss of experts too.

    In float64 with delta nets: keys of small length, normalised, show the rounding of float32 in the third digit.
    """
    import jax
    import jax.numpy as jnp

    from oarjax.data.hf import load_params, read_config
    from oarjax.models.moe import balance_loss
    from oarjax.models.policy import positions_of
    from oarjax.models.qwen import make_policy

    model = torch_model(KINDS[kind], seed=101)
    model.save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(8).integers(0, 64, (2, 20), dtype=np.int32)
    dtype, single = jnp.dtype(jnp.float32), torch.float32
    if "linear_num_key_heads" in KINDS[kind]:
        request.getfixturevalue("all_in_float64")
        dtype, model = jnp.dtype(jnp.float64), model.double()
    targets, routed = torch.tensor(ids[:, 1:, None], dtype=torch.long), "num_experts" in KINDS[kind]
    more = {"output_router_logits": True} if routed else {}
    out = model(torch.tensor(ids[:, :-1], dtype=torch.long), **more)
    total = torch.log_softmax(out.logits, -1).gather(-1, targets).mean()
    (total + 0.1 * out.aux_loss if routed else total).backward()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.grad)
    model.to(single).save_pretrained(tmp_path / "gradients")  # under the names of a checkpoint
    cfg, folder = read_config(tmp_path / "model")
    policy = make_policy(cfg, remat="none", compute_dtype=dtype)

    def loss(params):
        valid = jnp.ones((2, 19), bool)
        rows = params, policy.embed(params, ids[:, :-1]), positions_of(valid), valid
        (hidden, _, routing) = policy.routed(*rows) if routed else (*policy.trunk(*rows), None)
        logits = policy.unembed(params, hidden)
        balance = balance_loss(routing) if routed else jnp.zeros(())
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], -1)
        return chosen.mean() + 0.1 * balance, (balance, logits)

    ids = jnp.asarray(ids)
    params = jax.tree.map(lambda x: x.astype(dtype), load_params(folder, cfg))
    found, (balance, logits) = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), atol=1e-4, rtol=0)
    if routed:
        assert float(balance) == pytest.approx(float(out.aux_loss), rel=1e-5)
    want = load_params(tmp_path / "gradients", cfg)
    assert all(float(jnp.abs(g).max()) > 1e-5 for g in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), found, want)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2_tied", "float32"),
        ("qwen3_untied", "bfloat16"),
        ("moe_untied", "float32"),
        ("delta_untied", "float32"),
        ("moe_delta_untied", "float32"),
        ("next_untied", "bfloat16"),
    ],
)
def test_transformers_loads_our_export(kind, dtype, torch, tmp_path, data):
    """Sharded export, read back by transformers: the same tensors bit for bit, and the same logits."""
    import jax.numpy as jnp
    from transformers import AutoModelForCausalLM

    from oarjax.data.hf import export, load_params, read_config

    cfg, source = read_config(data / "policy" / kind)
    params = load_params(source, cfg, dtype=jnp.dtype(dtype))
    folder = export(tmp_path / "out", cfg, params, source=source, shard_bytes=20_000, stop_ids=(3, 5))
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")  # dtype as config.json says
    assert theirs.dtype == getattr(torch, dtype)
    assert theirs.generation_config.eos_token_id == [3, 5]
    original = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), attn_implementation="eager")
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, original(ids).logits)
    assert (folder / "model.safetensors.index.json").is_file()


def vision_model(kind: str, text: dict):
    """A transformers model of text and vision with random weights; its text part has the fields ``text``."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0]} if kind == "qwen3_vl" else {}
    text = {k: v for k, v in text.items() if k != "architectures"}
    fields = {"text_config": text, "vision_config": vision, "tie_word_embeddings": text["tie_word_embeddings"]}
    config = AutoConfig.for_model(kind, **json.loads(json.dumps(fields)))
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForImageTextToText.from_config(config, **options).eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=random))
    return model


@pytest.mark.parametrize(("kind", "text"), [("qwen3_5", "delta_tied"), ("qwen3_5_moe", "moe_delta_tied")])
def test_the_text_of_a_vision_model_trains_and_the_rest_is_kept(kind, text, torch, tmp_path, highest_precision):
    """Logits and export of a folder with vision and multi-token prediction, which transformers reads back.

    The published mixtures hold the experts of a layer packed, as transformers holds them in memory.
    """
    import jax.numpy as jnp
    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForImageTextToText

    from oarjax.data.hf import export, load_params, read_config

    model = vision_model(kind, KINDS[text])
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    if kind == "qwen3_5_moe":
        packed = {name: x.numpy() for name, x in model.state_dict().items() if ".mlp.experts." in name}
        assert {name.rpartition(".")[2] for name in packed} == {"gate_up_proj", "down_proj"}
        stored = packed | {name: x for name, x in stored.items() if ".mlp.experts." not in name}
    stored |= {"mtp.fc.weight": np.arange(6, dtype=np.float16).reshape(2, 3)}
    save_file(stored, file, metadata={"format": "pt"})

    ids = np.random.default_rng(7).integers(0, 64, (2, 30), dtype=np.int32)
    np.testing.assert_allclose(our_logits(tmp_path / "model", ids), torch_logits(model, ids), atol=1e-4, rtol=0)
    cfg, folder = read_config(tmp_path / "model")
    out = export(tmp_path / "out", cfg, load_params(folder, cfg), source=folder, dtype=jnp.bfloat16, shard_bytes=9000)
    written = {name: x for shard in out.glob("*.safetensors") for name, x in load_file(shard).items()}
    assert written.keys() == stored.keys()
    beside = [name for name in stored if name.startswith(("model.visual.", "mtp."))]
    assert len(beside) > 10
    for name in beside:
        assert (written[name].dtype, written[name].tobytes()) == (stored[name].dtype, stored[name].tobytes())
    theirs = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    original = {name: x.bfloat16().float() for name, x in model.state_dict().items() if ".visual." not in name}
    assert all(torch.equal(x, theirs.state_dict()[name]) for name, x in original.items())


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_of_a_qwen3_vl_is_exported_as_a_qwen3(tied, torch, tmp_path, highest_precision):
    """Vision tensors are passed over by name; what is exported holds none, and AutoModelForCausalLM reads it."""
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    from oarjax.data.hf import export, load_params, read_config

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [3, 2, 1], "mrope_interleaved": True}
    text = {
        **QWEN3,
        "model_type": "qwen3_vl_text",
        "head_dim": 12,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
    }
    model = vision_model("qwen3_vl", text)
    model.save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(9).integers(0, 64, (2, 30), dtype=np.int32)
    want = torch_logits(model, ids)
    np.testing.assert_allclose(our_logits(tmp_path / "model", ids), want, atol=1e-4, rtol=0)
    cfg, folder = read_config(tmp_path / "model")
    params = load_params(folder, cfg)
    out = export(tmp_path / "out", cfg, params, source=folder)
    assert any(".visual." in name for name in load_file(folder / "model.safetensors"))
    assert not any("visual" in name or "language_model" in name for name in load_file(out / "model.safetensors"))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    np.testing.assert_allclose(torch_logits(theirs, ids), want, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(our_logits(out, ids), our_logits(folder, ids))


def our_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    import jax
    import jax.numpy as jnp

    from oarjax.data.hf import load_params, read_config
    from oarjax.models.policy import positions_of
    from oarjax.models.qwen import make_policy

    cfg, folder = read_config(folder)
    policy = make_policy(cfg, remat="none")
    params = load_params(folder, cfg, dtype=jnp.float32)
    valid = jnp.ones(ids.shape, bool)

    @jax.jit
    def logits(params, ids):
        hidden, _ = policy.trunk(params, policy.embed(params, ids), positions_of(valid), valid)
        return policy.unembed(params, hidden)

    return np.asarray(logits(params, jnp.asarray(ids)))


if __name__ == "__main__":
    make_golden(Path(sys.argv[1]))
