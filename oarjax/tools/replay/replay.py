"""Recompute a kept batch in float32, row by row, and find the first value that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from oarjax.config.learning import LoraConfig
from oarjax.credit.kinds import neutral, token_advantages
from oarjax.credit.probe import ProbeMode
from oarjax.credit.signals import CreditInputs, signals_of
from oarjax.models.lora import join_params
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import at, weight_table
from oarjax.report.files import short
from oarjax.rollout.sampler import rollout_key
from oarjax.run.run import Run
from oarjax.step.advantages import split_advantages, taught_advantages
from oarjax.step.gradients import RowCheck, make_row_check
from oarjax.step.iteration import NOISE, ORDER
from oarjax.step.loss import imitation, policy_gradient, sampler_logps
from oarjax.storage.bad_batches import Header
from oarjax.types import AnswerSpan, Evidence, Params, SampledRows, Scores, TrainBatch


@dataclass(frozen=True)
class RowFinding:
    """The first quantity of a completion that is not finite, in the order of computation."""

    row: int  # among the rows of its iteration
    recorded: str | None  # in the values that the run kept
    replayed: str | None  # in float32
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class GroupFinding:
    """A group of parameters, in all its layers."""

    name: str
    params: int  # parameters that are not finite
    params_at: list[int]  # their layers; empty if there are none, or the group has no layers
    rows: int  # completions with a gradient that is not finite
    gradient_at: list[int]  # layers of these gradients
    grad_norm: float  # of the whole minibatch


@dataclass(frozen=True)
class Finding:
    place: str  # describes where it begins
    rows: list[RowFinding]
    groups: list[GroupFinding]


def replay(
    header: Header,
    evidence: Evidence,
    params: Params,
    run: Run,
    *,
    frozen: Params | None = None,
    reference: Params | None = None,
) -> Finding:
    """Recompute scores, credit, loss and gradient of every row.

    Args:
        frozen: weights below the adapters, with lora.rank.
        reference: policy of the KL term, if it is not ``frozen``.
    """
    b = evidence.numbers.shape[1]
    rows = int(evidence.used) * b
    e = jax.tree.map(jnp.asarray, evidence)
    flat = partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]))
    rollout, span = flat(e.rollout), flat(e.span)
    filled = [i for i in range(rows) if bool(rollout.completion[i].any())]
    completion = rollout.completion if e.completion is None else flat(e.completion)
    advantages = jnp.zeros(len(completion)) if e.advantages is None else flat(e.advantages)
    if header.kind == "sft":
        loss = imitation(run.policy, head_chunk=run.cfg.policy.head_chunk)
        scores, weights = Scores(), jnp.ones(completion.shape)
    else:
        loss = policy_gradient(
            run.policy,
            run.cfg.rollout,
            run.cfg.loss,
            run.credit,
            run.custom.loss,
            head_chunk=run.cfg.policy.head_chunk,
        )
        scores = flat(_scores(header, e, params, run, frozen, reference))
        weights = _weights(header, e, scores, rollout.tokens, span, advantages, completion, run)
    kind = "weights" if header.kind == "sft" else run.credit.kind
    safe = jnp.where(jnp.isfinite(weights).all(-1, keepdims=True), weights, neutral(kind, advantages))
    token_credit = token_advantages(kind, safe, advantages, completion)
    if e.late is not None:
        token_credit = split_advantages(token_credit, flat(e.late), span.answer, completion, rollout.ended)
    if header.kind != "sft":
        token_credit = taught_advantages(token_credit, completion, scores, run.cfg.loss)
    batch = TrainBatch(
        tokens=rollout.tokens,
        valid=rollout.valid,
        completion=completion,
        advantages=token_credit,
        old_logps=scores.old_logps,
        ref_logps=scores.ref_logps,
        behaviour_logps=None if header.kind == "sft" else sampler_logps(run.cfg.loss.off_policy, rollout),
        teacher=None if e.hints is None else flat(e.hints).teacher,
        experts=rollout.experts,
        values=scores.values and replace(scores.values, scale=jnp.zeros(rows) if e.scale is None else flat(e.scale)),
    )
    check = make_row_check(loss)
    denominator = jnp.float32(1 if e.denominator is None else jnp.maximum(e.denominator, 1e-20))
    gradient = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    checks: dict[int, RowCheck] = {}
    for i in filled:
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], batch)
        gradient, row_check = check(params, frozen, gradient, row, denominator)
        checks[i] = jax.device_get(row_check)
    flat_evidence = flat(evidence)
    recorded = (flat_evidence.scores, flat_evidence.weights, flat_evidence.advantages)
    replayed = (jax.device_get(scores), np.asarray(weights), np.asarray(advantages))
    mask, reasoning = np.asarray(completion), np.asarray(span.reasoning)
    findings = [
        RowFinding(
            row=int(flat_evidence.numbers[i]),
            recorded=_recorded(i, flat_evidence, *recorded, mask, reasoning),
            replayed=_replayed(i, checks[i], *replayed, mask, reasoning),
            loss=float(checks[i].loss.value),
            grad_norm=float(checks[i].grad_norm),
        )
        for i in filled
    ]
    groups = _groups(run.model, run.cfg.lora, params, gradient, list(checks.values()))
    norm = float(optax.tree.norm(gradient))
    rate = run.cfg.sft.optim.lr if header.kind == "sft" and run.cfg.sft else run.cfg.optim.lr
    return Finding(_place(header, findings, groups, norm, rate=rate), findings, groups)


def _scores(
    header: Header, e: Evidence, params: Params, run: Run, frozen: Params | None, reference: Params | None
) -> Scores:
    """Compute scores with the run's program."""
    noise = rollout_key(_key(header), step=header.number, batch=NOISE)
    all_params = join_params(frozen, params)
    rows = SampledRows(e.rollout, e.span, e.numbers, e.probed, e.hints)
    return run.steps.score(all_params, reference, rows, noise, 0, e.used, probe=cast(ProbeMode, header.probe))


