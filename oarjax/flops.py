"""Model FLOPs: the arithmetic of the matrix products a method asks for, 2 per multiply-add. Plain numbers.

Recomputation (remat), padding and sampling's rejected work are not counted, so that a utilisation made from
these numbers says how much of the hardware went into the model's own arithmetic.
"""

from __future__ import annotations


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
