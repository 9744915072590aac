import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_policy import left_padded, toy_params, toy_policy

from oarjax.models.policy import positions_of
from oarjax.rollout.logps import hidden_logps, logits_logps, token_logps

B, T, V = 4, 7, 23
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
POLICY = toy_policy()


def batch(slots=4):
    tokens, valid = left_padded(PROMPTS, slots)
    completion = jax.random.randint(jax.random.key(5), (B, T), 0, V)
    lengths = jnp.array([7, 1, 4, 6])
    valid = jnp.concatenate([valid, jnp.arange(T) < lengths[:, None]], 1)
    return jnp.concatenate([tokens, completion], 1), valid


def naive(params, tokens, valid, temperature):
    """The whole [B, N, V] array, in the plainest way."""
    hidden, _ = POLICY.trunk(params, POLICY.embed(params, tokens), positions_of(valid), valid)
    logps = jax.nn.log_softmax(POLICY.unembed(params, hidden) / temperature, axis=-1)[:, -T - 1 : -1]
    chosen = jnp.take_along_axis(logps, tokens[:, -T:, None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logps) * logps, axis=-1)


def test_logits_logps_by_hand():
    # Probabilities 1/2, 1/4, 1/4: log-prob of the second ln(1/4), entropy (1/2 + 1/4 * 2 + 1/4 * 2) ln 2.
    # At temperature 1/2 they are squared: 1/4, 1/16, 1/16 of 6/16, so 2/3, 1/6, 1/6.
    logits = jnp.log(jnp.array([[2.0, 1.0, 1.0]])) + 50.0
    logp, entropy = logits_logps(logits, jnp.array([1]), temperature=1.0)
    np.testing.assert_allclose(logp, [np.log(1 / 4)], rtol=1e-5)
    np.testing.assert_allclose(entropy, [1.5 * np.log(2)], rtol=1e-5)
    logp, entropy = logits_logps(logits, jnp.array([1]), temperature=0.5)
    np.testing.assert_allclose(logp, [np.log(1 / 6)], rtol=1e-5)
    np.testing.assert_allclose(entropy, [-2 / 3 * np.log(2 / 3) - 1 / 3 * np.log(1 / 6)], rtol=1e-5)


def test_a_token_that_cannot_occur_leaves_values_and_gradients_finite():
    logits = jnp.array([[0.0, -jnp.inf, 0.0]])
    logp, entropy = logits_logps(logits, jnp.array([0]), temperature=1.0)
    np.testing.assert_allclose([logp[0], entropy[0]], [-np.log(2), np.log(2)], rtol=1e-6)
    grad = jax.grad(lambda z: sum(x.sum() for x in logits_logps(z, jnp.array([0]), temperature=1.0)))(logits)
    np.testing.assert_allclose(grad, [[0.5, 0.0, -0.5]], atol=1e-6)


