"""Products of a float32 policy are float32 on every platform: read in the programs; a CPU's numbers do not tell."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from tiny import model

from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy
from oarjax.models.weights import abstract_params

PRODUCT = re.compile(r"stablehlo\.dot_general.*")


def products(dtype: str, attention: str) -> list[str]:
    """Every product of the gradient of log-probs summed in a rematerialised loop, and of a linearised pass (OAR-G)."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    policy = make_policy(model(), compute_dtype=dtype, remat="full", attention=attention, mesh=mesh)
    ids, valid = jnp.zeros((1, 6), jnp.int32), jnp.ones((1, 6), bool)

    def hidden(params, embeddings):
        return policy.trunk(params, embeddings, positions_of(valid), valid)[0]

    def loss(params):
        params = policy.head(params)
        states = hidden(params, policy.embed(params, ids))

        def chunk(total, h):
            return total + jax.nn.logsumexp(policy.unembed(params, h), -1).sum(), None

        return jax.lax.scan(jax.checkpoint(chunk), 0.0, jnp.swapaxes(states, 0, 1))[0]

    def program(params):
        push = jax.jvp(lambda x: hidden(params, x), *[(policy.embed(params, ids),)] * 2)[1]
        return jax.grad(loss)(params), push

    text = jax.jit(program).lower(abstract_params(model(), dtype=jnp.float32)).as_text()
    return PRODUCT.findall(text)


@pytest.mark.parametrize("attention", ["xla", "splash"])
def test_every_product_of_a_float32_policy_is_float32(attention):
    found = products("float32", attention)
    assert len(found) > 20
    short = [line for line in found if "precision = [HIGHEST, HIGHEST]" not in line]
    assert not short, short[0]


def test_products_of_a_bfloat16_policy_are_left_as_they_are():
    found = products("bfloat16", "xla")
    assert len(found) > 20
    assert not [line for line in found if "HIGHEST" in line]
