"""Adapters change a policy as they should, cost no gradient of its matrices, and merge into plain weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from oarjax.models.lora import adapter_axes, adapter_shapes, init_adapters, join_params, merge_adapters
from oarjax.models.qwen import make_policy
from oarjax.models.weights import abstract_params, logical_axes, weight_table
from oarjax.rollout.logps import token_logps

ALL = ("q", "k", "v", "o", "gate", "up", "down")
RANK, SCALE = 3, 2.5


def params(dtype=jnp.float32):
    return tiny.params(dtype)


def adapters(targets=ALL, *, fresh=False):
    """Adapters as after some training: B is not 0."""
    shapes = abstract_params(tiny.model(), dtype=jnp.float32)
    made = init_adapters(jax.random.key(1), shapes, rank=RANK, targets=targets)
    draw = np.random.default_rng(0)
    return made if fresh else jax.tree.map(lambda x: x + 0.3 * draw.normal(size=x.shape).astype(np.float32), made)


def rows(seed=0):
    draw = np.random.default_rng(seed)
    valid = np.arange(12) >= draw.integers(0, 4, (5, 1))
    return jnp.asarray(draw.integers(3, tiny.VOCAB, (5, 12)), jnp.int32), jnp.asarray(valid)


@partial(jax.jit, static_argnums=0)
def logps(policy, tree):
    return token_logps(policy, tree, *rows(), completion_length=7, temperature=1.0, head_chunk=64)[0]


def policy(**options):
    return make_policy(tiny.model(), compute_dtype=jnp.float32, adapter_scale=SCALE, **options)


def test_the_product_by_hand():
    """x W + scale (x A) B: with x = [1, 2], W = 0, A = [[1], [1]], B = [[1, 10]] and scale 2 it is 2 * 3 * [1, 10]."""
    tree = {"q": {"kernel": jnp.zeros((2, 2)), "lora_a": jnp.ones((2, 1)), "lora_b": jnp.array([[1.0, 10.0]])}}
    plain = merge_adapters(tree, scale=2.0)
    assert list(plain["q"]) == ["kernel"]
    np.testing.assert_array_equal(jnp.array([1.0, 2.0]) @ plain["q"]["kernel"], [6, 60])


def test_fresh_adapters_are_the_base_bit_for_bit():
    base = params()
    np.testing.assert_array_equal(logps(policy(), join_params(base, adapters(fresh=True))), logps(policy(), base))
    again = merge_adapters(join_params(base, adapters(fresh=True)), scale=SCALE)
    jax.tree.map(np.testing.assert_array_equal, again, base)


@pytest.mark.parametrize("targets", [ALL, ("q", "v"), ("down",)])
def test_merged_weights_are_the_same_policy(targets, x64):
    """In float64: how far float32 rounds the two orders of the products apart depends on the processor."""
    base, changed = jax.tree.map(lambda x: x.astype(jnp.float64), (params(), adapters(targets)))
    exact = make_policy(tiny.model(), compute_dtype=jnp.float64, adapter_scale=SCALE)
    beside = logps(exact, join_params(base, changed))
    assert float(jnp.abs(beside - logps(exact, base)).max()) > 0.05
    plain = merge_adapters(join_params(base, changed), scale=SCALE)
    assert jax.tree.structure(plain) == jax.tree.structure(base)
    np.testing.assert_allclose(logps(exact, plain), beside, atol=1e-11, rtol=0)
    assert {
        x.dtype.name
        for x in jax.tree.leaves(merge_adapters(join_params(base, changed), scale=SCALE, dtype=jnp.bfloat16))
    } == {"bfloat16"}


def test_gradients_are_those_of_the_merged_weights():
    """dL/dA = scale dL/dW B^T and dL/dB = scale A^T dL/dW, whatever is recomputed."""
    base, changed = params(), adapters()

    def loss(tree):
        return jnp.sum(logps(policy(), tree) * jnp.arange(7))

    by_weights = jax.jit(jax.grad(loss))(merge_adapters(join_params(base, changed), scale=SCALE))
    for remat in ("none", "full"):
        p = policy(remat=remat)
        found = jax.jit(jax.grad(lambda a, p=p: jnp.sum(logps(p, join_params(base, a)) * jnp.arange(7))))(changed)
        for part, name in (("attention", "q"), ("attention", "o"), ("mlp", "down")):
            dw, pair = by_weights["layers"][part][name]["kernel"], changed["layers"][part][name]
            mine = found["layers"][part][name]
            a = SCALE * jnp.einsum("lio,lro->lir", dw, pair["lora_b"])
            b = SCALE * jnp.einsum("lir,lio->lro", pair["lora_a"], dw)
            np.testing.assert_allclose(mine["lora_a"], a, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(mine["lora_b"], b, rtol=1e-3, atol=1e-3)


def products(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of all matrix products in a program, those inside loops and recomputations included."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.add(tuple(sorted(eqn.outvars[0].aval.shape)))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = value.jaxpr if hasattr(value, "jaxpr") else value
            if hasattr(inner, "eqns"):
                found |= products(inner)
    return found


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_gradient_of_a_matrix_is_formed(remat):
    base, changed = params(), adapters()
    p = policy(remat=remat)
    matrices = [w for w in weight_table(tiny.model()) if w.path[-1] == "kernel"]
    kernels = {tuple(sorted(w.shape[-2:])) for w in matrices}

    def loss(tree):
        return jnp.sum(logps(p, tree))

    whole = products(jax.make_jaxpr(jax.grad(loss))(join_params(base, changed)).jaxpr)
    assert kernels <= whole, (kernels, whole)  # the test sees them where they are
    alone = products(jax.make_jaxpr(jax.grad(lambda a: loss(join_params(base, a))))(changed).jaxpr)
    assert not kernels & alone
    assert (16, RANK)[::-1] in alone


def test_shapes_and_axes_have_one_tree():
    cfg = tiny.model()
    shapes = adapter_shapes(abstract_params(cfg, dtype=jnp.bfloat16), rank=RANK, targets=("q", "down"))
    assert shapes["layers"]["attention"]["q"]["lora_a"].shape == (2, 16, RANK)
    assert shapes["layers"]["mlp"]["down"]["lora_b"].shape == (2, RANK, 16)
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"float32"}
    axes = adapter_axes(logical_axes(cfg), targets=("q", "down"))
    assert axes["layers"]["attention"]["q"] == {
        "lora_a": ("layers", "embed", "rank"),
        "lora_b": ("layers", "rank", "heads"),
    }
    assert jax.tree.structure(shapes) == jax.tree.structure(axes, is_leaf=lambda x: isinstance(x, tuple))


def test_an_array_starts_the_same_whatever_else_is_adapted():
    one, two = adapters(("q",), fresh=True), adapters(("q", "up"), fresh=True)
    np.testing.assert_array_equal(*(x["layers"]["attention"]["q"]["lora_a"] for x in (one, two)))
    a = two["layers"]["mlp"]["up"]["lora_a"]
    assert float(a.std()) == pytest.approx(16**-0.5, rel=0.25)
    assert not two["layers"]["mlp"]["up"]["lora_b"].any()


def test_what_cannot_be_adapted():
    shapes = abstract_params(tiny.model(), dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"rank: 8 for layers\.attention\.k of 16 x 8; expected 1 to 7"):
        adapter_shapes(shapes, rank=8, targets=ALL)
    with pytest.raises(ValueError, match="targets: this policy has no matrix gate_up"):
        adapter_shapes(shapes, rank=2, targets=("q", "gate_up"))
    with pytest.raises(ValueError, match="join_params: trained and frozen params overlap"):
        join_params({"w": 1}, {"w": 2})
