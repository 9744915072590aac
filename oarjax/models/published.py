"""Sizes of published checkpoints, as their config.json states them, for planning without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QWEN2: Mapping[str, Any] = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "head_dim": 128,
    "attention_bias": False,
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SMALL = {"tie_word_embeddings": True, "vocab_size": 151936}
HALF = {**QWEN2, **_sizes(896, 4864, 24, 14, 2), **SMALL}
ONE_AND_HALF = {**QWEN2, **_sizes(1536, 8960, 28, 12, 2), **SMALL}
SEVEN = {**QWEN2, **_sizes(3584, 18944, 28, 28, 4)}
THIRTY_TWO = {**QWEN2, **_sizes(5120, 27648, 64, 40, 8)}
THREE_4B = {**QWEN3, **_sizes(2560, 9728, 36, 32, 8), "tie_word_embeddings": True}
THREE_8B = {**QWEN3, **_sizes(4096, 12288, 36, 32, 8)}
MATHS = {"rope_theta": 1e4, "max_position_embeddings": 4096}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {**HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-0.5B-Instruct": {**HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-1.5B": {**ONE_AND_HALF, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-1.5B-Instruct": {**ONE_AND_HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-7B": {**SEVEN, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-7B-Instruct": {**SEVEN, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-32B": {**THIRTY_TWO, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-32B-Instruct": {**THIRTY_TWO, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Math-1.5B": {**ONE_AND_HALF, **MATHS},
    "Qwen/Qwen2.5-Math-7B": {**SEVEN, **MATHS},
    "Qwen/Qwen3-4B": {**THREE_4B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-4B-Base": {**THREE_4B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-8B": {**THREE_8B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-8B-Base": {**THREE_8B, "max_position_embeddings": 32768},
}
"""Hub name -> fields of its config.json."""
