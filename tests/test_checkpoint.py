import jax
import jax.numpy as jnp
import numpy as np
import optax

from oarjax.host.checkpoint import Checkpoints
from oarjax.types import TrainState


def state(value: float) -> TrainState:
    params = {"layers": {"kernel": jnp.full((2, 3), value), "half": jnp.full(4, value, jnp.bfloat16)}}
    return TrainState(jnp.int32(7), params, optax.adamw(1e-3).init(params), jax.random.key(5))


def test_the_newest_state_comes_back_bit_for_bit(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.newest() is None
        for iteration in (1, 2, 3):
            checkpoints.save(iteration, state(iteration / 3), {"stream": {"position": iteration}})
    with Checkpoints(tmp_path / "c", keep=2) as again:
        assert again.newest() == 3
        found, record = again.restore(3, like=state(0.0))
    assert record == {"stream": {"position": 3}}
    assert jax.random.key_data(found.key).tolist() == jax.random.key_data(jax.random.key(5)).tolist()
    saved = state(1.0)
    assert jax.tree.structure(found) == jax.tree.structure(saved)
    for a, b in zip(
        jax.tree.leaves((found.step, found.params, found.opt_state)),
        jax.tree.leaves((saved.step, saved.params, saved.opt_state)),
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert sorted(p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit()) == ["2", "3"]
