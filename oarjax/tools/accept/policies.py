"""Stage of other kinds of policies: experts, delta nets and adapters against a CPU, and their speed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.config.learning import LoraConfig
from oarjax.models.delta_net import CHUNK
from oarjax.models.lora import adapter_shapes, join_params, without_adapters
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of, init_params
from oarjax.rollout.logps import token_logps
from oarjax.tools.accept.check import Check, at_most, measured, not_applicable
from oarjax.tools.accept.numerics import GAP, LENGTH, LOGPS, ROWS, Small, sampler_gap
from oarjax.tools.accept.setting import StageSetting, best_seconds
from oarjax.tools.plan.published_sizes import PUBLISHED
from oarjax.types import Params

GRADIENT = 1e-3
"""Bound on the difference of a float32 gradient from a CPU's, as a share of the largest number of its array."""
TARGETS = LoraConfig().targets
TOKENS = 1024  # of a row, in the timed pass


class Kind(NamedTuple):
    """A kind of policy: a published one, cut down to what one device computes in milliseconds."""

    name: str
    published: str
    small: Mapping[str, float]  # fields of the policy whose numbers are compared
    timed: Mapping[str, int]  # of the policy that is timed: whole layers, and few of them
    rank: int = 0  # of adapters, which alone are trained
    rows: int = 8
    length: int = LENGTH  # tokens of a row of the small policy


TINY: dict[str, float] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY |= {"head_dim": 16, "vocab_size": 512}
KINDS = (
    Kind(
        "experts",
        "Qwen/Qwen3-30B-A3B",
        {**TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"num_hidden_layers": 2, "num_experts": 32, "vocab_size": 8192},
    ),
    Kind(
        "delta nets",
        "Qwen/Qwen3.5-4B",
        {
            **TINY,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "initializer_range": 0.2,  # states of wider ones show the rounding of float32
            "rms_norm_eps": 1e-3,  # narrow heads are now and then almost 0: 1e-6 would show the rounding in them
        },
        {"num_hidden_layers": 4, "vocab_size": 8192},
        length=CHUNK + 32,  # the state goes from one chunk to the next, and then from token to token
    ),
    Kind(
        "adapters",
        "Qwen/Qwen2.5-7B",
        {**TINY, "num_hidden_layers": 2},
        {"num_hidden_layers": 2, "vocab_size": 8192},
        rank=32,
    ),
)


def policies(s: StageSetting) -> list[Check]:
    """Compare log-probs, gradients and draws of each kind with a CPU's; time a pass forward and backward."""
    chip, cpu = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]
    checks = []
    for kind in KINDS:
        small = small_policy(kind)
        work = jax.jit(partial(mean_logps, make_policy(small.cfg)))
        (logps, gradient), (cpu_logps, reference) = (scored(kind, small, work, device) for device in (chip, cpu))
        error = float(np.abs(logps - cpu_logps).max())
        pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(reference), strict=True)
        largest = max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-6)) for x, y in pairs)
        gap = sampler_gap(small, chip, "float32")
        checks += [
            at_most(f"{kind.name}: log-probs against a CPU's", error, LOGPS, unit="nats"),
            at_most(f"{kind.name}: gradients against a CPU's", largest, GRADIENT, note="of the largest number"),
            at_most(f"{kind.name}: sampler against scorer", gap, GAP["float32"], unit="nats"),
        ]
        title = f"{kind.name}: forward and backward"
        if s.small:
            checks.append(not_applicable(title, "a CPU computes the small policy alone; it is not timed"))
        else:
            checks += timed(kind, title)
    return checks


def small_policy(kind: Kind) -> Small:
    """Describe the small policy of a kind and draw its tokens."""
    fields = {**PUBLISHED[kind.published], "tie_word_embeddings": True, "initializer_range": 0.4, **kind.small}
    tokens = np.random.default_rng(0).integers(1, int(kind.small["vocab_size"]), (ROWS, kind.length)).astype(np.int32)
    return Small(QwenConfig.from_hf(fields), tokens, partial(with_adapters, rank=kind.rank and 4))


def with_adapters(params: Params, rank: int) -> Params:
    """Add adapters of random numbers, unlike those that training starts from; with rank 0 return the params."""
    if not rank:
        return params
    shapes = adapter_shapes(params, rank=rank, targets=TARGETS)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    adapters = [0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves)]
    return join_params(params, jax.tree.unflatten(tree, adapters))


def trained_of(kind: Kind, params: Params) -> tuple[Params | None, Params]:
    """Return the frozen params, if any, and the trained ones: the adapters if there are some."""
    if not kind.rank:
        return None, params
    frozen = without_adapters(params)
    shapes = adapter_shapes(frozen, rank=1, targets=TARGETS)

    def chosen(shape: Any, tree: Any) -> Any:
        return {name: chosen(part, tree[name]) for name, part in shape.items()} if isinstance(shape, Mapping) else tree

    return frozen, chosen(shapes, params)


def scored(kind: Kind, small: Small, work: Any, device: Any) -> tuple[np.ndarray, Params]:
    """Return float32 log-probs on a device, and the gradient of their mean by what is trained."""
    with jax.default_device(device):
        frozen, trained = trained_of(kind, small.params())
        (_, logps), gradient = work(trained, frozen, jnp.asarray(small.tokens))
        return np.asarray(logps), jax.tree.map(np.asarray, gradient)


def mean_logps(policy: Any, trained: Params, frozen: Params | None, tokens: Any) -> Any:
    """Return the mean log-prob and every token's, and the gradient of the mean by the trained params."""

    def mean(trained: Params) -> tuple[Any, Any]:
        settings = {"completion_length": tokens.shape[1] - 1, "temperature": 1.0, "head_chunk": 512}
        params, valid = join_params(frozen, trained), jnp.ones(tokens.shape, bool)
        logps = token_logps(policy, params, tokens, valid, **settings)[0]
        return logps.mean(), logps

    return jax.value_and_grad(mean, has_aux=True)(trained)


def timed(kind: Kind, title: str) -> list[Check]:
    """Time a pass in bfloat16 over whole layers on one device."""
    cfg = QwenConfig.from_hf({**PUBLISHED[kind.published], **kind.timed})
    policy = make_policy(cfg, compute_dtype=jnp.bfloat16)
    params = jax.jit(lambda key: with_adapters(init_params(cfg, key, dtype=jnp.float32), kind.rank))(jax.random.key(0))
    frozen, trained = trained_of(kind, params)
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, cfg.vocab_size, (kind.rows, TOKENS)), jnp.int32)
    work = jax.jit(partial(mean_logps, policy))
    seconds = best_seconds(lambda: work(trained, frozen, tokens)[1], repeats=3)
    sizes, count = decoder_of(cfg), kind.rows * TOKENS
    passes = 2 if kind.rank else 3  # frozen weights have no gradient
    flops = passes * count * (2 * (sizes.trunk_params + sizes.head_params) + sizes.memory_flops)
    note = f"{kind.timed['num_hidden_layers']} layers of {kind.published}, products with weights and states"
    return [
        measured(title, count / seconds, unit="tokens/s"),
        measured(f"{title}: products", flops / seconds / 1e12, unit="TFLOP/s", note=note),
    ]
