"""List every tensor in ONE table: Hugging Face name, place in the tree, shape, axes, layout and initial value.

Loading, exporting, initialising, sharding and the tests all read it; nothing else names a tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from oarjax.models.decoder import Decoder
from oarjax.models.qwen_config import QwenConfig
from oarjax.types import Params


@dataclass(frozen=True)
class Weight:
    """A tensor, or the same tensor of all layers, and of all experts of a layer, stacked along leading axes.

    A checkpoint may hold several as one, part after part of its rows: the gates and ups of a layer's packed experts.
    """

    name: str  # in the checkpoint; {layer} and {expert} stand for their numbers
    path: tuple[str, ...]  # in the tree
    shape: tuple[int, ...]  # in the tree, layers and experts included
    axes: tuple[str, ...]  # logical name of every axis, for sharding
    pieces: tuple[int, ...]  # that each axis may be sharded into: whole heads, not their numbers
    layout: Literal["same", "transposed"]  # checkpoint matrices are [..., out, in], ours [..., in, out]
    init: Literal["normal", "ones", "zeros", "decay"]
    layers: tuple[int, ...] = ()  # numbers of the layers that are stacked
    part: tuple[int, int] = (0, 1)  # of the checkpoint tensor's rows: its number, and how many there are

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the axes along which checkpoint tensors are stacked here: layers and experts, or neither."""
        return self.shape[: ("{layer}" in self.name) + ("{expert}" in self.name)]

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint's names, in the order of stacking."""
        numbers = (self.layers, range(self.stack[1]) if len(self.stack) > 1 else (0,))
        if not self.stack:
            return (self.name,)
        return tuple(self.name.format(layer=layer, expert=expert) for layer in numbers[0] for expert in numbers[1])

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the checkpoint, all of its parts together."""
        shape = list(self.shape[len(self.stack) :])
        if self.layout == "transposed":
            shape[-2:] = shape[:-3:-1]
        if self.part[1] > 1:
            shape[-2] *= self.part[1]
        return tuple(shape)


Axis = tuple[str, int, int]
"""(name, size, pieces that it may be sharded into)."""


@lru_cache(maxsize=16)
def weight_table(cfg: QwenConfig) -> tuple[Weight, ...]:
    """List every tensor of the model, embedding first. A tied head has no entry."""
    embed, norms = cfg.hidden_size, "zeros" if cfg.delta else "ones"
    shape, axes, path = (cfg.vocab_size, embed), ("vocab", "embed"), ("embed", "embedding")
    table = [
        Weight(f"{cfg.prefix}embed_tokens.weight", path, shape, axes, shape, "same", "normal"),
        *_Stack(cfg, "layers", cfg.attention_layers).weights(),
        *(_Stack(cfg, "delta_layers", cfg.delta_layers).weights() if cfg.delta else ()),
        Weight(f"{cfg.prefix}norm.weight", ("norm", "scale"), (embed,), ("embed",), (embed,), "same", norms),
    ]
    if not cfg.tie_word_embeddings:
        shape, axes, path = shape[::-1], axes[::-1], ("head", "kernel")
        table.append(Weight("lm_head.weight", path, shape, axes, shape, "transposed", "normal"))
    return tuple(table)


class _Stack:
    """The tensors of layers of one kind, stacked below one name of the tree."""

    def __init__(self, cfg: QwenConfig, path: str, layers: tuple[int, ...]):
        self.cfg, self.path, self.numbers, self.table = cfg, path, layers, list[Weight]()

    def add(self, name: str, path: str, layout: str, init: str, *axes: Axis, part: tuple[int, int] = (0, 1)) -> None:
        count = len(self.numbers)
        labels, sizes, pieces = zip(("layers", count, count), *axes)
        name, tree_path = f"{self.cfg.prefix}layers.{{layer}}.{name}", (self.path, *path.split("."))
        self.table.append(Weight(name, tree_path, sizes, labels, pieces, layout, init, self.numbers, part))  # type: ignore[arg-type]

    def linear(self, name: str, path: str, into: Axis, out: Axis, *, bias: bool = False) -> None:
        self.add(f"{name}.weight", f"{path}.kernel", "transposed", "normal", into, out)
        if bias:
            self.add(f"{name}.bias", f"{path}.bias", "same", "zeros", out)

    def weights(self) -> list[Weight]:
        """List a layer's norms, its mixer and its MLP."""
        cfg, embed = self.cfg, self.cfg.hidden_size
        d, norms = ("embed", embed, embed), "zeros" if cfg.delta else "ones"
        self.add("input_layernorm.weight", "attention_norm.scale", "same", norms, d)
        if self.path == "layers":
            self.attention(d, norms)
        else:
            self.delta(d)
        self.add("post_attention_layernorm.weight", "mlp_norm.scale", "same", norms, d)
        self.mlp(d)
        return self.table

    def attention(self, d: Axis, norms: str) -> None:
        """List softmax attention, whose query projection is twice as wide with a gate."""
        cfg, width = self.cfg, self.cfg.head_dim
        heads = ("heads", cfg.num_attention_heads * width, cfg.num_attention_heads)
        kv = ("kv_heads", cfg.num_key_value_heads * width, cfg.num_key_value_heads)
        queries = (heads[0], heads[1] * (2 if cfg.delta else 1), heads[2])
        self.linear("self_attn.q_proj", "attention.q", d, queries, bias=cfg.qkv_bias)
        self.linear("self_attn.k_proj", "attention.k", d, kv, bias=cfg.qkv_bias)
        self.linear("self_attn.v_proj", "attention.v", d, kv, bias=cfg.qkv_bias)
        self.linear("self_attn.o_proj", "attention.o", heads, d, bias=cfg.o_bias)
        if cfg.qk_norm:
            self.add("self_attn.q_norm.weight", "attention.q_norm.scale", "same", norms, ("head", width, width))
            self.add("self_attn.k_norm.weight", "attention.k_norm.scale", "same", norms, ("head", width, width))

    def delta(self, d: Axis) -> None:
        """List a gated delta net. Queries, keys and values are one matrix in the file, which is not sharded."""
        sizes = self.cfg.delta
        assert sizes is not None

        def axis(name: str, size: int) -> Axis:
            return name, size, size

        heads, values = axis("delta", sizes.value_heads), axis("delta", sizes.value_width)
        channels, taps = axis("delta", sizes.channels), axis("tap", sizes.taps)
        for name, width in sizes.projections.items():
            self.linear(f"linear_attn.in_proj_{name}", f"delta.{name}", d, axis("delta", width))
        self.linear("linear_attn.out_proj", "delta.out", values, d)
        self.add("linear_attn.conv1d.weight", "delta.conv", "same", "normal", channels, axis("tap", 1), taps)
        self.add("linear_attn.dt_bias", "delta.dt_bias", "same", "ones", heads)
        self.add("linear_attn.A_log", "delta.a_log", "same", "decay", heads)
        self.add("linear_attn.norm.weight", "delta.norm.scale", "same", "ones", axis("head", sizes.value_dim))

    def mlp(self, d: Axis) -> None:
        """List an MLP, or the router, the experts and the one that all tokens share."""
        cfg, experts = self.cfg, self.cfg.experts
        if experts is None:
            self.gated("mlp", "mlp", d, cfg.intermediate_size)
            return
        stack = ("expert", experts.count, experts.count)
        self.linear("mlp.gate", "mlp.router", d, ("router", experts.count, experts.count))
        if not experts.packed:
            self.gated("mlp.experts.{expert}", "mlp", d, cfg.intermediate_size, stack)
        else:
            f = ("ffn", cfg.intermediate_size, cfg.intermediate_size)
            for number, name in enumerate(("gate", "up")):
                entry = ("mlp.experts.gate_up_proj", f"mlp.{name}.kernel", "transposed", "normal")
                self.add(*entry, stack, d, f, part=(number, 2))
            self.add("mlp.experts.down_proj", "mlp.down.kernel", "transposed", "normal", stack, f, d)
        if experts.shared is not None:
            self.gated("mlp.shared_expert", "mlp.shared", d, experts.shared)
            self.linear("mlp.shared_expert_gate", "mlp.shared_gate", d, ("router", 1, 1))

    def gated(self, name: str, path: str, d: Axis, ffn: int, *stack: Axis) -> None:
        f = ("ffn", ffn, ffn)
        for part, into, out in (("gate", d, f), ("up", d, f), ("down", f, d)):
            entry = (f"{name}.{part}_proj.weight", f"{path}.{part}.kernel", "transposed", "normal")
            self.add(*entry, *stack, into, out)


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
    """Describe the params by shapes and dtypes, without arrays."""
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


