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


QWEN3_MOE: Mapping[str, Any] = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
QWEN3_5: Mapping[str, Any] = {
    "model_type": "qwen3_5_text",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "vocab_size": 248320,
    "head_dim": 256,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
}
"""The text part of checkpoints whose model_type is qwen3_5."""
QWEN3_5_MOE: Mapping[str, Any] = {**QWEN3_5, "model_type": "qwen3_5_moe_text", "num_key_value_heads": 2}
"""The text part of checkpoints whose model_type is qwen3_5_moe."""


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _experts(hidden: int, layers: int, heads: int, width: int, count: int, per_token: int) -> dict[str, int]:
    """Return the sizes of a mixture with delta nets, whose shared expert is as wide as each of the others."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "num_experts": count,
        "num_experts_per_tok": per_token,
    }


# Sizes of Qwen3.5 and of the mixtures agree with the recipes of slime and miles, those of Qwen3.6-27B with its model
# card, and those of Qwen3.8-27B and of Qwen3-VL with transcripts of their config.json.
SMALL = {"tie_word_embeddings": True, "vocab_size": 151936}
HALF = {**QWEN2, **_sizes(896, 4864, 24, 14, 2), **SMALL}
ONE_AND_HALF = {**QWEN2, **_sizes(1536, 8960, 28, 12, 2), **SMALL}
SEVEN = {**QWEN2, **_sizes(3584, 18944, 28, 28, 4)}
THIRTY_TWO = {**QWEN2, **_sizes(5120, 27648, 64, 40, 8)}
THREE_4B = {**QWEN3, **_sizes(2560, 9728, 36, 32, 8), "tie_word_embeddings": True}
THREE_8B = {**QWEN3, **_sizes(4096, 12288, 36, 32, 8)}
TWO_3B = {**QWEN2, **_sizes(2048, 11008, 36, 16, 2), **SMALL}
TWO_14B = {**QWEN2, **_sizes(5120, 13824, 48, 40, 8)}
TWO_72B = {**QWEN2, **_sizes(8192, 29568, 80, 64, 8)}
THREE_06B = {**QWEN3, **_sizes(1024, 3072, 28, 16, 8), "tie_word_embeddings": True}
THREE_17B = {**QWEN3, **_sizes(2048, 6144, 28, 16, 8), "tie_word_embeddings": True}
THREE_14B = {**QWEN3, **_sizes(5120, 17408, 40, 40, 8)}
THREE_32B = {**QWEN3, **_sizes(5120, 25600, 64, 64, 8)}
MOE_30B = {**QWEN3_MOE, **_sizes(2048, 6144, 48, 32, 4), "moe_intermediate_size": 768}
MOE_235B = {**QWEN3_MOE, **_sizes(4096, 12288, 94, 64, 4), "moe_intermediate_size": 1536}
MOE_480B = {**QWEN3_MOE, **_sizes(6144, 8192, 62, 96, 8), "moe_intermediate_size": 2560, "num_experts": 160}
HYBRID_08B = {**QWEN3_5, **_sizes(1024, 3584, 24, 8, 2), "linear_num_value_heads": 16, "tie_word_embeddings": True}
HYBRID_2B = {**QWEN3_5, **_sizes(2048, 6144, 24, 8, 2), "linear_num_value_heads": 16, "tie_word_embeddings": True}
HYBRID_4B = {**QWEN3_5, **_sizes(2560, 9216, 32, 16, 4), "linear_num_value_heads": 32, "tie_word_embeddings": True}
HYBRID_9B = {**QWEN3_5, **_sizes(4096, 12288, 32, 16, 4), "linear_num_value_heads": 32}
HYBRID_27B = {**QWEN3_5, **_sizes(5120, 17408, 64, 24, 4), "linear_num_value_heads": 48}
HYBRID_35B = {**QWEN3_5_MOE, **_experts(2048, 40, 16, 512, 256, 8), "linear_num_value_heads": 32}
HYBRID_397B = {**QWEN3_5_MOE, **_experts(4096, 60, 32, 1024, 512, 10), "linear_num_value_heads": 64}
NEXT_80B = {**HYBRID_35B, **_experts(2048, 48, 16, 512, 512, 10), "model_type": "qwen3_next", "vocab_size": 151936}
LONG = {"rope_theta": 1e7, "max_position_embeddings": 262144}
SECOND = {"rope_theta": 5e6, "max_position_embeddings": 262144}
MATHS = {"rope_theta": 1e4, "max_position_embeddings": 4096}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {**HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-0.5B-Instruct": {**HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-1.5B": {**ONE_AND_HALF, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-1.5B-Instruct": {**ONE_AND_HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-3B": {**TWO_3B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-3B-Instruct": {**TWO_3B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-7B": {**SEVEN, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-7B-Instruct": {**SEVEN, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-14B": {**TWO_14B, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-14B-Instruct": {**TWO_14B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-32B": {**THIRTY_TWO, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-32B-Instruct": {**THIRTY_TWO, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-72B": {**TWO_72B, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-72B-Instruct": {**TWO_72B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Math-1.5B": {**ONE_AND_HALF, **MATHS},
    "Qwen/Qwen2.5-Math-7B": {**SEVEN, **MATHS},
    "Qwen/Qwen2.5-Math-72B": {**TWO_72B, "rms_norm_eps": 1e-5, **MATHS},
    "Qwen/Qwen2.5-Math-1.5B-Instruct": {**ONE_AND_HALF, **MATHS},
    "Qwen/Qwen2.5-Math-7B-Instruct": {**SEVEN, **MATHS},
    "Qwen/Qwen2.5-Math-72B-Instruct": {**TWO_72B, **MATHS},
    "Qwen/Qwen2.5-Coder-0.5B": {**HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": {**HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-1.5B": {**ONE_AND_HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": {**ONE_AND_HALF, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-3B": {**TWO_3B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-3B-Instruct": {**TWO_3B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-7B": {**SEVEN, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-7B-Instruct": {**SEVEN, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-14B": {**TWO_14B, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-14B-Instruct": {**TWO_14B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-32B": {**THIRTY_TWO, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Coder-32B-Instruct": {**THIRTY_TWO, "max_position_embeddings": 32768},
    "Qwen/Qwen3-0.6B": {**THREE_06B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-0.6B-Base": {**THREE_06B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-1.7B": {**THREE_17B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-1.7B-Base": {**THREE_17B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-4B": {**THREE_4B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-4B-Base": {**THREE_4B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-4B-Instruct-2507": {**THREE_4B, **SECOND},
    "Qwen/Qwen3-4B-Thinking-2507": {**THREE_4B, **SECOND},
    "Qwen/Qwen3-8B": {**THREE_8B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-8B-Base": {**THREE_8B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-14B": {**THREE_14B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-14B-Base": {**THREE_14B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-32B": {**THREE_32B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-30B-A3B": {**MOE_30B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-30B-A3B-Base": {**MOE_30B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {**MOE_30B, **LONG},
    "Qwen/Qwen3-30B-A3B-Thinking-2507": {**MOE_30B, **LONG},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": {**MOE_30B, **LONG},
    "Qwen/Qwen3-235B-A22B": {**MOE_235B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-235B-A22B-Instruct-2507": {**MOE_235B, **SECOND},
    "Qwen/Qwen3-235B-A22B-Thinking-2507": {**MOE_235B, **SECOND},
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": {**MOE_480B, **LONG},
    "Qwen/Qwen3-VL-2B-Instruct": {**THREE_17B, **SECOND},
    "Qwen/Qwen3-VL-4B-Instruct": {**THREE_4B, **SECOND},
    "Qwen/Qwen3-VL-8B-Instruct": {**THREE_8B, **SECOND},
    "Qwen/Qwen3-VL-32B-Instruct": {**THREE_32B, **SECOND},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": NEXT_80B,
    "Qwen/Qwen3-Next-80B-A3B-Thinking": NEXT_80B,
    "Qwen/Qwen3.5-0.8B": HYBRID_08B,
    "Qwen/Qwen3.5-0.8B-Base": HYBRID_08B,
    "Qwen/Qwen3.5-2B": HYBRID_2B,
    "Qwen/Qwen3.5-2B-Base": HYBRID_2B,
    "Qwen/Qwen3.5-4B": HYBRID_4B,
    "Qwen/Qwen3.5-4B-Base": HYBRID_4B,
    "Qwen/Qwen3.5-9B": HYBRID_9B,
    "Qwen/Qwen3.5-9B-Base": HYBRID_9B,
    "Qwen/Qwen3.5-27B": HYBRID_27B,
    "Qwen/Qwen3.6-27B": HYBRID_27B,
    "Qwen/Qwen3.8-27B": HYBRID_27B,
    "Qwen/Qwen3.5-35B-A3B": HYBRID_35B,
    "Qwen/Qwen3.6-35B-A3B": HYBRID_35B,
    "Qwen/Qwen3.5-397B-A17B": HYBRID_397B,
}
"""Hub name -> fields of its config.json."""
