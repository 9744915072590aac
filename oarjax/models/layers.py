"""The modules of a Qwen decoder's layers. ``oarjax.models.qwen`` scans them behind a Policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from oarjax.kernels.remat import ATTENTION, FED, kept
from oarjax.models.delta_net import DeltaNet, Rule, undivided
from oarjax.models.moe import ExpertsKind, MoE
from oarjax.models.qwen_config import DeltaSizes, QwenConfig
from oarjax.models.rope import rotate
from oarjax.types import DeltaState, Routing

SUMMED = ("o", "down")
"""Matrices whose input is divided over the devices of an axis ``tensor``: each has a part of every sum."""

Mix = Callable[[Array, Array, Array], Array]
"""Attention of rotated q [B N heads h], not yet in the compute dtype, to stored keys and the tokens' own k and v."""


class Adapted(nnx.Linear):
    """A linear layer with a low-rank pair beside its kernel: x W + b + scale * (x A) B. See ``oarjax.models.lora``.

    The pair created here only marks its place in the tree; the arrays merged in have their own rank.
    """

    def __init__(self, into: int, out: int, *, scale: float, rngs: nnx.Rngs, **options: Any):
        super().__init__(into, out, rngs=rngs, **options)
        self.scale = scale
        self.lora_a = nnx.Param(jnp.zeros((into, 1)))
        self.lora_b = nnx.Param(jnp.zeros((1, out)))

    def __call__(self, inputs: Float[Array, "rows D"], out_sharding: Any = None) -> Float[Array, "rows F"]:
        def product(x: Array, matrix: Any) -> Array:
            return jnp.dot(
                x.astype(self.dtype), matrix[...].astype(self.dtype), preferred_element_type=self.preferred_element_type
            )

        base = super().__call__(inputs, out_sharding)
        return base + self.scale * product(product(inputs, self.lora_a), self.lora_b)


TO_HEADS, FROM_HEADS = ("bne", "e", "hd", "bhnd"), ("bnhd", "hd", "e", "bne")
"""Axes of an input, of a matrix's two sides, and of the output: b rows, n positions, h heads of d, e the stream."""


def project(
    linear: nnx.Linear, x: Float[Array, "*taken"], axes: tuple[str, str, str, str], *sides: tuple[int, ...]
) -> Float[Array, "*given"]:
    """Apply a linear layer between a stream and its heads, ``axes`` of them, the matrix's ``sides`` of these sizes.

    A TPU's compiler writes and reads heads in the order of its kernels within such a product; around a product of flat
    matrices it copies them, in float32.
    """
    (taken, into, out, given), (into_sizes, out_sizes) = axes, sides

    def product(equation: str, x: Array, matrix: Any, *sizes: int) -> Array:
        operands = x.astype(linear.dtype), matrix[...].astype(linear.dtype).reshape(sizes)
        return jnp.einsum(equation, *operands, preferred_element_type=linear.preferred_element_type)

    result = product(f"{taken},{into}{out}->{given}", x, linear.kernel, *into_sizes, *out_sizes)
    if isinstance(linear, Adapted):
        low = product(f"{taken},{into}r->bnr", x, linear.lora_a, *into_sizes, -1)
        result += linear.scale * product(f"bnr,r{out}->{given}", low, linear.lora_b, -1, *out_sizes)
    if linear.bias is None:
        return result
    *heads, width = out_sizes
    return result + linear.bias[...].astype(linear.dtype).reshape(*heads, *[1] * len(heads), width)


