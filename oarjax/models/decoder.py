"""Name the sizes of a policy that its cost depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decoder:
    """Sizes of a policy that its cost depends on."""

    layers: int  # with keys and values
    trunk_params: int | float  # in matrix products of the layers
    head_params: int | float
    heads_width: int  # heads * head_dim
    kv_width: int  # key heads * head_dim
    memory_flops: int | float = 0  # per token, of layers that have a state of fixed size instead
