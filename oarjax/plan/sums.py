"""From what a compiler said to what a plan states: counted work, times, and what fits. Plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oarjax.config import Config, CreditConfig
from oarjax.costs import Chip
from oarjax.credit.methods import attribution
from oarjax.credit.oar_l import SCOPE, chunk_size
from oarjax.credit.oar_p import bucket_sizes
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.splash import block_of
from oarjax.models.weights import matmul_parameters
from oarjax.plan.credit_costs import (
    Decoder,
    Run,
    clean_flops,
    fisher_flops,
    gradient_flops,
    local_flops,
    masked_flops,
)
from oarjax.plan.hlo import Executed, executed
from oarjax.plan.programs import Shapes, shapes_of
from oarjax.plan.roofline import (
    adapted_update_flops,
    decoding_bytes,
    executed_update_flops,
    kernel_flops,
    model_update_flops,
    roofline,
    sampling_flops,
    scoring_flops,
    utilisation,
)
from oarjax.training.parts.adapters import trained_count


def decoder_of(model: QwenConfig) -> Decoder:
    """The sizes that cost depends on."""
    head = model.vocab_size * model.hidden_size
    return Decoder(
        layers=model.num_hidden_layers,
        trunk_params=matmul_parameters(model) - head,
        head_params=head,
        heads_width=model.num_attention_heads * model.head_dim,
        kv_width=model.num_key_value_heads * model.head_dim,
    )


def model_flops(phase: str, model: QwenConfig, cfg: Config) -> float:
    """What a phase asks for, over all chips: nothing recomputed, attention causal, every completion at its longest."""
    d, s = decoder_of(model), shapes_of(cfg)
    run, rows = Run(prompt=s.prompt, completion=s.completion, recomputed=0), s.microbatches * s.microbatch
    if phase == "sample":
        return sampling_flops(d, prompts=s.prompts, rows=s.rows, prompt=s.prompt, completion=s.completion)
    if phase == "update" and cfg.lora.rank:
        return rows * adapted_update_flops(d, run, adapters=trained_count(cfg.lora, model))
    if phase == "update":
        return rows * model_update_flops(d, run)
    if phase != "score":
        return 0.0
    found = credit_flops(d, run, cfg.credit)
    if cfg.update.epochs * cfg.update.minibatches > 1:
        # Old log-probs: the attribution's clean pass serves, where there is one; its head is at one position only.
        found += scoring_flops(d, run) - (clean_flops(d, run) if found else 0)
    if cfg.loss.kl_beta > 0:
        found += scoring_flops(d, run)
    return rows * found


def credit_flops(d: Decoder, run: Run, credit: CreditConfig) -> float:
    """Of one row, by the method's formula; 0 for methods that need no pass of their own."""
    m, kind = credit.masking, attribution(credit)
    local = {"window": credit.local.window, "answers": credit.local.answers}
    gradient = gradient_flops(d, run, draws=credit.draws)
    fisher = fisher_flops(d, run, outcomes=credit.fisher.outcomes + credit.fisher.sampled)
    if kind == "oar_screened":
        by = {"oar_l": local_flops(d, run, **local), "oar_f": fisher, "oar_g": gradient}
        exact = masked_flops(d, run, share=credit.screen.share, buckets=m.buckets)
        return by.get(credit.screen.by, clean_flops(d, run)) + exact - clean_flops(d, run)
    return {
        "oar_g": gradient,
        "grail": gradient_flops(d, run, draws=1),
        "oar_f": fisher,
        "oar_l": local_flops(d, run, **local),
        "oar_p": masked_flops(d, run, share=1.0, buckets=m.buckets),
    }.get(kind, 0.0)


def count(text: str, s: Shapes, credit: CreditConfig) -> Executed:
    """Work of a phase's program on one chip, all rows in use and every token of a completion credited."""
    masking = credit.masking
    share, chunk = 1.0, masking.chunk
    if attribution(credit) == "oar_screened":
        share, chunk = credit.screen.share, max(1, round(chunk * credit.screen.share))
    lows, sizes = bucket_sizes(s.completion, chunk=chunk, buckets=masking.buckets)
    ends = [*lows[1:], s.completion]
    runs = [math.ceil(share * (end - low) / size) for low, end, size in zip(lows, ends, sizes)]
    places = 1 + min(credit.local.window, s.completion - 1) + credit.local.answers
    local = math.ceil(s.completion / chunk_size(s.completion, places=places, chunk=masking.chunk))

    def trips(op_name: str, branching: bool) -> float:
        if branching:
            return sum(runs)
        if op_name.count("while") == 1:
            return s.microbatches
        return local if SCOPE in op_name else sum(runs)

    def branches(op_name: str, number: int) -> Sequence[float]:
        return [n / sum(runs) for n in runs] if number == len(runs) else [1 / number] * number

    return executed(text, trips=trips, branches=branches)


