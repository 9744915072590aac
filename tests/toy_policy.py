"""Build a one-layer attention policy in a few lines, to test users of a Policy apart from the models."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oarjax.models.policy import Policy
from oarjax.types import KVCache


def toy_params(key, *, vocab=23, width=8, heads=2, scale=1.0, dtype=jnp.float32):
    shapes = {"embed": (vocab, width), "q": (width, width), "k": (width, width), "v": (width, width), "up": (width, 16)}
    keys = jax.random.split(key, len(shapes))
    return {n: scale * jax.random.normal(k, s, dtype) / s[-1] ** 0.5 for k, (n, s) in zip(keys, shapes.items())}


def toy_policy(*, width=8, heads=2, on_token=None) -> Policy:
    """Build a policy of embedding, one causal attention layer with a position signal, a tanh layer and a tied head.

    ``on_token``: called with the number of tokens each time the trunk runs (a host callback, for counting).
    """
    h = width // heads

    def split(x):
        return x.reshape(*x.shape[:-1], heads, h)

    def embed(params, tokens):
        return params["embed"][tokens]

    def trunk(params, embeddings, positions, valid, *, cache=None, prefix=None, visible=None):
        if on_token is not None:
            jax.debug.callback(on_token, embeddings.shape[1])
        rows, count, _ = embeddings.shape
        angle = positions[..., None] * (0.3 / jnp.arange(1, width + 1))
        x = embeddings + 0.5 * jnp.sin(angle).astype(embeddings.dtype)
        q, k, v = (split(x @ params[name]) for name in "qkv")
        if cache is None:
            new, keys, values = None, k, v
            seen = jnp.tril(jnp.ones((count, count), bool)) & valid[:, None, :]
        else:
            at, o = cache.length, jnp.zeros_like(cache.length)
            keys = jax.lax.dynamic_update_slice(cache.k[0], k.astype(cache.k.dtype), (o, at, o, o))
            values = jax.lax.dynamic_update_slice(cache.v[0], v.astype(cache.v.dtype), (o, at, o, o))
            slots = jax.lax.dynamic_update_slice(cache.valid, valid, (o, at))
            new = KVCache(keys[None], values[None], slots, at + count)
            seen = (jnp.arange(keys.shape[1]) <= at + jnp.arange(count)[:, None]) & slots[:, None, :]
        scores = [jnp.where(seen[:, None], jnp.einsum("bnhd,bchd->bhnc", q, keys), -1e9)]
        if prefix is not None:
            group = rows // prefix.k.shape[1]
            grouped = q.reshape(-1, group, count, heads, h)
            s = jnp.einsum("pgnhd,pchd->pghnc", grouped, prefix.k[0])
            open_slots = prefix.valid[:, None, None, None, :]
            if visible is not None:
                open_slots = open_slots & visible.reshape(-1, group, 1, count, visible.shape[-1])
            s = jnp.where(open_slots, s, -1e9)
            scores.append(s.reshape(rows, heads, count, -1))
        weights = jax.nn.softmax(jnp.concatenate(scores, -1), -1)
        row_weights, rest = weights[..., : keys.shape[1]], weights[..., keys.shape[1] :]
        mixed = jnp.einsum("bhnc,bchd->bnhd", row_weights, values)
        if prefix is not None:
            grouped = rest.reshape(-1, group, heads, count, rest.shape[-1])
            mixed += jnp.einsum("pghnc,pchd->pgnhd", grouped, prefix.v[0]).reshape(mixed.shape)
        x = x + mixed.reshape(rows, count, width)
        return x + jnp.tanh(x @ params["up"]) @ params["up"].T, new

    def unembed(params, hidden):
        return hidden @ params["embed"].T

    def init_cache(rows, slots):
        empty = jnp.zeros((1, rows, slots, heads, h), jnp.result_type(float))
        return KVCache(empty, empty, jnp.zeros((rows, slots), bool), jnp.zeros((), jnp.int32))

    return Policy(embed, trunk, unembed, init_cache)


def left_padded(prompts, slots, *, pad=0):
    """Return tokens and validity of prompts of unequal length, padded on the left to ``slots``."""
    tokens = jnp.array([[pad] * (slots - len(p)) + list(p) for p in prompts], jnp.int32)
    valid = jnp.array([[False] * (slots - len(p)) + [True] * len(p) for p in prompts])
    return tokens, valid
