"""Gated delta nets (arXiv 2412.06464): linear attention, with a state of fixed size instead of keys and values.

Per value head a state S [dk, dv], zero at the start, takes in one token after another:

    S <- a_t S;   S <- S + k_t (b_t (v_t - S^T k_t))^T;   o_t = S^T q_t / sqrt(dk)

with a_t = exp(-exp(A_log) softplus(x_t W_a + dt_bias)) in (0, 1) and b_t = sigmoid(x_t W_b); q, k and v are silu of a
causal convolution over the last few x W_qkv, q and k at length 1. ``recurrent`` is this, for decoding. ``chunked``
gives the same for whole sequences in matrix products: within a chunk the corrections solve a triangular system, and
the state goes from chunk to chunk.

An invalid token does not change the state and is 0 in the convolution. Everything here is float32 (float64 in float64)
with full-precision products, since errors of a state persist; only projections are in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from oarjax.models.qwen_config import DeltaSizes, QwenConfig
from oarjax.types import DeltaState

CHUNK = 64
"""Tokens per chunk of the chunked form."""

Rule = Callable[..., tuple[Array, Array]]
"""The delta rule in one of its forms, from the arguments of ``recurrent`` to its results."""

exact = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def chunked(
    q: Float[Array, "B N Hv dk"],
    k: Float[Array, "B N Hv dk"],
    v: Float[Array, "B N Hv dv"],
    log_decay: Float[Array, "B N Hv"],
    rate: Float[Array, "B N Hv"],
    memory: Float[Array, "B Hv dk dv"],
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Return the outputs of N tokens and the state after them; q is scaled already.

    With g_i the sum of log decays up to i in a chunk, u solves (I + A) u = b (v - exp(g) k S), where
    A_ij = b_i exp(g_i - g_j) k_i . k_j for j < i.
    """
    rows, length, heads, _ = q.shape
    size = min(CHUNK, length)
    pad = -length % size

    def split(x: Array) -> Array:  # [chunks B Hv size ...], padding takes nothing in and decays nothing
        x = jnp.pad(x, [(0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(rows, -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 1), 2, 0)

    q, k, v, log_decay, rate = map(split, (q, k, v, log_decay, rate))
    total = jnp.cumsum(log_decay, axis=-1)
    causal = jnp.tril(jnp.ones((size, size), bool))
    gap = jnp.where(causal, total[..., :, None] - total[..., None, :], 0)
    decay_mask = jnp.where(causal, jnp.exp(gap), 0)
    system = exact("...id,...jd->...ij", k * rate[..., None], k) * decay_mask
    decay_from_start = jnp.exp(total)[..., None]
    rhs = jnp.concatenate([v, k * decay_from_start], axis=-1) * rate[..., None]
    solution = exact("...ij,...jd->...id", inverse_of(system), rhs)
    values, reads = jnp.split(solution, [v.shape[-1]], axis=-1)
    scores = exact("...id,...jd->...ij", q, k) * decay_mask
    decay_to_end = jnp.exp(total[..., -1:] - total)[..., None]

    def step(memory: Array, xs: Any) -> tuple[Array, Array]:
        queries, keys, values, reads, scores, chunk_decay = xs
        update = values - exact("bhik,bhkv->bhiv", reads, memory)
        out = exact("bhik,bhkv->bhiv", queries, memory) + exact("bhij,bhjv->bhiv", scores, update)
        return memory * chunk_decay[..., None, None] + exact("bhik,bhiv->bhkv", keys, update), out

    xs = (q * decay_from_start, k * decay_to_end, values, reads, scores, jnp.exp(total[..., -1]))
    memory, out = jax.lax.scan(step, memory, xs)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 2), 1, 3)  # [B chunks size Hv dv]
    return out.reshape(rows, -1, heads, v.shape[-1])[:, :length], memory


@jax.custom_jvp
def inverse_of(system: Float[Array, "*D n n"]) -> Float[Array, "*D n n"]:
    """Invert I + L, where L is what stands below the diagonal of ``system``, in matrix products.

    With X the inverse of the blocks of size s on the diagonal and M what stands below these within blocks of 2 s, that
    of the larger blocks is X - X M X: log2 n steps, as stable as substitution. (On a CPU, calls of LAPACK's batched
    ``triangular_solve`` that run at once wait for one another's threads for ever, jaxlib 0.10.)
    """
    size = system.shape[-1]
    row, column = jnp.indices((size, size))
    inverse, block = jnp.broadcast_to(jnp.eye(size, dtype=system.dtype), system.shape), 1
    while block < size:
        below_diagonal = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        inverse -= exact("...ij,...jk,...kl->...il", inverse, jnp.where(below_diagonal, system, 0), inverse)
        block *= 2
    return inverse


@inverse_of.defjvp
def _inverse_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Return X and its tangent d X = -X dL X."""
    inverse, (change,) = inverse_of(*primals), tangents
    return inverse, -exact("...ij,...jk,...kl->...il", inverse, jnp.tril(change, -1), inverse)


def recurrent(
    q: Float[Array, "B N Hv dk"],
    k: Float[Array, "B N Hv dk"],
    v: Float[Array, "B N Hv dv"],
    log_decay: Float[Array, "B N Hv"],
    rate: Float[Array, "B N Hv"],
    memory: Float[Array, "B Hv dk dv"],
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Return what ``chunked`` returns, token after token."""

    def step(memory: Array, xs: Any) -> tuple[Array, Array]:
        q, k, v, log_decay, rate = xs
        decay = jnp.exp(log_decay)[..., None]
        error = rate[..., None] * (v - decay * exact("bhk,bhkv->bhv", k, memory))
        out = decay * exact("bhk,bhkv->bhv", q, memory) + jnp.sum(q * k, -1, keepdims=True) * error
        return memory * decay[..., None] + k[..., :, None] * error[..., None, :], out

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, rate))
    memory, out = jax.lax.scan(step, memory, xs)
    return jnp.moveaxis(out, 0, 1), memory


