"""From what a compiler said to what a plan states: counted work, times, and what fits. Plain numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oarjax.config.learning import RolloutConfig
from oarjax.config.schema import Config
from oarjax.costs import Number, RowTokens, Work, iteration_flops, pass_flops, sampling_flops
from oarjax.credit.methods.signed_values import SCOPE as CANDIDATES
from oarjax.credit.oar.oar_l import SCOPE, chunk_size
from oarjax.credit.oar.oar_p import bucket_sizes
from oarjax.credit.resolved import ResolvedMethod
from oarjax.credit.settings import CreditSettings
from oarjax.kernels.grouped_dot import BLOCK, LOOP, even_blocks
from oarjax.kernels.splash import block_of
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of, expert_parameters, matmul_parameters
from oarjax.run.adapters import trained_count
from oarjax.run.custom import find_credit
from oarjax.run.shapes import times_again
from oarjax.system.chips import Chip
from oarjax.tools.plan.cycles import largest_operations
from oarjax.tools.plan.hlo import Executed, executed
from oarjax.tools.plan.links import Ways, collective_seconds
from oarjax.tools.plan.programs import LargestShapes, planned_prompt_rows, shapes_of, times_of
from oarjax.tools.plan.roofline import (
    GROUPED,
    Reached,
    decoding_bytes,
    executed_fused_flops,
    executed_update_flops,
    expected_seconds,
    kernel_flops,
    roofline,
    utilisation,
)

ANSWER = 16
"""Tokens of cue and answer at the end of a planned completion; all before are reasoning."""


DECODE = "jit(_decode_rows)/"
"""Names of loops of ``SegmentedSampler``'s decode programs, which draw every token but a row's first."""


def largest_work(model: QwenConfig, cfg: Config, credit: ResolvedMethod) -> Work:
    """Return what an iteration computes with every prompt and completion at its longest and every row used."""
    s, updates = shapes_of(cfg), cfg.update.epochs * cfg.update.minibatches
    reasoning, plays = max(s.completion - ANSWER, 0), cfg.rollout.environment
    units = plays.turns if plays is not None and cfg.credit.masking.unit == "turn" else None
    return Work(
        row=RowTokens(s.prompt, s.completion, reasoning, planned_prompt_rows(cfg.update), units),
        prompts=s.prompts,
        rows=s.rows,
        used=s.rows,
        epochs=cfg.update.epochs,
        old_logps=updates > 1,
        measured=bool(credit.measures),
        reference=credit.needs_reference(kl=cfg.loss.scores_reference),
        outcome=cfg.advantage.soft != "off",
        **credit.teacher_work(),
        adapters=trained_count(cfg.lora, model) if cfg.lora.rank else None,
    )


def model_flops(phase: str, model: QwenConfig, cfg: Config) -> float:
    """Count what one run of a phase's program asks for, over all chips."""
    if phase not in ("sample", "score", "update", "fused"):
        return 0.0
    credit = find_credit(cfg.credit)
    work = replace(largest_work(model, cfg, credit), fused=phase == "fused")
    flops = iteration_flops(decoder_of(model), work, credit)
    phase_seconds = flops["score"] + flops["update"] if phase == "fused" else flops[phase]
    return phase_seconds / times_of(cfg.update)[phase]


