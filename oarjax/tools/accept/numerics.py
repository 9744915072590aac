"""Stage of the numbers: compare log-probs, draws and random bits of a device with a CPU's, with Qwen's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.data.tasks.arithmetic import VOCABULARY, builtin_config
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import init_params
from oarjax.rollout.logps import token_logps
from oarjax.rollout.sampler import BLOCK, draw_token, sample
from oarjax.stats import chi_square_tail
from oarjax.tools.accept.check import Check, at_least, at_most, holds
from oarjax.tools.accept.setting import StageSetting
from oarjax.types import PromptBatch

ROWS, LENGTH, CHUNK, NEW = 4, 24, 32, 8
CLASSES = 32
"""Groups of tokens whose draws are counted."""
LOGPS = 1e-3
"""Bound on the difference of a float32 log-prob from a CPU's, in nats."""
ROUNDED = 0.06
"""Bound on the root mean square of differences of bfloat16 log-probs from a CPU's in float32, in nats.

Rounding to bfloat16 gives .049 with these weights and tokens, on a CPU itself. The largest difference says little: the
same rounding gives .1 to .5 nats by the tokens.
"""
GAP = {"float32": 1e-3, "bfloat16": 0.05}
"""Bounds on the mean difference between log-probs of the sampler and of the scorer, in nats."""


class Small(NamedTuple):
    """A policy of a few layers, its logits as wide as a trained policy's."""

    cfg: QwenConfig
    tokens: np.ndarray
    change: Callable[[Any], Any] = lambda params: params

    def params(self) -> Any:
        return self.change(init_params(self.cfg, jax.random.key(1), dtype=jnp.float32))


def small_policy() -> Small:
    """Describe the policy of this stage and draw its tokens."""
    fields = builtin_config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=VOCABULARY)
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    return Small(QwenConfig.from_hf(fields | {"initializer_range": 0.4}), tokens)


def numerics(s: StageSetting) -> list[Check]:
    """Compare one device with a CPU; every process compares its own."""
    chip, cpu = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]
    small = small_policy()
    scorers = {dtype: scorer(small, dtype) for dtype in (("float32",) if s.small else ("float32", "bfloat16"))}
    reference = logps_of(small, scorers["float32"], cpu)
    checks = []
    for dtype, scored in scorers.items():
        error = logps_of(small, scored, chip) - reference
        checks.append(exact(error) if dtype == "float32" else rounded(error))
        gap = sampler_gap(small, chip, dtype)
        checks.append(at_most(f"sampler against scorer in {dtype}", gap, GAP[dtype], unit="nats"))
    bits = [random_bits(device) for device in (chip, cpu)]
    checks.append(holds("random bits equal a CPU's", bool((bits[0] == bits[1]).all())))
    chance = draw_chance(chip, draws=512 if s.small else 16384)
    name = f"draws of {VOCABULARY:,} tokens"
    return [*checks, at_least(name, chance, 1e-4, note="chance of so large a chi-square")]


def exact(error: np.ndarray) -> Check:
    """Compare float32 log-probs with a CPU's by the largest difference."""
    return at_most("log-probs in float32 against a CPU's", float(np.abs(error).max()), LOGPS, unit="nats")


def rounded(error: np.ndarray) -> Check:
    """Compare bfloat16 log-probs with a CPU's in float32 by the root mean square of the differences."""
    size, note = float(np.sqrt((error**2).mean())), f"root mean square; at most {np.abs(error).max():.3g}"
    return at_most("log-probs in bfloat16 against float32", size, ROUNDED, unit="nats", note=note)


def scorer(small: Small, dtype: str) -> Any:
    """Return the program of the tokens' log-probs."""
    policy = make_policy(small.cfg, compute_dtype=dtype)

    @jax.jit
    def scored(params: Any, tokens: Any) -> Any:
        valid = jnp.ones(tokens.shape, bool)
        settings = {"completion_length": LENGTH - 1, "temperature": 1.0, "head_chunk": CHUNK}
        return token_logps(policy, params, tokens, valid, **settings)[0]

    return scored


def logps_of(small: Small, scored: Any, device: Any) -> np.ndarray:
    """Return the log-probs of the tokens on a device."""
    with jax.default_device(device):
        return np.asarray(scored(small.params(), jnp.asarray(small.tokens)))


def sampler_gap(small: Small, device: Any, dtype: str) -> float:
    """Return the mean difference between log-probs of the sampler and of the scorer."""
    with jax.default_device(device):
        policy, params = make_policy(small.cfg, compute_dtype=dtype), small.params()
        width = small.tokens.shape[1] - 2 * NEW
        prompts = PromptBatch(jnp.asarray(small.tokens[:, :width]), jnp.ones((ROWS, width), bool), jnp.arange(ROWS))

        @jax.jit
        def gap(params: Any) -> Any:
            settings: dict[str, Any] = {"group_size": 2, "max_new": NEW, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            rollout = sample(policy, params, prompts, jax.random.key(2), **settings, stop_ids=(), pad_id=0)
            scoring = {"completion_length": NEW, "temperature": 1.0, "head_chunk": CHUNK}
            logps = token_logps(policy, params, rollout.tokens, rollout.valid, **scoring)[0]
            return jnp.abs(logps - rollout.behaviour_logps).mean()

        return float(gap(params))


def random_bits(device: Any) -> np.ndarray:
    """Return bits that JAX draws on a device."""
    with jax.default_device(device):
        return np.asarray(jax.jit(lambda key: jax.random.bits(key, (4096,)))(jax.random.key(3)))


def draw_chance(device: Any, *, draws: int, batch: int = 64) -> float:
    """Return the p-value of draws under the right distribution, by a chi-square test.

    It is the smaller of two: over ranges of the vocabulary, and over the places within the sampler's blocks.
    """
    logits = np.random.default_rng(4).normal(size=VOCABULARY).astype(np.float32) * 2
    mass = np.exp(logits.astype(np.float64) - logits.max())
    ranges = np.minimum(np.cumsum(mass) / mass.sum() * CLASSES, CLASSES - 1).astype(int)
    places = np.arange(VOCABULARY) % BLOCK * CLASSES // BLOCK
    with jax.default_device(device):
        rows = jnp.broadcast_to(jnp.asarray(logits), (batch, VOCABULARY))

        @jax.jit
        def draw(rows: Any, uniforms: Any) -> Any:
            return draw_token(rows, uniforms, temperature=1.0, top_k=0, top_p=1.0)[0]

        uniforms = jax.random.uniform(jax.random.key(6), (draws // batch, batch, 2))
        tokens = np.concatenate([np.asarray(draw(rows, part)) for part in uniforms])
    chances = []
    for group in (ranges, places):
        expected = np.bincount(group, weights=mass, minlength=CLASSES) / mass.sum() * len(tokens)
        square = float(((np.bincount(group[tokens], minlength=CLASSES) - expected) ** 2 / expected).sum())
        chances.append(chi_square_tail(square, freedom=CLASSES - 1))
    return min(chances)
