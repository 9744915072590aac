"""Build the Policy of a Qwen decoder, dense, with experts or with delta nets, from Flax NNX modules.

To add a model family, start at ``models/qwen_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from oarjax.kernels import decode_cache
from oarjax.kernels.attention import AttentionKind, segment_mixer
from oarjax.kernels.decode_attention import DecodeKind, kernel_mixer, kernel_problem, padded, padded_slots
from oarjax.kernels.decode_cache import Cache, DecodeCache, Window, each_array, state_before, written
from oarjax.kernels.precision import in_full, precision_of
from oarjax.kernels.remat import Remat, rematerialised
from oarjax.kernels.splash import LANES, causal_mixer, check_splash
from oarjax.models import delta_kernel, policy
from oarjax.models.delta_net import empty_state
from oarjax.models.layers import Qwen
from oarjax.models.moe import ExpertsKind, experts_of_step
from oarjax.models.policy import Policy, RowCaches
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.rope import inverse_frequencies, rotation
from oarjax.models.sharding import ROWS, placed
from oarjax.types import DeltaState, HybridCache, KVCache, Params


def make_policy(
    cfg: QwenConfig,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    remat: Remat = "full",
    attention: AttentionKind = "xla",
    mesh: Mesh | None = None,
    adapter_scale: float = 1.0,
    experts: ExpertsKind = "grouped",
    decode: DecodeKind = "plain",
    int8: bool = False,
    unroll: int = 1,
) -> Policy:
    """Build the Policy of a Qwen, ``head`` included; params are the dict that ``models.weights`` describes.

    The residual stream, norms, softmax, RoPE angles and logits are float32 (all float64 where compute_dtype is). The
    caller of a cache keeps cache.length + N within its slots. Params without adapters are the plain model. On a mesh
    that divides layers or experts, decode steps add up their parts over its devices in the compute dtype.

    Args:
        cfg: sizes of the decoder, such as ``read_config`` gives them.
        compute_dtype: dtype of matmul operands, which accumulate in float32, and of the cache; default jnp.float32,
            whose products are float32 on every platform, see ``oarjax.kernels.precision``.
        remat: what the backward pass recomputes of each layer: ``none``, ``dots`` (all but the matmuls without batch
            axes), ``projections`` (all but q, k, v, gate, up and kernels of attention), ``attention`` (all but
            q, k, v and these kernels) or ``full``; default full.
        attention: ``splash`` uses Pallas' TPU kernels over the mesh for causal self-attention, with or without a prefix
            of as many rows, or of fewer before 128 tokens or more: training, scoring, prefill, linearised passes.
            Decode steps, prefixes shared by a group before fewer tokens and ``visible`` stay with ``xla``, one program
            for every platform. ``blocked`` and ``cudnn`` take the place of these kernels on other platforms, see
            ``kernels.splash``. ``attention_for`` chooses by the mesh; default xla.
        mesh: with the training or rollout axes of ``sharding``, sets the sharding of activations, for each axis that it
            divides: rows of states, logits and caches over the row axes, key heads and vocabulary over ``tensor``;
            ``head`` is gathered along all axes but the vocabulary. Default None: the compiler may shard states along
            the embedding like the weights, and sum them over all devices in every layer.
        adapter_scale: factor of adapters in the params (``oarjax.models.lora``); default 1.0.
        experts: how a mixture computes its experts, ``grouped`` or ``dense``; ``moe.experts_for`` chooses by the mesh;
            default grouped. Decode steps of few tokens take ``few``.
        decode: how decode steps of one token attend to caches, ``plain`` or with the TPU kernel of
            ``kernels.decode_attention``, which reads each row as far as it is written; default plain.
        int8: decoding rounds keys and values to int8 in its caches, see ``kernels.decode_cache``; default False: they
            have the compute dtype.
        unroll: layers per iteration of the loop over layers; of hybrids, blocks of layers. Decode steps compute one, as
            all passes over a filled cache do; default 1.

    Raises:
        ValueError: another than xla or plain without a mesh, in float64, or on a mesh whose "tensor" axis does not
            divide the heads; cudnn in another dtype than bfloat16; more key heads per device than the kernel holds.
    """
    compute = jnp.dtype(compute_dtype)
    stream = jnp.promote_types(compute, jnp.float32)
    if attention != "xla":
        if mesh is None:
            raise ValueError(f"attention: {attention} runs per device of a mesh, got mesh=None; give mesh= or use xla")
        check_splash(cfg.num_attention_heads, compute, mesh, attention)
    if decode != "plain" and (problem := kernel_problem(cfg.num_key_value_heads, cfg.head_dim, compute, mesh)):
        raise ValueError(f"decode: {problem}")
    model_parallel = mesh is not None and mesh.shape.get("tensor", 1) * mesh.shape.get("expert", 1) > 1
    place = partial(placed, mesh) if mesh is not None and mesh.size > 1 else lambda x, *axes: x

    @cache
    def definitions(adapted: frozenset[str], sums: Any, step_tokens: int | None) -> tuple[Any, Any, Any]:
        """Return the graph definitions of a layer, of the last norm, and of a layer with a delta net.

        ``step_tokens``: tokens of a decode step, if it is one.
        """
        kind = experts if step_tokens is None else experts_of_step(experts, step_tokens, mesh)
        options: Any = {"compute_dtype": compute, "adapted": adapted, "adapter_scale": adapter_scale, "sums": sums}
        options["heads_first"] = attention == "splash" and step_tokens is None
        model = nnx.eval_shape(lambda: Qwen(cfg, rngs=nnx.Rngs(0), experts=kind, mesh=mesh, **options))
        delta = nnx.split(model.delta_layers)[0] if cfg.delta else None
        return nnx.split(model.layers)[0], nnx.split(model.norm)[0], delta

    sizes: Any = cfg.delta
    frequencies = inverse_frequencies(cfg.rotary_dim or cfg.head_dim, theta=cfg.rope_theta, yarn=cfg.yarn)
    scale = cfg.yarn.attention_factor if cfg.yarn else 1.0

    def embed(params: Params, tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
        return params["embed"]["embedding"][tokens].astype(stream)

    def trunk(*rows: Any, **caches: Any) -> tuple[Float[Array, "B N D"], Any]:
        return run(*rows, **caches)[:2]

    def routed(
        *rows: Any, counted: Bool[Array, "B N"] | None = None, **options: Any
    ) -> tuple[Float[Array, "B N D"], Any, Any]:
        valid = rows[-1]
        hidden, new_cache, routing = run(*rows, counted=valid if counted is None else counted, **options)
        return hidden, new_cache, replace(routing, chosen=jnp.moveaxis(routing.chosen, 0, 2))

    def run(
        params: Params,
        embeddings: Float[Array, "B N D"],
        positions: Int[Array, "B N"],
        valid: Bool[Array, "B N"],
        *,
        cache: Cache | None = None,
        prefix: Cache | None = None,
        visible: Bool[Array, "B N C"] | None = None,
        experts: Int[Array, "B N L k"] | None = None,
        counted: Bool[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N D"], Cache | None, Any]:
        """Run all layers; with ``counted`` return the routing, too."""
        decoding = isinstance(cache, DecodeCache)
        length = valid.shape[1]
        sums, step_tokens = (
            compute if decoding and model_parallel else stream,
            valid.size if decoding and length == 1 else None,
        )
        layer_def, norm_def, delta_def = definitions(_adapted(params), sums, step_tokens)
        cos, sin = rotation(positions, frequencies, scale=scale, dtype=stream)
        # A cache of exactly N slots can only be empty.
        filled = cache if decoding or (cache and cache.k.shape[2] > length) else None

        if sizes is not None and visible is not None:
            raise ValueError(
                "visible: a recurrent state cannot skip tokens of a prefix, so single places in the middle of a row "
                "cannot be recomputed; compute whole suffixes, as OAR-P does"
            )
        stores = [c for c in (prefix, filled) if c is not None]
        prefix_fits = length >= LANES or prefix is None or prefix.valid.shape[0] == valid.shape[0]
        is_causal = filled is None and visible is None and prefix_fits
        if attention != "xla" and mesh is not None and is_causal:
            mixer, read = causal_mixer([written(c) for c in stores], valid, mesh, attention), lambda cache, kv: kv
        elif decode == "kernel" and mesh is not None and decoding and length == 1 and visible is None:
            mixer, read = kernel_mixer(cast(list[DecodeCache], stores), valid, mesh), lambda cache, number: number
        else:
            masks = [written(c)[:, None, :] for c in stores]
            if visible is not None:  # of the prefix, by row and query
                masks[0] = masks[0] & visible.reshape(masks[0].shape[0], -1, visible.shape[-1])
            mixer, read = segment_mixer(masks, valid), _heads_first

        count = {"counted": valid if counted is None else counted}

        def body(x, xs):
            weights, chosen, *layers = xs
            stored_kv = [read(c, entry) for c, entry in zip(stores, layers, strict=True)]
            options = {"chosen": chosen, "compute_dtype": compute, **count}
            x, kv, routing = nnx.merge(layer_def, weights)(x, cos, sin, partial(mixer, stored_kv), **options)
            new_kv = None if cache is None else _stored_as(cache, *kv)
            return place(x, ROWS, None, None), (new_kv, routing if counted is not None else None)

        def delta_body(x, xs):
            weights, chosen, row_state, prefix_state = xs
            state = state_before(row_state, has_tokens, prefix_state, empty_state(sizes, x.shape[0], dtype=stream))
            x, new_state, routing = nnx.merge(delta_def, weights)(x, valid, state, chosen=chosen, **count)
            cached_state = new_state if cache is not None else None
            return place(x, ROWS, None, None), (cached_state, routing if counted is not None else None)

        def body_of_step(carry, xs):
            x, ys = body(carry[0], xs)
            return (x, carry[1]), ys

        def delta_of_step(carry, number):
            """Run a layer with its weights and states where they lie among those of all layers."""
            x, state = carry
            take = partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
            write = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
            weights, chosen, layer_state = jax.tree.map(take, (params["delta_layers"], chosen_by_deltas, state))
            rule = kernel and partial(kernel, number=number)
            layer_state = replace(layer_state, memory=state.memory) if kernel else layer_state
            x, new_state, routing = nnx.merge(delta_def, weights)(
                x, valid, layer_state, chosen=chosen, rule=rule, **count
            )
            memory = new_state.memory if kernel else write(state.memory, new_state.memory)
            carry = place(x, ROWS, None, None), DeltaState(memory, write(state.tail, new_state.tail))
            return carry, (None, routing if counted is not None else None)

        remat_of = (
            partial(rematerialised, remat=remat) if filled is None else lambda body: body
        )  # decoding has no derivative
        scan = partial(jax.lax.scan, unroll=unroll if filled is None else 1)
        x = place(embeddings.astype(stream), ROWS, None, None)
        chosen, chosen_by_deltas = (
            None if experts is None else jnp.moveaxis(experts[:, :, numbers], 2, 0)
            for numbers in (np.array(cfg.attention_layers, int), np.array(cfg.delta_layers, int))
        )
        layers, state, delta_routing = (params["layers"], chosen, *map(_by_layer, stores)), None, None
        if sizes is None:
            x, (kv, routing) = scan(remat_of(body), x, layers)
        elif isinstance(cache, DecodeCache):
            kernel = delta_kernel.step_for(sizes, valid.shape[0], stream, mesh) if length == 1 else None
            start = x, decode_cache.begun(cache, cast(Any, prefix)).state
            numbers = jnp.arange(len(cfg.delta_layers))
            (x, state), (kv, routing), (_, delta_routing) = _scan_blocks(
                body_of_step, delta_of_step, start, layers, numbers, sizes.interval - 1, scan
            )
        else:
            has_tokens = written(filled).any(axis=1) if filled is not None else None
            row_states, prefix_states = (getattr(c, "state", None) for c in (filled, prefix))
            deltas = (params["delta_layers"], chosen_by_deltas, row_states, prefix_states)
            x, (kv, routing), (state, delta_routing) = _scan_blocks(
                remat_of(body), remat_of(delta_body), x, layers, deltas, sizes.interval - 1, scan
            )
        if sizes is not None:
            order = np.argsort(cfg.attention_layers + cfg.delta_layers)
            routing = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], routing, delta_routing)
        hidden = place(nnx.merge(norm_def, params["norm"])(x), ROWS, None, None)
        if cache is None or kv is None:
            return hidden, None, routing
        k, v = kv
        new_cache = _append(cache, k, v, valid)
        return hidden, place_cache(new_cache if state is None else replace(new_cache, state=state)), routing

    def head(params: Params) -> Params:
        if WHOLE in params.get("head", {}):
            return params
        kernel = _transposed(params["embed"]["embedding"]) if cfg.tie_word_embeddings else params["head"]["kernel"]
        # Cast first, so that the compute dtype is what moves. The gradient takes another way, see _project.
        gathered = place(jax.lax.stop_gradient(kernel).astype(compute), None, "tensor")
        return {**params, "head": {"kernel": kernel, WHOLE: gathered}}

    def unembed(params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        kernels, rows = head(params)["head"], [ROWS, *[None] * hidden.ndim][: hidden.ndim - 1]
        states = place(hidden.astype(compute), *rows, None)
        return place(_project(states, kernels[WHOLE], kernels["kernel"]), *rows, "tensor")

    def init_cache(rows: int, slots: int) -> KVCache:
        shape = (len(cfg.attention_layers), rows, slots, cfg.num_key_value_heads, cfg.head_dim)
        arrays = {
            "k": jnp.zeros(shape, compute),
            "v": jnp.zeros(shape, compute),
            "valid": jnp.zeros((rows, slots), bool),
            "length": jnp.zeros((), jnp.int32),
        }
        if cfg.delta is None:
            return place_cache(KVCache(**arrays))
        state = empty_state(cfg.delta, len(cfg.delta_layers), rows, dtype=stream)
        return place_cache(HybridCache(**arrays, state=state))

    def place_cache(cache: Any) -> Any:
        if isinstance(cache, DecodeCache):
            arrays = each_array(cache, lambda x, _: place(x, None, "tensor", ROWS, None, None))
        else:
            arrays = {name: place(getattr(cache, name), None, ROWS, None, "tensor", None) for name in ("k", "v")}
        cache = replace(cache, **arrays, valid=place(cache.valid, ROWS, None))
        if getattr(cache, "state", None) is None:
            return cache
        return replace(cache, state=jax.tree.map(lambda x: place(x, None, ROWS, *[None] * (x.ndim - 2)), cache.state))

    def init_rows(rows: int, slots: int) -> Any:
        slots = padded_slots(slots) if decode == "kernel" else slots
        heads, width = (len(cfg.attention_layers), cfg.num_key_value_heads, rows), cfg.head_dim
        dtype = jnp.int8 if int8 else compute
        return place_cache(
            DecodeCache(
                k=jnp.zeros((*heads, width, slots), dtype),
                v=jnp.zeros((*heads, slots, width), dtype),
                steps=jnp.zeros((*heads, 2, slots), jnp.bfloat16) if int8 else None,
                valid=jnp.zeros((rows, slots), bool),
                length=jnp.zeros((), jnp.int32),
                state=empty_state(cfg.delta, len(cfg.delta_layers), rows, dtype=stream) if cfg.delta else None,
            )
        )

    def restore(cache: DecodeCache, part: DecodeCache, window: Window) -> DecodeCache:
        return place_cache(decode_cache.closed(cache, part))

    def as_prefix(cache: KVCache) -> DecodeCache:
        prefix = decode_cache.heads_first(cache, int8=int8)
        return place_cache(padded(prefix) if decode == "kernel" else prefix)

    def take_rows(cache: DecodeCache, rows: Array) -> DecodeCache:
        return place_cache(decode_cache.take_rows(cache, rows))

    def move_rows(cache: DecodeCache, rows: Array, drop: Array | None) -> DecodeCache:
        return place_cache(decode_cache.move(cache, rows, drop))

    caches = RowCaches(
        init=init_rows,
        prefix=as_prefix,
        take=take_rows,
        move=move_rows,
        window=decode_cache.opened,
        restore=restore,
        begin=decode_cache.begun,
    )

    def extend(cache: KVCache, more: KVCache) -> KVCache:
        return place_cache(policy.extend(cache, more))

    cut_cache, join_caches = (policy.first_slots, None) if cfg.delta is None else (None, extend)
    decoder = Policy(embed, in_full(trunk, compute), unembed, init_cache, head, caches, cut_cache, extend=join_caches)
    return decoder if cfg.experts is None else decoder._replace(routed=in_full(routed, compute))


def _scan_blocks(
    attention: Any, delta: Any, carry: Any, layers: Any, deltas: Any, per_block: int, scan: Any
) -> tuple[Any, Any, Any]:
    """Scan blocks of ``per_block`` layers with delta nets and one with attention, then the remaining delta nets.

    ``scan`` runs over blocks, the two bodies over ``layers`` and ``deltas``; results are stacked like these.
    As one scan stands in another, a block's part of ``deltas`` and of their results is copied: a decode step gives
    numbers of layers alone.
    """
    blocks, count = (jax.tree.leaves(xs)[0].shape[0] for xs in (layers, deltas))

    def part(span: slice) -> Any:
        return jax.tree.map(lambda leaf: leaf[span], deltas)

    def block(carry: Any, xs: Any) -> tuple[Any, Any]:
        carry, states = jax.lax.scan(delta, carry, xs[1])
        carry, kv = attention(carry, xs[0])
        return carry, (kv, states)

    block_deltas = jax.tree.map(
        lambda leaf: leaf.reshape(blocks, per_block, *leaf.shape[1:]), part(slice(blocks * per_block))
    )
    carry, (kv, states) = scan(block, carry, (layers, block_deltas))
    states = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), states)
    if blocks * per_block < count:
        carry, rest_states = jax.lax.scan(delta, carry, part(slice(blocks * per_block, count)))
        states = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), states, rest_states)
    return carry, kv, states


WHOLE = "whole"
"""Name of the gathered head, beside ``kernel``, in the params that ``Policy.head`` returns."""


@jax.custom_jvp
def _project(
    hidden: Float[Array, "*rows D"], gathered: Float[Array, "D V"], kernel: Float[Array, "D V"]
) -> Float[Array, "*rows V"]:
    """Compute logits of states in the compute dtype with the gathered head; its gradient goes to the kernel.

    A loop over chunks sums the gradient in the kernel's own dtype, float32, with the kernel's sharding: in a bfloat16
    sum, rounding would lose the contributions of later chunks.
    """
    return _logits(hidden, gathered)


@partial(_project.defjvp, symbolic_zeros=True)
def _project_jvp(primals, tangents):
    hidden, gathered, _ = primals
    d_hidden, _, d_kernel = tangents  # the gathered head is a constant
    out = _logits(hidden, gathered)
    parts = [jnp.zeros_like(out)]
    if not isinstance(d_hidden, SymbolicZero):
        parts.append(_logits(d_hidden, gathered))
    if not isinstance(d_kernel, SymbolicZero):
        operands = (hidden.astype(out.dtype), d_kernel.astype(out.dtype))
        parts.append(jnp.einsum("...d,dv->...v", *operands, precision=precision_of(gathered.dtype)))
    return out, reduce(jnp.add, parts[1:] or parts)


def _logits(hidden: Float[Array, "*rows D"], kernel: Float[Array, "D V"]) -> Float[Array, "*rows V"]:
    stream = jnp.promote_types(kernel.dtype, jnp.float32)
    precision = precision_of(kernel.dtype)
    return jnp.einsum("...d,dv->...v", hidden, kernel, precision=precision, preferred_element_type=stream)


def _adapted(params: Params) -> frozenset[str]:
    """Return the names of a layer's matrices that have adapters."""
    stacks = [params[name] for name in ("layers", "delta_layers") if name in params]
    parts = [part for stack in stacks for part in stack.values() if isinstance(part, Mapping)]
    nodes = [(name, node) for part in parts for name, node in part.items()]
    return frozenset(name for name, node in nodes if isinstance(node, Mapping) and "lora_a" in node)


