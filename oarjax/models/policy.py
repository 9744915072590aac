"""The interface of a model: four pure functions of its params, and four optional ones.

To add a model: write a ``Policy`` and pass it to ``oarjax.make_steps`` (docs/examples/custom_policy.py). To add another
Qwen family instead: see ``models/qwen_config.py``; ``models/qwen.py`` builds the Policy of all of them.

Parameters are an opaque pytree, and so is a cache to its users: ``init_cache`` creates it, ``trunk`` fills it, and
only ``take_rows``, ``grow``, ``first_slots`` and ``extend`` change it. Their defaults are for a ``KVCache``; a policy
with another cache, such as a recurrent state, provides its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.types import KVCache, Params, Routing


class Embed(Protocol):
    def __call__(self, params: Params, tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
        """Return input embeddings, float32 (the leaves that OAR-G differentiates)."""
        ...


class Trunk(Protocol):
    def __call__(
        self,
        params: Params,
        embeddings: Float[Array, "B N D"],
        positions: Int[Array, "B N"],
        valid: Bool[Array, "B N"],
        *,
        cache: KVCache | None = None,
        prefix: KVCache | None = None,
        visible: Bool[Array, "B N C"] | None = None,
    ) -> tuple[Float[Array, "B N D"], KVCache | None]:
        """Return final hidden states, after the last norm, and the cache with these N tokens appended.

        Without a cache: causal self-attention over N, invalid positions never attended to; the second
        result is None. With a cache of B rows: the N tokens are written at slots ``cache.length`` .. +N and
        attend to every valid slot before them and causally to one another. With a prefix of P rows, B = P*G:
        row b attends to all valid slots of prefix row b // G as well, which is read and never copied per row;
        with ``visible`` each query only to the C slots that it marks.
        """
        ...


class Routed(Protocol):
    def __call__(
        self,
        params: Params,
        embeddings: Float[Array, "B N D"],
        positions: Int[Array, "B N"],
        valid: Bool[Array, "B N"],
        *,
        cache: KVCache | None = None,
        prefix: KVCache | None = None,
        experts: Int[Array, "B N L k"] | None = None,
        counted: Bool[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N D"], KVCache | None, Routing]:
        """As ``Trunk``, with the routing of every layer; sums over ``counted`` tokens, by default the valid ones.

        ``experts`` are computed instead of the router's choice; their weights are the router's.
        """
        ...


class Unembed(Protocol):
    def __call__(self, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Return logits, float32, of final hidden states."""
        ...


class Head(Protocol):
    def __call__(self, params: Params) -> Params:
        """Prepare params for many calls of ``unembed``; every other function accepts the result too.

        Call it once before a loop over ``unembed``: a head that is sharded over devices is gathered here instead of in
        every turn. Gradients pass through to the params. Applied to its own result it changes nothing.
        """
        ...


class InitCache(Protocol):
    def __call__(self, rows: int, slots: int) -> KVCache:
        """Create an empty cache for ``rows`` sequences of at most ``slots`` tokens."""
        ...


class TakeRows(Protocol):
    def __call__(self, cache: KVCache, rows: Int[Array, "*D r"]) -> KVCache:
        """Return some rows of a cache, in the given order: see ``take_rows``."""
        ...


class Grow(Protocol):
    def __call__(self, cache: KVCache, slots: int, *, drop: int = 0) -> KVCache:
        """Make room for more tokens in a full cache: see ``grow``."""
        ...


class FirstSlots(Protocol):
    def __call__(self, cache: KVCache, count: int) -> KVCache:
        """Return the part of a cache that its first tokens wrote: see ``first_slots``."""
        ...


class Extend(Protocol):
    def __call__(self, cache: KVCache, more: KVCache) -> KVCache:
        """Join two caches, all slots of both written: what rows held, and what they added behind it."""
        ...


