"""Build the samplers of a run from its config."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from oarjax.config.learning import RolloutConfig
from oarjax.config.outputs import EvalConfig
from oarjax.models.policy import Policy
from oarjax.rollout.row_schedule import fewest_decoded
from oarjax.rollout.sampler import Decoding, group_keys, problem_keys, rollout_key
from oarjax.rollout.segments import SegmentedSampler
from oarjax.rollout.source import Batch
from oarjax.rollout.stop_strings import stop_table
from oarjax.types import PromptBatch


def batch_of_iteration(
    root: Key[Array, ""], iteration: int, prompts: PromptBatch, *, attempt: int = 0, rollout: RolloutConfig
) -> Batch:
    """Return what is drawn of prompts in an iteration; attempts above 0 are refills.

    Args:
        root: key of the run.
    """
    key = rollout_key(root, step=iteration, batch=attempt)
    return Batch(prompts, key, iteration, attempt, rollout.group_size, rollout.max_new)


def group_sampler(
    policy: Policy,
    roll: RolloutConfig,
    *,
    record_experts: bool,
    rows: Any,
    stop_ids: tuple[int, ...],
    pad_id: int,
    token_bytes: Sequence[bytes] = (),
    group: int | None = None,
    goes_on: bool = False,
    **changes: Any,
) -> SegmentedSampler:
    """Return (params, prompts, key) -> ``group`` completions per prompt, by default ``rollout.group_size``.

    One that ``goes_on`` draws further turns: a row per prompt, which has the key of the row that it names as
    ``PromptBatch.problem``. With ``record_experts`` the rollout holds the experts of every input. ``token_bytes`` are
    the bytes of every token id, for ``rollout.stop``; ``changes`` are fields of ``Decoding`` that differ from the
    config's.
    """
    size = group or roll.group_size
    decoding = Decoding(
        roll.max_new,
        roll.temperature,
        roll.top_k,
        roll.top_p,
        stop_ids,
        pad_id,
        roll.min_p,
        roll.repetition_penalty,
        stop_table(roll.stop, token_bytes),
        record_experts=record_experts,
    )
    decoding, fewest = decoding._replace(**changes), partial(fewest_decoded, roll.prompts * size, roll.max_new)
    if goes_on:  # most rows of a batch may be over, and each number of rows is a set of programs
        return _sampler(policy, roll, decoding, keys_of=row_keys, group=1, rows=rows, fewest=fewest(share=0.25))
    keys = partial(group_keys, group_size=size)
    return _sampler(policy, roll, decoding, keys_of=keys, group=size, rows=rows, fewest=fewest())


def row_keys(prompts: PromptBatch, key: Key[Array, ""]) -> Key[Array, "B"]:
    """Return ``fold_in(key, b)`` for the rows b that stand in the place of problems."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, prompts.problem)


def evaluation_sampler(
    policy: Policy,
    roll: RolloutConfig,
    evaluation: EvalConfig,
    *,
    rows: Any,
    stop_ids: tuple[int, ...],
    pad_id: int,
    token_bytes: Sequence[bytes] = (),
    goes_on: bool = False,
) -> SegmentedSampler:
    """Return (params, prompts, key) -> ``eval.samples`` completions per prompt, with noise by problem and sample.

    One that ``goes_on`` draws further turns: a row per prompt, named as problem * ``eval.samples`` + sample.
    """
    decoding = Decoding(
        roll.max_new,
        evaluation.temperature,
        evaluation.top_k,
        evaluation.top_p,
        stop_ids,
        pad_id,
        evaluation.min_p,
        evaluation.repetition_penalty,
        stop_table(roll.stop, token_bytes),
    )

    def keys(prompts: PromptBatch, key: Key[Array, ""]) -> Key[Array, "B"]:
        return problem_keys(key, prompts.problem, samples=evaluation.samples)

    def keys_on(prompts: PromptBatch, key: Key[Array, ""]) -> Key[Array, "B"]:
        problems, samples = jnp.divmod(prompts.problem, evaluation.samples)
        rows = jax.vmap(jax.random.fold_in, (None, 0))(key, problems)
        return jax.vmap(jax.random.fold_in)(rows, samples)

    group, keys_of = (1, keys_on) if goes_on else (evaluation.samples, keys)
    fewest = fewest_evaluated(evaluation, roll)
    return _sampler(policy, roll, decoding, keys_of=keys_of, group=group, rows=rows, fewest=fewest)


def fewest_evaluated(evaluation: EvalConfig, roll: RolloutConfig) -> int:
    """Return the rows below which an evaluation drops none: a quarter, since fewer are seldom faster.

    Evaluations are rare, and each number of rows is a set of programs.
    """
    return fewest_decoded(evaluation.batch * evaluation.samples, roll.max_new, share=0.25)


def _sampler(policy: Policy, roll: RolloutConfig, decoding: Decoding, **options: Any) -> SegmentedSampler:
    return SegmentedSampler(
        policy, decoding, segment=roll.segment, cache_bucket=roll.cache_bucket, slots=roll.slots, **options
    )
