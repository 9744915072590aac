"""Choosing devices and meshes, the compilation cache, and what a device can do at best."""

import os
import types

import jax
import jax.numpy as jnp
import pytest
from fake_chips import Chip

from oarjax.system.devices import (
    DeviceError,
    choose_platform,
    only_cpu,
    peak_flops,
    use_compilation_cache,
    with_large_pages,
)
from oarjax.system.mesh import make_mesh, rollout_mesh


def fake_device(monkeypatch, platform: str, kind: str, count: int = 1) -> None:
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device] * count)
    monkeypatch.setattr(jax, "device_count", lambda: count)


def test_auto_takes_what_there_is():
    assert choose_platform("auto") == choose_platform("cpu") == "cpu"


def test_an_absent_device_is_an_error_not_a_slow_run(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(DeviceError, match="or set device: cpu; JAX_PLATFORMS=cpu chooses it"):
        choose_platform("tpu")
    with pytest.raises(DeviceError, match=r"expected tpu, but JAX finds cpu .*oarjax\[tpu\].*or set device: cpu"):
        choose_platform("tpu")
    with pytest.raises(DeviceError, match=r"expected gpu, but JAX finds cpu .*oarjax\[cuda\].*or set device: cpu"):
        choose_platform("gpu")
    fake_device(monkeypatch, "gpu", "NVIDIA H200")
    with pytest.raises(
        DeviceError, match=r"expected cpu, but JAX finds gpu \(NVIDIA H200\). Set JAX_PLATFORMS=cpu, or set"
    ):
        choose_platform("cpu")

    def broken():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(jax, "devices", broken)
    with pytest.raises(DeviceError, match="JAX finds no usable device: the driver is too old"):
        choose_platform("auto")


def test_libtpu_is_not_asked_where_no_chip_of_google_is(tmp_path, monkeypatch):
    monkeypatch.setattr("oarjax.system.devices.find_spec", lambda name: name == "libtpu" or None)
    monkeypatch.setattr("oarjax.system.devices.entry_points", lambda group: ())
    for name in [name for name in os.environ if name.startswith(("TPU_", "JAX_FORCE_TPU"))]:
        monkeypatch.delenv(name)
    for name in ("TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"):  # which importing JAX sets with libtpu installed
        monkeypatch.setenv(name, "1")
    assert not only_cpu(tmp_path)  # a container that hides the bus
    vendor = tmp_path / "sys/bus/pci/devices/0/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1ae0\n")
    assert not only_cpu(tmp_path)
    vendor.write_text("0x8086\n")
    assert only_cpu(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
        assert not only_cpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "accel0").touch()
    assert not only_cpu(tmp_path)
    (tmp_path / "dev" / "accel0").unlink()
    monkeypatch.setattr("oarjax.system.devices.find_spec", lambda name: None)  # then JAX looks for nothing
    assert not only_cpu(tmp_path)


def test_mesh_over_one_device_has_all_axes():
    shape = make_mesh(slice=1, data=-1, fsdp=1, tensor=1).shape
    assert dict(shape) == {"slice": 1, "data": jax.device_count(), "expert": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (
            {"data": 3, "fsdp": 1, "tensor": 1},
            "'data': 3.* does not multiply to the 8 devices here: 3 does not divide 8; set sizes",
        ),
        (
            {"data": -1, "fsdp": 3, "tensor": 1},
            "'fsdp': 3.* does not multiply to the 8 devices here: 3 does not divide 8; set sizes that do",
        ),
        ({"data": -1, "fsdp": 16, "tensor": 1}, "'fsdp': 16.* does not multiply to the 8 devices"),
        ({"data": 2, "fsdp": 2, "tensor": 1}, "does not multiply to the 8 devices here; set one axis to -1"),
        ({"data": -1, "fsdp": -1, "tensor": 1}, "expected positive sizes and at most one -1"),
        ({"data": 0, "fsdp": 1, "tensor": 1}, "expected positive sizes and at most one -1"),
    ],
)
def test_mesh_that_does_not_fit(axes, says):
    with pytest.raises(DeviceError, match=f"mesh: .*{says}"):
        make_mesh(slice=1, **axes, devices=[Chip("cpu", n) for n in range(8)])


def test_the_slice_axis_is_the_slice():
    """Devices come interleaved; each place on the axis has one slice, whole."""
    chips = [Chip("tpu", n) for n in range(8)]
    mesh = make_mesh(slice=-1, data=1, fsdp=2, tensor=2, devices=chips)
    assert dict(mesh.shape) == {"slice": 2, "data": 1, "expert": 1, "fsdp": 2, "tensor": 2}
    for place, part in enumerate(mesh.devices):
        assert {chip.slice_index for chip in part.flat} == {place}
    assert {chip.id for chip in mesh.devices.flat} == set(range(8))
    with pytest.raises(
        DeviceError, match=r"mesh.slice: expected 2, since the 8 devices are in 2 slices, got 1; set mesh.slice=2"
    ):
        make_mesh(slice=1, data=2, fsdp=2, tensor=2, devices=chips)


def test_slices_of_other_devices_are_a_plain_outer_axis():
    mesh = make_mesh(slice=2, data=1, fsdp=2, tensor=2, devices=[Chip("cpu", n, "cpu") for n in range(8)])
    assert [chip.id for chip in mesh.devices.flat] == list(range(8))


def test_rollout_mesh_has_the_same_devices_in_the_same_order():
    mesh = make_mesh(slice=2, data=1, fsdp=2, tensor=2, devices=[Chip("cpu", n, "cpu") for n in range(8)])
    sampling = rollout_mesh(mesh, tensor=4)
    assert dict(sampling.shape) == {"data": 2, "expert": 1, "tensor": 4}
    assert [*sampling.devices.flat] == [*mesh.devices.flat]
    with pytest.raises(DeviceError, match=r"rollout.tensor: 3 does not divide the 8 devices; set a divisor, or null"):
        rollout_mesh(mesh, tensor=3)


def test_compilation_cache(tmp_path):
    assert use_compilation_cache(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a" / "b")
    assert use_compilation_cache(None) is None
    assert jax.config.jax_enable_compilation_cache is False
    use_compilation_cache(str(tmp_path / "a"))
    assert jax.config.jax_enable_compilation_cache is True
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError, match=r"compilation_cache: cannot write to .*; set another folder or null"):
        use_compilation_cache(str(tmp_path / "file" / "below"))


def test_peak_flops(monkeypatch):
    measured, source = peak_flops(jnp.float32)
    assert measured > 1e8
    assert source.startswith("measured")
    fake_device(monkeypatch, "tpu", "TPU v5 lite", count=4)
    assert peak_flops(jnp.bfloat16) == (4 * 197e12, "data sheet")


@pytest.mark.parametrize("given", ["glibc.malloc.hugetlb=2", "glibc.malloc.hugetlb=0:glibc.malloc.check=1"])
def test_a_users_setting_of_memory_pages_stays(given):
    assert with_large_pages({"GLIBC_TUNABLES": given, "A": "b"}) == {"GLIBC_TUNABLES": given, "A": "b"}


def test_large_memory_pages_are_asked_for():
    assert with_large_pages({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
