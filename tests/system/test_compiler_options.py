"""Programs that learn are compiled with options on a TPU; one that its compiler does not know is left out."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from oarjax.system import compiler
from oarjax.system.mesh import make_mesh
from oarjax.tools.plan.topology import find_slice, slice_devices

THRESHOLD = "xla_jf_spmd_threshold_for_windowed_einsum_mib"


def everywhere(devices) -> NamedSharding:
    return NamedSharding(
        make_mesh(slice=1, data=1, expert=1, fsdp=len(devices), tensor=1, devices=devices), PartitionSpec()
    )


def test_a_cpu_has_none():
    assert compiler.compiler_options(everywhere(jax.devices())) == {}


@pytest.mark.slow
def test_the_compiler_of_a_tpu_takes_them_and_does_without_what_it_does_not_know(monkeypatch):
    chips = everywhere(slice_devices(find_slice("v5e-4"), slices=1))
    assert compiler.compiler_options(chips) == {THRESHOLD: "1000000"}
    monkeypatch.setattr(compiler, "OPTIONS", {"tpu": {THRESHOLD: "1000000", "xla_tpu_no_such_option": "1"}})
    with pytest.warns(UserWarning, match="has no option xla_tpu_no_such_option"):
        assert compiler.compiler_options(chips) == {THRESHOLD: "1000000"}
