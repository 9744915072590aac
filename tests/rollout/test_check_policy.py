"""check_policy: whole policies pass, and every way to leave something out is named."""

import jax
import jax.numpy as jnp
import pytest
from delta_policy import VOCAB, delta_policy
from toy_policy import toy_params, toy_policy

from oarjax import check_policy
from oarjax.models.policy import first_slots
from oarjax.rl.checked import ArgumentError

TOY = toy_policy()
PARAMS = toy_params(jax.random.key(0))


def test_whole_policies_pass():
    check_policy(TOY, PARAMS, vocab_size=23)
    policy, params = delta_policy()
    check_policy(policy, params, vocab_size=VOCAB)


def forgets(**forgotten):
    """The toy with a trunk that ignores one of its keywords."""
    return TOY._replace(trunk=lambda *args, **more: TOY.trunk(*args, **more | forgotten))


def sees_padding(params, embeddings, positions, valid, **more):
    return TOY.trunk(params, embeddings, positions, jnp.ones_like(valid), **more)


def sees_ahead(params, embeddings, positions, valid, **more):
    states, cache = TOY.trunk(params, embeddings, positions, valid, **more)
    return states + states[:, -1:], cache


def stays_empty(params, embeddings, positions, valid, **more):
    states, cache = TOY.trunk(params, embeddings, positions, valid, **more)
    return states, more["cache"] if cache is not None else None


def two_slots(cache, count):
    return first_slots(cache, 2)


def always_a_cache(params, embeddings, positions, valid, **more):
    return embeddings, TOY.init_cache(4, 9)


def undefined_padding(params, embeddings, positions, valid, **more):
    states, cache = TOY.trunk(params, embeddings, positions, valid, **more)
    return jnp.where(valid[..., None], states, jnp.nan), cache


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (forgets(prefix=None), "check_policy: trunk: with the prompt as prefix, one for the rows of a group"),
        (forgets(visible=None), "trunk: with the prompt's slots visible of a prefix that holds the whole row"),
        (TOY._replace(trunk=sees_padding), "trunk: with other tokens at invalid positions"),
        (TOY._replace(trunk=sees_ahead), "trunk: with another last token"),
        (TOY._replace(trunk=stays_empty), "trunk, init_cache: with what stands before in the cache"),
        (TOY._replace(first_slots=two_slots), "first_slots: with the first 6 slots of a filled cache as prefix"),
        (TOY._replace(embed=lambda params, tokens: TOY.embed(params, tokens)[..., 0]), "embed must return float32"),
        (TOY._replace(unembed=lambda params, hidden: hidden), r"unembed must return logits \[B, N, 23\]"),
        (TOY._replace(trunk=always_a_cache), "trunk must return states .* and None without a cache"),
        (TOY._replace(trunk=undefined_padding), "trunk must return finite states, at invalid positions too"),
        ({"embed": None}, "check_policy: policy must be an oarjax Policy, got a dict"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named(policy, message):
    with pytest.raises(ArgumentError, match=message):
        check_policy(policy, PARAMS, vocab_size=23)
