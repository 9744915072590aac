"""Mixture of experts: a router sends every token to ``per_token`` of ``count`` small MLPs and adds up their outputs.

p = softmax(x W_router) in float32; the k most likely experts e_1 .. e_k have weights p_e, divided by their sum if the
config says so; y = sum_i p_{e_i} * down_{e_i}(silu(gate_{e_i} x) * up_{e_i} x). Where a shared expert is, which every
token visits, sigmoid(x w) times its output is added. Experts have no capacity limit: no token is dropped, padding is
computed like any token, and a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from oarjax.kernels.grouped_dot import grouped_dot
from oarjax.kernels.linear_pair import linear_pair
from oarjax.models.qwen_config import Experts, QwenConfig
from oarjax.models.sharding import row_axes
from oarjax.types import Routing

ExpertsKind = Literal["grouped", "dense", "few"]
"""grouped: each expert computes its own tokens; dense: every expert computes every token, most results go unused; few:
the same in the form for few tokens, of a decode step."""

FEW = 512
"""Most tokens of a product for which a decode step takes ``few``. A v5p does their FLOPs for every expert in the time
in which it reads the experts three times, other TPUs in less; ``grouped`` takes three, as its kernel gets a copy."""

ROWS_AT_ONCE = 2048
"""Rows of all devices of an expert axis that each of them computes in one product."""


def experts_for(mesh: Mesh) -> ExpertsKind:
    """Choose by the mesh: dense on CPUs, where XLA masks a dense product for every group, else grouped."""
    return "dense" if mesh.devices.flat[0].platform == "cpu" else "grouped"


def experts_of_step(kind: ExpertsKind, tokens: int, mesh: Mesh | None) -> ExpertsKind:
    """Return how a decode step of so many tokens computes its experts."""
    sizes = {} if mesh is None else mesh.shape
    parts = math.prod(size for axis, size in sizes.items() if axis not in ("tensor", "expert"))
    return "few" if tokens <= FEW * parts else kind


def route(
    probs: Float[Array, "R E"], *, per_token: int, normalised: bool, chosen: Int[Array, "R k"] | None = None
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Return every token's most likely experts, weights and indices; ties go to the lower index.

    Given ``chosen``, these are the experts, however likely.
    """
    if chosen is None:
        weights, chosen = jax.lax.top_k(probs, per_token)
    else:
        weights = jnp.take_along_axis(probs, chosen, axis=-1)
    if normalised:  # padding has choices that nobody made, whose probabilities may all be 0
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(weights.dtype).tiny)
    return weights, chosen


def index_dtype(count: int) -> Any:
    """Return the smallest dtype that holds the indices of so many experts."""
    return jnp.dtype(jnp.int8 if count <= 128 else jnp.int16)


def balance_loss(routing: Routing) -> Float[Array, ""]:
    """Return E sum_e f_e P_e over all layers together: k where load and probability are even, at most E k.

    f_e is the number of choices of expert e per token, without a gradient, and P_e its mean probability
    (arXiv 2101.03961, eq. 4, where k is 1).
    """
    tokens = jnp.maximum(jnp.sum(routing.tokens), 1)
    load, probability = (x.reshape(-1, x.shape[-1]).sum(0) / tokens for x in (routing.load, routing.probability))
    return load.shape[-1] * jnp.sum(load * probability)


class ExpertLinear(nnx.Module):
    """Stack one linear map of every expert as [expert, in, out], with stacked adapters if ``adapted``."""

    def __init__(self, count: int, into: int, out: int, *, dtype: DTypeLike, adapted: bool, scale: float):
        self.dtype, self.scale = jnp.dtype(dtype), scale
        self.kernel = nnx.Param(jnp.zeros((count, into, out)))
        self.lora_a = nnx.Param(jnp.zeros((count, into, 1))) if adapted else None
        self.lora_b = nnx.Param(jnp.zeros((count, 1, out))) if adapted else None

    def matrices(self) -> tuple[Array, ...]:
        """Return the kernel, and A and B if there are adapters, in the compute dtype."""
        parameters = (self.kernel, self.lora_a, self.lora_b)
        return tuple(p[...].astype(self.dtype) for p in parameters if p is not None)