def count(
    text: str,
    s: LargestShapes,
    credit: CreditSettings,
    model: QwenConfig,
    *,
    steps: Number = 1,
    turns: int = 1,
    slots: Number | None = None,
) -> Executed:
    """Count the work of a phase's program on one chip, all rows in use and every token of a completion credited.

    A decode program draws the tokens of ``steps``; a kernel in it reads ``slots`` of each row's cache. Completions have
    as many ``turns``.
    """
    masking = credit.masking
    share, chunk = 1.0, masking.chunk
    if masking.unit == "turn":
        share = min(turns / s.completion, 1.0)
    if "oar_screened" in (credit.method, credit.method == "permuted" and credit.permuted_of):
        share, chunk = credit.screen.share, max(1, round(chunk * credit.screen.share))
    if credit.method == "signed_values":
        share, chunk = credit.signed_values.places / s.completion, min(chunk, credit.signed_values.places)
    lows, sizes = bucket_sizes(s.completion, chunk=chunk, buckets=1 if model.delta else masking.buckets)
    ends = [*lows[1:], s.completion]
    runs = [math.ceil(share * (end - low) / size) for low, end, size in zip(lows, ends, sizes)]
    places = 1 + min(credit.local.window, s.completion - 1) + credit.local.answers
    local = math.ceil(s.completion / chunk_size(s.completion, places=places, chunk=masking.chunk))
    experts = model.experts.count if model.experts else 1

    def trips(op_name: str, branching: bool) -> float:
        if outer := re.search(rf"{LOOP}_(\d+)_(\d+)\)*/while/body/.*while$", op_name):
            rows, local_experts = map(int, outer.groups())  # the first block of every group is in no loop
            return even_blocks(rows, local_experts, min(local_experts / experts, 1.0)) / local_experts - 1.0
        if op_name.startswith(DECODE):
            return float(steps)
        if op_name.endswith(f"{CANDIDATES}/while"):
            return float(credit.signed_values.candidates)
        if branching:
            return float(sum(runs))
        if op_name.count("while") == 1:
            return float(s.microbatches)
        return float(local if SCOPE in op_name else sum(runs))

    def branches(op_name: str, number: int) -> Sequence[float]:
        return [n / sum(runs) for n in runs] if number == len(runs) else [1 / number] * number

    return executed(text, trips=trips, branches=branches, slots=slots)


def phase_of(
    result: Mapping[str, Any],
    *,
    name: str,
    method: str | None,
    chip: Chip,
    chips: int,
    work: Executed | None,
    experts: int,
    model: float,
    read: float,
    slots: Number | None = None,
) -> dict[str, Any]:
    """Return one column of a plan, per chip except ``model``, which is for all; ``work`` is None if it does not fit.

    Memory is that of the phase's program that needs most with what lies beside it, compile time that of all.
    ``experts`` is the policy's number of experts, 0 without; ``slots`` as in ``count``.
    """
    programs = [_memory(p) for p in result["programs"]]
    largest = max(programs, key=lambda p: math.inf if p["total"] is None else p["total"])
    program, other_bytes, total = (largest[part] for part in ("program", "beside", "total"))
    line: dict[str, Any] = {
        "name": name,
        "method": method,
        "commit": result.get("commit"),
        "fits": work is not None and total is not None and total <= chip.memory,
        "hbm": {"program": program, "beside": other_bytes, "total": total, "limit": chip.memory},
        "programs": programs,
        "compile_seconds": sum(p["seconds"] for p in result["programs"]),
        "compile_cpu_seconds": sum(p["cpu_seconds"] for p in result["programs"]),
        "cached": all(p["cached"] for p in result["programs"]),
        "message": next((p["message"] for p in result["programs"] if p.get("message")), None),
    }
    if work is None:
        return line
    flops_of = partial(kernel_flops, block=block_of, experts=experts, slots=slots)
    by_kernel = {kernel: times * flops_of(kernel.name, kernel.operands) for kernel, times in work.kernels.items()}
    kernels = sum(by_kernel.values())
    flops = work.flops + kernels
    ways, reached = {members: Ways(**way) for members, way in result["ways"]}, Reached()
    links = collective_seconds(work.groups, work.group_calls, ways, link=chip.link * reached.links, hop=reached.hop)
    streamed = work.streamed / (chip.bandwidth * reached.memory)  # by kernels that wait for HBM
    counted = {
        "executed": flops,
        "kernels": kernels,
        "grouped": sum(n for k, n in by_kernel.items() if k.name.startswith(GROUPED)),
        "model": model,
        "share": model / (flops * chips) if model else None,
        "sent": dict(work.collectives),
        "calls": dict(work.calls),
        "moved": work.moved,
        "passed": work.passed,
        "links_expected": links,
        "operations": largest_operations(work.operations),
        "seconds_compiler": work.cycles / chip.clock + kernels / (chip.flops * reached.kernels) + streamed + links,
        "aliased": max(p["memory"]["aliased"] for p in result["programs"]),
        "chips": chips,
    }
    return with_seconds(line | counted, chip, read=read)


