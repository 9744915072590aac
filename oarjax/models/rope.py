"""Rotary position embedding, plain or stretched by YaRN.

Frequencies are numpy constants in float64 and are rounded where they are used; angles are float32, or
float64 in a float64 model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Yarn:
    """Settings of YaRN (arXiv 2309.00071). ``attention_factor`` multiplies cos and sin."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn_attention_factor(factor: float, *, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the default factor on cos and sin: 0.1 ln(factor) + 1 (YaRN, equation 22).

    With both ``mscale`` and ``mscale_all_dim`` it is the quotient of the factors for the two.
    """

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def inverse_frequencies(head_dim: int, *, theta: float, yarn: Yarn | None) -> np.ndarray:
    """Return radians per position of each rotated pair, f64[head_dim / 2]; pair i turns at theta ** (-2i / head_dim).

    YaRN divides the slow pairs by ``factor`` and leaves the fast ones, with a linear ramp over the pairs
    that turn between beta_slow and beta_fast times within the original context.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if yarn is None:
        return frequencies
    low, high = _ramp_ends(head_dim, theta, yarn)
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return frequencies / yarn.factor * ramp + frequencies * (1.0 - ramp)


def _ramp_ends(head_dim: int, theta: float, yarn: Yarn) -> tuple[float, float]:
    """Return the pairs (fractional) that turn beta_fast and beta_slow times within the original context."""

    def pair_turning(times: float) -> float:
        return head_dim * math.log(yarn.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    return low, high + 0.001 if low == high else high  # a ramp of width 0 would divide by 0


def rotation(
    positions: Int[Array, "B N"], frequencies: np.ndarray, *, scale: float, dtype: DTypeLike
) -> tuple[Float[Array, "B N half"], Float[Array, "B N half"]]:
    """Compute cos and sin of position times frequency, times ``scale`` (1 without YaRN)."""
    angles = positions[..., None].astype(dtype) * jnp.asarray(frequencies, dtype)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "B N heads h"], cos: Float[Array, "B N half"], sin: Float[Array, "B N half"]
) -> Float[Array, "B N heads h"]:
    """Turn pair (x_i, x_{i + half}) of every head by its angle; numbers after the first 2 * half are unchanged.

    Qwen's pairs are half a head apart.
    """
    half = cos.shape[-1]
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