def expert_parameters(cfg: QwenConfig) -> int:
    """Count the parameters of all experts that a token may be sent to; 0 without."""
    count = 0 if cfg.experts is None else cfg.experts.count
    return count * 3 * cfg.hidden_size * cfg.intermediate_size * cfg.num_hidden_layers


def decoder_of(cfg: QwenConfig) -> Decoder:
    """Return the sizes that cost depends on; of a layer's experts, only those that a token visits."""
    head = cfg.vocab_size * cfg.hidden_size
    trunk = matmul_parameters(cfg) - head
    if cfg.experts is not None:
        idle = cfg.experts.count - cfg.experts.per_token
        trunk -= idle * expert_parameters(cfg) // cfg.experts.count
    memory = 0
    if cfg.delta is not None:  # a token reads the memory twice and writes it once; and the convolution
        per_layer = 6 * cfg.delta.value_width * cfg.delta.key_dim + 2 * cfg.delta.channels * cfg.delta.taps
        memory = per_layer * len(cfg.delta_layers)
    return Decoder(
        layers=len(cfg.attention_layers),
        memory_flops=memory,
        trunk_params=trunk,
        head_params=head,
        heads_width=cfg.num_attention_heads * cfg.head_dim,
        kv_width=cfg.num_key_value_heads * cfg.head_dim,
    )


