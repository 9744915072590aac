import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from oarjax.rl.optimizer import adamw, custom_optimizer, decays, learning_rate, stored_in
from oarjax.storage.checkpoint import Checkpoints
from oarjax.types import TrainState


@pytest.mark.parametrize(
    ("schedule", "end"),
    [("constant", [1.0, 1.0, 1.0]), ("linear", [1.0, 0.5, 0.0]), ("cosine", [1.0, 0.5, 0.0])],
)
def test_schedules(schedule, end):
    rate = learning_rate(peak=1.0, schedule=schedule, warmup=4, updates=6)
    # a quarter of the peak at once, up by 3/16 an update, and down over the two updates that are left
    np.testing.assert_allclose([rate(i) for i in range(7)], [0.25, 0.4375, 0.625, 0.8125, *end], atol=1e-7)


def test_no_warm_up():
    assert learning_rate(peak=0.3, schedule="constant", warmup=0, updates=5)(0) == 0.3


def test_biases_norms_and_rates_do_not_decay():
    params = {
        "layers": {"q": {"kernel": 1.0, "bias": 1.0}, "attention_norm": {"scale": 1.0}},
        "delta_layers": {"delta": {"a_log": 1.0, "dt_bias": 1.0, "conv": 1.0}},
        "embed": {"embedding": 1.0},
    }
    assert decays(params) == {
        "layers": {"q": {"kernel": True, "bias": False}, "attention_norm": {"scale": False}},
        "delta_layers": {"delta": {"a_log": False, "dt_bias": False, "conv": True}},
        "embed": {"embedding": True},
    }


def test_the_global_norm_is_clipped_before_adam():
    # Adam with b1 = b2 = 0 divides by |g| + 1e-8, so a clipped gradient of 1e-8 moves by half the rate.
    tx = adamw(lambda _: 0.1, b1=0.0, b2=0.0, weight_decay=0.0, clip_norm=1e-8)
    grads = {"a": jnp.array([5.0])}
    step, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(step["a"], [-0.05], rtol=1e-3)


def test_two_updates_hand_worked():
    """A gradient of 1, then of 0, with b1 = 1/2 and b2 = 1/5; the kernel decays, the bias does not."""
    tx = adamw(lambda _: 0.1, b1=0.5, b2=0.2, weight_decay=0.3, clip_norm=10.0)
    params = {"kernel": jnp.array([2.0]), "bias": jnp.array([2.0])}
    state = tx.init(params)
    first, state = tx.update({"kernel": jnp.array([1.0]), "bias": jnp.array([1.0])}, state, params)
    # both corrected averages are 1: a step of -.1, and -.1 * .3 * 2 of decay
    np.testing.assert_allclose([first["kernel"][0], first["bias"][0]], [-0.16, -0.1], rtol=1e-6)
    second, _ = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    # averages .5 * .5 / (1 - .25) = 1/3 and .2 * .8 / (1 - .04) = 1/6: a step of -.1 * (1/3) / sqrt(1/6)
    step = -0.1 * (1 / 3) * 6**0.5
    np.testing.assert_allclose([second["kernel"][0], second["bias"][0]], [step - 0.06, step], rtol=1e-6)


def test_another_optimizer_of_optax_follows_schedule_settings_and_clipping():
    """SGD with momentum 1/2: a gradient of 5 is clipped to 1, then a gradient of 0 leaves half of the step."""
    tx = custom_optimizer(optax.sgd, lambda count: 0.1 * (count + 1), {"momentum": 0.5}, clip_norm=1.0)
    grads = {"a": jnp.array([5.0])}
    first, state = tx.update(grads, tx.init(grads), grads)
    second, _ = tx.update({"a": jnp.array([0.0])}, state, grads)
    np.testing.assert_allclose([first["a"][0], second["a"][0]], [-0.1, -0.1], rtol=1e-6)  # .2 * .5


def trained(moments, *, updates=200, b2=0.95):
    """A linear model after updates from noisy batches: its params, the optimizer's state, and the loss on all data."""
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(512, 24)) * draw.uniform(0.1, 3, 24), jnp.float32)
    y = x @ jnp.asarray(draw.normal(size=(24, 8)), jnp.float32)
    tx = adamw(lambda _: 1e-2, b1=0.9, b2=b2, weight_decay=0.01, clip_norm=1.0, moments=moments)

    def loss(w, rows):
        return jnp.mean((x[rows] @ w["kernel"] - y[rows]) ** 2)

    def step(carry, key):
        w, state = carry
        grads = jax.grad(loss)(w, jax.random.choice(key, 512, (32,)))
        moved, state = tx.update(grads, state, w)
        return (optax.apply_updates(w, moved), state), None

    w = {"kernel": jnp.zeros((24, 8))}
    (w, state), _ = jax.jit(lambda w, s: jax.lax.scan(step, (w, s), jax.random.split(jax.random.key(1), updates)))(
        w, tx.init(w)
    )
    return w["kernel"], state, float(loss(w, slice(None)))


def test_moments_in_bfloat16_train_as_those_in_float32():
    w, state, loss = trained("float32")
    short, halved, found = trained("bfloat16")
    moments = [x for x in jax.tree.leaves(halved) if x.ndim]
    assert len(moments) == 2
    assert {x.dtype.name for x in moments} == {"bfloat16"}
    assert jax.tree.structure(halved) == jax.tree.structure(state)  # layouts and checkpoints name the same arrays
    assert float(jnp.linalg.norm(short - w) / jnp.linalg.norm(w)) < 0.005  # measured .0008
    assert found == pytest.approx(loss, rel=0.01)  # measured .0009


def second_moment(b2, dtype):
    """What is left of a second moment of 1 after 200 updates with a gradient of 0."""
    tx = optax.scale_by_adam(b1=0.9, b2=b2)
    tx = tx if dtype == "float32" else stored_in(tx, dtype)
    grads = {"w": jnp.zeros(3)}
    state = tx.init(grads)._replace(nu=jax.tree.map(lambda x: jnp.ones_like(x, dtype=dtype), grads))
    state = jax.lax.fori_loop(0, 200, lambda _, s: tx.update(grads, s)[1], state)
    return float(state.nu["w"][0])


def test_averages_too_slow_for_bfloat16_stand_still_and_are_refused():
    assert second_moment(0.95, "bfloat16") == pytest.approx(0.95**200, rel=0.05)
    assert second_moment(0.99, "bfloat16") == pytest.approx(0.99**200, rel=0.2)
    assert second_moment(0.999, "float32") == pytest.approx(0.999**200, rel=1e-4)
    assert second_moment(0.999, "bfloat16") == 1  # and not .82
    rest = {"weight_decay": 0.0, "clip_norm": 1.0, "moments": "bfloat16"}
    with pytest.raises(ValueError, match=r"b2: 0\.999 with moments in bfloat16, which do not move above 0\.99"):
        adamw(lambda _: 1e-2, b1=0.9, b2=0.999, **rest)
    with pytest.raises(ValueError, match=r"b1: 0\.995 with moments in bfloat16"):
        adamw(lambda _: 1e-2, b1=0.995, b2=0.95, **rest)


def test_moments_in_bfloat16_come_back_from_a_checkpoint(tmp_path):
    w, opt_state, _ = trained("bfloat16", updates=3)
    state = TrainState(jnp.int32(3), {"kernel": w}, opt_state, jax.random.key(0))
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.settle()
        found, _ = checkpoints.restore(3, like=jax.tree.map(jnp.zeros_like, state))
    for a, b in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(opt_state)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
