"""Credit with a policy whose state cannot be cut: equal to whole forwards, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_policy import delta_policy
from oar_rows import ROWS, batch

from oarjax.config.loading import parse_config
from oarjax.credit.clean_pass import linear_pass
from oarjax.credit.oar.oar_l import local_importance
from oarjax.credit.oar.oar_p import masked_token_importance
from oarjax.credit.probe import kl_divergence, outcome_probe
from oarjax.credit.resolved import resolve_method
from oarjax.errors import ConfigError
from oarjax.models.policy import positions_of

MASK = 9
PROBE = outcome_probe("answer_mean", temperature=0.7)


@pytest.fixture(scope="module")
def policy():
    return delta_policy()


def test_oar_p_equals_masking_tokens_one_by_one(policy):
    """From the state at the start of a token's bucket: the clean pass stops at each edge, suffixes begin there."""
    policy, params = policy
    tokens, valid, span = batch()
    lengths = []

    def trunk(params, embeddings, *rows, **caches):
        lengths.append(embeddings.shape[1])
        return plain.trunk(params, embeddings, *rows, **caches)

    plain, policy = policy, policy._replace(trunk=trunk)

    @jax.jit
    def importance(tokens, valid, span):
        return masked_token_importance(
            policy, params, tokens, valid, span, probe=PROBE, mask_id=MASK, chunk=3, buckets=3
        )

    @jax.jit
    def outcomes(ids, at):
        valid = jnp.ones(ids.shape, bool)
        hidden, _ = policy.trunk(params, policy.embed(params, ids), positions_of(valid), valid)
        return (policy.unembed(params, hidden[:, at]) / 0.7).mean(1)

    row, found = ROWS[2], np.asarray(importance(tokens, valid, span))
    T = span.answer.shape[1]
    lows = [T * j // 3 for j in range(3)]
    assert set(lengths) == {tokens.shape[1] - T - 1, *np.diff([*lows, T]), *(T - low for low in lows)}
    ids, first, count = row.prompt + row.completion, len(row.prompt), len(row.reasoning)
    masked = [(*ids[:t], MASK, *ids[t + 1 :]) for t in range(first, first + count)]
    begin = first + count + len(row.cue)
    clean, *changed = outcomes(jnp.array([ids, *masked]), np.arange(begin, begin + len(row.answer)) - 1)
    want = np.array([kl_divergence(clean, after) for after in changed])
    assert want.max() > 1e-3
    np.testing.assert_allclose(found[2, :count], want, rtol=0, atol=2e-5 * want.max())
    assert (found[~np.asarray(span.reasoning)] == 0).all()


@pytest.mark.slow
def test_the_linearised_completion_is_that_of_whole_forwards(x64):
    """What OAR-G, OAR-F and GRAIL read: states, their change and its transpose, under vmap. Float32 would round."""
    policy, params = delta_policy("float64")
    tokens, valid, span = batch()
    length = span.answer.shape[1]
    start = tokens.shape[1] - length - 1
    own, real = slice(start, start + length), valid[:, start : start + length]
    shape = (2, 2, len(ROWS), length, params["embed"]["embedding"].shape[1])
    draws, others = jnp.where(real[..., None], jax.random.normal(jax.random.key(0), shape, jnp.float64), 0)

    @jax.jit
    def both(draws, others):
        clean = linear_pass(policy, params, tokens, valid, completion_length=length)
        whole = policy.embed(params, tokens)

        def states(e):
            return policy.trunk(params, whole.at[:, own].set(e), positions_of(valid), valid)[0][:, own]

        change = jax.vmap(lambda e: jax.jvp(states, (whole[:, own],), (e,)))(draws)
        return clean.hidden, jax.vmap(clean.push)(draws), jax.vmap(clean.pull)(others), change

    hidden, pushed, pulled, (states, change) = both(draws, others)
    seen = np.asarray(real)
    np.testing.assert_allclose(hidden[seen], states[0][seen], atol=1e-10)
    np.testing.assert_allclose(pushed[:, seen], change[:, seen], atol=1e-9, rtol=1e-9)
    products = [np.einsum("abtd,abtd->a", *pair) for pair in ((pushed, others), (draws, pulled))]
    np.testing.assert_allclose(*products, rtol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "oar_l"},
            r"credit.method: oar_l recomputes single positions of a row, .* set credit.method to oar_p",
        ),
        ({"method": "oar_screened", "screen": {"by": "oar_l"}}, "credit.screen.by: oar_l recomputes single positions"),
    ],
)
def test_oar_l_is_refused_by_name(changes, message, policy):
    tree = {"run_dir": "x", "policy": {"path": "x"}, "data": {"train": {"source": "x"}}, "credit": changes}
    with pytest.raises(ConfigError, match=message):
        resolve_method(parse_config(tree).credit).scorer(policy[0], temperature=1.0, pad_id=0)


def test_oar_l_is_refused_where_it_is_called(policy):
    with pytest.raises(ValueError, match=r"recurrent states, .* use oar_p, oar_g or oar_f"):
        jax.eval_shape(
            lambda: local_importance(*policy, *batch(), probe=PROBE, mask_id=MASK, window=2, answers=2, chunk=2)
        )
