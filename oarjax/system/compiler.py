"""Options that the compiler of a device takes for the programs that learn."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

OPTIONS: Mapping[str, Mapping[str, str]] = {"tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}}
"""By platform, for several devices. Where a matrix is divided over them, a TPU compiler cuts its product into one piece
per device, to gather the next piece meanwhile. Pieces of a policy's matrices are too thin for the matrix unit, and each
rewrites the whole sum. No product is as large as this threshold (MiB), so none is cut (docs/speed.md)."""


def compiler_options(sharding: Any) -> dict[str, Any]:
    """Return the options for programs that learn on a sharding's devices; those that their compiler knows."""
    devices = list(sharding.device_set)
    options = OPTIONS.get(devices[0].platform, {}) if len(devices) > 1 else {}
    return {name: value for name, value in options.items() if _known(name, value, sharding)}


@functools.cache
def _known(name: str, value: str, sharding: Any) -> bool:
    """Return True if the compiler takes the option; another version may have dropped it, which costs speed alone."""
    try:
        jax.jit(lambda: jnp.zeros(()), out_shardings=sharding, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warnings.warn(f"the compiler has no option {name}: programs are as it makes them without", stacklevel=2)
        return False
    return True