class CentredNorm(nnx.Module):
    """RMS norm that multiplies by 1 + w, with w = 0 at the start."""

    def __init__(self, width: int, *, epsilon: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.epsilon, self.dtype = epsilon, jnp.dtype(dtype)
        self.scale = nnx.Param(jnp.zeros((width,)))

    def __call__(self, x: Float[Array, "*B h"]) -> Float[Array, "*B h"]:
        x = x.astype(self.dtype)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return x * (1 + self.scale[...].astype(self.dtype))


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; from Qwen3 on q and k are normalised per head.

    From Qwen3-Next on each head's output is multiplied by the sigmoid of a gate, stored beside the head's query in q.
    """

    def __init__(self, cfg: QwenConfig, *, linear: Any, norm: Any, rngs: nnx.Rngs, heads_first: bool = False):
        self.head_dim, self.rounds, self.heads_first = cfg.head_dim, _rounds(cfg), heads_first and _rounds(cfg)
        heads, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
        self.gated = cfg.delta is not None
        self.q = linear("q", cfg.hidden_size, heads * (2 if self.gated else 1), use_bias=cfg.qkv_bias, rngs=rngs)
        self.k = linear("k", cfg.hidden_size, kv, use_bias=cfg.qkv_bias, rngs=rngs)
        self.v = linear("v", cfg.hidden_size, kv, use_bias=cfg.qkv_bias, rngs=rngs)
        self.o = linear("o", heads, cfg.hidden_size, use_bias=cfg.o_bias, rngs=rngs)
        self.q_norm = norm(cfg.head_dim, rngs=rngs) if cfg.qk_norm else None
        self.k_norm = norm(cfg.head_dim, rngs=rngs) if cfg.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B N D"],
        cos: Float[Array, "B N half"],
        sin: Float[Array, "B N half"],
        mix: Mix,
        *,
        compute_dtype: DTypeLike,
    ) -> tuple[Float[Array, "B N D"], tuple[Float[Array, "B N kv h"], Float[Array, "B N kv h"]]]:
        if self.heads_first:
            return self._heads_first(x, cos, sin, mix, compute_dtype)
        flat = x.reshape(-1, x.shape[-1])
        # Where heads are normalised they are kept apart: a TPU's compiler would move flat ones to another layout.
        apart = self.q_norm is not None
        products = (_product(p, flat, rounds=self.rounds) for p in (self.q, self.k, self.v))
        products = undivided(x, [product if apart else kept(product, ATTENTION) for product in products])
        divided = [product.reshape(*x.shape[:2], -1, self.head_dim) for product in products]
        q, k, v = (kept(heads, ATTENTION) if apart else heads for heads in divided)
        gate = None
        if self.gated:
            q, gate = q[:, :, ::2], q[:, :, 1::2]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = rotate(k, cos, sin).astype(compute_dtype), v.astype(compute_dtype)
        out = mix(rotate(q, cos, sin), k, v)
        out = out if gate is None else out * jax.nn.sigmoid(gate.astype(x.dtype))
        return self.o(out.reshape(flat.shape[0], -1)).reshape(x.shape), (k, v)

    def _heads_first(self, x: Array, cos: Array, sin: Array, mix: Mix, dtype: DTypeLike) -> tuple[Array, Any]:
        """Compute the same in the order of a TPU's kernels, heads before positions, in fewer passes over memory."""

        def heads_of(linear: nnx.Linear, norm: Any = None, *, turns: bool = True) -> Array:
            sides = (x.shape[-1],), (linear.kernel.shape[-1] // self.head_dim, self.head_dim)
            heads = kept(project(linear, x, TO_HEADS, *sides).astype(linear.dtype), ATTENTION)
            return (turned(heads, norm, cos, sin) if turns else heads).transpose(0, 2, 1, 3)

        q, k, v = heads_of(self.q, self.q_norm), heads_of(self.k, self.k_norm), heads_of(self.v, turns=False)
        k, v = k.astype(dtype), v.astype(dtype)
        out = mix(q, k, v)
        return project(self.o, out, FROM_HEADS, out.shape[2:], (x.shape[-1],)), (k, v)


def turned(
    heads: Float[Array, "B heads N h"],
    norm: nnx.RMSNorm | None,
    cos: Float[Array, "B N half"],
    sin: Float[Array, "B N half"],
) -> Float[Array, "B heads N h"]:
    """Normalise heads and rotate them by position, as ``rotate(norm(heads))`` does; the result has the dtype of cos.

    The halves of a head change places in a product with a permutation, exactly and within the matrix unit, where a
    TPU's compiler would keep each half of 64 lanes in an array of its own. They do so as they were rounded, before the
    norm: its factor is the same for both, and its weights are multiplied into cos and sin.
    """
    width, half = heads.shape[-1], cos.shape[-1]
    order = np.r_[half : 2 * half, :half, 2 * half : width]
    swapped = jnp.einsum(
        "bhnd,de->bhne", heads, jnp.asarray(np.eye(width)[order].T, heads.dtype), preferred_element_type=cos.dtype
    )
    beyond = jnp.zeros((*cos.shape[:-1], width - 2 * half), cos.dtype)
    cos = jnp.concatenate([cos, cos, beyond + 1], axis=-1)[:, None]
    sin = jnp.concatenate([-sin, sin, beyond], axis=-1)[:, None]
    heads = heads.astype(cos.dtype)
    if norm is None:
        return heads * cos + swapped * sin
    assert norm.scale is not None
    weights = norm.scale[...].astype(cos.dtype)
    factor = jax.lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True) + norm.epsilon)
    return factor * (heads * (cos * weights) + swapped * (sin * weights[order]))


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)).

    Rows and positions are merged before the matmuls, here and in attention: the weight gradients of
    three-dimensional operands take twice as long on a CPU.
    """

    def __init__(self, cfg: QwenConfig, *, linear: Any, width: int, rngs: nnx.Rngs):
        self.rounds = _rounds(cfg)
        self.gate = linear("gate", cfg.hidden_size, width, use_bias=False, rngs=rngs)
        self.up = linear("up", cfg.hidden_size, width, use_bias=False, rngs=rngs)
        self.down = linear("down", width, cfg.hidden_size, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        flat = x.reshape(-1, x.shape[-1])
        gate, up = (kept(_product(p, flat, rounds=self.rounds), FED).astype(x.dtype) for p in (self.gate, self.up))
        return self.down(jax.nn.silu(gate) * up).reshape(x.shape)


def _rounds(cfg: QwenConfig) -> bool:
    """Return whether projections are rounded to the compute dtype: routers and states amplify what that changes."""
    return cfg.experts is None and cfg.delta is None


def _product(linear: nnx.Linear, x: Float[Array, "rows D"], *, rounds: bool) -> Float[Array, "rows F"]:
    """Return a product, in the dtype of its operands if it ``rounds``."""
    return linear(x).astype(linear.dtype) if rounds else linear(x)


def _fed(
    layer: Any, x: Float[Array, "B N D"], counted: Bool[Array, "B N"], chosen: Int[Array, "B N k"] | None
) -> tuple[Float[Array, "B N D"], Routing | None]:
    """Add a layer's MLP, or its experts, to the stream; ``counted`` and ``chosen`` as in ``MoE``."""
    if not isinstance(layer.mlp, MoE):
        return x + _summed(layer.mlp(layer.mlp_norm(x)), x), None
    mlp_out, routing = layer.mlp(layer.mlp_norm(x), counted=counted, chosen=chosen)
    return x + _summed(mlp_out, x), routing


