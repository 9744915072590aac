"""Compute the cost of credit in a step of a large policy: FLOPs and a roofline. Plain numbers, no measurement.

Everything is for one completion, in chip-seconds: a pod of n chips divides both sides of a ratio by n. Decoding is
the slower of reading weights and caches and of multiplying; all else is taken to be bound by the products.
"""

from __future__ import annotations

from dataclasses import dataclass

from oarjax.costs import (
    Number,
    RowTokens,
    clean_flops,
    fisher_flops,
    gradient_flops,
    local_flops,
    masked_flops,
    pass_flops,
    scoring_flops,
    update_flops,
)
from oarjax.models.decoder import Decoder
from oarjax.system.chips import CHIPS, Chip

QWEN_7B = Decoder(
    layers=28,
    trunk_params=28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944),
    head_params=3584 * 152064,
    heads_width=3584,
    kv_width=512,
)
"""Qwen2.5-7B, from its config.json."""


PROJECTED = tuple(CHIPS[name] for name in ("v5e", "v5p", "v6e"))

ONE_PASS = "OAR-G, 1 draw, one pass"
"""Scores and update in one program: ``update.fused``."""

VALUES = tuple(f"signed values, 2 places x {variant}" for variant in ("4", "4, by entropy", "2, by entropy"))


@dataclass(frozen=True)
class Assumptions:
    """A step's shapes, and what is assumed of the hardware's use."""

    prompt: int = 512
    completion: int = 1024
    answer: int = 16  # cue and answer, at the completion's end; all before is reasoning
    group: int = 8
    replica_rows: int = 256  # completions that one copy of the weights decodes at once
    replica_chips: int = 8  # chips over which that copy is divided
    bytes_per_number: int = 2  # of weights and caches
    mfu: float = 0.4  # of scoring and update
    decode_mfu: float = 0.4
    bandwidth_share: float = 0.6  # of the peak that decoding reaches
    recomputed: Number = 1.0  # forwards that a backward pass does again: 1 with remat full, 0 without

    @property
    def row(self) -> RowTokens:
        return RowTokens(self.prompt, self.completion, self.completion - self.answer)


def decode_seconds(d: Decoder, chip: Chip, a: Assumptions) -> float:
    """Estimate chip-seconds of prefill and decoding per completion.

    A token step reads the weights once, every row's own cache (half full on average) and every group's prompt once.
    """
    kv = 2.0 * d.layers * d.kv_width * a.bytes_per_number  # bytes per position
    groups = a.replica_rows / a.group
    weights = (d.trunk_params + d.head_params) * a.bytes_per_number
    step_bytes = weights + kv * (a.replica_rows * a.completion / 2 + groups * a.prompt)
    context = a.prompt + a.completion / 2
    step_flops = pass_flops(d, tokens=a.replica_rows, context=context, read=a.replica_rows)
    chips = a.replica_chips
    step = max(
        step_bytes / (chips * chip.bandwidth * a.bandwidth_share),
        step_flops / (chips * chip.flops * a.decode_mfu),
    )
    prefill = pass_flops(d, tokens=a.prompt, context=a.prompt / 2, read=1) / (chip.flops * a.mfu)
    return prefill / a.group + step * a.completion * chips / a.replica_rows


def credit_flops(d: Decoder, a: Assumptions) -> dict[str, float]:
    """Count what programs execute for every method at its usual settings, suffixes in 8 buckets.

    Screening is by OAR-L; the exact part shares its clean pass.
    """
    row, clean = a.row, clean_flops(d, a.row)
    options = {"recomputed": a.recomputed}
    exact = masked_flops(d, row, share=1.0, buckets=8)
    local = local_flops(d, row, window=2, answers=4, padded=True)
    by_places = {n: masked_flops(d, row, share=n / row.reasoning, buckets=8) - clean for n in (4, 8)}
    entropies = scoring_flops(d, row)
    return {
        "OAR-G, 1 draw": gradient_flops(d, row, draws=1, **options),
        ONE_PASS: gradient_flops(d, row, draws=1, **options) - clean,  # the update's forward
        "OAR-G, 4 draws": gradient_flops(d, row, draws=4, **options),
        "OAR-F, 4 outcomes": fisher_flops(d, row, outcomes=4, **options),
        "OAR-L": local,
        **dict(zip(VALUES, (local + by_places[8], entropies + by_places[8], entropies + by_places[4]))),
        "screened OAR-P, 20%": local + masked_flops(d, row, share=0.2, buckets=8) - clean,
        "OAR-P": exact,
        "OAR-P, 40 spans": clean + 40 / row.reasoning * (exact - clean),
    }


def projection(d: Decoder, chip: Chip, a: Assumptions) -> dict[str, float]:
    """Estimate seconds of a whole step over plain GRPO's, by method."""
    plain = decode_seconds(d, chip, a) + update_flops(d, a.row, recomputed=a.recomputed) / (chip.flops * a.mfu)
    return {name: 1 + flops / (chip.flops * a.mfu) / plain for name, flops in credit_flops(d, a).items()}


def rollout_share_for(overhead: float, d: Decoder, a: Assumptions, *, flops: float) -> float:
    """Return the least share of sampling in GRPO's step with which credit of ``flops`` adds ``overhead`` - 1 at most.

    0 where the update alone is long enough. Scoring and update are on the same chips at the same MFU.
    """
    step_flops = flops / (overhead - 1)  # what the step is worth, in FLOPs of the update's kind
    return max(0.0, 1 - update_flops(d, a.row, recomputed=a.recomputed) / step_flops)
