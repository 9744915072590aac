"""A tiny policy with gated delta nets: two of them, attention, and two more that fill no block."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from tiny import init

from oarjax.models.policy import Policy
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import DeltaSizes, QwenConfig
from oarjax.types import Params

VOCAB = 31
MODEL = QwenConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-3,  # narrow heads are now and then almost 0: 1e-6 would show the rounding in them
    rope_theta=1e4,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    qk_norm=True,
    initializer_range=0.3,
    delta=DeltaSizes(interval=3, key_heads=1, value_heads=2, key_dim=4, value_dim=6, taps=4),
    rotary_dim=2,
)


@functools.cache
def delta_policy(dtype: str = "float32") -> tuple[Policy, Params]:
    params = init(MODEL, jax.random.key(0), dtype=jnp.dtype(dtype))
    return make_policy(MODEL, remat="none", compute_dtype=jnp.dtype(dtype)), params
