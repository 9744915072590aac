"""Functions that are defined anew at every call share their generated checks, and each is checked."""

import jax.numpy as jnp
import pytest
import typechecks
from jaxtyping import Array, Float, TypeCheckError, config, jaxtyped

from oarjax.rl.advantages import zero_variance_groups


def adding(shown, kind=int):
    @jaxtyped(typechecker=typechecks.check)
    def add(x: Float[Array, " n"], y: Float[Array, " n"], number: kind = 0) -> Float[Array, " n"]:
        return (x + y)[:shown]

    return add


def check_both(whole, cut):
    """Both check their arguments, and what they return: the one all of a sum of three, the other two numbers of it."""
    three, two = jnp.ones(3), jnp.ones(2)
    assert whole(three, three).shape == (3,)
    with pytest.raises(TypeCheckError, match="return value"):
        cut(three, three)
    for add in (whole, cut):
        with pytest.raises(TypeCheckError, match="parameters"):
            add(three, two)
        with pytest.raises(TypeCheckError, match="number"):
            add(two, two, "1")


def test_every_definition_is_checked_by_its_own_annotations():
    three, whole = jnp.ones(3), adding(3)
    count = len(typechecks._known)
    cut = adding(2)
    assert len(typechecks._known) == count
    check_both(whole, cut)
    assert adding(3, str)(three, three, "1").shape == (3,)
    with pytest.raises(TypeCheckError, match="number"):
        adding(3, str)(three, three, 1)


def adding_in_text(shown, within=lambda: None):
    """Like the modules of the library, whose annotations are texts."""

    def add(x, y, number=0):
        within()
        return (x + y)[:shown]

    text = 'Float[Array, " n"]'
    add.__annotations__ = {"x": text, "y": text, "number": "int", "return": text}
    return typechecks.jaxtyped(typechecker=typechecks.check)(add)


def test_annotations_in_text_are_read_once_and_check_the_same(unchecked):
    three, two = jnp.ones(3), jnp.ones(2)
    cut = adding_in_text(2)
    assert cut(three, two[:1]).shape == (2,)
    config.update("jaxtyping_disable", False)
    count = len(typechecks._written)
    inner = adding_in_text(2)
    whole = adding_in_text(3, within=lambda: inner(two, y=two))  # whose axis is its own
    assert len(typechecks._written) == count
    assert whole(two, two, number=1).shape == (2,)
    check_both(whole, cut)
    for add in (whole, cut):
        with pytest.raises(TypeError, match="missing a required argument: 'y'"):
            add(two)


def test_the_library_is_checked():
    checked = vars(zero_variance_groups)["__wrapped__"]
    key = checked.__module__, checked.__qualname__, checked.__code__, tuple(checked.__annotations__.items())
    assert key in typechecks._written
    with pytest.raises(TypeCheckError, match="group_size"):
        zero_variance_groups(jnp.ones(4), group_size="2")  # type: ignore[arg-type]
