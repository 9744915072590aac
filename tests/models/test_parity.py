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
}


def torch_model(fields: dict, seed: int):
    """A transformers model with random weights: normal matrices, norms around 1, biases around 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(json.dumps(fields)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=random)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else noise * (0.3 if "bias" in name else 0.25))
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


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind, torch, tmp_path, highest_precision):
    """Other seeds and ids than the golden files', through save_pretrained and our loader."""
    model = torch_model(KINDS[kind], seed=100)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(7).integers(0, 64, (2, 30), dtype=np.int32)
    np.testing.assert_allclose(our_logits(tmp_path, ids), torch_logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["moe_tied"])
def test_gradients_equal_transformers(kind, torch, tmp_path, highest_precision):
    """Of the mean log-probability of the next token, by every tensor of the checkpoint."""
    import jax
    import jax.numpy as jnp

    from oarjax.data.hf import load_params, read_config
    from oarjax.models.policy import positions_of
    from oarjax.models.qwen import make_policy

    model = torch_model(KINDS[kind], seed=101)
    model.save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(8).integers(0, 64, (2, 20), dtype=np.int32)
    targets = torch.tensor(ids[:, 1:, None], dtype=torch.long)
    torch.log_softmax(model(torch.tensor(ids[:, :-1], dtype=torch.long)).logits, -1).gather(
        -1, targets
    ).mean().backward()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.grad)
    model.save_pretrained(tmp_path / "gradients")  # under the names of a checkpoint
    cfg, folder = read_config(tmp_path / "model")
    policy = make_policy(cfg, remat="none")

    def loss(params):
        valid = jnp.ones((2, 19), bool)
        hidden, _ = policy.trunk(params, policy.embed(params, ids[:, :-1]), positions_of(valid), valid)
        logps = jax.nn.log_softmax(policy.unembed(params, hidden))
        return jnp.take_along_axis(logps, ids[:, 1:, None], -1).mean()

    ids = jnp.asarray(ids)
    found = jax.jit(jax.grad(loss))(load_params(folder, cfg))
    want = load_params(tmp_path / "gradients", cfg)
    assert all(float(jnp.abs(g).max()) > 1e-5 for g in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), found, want)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen2_tied", "float32"), ("qwen3_untied", "bfloat16"), ("moe_untied", "float32")]
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
