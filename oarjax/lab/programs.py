"""Device programs of the credit lab."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from oarjax.config import CreditConfig
from oarjax.credit.bind import scorer
from oarjax.lab.interventions import Branches, answer_choice_changes, branch_prompts, choices
from oarjax.models.policy import positions_of
from oarjax.rollout.logps import token_logps
from oarjax.training.run import Run
from oarjax.training.sampling import group_sampler
from oarjax.types import AnswerSpan, Params, Rollout


class Programs(NamedTuple):
    """Programs of the lab. Those that take params first are timed, and their FLOPs counted."""

    params: Params
    sample: Callable[..., Rollout]  # (prompts, key)
    choose: Callable[..., Any]  # (rollout) -> Choices
    decode: Callable[..., Rollout]  # see oarjax.lab.oracles.Decode
    changes: Callable[..., Any]  # see AnswerChanges there
    forward: Callable[..., Any]  # (params, rollout, span, row keys) -> states: the unit of cost
    entropies: Callable[..., Any]  # (params, rollout, span, row keys) -> [b, T]
    attribute: Callable[[CreditConfig], Callable[..., Any]]  # -> (params, rollout, span, row keys) -> [b, T]


def make_programs(session: Run, params: Params) -> Programs:
    """Bind the programs to a policy; nothing is compiled yet."""
    cfg, policy = session.cfg, session.policy
    roll, masking, pad = cfg.rollout, cfg.credit.masking, session.pad_id
    sampling = jax.jit(session.rollout_layout.prepare, out_shardings=session.rollout_layout.params)(params)
    temperature = roll.temperature if cfg.lab.temperature is None else cfg.lab.temperature
    rows = session.rollout_layout.rows
    everywhere = NamedSharding(rows.mesh, PartitionSpec())  # of branches there may be fewer than devices
    draw = partial(group_sampler, session.rollout_layout.policy, cfg, stop_ids=session.stop_ids, pad_id=pad, group=1)
    greedy = cache(partial(draw, rows=everywhere, temperature=0.0, top_k=0, top_p=1.0))

    @jax.jit
    def choose(params: Params, r: Rollout) -> Any:
        return choices(policy, params, r.tokens, r.valid, completion_length=r.completion.shape[1])

    begun = jax.jit(branch_prompts, static_argnames=("completion_length", "width"))

    def decoded(
        params: Params, tokens: Any, valid: Any, branches: Branches, *, length: int, width: int, max_new: int
    ) -> Rollout:
        prompts = begun(tokens, valid, branches, completion_length=length, width=width)
        return greedy(max_new=max_new)(params, prompts, jax.random.key(0))

    @jax.jit
    def changes(params: Params, r: Rollout, reasoning: Any, answer: Any, other: Any) -> Any:
        return answer_choice_changes(
            policy, params, r.tokens, r.valid, reasoning, answer, other, chunk=masking.chunk, buckets=masking.buckets
        )

    def forward(params: Params, r: Rollout, span: AnswerSpan, keys: Any) -> Any:
        return policy.trunk(params, policy.embed(params, r.tokens), positions_of(r.valid), r.valid)[0]

    def entropies(params: Params, r: Rollout, span: AnswerSpan, keys: Any) -> Any:
        return token_logps(
            policy,
            params,
            r.tokens,
            r.valid,
            completion_length=r.completion.shape[1],
            temperature=roll.temperature,
            head_chunk=cfg.policy.head_chunk,
        )[1]

    def attribute(credit: CreditConfig) -> Callable[..., Any]:
        own = as_method(session, credit)
        custom = {"custom_probe": own.custom_probe, "custom_method": own.custom_method}
        score = scorer(credit, policy, temperature=roll.temperature, pad_id=pad, **custom)
        return lambda params, r, span, keys: score(params, r, span, keys, credit.probe.mode).importance

    return Programs(
        params=params,
        sample=partial(draw(rows=rows, temperature=temperature), sampling),
        choose=partial(choose, params),
        decode=partial(decoded, sampling),
        changes=partial(changes, params),
        forward=forward,
        entropies=entropies,
        attribute=attribute,
    )


def as_method(session: Run, credit: CreditConfig) -> Run:
    """The session of a run with this method: its own units of the reasoning, keywords and probe."""
    return session.with_config(session.cfg.model_copy(update={"credit": credit}))