def with_seconds(line: Mapping[str, Any], chip: Chip, *, read: float) -> dict[str, Any]:
    """Add to a column what follows from its counts and from the bytes of HBM that it has to read on a chip."""
    work = {"model_flops": line["model"], "chips": line["chips"]}
    times = roofline(chip, flops=line["executed"], sent=sum(line["sent"].values()), read=read)
    assumed = expected_seconds(
        chip,
        Reached(),
        flops=line["executed"],
        kernels=line["kernels"],
        moved=max(line["moved"], read - line["passed"]),  # what has to be read is, however it is counted
        passed=line["passed"],
        links=line["links_expected"],
    )
    expected = max(assumed, line["seconds_compiler"])
    return {
        **line,
        "read": read,
        "seconds": {"products": times.products, "memory": times.memory, "links": times.links},
        "seconds_in_turn": times.in_turn,
        "seconds_together": times.together,
        "seconds_assumed": assumed,
        "seconds_expected": expected,
        "utilisation_expected": utilisation(chip, **work, seconds=expected),
        "hbm_expected": read / (chip.bandwidth * expected) if expected else 0.0,
        "utilisation_in_turn": utilisation(chip, **work, seconds=times.in_turn),
        "utilisation_together": utilisation(chip, **work, seconds=times.together),
    }


