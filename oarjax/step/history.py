"""Remember the rewards of every problem over the iterations, for ``advantage.method: problem``."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from oarjax.rl.advantages import PastRewards


class RewardHistory:
    """Hold a running mean and spread of every problem's rewards. ``state`` and ``restore`` resume exactly.

    In float64 on the host. A problem's weight counts its rewards; each iteration in which it comes again multiplies
    the weight of the earlier ones by ``discount``.
    """

    def __init__(self, *, discount: float = 1.0, ddof: int = 1) -> None:
        self._discount, self._ddof = discount, ddof
        self._past: dict[int, tuple[float, float, float]] = {}  # problem -> weight, mean, sum of squared deviations

    def of(self, problems: Int[np.ndarray, "B"]) -> PastRewards:
        """Return what is known of the problems of B rows."""
        seen = np.array([int(p) in self._past for p in problems])
        weight, mean, squares = np.array([self._past.get(int(p), (0.0, 0.0, 0.0)) for p in problems]).T
        freedom = weight - self._ddof
        std = np.sqrt(np.where(freedom > 0, squares / np.where(freedom > 0, freedom, 1), 0))
        return PastRewards(seen, mean.astype(np.float32), std.astype(np.float32))  # pyright: ignore[reportArgumentType]

    def mean(self, problem: int) -> float | None:
        """Return the mean of a problem's rewards, None without any."""
        return self._past[problem][1] if problem in self._past else None

    def add(self, problems: Int[np.ndarray, "Q"], rewards: Float[np.ndarray, "B"]) -> None:
        """Add the rewards of an iteration, those of a problem's groups together; NaN counts for nothing."""
        groups = np.asarray(rewards, np.float64).reshape(len(problems), -1)
        for problem in dict.fromkeys(int(p) for p in problems):
            values = groups[np.asarray(problems) == problem].reshape(-1)
            values = values[np.isfinite(values)]
            if not values.size:
                continue
            weight, mean, squares = self._past.get(problem, (0.0, 0.0, 0.0))
            weight, squares = self._discount * weight, self._discount * squares
            total = weight + values.size
            new_mean = mean + float(np.sum(values - mean)) / total  # exactly the mean where all rewards are equal to it
            squares += weight * (new_mean - mean) ** 2 + float(np.sum((values - new_mean) ** 2))
            self._past[problem] = (total, new_mean, squares)

    def state(self) -> dict[str, Any]:
        """Return the history as JSON values, which keep every bit; equal on every process."""
        return {str(problem): list(values) for problem, values in self._past.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self._past = {int(problem): (float(w), float(m), float(s)) for problem, (w, m, s) in state.items()}
