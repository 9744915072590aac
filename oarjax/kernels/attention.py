"""One attention primitive: queries over several segments of keys under one softmax, in plain XLA.

It runs on every platform and covers every case; ``kernels.splash`` is the faster kernel for some of them on TPUs.

A segment is the new tokens themselves, the rows' own cache, or a prefix cache shared by a group of rows.
The segments are never concatenated and heads of keys are never repeated: each segment gives a maximum, a
sum and a weighted value, which are then joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Real

BlockedKind = Literal["splash", "blocked", "cudnn"]
AttentionKind = Literal["xla"] | BlockedKind


def attention_for(kind: Literal["auto"] | AttentionKind, mesh: Mesh) -> AttentionKind:
    """Resolve ``auto`` by the mesh: splash on TPUs, xla on CPUs, blocked elsewhere.

    The mesh's devices decide, not JAX's default backend: a program may be compiled for devices that are elsewhere.
    """
    if kind != "auto":
        return kind
    kinds: dict[str, AttentionKind] = {"tpu": "splash", "cpu": "xla"}
    return kinds.get(mesh.devices.flat[0].platform, "blocked")


LEAST_QUERIES, MOST_BLOCKS = 64, 4
"""Blocks of queries in causal attention: smaller ones cost more than they save, and each adds to a program."""


class Segment(NamedTuple):
    """Keys and values of R rows, heads first, shared by the G = B / R query rows r*G .. r*G + G-1."""

    k: Real[Array, "kv R h M"]
    v: Real[Array, "kv R M h"]
    mask: Bool[Array, "R #GN M"]  # True where a query may attend; G*N rows of queries, or 1 for all alike
    steps: Float[Array, "kv R 2 M"] | None = None  # of int8 keys, and of values

    @staticmethod
    def of(k: Float[Array, "R M kv h"], v: Float[Array, "R M kv h"], mask: Bool[Array, "R #GN M"]) -> Segment:
        """Return the segment of keys and values as projections give them."""
        return Segment(k.transpose(2, 0, 3, 1), v.transpose(2, 0, 1, 3), mask)


def attend(q: Float[Array, "B N heads h"], segments: tuple[Segment, ...]) -> Float[Array, "B N heads h"]:
    """Compute softmax(q k^T / sqrt(h)) v over the keys of all segments together.

    Head i reads key head i // (heads / kv) (grouped-query attention). Scores, maxima and sums are in
    float32, or float64 where q is; matmul operands keep the dtype of q. A query without keys
    gives 0. Scores are [B, heads, N, M] at once: no blocking. Steps of int8 keys and values multiply scores and
    weights.
    """
    rows, length, heads, width = q.shape
    kv = segments[0].k.shape[0]
    q = q.reshape(rows, length, kv, heads // kv, width).transpose(2, 0, 3, 1, 4)
    segment_scores = [_scores(q, s) for s in segments]
    # One common peak: the softmax does not depend on it, so no gradient flows through it.
    peak = jax.lax.stop_gradient(reduce(jnp.maximum, [top for _, top in segment_scores]))
    parts = [_weighted_values(scores, peak, s, q.dtype) for (scores, _), s in zip(segment_scores, segments)]
    total = reduce(jnp.add, [weight for weight, _ in parts])
    out = reduce(jnp.add, [value for _, value in parts])
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.transpose(1, 3, 0, 2, 4).reshape(rows, length, heads, width).astype(q.dtype)


def segment_mixer(masks: Sequence[Array], valid: Bool[Array, "B N"]) -> Callable[..., Array]:
    """Return a function (stored keys and values, heads first, q, own k, own v) -> attention, causal for the new.

    Queries are taken in up to MOST_BLOCKS blocks of LEAST_QUERIES and more, each with the new keys up to its own end:
    what causality hides of a square is then mostly not computed.
    """
    length = valid.shape[1]
    causal = valid[:, None, :] & jnp.tril(jnp.ones((length, length), bool))
    count = max(min(length // LEAST_QUERIES, MOST_BLOCKS), 1)
    bounds = [length * i // count for i in range(count + 1)]

    def part(mask: Bool[Array, "R #GN M"], start: int, stop: int) -> Bool[Array, "R #Gn M"]:
        rows, queries, slots = mask.shape
        if queries == 1:
            return mask
        return mask.reshape(rows, -1, length, slots)[:, :, start:stop].reshape(rows, -1, slots)

    def mix(stored: Sequence[tuple[Array, ...]], q: Array, k: Array, v: Array) -> Array:
        blocks = []
        for start, stop in pairwise(bounds):
            segments = [Segment(k, v, part(mask, start, stop), *steps) for (k, v, *steps), mask in zip(stored, masks)]
            own = Segment.of(k[:, :stop], v[:, :stop], causal[:, start:stop, :stop])
            blocks.append(attend(q[:, start:stop].astype(k.dtype), (*segments, own)))
        return jnp.concatenate(blocks, axis=1)

    return mix


def _scores(
    q: Float[Array, "kv B g N h"], segment: Segment
) -> tuple[Float[Array, "kv R g GN M"], Float[Array, "kv B g N"]]:
    """Compute the scores of one segment, lowest where masked, and their maximum per query."""
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    queries = _fold(q, segment.k.shape[1])
    scores = _matmul(queries, segment.k.astype(q.dtype), accumulate)
    scores = _in_steps(scores * jnp.asarray(q.shape[-1] ** -0.5, accumulate), segment, 0)
    scores = jnp.where(segment.mask[None, :, None], scores, jnp.finfo(accumulate).min)
    return scores, _unfold(scores.max(-1), q.shape[1])


def _weighted_values(
    scores: Float[Array, "kv R g GN M"], peak: Float[Array, "kv B g N"], segment: Segment, dtype: DTypeLike
) -> tuple[Float[Array, "kv B g N"], Float[Array, "kv B g N h"]]:
    """Compute the sum of exp(score - peak) and the values weighted with it, in products of ``dtype``."""
    rows = peak.shape[1]
    weights = jnp.exp(scores - _fold(peak, scores.shape[1])[..., None])
    weights = jnp.where(segment.mask[None, :, None], weights, 0.0)
    value = _matmul(_in_steps(weights, segment, 1).astype(dtype), segment.v.astype(dtype), scores.dtype)
    return _unfold(weights.sum(-1), rows), _unfold(value, rows)


def _in_steps(x: Float[Array, "kv R g GN M"], segment: Segment, of: int) -> Float[Array, "kv R g GN M"]:
    """Multiply by the steps of a segment's keys, ``of`` 0, or values, 1, if they are int8."""
    return x if segment.steps is None else x * segment.steps[:, :, of, None, None].astype(x.dtype)


