"""Causal oracles that credit is measured against: change one token and see if the answer or the reward changes.

A token is changed to the policy's next choice, its most likely token other than the current one: the policy could have
written the changed text too.

direct  the rest of the reasoning is kept, and the answer is decoded again: does it change?
total   everything after the token is decoded again: does the reward change? Compared with the same continuation of the
        unchanged token, also decoded greedily: for a greedy completion that is the completion itself.

Both decode greedily, so that the token causes a change and not sampling. The functions here run on the device; the
loops over completions, the texts and the grades are in oarjax/tools/lab/oracles.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.clean_pass import stored_pass
from oarjax.credit.counterfactual import first_of_unit, next_choices
from oarjax.credit.oar.oar_p import over_counterfactuals, places
from oarjax.models.policy import Policy
from oarjax.types import Params, PromptBatch


class Choices(NamedTuple):
    """Greedy choices at each completion token, from the tokens before it."""

    first: Int[Array, "B T"]  # the most likely token
    other: Int[Array, "B T"]  # the most likely one, excluding the completion's token


class Branches(NamedTuple):
    """K texts to continue: a row up to a position, with one of its tokens changed."""

    row: Int[Array, "K"]
    until: Int[Array, "K"]  # completion tokens that are kept
    at: Int[Array, "K"]  # position of the changed token, < until; -1: none
    token: Int[Array, "K"]  # its replacement


def choices(
    policy: Policy, params: Params, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], *, completion_length: int
) -> Choices:
    """Compute the policy's most likely token, with and without the completion's own, at T completion tokens."""
    hidden = stored_pass(policy, params, tokens, valid, completion_length=completion_length).hidden
    completion = tokens[:, -completion_length:]
    none = jnp.full_like(completion, -1)  # exclude no token
    return Choices(next_choices(policy, params, hidden, none), next_choices(policy, params, hidden, completion))


def branch_prompts(
    tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], branches: Branches, *, completion_length: int, width: int
) -> PromptBatch:
    """Lay the texts of ``branches`` out as left-padded prompts of ``width`` positions.

    ``width`` must hold the longest text, prompt included; longer texts are cut from the left. The completion tokens
    before ``until`` must all be valid.

    Raises:
        ValueError: width outside 1..N.
    """
    length = tokens.shape[1]
    if not 1 <= width <= length:
        raise ValueError(f"branch_prompts: expected a width in 1..{length}, the rollout's, got {width}")
    begin = length - completion_length
    source = jnp.arange(length - width, length) - (completion_length - branches.until)[:, None]
    rows, at = branches.row[:, None], jnp.maximum(source, 0)
    is_changed = (source == begin + branches.at[:, None]) & (branches.at[:, None] >= 0)
    ids = jnp.where(is_changed, branches.token[:, None], tokens[rows, at])
    return PromptBatch(
        tokens=ids.astype(jnp.int32),
        valid=valid[rows, at] & (source >= 0),
        problem=branches.row.astype(jnp.int32),
    )


def answer_choice_changes(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    reasoning: Bool[Array, "B T"],
    answer: Bool[Array, "B T"],
    other: Int[Array, "B T"],
    *,
    chunk: int,
    buckets: int,
) -> Bool[Array, "B T"]:
    """Mark reasoning tokens whose change to ``other`` changes a greedy choice at some ``answer`` token, the rest kept.

    ``answer`` must cover all that the clean policy decodes greedily after the reasoning. Then False means that the
    changed text decodes to the same tokens; True means that it departs somewhere, perhaps with the same answer. One
    pass over the suffixes replaces a decoding per token; ``chunk`` and ``buckets`` are those of exact OAR-P.
    """
    params = policy.head(jax.lax.stop_gradient(params))
    options = places(answer.shape[1], chunk=chunk, buckets=buckets)
    clean = stored_pass(policy, params, tokens, valid, **options)
    completion = tokens[:, -answer.shape[1] :]

    def departs(states: Float[Array, "BK L D"], length: int, copies: int) -> Float[Array, "BK"]:
        mask, clean_tokens = (jnp.repeat(x[:, -length:], copies, axis=0) for x in (answer, completion))
        rows, count = jnp.arange(mask.shape[0]), mask.sum(axis=1)
        order = jnp.argsort(~mask, axis=1, stable=True)  # answer positions first

        def look(a: Int[Array, ""], so_far: Bool[Array, "BK"]) -> Bool[Array, "BK"]:
            at = order[:, a]
            choice = jnp.argmax(policy.unembed(params, states[rows, at]), axis=-1)
            return so_far | ((a < count) & (choice != clean_tokens[rows, at]))

        departed = jax.lax.fori_loop(0, count.max(), look, jnp.zeros(mask.shape[0], bool))
        return departed.astype(states.dtype)

    usable = reasoning & answer.any(axis=1, keepdims=True)
    first = first_of_unit(usable, None)
    replacement = policy.embed(params, other)
    changes = over_counterfactuals(policy, params, clean, first, replacement, departs, chunk=chunk, buckets=buckets)
    return changes > 0.5