def extend(cache: KVCache, more: KVCache) -> KVCache:
    """Join two caches with all slots written, ``more`` behind ``cache``."""
    return replace(
        more,
        k=jnp.concatenate([cache.k, more.k], axis=2),
        v=jnp.concatenate([cache.v, more.v], axis=2),
        valid=jnp.concatenate([cache.valid, more.valid], axis=1),
        length=cache.length + more.length,
    )


def take_rows(cache: KVCache, rows: Int[Array, "*D r"]) -> KVCache:
    """Return the rows of a cache with these numbers, in this order; -1 gives an empty row.

    With ``rows`` [D, r] the cache's rows are D equal blocks one after another: block d of the result takes from block
    d, by the number within it. So rows that are sharded over D devices stay on their device.
    """
    return replace(
        cache,
        k=taken(cache.k, rows, axis=1),
        v=taken(cache.v, rows, axis=1),
        valid=taken(cache.valid, rows, axis=0) & (rows.reshape(-1) >= 0)[:, None],
    )


def taken(x: Array, rows: Int[Array, "*D r"], *, axis: int) -> Array:
    """Take rows of one array, as ``take_rows`` does."""
    if rows.ndim == 1 or rows.shape[0] == 1:
        return jnp.take(x, rows.reshape(-1), axis=axis, mode="clip")
    split = x.reshape(*x.shape[:axis], rows.shape[0], -1, *x.shape[axis + 1 :])
    out = jax.vmap(partial(jnp.take, axis=axis, mode="clip"), in_axes=(axis, 0), out_axes=axis)(split, rows)
    return out.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def grow(cache: KVCache, slots: int, *, drop: int = 0) -> KVCache:
    """Return a full cache without its first ``drop`` slots, the oldest tokens, and with ``slots`` empty ones behind.

    All slots have been written when this is called. The caller ensures that no row has tokens in the dropped slots.
    """

    def moved(x: Array, axis: int) -> Array:
        kept = jax.lax.slice_in_dim(x, drop, x.shape[axis], axis=axis)
        return jnp.pad(kept, [(0, slots if i == axis else 0) for i in range(x.ndim)])

    return replace(
        cache,
        k=moved(cache.k, 2),
        v=moved(cache.v, 2),
        valid=moved(cache.valid, 1),
        length=cache.length - drop,
    )


def first_slots(cache: KVCache, count: int) -> KVCache:
    """Return the first ``count`` slots, all written, as a prefix, which is read and never copied per row."""
    return replace(
        cache,
        k=cache.k[:, :, :count],
        v=cache.v[:, :, :count],
        valid=cache.valid[:, :count],
        length=jnp.asarray(count, jnp.int32),
    )


def unchanged(params: Params) -> Params:
    """Return params unchanged: the ``head`` of a policy without anything to prepare."""
    return params


class Policy(NamedTuple):
    """A model as pure functions of its params; a custom model provides its own instead of ``make_policy``."""

    embed: Embed
    trunk: Trunk
    unembed: Unembed
    init_cache: InitCache
    head: Head = unchanged
    take_rows: TakeRows = take_rows
    grow: Grow = grow
    first_slots: FirstSlots | None = first_slots  # None: a cache that cannot be cut, such as a recurrent state
    routed: Routed | None = None  # of a policy with experts
    extend: Extend | None = None  # of caches that cannot be cut but joined: a state is that of the later one


def replaying(policy: Policy, experts: Int[Array, "B N L k"] | None) -> Policy:
    """Return the policy with the choice of experts given, for passes over these rows whole; None: as it is.

    Raises:
        ValueError: the policy has no experts.
    """
    if experts is None:
        return policy
    routed = policy.routed
    if routed is None:
        raise ValueError("experts: this policy has none to choose; give None")

    def trunk(params: Params, embeddings: Array, *rows: Array, **more: KVCache | None) -> tuple[Array, KVCache | None]:
        return routed(params, embeddings, *rows, experts=experts, **more)[:2]

    return policy._replace(trunk=trunk)


def positions_of(valid: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """Return every token's position in its own sequence, without padding: clip(cumsum(valid) - 1, 0)."""
    return jnp.maximum(jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1, 0)