def sampling_params(cfg: QwenConfig, params: Params, *, kv_heads: int, dtype: DTypeLike) -> Params:
    """Convert params for sampling: each key head repeated up to ``kv_heads``, matrices cast to ``dtype``.

    Matrices and their biases are in ``dtype``: with the policy's compute dtype no number changes, since they are cast
    to it when used. Norms and embeddings, which are read in float32, are unchanged.
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
        axis = w.axes.index("kv_heads")
        heads = x.reshape(*x.shape[:axis], cfg.num_key_value_heads, -1, *x.shape[axis + 1 :])
        return jnp.repeat(heads, times, axis=axis).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return build_tree(cfg, leaf)


def init_params(cfg: QwenConfig, key: Key[Array, ""], *, dtype: DTypeLike = jnp.float32) -> Params:
    """Initialise params as Hugging Face does: matrices normal with std ``initializer_range``, biases 0, norms neutral.

    A tensor's numbers depend on the key and its name alone, not on the other tensors.
    """

    def leaf(w: Weight) -> Array:
        if w.init in ("ones", "zeros"):
            return jnp.full(w.shape, 1.0 if w.init == "ones" else 0.0, dtype)
        weight_key = jax.random.fold_in(key, zlib.crc32(f"{w.name}{w.part[0] or ''}".encode()))
        if w.init == "decay":
            return jnp.log(jax.random.uniform(weight_key, w.shape, jnp.float32, 0.01, 16.0)).astype(dtype)
        return (jax.random.normal(weight_key, w.shape, jnp.float32) * cfg.initializer_range).astype(dtype)

    return build_tree(cfg, leaf)
