"""The interface of a model: four pure functions of its params, and an optional fifth that gathers the head once.

Anything that gives these four functions can be trained; ``oarjax.models.qwen.make_policy`` gives them for
Qwen2, Qwen2.5 and Qwen3. Parameters are an opaque pytree.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.types import KVCache, Params


class Embed(Protocol):
    def __call__(self, params: Params, tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
        """Input embeddings, float32 (the leaves that OAR-G differentiates)."""
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
        """Final hidden states, after the last norm, and the cache with these N tokens appended.

        Without a cache: causal self-attention over N, invalid positions never attended to; the second
        result is None. With a cache of B rows: the N tokens are written at slots ``cache.length`` .. +N and
        attend to every valid slot before them and causally to one another. With a prefix of P rows, B = P*G:
        row b attends to all valid slots of prefix row b // G as well, which is read and never copied per row;
        with ``visible`` each query only to those of its C slots that it names.
        """
        ...


class Unembed(Protocol):
    def __call__(self, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits, float32, of final hidden states."""
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
        """An empty cache for ``rows`` sequences of at most ``slots`` tokens."""
        ...


def as_it_is(params: Params) -> Params:
    """Return params unchanged: the ``head`` of a policy that has nothing to prepare."""
    return params


class Policy(NamedTuple):
    """A model as four pure functions of its params; a custom model provides its own instead of ``make_policy``."""

    embed: Embed
    trunk: Trunk
    unembed: Unembed
    init_cache: InitCache
    head: Head = as_it_is


def positions_of(valid: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """Position of every token in its own sequence, whatever the padding: clip(cumsum(valid) - 1, 0)."""
    return jnp.maximum(jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1, 0)