def phase_of(
    result: Mapping[str, Any],
    *,
    name: str,
    method: str | None,
    chip: Chip,
    chips: int,
    work: Executed | None,
    model: float,
    read: float,
) -> dict[str, Any]:
    """One column of a plan, per chip but for ``model``, which is of all; ``work`` is None where it does not fit."""
    beside = result["beside"]
    program = result["memory"]["peak"] if "memory" in result else result["needs"]
    total = None if program is None else program + beside
    line: dict[str, Any] = {
        "name": name,
        "method": method,
        "fits": work is not None and total is not None and total <= chip.memory,
        "hbm": {"program": program, "beside": beside, "total": total, "limit": chip.memory},
        "compile_seconds": result["seconds"],
        "compile_cpu_seconds": result["cpu_seconds"],
        "cached": result["cached"],
        "key": result["key"],
        "message": result.get("message"),
    }
    if work is None:
        return line
    kernels = sum(n * kernel_flops(k.name, k.operands, block=block_of) for k, n in work.kernels.items())
    done = work.flops + kernels
    times = roofline(chip, flops=done, sent=sum(work.collectives.values()), read=read)
    return line | {
        "executed": done,
        "kernels": kernels,
        "model": model,
        "share": model / (done * chips) if model else None,
        "sent": dict(work.collectives),
        "calls": dict(work.calls),
        "read": read,
        "seconds": {"products": times.products, "memory": times.memory, "links": times.links},
        "seconds_in_turn": times.in_turn,
        "seconds_together": times.together,
        "utilisation_in_turn": utilisation(chip, model_flops=model, chips=chips, seconds=times.in_turn),
        "utilisation_together": utilisation(chip, model_flops=model, chips=chips, seconds=times.together),
        "aliased": result["memory"]["aliased"],
        "chips": chips,
    }


def read_bytes(model: QwenConfig, s: Shapes, *, chips: int, tensor: int) -> float:
    """Bytes of HBM that sampling reads on one chip: its weights and its share of the caches, for every token.

    ``tensor`` chips have one copy of the policy, and of its key heads at least one each.
    """
    d, groups = decoder_of(model), chips // tensor
    heads = max(model.num_key_value_heads / tensor, 1)
    return decoding_bytes(
        weights=2 * (d.trunk_params + d.head_params) / tensor,
        rows=s.rows / groups,
        prompts=s.prompts / groups,
        prompt=s.prompt,
        completion=s.completion,
        position=2 * 2 * d.layers * heads * model.head_dim,
    )


def analytic_update_flops(cfg: Config, model: QwenConfig, s: Shapes, line: Mapping[str, Any]) -> float | None:
    """What the update should execute over all chips with its remat policy; None where no formula is for it.

    The part of kernels is what their formula says; the rest does not depend on the program.
    """
    if "executed" not in line or cfg.lora.rank:
        return None
    d, run, rows = decoder_of(model), Run(prompt=s.prompt, completion=s.completion), s.microbatches * s.microbatch
    products = executed_update_flops(
        d,
        run,
        remat=cfg.policy.remat,
        last_product=model.num_hidden_layers * model.hidden_size * model.intermediate_size,
        attended=s.prompt + s.completion,
        attention_passes=0 if line["kernels"] else {"none": 3, "dots": 4, "full": 4}[cfg.policy.remat],
    )
    return rows * products + line["kernels"] * line["chips"]


def step_of(phases: Sequence[Mapping[str, Any]], times: Mapping[str, int], *, chip: Chip, chips: int) -> dict[str, Any]:
    """All phases of an iteration, each as often as it runs."""

    def total(field: str) -> float:
        return sum(times[p["name"]] * p[field] for p in phases)

    in_turn, together, model = total("seconds_in_turn"), total("seconds_together"), total("model")
    return {
        "hbm": {"total": max(p["hbm"]["total"] for p in phases)},
        "executed": total("executed"),
        "kernels": total("kernels"),
        "model": model,
        "share": model / (total("executed") * chips),
        "seconds_in_turn": in_turn,
        "seconds_together": together,
        "utilisation_in_turn": utilisation(chip, model_flops=model, chips=chips, seconds=in_turn),
        "utilisation_together": utilisation(chip, model_flops=model, chips=chips, seconds=together),
        "compile_cpu_seconds": sum(p["compile_cpu_seconds"] for p in phases),
    }
