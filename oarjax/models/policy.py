"""The interface of a model: four pure functions of its params, and four optional ones.

To add a model: write a ``Policy`` and pass it to ``oarjax.make_steps`` (docs/examples/custom_policy.py). To add another
Qwen family instead: see ``models/qwen_config.py``; ``models/qwen.py`` builds the Policy of all of them.

Parameters are an opaque pytree, and so is a cache to its users: ``init_cache`` creates it, ``trunk`` fills it, and
only ``first_slots``, ``extend`` and the functions of ``caches`` change it. Their defaults are for a ``KVCache``; a
policy with another cache, such as a recurrent state, provides its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.kernels.decode_cache import Window, moved, moved_marks, taken
from oarjax.types import KVCache, Params, Routing


class Embed(Protocol):
    def __call__(self, params: Params, tokens: Int[Array, "B N"], /) -> Float[Array, "B N D"]:
        """Return input embeddings, float32 (the leaves that OAR-G differentiates)."""
        ...


class Trunk(Protocol):
    def __call__(
        self,
        params: Params,
        embeddings: Float[Array, "B N D"],
        positions: Int[Array, "B N"],
        valid: Bool[Array, "B N"],
        /,
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
    def __call__(self, params: Params, hidden: Float[Array, "*rows D"], /) -> Float[Array, "*rows V"]:
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


def move_rows(cache: KVCache, rows: Int[Array, "D R"], drop: Int[Array, ""] | None) -> KVCache:
    """Return a cache of the same shape with its rows in another order, as in ``take_rows``, in the same memory.

    With ``drop`` all slots move forward by so many: the first ones, the oldest tokens, are lost, and the caller ensures
    that no row has tokens in them.
    """
    k, v = (moved(x, rows, drop, axis=1, slots=2) for x in (cache.k, cache.v))
    return replace(cache, k=k, v=v, **moved_marks(cache, rows, drop))


def window_of(cache: KVCache, window: Window) -> KVCache:
    """Return the first rows of every block and the first slots as a cache, which ``trunk`` fills further."""
    rows = jnp.broadcast_to(jnp.arange(window.rows), (window.blocks, window.rows))
    k, v, valid = cache.k[:, :, : window.slots], cache.v[:, :, : window.slots], cache.valid[:, : window.slots]
    return take_rows(replace(cache, k=k, v=v, valid=valid), rows)


def with_window(cache: KVCache, part: KVCache, window: Window) -> KVCache:
    """Write what ``window_of`` gave back into the cache: its inverse."""

    def write_back(x: Array, update: Array, axis: int) -> Array:
        blocks, update_blocks = (
            y.reshape(*y.shape[:axis], window.blocks, -1, *y.shape[axis + 1 :]) for y in (x, update)
        )
        return jax.lax.dynamic_update_slice(blocks, update_blocks, [0] * blocks.ndim).reshape(x.shape)

    k, v = write_back(cache.k, part.k, 1), write_back(cache.v, part.v, 1)
    return replace(part, k=k, v=v, valid=write_back(cache.valid, part.valid, 0))


class RowCaches(NamedTuple):
    """Keep the caches of prompts and of rows that are being decoded; the defaults are for a KVCache.

    A policy with another cache replaces all but ``init`` and ``prefix``.
    """

    init: InitCache | None = None  # of rows being decoded; None: Policy.init_cache
    prefix: Callable[[Any], Any] = lambda cache: cache  # the prompts' filled cache -> what decoding reads as a prefix
    take: Callable[[Any, Array], Any] = take_rows  # copies rows of a prefix
    move: Callable[[Any, Array, Array | None], Any] = move_rows  # rows within the cache, and slots forward
    window: Callable[[Any, Window], Any] = window_of  # the part that one program decodes
    restore: Callable[[Any, Any, Window], Any] = with_window  # (cache, part after decoding) -> cache
    begin: Callable[[Any, Any], Any] = lambda part, prefix: part  # before a loop of steps behind this prefix


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
    """A model as pure functions of its params; a custom model provides its own instead of ``make_policy``.

    ``trunk`` has to read ``prefix``, which holds the prompt in sampling and in every importance, and ``visible`` with
    it: where it ignores them, completions do not see their prompt, and nothing fails. ``check_policy`` compares them.
    """

    embed: Embed
    trunk: Trunk
    unembed: Unembed
    init_cache: InitCache
    head: Head = unchanged
    caches: RowCaches = RowCaches()
    first_slots: FirstSlots | None = first_slots  # None: a cache that cannot be cut, such as a recurrent state
    routed: Routed | None = None  # of a policy with experts
    extend: Extend | None = None  # of caches that cannot be cut but joined: a state is that of the later one
    prompt_rows: int = 1  # rows that follow one another with one prompt, see ``grouped``


def replaying(policy: Policy, experts: Int[Array, "B N L k"] | None) -> Policy:
    """Return the policy with the choice of experts given, for passes over these rows whole; None: as it is.

    Raises:
        ValueError: the policy has no experts.
    """
    if experts is None:
        return policy
    routed = policy.routed
    if routed is None:
        raise ValueError("experts: this policy has no experts; pass None")

    def trunk(
        params: Params, embeddings: Array, *rows: Array, **options: KVCache | None
    ) -> tuple[Array, KVCache | None]:
        return routed(params, embeddings, *rows, experts=experts, **options)[:2]

    return policy._replace(trunk=trunk)


def grouped(policy: Policy, rows: int) -> Policy:
    """Return the policy for passes over whole rows of which ``rows`` after one another have the same prompt.

    ``last_states``, ``linear_pass`` and ``shared_pass`` then compute it once for them; 1 is the plain path. For passes
    over other rows take ``grouped(policy, 1)``.
    """
    return policy._replace(prompt_rows=rows)


def prompt_cache(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    slots: int,
) -> KVCache | None:
    """Fill a cache with the first ``slots`` columns, once for ``policy.prompt_rows`` rows each; None for 0 slots.

    Raises:
        ValueError: the trunk returns no cache.
    """
    if slots == 0:
        return None
    prompt_tokens, prompt_positions, prompt_valid = (
        x[:: policy.prompt_rows, :slots] for x in (tokens, positions, valid)
    )
    empty = policy.init_cache(prompt_tokens.shape[0], slots)
    return filled(
        policy.trunk(params, policy.embed(params, prompt_tokens), prompt_positions, prompt_valid, cache=empty)[1]
    )


def filled(cache: Any) -> Any:
    """Return the cache that a call with ``cache=`` returned.

    Raises:
        ValueError: it returned none; what reads the prompt from it would see no prompt.
    """
    if cache is None:
        raise ValueError("policy.trunk: expected the filled cache as second result of a call with cache=, got None")
    return cache


def positions_of(valid: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """Return every token's position in its own sequence, without padding: clip(cumsum(valid) - 1, 0)."""
    return jnp.maximum(jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1, 0)
