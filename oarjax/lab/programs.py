"""Device programs of the credit lab."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from oarjax.config import CreditConfig
from oarjax.credit.bind import scorer
from oarjax.lab.interventions import Branches, answer_choice_changes, branch_prompts, choices
from oarjax.models.policy import positions_of
from oarjax.rollout.logps import token_logps
from oarjax.rollout.sampler import sample
from oarjax.training.run import Run
from oarjax.types import AnswerSpan, Params, PromptBatch, Rollout


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
    draw = partial(sample, session.rollout_layout.policy, group_size=1, stop_ids=session.stop_ids, pad_id=pad)
    temperature = roll.temperature if cfg.lab.temperature is None else cfg.lab.temperature

    @jax.jit
    def sampled(params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        return draw(
            params, prompts, key, max_new=roll.max_new, temperature=temperature, top_k=roll.top_k, top_p=roll.top_p
        )

    @jax.jit
    def choose(params: Params, r: Rollout) -> Any:
        return choices(policy, params, r.tokens, r.valid, completion_length=r.completion.shape[1])

    @partial(jax.jit, static_argnames=("length", "width", "max_new"))
    def decoded(
        params: Params, tokens: Any, valid: Any, branches: Branches, *, length: int, width: int, max_new: int
    ) -> Rollout:
        prompts = branch_prompts(tokens, valid, branches, completion_length=length, width=width)
        return draw(params, prompts, jax.random.key(0), max_new=max_new, temperature=0.0, top_k=0, top_p=1.0)

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
        sample=partial(sampled, sampling),
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
