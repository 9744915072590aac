"""Grouped products and their derivatives, the router, and both ways of computing experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.data.hf import load_params, read_config
from oarjax.kernels.grouped_dot import grouped_dot, grouped_outer
from oarjax.models.lora import init_adapters, join_params, merge_adapters
from oarjax.models.moe import FEW, _dense, _grouped, experts_of_step, route
from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy

SIZES = (3, 0, 5, 2)
COUNT, INTO, OUT = len(SIZES), 3, 2
ROWS = 12  # two rows are in no group


def by_hand(rows, matrices, sizes):
    owner = np.repeat(np.arange(COUNT), sizes)
    out = np.einsum("rd,rdf->rf", rows[: len(owner)], np.asarray(matrices)[owner])
    return np.pad(out, ((0, len(rows) - len(owner)), (0, 0)))


@pytest.fixture
def operands():
    draw = np.random.default_rng(0)
    return draw.normal(size=(4, ROWS, INTO)), draw.normal(size=(4, COUNT, INTO, OUT)), draw.normal(size=(4, ROWS, OUT))


@pytest.mark.parametrize("block", [2, 5, 512])
def test_grouped_products_and_their_gradients(block, operands, x64, monkeypatch):
    """With groups of less than a block, of one, and of more; the last blocks of 5 and 12 begin before their group."""
    monkeypatch.setattr("oarjax.kernels.grouped_dot.BLOCK", block)
    rows, matrices, ct = (x[0] for x in operands)
    sizes = jnp.asarray(SIZES)
    out, pull = jax.vjp(lambda r, m: grouped_dot(r, m, sizes, dtype=r.dtype), jnp.asarray(rows), jnp.asarray(matrices))
    np.testing.assert_allclose(out, by_hand(rows, matrices, SIZES), atol=1e-12)
    d_rows, d_matrices = pull(jnp.asarray(ct))
    np.testing.assert_allclose(d_rows, by_hand(ct, np.swapaxes(matrices, 1, 2), SIZES), atol=1e-12)
    want = [rows[a:b].T @ ct[a:b] for a, b in ((0, 3), (3, 3), (3, 8), (8, 10))]
    np.testing.assert_allclose(d_matrices, want, atol=1e-12)
    second = jax.jvp(pull, (jnp.asarray(ct),), (jnp.asarray(ct),))[1]  # linear: its own derivative
    np.testing.assert_allclose(second[1], want, atol=1e-12)


@pytest.mark.parametrize("mapped", [(0, None, None), (0, None, 0), (0, 0, None), (0, 0, 0)])
def test_grouped_products_under_vmap(mapped, operands, x64):
    """Shared groups, groups of their own, matrices of their own; each also transposed."""
    rows, matrices, ct = operands
    sizes = np.array([SIZES, (10, 0, 0, 0), (0, 4, 4, 1), (1, 2, 3, 5)])
    args = [x if axis == 0 else x[0] for x, axis in zip((rows, matrices, sizes), mapped)]

    def gradients(rows, matrices, sizes, ct):
        out, pull = jax.vjp(lambda r, m: grouped_dot(r, m, sizes, dtype=r.dtype), rows, matrices)
        return out, *pull(ct)

    found = jax.vmap(gradients, (*mapped, 0))(*map(jnp.asarray, args), jnp.asarray(ct))
    for i in range(4):
        one = [x[i] if axis == 0 else x for x, axis in zip(args, mapped)]
        want = gradients(*map(jnp.asarray, one), jnp.asarray(ct[i]))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), [f[i] for f in found], list(want))


def test_what_a_platform_leaves_in_rows_of_no_expert_reaches_nothing(x64, monkeypatch):
    """Experts of other devices' tokens: their rows are NaN, and values, gradients and tangents those of dense ones."""
    ragged = jax.lax.ragged_dot

    def with_rubbish(rows, matrices, sizes, **options):
        out = ragged(rows, matrices, sizes, **options)
        return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], out, jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_dot", with_rubbish)
    draw = np.random.default_rng(0)
    flat, weights = draw.normal(size=(6, 4)), draw.random((6, 2))
    matrices = tuple((draw.normal(size=shape),) for shape in ((3, 4, 5), (3, 4, 5), (3, 5, 4)))
    chosen = jnp.array([[0, 3], [-1, 7], [2, 1], [4, 1], [1, 0], [-2, 2]])

    def both(compute):
        def f(flat, weights, matrices):
            return compute(flat, weights, chosen, matrices, scale=1.0, dtype=jnp.float64, stream=jnp.float64)

        arrays = jax.tree.map(jnp.asarray, (flat, weights, matrices))
        return f(*arrays), jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2))(*arrays), jax.jvp(f, arrays, arrays)

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), both(_grouped), both(_dense))


def test_outer_products_keep_their_dtype():
    half = jnp.ones((4, 2), jnp.bfloat16)
    out = grouped_outer(half, half, jnp.array([1, 3]), dtype=jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[:, 0, 0], [1, 3])


