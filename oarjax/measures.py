"""What an iteration's rollouts say about the run: plain numbers for the log. Numpy, on the host."""

from __future__ import annotations

import numpy as np

from oarjax.types import Grades, Rollout


def rollout_metrics(rollout: Rollout, grades: Grades, *, group_size: int) -> dict[str, float]:
    """Rewards, lengths and the shares that explain a loss of 0: ungraded, equal groups, truncated."""
    lengths = rollout.completion.sum(1)
    rewards = grades.rewards
    graded = rewards[np.isfinite(rewards)]
    groups = rewards.reshape(-1, group_size)
    out = {
        "reward": float(graded.mean()) if graded.size else float("nan"),
        "reward_std": float(graded.std()) if graded.size else float("nan"),
        "ungraded": 1.0 - graded.size / rewards.size,
        "groups_drawn": float(len(groups)),
        "zero_variance": float(np.mean(np.nanmax(_filled(groups), 1) == np.nanmin(_filled(groups), 1))),
        "length": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(1.0 - rollout.ended.mean()),
        "prompt_tokens": float(rollout.valid.sum() - rollout.completion.sum()),
        "completion_tokens": float(lengths.sum()),
    }
    out |= {f"reward/{name}": _nanmean(values) for name, values in grades.per_reward.items()}
    out |= {f"verdict/{name}": n / len(grades.verdicts) for name, n in grades.counts().items()}
    return out


def _filled(groups: np.ndarray) -> np.ndarray:
    """Groups without any reward count as equal."""
    return np.where(np.isnan(groups).all(1, keepdims=True), 0.0, groups)


def _nanmean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
