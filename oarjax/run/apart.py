"""Draw rollouts on devices of their own, while the others learn: ``rollout.devices``, for runs with ``update.lag``.

The last devices of the process have a mesh and a sampler of their own. The weights go there once per iteration: laid
out for sampling where the policy learns, in the compute dtype, then sent. Evaluations draw where the policy learns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from oarjax.config.inputs import MeshConfig, PolicyConfig
from oarjax.config.learning import LoraConfig, RolloutConfig
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.sharding import check_rows
from oarjax.rollout.segments import SegmentedSampler
from oarjax.rollout.source import Batch, EndedRows, Report, SamplerSource, Spent, Turn
from oarjax.run.layout import rollout_layout
from oarjax.step.programs import RolloutLayout
from oarjax.system.devices import DeviceError
from oarjax.system.mesh import make_mesh
from oarjax.types import Params


class Apart(NamedTuple):
    """The sampler on devices of its own."""

    layout: RolloutLayout
    sample: SegmentedSampler

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of what all of its devices hold."""
        return NamedSharding(self.layout.rows.mesh, PartitionSpec())


def learning_mesh(sizes: MeshConfig, drawing: int | None) -> Mesh:
    """Arrange the devices for training: all, or all but the last ``drawing``.

    Raises:
        DeviceError: none is left to learn, there are several processes, or the axes do not multiply to their number.
    """
    if drawing is None:
        return make_mesh(**sizes.model_dump())
    devices, field = jax.devices(), f"rollout.devices: {drawing}"
    if jax.process_count() > 1:
        raise DeviceError(
            f"{field}, in a run of {jax.process_count()} processes, which draw and learn in turn; set null and "
            "update.lag=0, or run one process"
        )
    if drawing >= len(devices):
        raise DeviceError(
            f"{field}, and there are {len(devices)} devices, of which one at least has to learn; lower it, or set null"
        )
    try:
        return make_mesh(**sizes.model_dump(), devices=devices[:-drawing])
    except DeviceError as error:
        raise DeviceError(f"{error}; {field} others draw") from error


def open_apart(
    policy: PolicyConfig,
    rollout: RolloutConfig,
    lora: LoraConfig,
    model: QwenConfig,
    mesh: Mesh,
    sampler: SegmentedSampler,
) -> Apart:
    """Build on the devices of ``rollout.devices`` what ``sampler`` is on those of ``mesh``.

    Raises:
        DeviceError: copies of the policy do not divide the devices.
        ShardingError: the devices do not divide the prompts or slots.
    """
    count, tensor, expert = rollout.devices or 0, rollout.tensor or mesh.shape["tensor"], mesh.shape["expert"]
    check_copies(count, tensor * expert)
    devices = jax.devices()[-count:]
    rollout_mesh = make_mesh(slice=1, data=-1, fsdp=1, tensor=tensor, expert=expert, devices=devices)
    layout = rollout_layout(policy, rollout, lora, model, rollout_mesh)
    for name, rows in {"rollout.prompts": rollout.prompts, "rollout.slots": rollout.slots}.items():
        if rows is not None:
            remedy = ", another rollout.devices, or a larger rollout.tensor"
            check_rows(rows, dict(layout.rows.mesh.shape), what=name, remedy=remedy)
    return Apart(layout, sampler.elsewhere(layout.policy, layout.rows))


def check_copies(count: int, size: int) -> None:
    """Check that copies of the policy, on ``size`` devices each, divide those that draw.

    Raises:
        DeviceError: they do not.
    """
    if count % size:
        raise DeviceError(
            f"rollout.devices: expected a multiple of rollout.tensor x mesh.expert = {size}, the devices of one copy "
            f"of the policy, got {count}; set a multiple, or another rollout.tensor"
        )


def describe_mesh(mesh: Mesh, apart: Apart | None) -> str:
    """Describe the axes of the devices that learn, and how many others draw."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return axes if apart is None else f"{axes}; rollouts on {apart.everywhere.mesh.size} more"


class ApartSource(SamplerSource):
    """The sampler on devices of its own as a source, which may draw in a thread.

    Args:
        prepare: training layout -> params for sampling, where the policy learns.
        fetch: device -> numpy.
    """

    def __init__(self, apart: Apart, prepare: Callable[[Params], Params], fetch: Callable[[Any], Any]) -> None:
        place = partial(jax.device_put, device=apart.layout.rows)
        super().__init__(apart.sample, self._counts, prepare, place, fetch)
        self._apart, self._cancelled, self._sending = apart, threading.Event(), 0.0

    def ready(self) -> None:
        """Send the parameters to the devices that draw; those that learn may change theirs afterwards."""
        if self._prepared is not None:
            return
        start = time.perf_counter()
        params = jax.device_put(self._prepare(self._params), self._apart.layout.params)
        self._prepared, self._params = jax.block_until_ready(params), None
        self._sending += time.perf_counter() - start

    def cancel(self) -> None:
        """Give up what is being drawn, where rows end."""
        self._cancelled.set()

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Draw all rows of a batch.

        Raises:
            InterruptedError: it was cancelled.
        """

        def keep(ended_rows: EndedRows) -> None:
            if self._cancelled.is_set():
                raise InterruptedError("rollout.devices: the run stopped while rows were drawn")
            if report is not None:
                report(ended_rows)

        return super().draw(batch._replace(key=jax.device_put(batch.key, self._apart.everywhere)), keep, rows=rows)

    def _ready(self) -> Any:
        self.ready()
        return self._prepared

    def _counts(self) -> Spent:
        sending, self._sending = self._sending, 0.0
        return self._apart.sample.spent().plus(Spent(syncing=sending))