class MoE(nnx.Module):
    """Replace a layer's MLP by experts and their router."""

    def __init__(
        self,
        cfg: QwenConfig,
        experts: Experts,
        *,
        linear: Any,
        shared: Callable[..., Callable[[Array], Array]],
        dtype: DTypeLike,
        adapted: frozenset[str],
        scale: float,
        kind: ExpertsKind,
        mesh: Mesh | None,
        sums: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.experts, self.kind, self.mesh = experts, kind, mesh
        self.dtype, self.stream = jnp.dtype(dtype), jnp.promote_types(dtype, jnp.float32)
        self.scale, self.sums = scale, jnp.dtype(sums)
        embed, ffn = cfg.hidden_size, cfg.intermediate_size

        def stacked(name: str, into: int, out: int) -> ExpertLinear:
            return ExpertLinear(experts.count, into, out, dtype=dtype, adapted=name in adapted, scale=scale)

        self.router = linear("router", embed, experts.count, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = (
            stacked("gate", embed, ffn),
            stacked("up", embed, ffn),
            stacked("down", ffn, embed),
        )
        if experts.shared is not None:
            self.shared = shared(width=experts.shared, rngs=rngs)
            self.shared_gate = linear("shared_gate", embed, 1, use_bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B N D"], *, counted: Bool[Array, "B N"], chosen: Int[Array, "B N k"] | None = None
    ) -> tuple[Float[Array, "B N D"], Routing]:
        """Return the output and where tokens went: to ``chosen`` experts, by default to those that the router prefers.

        The routing's sums are over ``counted`` tokens.
        """
        flat, k = x.reshape(-1, x.shape[-1]), self.experts.per_token
        probs = jax.nn.softmax(self.router(flat), axis=-1)
        choice = None if chosen is None else chosen.reshape(-1, k).astype(jnp.int32)
        weights, chosen = route(probs, per_token=k, normalised=self.experts.normalised, chosen=choice)
        matrices = tuple(m.matrices() for m in (self.gate, self.up, self.down))
        compute = partial(
            {"grouped": _grouped, "dense": _dense, "few": partial(_dense, few=True)}[self.kind],
            scale=self.scale,
            dtype=self.dtype,
            stream=self.stream,
        )
        out = _divided(self.mesh, flat.shape[0], matrices, self.sums)(compute)(flat, weights, chosen, matrices)
        counts = counted.reshape(-1, 1).astype(probs.dtype)
        routing = Routing(
            chosen=chosen.reshape(*x.shape[:2], k).astype(index_dtype(self.experts.count)),
            load=jnp.zeros(probs.shape[-1], probs.dtype).at[chosen].add(jnp.broadcast_to(counts, chosen.shape)),
            probability=jnp.sum(probs * counts, axis=0),
            tokens=jnp.sum(counts),
        )
        if self.experts.shared is not None:
            out += jax.nn.sigmoid(self.shared_gate(flat)) * self.shared(flat)
        return out.reshape(x.shape), routing


Matrices = tuple[tuple[Array, ...], ...]
"""For each of gate, up and down: the kernel [E in out], or kernel, A and B."""


def _count(matrices: Matrices) -> int:
    """Return the number of experts."""
    return matrices[0][0].shape[0]


def _expert_mlp(
    rows: Array,
    matrices: Matrices,
    product: Callable[[Array, Array], Array],
    scale: float,
    share: Float[Array, "E R 1"] | None = None,
    last: Callable[[Array, Array], Array] | None = None,
) -> Array:
    """Return down(silu(gate(rows)) * up(rows)), each linear map with its adapter; ``product`` picks rows' experts.

    What goes down is multiplied by a ``share``; ``last`` is the product that gives the result.
    """

    def linear(x: Array, kernel: Array, *adapter: Array, result: Callable[[Array, Array], Array] = product) -> Array:
        if not adapter:
            return result(x, kernel)
        a, b = adapter
        return result(x, kernel) + scale * result(product(x, a), b)

    gate, up, down = matrices
    inner = jax.nn.silu(linear(rows, *gate)) * linear(rows, *up)
    return linear(inner if share is None else inner * share, *down, result=last or product)


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
    """Sort the tokens' copies by expert, let each expert compute its block, and restore the tokens' order.

    Copies for numbers outside 0 .. E - 1 come last, are left out of every block and add 0: in the tokens' order, where
    a select goes into the sum.
    """
    count = _count(matrices)
    is_here = (chosen >= 0) & (chosen < count)
    owner = jnp.where(is_here, chosen, count).reshape(-1)
    order = jnp.argsort(owner, stable=True)
    sizes = jnp.zeros((count,), jnp.int32).at[owner].add(1, mode="drop")

    def product(x: Array, matrix: Array, beyond: Literal["zero", "any"] = "zero") -> Array:
        return grouped_dot(x.astype(dtype), matrix, sizes=sizes, dtype=stream, beyond=beyond)

    rows = flat[order // chosen.shape[1]]
    out = _expert_mlp(rows, matrices, product, scale, last=partial(product, beyond="any"))
    by_token = permuted(out, jnp.argsort(order), order).reshape(*chosen.shape, -1)
    return jnp.sum(jnp.where(is_here[..., None], by_token, 0) * weights[..., None], axis=1)


def permuted(rows: Float[Array, "R D"], order: Int[Array, "R"], inverse: Int[Array, "R"]) -> Float[Array, "R D"]:
    """Return the rows in an order, of which ``inverse`` is the inverse: cotangents are gathered, too, not scattered."""

    def push(order: Array, inverse: Array, rows: Array) -> tuple[Array, ...]:
        return (rows[order],)

    def pull(order: Array, inverse: Array, cotangents: Array) -> tuple[Array, ...]:
        return (cotangents[inverse],)

    return linear_pair(push, pull, (order, inverse), (rows,))[0]


def _dense(
    flat: Float[Array, "R D"],
    weights: Float[Array, "R k"],
    chosen: Int[Array, "R k"],
    matrices: Matrices,
    *,
    scale: float,
    dtype: DTypeLike,
    stream: DTypeLike,
    few: bool = False,
) -> Float[Array, "R D"]:
    """Compute every expert for every token; experts that were not chosen get weight 0, numbers without one add 0.

    Of ``few`` tokens every expert has a copy, and its products read its matrices as they lie. Their weights come before
    the last product, which the compiler makes the sum over experts as well.
    """
    share = jnp.sum(jax.nn.one_hot(chosen, _count(matrices), dtype=weights.dtype) * weights[..., None], axis=1)

    def product(x: Array, matrix: Array) -> Array:
        subscripts = "rd,edf->erf" if x.ndim == 2 else "erd,edf->erf"
        return jnp.einsum(subscripts, x.astype(dtype), matrix, preferred_element_type=stream)

    if few:
        copies = jnp.broadcast_to(flat, (_count(matrices), *flat.shape))
        return jnp.sum(_expert_mlp(copies, matrices, product, scale, share.T[..., None]), axis=0)
    out = _expert_mlp(flat, matrices, product, scale)
    return jnp.sum(out * share.T[..., None], axis=0)


def _divided(mesh: Mesh | None, rows: int, matrices: Matrices, sums: DTypeLike) -> Callable[[Any], Any]:
    """Let every device sort its own rows: over the row axes, the experts' inner width over ``tensor``.

    Otherwise the compiler would sort the rows of all devices together. If the mesh does not divide the sizes, the
    compiler decides the sharding.

    On a mesh with an axis ``expert`` of E devices each holds 1/E of the experts, whole but for ``tensor``. They gather
    one another's rows, each computes what its own experts add to them, and the sums go back. Many rows are computed
    part after part, and again going backward, which bounds their copies in memory; few, as in decoding, at once, which
    reads the experts once. With k experts per token and E <= k + 1 that moves no more than to send every copy of a row
    to its expert, and needs no capacity: no token is dropped. Rows and their sums travel as ``sums``.
    """
    if mesh is None or mesh.size == 1:
        return lambda compute: compute
    axes, tensor, experts = row_axes(mesh.shape), mesh.shape.get("tensor", 1), mesh.shape.get("expert", 1)
    if rows % (mesh.size // tensor) or matrices[2][0].shape[1] % tensor or _count(matrices) % experts:
        return lambda compute: compute
    inner, owner = ("tensor" if "tensor" in mesh.shape else None), ("expert" if experts > 1 else None)
    into, out = PartitionSpec(owner, None, inner), PartitionSpec(owner, inner, None)
    by_expert, row = PartitionSpec(owner), PartitionSpec(axes, None)
    up = (into, by_expert, into)[: len(matrices[1])]
    specs = ((into, by_expert, into)[: len(matrices[0])], up, (out, out, by_expert)[: len(matrices[2])])

    def divide(compute: Any) -> Any:
        def on_device(flat: Array, weights: Array, chosen: Array, local_matrices: Matrices) -> Array:
            if owner is None:
                return compute(flat, weights, chosen, local_matrices).astype(sums)
            first_expert = jax.lax.axis_index(owner) * _count(local_matrices)
            # Tiled, since the batching rule of other scatters is wrong in jax 0.10.
            gathered = jax.lax.all_gather((flat.astype(sums), weights, chosen), owner, tiled=True)
            count = 1 if gathered[0].shape[0] <= ROWS_AT_ONCE else experts
            parts = jax.tree.map(lambda x: x.reshape(count, -1, x.shape[-1]), gathered)

            # Computed again going backward: what each part leaves for that is many times its rows.
            @partial(jax.checkpoint, prevent_cse=False)
            def add(part: tuple[Array, Array, Array]) -> Array:
                return compute(part[0], part[1], part[2] - first_expert, local_matrices)

            outputs = jax.lax.map(add, parts)
            outputs = outputs.reshape(-1, flat.shape[-1]).astype(sums)
            return jax.lax.psum_scatter(outputs, owner, tiled=True)

        def shard(*args: Any) -> Array:
            result = on_device(*args)
            return result if inner is None else jax.lax.psum(result, inner)

        return jax.shard_map(shard, mesh=mesh, in_specs=(row, row, row, specs), out_specs=row, check_vma=False)

    return divide
