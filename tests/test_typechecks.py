"""Functions that are defined anew at every call share their generated checks, and each is checked."""

import jax.numpy as jnp
import pytest
import typechecks
from jaxtyping import Array, Float, TypeCheckError, jaxtyped


def adding(shown, kind=int):
    @jaxtyped(typechecker=typechecks.check)
    def add(x: Float[Array, " n"], y: Float[Array, " n"], number: kind = 0) -> Float[Array, " n"]:
        return (x + y)[:shown]

    return add


def test_every_definition_is_checked_by_its_own_annotations():
    three, two = jnp.ones(3), jnp.ones(2)
    whole = adding(3)
    count = len(typechecks._known)
    cut = adding(2)
    assert len(typechecks._known) == count
    assert whole(three, three).shape == (3,)
    with pytest.raises(TypeCheckError, match="return value"):
        cut(three, three)
    for add in (whole, cut):
        with pytest.raises(TypeCheckError, match="parameters"):
            add(three, two)
        with pytest.raises(TypeCheckError, match="number"):
            add(two, two, "1")
    assert adding(3, str)(three, three, "1").shape == (3,)
    with pytest.raises(TypeCheckError, match="number"):
        adding(3, str)(three, three, 1)
