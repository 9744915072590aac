"""Orders of chips: aligned groups of four are tiles on one host, on every slice that a config ships for."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from math import prod

import pytest
from conftest import ROOT

from oarjax.config.loading import load_config
from oarjax.system.mesh import make_mesh, rollout_mesh
from oarjax.system.tiles import column_path, compact_order, flat_path
from oarjax.tools.plan.topology import ENVIRONMENT, TopologyError, find_slice, slice_devices

SHIPPED = sorted(p for p in (ROOT / "configs").glob("*.yaml") if "\nplan:" in p.read_text())


@dataclasses.dataclass(frozen=True)
class Core:
    coords: tuple[int, int, int]
    core_on_chip: int = 0


def sides(group):
    """The sides of the box around places, sorted."""
    return sorted(max(p[i] for p in group) - min(p[i] for p in group) + 1 for i in range(len(group[0])))


@pytest.mark.parametrize("size", [(2, 2), (4, 2), (2, 4), (4, 4), (4, 8), (8, 8), (16, 8), (16, 16)])
def test_flat_slices_are_walked_tile_by_tile(size):
    path = flat_path(*size)
    assert sorted(path) == [(x, y) for x in range(size[0]) for y in range(size[1])]
    for count, box in ((2, [1, 2]), (4, [2, 2]), (8, [2, 4])):
        if prod(size) >= count:
            assert all(sides(path[i : i + count]) == box for i in range(0, len(path), count))


@pytest.mark.parametrize("size", [(2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 8)])
def test_stacked_slices_are_walked_column_by_column(size):
    path = column_path(*size)
    assert len(set(path)) == prod(size)
    assert all(sum(abs(a - b) for a, b in zip(p, q)) <= 2 for p, q in itertools.pairwise(path))
    assert all(sides(path[i : i + 4]) == [1, 2, 2] for i in range(0, len(path), 4))
    assert all(sides(path[i : i + 8]) == [2, 2, 2] for i in range(0, len(path), 8))


def test_other_shapes_are_left_to_jax():
    assert flat_path(3, 6) is None
    assert flat_path(1, 4) is None
    assert column_path(1, 2, 4) is None
    assert compact_order([object()]) is None
    holes = [Core((0, 0, 0)), Core((1, 1, 0))]
    assert compact_order(holes) is None


def test_two_cores_of_a_chip_stay_together():
    cores = [Core((x, y, 5), core) for core in (1, 0) for y in (3, 2) for x in (0, 1)]
    order = compact_order(cores)
    assert [core.core_on_chip for core in order] == [0, 1] * 4
    assert [core.coords[:2] for core in order[::2]] == [(0, 2), (1, 2), (0, 3), (1, 3)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_tensor_groups_of_shipped_configs_are_tiles(path, monkeypatch):
    """On libtpu's own topologies: the devices that share a copy of the policy while sampling.

    A mesh of one axis has cubes of eight where chips are stacked; JAX lays out one of several axes, in planes of eight.
    """
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cfg = load_config(path)
    where = find_slice(cfg.plan.topology)
    try:
        devices = slice_devices(where)
    except TopologyError as error:
        pytest.skip(str(error))
    mesh = rollout_mesh(make_mesh(**cfg.mesh.model_dump(), devices=devices), tensor=cfg.rollout.tensor or 1)
    one_axis = sum(n != 1 for n in cfg.mesh.model_dump().values()) == 1
    cubes = devices[-1].coords[2] > 0 and one_axis
    box = {1: [1, 1, 1], 2: [1, 1, 2], 4: [1, 2, 2], 8: [2, 2, 2] if cubes else [1, 2, 4]}
    for group in mesh.devices.reshape(-1, mesh.shape["tensor"]):
        assert sides([d.coords for d in group]) == box[len(group)]
        assert len(group) > 4 or len({d.process_index for d in group}) == 1


@pytest.mark.slow
def test_weights_reach_tensor_groups_of_every_size_on_a_large_flat_slice():
    """In a process of its own: where the TPU's compiler finds no routes between the groups, it ends its process."""
    done = subprocess.run(
        [sys.executable, "-c", GATHERS],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "TopologyError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["2", "4", "8"]


GATHERS = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
from oarjax.tools.plan.topology import find_slice, slice_devices
from oarjax.system.mesh import make_mesh, rollout_mesh

mesh = make_mesh(slice=1, data=1, fsdp=-1, tensor=1, devices=slice_devices(find_slice("v5e-64")))
weights = jax.ShapeDtypeStruct((512, 1024), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp", None)))
for tensor in (2, 4, 8):
    kept = NamedSharding(rollout_mesh(mesh, tensor=tensor), PartitionSpec(None, "tensor"))
    jax.jit(lambda x: x * 2, out_shardings=kept).lower(weights).compile()
    print(tensor)
"""