def _matmul(
    a: Float[Array, "kv R g GN x"], b: Float[Array, "kv R x y"], accumulate: DTypeLike
) -> Float[Array, "kv R g GN y"]:
    """Multiply once per key head and row over all its queries, batch axes first, which is fast on every backend."""
    kv, owners, group, queries, inner = a.shape
    flat = a.reshape(kv, owners, group * queries, inner)
    out = jnp.matmul(flat, b, preferred_element_type=accumulate)
    return out.reshape(kv, owners, group, queries, b.shape[-1])


def _fold(x: Float[Array, "kv B g N *rest"], owners: int) -> Float[Array, "kv R g GN *rest"]:
    """Put the queries of rows that share a segment side by side."""
    kv, rows, group, length, *rest = x.shape
    share = rows // owners
    if share == 1:
        return x
    by_owner = x.reshape(kv, owners, share, group, length, *rest)
    return jnp.moveaxis(by_owner, 2, 3).reshape(kv, owners, group, share * length, *rest)


def _unfold(x: Float[Array, "kv R g GN *rest"], rows: int) -> Float[Array, "kv B g N *rest"]:
    """Invert ``_fold``."""
    kv, owners, group, queries, *rest = x.shape
    share = rows // owners
    if share == 1:
        return x
    by_owner = x.reshape(kv, owners, group, share, queries // share, *rest)
    return jnp.moveaxis(by_owner, 3, 2).reshape(kv, rows, group, queries // share, *rest)