def _weights(
    header: Header,
    e: Evidence,
    scores: Scores,
    tokens: Any,
    span: AnswerSpan,
    advantages: Any,
    completion: Any,
    run: Run,
) -> jax.Array:
    """Compute token weights as the method returns them, including those that are not finite."""
    order = rollout_key(_key(header), step=header.number, batch=ORDER)
    numbers, hints = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (e.numbers, e.hints))
    sizes = {"length": completion.shape[1], "group_size": run.cfg.rollout.group_size}
    signals = signals_of(scores, tokens, numbers, **sizes, hints=hints, iteration=header.number)
    return run.credit.weigher(keyword_table=run.keyword_table)(
        CreditInputs(signals, span, advantages, completion, order)
    )


def _key(header: Header) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(header.key, jnp.uint32), impl=header.key_impl)


# What is not finite -----------------------------------------------------------------------------------------------


def _first(stages: Sequence[tuple[str, Any]]) -> str | None:
    """Name the first value that is not finite."""
    return next((name for name, value in stages if value is not None and not np.isfinite(value).all()), None)


def _inside(values: Any, i: int, mask: np.ndarray) -> Any:
    return None if values is None else np.asarray(values)[i][mask[i]]


def _recorded(
    i: int, kept: Evidence, scores: Scores | None, weights: Any, advantages: Any, mask: Any, reasoning: Any
) -> str | None:
    stages = [
        ("the sampler's log-probs", _inside(kept.rollout.behaviour_logps, i, np.asarray(kept.rollout.completion)))
    ]
    if scores is not None:
        stages += _score_stages(i, scores, mask, reasoning)
    stages += [("weights", _inside(weights, i, mask)), ("advantage", None if advantages is None else advantages[i])]
    return _first(stages)


def _replayed(
    i: int, check: RowCheck, scores: Scores, weights: Any, advantages: Any, mask: Any, reasoning: Any
) -> str | None:
    metrics = {name: np.asarray(mean.total) for name, mean in check.metrics.items()}
    stages = [("log-probs", metrics.get("ratio")), ("entropies", metrics.get("entropy"))]
    stages += _score_stages(i, scores, mask, reasoning)
    stages += [("weights", _inside(weights, i, mask)), ("advantage", advantages[i])]
    stages += [("sampler correction", metrics.get("sampler_weight")), ("KL", metrics.get("kl"))]
    return _first([*stages, ("loss", check.loss.total), ("gradient", check.grad_norm)])


