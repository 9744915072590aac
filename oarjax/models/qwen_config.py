"""Read a config.json into the numbers of a Qwen decoder, or refuse it by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oarjax.errors import UserError
from oarjax.models.rope import Yarn, yarn_attention_factor

SUPPORTED = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
FAMILIES = {"qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3", "qwen3_moe": "Qwen3 MoE"}
REMEDY = f"supported are the text models {', '.join(f'{FAMILIES[kind]} ({kind})' for kind in SUPPORTED)}"

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnsupportedModel(UserError, ValueError):
    """A config.json that this package does not compute faithfully; names the field, its value and the remedy."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in the place of every MLP."""

    count: int  # num_experts
    per_token: int  # num_experts_per_tok
    normalised: bool  # norm_topk_prob: the weights of a token's experts add up to 1


@dataclass(frozen=True)
class QwenConfig:
    """The sizes and switches of one architecture, under config.json's names where it has them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert, where there are experts (moe_intermediate_size)
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool  # Qwen2: always; Qwen3: attention_bias
    o_bias: bool  # Qwen3: attention_bias
    qk_norm: bool  # Qwen3
    max_position_embeddings: int  # the longest sequence it was made for
    yarn: Yarn | None = None
    initializer_range: float = 0.02
    experts: Experts | None = None

    @staticmethod
    def from_hf(fields: Mapping[str, Any]) -> QwenConfig:
        """Read a config.json.

        Raises:
            UnsupportedModel: another architecture, dense layers among experts, an active sliding window, quantised
                weights, another activation or RoPE, a missing field, or head counts that do not divide.
        """
        _refuse_unsupported(fields)
        kind = fields["model_type"]
        heads = _required(fields, "num_attention_heads")
        kv_heads = _required(fields, "num_key_value_heads")
        hidden = _required(fields, "hidden_size")
        three = kind != "qwen2"
        head_dim = _required(fields, "head_dim") if three else fields.get("head_dim") or hidden // heads
        if heads % kv_heads:
            _refuse("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads = {heads}", "correct it")
        if head_dim % 2:
            _refuse("head_dim", head_dim, "rotary embedding turns pairs", "use an even head_dim")
        theta, yarn = _read_rope(fields)
        bias = three and bool(fields.get("attention_bias", False))
        experts = _read_experts(fields) if kind == "qwen3_moe" else None
        return QwenConfig(
            vocab_size=_required(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(fields, "moe_intermediate_size" if experts else "intermediate_size"),
            num_hidden_layers=_required(fields, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(_required(fields, "rms_norm_eps")),
            rope_theta=theta,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bias,
            o_bias=bias,
            qk_norm=three,
            max_position_embeddings=_required(fields, "max_position_embeddings"),
            yarn=yarn,
            initializer_range=float(fields.get("initializer_range", 0.02)),
            experts=experts,
        )


def _refuse(field: str, value: Any, why: str, remedy: str = REMEDY) -> None:
    raise UnsupportedModel(f"config.json: {field} = {value!r}: {why}; {remedy}")


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise UnsupportedModel(f"config.json: field {name} is missing; take the checkpoint's own config.json whole")
    return fields[name]


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    kind = _required(fields, "model_type")
    if kind not in SUPPORTED:
        _refuse("model_type", kind, "this architecture is not supported")
    if kind != "qwen3_moe" and (names := [n for n in EXPERTS if fields.get(n)]):
        _refuse(names[0], fields[names[0]], f"experts in a {kind} are not supported")
    architectures = fields.get("architectures")
    if architectures and SUPPORTED[kind] not in architectures:
        _refuse("architectures", architectures, f"expected {SUPPORTED[kind]}")
    if fields.get("quantization_config"):
        _refuse("quantization_config", fields["quantization_config"], "quantised weights are not supported")
    if fields.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", fields["hidden_act"], "only silu is supported")
    layers = _required(fields, "num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is not None:
        other = sorted(set(kinds) - {"full_attention"})
        if other:
            _refuse("layer_types", other, "only full_attention is supported")
    elif fields.get("use_sliding_window") and fields.get("sliding_window", 4096) is not None:
        first = fields.get("max_window_layers", 28)
        if first < layers:
            _refuse(
                "use_sliding_window",
                True,
                f"the window of {fields.get('sliding_window', 4096)} would act on layers {first}..{layers - 1}",
                "set use_sliding_window to false and train below the window",
            )


def _read_experts(fields: Mapping[str, Any]) -> Experts:
    """Read the experts, which every layer has: Qwen3's released mixtures mix in no dense layer."""
    for name, allowed in (("mlp_only_layers", ([], None)), ("decoder_sparse_step", (1, None))):
        if fields.get(name) not in allowed:
            _refuse(name, fields[name], "dense layers among those with experts are not supported")
    count = fields.get("num_experts") or fields.get("num_local_experts") or _required(fields, "num_experts")
    chosen = _required(fields, "num_experts_per_tok")
    if not 0 < chosen <= count:
        _refuse("num_experts_per_tok", chosen, f"expected 1 to num_experts = {count}", "correct it")
    return Experts(count, chosen, bool(fields.get("norm_topk_prob", False)))


def _read_rope(fields: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """rope_theta and YaRN from wherever this version of config.json keeps them."""
    rope = dict(fields.get("rope_scaling") or {}) | dict(fields.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        _refuse("rope_parameters", sorted(rope), "RoPE that differs between layers is not supported")
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise UnsupportedModel(
            "config.json: field rope_theta is missing, at top level and in rope_parameters; "
            "take the checkpoint's own config.json whole"
        )
    if (partial_factor := rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))) not in (None, 1.0):
        _refuse("partial_rotary_factor", partial_factor, "only whole heads are rotated")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        _refuse("rope_type", kind, "only default and yarn are supported", "use a checkpoint with one of these")
    original = rope.get("original_max_position_embeddings") or _required(fields, "max_position_embeddings")
    factor = float(rope.get("factor") or _required(fields, "max_position_embeddings") / original)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor, mscale=rope.get("mscale"), mscale_all_dim=rope.get("mscale_all_dim"))
    return float(theta), Yarn(
        factor=factor,
        original_max_position=original,
        attention_factor=float(attention),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
    )
