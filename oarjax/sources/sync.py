"""Give an engine new weights, and prove that it draws with them.

A reload that says that it worked may have kept a tensor: log-probs are a little off then, and training goes on with
wrong ones. So every sync ends with a probe: the engine's log-probs of fixed prompts' greedy tokens are compared with
those of the weights that it should have, in float32. Their bound is what the engine's dtype costs by our own forward.

The updates of training are too small to be seen in it: one step of Adam at 1e-6 moves log-probs less than bfloat16
rounds them. So at the start of a run and every few syncs a drill pushes the policy with noise in every tensor, probes,
and pushes the policy again. A tensor that the engine keeps shows there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from oarjax.errors import UserError
from oarjax.rollout.source import Batch, Request, Spent, Turn, rollout_of
from oarjax.types import Params

NOISE = 0.5
"""Noise of a drill, in root mean squares of each tensor: also of norms, whose values hardly differ."""

FROM_ZERO = 0.1
"""Standard deviation of a drill's noise in tensors of zeros."""

FLOOR = 1e-4
"""Mean difference of log-probs, in nats, that is always allowed: float32 in another order of sums."""

MARGIN = 3.0
"""Allowed mean difference, in those between our own forward in the engine's dtype and in float32."""


class StaleWeights(UserError):
    """Raised when an engine does not draw with the weights that it was given. Exit code 2: nothing was trained."""


class Weights(NamedTuple):
    """The way by which a run's weights reach an engine and are read by our own forward, on every process alike.

    ``exact`` and ``rounded`` take (params, tokens [B, N], valid [B, N]) and return the log-probs [B, T] of the last
    ``probe.max_new`` tokens in float32, and as the engine's dtype has them.
    """

    probe: Batch  # one greedy completion of every prompt
    pad_id: int
    plain: Callable[[Params], Params]  # a policy's params, adapters merged
    shake: Callable[[Params, Key[Array, ""]], Params]
    write: Callable[[Params, int], str]  # writes them for the engine, 0 and 1 in turn, and returns the place
    exact: Callable[[Params, Any, Any], Float[np.ndarray, "B T"]]
    rounded: Callable[[Params, Any, Any], Float[np.ndarray, "B T"]]


class Sync:
    """Push weights to an engine.

    Args:
        reload: makes the engine read its weights from a place.
        ask: draws requests greedily, at temperature 1 and without filters.
        drill: syncs between drills; the first one has a drill in any case.
        say: prints a message.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        reload: Callable[[str], object],
        ask: Callable[[list[Request]], list[Turn]],
        drill: int,
        say: Callable[[str], object],
    ) -> None:
        self._weights, self._reload, self._ask, self._drill, self._say = weights, reload, ask, drill, say
        self._pushes = self._syncs = 0
        self._spent = Spent()

    def push(self, params: Params) -> None:
        """Give the engine these weights, and probe it; with a drill before, if one is due.

        Raises:
            StaleWeights: it does not draw with them.
        """
        start = time.perf_counter()
        plain = self._weights.plain(params)
        if self._syncs == 0 or (self._drill and self._syncs % self._drill == 0):
            shaken = self._weights.shake(plain, jax.random.key(self._syncs))
            self._put(shaken)
            self._check(shaken, "a drill's weights", others=dict(mixtures(shaken, plain)))
            del shaken
        self._put(plain)
        gaps = self._check(plain, "the policy's weights", others={})
        self._syncs += 1
        gap_mean, gap_p99, gap_max = float(gaps.mean()), float(np.quantile(gaps, 0.99)), float(gaps.max())
        spent = Spent(syncing=time.perf_counter() - start, gap_mean=gap_mean, gap_p99=gap_p99, gap_max=gap_max)
        self._spent = self._spent.plus(spent)

    def spent(self) -> Spent:
        """Return the seconds of syncs since the last call, and what their probes found."""
        spent, self._spent = self._spent, Spent()
        return spent

    def _put(self, params: Params) -> None:
        self._reload(self._weights.write(params, self._pushes % 2))
        self._pushes += 1

    def _check(self, params: Params, what: str, others: dict[str, Callable[[], Params]]) -> Float[np.ndarray, "n"]:
        """Return the differences of the engine's log-probs from those of these params.

        Args:
            others: the same params, but each with a tensor that an engine might have kept.
        """
        batch = self._weights.probe
        requests = batch.requests
        rollout = rollout_of(batch, list(zip(requests, self._ask(requests), strict=True)), pad_id=self._weights.pad_id)
        inside = np.asarray(rollout.completion)

        def logps(params: Params, of: Callable[..., Any]) -> Float[np.ndarray, "n"]:
            return np.asarray(of(params, rollout.tokens, rollout.valid), np.float64)[inside]

        engine = np.asarray(rollout.filtered_logps, np.float64)[inside]
        exact = logps(params, self._weights.exact)
        allowed = FLOOR + MARGIN * mean_gap(logps(params, self._weights.rounded), exact)
        gap = mean_gap(engine, exact)
        stale_logps = {name: logps(make_params(), self._weights.exact) for name, make_params in others.items()}
        if not gap <= allowed:  # NaN is refused as well
            near = min(stale_logps, key=lambda name: mean_gap(engine, stale_logps[name]), default=None)
            like = "" if near is None else f"; nearest is {near} kept, off by {mean_gap(engine, stale_logps[near]):.2g}"
            raise StaleWeights(
                f"rollout.engine: after a sync to {what} the engine's log-probs are off by {gap:.2g} nats on average, "
                f"{allowed:.2g} at most by its dtype{like}; nothing was trained. Serve a folder written by oarjax "
                "export --untie, with the dtype of rollout.engine.dtype, on an engine whose reload_weights works"
            )
        hidden = [name for name, values in stale_logps.items() if mean_gap(values, exact) <= allowed]
        if hidden:
            self._say(
                f"rollout.engine: a drill does not see whether the engine keeps {', '.join(hidden)}: noise there moves "
                f"log-probs by less than the {allowed:.2g} nats that its dtype may cost"
            )
        return np.abs(engine - exact)


def mean_gap(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float:
    """Return the mean absolute difference of log-probs."""
    return float(np.abs(a - b).mean())


def shaken_params(params: Params, key: Key[Array, ""]) -> Params:
    """Add noise to every tensor, of half its root mean square."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))

    def shaken(x: Array, key: Key[Array, ""]) -> Array:
        size = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
        scale = jnp.where(size > 0, NOISE * size, FROM_ZERO)
        return (x + scale * jax.random.normal(key, x.shape, jnp.float32)).astype(x.dtype)

    return jax.tree.unflatten(tree, [shaken(x, k) for x, k in zip(leaves, keys)])


def mixtures(params: Params, others: Params) -> list[tuple[str, Callable[[], Params]]]:
    """Return for every tensor its name, and what makes the params with that tensor of the others."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    other_leaves = jax.tree.leaves(others)

    def mixture(at: int) -> Params:
        return jax.tree.unflatten(tree, [other_leaves[n] if n == at else leaf for n, (_, leaf) in enumerate(leaves)])

    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return [(name, lambda at=at: mixture(at)) for at, name in enumerate(names)]
