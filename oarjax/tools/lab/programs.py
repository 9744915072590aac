"""Device programs of the credit lab."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from oarjax.credit.measures import measure
from oarjax.credit.methods.signed_values import at_places
from oarjax.credit.settings import CreditSettings
from oarjax.models.policy import positions_of
from oarjax.models.sharding import check_rows
from oarjax.run.run import Run
from oarjax.step.sampling import group_sampler
from oarjax.tools.lab.interventions import Branches, answer_choice_changes, branch_prompts, choices
from oarjax.tools.lab.oracles import AnswerChanges
from oarjax.types import AnswerSpan, Hints, Params, PromptBatch, Rollout

RowProgram = Callable[[Params, Rollout, Any, Any], Any]
"""(params, rollout of b rows, their spans or hints, row keys) -> arrays [b, T]."""


@runtime_checkable
class DecodeBranches(Protocol):
    """Continue branches greedily, as ``oarjax.tools.lab.oracles.Decode``; completions have ``length`` tokens."""

    def __call__(
        self, tokens: Any, valid: Any, branches: Branches, *, length: int, width: int, max_new: int, key: Any = None
    ) -> Rollout: ...


class LabPrograms(NamedTuple):
    """Programs of the lab. Those that take params first are timed, and their FLOPs are counted."""

    params: Params
    sample: Callable[[PromptBatch, Any], Rollout]  # with a key
    choose: Callable[[Rollout], Any]  # Choices
    decode: DecodeBranches
    changes: AnswerChanges
    forward: RowProgram  # final states: the unit of cost
    measure: Callable[[frozenset[str]], RowProgram]  # signals by name
    attribute: Callable[[CreditSettings], RowProgram]  # scores
    value: Callable[[CreditSettings], RowProgram]  # of signed values: places, ids, v, pi and which exist
    resample: DecodeBranches  # sampled as in training, with a key


def make_programs(run: Run, params: Params) -> LabPrograms:
    """Bind the programs to a policy; nothing is compiled yet."""
    cfg, policy = run.cfg, run.policy
    roll, masking, pad = cfg.rollout, cfg.credit.masking, run.pad_id
    sampling = jax.jit(run.rollout_layout.prepare, out_shardings=run.rollout_layout.params)(params)
    temperature = roll.temperature if cfg.lab.temperature is None else cfg.lab.temperature
    check_rows(run.cfg.lab.batch, dict(run.mesh.shape), what="lab.batch")
    rows = run.rollout_layout.rows
    everywhere = NamedSharding(rows.mesh, PartitionSpec())  # there may be fewer branches than devices
    options = {"record_experts": cfg.policy.router == "replay", "stop_ids": run.stop_ids, "pad_id": pad, "group": 1}
    draw = partial(group_sampler, run.rollout_layout.policy, roll, **options)
    greedy = cache(partial(draw, rows=everywhere, temperature=0.0, top_k=0, top_p=1.0))
    random = cache(partial(draw, rows=everywhere, temperature=roll.temperature))

    @jax.jit
    def choose(params: Params, r: Rollout) -> Any:
        return choices(policy, params, r.tokens, r.valid, completion_length=r.completion.shape[1])

    lay_out = jax.jit(branch_prompts, static_argnames=("completion_length", "width"))

    def decode(
        sampler: Callable[..., Any],
        params: Params,
        tokens: Any,
        valid: Any,
        branches: Branches,
        *,
        length: int,
        width: int,
        max_new: int,
        key: Any = None,
    ) -> Rollout:
        prompts = lay_out(tokens, valid, branches, completion_length=length, width=width)
        return sampler(max_new=max_new)(params, prompts, jax.random.key(0) if key is None else key)

    @jax.jit
    def changes(params: Params, r: Rollout, reasoning: Any, answer: Any, other: Any) -> Any:
        return answer_choice_changes(
            policy, params, r.tokens, r.valid, reasoning, answer, other, chunk=masking.chunk, buckets=masking.buckets
        )

    def forward(params: Params, r: Rollout, span: AnswerSpan, keys: Any) -> Any:
        return policy.trunk(params, policy.embed(params, r.tokens), positions_of(r.valid), r.valid)[0]

    def measured(names: frozenset[str]) -> RowProgram:
        def signals(params: Params, r: Rollout, hints: Hints, keys: Any) -> Any:
            return measure(
                policy,
                params,
                r.tokens,
                r.valid,
                signals=names,
                completion_length=r.completion.shape[1],
                temperature=roll.temperature,
                head_chunk=cfg.policy.head_chunk,
                reference=params,  # the policy that a run starts from
                teacher=hints.teacher,
            )

        return signals

    def attribute(credit: CreditSettings) -> RowProgram:
        score = with_method(run, credit).credit.scorer(policy, temperature=roll.temperature, pad_id=pad)
        return lambda params, r, span, keys: score(params, r, span, keys, credit.probe.mode).importance

    def value(credit: CreditSettings) -> RowProgram:
        score = with_method(run, credit).credit.scorer(policy, temperature=roll.temperature, pad_id=pad)

        @jax.jit
        def valued(params: Params, r: Rollout, span: AnswerSpan, keys: Any) -> Any:
            scored = score(params, r, span, keys, credit.probe.mode)
            return at_places(policy, params, scored, places=credit.signed_values.places, temperature=roll.temperature)

        return valued

    return LabPrograms(
        params=params,
        sample=partial(draw(rows=rows, temperature=temperature), sampling),
        choose=partial(choose, params),
        decode=partial(decode, greedy, sampling),
        changes=partial(changes, params),
        forward=forward,
        measure=measured,
        attribute=attribute,
        value=value,
        resample=partial(decode, random, sampling),
    )


def with_method(run: Run, credit: CreditSettings) -> Run:
    """Return the run with this credit method, and the method's reasoning units, keywords and probe."""
    return run.with_config(run.cfg.model_copy(update={"credit": credit}))
