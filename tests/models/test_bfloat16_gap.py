"""How far bfloat16 matmuls move the log-probs of each family: the table in docs/models.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.rollout.logps import token_logps

KINDS = {"qwen2_untied": 0.02, "qwen3_untied": 0.02, "moe_untied": 0.1, "delta_untied": 0.1}
KINDS |= {"moe_delta_untied": 0.1, "next_untied": 0.1}
"""Checkpoint -> bound on the mean difference, in nats: amplified random weights, far from a trained model's."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mean_difference_of_log_probs(kind, data):
    cfg, folder = read_config(data / "policy" / kind)
    params, ids = load_params(folder, cfg), jnp.asarray(np.load(folder / "golden.npz")["ids"])

    @jax.jit
    def gaps(params, ids):
        valid = jnp.ones(ids.shape, bool)
        settings = {"completion_length": ids.shape[1] - 1, "temperature": 1.0, "head_chunk": 512}
        policies = [make_policy(cfg, remat="none", compute_dtype=dtype) for dtype in ("float32", "bfloat16")]
        exact, rounded = (token_logps(policy, params, ids, valid, **settings)[0] for policy in policies)
        return jnp.abs(exact - rounded)

    found = np.asarray(gaps(params, ids))
    print(f"{kind}: mean {found.mean():.4f}, 99% {np.quantile(found, 0.99):.4f}, max {found.max():.4f} nats")
    assert 0 < found.mean() < KINDS[kind]