# 28 positions: at once; 3 positions of 4 rows (7 = 3 + 3 + 1, evened out); 1 position; rows split as well.
@pytest.mark.parametrize("head_chunk", [28, 12, 5, 3])
def test_values_and_gradients_equal_the_whole_array_in_float64(x64, head_chunk):
    params = toy_params(jax.random.key(0), scale=2.0, dtype=jnp.float64)
    tokens, valid = batch()
    mask = valid[:, -T:]
    weights = jax.random.normal(jax.random.key(1), (2, B, T), jnp.float64)

    def chunked(params):
        return token_logps(POLICY, params, tokens, valid, completion_length=T, temperature=0.7, head_chunk=head_chunk)

    def loss(params, method):
        logps, entropies = method(params)
        return jnp.sum(mask * (weights[0] * logps + weights[1] * entropies)), (logps, entropies)

    got, values = jax.jit(jax.grad(lambda p: loss(p, chunked), has_aux=True))(params)
    want, expected = jax.grad(lambda p: loss(p, lambda p: naive(p, tokens, valid, 0.7)), has_aux=True)(params)
    assert values[0].dtype == jnp.float64
    for a, b in zip(jax.tree.leaves((got, values)), jax.tree.leaves((want, expected))):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def array_shapes(jaxpr, found):
    """Shapes of all intermediate arrays of a program, those of inner programs included."""
    for equation in jaxpr.eqns:
        found.extend(v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = inner.jaxpr if hasattr(inner, "jaxpr") else inner
                if hasattr(inner, "eqns"):
                    array_shapes(inner, found)
    return found


def test_the_logits_of_all_positions_never_exist():
    vocab, head_chunk, length = 1024, 8, 28
    params = toy_params(jax.random.key(0), vocab=vocab)
    tokens = jnp.ones((B, length + 4), jnp.int32)
    valid = tokens > 0

    def loss(params, head_chunk):
        logps, entropies = token_logps(
            POLICY, params, tokens, valid, completion_length=length, temperature=1.0, head_chunk=head_chunk
        )
        return jnp.sum(logps) + jnp.sum(entropies)

    def largest(chunk):
        step = jax.value_and_grad(lambda p: loss(p, chunk))
        return max(np.prod(s) for s in array_shapes(jax.make_jaxpr(step)(params).jaxpr, []))

    def temporaries(chunk):
        compiled = jax.jit(jax.grad(lambda p: loss(p, chunk))).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert largest(B * length) == B * length * vocab  # the inspection finds it where it is
    assert largest(head_chunk) == head_chunk * vocab  # also the size of the embedding and its gradient
    assert temporaries(B * length) > 4 * B * length * vocab
    assert temporaries(head_chunk) < 4 * B * length * vocab


def test_padding_on_the_left_changes_nothing():
    params = toy_params(jax.random.key(0), scale=2.0)
    keywords = {"completion_length": T, "temperature": 1.0, "head_chunk": 12}
    tokens, valid = batch(slots=4)
    want = token_logps(POLICY, params, tokens, valid, **keywords)
    got = token_logps(POLICY, params, *batch(slots=9), **keywords)
    mask = valid[:, -T:]
    for a, b in zip(got, want):
        np.testing.assert_allclose(np.where(mask, a, 0), np.where(mask, b, 0), rtol=1e-5, atol=1e-5)


def test_scores_what_comes_at_each_position():
    """Row 2's third completion token, by hand from the hidden state one position before it."""
    params = toy_params(jax.random.key(0), scale=2.0)
    tokens, valid = batch()
    logps, _ = token_logps(POLICY, params, tokens, valid, completion_length=T, temperature=0.7, head_chunk=12)
    row = jnp.array([[*PROMPTS[2], *tokens[2, 4:6].tolist()]])
    seen = jnp.ones_like(row, bool)
    hidden, _ = POLICY.trunk(params, POLICY.embed(params, row), positions_of(seen), seen)
    logits = np.asarray(hidden[0, -1] @ params["embed"].T, np.float64) / 0.7
    want = logits[tokens[2, 6]] - np.log(np.sum(np.exp(logits)))
    np.testing.assert_allclose(logps[2, 2], want, rtol=1e-5)


def test_refuses_what_it_cannot_score():
    params = toy_params(jax.random.key(0))
    tokens, valid = batch()
    with pytest.raises(ValueError, match=r"token_logps: completion_length must be in 1 \.\. 10, .*got 11"):
        token_logps(POLICY, params, tokens, valid, completion_length=11, temperature=1.0, head_chunk=8)
    hidden = jnp.zeros((B, T, 8))
    with pytest.raises(ValueError, match="head_chunk: expected at least 1"):
        hidden_logps(POLICY, params, hidden, tokens[:, -T:], temperature=1.0, head_chunk=0)
    with pytest.raises(ValueError, match="greedy sampling is scored at temperature 1"):
        hidden_logps(POLICY, params, hidden, tokens[:, -T:], temperature=0.0, head_chunk=8)
