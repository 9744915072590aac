"""Metrics of an iteration's rollouts, and checks for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from oarjax.credit.record import MEASURES
from oarjax.types import AnswerSpan, Grades, Mean, Params, Rollout

NONFINITE = "nonfinite/"
"""What the metrics of NaN and infinite values begin with. 0 in a healthy run, in the order of cause and effect:

behaviour_logps, old_logps, ref_logps   share of rows whose sampler's, old or reference log-probs are not finite
entropies, importance and others        share of rows with such a signal; their tokens keep weights of 1
weights                                 share of rows to which the method gave such a credit; they get GRPO's
advantages                              share of rows of such a group advantage (rewards too large to add up)
loss, gradient                          share of the iteration's updates with such a loss or gradient norm
params                                  share of updates that would have left such parameters

Updates with a loss, gradient or params that are not finite are skipped; ``skipped`` is their share.
"""

QUANTITIES = ("behaviour_logps", "old_logps", "ref_logps", *MEASURES, "importance", "weights", "advantages")
QUANTITIES += ("loss", "gradient", "params")


def rollout_metrics(rollout: Rollout, grades: Grades, *, equal: Bool[np.ndarray, "P"]) -> dict[str, float]:
    """Measure rewards, lengths, and shares that explain a loss of 0: ungraded, ``equal`` groups, truncated. Numpy."""
    lengths = rollout.completion.sum(1)
    rewards = grades.rewards
    graded = rewards[np.isfinite(rewards)]
    out = {
        "reward": float(graded.mean()) if graded.size else float("nan"),
        "reward_std": float(graded.std()) if graded.size else float("nan"),
        "ungraded": 1.0 - graded.size / rewards.size,
        "groups_drawn": float(len(equal)),
        "zero_variance": float(np.mean(equal)),
        "length": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(1.0 - rollout.ended.mean()),
        "prompt_tokens": float(rollout.valid.sum() - rollout.extent.sum()),
        "completion_tokens": float(lengths.sum()),
        f"{NONFINITE}behaviour_logps": float(unsound_rows(rollout).mean()),
    }
    out |= episode_metrics(rollout)
    out |= {f"reward/{name}": _nanmean(values) for name, values in grades.per_reward.items()}
    out |= {f"verdict/{name}": n / len(grades.verdicts) for name, n in grades.counts().items()}
    return out


def span_metrics(span: AnswerSpan) -> dict[str, float]:
    """Measure the reasoning: its mean length, and its mean number of units that a counterfactual changes whole."""
    reasoning, units = np.asarray(span.reasoning), span.units
    out = {"reasoning_length": float(reasoning.sum(1).mean())}
    if units is not None:
        out["reasoning_units"] = float(np.mean([len(np.unique(u[r])) for u, r in zip(np.asarray(units), reasoning)]))
    return out


def episode_metrics(rollout: Rollout) -> dict[str, float]:
    """Measure the turns of episodes, what environments said in them, and the share in which one failed."""
    origin = rollout.origin
    if origin is None or origin.failed is None:
        return {}
    extent = np.asarray(rollout.extent)
    return {
        "turns": float(1 + np.where(extent, origin.turns, 0).max(1).mean()),
        "observed_tokens": float((extent & ~np.asarray(rollout.completion)).sum(1).mean()),
        "prefilled_again": prefilled_again(rollout),
        "episodes_failed": float(np.mean([bool(reason) for reason in origin.failed])),
    }


def prefilled_again(rollout: Rollout) -> float:
    """Return the tokens of an episode that its turns after the first compute again, on average: all before them."""
    origin, completion = rollout.origin, np.asarray(rollout.completion)
    if origin is None:
        return 0.0
    start = completion & (np.asarray(origin.turns) > 0)  # the policy's tokens of later turns
    start[:, 1:] &= ~completion[:, :-1] | (np.diff(np.asarray(origin.turns)) > 0)  # the first of each
    prefix = (np.asarray(rollout.valid).sum(1) - np.asarray(rollout.extent).sum(1))[:, None] + np.arange(start.shape[1])
    return float((prefix * start).sum(1).mean())


def lag_of(rollout: Rollout, iteration: int) -> float:
    """Return by how many iterations the policy that drew the tokens is older than the one that learns from them."""
    completion, origin = np.asarray(rollout.completion), rollout.origin
    if origin is None or not completion.any():
        return float("nan")
    return float(iteration - 1 - np.asarray(origin.versions)[completion].mean())


def unsound_rows(rollout: Rollout) -> np.ndarray:
    """Mark rows [B] with a sampler's log-prob that is not finite: their tokens were drawn from no distribution."""
    nonfinite = ~np.isfinite(np.asarray(rollout.behaviour_logps)) & np.asarray(rollout.completion)
    return np.asarray(nonfinite.any(-1))


def nonfinite_rows(
    values: Mapping[str, Float[Array, "B ..."] | None], mask: Mapping[str, Bool[Array, "B ..."]], rows: Bool[Array, "B"]
) -> dict[str, Mean]:
    """Return, by the value's name, the share of rows with a value that is not finite inside its mask."""
    count = jnp.sum(rows).astype(jnp.float32)

    def share(x: Float[Array, "B *S"], tokens: Bool[Array, "B *T"]) -> Mean:
        elements = tokens.reshape(*tokens.shape, *(1,) * (x.ndim - tokens.ndim))  # of the states at a token
        nonfinite = (~jnp.isfinite(x) & elements).reshape(len(rows), -1).any(-1)
        return Mean(jnp.sum(nonfinite & rows).astype(jnp.float32), count)

    return {f"{NONFINITE}{name}": share(x, mask[name]) for name, x in values.items() if x is not None}


def negative_rows(weights: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Mean:
    """Return the share of rows with a weight below 0 inside the mask, which turns the sign of the advantage."""
    rows = mask.any(-1)
    return Mean(jnp.sum(((weights < 0) & mask).any(-1)).astype(jnp.float32), jnp.sum(rows).astype(jnp.float32))


def all_finite(tree: Params) -> Bool[Array, ""]:
    """Return True if no number of a tree is NaN or infinite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def _nanmean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
