"""What the optimizer's state carries besides moments: an entropy coefficient that adapts, a reference that moves."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny

from oarjax.rl.carried import EntropyControl, KeptReference, carried, control_entropy, keep_reference, move_reference
from oarjax.rl.optimizer import adamw
from oarjax.step.gradients import applied_entropy_bonus
from oarjax.step.minibatches import Piece
from oarjax.types import TrainBatch

OLDER = ("old_logps", "ref_logps", "behaviour_logps")


def test_the_coefficient_follows_the_entropy_as_in_trl():
    """Target .5, step .25, at most .4, from .1. Nothing applies before the first measurement."""
    tx = control_entropy(start=0.1, target=0.5, step=0.25, highest=0.4)
    state, seen = tx.init({}), []
    for entropy in (0.9, 0.5, 0.3, 0.2, 0.6, 0.7, 0.1):
        seen.append(float(state.applied))
        _, state = tx.update({}, state, entropy=jnp.float32(entropy))
    np.testing.assert_allclose(seen, [0, 0, 0.25, 0.4, 0.4, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(state, [0.25, 0.25], rtol=1e-6)


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
    assert carried(state, EntropyControl) is None


def test_an_update_applies_the_coefficient_of_its_state_and_measures_the_next():
    """The gradient of an adaptive bonus is that of a constant one of the same size."""
    draw, mask = np.random.default_rng(4), np.arange(10) < np.array([[10], [3], [7], [1]])
    valid = np.concatenate([np.ones((4, 5), bool), mask], 1)
    arrays = {
        "tokens": draw.integers(3, tiny.VOCAB, valid.shape).astype(np.int32),
        "valid": valid,
        "completion": mask,
        "advantages": draw.normal(size=mask.shape).astype(np.float32),
    }
    batch = TrainBatch(**{n: jnp.asarray(x)[None] for n, x in arrays.items()}, **dict.fromkeys(OLDER))

    def updated(control=None, **settings):
        _, steps, state = tiny.build(tiny.config(**{f"loss__{name}": value for name, value in settings.items()}))
        if control is not None:
            state = replace(state, opt_state=(state.opt_state[0], EntropyControl(*map(jnp.float32, control))))
        moved, metrics = steps.apply(
            state, steps.updates.sums(state, batch, [Piece(None, 0, 1)]), jnp.float32(mask.sum())
        )
        return moved, metrics.get("entropy_bonus")

    constant, _ = updated(entropy_bonus=0.3)
    adaptive, shown = updated((0.3, 0.3), entropy_target=100.0, entropy_step=0.125)
    same = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # compiled apart
    jax.tree.map(same, adaptive.params, constant.params)
    assert float(shown.value) == np.float32(0.3)
    np.testing.assert_allclose(applied_entropy_bonus(adaptive), 0.425, rtol=1e-6)  # the entropy is below its target
    off, _ = updated((0.3, 0.0), entropy_target=1e-3)
    none, shown = updated()
    jax.tree.map(same, off.params, none.params)
    assert any(
        np.abs(a - b).max() > 1e-3 for a, b in zip(jax.tree.leaves(off.params), jax.tree.leaves(constant.params))
    )
    assert shown is None
    assert float(applied_entropy_bonus(off)) == 0