@jax.custom_vjp
def _transposed(kernel: Float[Array, "V D"]) -> Float[Array, "D V"]:
    """Transpose; the gradient is computed as a product [D, V] and transposed afterwards.

    XLA would compute it as [V, D] at once, which takes a CPU twice as long.
    """
    return kernel.T


_transposed.defvjp(lambda kernel: (kernel.T, None), lambda _, ct: (jax.lax.optimization_barrier(ct).T,))


def _by_layer(cache: Cache) -> Any:
    """Return what a scan over layers gives of a cache to each layer: its keys and values, or its number."""
    return jnp.arange(cache.k.shape[0]) if isinstance(cache, DecodeCache) else (cache.k, cache.v)


def _heads_first(cache: Cache, entry: Any) -> tuple[Array, ...]:
    """Return a layer of a cache, of which the scan gave ``entry``, as ``decode_cache.layer`` does."""
    if isinstance(cache, DecodeCache):
        return decode_cache.layer(cache, entry)
    k, v = entry
    return k.transpose(2, 0, 3, 1), v.transpose(2, 0, 1, 3)


def _stored_as(cache: Cache, k: Float[Array, "B N kv h"], v: Float[Array, "B N kv h"]) -> tuple[Array, Array]:
    """Return new keys and values in a cache's order of axes."""
    return (k.transpose(2, 0, 3, 1), v.transpose(2, 0, 1, 3)) if isinstance(cache, DecodeCache) else (k, v)


def _append(cache: Cache, k: Array, v: Array, valid: Bool[Array, "B N"]) -> Any:
    """Write all layers' new keys and values at once, so that a decode step touches only the new slots."""
    if isinstance(cache, DecodeCache):
        return decode_cache.append(cache, k, v, valid)
    zero = jnp.zeros_like(cache.length)  # indices of one type, with 64-bit types on too
    at = (zero, zero, cache.length, zero, zero)
    return replace(
        cache,
        k=jax.lax.dynamic_update_slice(cache.k, k, at),
        v=jax.lax.dynamic_update_slice(cache.v, v, at),
        valid=jax.lax.dynamic_update_slice(cache.valid, valid, (zero, cache.length)),
        length=cache.length + valid.shape[1],
    )
