"""A warm start by length: microbatches padded to their own buckets give what one padded form gives.

Scores and updates of an iteration by length: tests/step/test_shared_prompts.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from oarjax.data.streams import SFTBatch
from oarjax.models.qwen import make_policy
from oarjax.step.programs import make_sft_steps
from oarjax.step.state import new_state
from oarjax.training.warm_start import by_length, train_batch


@pytest.mark.usefixtures("x64")
def test_a_warm_start_by_length_takes_the_steps_of_the_padded_form():
    """Three steps on pairs of 1 to 10 tokens, one of them with tokens that an environment wrote."""
    policy = make_policy(tiny.model(), compute_dtype=jnp.float64, remat="none")
    rng, lengths = np.random.default_rng(0), np.array([1, 10, 4, 2, 9, 3])
    valid = np.concatenate([np.arange(6) >= rng.integers(0, 5, (6, 1)), np.arange(10) < lengths[:, None]], 1)
    completion = valid[:, 6:].copy()
    completion[1, 2:4] = False
    batch = SFTBatch(rng.integers(3, tiny.VOCAB, (6, 16)).astype(np.int32), valid, completion)
    tx, ends = optax.adam(1e-2), {}
    steps = make_sft_steps(policy, tx, tiny.one_device(), head_chunk=8)
    for name, (microbatch, bucket) in {"whole": (6, 10), "by length": (2, 2)}.items():
        plan = by_length(batch, microbatch, bucket)
        params = tiny.params(jnp.float64)
        state = new_state(params, tx, tiny.one_device(), seed=0, lora=tiny.config().lora)
        for _ in range(3):
            state, metrics = steps.update(state, plan.split(train_batch(batch))[0], plan.pieces[0], None)
        ends[name] = jax.device_get((state.params, metrics["loss"].value))
    assert [piece.bucket and piece.bucket.completion for piece in plan.pieces[0]] == [2, 4, 10]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-11), ends["by length"], ends["whole"])
