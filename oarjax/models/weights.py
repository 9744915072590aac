"""ONE table of every tensor: its Hugging Face name, place in the tree, shape, axes, layout and start value.

Loading, exporting, initialising, sharding and the tests all read it; nothing else names a tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from oarjax.costs import Decoder
from oarjax.models.qwen_config import QwenConfig
from oarjax.types import Params


@dataclass(frozen=True)
class Weight:
    """One entry: a tensor, or the same tensor of all layers, and all experts of a layer, stacked along first axes."""

    name: str  # in the checkpoint; {layer} and {expert} stand for their numbers
    path: tuple[str, ...]  # in the tree
    shape: tuple[int, ...]  # in the tree, layers and experts included
    axes: tuple[str, ...]  # logical name of every axis, for sharding
    pieces: tuple[int, ...]  # what may be divided between devices: whole heads, not their numbers
    layout: Literal["same", "transposed"]  # checkpoint matrices are [out, in], ours [in, out]
    init: Literal["normal", "ones", "zeros"]

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the axes along which checkpoint tensors are stacked here: layers and experts, or neither."""
        return self.shape[: sum(axis in STACKED for axis in self.axes)]

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint's names, in the order of stacking."""
        axes = [STACKED[axis] for axis in self.axes[: len(self.stack)]]
        return tuple(self.name.format(**dict(zip(axes, at))) for at in np.ndindex(self.stack))

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the checkpoint."""
        one = self.shape[len(self.stack) :]
        return one[::-1] if self.layout == "transposed" else one


STACKED = {"layers": "layer", "expert": "expert"}
"""Axes of stacking, and what stands for their numbers in a name."""


def weight_table(cfg: QwenConfig) -> tuple[Weight, ...]:
    """List every tensor of the model, embedding first. A tied head has no entry."""
    embed, ffn, width = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    heads = ("heads", cfg.num_attention_heads * width, cfg.num_attention_heads)
    kv = ("kv_heads", cfg.num_key_value_heads * width, cfg.num_key_value_heads)
    table = [
        Weight(
            "model.embed_tokens.weight",
            ("embed", "embedding"),
            (cfg.vocab_size, embed),
            ("vocab", "embed"),
            (cfg.vocab_size, embed),
            "same",
            "normal",
        )
    ]

    def stacked(name: str, path: str, layout: str, init: str, *axes: tuple[str, int, int]) -> None:
        axes = (("layers", cfg.num_hidden_layers, cfg.num_hidden_layers), *axes)
        labels, sizes, pieces = zip(*axes)
        where = ("layers", *path.split("."))
        table.append(Weight(f"model.layers.{{layer}}.{name}", where, sizes, labels, pieces, layout, init))  # type: ignore[arg-type]

    def linear(name: str, path: str, into: tuple[str, int, int], out: tuple[str, int, int], *, bias: bool) -> None:
        stacked(f"{name}.weight", f"{path}.kernel", "transposed", "normal", into, out)
        if bias:
            stacked(f"{name}.bias", f"{path}.bias", "same", "zeros", out)

    d, f, h = ("embed", embed, embed), ("ffn", ffn, ffn), ("head", width, width)
    stacked("input_layernorm.weight", "attention_norm.scale", "same", "ones", d)
    linear("self_attn.q_proj", "attention.q", d, heads, bias=cfg.qkv_bias)
    linear("self_attn.k_proj", "attention.k", d, kv, bias=cfg.qkv_bias)
    linear("self_attn.v_proj", "attention.v", d, kv, bias=cfg.qkv_bias)
    linear("self_attn.o_proj", "attention.o", heads, d, bias=cfg.o_bias)
    if cfg.qk_norm:
        stacked("self_attn.q_norm.weight", "attention.q_norm.scale", "same", "ones", h)
        stacked("self_attn.k_norm.weight", "attention.k_norm.scale", "same", "ones", h)
    stacked("post_attention_layernorm.weight", "mlp_norm.scale", "same", "ones", d)
    expert, stack = "", ()
    if cfg.experts is not None:
        count = cfg.experts.count
        linear("mlp.gate", "mlp.router", d, ("router", count, count), bias=False)
        expert, stack = "experts.{expert}.", (("expert", count, count),)
    for name, into, out in (("gate", d, f), ("up", d, f), ("down", f, d)):
        stacked(f"mlp.{expert}{name}_proj.weight", f"mlp.{name}.kernel", "transposed", "normal", *stack, into, out)
    table.append(Weight("model.norm.weight", ("norm", "scale"), (embed,), ("embed",), (embed,), "same", "ones"))
    if not cfg.tie_word_embeddings:
        shape = (embed, cfg.vocab_size)
        table.append(
            Weight("lm_head.weight", ("head", "kernel"), shape, ("embed", "vocab"), shape, "transposed", "normal")
        )
    return tuple(table)


def build_tree(cfg: QwenConfig, leaf: Callable[[Weight], Any]) -> dict[str, Any]:
    """Build the params tree with ``leaf(weight)`` at every place."""
    tree: dict[str, Any] = {}
    for weight in weight_table(cfg):
        node = tree
        for part in weight.path[:-1]:
            node = node.setdefault(part, {})
        node[weight.path[-1]] = leaf(weight)
    return tree


def lookup(tree: Params, weight: Weight) -> Any:
    """Return the node at a weight's place in a params-like tree."""
    return at(tree, weight.path)


