"""What credit would cost in a step of a large policy: FLOPs and a roofline. Plain numbers, no measurement.

Everything is for one completion, in chip-seconds: a pod of n chips divides both sides of a ratio by n. Decoding is
the slower of reading weights and caches and of multiplying; all else is taken to be bound by the products.
"""

from __future__ import annotations

from dataclasses import dataclass

from oarjax.costs import CHIPS, Chip, Number, forward_flops


@dataclass(frozen=True)
class Decoder:
    """The sizes that cost depends on."""

    layers: int
    trunk_params: Number  # in matrix products of the layers
    head_params: Number
    heads_width: int  # heads * head_dim
    kv_width: int  # key heads * head_dim


QWEN_7B = Decoder(
    layers=28,
    trunk_params=28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944),
    head_params=3584 * 152064,
    heads_width=3584,
    kv_width=512,
)
"""Qwen2.5-7B, from its config.json."""


PROJECTED = tuple(CHIPS[name] for name in ("v5e", "v5p", "v6e"))


@dataclass(frozen=True)
class Run:
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


def pass_flops(d: Decoder, *, tokens: Number, context: Number, read: Number) -> float:
    """A forward over ``tokens`` that attend to ``context`` positions on average, with logits at ``read`` of them."""
    trunk = forward_flops(
        matmul_params=float(d.trunk_params),
        layers=d.layers,
        heads_width=d.heads_width,
        tokens=float(tokens),
        context=float(context),
    )
    return trunk + 2.0 * d.head_params * read


def decode_seconds(d: Decoder, chip: Chip, run: Run) -> float:
    """Chip-seconds of prefill and decoding per completion.

    A token step reads the weights once, every row's own cache (half full on average) and every group's prompt once.
    """
    kv = 2.0 * d.layers * d.kv_width * run.bytes_per_number  # bytes per position
    groups = run.replica_rows / run.group
    weights = (d.trunk_params + d.head_params) * run.bytes_per_number
    step_bytes = weights + kv * (run.replica_rows * run.completion / 2 + groups * run.prompt)
    context = run.prompt + run.completion / 2
    step_flops = pass_flops(d, tokens=run.replica_rows, context=context, read=run.replica_rows)
    chips = run.replica_chips
    step = max(
        step_bytes / (chips * chip.bandwidth * run.bandwidth_share),
        step_flops / (chips * chip.flops * run.decode_mfu),
    )
    prefill = pass_flops(d, tokens=run.prompt, context=run.prompt / 2, read=1) / (chip.flops * run.mfu)
    return prefill / run.group + step * run.completion * chips / run.replica_rows


def update_flops(d: Decoder, run: Run) -> float:
    """One forward and backward of a row, the backward worth two forwards and what it recomputes of the layers."""
    whole = run.prompt + run.completion
    trunk = pass_flops(d, tokens=whole, context=whole / 2, read=0)
    return (3 + run.recomputed) * trunk + 3 * 2.0 * d.head_params * run.completion


def clean_flops(d: Decoder, run: Run) -> float:
    """The pass over a row that every attribution starts from."""
    whole = run.prompt + run.completion
    return pass_flops(d, tokens=whole, context=whole / 2, read=1)


def gradient_flops(d: Decoder, run: Run, *, draws: int) -> float:
    """OAR-G: a push and a pull through the linearised completion per draw."""
    return clean_flops(d, run) + 2 * _redone_flops(d, run) + draws * 2 * _linear_flops(d, run)


def fisher_flops(d: Decoder, run: Run, *, outcomes: int) -> float:
    """OAR-F: a pull per outcome."""
    return clean_flops(d, run) + _redone_flops(d, run) + outcomes * _linear_flops(d, run)


def _redone_flops(d: Decoder, run: Run) -> float:
    """What one way through the linearised completion computes again, once for all draws or outcomes."""
    context = run.prompt + run.completion / 2
    return run.recomputed * pass_flops(d, tokens=run.completion, context=context, read=0)


def _linear_flops(d: Decoder, run: Run) -> float:
    """One way through the linearised completion: a forward's worth, and attention's products twice.

    Twice, because the derivative of a product of two activations has two terms; weights are constant.
    """
    context = run.prompt + run.completion / 2
    return pass_flops(d, tokens=run.completion, context=2 * context, read=1)


def masked_flops(d: Decoder, run: Run, *, share: float, buckets: int) -> float:
    """OAR-P of a ``share`` of the reasoning, spread evenly, suffixes cut at one of ``buckets`` places."""
    reasoning = run.completion - run.answer
    total = clean_flops(d, run)
    for j in range(buckets):
        low, high = run.completion * j / buckets, run.completion * (j + 1) / buckets
        count = share * max(min(high, reasoning) - low, 0)
        context = run.prompt + (low + run.completion) / 2
        total += count * pass_flops(d, tokens=run.completion - low, context=context, read=1)
    return total


def local_flops(d: Decoder, run: Run, *, window: int, answers: int) -> float:
    """OAR-L: 1 + window + answers positions per reasoning token, each shown all slots of the row."""
    reasoning = run.completion - run.answer
    places = 1 + window + answers
    context = run.prompt + run.completion + places
    return clean_flops(d, run) + reasoning * pass_flops(d, tokens=places, context=context, read=1)


def credit_flops(d: Decoder, run: Run) -> dict[str, float]:
    """Every method at its usual settings. Screening is by OAR-L; the exact part shares its clean pass."""
    local = local_flops(d, run, window=2, answers=4)
    screened = masked_flops(d, run, share=0.2, buckets=8) - clean_flops(d, run)
    return {
        "OAR-G, 1 draw": gradient_flops(d, run, draws=1),
        "OAR-G, 4 draws": gradient_flops(d, run, draws=4),
        "OAR-F, 4 outcomes": fisher_flops(d, run, outcomes=4),
        "OAR-L": local,
        "screened OAR-P, 20%": local + screened,
        "OAR-P": masked_flops(d, run, share=1.0, buckets=8),
        "OAR-P, 40 spans": clean_flops(d, run)
        + 40 / (run.completion - run.answer) * (masked_flops(d, run, share=1.0, buckets=8) - clean_flops(d, run)),
    }


def projection(d: Decoder, chip: Chip, run: Run) -> dict[str, float]:
    """Seconds of a whole step over plain GRPO's, by method."""
    plain = decode_seconds(d, chip, run) + update_flops(d, run) / (chip.flops * run.mfu)
    return {name: 1 + flops / (chip.flops * run.mfu) / plain for name, flops in credit_flops(d, run).items()}


def rollout_share_for(overhead: float, d: Decoder, run: Run, *, flops: float) -> float:
    """Share of plain GRPO's step that sampling must take for credit of ``flops`` to add ``overhead`` - 1 at most.

    0 where the update alone is long enough. Scoring and update are on the same chips at the same MFU.
    """
    needed = flops / (overhead - 1)  # what the step is worth, in FLOPs of the update's kind
    return max(0.0, 1 - update_flops(d, run) / needed)
