"""The divergence from the start: a mean over all rows, by hand, whatever the microbatch; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import VOCAB, build, config, host, model

from oarjax.errors import ConfigError
from oarjax.models.weights import init_params
from oarjax.rollout.logps import token_logps
from oarjax.training.held_out import measure_drift
from oarjax.types import Rollout


def test_the_mean_over_rows_of_summed_k3_by_hand():
    policy, steps, state = build(config(rollout__temperature=0.7))
    start = init_params(model(), jax.random.key(8), dtype=jnp.float32)
    tokens = jax.random.randint(jax.random.key(2), (5, 9), 3, VOCAB)  # prompts of 3, some padded; completions of 6
    valid = (jnp.arange(9) < jnp.array([9, 7, 4, 9, 8])[:, None]) & (jnp.arange(9) >= jnp.arange(5)[:, None] % 2)
    settings = {"completion_length": 6, "temperature": 0.7, "head_chunk": 8}
    theirs, ours = (np.asarray(token_logps(policy, p, tokens, valid, **settings)[0]) for p in (start, state.params))
    wrote = np.asarray(valid[:, -6:])
    behaviour = np.where(wrote, ours, 0)
    rollout = Rollout(np.asarray(tokens), np.asarray(valid), wrote, behaviour, behaviour, np.ones(5, bool))
    gap = theirs - ours
    expected = sum((np.exp(gap) - 1 - gap)[b][wrote[b]].sum() for b in range(5)) / 5
    for microbatch in (2, 5, 8):  # the last is filled up
        found = measure_drift(rollout, start, steps.drift, host(), width=4, microbatch=microbatch)
        assert found == {"kl_start": pytest.approx(expected, rel=1e-4)}
    assert abs(expected) > 0.01


def test_a_divergence_without_evaluations_is_refused():
    with pytest.raises(ConfigError, match=r"eval\.kl: on is measured with evaluations, and there is no data\.eval"):
        config(eval__kl="on")
