"""What the optimizer's state carries besides moments: a reference that moves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from oarjax.rl.carried import KeptReference, carried, keep_reference, move_reference
from oarjax.rl.optimizer import adamw


def test_a_reference_stays_until_it_is_moved():
    tx = optax.chain(adamw(lambda _: 0.1, b1=0.9, b2=0.9, weight_decay=0.0, clip_norm=1.0), keep_reference())
    start = params = {"kernel": jnp.arange(3.0)}
    state = tx.init(params)
    for moves in (False, True, False):
        updates, state = tx.update({"kernel": jnp.ones(3)}, state, params)
        before = params = optax.apply_updates(params, updates)
        if moves:
            state, start = move_reference(state, params), before
        np.testing.assert_array_equal(carried(state, KeptReference).params["kernel"], start["kernel"])
        assert not np.array_equal(start["kernel"], jnp.arange(3.0)) or not moves
