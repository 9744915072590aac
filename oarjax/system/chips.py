"""List the peaks of TPU chips.

Peaks and HBM bandwidths come from the vendor's data sheets (cloud.google.com/tpu/docs, page of each generation).
``link`` is one direction of one link between chips, as measured in "How to Scale Your Model" (jax-ml.github.io): 10%
below the data sheets. ``memory`` is the HBM that libtpu 0.0.42 allows a program (the data sheets' 16, 95, 32, 32 and
192 GiB less its own share). JAX sees a v7x chip as two devices, one per TensorCore: its entry is half a chip. ``clock``
is the peak over the operations of all matrix units in a cycle (128 x 128 each, 256 x 256 from v6e on).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Published peaks of one chip."""

    name: str
    flops: int | float  # bfloat16, per second
    bandwidth: int | float  # of HBM, bytes per second
    link: int | float  # bytes per second, one way over one link
    memory: int | float  # bytes of HBM that a program may use
    clock: int | float  # cycles per second


CHIPS = {
    "v5e": Chip("TPU v5e", flops=197e12, bandwidth=819e9, link=45e9, memory=15.75 * GIB, clock=1.5e9),
    "v5p": Chip("TPU v5p", flops=459e12, bandwidth=2765e9, link=90e9, memory=95.74 * GIB, clock=1.75e9),
    "v6e": Chip("TPU v6e", flops=918e12, bandwidth=1638e9, link=90e9, memory=31.25 * GIB, clock=1.75e9),
    "v4": Chip("TPU v4", flops=275e12, bandwidth=1228e9, link=45e9, memory=30.75 * GIB, clock=1.05e9),
    "v7x": Chip("half a TPU v7x", flops=2307e12 / 2, bandwidth=7380e9 / 2, link=90e9, memory=94.75 * GIB, clock=2.2e9),
}
