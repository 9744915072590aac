"""Bound a program's time from below, and its share of the chips' peak. Arithmetic, no measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oarjax.costs import Number, RowTokens, pass_flops
from oarjax.kernels.attention_tangent import NAME as TANGENT
from oarjax.kernels.decode_attention import NAME as DECODE
from oarjax.models.decoder import Decoder
from oarjax.models.delta_kernel import NAME as DELTA
from oarjax.system.chips import Chip


@dataclass(frozen=True)
class Times:
    """Seconds of one program on every chip at once, by what each part of a chip has to do."""

    products: float  # matrix units
    memory: float  # HBM, where it was counted
    links: float  # between chips

    @property
    def in_turn(self) -> float:
        """Collectives wait for products and products for collectives. Reading HBM is always behind products."""
        return max(self.products, self.memory) + self.links

    @property
    def together(self) -> float:
        """Everything behind the slowest."""
        return max(self.products, self.memory, self.links)


def roofline(chip: Chip, *, flops: Number, sent: Number, read: Number = 0) -> Times:
    """Estimate the times of ``flops``, ``sent`` bytes between chips and ``read`` bytes of HBM, each per chip.

    A collective is taken to be a ring over one axis of the torus, both of whose directions carry half.
    """
    return Times(flops / chip.flops, read / chip.bandwidth, sent / (2 * chip.link))


@dataclass(frozen=True)
class Reached:
    """Shares of a chip's peaks that a program is assumed to reach: assumptions, not measurements.

    The first three are what ``oarjax accept`` asks of a healthy device's large matrix products, copies and all-reduces.
    """

    products: float = 0.85
    memory: float = 0.8
    links: float = 0.8
    kernels: float = 0.5  # attention by Pallas, of the matrix units' peak
    hop: float = 1e-6  # seconds per link that a collective's farthest message passes


def expected_seconds(
    chip: Chip, reached: Reached, *, flops: Number, kernels: Number, moved: Number, passed: Number, links: Number
) -> float:
    """Estimate the seconds of a program with nothing overlapped but the reading of products' operands.

    Args:
        flops: per chip, ``kernels`` of them in kernels.
        moved: bytes of HBM of the instructions with products, behind which they are.
        passed: those of all other instructions, which come one after another.
        links: seconds of its collectives, at their links' full rate.
    """
    products = (flops - kernels) / (chip.flops * reached.products) + kernels / (chip.flops * reached.kernels)
    bandwidth = chip.bandwidth * reached.memory
    return max(products, moved / bandwidth) + passed / bandwidth + links


def utilisation(chip: Chip, *, model_flops: Number, chips: int, seconds: Number) -> float:
    """Divide model FLOPs by what the chips could have done in that time: 0 to 1."""
    return model_flops / (chips * chip.flops * seconds) if seconds > 0 else 0.0


def decoding_bytes(
    *,
    weights: Number,
    rows: Number,
    prompts: Number,
    prompt: Number,
    completion: Number,
    slots: Number,
    position: Number,
    state: Number = 0,
) -> float:
    """Count the bytes of HBM that decoding reads on one chip: per token its weights and its share of the caches.

    A step reads ``slots`` of a row's cache on average, filled or not. ``rows`` and ``prompts`` are the chip's;
    ``position`` is the bytes that one position's keys and values of all layers take on it, ``state`` those of a row's
    recurrent states, which are written back as well.
    """
    return float(completion) * (weights + position * (rows * slots + prompts * prompt) + 2 * state * rows)


ATTENTION = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4, TANGENT: 5}
"""Products of a score block that each kernel computes, those that it computes again included."""


GROUPED = "ragged-dot"
"""Start of the names of the compiler's own kernels for experts."""


