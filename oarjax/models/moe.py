"""Mixture of experts: a router sends every token to ``per_token`` of ``count`` small MLPs and adds up what they give.

p = softmax(x W_router) in float32; the likeliest k experts e_1 .. e_k have weights p_e, divided by their sum where the
config says so; y = sum_i p_{e_i} * down_{e_i}(silu(gate_{e_i} x) * up_{e_i} x). No expert has a capacity: no token is
dropped, padding is computed as any token, and a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from oarjax.models.grouped_dot import grouped_dot
from oarjax.models.qwen_config import Experts, QwenConfig
from oarjax.models.sharding import row_axes

ExpertsKind = Literal["grouped", "dense"]
"""grouped: each expert computes its own tokens; dense: every expert computes every token, and most of it is unused."""


def experts_for(mesh: Mesh) -> ExpertsKind:
    """Choose by the mesh: dense on CPUs, where XLA masks a dense product for every group, else grouped."""
    return "dense" if mesh.devices.flat[0].platform == "cpu" else "grouped"


def route(
    logits: Float[Array, "R E"], *, per_token: int, normalised: bool
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Return the weights and numbers of the likeliest experts of every token, the first among equals first."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), per_token)
    if normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


class ExpertLinear(nnx.Module):
    """Hold the linear maps of all experts, stacked: [expert, in, out], with stacked adapters where there are any."""

    def __init__(self, count: int, into: int, out: int, *, dtype: DTypeLike, adapted: bool, scale: float):
        self.dtype, self.scale = jnp.dtype(dtype), scale
        self.kernel = nnx.Param(jnp.zeros((count, into, out)))
        self.lora_a = nnx.Param(jnp.zeros((count, into, 1))) if adapted else None
        self.lora_b = nnx.Param(jnp.zeros((count, 1, out))) if adapted else None

    def matrices(self) -> tuple[Array, ...]:
        """Return the kernel, and A and B where there are adapters, in the compute dtype."""
        held = (self.kernel, self.lora_a, self.lora_b)
        return tuple(m[...].astype(self.dtype) for m in held if m is not None)


class MoE(nnx.Module):
    """The experts of one layer and their router, in the place of an MLP."""

    def __init__(
        self,
        cfg: QwenConfig,
        experts: Experts,
        *,
        linear: Any,
        dtype: DTypeLike,
        adapted: frozenset[str],
        scale: float,
        kind: ExpertsKind,
        mesh: Mesh | None,
        rngs: nnx.Rngs,
    ):
        self.experts, self.kind, self.mesh = experts, kind, mesh
        self.dtype, self.stream = jnp.dtype(dtype), jnp.promote_types(dtype, jnp.float32)
        self.scale = scale
        embed, ffn = cfg.hidden_size, cfg.intermediate_size

        def stacked(name: str, into: int, out: int) -> ExpertLinear:
            return ExpertLinear(experts.count, into, out, dtype=dtype, adapted=name in adapted, scale=scale)

        self.router = linear("router", embed, experts.count, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = (
            stacked("gate", embed, ffn),
            stacked("up", embed, ffn),
            stacked("down", ffn, embed),
        )

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = route(self.router(flat), per_token=self.experts.per_token, normalised=self.experts.normalised)
        matrices = tuple(m.matrices() for m in (self.gate, self.up, self.down))
        compute = partial(
            {"grouped": _grouped, "dense": _dense}[self.kind], scale=self.scale, dtype=self.dtype, stream=self.stream
        )
        out = _divided(self.mesh, flat.shape[0], matrices)(compute)(flat, weights, chosen, matrices)
        return out.reshape(x.shape)


Matrices = tuple[tuple[Array, ...], ...]
"""Of gate, up and down: the kernel [E in out], or kernel, A and B."""


def _grouped(
    flat: Float[Array, "R D"],
    weights: Float[Array, "R k"],
    chosen: Int[Array, "R k"],
    matrices: Matrices,
    *,
    scale: float,
    dtype: DTypeLike,
    stream: DTypeLike,
) -> Float[Array, "R D"]:
    """Sort the tokens' copies by expert, so that each expert's stand together, and put the results back."""
    gate, up, down = matrices
    owner = chosen.reshape(-1)
    order = jnp.argsort(owner, stable=True)
    sizes = jnp.zeros((gate[0].shape[0],), jnp.int32).at[owner].add(1)

    def linear(rows: Array, held: tuple[Array, ...]) -> Array:
        rows, product = rows.astype(dtype), partial(grouped_dot, sizes=sizes, dtype=stream)
        plain = product(rows, held[0])
        return plain if len(held) == 1 else plain + scale * product(product(rows, held[1]).astype(dtype), held[2])

    rows = flat[order // chosen.shape[1]]
    out = linear(jax.nn.silu(linear(rows, gate)) * linear(rows, up), down)
    back = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(back * weights[..., None], axis=1)


def _dense(
    flat: Float[Array, "R D"],
    weights: Float[Array, "R k"],
    chosen: Int[Array, "R k"],
    matrices: Matrices,
    *,
    scale: float,
    dtype: DTypeLike,
    stream: DTypeLike,
) -> Float[Array, "R D"]:
    """Compute every expert for every token, and weigh those that were not chosen with 0."""
    gate, up, down = matrices
    count = gate[0].shape[0]
    share = jnp.sum(jax.nn.one_hot(chosen, count, dtype=weights.dtype) * weights[..., None], axis=1)

    def linear(rows: Array, held: tuple[Array, ...]) -> Array:
        def product(x: Array, matrix: Array) -> Array:
            every = "rd,edf->erf" if x.ndim == 2 else "erd,edf->erf"
            return jnp.einsum(every, x.astype(dtype), matrix, preferred_element_type=stream)

        plain = product(rows, held[0])
        return plain if len(held) == 1 else plain + scale * product(product(rows, held[1]), held[2])

    out = linear(jax.nn.silu(linear(flat, gate)) * linear(flat, up), down)
    return jnp.sum(out * share.T[..., None], axis=0)


def _divided(mesh: Mesh | None, rows: int, matrices: Matrices) -> Callable[[Any], Any]:
    """Let every device sort its own rows: over the row axes, the experts' inner width over ``tensor``.

    Without it the compiler would sort the rows of all devices together. Where the mesh does not divide the sizes, the
    function is left to the compiler.
    """
    if mesh is None or mesh.size == 1:
        return lambda compute: compute
    over, tensor = row_axes(mesh.shape), mesh.shape.get("tensor", 1)
    parts = mesh.size // tensor
    if rows % parts or matrices[2][0].shape[1] % tensor:
        return lambda compute: compute
    inner = "tensor" if "tensor" in mesh.shape else None
    into, out = PartitionSpec(None, None, inner), PartitionSpec(None, inner, None)
    whole, row = PartitionSpec(), PartitionSpec(over, None)
    up = (into, whole, into)[: len(matrices[1])]
    specs = ((into, whole, into)[: len(matrices[0])], up, (out, out, whole)[: len(matrices[2])])

    def divide(compute: Any) -> Any:
        def one(*args: Any) -> Array:
            found = compute(*args)
            return found if inner is None else jax.lax.psum(found, inner)

        return jax.shard_map(one, mesh=mesh, in_specs=(row, row, row, specs), out_specs=row, check_vma=False)

    return divide