def _memory(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bytes of a program and of what lies beside it; None where the compiler did not say."""
    program, other_bytes = result["memory"]["peak"] if "memory" in result else result["needs"], result["beside"]
    total = None if program is None else program + other_bytes
    sizes = {"program": program, "beside": other_bytes, "total": total}
    return {"name": result["name"], "key": result["key"], **sizes, "cpu_seconds": result["cpu_seconds"]}


def position_bytes(model: QwenConfig, rollout: RolloutConfig) -> int:
    """Count the bytes of a key head's keys and values of one position in all layers: bfloat16, or int8 and steps."""
    return 2 * decoder_of(model).layers * (model.head_dim + 2 if rollout.cache == "int8" else 2 * model.head_dim)


def read_bytes(
    model: QwenConfig,
    s: LargestShapes,
    rollout: RolloutConfig,
    *,
    chips: int,
    tensor: int,
    expert: int,
    slots: float | None = None,
) -> float:
    """Count the bytes of HBM that sampling reads on one chip: its weights and its share of the caches, for every token.

    ``tensor`` chips have one copy of the policy, and of its key heads at least one each; ``expert`` such copies have
    one of the experts. ``slots`` of a row's cache are read for a token on average, all by default.
    """
    groups = chips // tensor
    elsewhere = expert_parameters(model) * (1 - 1 / expert)
    heads = max(model.num_key_value_heads / tensor, 1)
    return decoding_bytes(
        weights=2 * (matmul_parameters(model) - elsewhere) / tensor,  # among many rows, each expert is some token's
        rows=s.rows / groups,
        prompts=s.prompts / groups,
        prompt=s.prompt,
        completion=s.completion,
        slots=s.completion if slots is None else slots,
        position=heads * position_bytes(model, rollout),
        state=4 * len(model.delta_layers) * (model.delta.value_width * model.delta.key_dim if model.delta else 0),
    )


def prompt_costs(
    model: QwenConfig, s: LargestShapes, rollout: RolloutConfig, work: Work, credit: ResolvedMethod
) -> dict[str, dict[str, float]]:
    """Compute what prompts cost in an iteration of these rows, with groups of the config's size and of one.

    ``flops`` is the prefill's share of the iteration's model FLOPs, ``bytes`` the prompts' keys and values as decoding
    reads them, once over all copies of the policy.
    """
    d, costs = decoder_of(model), {}
    for name, prompts in (("group", s.prompts), ("single", s.rows)):
        work = replace(work, prompts=prompts)
        prefill = sampling_flops(d, prompts=prompts, rows=0, prompt=s.prompt, completion=s.completion)
        cached = position_bytes(model, rollout) * model.num_key_value_heads * s.prompt * prompts
        costs[name] = {"flops": prefill / sum(iteration_flops(d, work, credit).values()), "bytes": float(cached)}
    return costs


def again_costs(turns: int, model: QwenConfig, s: LargestShapes, work: Work) -> dict[str, float] | None:
    """Compute what episodes of as many turns, all equally long, compute again before each turn but the first.

    ``positions`` are those of all rows, the padding of their width included, ``flops`` their share of sampling's.
    """
    if turns == 1:
        return None
    d, times = decoder_of(model), times_again(turns, s.completion)
    widths = {s.prompt + beyond: s.rows * count for beyond, count in times.items()}
    repeat_flops = sum(rows * pass_flops(d, tokens=width, context=width / 2, read=1) for width, rows in widths.items())
    first_flops = sampling_flops(d, prompts=work.prompts, rows=work.rows, prompt=s.prompt, completion=s.completion)
    positions = sum(width * rows for width, rows in widths.items())
    return {"turns": float(turns), "positions": positions, "flops": repeat_flops / (repeat_flops + first_flops)}


def applied_bytes(resident: Mapping[str, int]) -> float:
    """Count the bytes of HBM that one optimizer update moves on one chip: trained params, moments and summed gradients.

    All are read; params and moments are written again, and the sums are set to zero before the next update.
    """
    return 2.0 * sum(resident[part] for part in ("params", "optimizer", "gradients"))


def analytic_flops(cfg: Config, model: QwenConfig, s: LargestShapes, line: Mapping[str, Any]) -> float | None:
    """Count the FLOPs that an update, alone or with OAR-G's scores, should execute over all chips; None if unknown.

    The part of attention's kernels is what their formula says; the rest does not depend on the program.
    """
    fused = line["name"] == "fused"
    unknown = cfg.lora.rank or planned_prompt_rows(cfg.update) > 1
    if "executed" not in line or unknown or (fused and (cfg.credit.method != "oar_g" or not line["kernels"])):
        return None
    sizes: dict[str, Any] = {
        "remat": cfg.policy.remat,
        "stored": stored_params(model, cfg.policy.remat),
        "attended": s.prompt + s.completion,
        "attention_passes": 0 if line["kernels"] else 3 if cfg.policy.remat == "none" else 4,
    }
    d, row = decoder_of(model), RowTokens(s.prompt, s.completion)
    if fused:
        products = executed_fused_flops(d, row, draws=cfg.credit.draws, **sizes)
    else:
        products = executed_update_flops(d, row, **sizes)
    if model.experts:
        tokens = s.microbatch * row.tokens // line["chips"]
        products += 2 * row.tokens * padding_of_groups(model, tokens=tokens)
    return s.microbatches * s.microbatch * products + (line["kernels"] - line["grouped"]) * line["chips"]


def stored_params(model: QwenConfig, remat: str) -> int:
    """Count the parameters, in all layers, of products that a backward pass with this remat does not repeat.

    The router's gradient reads what the experts' last product gives, so that it is repeated.
    """
    matrix = 0 if model.experts else model.num_hidden_layers * model.hidden_size * model.intermediate_size
    heads = (2 if model.delta else 1) * model.num_attention_heads + 2 * model.num_key_value_heads
    attention = len(model.attention_layers) * model.hidden_size * model.head_dim * heads
    return matrix * (3 if remat == "projections" else 1) + attention * (remat in ("projections", "attention"))


def padding_of_groups(model: QwenConfig, *, tokens: int) -> float:
    """Count the multiply-adds per token that the experts' gradients spend on padding, a device holding ``tokens``.

    Each expert's rows are a whole number of blocks in ``grouped_outer``; devices trade rows of that many at a time.
    """
    experts = model.experts
    assert experts is not None
    rows = tokens * experts.per_token
    blocks = even_blocks(rows, experts.count, 1.0) * min(BLOCK, rows)
    products = 3 * experts.per_token * model.hidden_size * model.intermediate_size * model.num_hidden_layers
    return products * (blocks / rows - 1)


def step_of(phases: Sequence[Mapping[str, Any]], times: Mapping[str, int], *, chip: Chip, chips: int) -> dict[str, Any]:
    """Sum all phases of an iteration, each as often as it runs."""

    def total(field: str) -> float:
        return sum(times[p["name"]] * p[field] for p in phases)

    in_turn, together, model = total("seconds_in_turn"), total("seconds_together"), total("model")
    expected = total("seconds_expected")
    return {
        "hbm": {"total": max(p["hbm"]["total"] for p in phases)},
        "executed": total("executed"),
        "kernels": total("kernels"),
        "model": model,
        "share": model / (total("executed") * chips),
        "seconds_in_turn": in_turn,
        "seconds_together": together,
        "seconds_expected": expected,
        "utilisation_expected": utilisation(chip, model_flops=model, chips=chips, seconds=expected),
        "utilisation_in_turn": utilisation(chip, model_flops=model, chips=chips, seconds=in_turn),
        "utilisation_together": utilisation(chip, model_flops=model, chips=chips, seconds=together),
        "compile_cpu_seconds": sum(p["compile_cpu_seconds"] for p in phases),
    }
