"""Read a config.json into the sizes of a Qwen decoder, or reject it; how to add a model family.

To add a model family: its ``model_type`` in ``SUPPORTED`` and its fields in ``from_hf`` here, its tensors in the table
of ``models/weights.py``, its layers beside ``models/layers.py`` and in ``models/qwen.py``, its sizes in
``tools/plan/published_sizes.py`` (read by ``oarjax plan`` only), and parity with transformers in tests/models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oarjax.errors import UserError
from oarjax.models.rope import Yarn, yarn_attention_factor

SUPPORTED = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
VISION = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Kinds whose text model is described by ``text_config`` and named ``model.language_model``."""
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
MIXTURES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
REMEDY = (
    "supported are the text models Qwen2 and Qwen2.5 (qwen2), Qwen3 (qwen3), Qwen3 MoE (qwen3_moe), Qwen3-Next "
    "(qwen3_next), Qwen3.5 to Qwen3.8 (qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text) and the text part of "
    "Qwen3-VL (qwen3_vl)"
)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnsupportedModel(UserError, ValueError):
    """A config.json that this package does not compute faithfully; names the field, its value and the remedy."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in the place of every MLP."""

    count: int  # num_experts
    per_token: int  # num_experts_per_tok
    normalised: bool  # norm_topk_prob: the weights of a token's experts add up to 1
    shared: int | None = None  # shared_expert_intermediate_size: width of an expert that every token visits
    packed: bool = False  # files hold all experts of a layer as one tensor, gate and up together


