"""What a lag can bring: worked out by hand."""

import jax
import pytest

from oarjax.config.inputs import MeshConfig
from oarjax.system.devices import DeviceError
from oarjax.tools.plan.overlap import describe_overlap, overlap, overlap_of
from oarjax.tools.plan.worker import planned_mesh

SLICE = {"chips": 8, "tensor": 1, "sent": 4e9, "link": 1e9}


def test_what_does_not_grow_on_fewer_chips_is_what_a_lag_brings():
    """All of drawing reads weights: one chip of eight draws in the same 7 s, and the others learn in 7 * 8 / 7."""
    found = overlap(weights=7.0, rows=0.0, products=0.0, learning=7.0, **SLICE)
    assert found is not None
    assert (found.chips, found.gain, found.transfer) == (1, pytest.approx(14 / 8), 2.0)


def test_a_division_of_what_scales_with_the_chips_brings_nothing():
    """Half of the chips draw for 2 * 3 s, the others learn for 2 * 3 s."""
    found = overlap(weights=0.0, rows=3.0, products=0.0, learning=3.0, **SLICE)
    assert found is not None
    assert (found.chips, found.gain) == (4, pytest.approx(1.0))
    behind_products = overlap(weights=3.0, rows=0.0, products=3.0, learning=3.0, **SLICE)
    assert behind_products is not None
    assert behind_products.gain == pytest.approx(1.0)


def test_copies_of_the_policy_are_not_divided():
    found = overlap(weights=7.0, rows=0.0, products=0.0, learning=7.0, **SLICE | {"tensor": 4})
    assert found is not None
    assert (found.chips, found.gain) == (4, pytest.approx(1.0))
    assert overlap(weights=1.0, rows=0.0, products=0.0, learning=1.0, **SLICE | {"tensor": 8}) is None


def phase(name, seconds, products=0.0, method=None):
    return {"name": name, "method": method, "seconds_in_turn": seconds, "seconds": {"products": products}}


def test_a_plan_says_so_with_the_seconds_of_its_phases():
    phases = [phase("sample", 7.0, 1.0), phase("update", 3.5), phase("score", 90.0, method="oar_p")]
    plan = {"shapes": {"completion": 100}, "chip": {"bandwidth": 1e9, "link": 1e9}, "chips": 8, "phases": phases}
    plan["needs"] = {"weights": 1e10}
    times = {"sample": 1, "update": 2}
    found = overlap_of(plan, times, 7e9, tensor=1)
    assert found is not None
    assert (found["chips"], found["gain"]) == (1, pytest.approx(14 / 8))
    assert found["written"] == 20
    assert "drawing on 1 of 8 chips" in describe_overlap(found, chips=8, hosts=1)
    assert "at most 1.75 times as fast" in describe_overlap(found, chips=8, hosts=1)
    assert "no faster" in describe_overlap(found | {"gain": 0.9}, chips=8, hosts=1)
    assert "cannot be divided" in describe_overlap(None, chips=1, hosts=1)
    assert "on these 2 hosts a lag brings nothing" in describe_overlap(found, chips=8, hosts=2)
    asked = overlap_of(plan, times, 7e9, tensor=1, drawing=4)
    assert asked is not None
    assert (asked["chips"], asked["gain"]) == (4, pytest.approx(14 / 14))
    assert "drawing on 4 of 8 chips while the others learn makes steps no faster; the weights" in describe_overlap(
        asked, chips=8, hosts=1
    )
    assert "as if all chips drew and learned in turn" in describe_overlap(asked, chips=8, hosts=1)
    assert overlap_of(plan, times, 7e9, tensor=2, drawing=3) is None
    lengths = {"seconds": {"sample": 3.5, "update": 3.5}, "decode_steps": 50, "mean": 25}
    shorter = overlap_of(plan | {"lengths": lengths}, times, 7e9, tensor=1)
    assert shorter is not None
    assert shorter["gain"] == pytest.approx(7 / 4)


def test_a_mesh_of_the_devices_that_learn_is_no_plan_of_all():
    with pytest.raises(DeviceError, match=r"does not multiply to the 4 .* plan rollout.devices=null on a slice of"):
        planned_mesh(MeshConfig(data=2), 2, jax.local_devices() * 4)