def _summed(part: Float[Array, "B N D"], stream: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
    """Keep a narrow part as it is until its sum over devices is done: XLA would widen it before, for the stream."""
    return part if part.dtype == stream.dtype else jax.lax.optimization_barrier(part)


class Layer(nnx.Module):
    """One pre-norm decoder layer; the residual stream keeps its dtype."""

    def __init__(self, cfg: QwenConfig, *, linear: Any, norm: Any, mlp: Any, rngs: nnx.Rngs, heads_first: bool = False):
        self.attention_norm = norm(cfg.hidden_size, rngs=rngs)
        self.attention = Attention(cfg, linear=linear, norm=norm, rngs=rngs, heads_first=heads_first)
        self.mlp_norm = norm(cfg.hidden_size, rngs=rngs)
        self.mlp = mlp(rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B N D"],
        cos: Float[Array, "B N half"],
        sin: Float[Array, "B N half"],
        mix: Mix,
        *,
        compute_dtype: DTypeLike,
        counted: Bool[Array, "B N"],
        chosen: Int[Array, "B N k"] | None = None,
    ) -> tuple[Float[Array, "B N D"], tuple[Float[Array, "B N kv h"], Float[Array, "B N kv h"]], Routing | None]:
        """Return the stream, keys and values, and the routing of experts; ``counted`` and ``chosen`` as in ``MoE``."""
        attention_out, kv = self.attention(self.attention_norm(x), cos, sin, mix, compute_dtype=compute_dtype)
        x, routing = _fed(self, x + _summed(attention_out, x), counted, chosen)
        return x, kv, routing


class DeltaLayer(nnx.Module):
    """One pre-norm layer with a gated delta net in the place of attention."""

    def __init__(self, cfg: QwenConfig, sizes: DeltaSizes, *, linear: Any, norm: Any, mlp: Any, rngs: nnx.Rngs):
        self.attention_norm = norm(cfg.hidden_size, rngs=rngs)
        self.delta = DeltaNet(cfg, sizes, linear=linear, rngs=rngs)
        self.mlp_norm = norm(cfg.hidden_size, rngs=rngs)
        self.mlp = mlp(rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B N D"],
        valid: Bool[Array, "B N"],
        state: DeltaState,
        *,
        counted: Bool[Array, "B N"],
        chosen: Int[Array, "B N k"] | None = None,
        rule: Rule | None = None,
    ) -> tuple[Float[Array, "B N D"], DeltaState, Routing | None]:
        """Return the stream, the state after it, and the routing of experts as ``Layer`` does; ``rule`` of the net."""
        delta_out, new_state = self.delta(self.attention_norm(x), valid, state, rule)
        x, routing = _fed(self, x + delta_out, counted, chosen)
        return x, new_state, routing


class Qwen(nnx.Module):
    """The whole decoder, layers of a kind stacked along a first axis; the matrices in ``adapted`` have adapters.

    ``sums`` is the dtype of what attention and MLP add to the stream, and of sums over devices within them;
    ``heads_first`` the order of attention's heads, for TPUs (``project``): of dense policies alone, whose products are
    rounded.
    """

    def __init__(
        self,
        cfg: QwenConfig,
        *,
        compute_dtype: DTypeLike,
        rngs: nnx.Rngs,
        adapted: frozenset[str] = frozenset(),
        adapter_scale: float = 1.0,
        experts: ExpertsKind = "grouped",
        mesh: Mesh | None = None,
        sums: DTypeLike | None = None,
        heads_first: bool = False,
    ):
        stream = jnp.promote_types(compute_dtype, jnp.float32)
        sums = stream if sums is None else jnp.dtype(sums)

        def linear(name: str, into: int, out: int, **options: Any) -> nnx.Linear:
            kind = partial(Adapted, scale=adapter_scale) if name in adapted else nnx.Linear
            result = sums if name in SUMMED else stream
            return kind(into, out, dtype=compute_dtype, preferred_element_type=result, **options)

        dense = partial(MLP, cfg, linear=linear)
        mlp = partial(dense, width=cfg.intermediate_size)
        if cfg.experts is not None:
            moe_args = {
                "dtype": compute_dtype,
                "adapted": adapted,
                "scale": adapter_scale,
                "kind": experts,
                "mesh": mesh,
            }
            mlp = partial(MoE, cfg, cfg.experts, linear=linear, shared=dense, sums=sums, **moe_args)
        norm = partial(CentredNorm if cfg.delta else nnx.RMSNorm, epsilon=cfg.rms_norm_eps, dtype=stream)
        self.embed = nnx.Embed(cfg.vocab_size, cfg.hidden_size, rngs=rngs)
        self.norm = norm(cfg.hidden_size, rngs=rngs)
        self.head = (
            None
            if cfg.tie_word_embeddings
            else linear("head", cfg.hidden_size, cfg.vocab_size, use_bias=False, rngs=rngs)
        )

        options = {"linear": linear, "norm": norm, "mlp": mlp}
        self.layers = _stacked(partial(Layer, cfg, heads_first=heads_first, **options), len(cfg.attention_layers), rngs)
        if cfg.delta is not None:
            self.delta_layers = _stacked(partial(DeltaLayer, cfg, cfg.delta, **options), len(cfg.delta_layers), rngs)


def _stacked(layer: Any, count: int, rngs: nnx.Rngs) -> Any:
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs: nnx.Rngs) -> Any:
        return layer(rngs=rngs)

    return stack(rngs)
