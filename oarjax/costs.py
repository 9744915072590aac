"""Peaks of chips, and the FLOPs that a forward, an iteration and a credit method need: the only place.

Peaks and bandwidths of HBM are the vendor's data sheets (cloud.google.com/tpu/docs, page of each generation). ``link``
is one direction of one of the links between chips, as measured in "How to Scale Your Model" (jax-ml.github.io): 10%
below the data sheets. ``memory`` is what libtpu 0.0.42 lets a program have (the data sheets' 16, 95, 32 and 32 GiB
less what it keeps for itself).

Model FLOPs are 2 per multiply-add of the matrix products that a method asks for. Recomputation (remat), padding and
rejected samples are not counted, so a utilisation made from these numbers is the share of the hardware that went into
the model's own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
Number = int | float


@dataclass(frozen=True)
class Chip:
    """Published peaks of one chip."""

    name: str
    flops: Number  # bfloat16, per second
    bandwidth: Number  # of HBM, bytes per second
    link: Number  # bytes per second, one way over one link
    memory: Number  # bytes of HBM that a program may use


CHIPS = {
    "v5e": Chip("TPU v5e", flops=197e12, bandwidth=819e9, link=45e9, memory=15.75 * GIB),
    "v5p": Chip("TPU v5p", flops=459e12, bandwidth=2765e9, link=90e9, memory=95.74 * GIB),
    "v6e": Chip("TPU v6e", flops=918e12, bandwidth=1638e9, link=90e9, memory=31.25 * GIB),
    "v4": Chip("TPU v4", flops=275e12, bandwidth=1228e9, link=45e9, memory=30.75 * GIB),
}


def forward_flops(*, matmul_params: float, layers: int, heads_width: int, tokens: float, context: float) -> float:
    """One forward pass over ``tokens`` tokens that attend to ``context`` positions on average.

    2 * params in matrix products per token, and 4 * layers * (heads * head_dim) * context for attention.
    """
    return tokens * (2.0 * matmul_params + 4.0 * layers * heads_width * context)


def iteration_flops(
    *,
    matmul_params: float,
    layers: int,
    heads_width: int,
    prompt_tokens: float,
    completion_tokens: float,
    group_size: int,
    used_share: float,
    credit_forwards: float,
    scoring_forwards: float,
    epochs: int,
    context: float,
    update_forwards: float = 3.0,
) -> float:
    """Sampling (prompts once per group), scoring, credit, and ``update_forwards`` forwards' worth per epoch of update.

    These are three: forward, gradients of the states, gradients of the weights. With adapters the last are next to
    none.
    """

    def forward(tokens: float) -> float:
        return forward_flops(
            matmul_params=matmul_params, layers=layers, heads_width=heads_width, tokens=tokens, context=context
        )

    sampling = forward(prompt_tokens / group_size + completion_tokens)
    trained = used_share * (prompt_tokens + completion_tokens)
    return sampling + forward(trained) * (credit_forwards + scoring_forwards + update_forwards * epochs)