def _score_stages(i: int, scores: Scores, mask: Any, reasoning: Any) -> list[tuple[str, Any]]:
    return [
        ("old log-probs", _inside(scores.old_logps, i, mask)),
        ("reference log-probs", _inside(scores.ref_logps, i, mask)),
        *((name, _inside(values, i, mask)) for name, values in (scores.measured or {}).items()),
        ("importance", _inside(scores.importance, i, reasoning)),
    ]


def _groups(
    model: QwenConfig, lora: LoraConfig, params: Params, gradient: Params, checks: list[RowCheck]
) -> list[GroupFinding]:
    groups, layers = [], {weight.path[:-1]: weight.layers for weight in weight_table(model)}
    for path in _trained(model, lora, params):
        values = np.asarray(at(params, path))
        nonfinite = (~np.isfinite(values)).reshape(len(values), -1).sum(1)
        by_row = np.stack([np.asarray(at(c.nonfinite, path)) for c in checks]) if checks else np.zeros((0, 1))
        numbers = np.asarray(layers[path[:-1]], int)  # of the layers that are stacked, none elsewhere
        groups.append(
            GroupFinding(
                name=".".join(path),
                params=int(nonfinite.sum()),
                params_at=numbers[np.flatnonzero(nonfinite)].tolist() if numbers.size else [],
                rows=int(by_row.any(1).sum()),
                gradient_at=numbers[np.flatnonzero(by_row.any(0))].tolist() if numbers.size else [],
                grad_norm=float(np.linalg.norm(np.asarray(at(gradient, path), np.float64))),
            )
        )
    return groups


def _trained(model: QwenConfig, lora: LoraConfig, params: Params) -> list[tuple[str, ...]]:
    """List the paths of the trained arrays in the weight table's order, adapters in place of their matrix."""
    paths = [weight.path for weight in weight_table(model)]
    if lora.rank == 0:
        return paths
    pairs = [(*path[:-1], name) for path in paths if path[-1] == "kernel" for name in ("lora_a", "lora_b")]
    present = {tuple(key.key for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    return [path for path in pairs if path in present]


def _place(header: Header, rows: list[RowFinding], groups: list[GroupFinding], grad_norm: float, *, rate: float) -> str:
    """Describe where it begins, with a remedy."""
    damaged = [g for g in groups if g.params]
    if damaged:
        group = damaged[0]
        where = f", layers {listed_layers(group.params_at)}" if group.params_at else ""
        return (
            f"the params themselves: {group.name}{where} ({sum(g.params for g in damaged)} numbers in {len(damaged)} "
            "groups); go back to an earlier checkpoint"
        )
    bad = [row for row in rows if row.replayed]
    if bad:
        first = bad[0]
        where = ""
        if first.replayed == "gradient":
            where = f", in the backward pass first at {_last_group(groups)}"
        return f"{first.replayed} of row {first.row}{where}; {len(bad)} of {len(rows)} rows have such values in float32"
    if not np.isfinite(grad_norm):
        return "the sum of the rows' gradients, each of them finite: lower the rewards or the size of the batch"
    recorded = [row for row in rows if row.recorded]
    dtype = f"the run computed in {header.compute_dtype} on {header.platform}"
    if recorded:
        return (
            f"{recorded[0].recorded} of row {recorded[0].row} as the run kept it; in float32 on "
            f"{jax.default_backend()} everything is finite ({dtype}): set policy.compute_dtype=float32"
        )
    if any("params" in names for names in header.wrong.values()):
        finite = f"the gradient is finite (norm {short(grad_norm)})"
        return f"the optimizer's step: {finite}, but with a learning rate of {rate:g} the step is not: lower the rate"
    return (
        f"nowhere: in float32 on {jax.default_backend()} everything is finite and the gradient's norm is "
        f"{short(grad_norm)} ({dtype}); if the dtypes differ, set policy.compute_dtype=float32"
    )


def _last_group(groups: list[GroupFinding]) -> str:
    """Name the group that the backward pass reaches first: the head and last norm, then the highest layer."""
    nonfinite = [g for g in groups if g.rows]
    if not nonfinite:
        return "their norm, which is too large for float32"
    unlayered = [g for g in nonfinite if not g.gradient_at and g.name != "embed.embedding"]
    if unlayered:
        return unlayered[-1].name
    last = max(nonfinite, key=lambda g: max(g.gradient_at, default=-1))
    return f"{last.name}, layer {max(last.gradient_at)}" if last.gradient_at else last.name


def listed_layers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
