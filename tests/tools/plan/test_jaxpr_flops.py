"""Executed FLOPs: by hand, by XLA's own count where there is no loop, and by trips where there is one."""

import jax
import jax.numpy as jnp
import pytest

from oarjax.tools.plan.jaxpr_flops import executed_flops

A, B = jnp.ones((3, 4)), jnp.ones((4, 5))
PRODUCT = 2 * 3 * 4 * 5


def test_a_product_is_two_per_multiply_add():
    assert executed_flops(jnp.matmul, A, B) == PRODUCT
    assert executed_flops(lambda a, b: jnp.exp(a @ b) + 1, A, B) == PRODUCT  # elementwise work is not counted


def test_batched_products_count_every_batch():
    x, y = jnp.ones((7, 2, 3, 4)), jnp.ones((7, 2, 4, 5))
    assert executed_flops(jnp.matmul, x, y) == 14 * PRODUCT
    assert executed_flops(lambda x, y: jnp.einsum("abmk,abkn->mn", x, y), x, y) == 14 * PRODUCT


def test_agrees_with_xla_where_nothing_loops():
    x, w, v = jnp.ones((16, 32)), jnp.ones((32, 64)), jnp.ones((64, 8))

    def loss(w, v):
        return jnp.sum((x @ w) @ v)

    gradient = jax.grad(loss, argnums=(0, 1))
    counted = executed_flops(gradient, w, v)
    # Forward x w; backward: v's gradient and the hidden state's, then w's. (The last product's value is not asked for.)
    assert counted == 2 * (16 * 32 * 64 + 64 * 16 * 8 + 16 * 8 * 64 + 32 * 16 * 64)
    whole = jax.jit(lambda x, w: x @ w).lower(x, w).compile().cost_analysis()
    assert executed_flops(jnp.matmul, x, w) == pytest.approx(whole["flops"], rel=1e-3)


def test_what_nobody_uses_is_not_counted():
    assert executed_flops(lambda a, b: (a @ b, a)[1], A, B) == 0


@pytest.mark.parametrize("trips", [0, 1, 6])
def test_loops_count_their_trips(trips):
    def known(a, b):
        return jax.lax.scan(lambda s, _: (s + (a @ b).sum(), None), 0.0, length=trips)[0]

    def unknown(a, b, n):
        return jax.lax.fori_loop(0, n, lambda i, s: s + ((a + i) @ b).sum(), 0.0)

    assert executed_flops(known, A, B) == trips * PRODUCT
    assert executed_flops(unknown, A, B, jnp.int32(trips)) == trips * PRODUCT


def test_loops_inside_loops_and_calls():
    def inner(a, b, n):
        return jax.lax.fori_loop(0, n, lambda i, s: s + ((a + i) @ b).sum(), 0.0)

    @jax.jit
    def outer(a, b, counts):
        return jax.lax.scan(lambda s, n: (s + jax.checkpoint(inner)(a, b, n), None), 0.0, counts)[0]

    assert executed_flops(outer, A, B, jnp.array([1, 0, 4])) == 5 * PRODUCT


def test_only_the_branch_taken_counts():
    def either(a, b, which):
        return jax.lax.cond(which, lambda: (a @ b).sum(), lambda: a.sum())

    assert executed_flops(either, A, B, jnp.array(True)) == PRODUCT
    assert executed_flops(either, A, B, jnp.array(False)) == 0


def test_own_derivative_rules_and_vmap():
    @jax.custom_vjp
    def f(a):
        return (a @ B).sum()

    f.defvjp(lambda a: (f(a), None), lambda _, ct: (ct * jnp.ones((3, 5)) @ B.T,))
    assert executed_flops(f, A) == PRODUCT
    assert executed_flops(jax.grad(f), A) == PRODUCT  # the value itself is not asked for
    assert executed_flops(lambda a: jax.vmap(f)(a), jnp.ones((6, 3, 4))) == 6 * PRODUCT


def test_random_keys_pass_through():
    def noisy(key, a, b):
        return (a + jax.random.normal(key, a.shape)) @ b

    assert executed_flops(noisy, jax.random.key(0), A, B) == PRODUCT


def test_what_cannot_be_counted_is_an_error():
    with pytest.raises(ValueError, match="conv_general_dilated cannot be counted"):
        executed_flops(lambda x, k: jnp.convolve(x, k), jnp.ones(9), jnp.ones(3))
