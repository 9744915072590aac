"""Rings and lines among the chips of a slice, by hand."""

import pytest

from oarjax.system.mesh import make_mesh, rollout_mesh
from oarjax.tools.plan.links import Ways, closed_sides, collective_seconds, link_table, ways_of
from oarjax.tools.plan.topology import ENVIRONMENT, TopologyError, find_slice, slice_devices


def block(*sides):
    places = [()]
    for side in sides:
        places = [(*place, at) for place in places for at in range(side)]
    return places


def test_only_the_vendors_tori_are_closed():
    closed = {name: closed_sides(find_slice(name)) for name in ("v5e-64", "v5e-256", "v6e:8x16", "v5p-32", "v5p-128")}
    assert closed == {
        "v5e-64": (False, False),
        "v5e-256": (True, True),
        "v6e:8x16": (False, True),
        "v5p-32": (False, False, False),
        "v5p-128": (True, True, True),
    }


@pytest.mark.parametrize(
    ("places", "sides", "closed", "ways"),
    [
        (block(8), (8, 8), (False, False), None),
        ([(x, 0) for x in range(8)], (8, 8), (False, False), Ways(1, 1, 7)),  # a line
        ([(x, 0) for x in range(16)], (16, 16), (True, True), Ways(2, 2, 8)),  # a ring, both ways around
        (block(2, 2), (8, 8), (False, False), Ways(2, 2, 2)),  # a ring around a tile
        (block(8, 8), (8, 8), (False, False), Ways(2, 2, 14)),
        (block(16, 16), (16, 16), (True, True), Ways(2, 4, 16)),
        (block(4, 4, 4), (4, 4, 4), (True,) * 3, Ways(2, 6, 6)),
        ([(0, 0), (1, 0)], (16, 16), (True, True), Ways(1, 1, 1)),  # two chips share one link
        ([(0, 0), (2, 0), (4, 0), (6, 0)], (8, 8), (False, False), Ways(0.5, 0.5, 6)),  # past others, who send too
        ([(0, 0), (1, 1), (2, 0)], (8, 8), (False, False), Ways(1, 1, 2)),  # no block
    ],
)
def test_ways_of_a_group(places, sides, closed, ways):
    if ways is None:  # coordinates of another kind of slice
        with pytest.raises(ValueError, match="zip"):
            ways_of(places, sides=sides, closed=closed)
    else:
        assert ways_of(places, sides=sides, closed=closed) == ways


@pytest.mark.parametrize(
    ("places", "ways"),
    [
        (block(2, 2, 1) * 2, Ways(2, 2, 2)),  # both devices of every chip
        (block(2, 2, 1), Ways(1, 1, 2)),  # one of every chip: the others send over the same links
        ([(0, 0, 0)] * 2, Ways(6, 6, 1)),  # within a chip
        ([(0, 0, 0), (1, 0, 0)] * 2, Ways(1, 1, 1)),
        ([(0, 0, 0), (1, 0, 0)], Ways(0.5, 0.5, 1)),
    ],
)
def test_two_devices_of_a_chip_share_its_links(places, ways):
    assert ways_of(places, sides=(2, 2, 1), closed=(False,) * 3, devices=2) == ways


def test_seconds_of_collectives():
    ways = {4: Ways(ring=2, every=2, hops=2)}
    found = collective_seconds({4: 400.0, 2: 30.0}, {4: 5, 2: 1}, ways, link=10.0, hop=0.5)
    assert found == 400 / 20 + 5 * 2 * 0.5 + 30 / 10 + 0.5  # two neighbours that no axis names: one link


@pytest.mark.parametrize(
    ("name", "fsdp", "tensor", "ways"),
    [
        ("v5e-64", 64, 4, {4: Ways(2, 2, 2), 64: Ways(2, 2, 14)}),
        ("v5p-128", 64, 8, {8: Ways(2, 3, 3), 64: Ways(2, 6, 6)}),
        ("v6e-16", 16, 4, {4: Ways(2, 2, 2), 16: Ways(2, 2, 6)}),
        ("v7x-16", 16, 4, {4: Ways(1, 1, 1), 16: Ways(2, 3, 3)}),  # two devices per chip
    ],
)
def test_groups_of_shipped_slices(name, fsdp, tensor, ways, monkeypatch):
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    try:
        devices = slice_devices(find_slice(name))
    except TopologyError:
        pytest.skip("libtpu is not installed (extra aot)")
    mesh = make_mesh(slice=1, data=1, fsdp=fsdp, tensor=1, devices=devices)
    sampling = link_table(rollout_mesh(mesh, tensor=tensor), find_slice(name))
    assert {n: way for n, way in (sampling | link_table(mesh, find_slice(name))).items() if n in ways} == ways
