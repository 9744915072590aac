"""Compare signed values with what they stand for: v(a), teacher-forced, with Q(a), the reward of forced branches.

At the places that ``credit.signed_values`` chooses, every listed token stands in turn. v(a) is the probability of the
reference answer with the rest of the row as it was drawn; Q(a) the mean reward of ``lab.continuations`` continuations
that are sampled from there on. The loss uses v(a) - b, and would be the exact gradient with Q(a) - V; b and V are their
means under the policy over the listed tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from oarjax.config.changes import changed
from oarjax.credit.oar.oar_g import row_keys
from oarjax.data.tokenizer import encode
from oarjax.run.run import Run
from oarjax.stats import Interval, jackknife_interval
from oarjax.step.minibatches import bucket, take
from oarjax.step.spans import with_endings
from oarjax.tools.lab.completions import Completions
from oarjax.tools.lab.oracles import Branch, Decode, RewardsOf, decode_branches
from oarjax.tools.lab.programs import LabPrograms


class ListedTokens(NamedTuple):
    """Tokens that are valued at k places of R rows."""

    at: Int[np.ndarray, "R k"]  # completion positions
    ids: Int[np.ndarray, "R k C"]
    v: Float[np.ndarray, "R k C"]
    pi: Float[np.ndarray, "R k C"]  # probabilities under the policy
    listed: Bool[np.ndarray, "R k C"]


def value_figures(
    v: Float[np.ndarray, "R k C"],
    q: Float[np.ndarray, "R k C"],
    pi: Float[np.ndarray, "R k C"],
    listed: Bool[np.ndarray, "R k C"],
    drawn: Bool[np.ndarray, "R k C"],
    *,
    continuations: int,
) -> dict[str, float]:
    """Compare values with the means of so many rewards each; NaN where nothing varies.

    correlation  of v(a) - b and Q(a) - V over all listed tokens
    ceiling      the largest correlation that the noise of Q leaves: sqrt(1 - its share of the variance of Q(a) - V)
    sign         share of the tokens with |Q(a) - V| >= 1 / sqrt(continuations), at least two standard errors of a mean
                 of rewards 0 and 1, whose v(a) - b has the same sign
    bias_drawn   mean of v(a) - Q(a) over the tokens that were drawn
    bias_others  the same over the other listed tokens
    """

    def centred(x: Float[np.ndarray, "R k C"]) -> Float[np.ndarray, "n"]:
        mean = np.sum(x * mass, axis=-1, keepdims=True) / np.maximum(mass.sum(-1, keepdims=True), 1e-30)
        return (x - mean)[listed]

    mass = np.where(listed, pi, 0)
    v, q = np.where(listed, v, 0), np.where(listed, q, 0)
    dv, dq = centred(v), centred(q)
    spread = dv.std() * dq.std() if len(dv) else 0.0
    noise = np.mean((q * (1 - q))[listed]) / max(continuations - 1, 1) if len(dv) else np.nan
    clear = np.abs(dq) >= 1 / sqrt(continuations)
    of_drawn, of_others = (v - q)[listed & drawn], (v - q)[listed & ~drawn]
    return {
        "correlation": float(np.mean((dv - dv.mean()) * (dq - dq.mean())) / spread) if spread else np.nan,
        "ceiling": sqrt(max(0.0, 1 - noise / dq.var())) if spread and continuations > 1 else np.nan,
        "sign": float(np.mean(np.sign(dv[clear]) == np.sign(dq[clear]))) if clear.any() else np.nan,
        "bias_drawn": float(of_drawn.mean()) if len(of_drawn) else np.nan,
        "bias_others": float(of_others.mean()) if len(of_others) else np.nan,
    }


def compare_values(
    run: Run, programs: LabPrograms, rewards_of: RewardsOf, completions: Completions
) -> dict[str, Interval]:
    """Value the tokens that ``credit.signed_values`` lists, decode and grade their branches, and compare the two.

    Rows without a reference are left out.
    """
    cfg, length = run.cfg, completions.rollout.completion.shape[1]
    credit = changed(cfg.credit, {"method": "signed_values", "answer": {"source": "reference"}})
    rows = np.flatnonzero(completions.referenced)
    targets = [encode(run.tokenizer, completions.problems[r].reference) for r in rows]
    args = {"room": bucket(max(map(len, targets)) + 1, 8), "token_bytes": run.table, "stop_id": run.stop_ids[0]}
    pair = take(completions.rollout, rows), take(completions.span, rows)
    probed = with_endings(credit, *pair, [([], target) for target in targets], **args)  # all wrote a cue of their own
    program, key = programs.value(credit), jax.random.key(cfg.seed)
    keys = map(partial(jax.random.fold_in, key), itertools.count(1))

    def value(part: Any, numbers: Any) -> Any:
        rollout, span = run.place(part, "rows")
        return program(programs.params, rollout, span, row_keys(key, jnp.asarray(numbers)))

    def decode(*args: Any, **sizes: Any) -> Any:
        return run.fetch(programs.resample(*args, **sizes, length=length, key=next(keys)))

    return measure_values(
        list_tokens(value, probed, rows=len(rows), batch=cfg.lab.batch),
        completions,
        decode=decode,
        rewards_of=rewards_of,
        continuations=cfg.lab.continuations,
        branches=cfg.lab.branches,
        limit=max(cfg.rollout.max_new, length),
        stop_ids=run.stop_ids,
    )


def measure_values(
    tokens: ListedTokens,
    completions: Completions,
    *,
    decode: Decode,
    rewards_of: RewardsOf,
    continuations: int,
    branches: int,
    limit: int,
    stop_ids: Sequence[int],
) -> dict[str, Interval]:
    """Decode and grade branches from the tokens listed in all rows with a reference, and compare.

    Intervals are delete-one jackknives over the prompts.

    Args:
        decode: samples what follows, with other noise at every call.
        continuations: of every listed token.
        branches: decoded at once.
        limit: tokens of a completion at most.
    """
    rows = np.flatnonzero(completions.referenced)
    places = [(r, *index) for r, index in itertools.product(range(len(rows)), np.ndindex(tokens.ids.shape[1:]))]
    places = [index for index in places if tokens.listed[index]]
    at = [int(tokens.at[r, k]) for r, k, _ in places]
    one = [Branch(int(rows[index[0]]), t + 1, t, int(tokens.ids[index]), limit - t - 1) for index, t in zip(places, at)]
    forced = [branch for branch in one for _ in range(continuations)]
    ends = decode_branches(decode, completions.rollout, forced, rows=branches, stop_ids=stop_ids)
    rewards = rewards_of([branch.row for branch in forced], ends)
    q = np.full(tokens.ids.shape, np.nan)
    for index, values in zip(places, rewards.reshape(-1, continuations)):
        q[index] = values.mean()
    _, problem = np.unique([completions.problems[r].prompt for r in rows], return_inverse=True)
    token_ids = np.asarray(completions.rollout.tokens)[rows][:, -completions.rollout.completion.shape[1] :]
    is_drawn = tokens.ids == np.take_along_axis(token_ids, tokens.at, axis=1)[..., None]
    arrays = tokens.v, q, tokens.pi, tokens.listed & np.isfinite(q), is_drawn
    return _with_intervals(arrays, problem, continuations=continuations)


def list_tokens(value: Callable[[Any, Any], Any], probed: tuple[Any, ...], *, rows: int, batch: int) -> ListedTokens:
    """Choose places and list tokens with their values, as the credit method does, ``batch`` rows at a time.

    Args:
        value: (rows of ``probed``, their numbers) -> the arrays of ``at_places``.
        probed: rollout and span with the reference answer.
    """
    parts = []
    for start in range(0, rows, batch):
        indices = np.minimum(np.arange(start, start + batch), rows - 1)  # the last batch is filled up
        parts.append(jax.device_get(value(take(probed, indices), indices)))
    return ListedTokens(*(np.concatenate(x)[:rows] for x in zip(*parts)))


def _with_intervals(
    arrays: tuple[np.ndarray, ...], problem: Int[np.ndarray, "R"], *, continuations: int
) -> dict[str, Interval]:
    """Compute the figures with jackknife intervals over problems."""

    def figures(kept: Bool[np.ndarray, "R"]) -> dict[str, float]:
        return value_figures(*(x[kept] for x in arrays), continuations=continuations)

    estimates = figures(np.ones(len(problem), bool))
    left_out = [figures(problem != p) for p in range(problem.max() + 1)]
    return {name: jackknife_interval(x, np.array([row[name] for row in left_out])) for name, x in estimates.items()}