def kernel_flops(
    name: str,
    operands: Sequence[tuple[int, ...]],
    *,
    block: Callable[[int], int],
    experts: int = 0,
    slots: Number | None = None,
) -> float:
    """Count a kernel call's FLOPs: attention, whose partly visible blocks are computed whole, decode, states, experts.

    Args:
        operands: sizes; the largest three in a row are q [rows, heads, N, h] and k and v [rows, kv heads, M, h], the N
            queries standing at the end of the M keys; a tangent's rows are those of all draws. The compiler leaves the
            axis of a single row out. Those of a grouped product end with the rows [R, D] and the matrices [experts
            held, D, F].
        block: side of a block for a length.
        experts: number in all. With even loads a chip that holds some of them multiplies that share of the rows: the
            kernel ends with the last group.

        slots: those that a decode kernel reads of each row's own cache; None: all.

    Raises:
        ValueError: another kernel.
    """
    if name.startswith(GROUPED):
        if "metadata" in name:  # the groups' places
            return 0.0
        held_experts = operands[-1][0]
        return 2.0 * operands[-2][0] * math.prod(operands[-1][1:]) * min(held_experts / (experts or held_experts), 1.0)
    if name.startswith(DECODE):
        queries, (*_, length) = next(pair for pair in pairwise(operands) if len(pair[1]) == 5)
        return 4.0 * math.prod(queries) * (slots if slots and name.startswith(f"{DECODE}_rows") else length)
    if name.startswith(DELTA):  # no matrix products, and it waits for memory
        return 0.0
    products = next((n for part, n in ATTENTION.items() if part in name), None)
    if products is None:
        raise ValueError(f"kernel {name}: expected one of {', '.join(ATTENTION)}; its FLOPs are not known")
    triples = [(q, k) for q, k, v in zip(operands, operands[1:], operands[2:]) if k == v and len(q) == len(k) > 2]
    q, k = max(triples, key=lambda pair: math.prod(pair[0]))
    (*row, heads, new, width), keys = q, k[-2]
    rows = math.prod(row)
    high, wide = block(new), block(keys)
    blocks = sum(min(-(-keys // wide), (keys - new + (i + 1) * high - 1) // wide + 1) for i in range(-(-new // high)))
    return 2.0 * products * rows * heads * width * blocks * high * wide


def executed_update_flops(
    d: Decoder, row: RowTokens, *, remat: str, stored: Number, attended: Number, attention_passes: Number
) -> float:
    """Count the products that forward and backward of one row execute, including what ``remat`` recomputes.

    Layers forward once, backward as two forwards, and the forward repeated but for attention with dots, for nothing
    with none. The head is repeated always, chunk by chunk.

    Args:
        stored: parameters, in all layers, of products that are not repeated: each layer's last, whose result the
            backward pass never reads, and those that remat keeps.
        attended: key positions that a query is multiplied with: N where attention computes the whole square.
        attention_passes: forwards' worth of attention in forward and backward together, recomputation included; 4
            for plain attention with any remat but none. Kernels recompute on their own account.
    """
    tokens = row.tokens
    linear = pass_flops(d, tokens=tokens, context=0, read=0)
    attention = pass_flops(d, tokens=tokens, context=attended, read=0) - linear
    head = 2.0 * d.head_params * row.completion
    recomputed = 0.0 if remat in ("none", "dots") else linear - 2.0 * stored * tokens
    return 3 * linear + recomputed + attention_passes * attention + 4 * head


def executed_fused_flops(
    d: Decoder,
    row: RowTokens,
    *,
    remat: str,
    stored: Number,
    draws: Number,
    attended: Number,
    attention_passes: Number,
) -> float:
    """Products that scores by OAR-G and the update of one row execute in one pass, see ``step.fused``.

    The update's own, and a push and a pull through the completion's linearised layers for every draw. Where the
    backward pass repeats layers, each of the two repeats the completion's, once for all draws. Their attention is
    kernels, which are not counted here.
    """
    update = executed_update_flops(
        d, row, remat=remat, stored=stored, attended=attended, attention_passes=attention_passes
    )
    flops = pass_flops(d, tokens=row.completion, context=0, read=0)
    recomputed = 0.0 if remat in ("none", "dots") else flops - 2.0 * stored * row.completion
    return update + 2 * (draws * flops + recomputed)
