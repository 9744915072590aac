"""What the rest of the package knows of a model: four pure functions, and a fifth that makes the head cheaper.

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
        """The same params as ``unembed`` likes to read them, and all other functions can too.

        Whoever calls ``unembed`` in a loop calls this once before it: a head that is divided between devices is
        gathered here, and not once per turn. Gradients pass through to the params. Of its own result it returns that.
        """
        ...


class InitCache(Protocol):
    def __call__(self, rows: int, slots: int) -> KVCache:
        """An empty cache for ``rows`` sequences of at most ``slots`` tokens."""
        ...


def as_it_is(params: Params) -> Params:
    """The head of a policy for which there is nothing to prepare."""
    return params


class Policy(NamedTuple):
    """A model as four pure functions of its params; a file of one's own may give them as well as ``make_policy``."""

    embed: Embed
    trunk: Trunk
    unembed: Unembed
    init_cache: InitCache
    head: Head = as_it_is


def positions_of(valid: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """Position of every token in its own sequence, whatever the padding: clip(cumsum(valid) - 1, 0)."""
    return jnp.maximum(jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1, 0)