@dataclass(frozen=True)
class DeltaSizes:
    """The gated delta nets in the place of attention in all layers but every ``interval``-th."""

    interval: int
    key_heads: int  # linear_num_key_heads
    value_heads: int  # linear_num_value_heads
    key_dim: int  # linear_key_head_dim
    value_dim: int  # linear_value_head_dim
    taps: int  # linear_conv_kernel_dim
    joined: bool = False  # Qwen3-Next: two projections, whose outputs are sorted by key head

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_width + self.value_width

    @property
    def projections(self) -> dict[str, int]:
        """Widths of the projections of the input, by their names in the checkpoint."""
        if self.joined:
            return {"qkvz": self.channels + self.value_width, "ba": 2 * self.value_heads}
        return {"qkv": self.channels, "z": self.value_width, "a": self.value_heads, "b": self.value_heads}

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of one head of queries, keys and values."""
        return self.key_dim, self.key_dim, self.value_dim


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
    max_position_embeddings: int  # the longest sequence that it supports
    yarn: Yarn | None = None
    initializer_range: float = 0.02
    experts: Experts | None = None
    delta: DeltaSizes | None = None  # from Qwen3-Next on; attention has a gate, norms multiply by 1 + w
    rotary_dim: int | None = None  # leading numbers of a head that are rotated; None: all
    prefix: str = "model."  # of the names of the decoder's tensors

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with keys and values."""
        interval = self.delta.interval if self.delta else 1
        return tuple(range(interval - 1, self.num_hidden_layers, interval))

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with a gated delta net."""
        attention = set(self.attention_layers)
        return tuple(i for i in range(self.num_hidden_layers) if i not in attention)

    @staticmethod
    def from_hf(fields: Mapping[str, Any]) -> QwenConfig:
        """Read a config.json.

        Raises:
            UnsupportedModel: another architecture, dense layers among experts, an active sliding window, quantised
                weights, another activation or RoPE, a missing field, or head counts that do not divide.
        """
        _refuse_unsupported(fields)
        kind, outer = fields["model_type"], fields
        if kind in VISION:
            fields = {**fields["text_config"], "model_type": kind, "architectures": None}
            _refuse_unsupported(fields)
        heads = _required(fields, "num_attention_heads")
        kv_heads = _required(fields, "num_key_value_heads")
        hidden = _required(fields, "hidden_size")
        qwen3 = kind != "qwen2"
        head_dim = _required(fields, "head_dim") if qwen3 else fields.get("head_dim") or hidden // heads
        if heads % kv_heads:
            _refuse("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads = {heads}", "correct it")
        delta = _read_delta(fields) if kind in HYBRID else None
        share = _rotary_share(fields) if delta else 1.0
        if int(head_dim * share) % 2:
            name, value = ("partial_rotary_factor", share) if share != 1 else ("head_dim", head_dim)
            _refuse(name, value, "rotary embedding turns pairs", "use an even head_dim")
        theta, yarn = _read_rope(fields)
        bias = qwen3 and bool(fields.get("attention_bias", False))
        experts = _read_experts(fields) if kind in MIXTURES else None
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
            tie_word_embeddings=bool(outer.get("tie_word_embeddings", fields.get("tie_word_embeddings", False))),
            qkv_bias=kind == "qwen2" or bias,
            o_bias=bias,
            qk_norm=qwen3,
            max_position_embeddings=_required(fields, "max_position_embeddings"),
            yarn=yarn,
            initializer_range=float(fields.get("initializer_range", 0.02)),
            experts=experts,
            delta=delta,
            rotary_dim=int(head_dim * share) if share != 1 else None,
            prefix="model.language_model." if kind in VISION else "model.",
        )


def exported_as(cfg: QwenConfig, fields: Mapping[str, Any]) -> tuple[QwenConfig, dict[str, Any]]:
    """Return the sizes and the config.json of an export of a checkpoint with these fields.

    Of a Qwen3-VL only the text model is exported: the Qwen3 that computes the same for text.
    """
    if fields["model_type"] != "qwen3_vl":
        return cfg, dict(fields)
    text = {name: value for name, value in fields["text_config"].items() if name not in ("model_type", "dtype")}
    for name in ("rope_scaling", "rope_parameters"):
        rope = {part: value for part, value in (text.pop(name, None) or {}).items() if not part.startswith("mrope")}
        text |= {name: rope} if rope else {}
    defaults = {"model_type": "qwen3", "architectures": [SUPPORTED["qwen3"]], "tie_word_embeddings": False}
    common = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
    text = defaults | text | {name: fields[name] for name in common if name in fields}
    return replace(cfg, prefix="model."), text


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
    if kind not in MIXTURES and (names := [n for n in EXPERTS if fields.get(n)]):
        _refuse(names[0], fields[names[0]], f"experts in a {kind} are not supported")
    architectures = fields.get("architectures")
    if architectures and SUPPORTED[kind] not in architectures:
        _refuse("architectures", architectures, f"expected {SUPPORTED[kind]}")
    if fields.get("quantization_config"):
        _refuse("quantization_config", fields["quantization_config"], "quantised weights are not supported")
    if fields.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", fields["hidden_act"], "only silu is supported")
    if kind in VISION and fields.get("num_hidden_layers") is None:
        if not isinstance(_required(fields, "text_config"), Mapping):
            _refuse("text_config", fields["text_config"], "expected an object", "fetch the file again")
        return
    layers = _required(fields, "num_hidden_layers")
    window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window") else None
    if kind in MIXTURES and window is not None:  # transformers applies it to every layer of this family
        _refuse(
            "use_sliding_window",
            True,
            f"the window of {window} would act on all {layers} layers",
            "set use_sliding_window to false and train below the window",
        )
    kinds = None if kind in HYBRID else fields.get("layer_types")
    if kinds is not None:
        unsupported = sorted(set(kinds) - {"full_attention"})
        if unsupported:
            _refuse("layer_types", unsupported, "only full_attention is supported")
    elif window is not None:
        first_windowed = fields.get("max_window_layers", 28)
        if first_windowed < layers:
            _refuse(
                "use_sliding_window",
                True,
                f"the window of {window} would act on layers {first_windowed}..{layers - 1}",
                "set use_sliding_window to false and train below the window",
            )


def _read_experts(fields: Mapping[str, Any]) -> Experts:
    """Read the experts, which every layer has: the released mixtures have no dense layers."""
    for name, allowed in (("mlp_only_layers", ([], None)), ("decoder_sparse_step", (1, None))):
        if fields.get(name) not in allowed:
            _refuse(name, fields[name], "dense layers among those with experts are not supported")
    count = fields.get("num_experts") or fields.get("num_local_experts") or _required(fields, "num_experts")
    per_token = _required(fields, "num_experts_per_tok")
    if not 0 < per_token <= count:
        _refuse("num_experts_per_tok", per_token, f"expected 1 to num_experts = {count}", "correct it")
    kind = fields["model_type"]
    shared = _required(fields, "shared_expert_intermediate_size") if kind in HYBRID else None
    normalised = kind.startswith("qwen3_5") or bool(fields.get("norm_topk_prob", kind == "qwen3_next"))
    return Experts(count, per_token, normalised, shared)


def _read_delta(fields: Mapping[str, Any]) -> DeltaSizes:
    """Read the gated delta nets; every layer whose number, from 1, the interval divides has attention instead."""
    layers = _required(fields, "num_hidden_layers")
    kinds = fields.get("layer_types")
    interval = fields.get("full_attention_interval", 4)
    if kinds is not None:
        kinds = list(kinds) if isinstance(kinds, list | tuple) else []
        interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
        pattern = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        if kinds != pattern:
            _refuse(
                "layer_types",
                fields["layer_types"],
                "expected full_attention in every n-th layer, linear_attention else",
            )
    if not 2 <= interval <= layers:
        _refuse("full_attention_interval", interval, f"expected 2 to num_hidden_layers = {layers}", "correct it")
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = [_required(fields, name) for name in (*names, "linear_conv_kernel_dim")]
    if sizes[1] % sizes[0]:
        _refuse(names[0], sizes[0], f"it does not divide {names[1]} = {sizes[1]}", "correct it")
    return DeltaSizes(interval, *sizes, joined=fields["model_type"] == "qwen3_next")


def _rotary_share(fields: Mapping[str, Any], default: float = 0.25) -> float:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    return default if share is None else float(share)


def _read_rope(fields: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Read rope_theta and YaRN from wherever this version of config.json has them."""
    rope = dict(fields.get("rope_scaling") or {}) | dict(fields.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        _refuse("rope_parameters", sorted(rope), "RoPE that differs between layers is not supported")
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise UnsupportedModel(
            "config.json: field rope_theta is missing, at top level and in rope_parameters; "
            "take the checkpoint's own config.json whole"
        )
    if fields["model_type"] not in HYBRID and (share := _rotary_share(fields, 1.0)) != 1.0:
        _refuse("partial_rotary_factor", share, "in this family only whole heads are rotated")
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