def at(tree: Params, path: Sequence[str]) -> Any:
    """Return the node at a path of names in a params-like tree."""
    return reduce(lambda node, name: node[name], path, tree)


def abstract_params(cfg: QwenConfig, *, dtype: DTypeLike) -> Params:
    """Shapes and dtypes of the params, without any array."""
    return build_tree(cfg, lambda w: jax.ShapeDtypeStruct(w.shape, jnp.dtype(dtype)))


def logical_axes(cfg: QwenConfig) -> Params:
    """Name every axis of every param: tuples of strings in the params' tree."""
    return build_tree(cfg, lambda w: w.axes)


def divisible_pieces(cfg: QwenConfig) -> Params:
    """Return the largest number of pieces that each axis of each param divides into: tuples in the params' tree."""
    return build_tree(cfg, lambda w: w.pieces)


def parameter_count(cfg: QwenConfig) -> int:
    """Count all parameters, a tied head once."""
    return sum(math.prod(weight.shape) for weight in weight_table(cfg))


def matmul_parameters(cfg: QwenConfig) -> int:
    """Count the parameters in matrix products of a forward pass: the matrices and the head, tied or not."""
    matrices = sum(math.prod(w.shape) for w in weight_table(cfg) if w.path[-1] == "kernel")
    return matrices + (cfg.vocab_size * cfg.hidden_size if cfg.tie_word_embeddings else 0)


def decoder_of(cfg: QwenConfig) -> Decoder:
    """Return the sizes that cost depends on; of a layer's experts as many as a token visits."""
    head = cfg.vocab_size * cfg.hidden_size
    trunk = matmul_parameters(cfg) - head
    if cfg.experts is not None:
        idle = cfg.experts.count - cfg.experts.per_token
        trunk -= idle * 3 * cfg.hidden_size * cfg.intermediate_size * cfg.num_hidden_layers
    return Decoder(
        layers=cfg.num_hidden_layers,
        trunk_params=trunk,
        head_params=head,
        heads_width=cfg.num_attention_heads * cfg.head_dim,
        kv_width=cfg.num_key_value_heads * cfg.head_dim,
    )


def sampling_params(cfg: QwenConfig, params: Params, *, kv_heads: int, dtype: DTypeLike) -> Params:
    """Convert params for sampling: each key head repeated up to ``kv_heads``, matrices cast to ``dtype``.

    Matrices and their biases are in ``dtype``: with the policy's compute dtype no number changes, since they are cast
    to it where they are used. Norms and embeddings, which are read in float32, stay as they are.
    """
    if kv_heads % cfg.num_key_value_heads:
        raise ValueError(f"kv_heads: expected a multiple of {cfg.num_key_value_heads}, got {kv_heads}")
    times = kv_heads // cfg.num_key_value_heads

    def leaf(w: Weight) -> Array:
        x = lookup(params, w)
        if w.path[-1] in ("kernel", "bias"):
            x = x.astype(dtype)
        if "kv_heads" not in w.axes or times == 1:
            return x
        at = w.axes.index("kv_heads")
        heads = x.reshape(*x.shape[:at], cfg.num_key_value_heads, -1, *x.shape[at + 1 :])
        return jnp.repeat(heads, times, axis=at).reshape(*x.shape[:at], -1, *x.shape[at + 1 :])

    return build_tree(cfg, leaf)


def init_params(cfg: QwenConfig, key: Key[Array, ""], *, dtype: DTypeLike = jnp.float32) -> Params:
    """Initialise params as Hugging Face does: matrices normal with std ``initializer_range``, norms 1, biases 0.

    A tensor's numbers depend on the key and its name alone, not on the other tensors.
    """

    def leaf(w: Weight) -> Array:
        if w.init != "normal":
            return jnp.full(w.shape, 1.0 if w.init == "ones" else 0.0, dtype)
        own = jax.random.fold_in(key, zlib.crc32(w.name.encode()))
        return (jax.random.normal(own, w.shape, jnp.float32) * cfg.initializer_range).astype(dtype)

    return build_tree(cfg, leaf)