class GatedNorm(nnx.Module):
    """RMS norm times silu of a gate."""

    def __init__(self, width: int, *, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((width,)))

    def __call__(self, x: Float[Array, "*B h"], gate: Float[Array, "*B h"]) -> Float[Array, "*B h"]:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return x * self.scale[...].astype(x.dtype) * jax.nn.silu(gate)


class DeltaNet(nnx.Module):
    """The mixer of one layer."""

    def __init__(self, cfg: QwenConfig, sizes: DeltaSizes, *, linear: Any, rngs: nnx.Rngs):
        self.sizes = sizes
        make = partial(linear, use_bias=False, rngs=rngs)
        for name, width in sizes.projections.items():
            setattr(self, name, make(name, cfg.hidden_size, width))
        self.out = make("out", sizes.value_width, cfg.hidden_size)
        self.conv = nnx.Param(jnp.zeros((sizes.channels, 1, sizes.taps)))
        self.dt_bias = nnx.Param(jnp.zeros((sizes.value_heads,)))
        self.a_log = nnx.Param(jnp.zeros((sizes.value_heads,)))
        self.norm = GatedNorm(sizes.value_dim, epsilon=cfg.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "B N D"], valid: Bool[Array, "B N"], state: DeltaState, rule: Rule | None = None
    ) -> tuple[Float[Array, "B N D"], DeltaState]:
        """Mix N tokens that follow a state; return the state after them as well.

        ``rule`` takes the place of ``recurrent``, with memory as it wants it.
        """
        sizes, flat, mask = self.sizes, x.reshape(-1, x.shape[-1]), valid[..., None]
        products = undivided(x, [getattr(self, name)(flat) for name in sizes.projections])
        projected = {name: p.reshape(*x.shape[:2], -1) for name, p in zip(sizes.projections, products)}
        qkv, z, a, b = _by_key_head(projected, sizes) if sizes.joined else projected.values()
        inputs = jnp.concatenate([state.tail, jnp.where(mask, qkv, 0)], axis=1)
        taps = self.conv[...].astype(qkv.dtype)
        qkv = sum(inputs[:, i : i + x.shape[1]] * taps[:, 0, i] for i in range(sizes.taps))
        q, k, v = jnp.split(jax.nn.silu(qkv), [sizes.key_width, 2 * sizes.key_width], axis=-1)
        q, k, v = (t.reshape(*x.shape[:2], -1, width) for t, width in zip((q, k, v), sizes.widths))
        share = sizes.value_heads // sizes.key_heads
        q, k = (jnp.repeat(_unit(t), share, axis=2) for t in (q, k))
        log_decay = -jnp.exp(self.a_log[...].astype(a.dtype)) * jax.nn.softplus(a + self.dt_bias[...].astype(a.dtype))
        rule = rule or (recurrent if x.shape[1] == 1 else chunked)
        mix, memory = rule(
            q * sizes.key_dim**-0.5,
            k,
            v,
            jnp.where(mask, log_decay, 0),
            jnp.where(mask, jax.nn.sigmoid(b), 0),
            state.memory,
        )
        out = self.norm(mix, z.reshape(mix.shape)).reshape(flat.shape[0], -1)
        return self.out(out).reshape(x.shape), DeltaState(memory, inputs[:, x.shape[1] :])


def undivided(x: Float[Array, "B N D"], products: list[Array]) -> list[Array]:
    """Keep the products of single tokens, as in a decode step, apart from what divides them into heads.

    A TPU's compiler would divide the matrices as well, and copy them into a layout for that.
    """
    return products if x.shape[1] > 1 else jax.lax.optimization_barrier(products)


def _by_key_head(projected: dict[str, Array], sizes: DeltaSizes) -> tuple[Array, ...]:
    """Take apart Qwen3-Next's projections, which hold each key head with the values and rates that belong to it."""
    share, rows = sizes.value_heads // sizes.key_heads, projected["ba"].shape[:2]
    heads = {name: x.reshape(*rows, sizes.key_heads, -1) for name, x in projected.items()}
    ends = [sizes.key_dim, 2 * sizes.key_dim, 2 * sizes.key_dim + share * sizes.value_dim]
    q, k, v, z = (part.reshape(*rows, -1) for part in jnp.split(heads["qkvz"], ends, axis=-1))
    b, a = (part.reshape(*rows, -1) for part in jnp.split(heads["ba"], 2, axis=-1))
    return jnp.concatenate([q, k, v], axis=-1), z, a, b


def _unit(x: Float[Array, "*B h"]) -> Float[Array, "*B h"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


# States ---------------------------------------------------------------------------------------------------------------


def empty_state(sizes: DeltaSizes, *shape: int, dtype: Any) -> DeltaState:
    """Return the state before any token; ``shape`` is [L, B] or [B]."""
    memory = (*shape, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return DeltaState(jnp.zeros(memory, dtype), jnp.zeros((*shape, sizes.taps - 1, sizes.channels), dtype))
