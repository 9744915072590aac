import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.optim import adamw, decays, learning_rate


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


def test_biases_and_norms_do_not_decay():
    params = {
        "layers": {"q": {"kernel": 1.0, "bias": 1.0}, "attention_norm": {"scale": 1.0}},
        "embed": {"embedding": 1.0},
    }
    assert decays(params) == {
        "layers": {"q": {"kernel": True, "bias": False}, "attention_norm": {"scale": False}},
        "embed": {"embedding": True},
    }


def test_the_global_norm_is_clipped_before_adam():
    # Adam with b1 = b2 = 0 divides by |g| + 1e-8, so a clipped gradient of 1e-8 moves by half the rate.
    tx = adamw(lambda _: 0.1, b1=0.0, b2=0.0, weight_decay=0.0, clip_norm=1e-8)
    grads = {"a": jnp.array([5.0])}
    step, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(step["a"], [-0.05], rtol=1e-3)