def test_router():
    """Of 1 : 2 : 4 : 1 the likeliest are 4 / 8 and 2 / 8; the first wins a tie; a given choice has its own weights."""
    probs = jnp.array([[1.0, 2.0, 4.0, 1.0], [2.0, 2.0, 2.0, 2.0]]) / 8
    weights, chosen = route(probs, per_token=2, normalised=False)
    np.testing.assert_array_equal(chosen, [[2, 1], [0, 1]])
    np.testing.assert_allclose(weights, [[0.5, 0.25], [0.25, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(route(probs, per_token=2, normalised=True)[0], [[2 / 3, 1 / 3], [0.5, 0.5]], rtol=1e-6)
    replayed, same = route(probs, per_token=2, normalised=True, chosen=jnp.array([[3, 1], [2, 3]]))
    np.testing.assert_array_equal(same, [[3, 1], [2, 3]])
    np.testing.assert_allclose(replayed, [[1 / 3, 2 / 3], [0.5, 0.5]], rtol=1e-6)


def test_all_ways_give_the_same_logits_gradients_and_linearisation(data, highest_precision):
    """Dense, grouped and few, with params in float32; OAR-G's push and pull, under vmap, are those of a dense model."""
    cfg, folder = read_config(data / "policy" / "moe_untied")
    params, ids = load_params(folder, cfg), jnp.asarray(np.load(folder / "golden.npz")["ids"][:, :9])
    valid = jnp.arange(9) >= jnp.array([[0], [3]])
    draws = jax.random.normal(jax.random.key(1), (2, *ids.shape, cfg.hidden_size))

    def found(kind):
        policy = make_policy(cfg, remat="none", experts=kind)

        @jax.jit
        def everything(params, draws):
            def loss(params):
                hidden, _ = policy.trunk(params, policy.embed(params, ids), positions_of(valid), valid)
                return (jax.nn.log_softmax(policy.unembed(params, hidden))[..., 3] * valid).sum()

            def states(embeddings):
                return policy.trunk(params, embeddings, positions_of(valid), valid)[0] * valid[..., None]

            clean = policy.embed(params, ids)
            hidden, push = jax.linearize(states, clean)
            pull = jax.linear_transpose(push, clean)
            noisy = jax.vmap(lambda noise: states(clean + noise))(draws)  # other experts in every draw
            return jax.grad(loss)(params), hidden, jax.vmap(push)(draws), jax.vmap(pull)(draws), noisy

        return everything(params, draws)

    dense, *others = map(found, ("dense", "grouped", "few"))
    assert float(jnp.abs(dense[0]["layers"]["mlp"]["router"]["kernel"]).max()) > 1e-3
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4), dense, other)


@pytest.mark.parametrize("kind", ["dense", "grouped", "few"])
def test_adapters_of_experts_equal_merged_experts(kind, data, highest_precision):
    """One pair per expert, of rank 2; a matrix without one beside those with."""
    cfg, folder = read_config(data / "policy" / "moe_untied")
    params, ids = load_params(folder, cfg), jnp.asarray(np.load(folder / "golden.npz")["ids"][:, :9])
    adapters = init_adapters(jax.random.key(0), params, rank=2, targets=("q", "up", "down"))
    adapters = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), adapters)
    assert adapters["layers"]["mlp"]["down"]["lora_b"].shape == (2, 8, 2, 32)
    policy, both = make_policy(cfg, remat="none", experts=kind, adapter_scale=1.5), join_params(params, adapters)
    valid = jnp.ones(ids.shape, bool)

    @jax.jit
    def hidden(params):
        return policy.trunk(params, policy.embed(params, ids), positions_of(valid), valid)[0]

    found, want = hidden(both), hidden(merge_adapters(both, scale=1.5))
    assert float(jnp.abs(want - hidden(params)).max()) > 0.1
    np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)


def test_a_decode_step_of_few_tokens_forms_no_groups(data, highest_precision, monkeypatch):
    cfg, folder = read_config(data / "policy" / "moe_untied")
    params, ids = load_params(folder, cfg), jnp.asarray(np.load(folder / "golden.npz")["ids"][:, :1])
    assert [experts_of_step("dense", FEW + more, None) for more in (0, 1)] == ["few", "dense"]

    def step():
        policy = make_policy(cfg, experts="grouped")
        inputs = policy.embed(params, ids), jnp.zeros(ids.shape, jnp.int32), jnp.ones(ids.shape, bool)
        return jax.jit(policy.trunk).trace(params, *inputs, cache=policy.caches.init(ids.shape[0], 2)), inputs, policy

    found = {}
    for most in (FEW, 0):
        monkeypatch.setattr("oarjax.models.moe.FEW", most)
        traced, inputs, policy = step()
        assert ("grouped_dot" in str(traced.jaxpr)) == (most == 0)
        found[most] = jax.jit(policy.trunk)(params, *inputs, cache=policy.caches.init(ids.shape[0], 2))[0]
    np.testing.assert_allclose(found[FEW], found[0], atol=2e-5)
