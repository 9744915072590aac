"""Run several processes as one: start together, let the first write, agree on decisions, share arrays.

Every process runs the same programs in the same order. Every fact that decides what runs next (verdicts, the existence
of a file, a request to stop) is therefore agreed on here first. With a single process all of this costs nothing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import Int

from oarjax.errors import UserError
from oarjax.system.devices import DeviceError
from oarjax.types import Grades

GRACE = 60  # seconds that JAX waits longer than we do
METADATA = "http://{}/computeMetadata/v1/instance/attributes/{}"


def join_processes(*, coordinator: str | None, processes: int | None, process: int | None, timeout: int) -> None:
    """Join the processes that share the run's mesh; call before anything touches a device.

    With a ``coordinator`` (host:port of process 0) these settings are used. Without it the hosts of a TPU pod find
    each other, and elsewhere nothing happens. Returns once all processes have joined.

    If they have not all joined within ``timeout`` seconds, this process ends with an error message and exit code 2.

    Raises:
        DeviceError: JAX cannot start, for example because the port is in use.
    """
    if jax.distributed.is_initialized():
        return
    settings: dict[str, Any] = {}
    if coordinator is not None:
        settings = {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
        settings["cluster_detection_method"] = "deactivate"
    elif pod_hosts() == 1:
        return
    who = f"process {process} of {processes}" if settings else "this host of the TPU pod"
    where = coordinator or "the first host"
    late = DeviceError(
        f"distributed: {who} did not reach the others at {where} within {timeout} s. Start the same command on every "
        "host, each with its own distributed.process, check that the port is free and reachable, or raise "
        "distributed.timeout"
    )
    watch = threading.Timer(timeout, _give_up, [late])
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(**settings, initialization_timeout=timeout + GRACE)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"distributed: {who} could not join the others at {where}: {error}") from error
    finally:
        watch.cancel()


def _give_up(error: DeviceError) -> None:
    """Print the error and end the process, before JAX ends it with a C++ stack trace."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(2)


def pod_hosts(devices: Path = Path("/dev")) -> int:
    """Count the hosts of this machine's TPU pod; 1 if it is not part of a pod."""
    if find_spec("libtpu") is None or not any((devices / d).exists() for d in ("accel0", "vfio/0")):
        return 1
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    slices = os.environ.get("MEGASCALE_NUM_SLICES")
    if hosts is None:
        hosts = _metadata("worker-network-endpoints")
        lines = dict(line.split(":", 1) for line in _metadata("tpu-env").splitlines() if ":" in line)
        slices = slices or lines.get("MEGASCALE_NUM_SLICES", "").strip(" '\"")
    return len(hosts.split(",")) * int(slices or 1)


def _metadata(name: str) -> str:
    """Read an attribute from Google Cloud's metadata server; empty if there is no such server."""
    if "TPU_SKIP_MDS_QUERY" in os.environ:
        return ""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(METADATA.format(server, name), headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def is_first() -> bool:
    """Return True on the process that writes and prints."""
    return jax.process_index() == 0


def from_first(decide: Callable[[], int]) -> int:
    """Decide on the first process alone, and return its decision on all."""
    if jax.process_count() == 1:
        return decide()
    return int(multihost_utils.broadcast_one_to_all(np.int32(decide() if is_first() else 0)))


def gather(mine: Any) -> list[Any]:
    """Return every process's value, in the order of the processes; values must be JSON."""
    if jax.process_count() == 1:
        return [mine]
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    room = 1 << int(sizes.max() - 1).bit_length()  # a power of two, so that few shapes are compiled
    buffer = np.zeros(room, np.uint8)
    buffer[: len(text)] = text
    return [json.loads(row[:size].tobytes()) for row, size in zip(multihost_utils.process_allgather(buffer), sizes)]


def wait_for_all(name: str) -> None:
    """Block until every process has reached this call."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def only_first(act: Callable[[], object]) -> None:
    """Call ``act`` on the first process alone; return on every process once it has returned."""
    if is_first():
        act()
    wait_for_all("only_first")


def check_shared(folder: Path) -> None:
    """Check that every process sees the same folder.

    Raises:
        DeviceError: some processes do not; raised on every process, with their numbers.
    """
    if jax.process_count() == 1:
        return
    token = from_first(lambda: secrets.randbits(30))
    probe = folder / f".processes-{token}"
    only_first(probe.touch)
    blind = [number for number, sees in enumerate(gather(probe.exists())) if not sees]
    only_first(lambda: probe.unlink(missing_ok=True))
    if blind:
        raise DeviceError(
            f"run_dir: process {', '.join(map(str, blind))} of {jax.process_count()} does not see the files that "
            f"process 0 wrote to {folder}; put run_dir on storage that all hosts share, such as a mounted bucket"
        )


class PeerLost(UserError, RuntimeError):
    """Raised when another process of the run has ended; exit code 75 if the same commands resume, else 1."""


LOST = re.compile(r"gloo|connection (closed|reset)|socket closed|broken pipe|heartbeat|coordination|unavailable", re.I)
"""Words of JAX's errors after another process has ended."""


@contextmanager
def peers_watched(resumable: Callable[[], bool]) -> Iterator[None]:
    """Turn JAX's errors after the loss of another process into one sentence.

    Only errors of a program that waits for the other process come here; ``oarjax.system.peers`` notices the others.
    Where JAX notices first, as after the loss of the process that coordinates the others, it ends this process with a
    signal (exit code 128 or above).

    Args:
        resumable: returns True if the run has a checkpoint, from which the same commands resume.

    Raises:
        PeerLost: instead of JAX's error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not LOST.search(str(error)):
            raise
        code, message = lost_message(resumable, " ".join(str(error).split())[:160])
        lost = PeerLost(message)
        lost.exit_code = code
        raise lost from None


def lost_message(resumable: Callable[[], bool], cause: str) -> tuple[int, str]:
    """Return an exit code, 75 if the same commands resume the run, and a sentence on the loss of another process."""
    saved = resumable()
    remedy = "the same command on every host resumes the run" if saved else "no checkpoint is there: start again"
    message = f"distributed: another process of the run ended or cannot be reached ({cause}); see its log; {remedy}"
    return (75 if saved else 1), message


def share(rows: int) -> Int[np.ndarray, "r"]:
    """Return the numbers of this process's share of ``rows`` rows."""
    return np.array_split(np.arange(rows), jax.process_count())[jax.process_index()]


def gather_grades(mine: Grades) -> Grades:
    """Join every process's grades of its share into the grades of all rows."""
    if jax.process_count() == 1:
        return mine
    scores = {name: values.tolist() for name, values in mine.per_reward.items()}
    parts = gather([mine.rewards.tolist(), scores, mine.verdicts, mine.answers, mine.notes])
    rewards, _, verdicts, answers, notes = ([x for part in parts for x in part[i]] for i in range(5))
    return Grades(
        rewards=np.asarray(rewards, np.float32),
        per_reward={n: np.asarray([x for part in parts for x in part[1][n]], np.float32) for n in scores},
        verdicts=verdicts,
        answers=answers,
        notes=notes,
    )


def values_here(tree: Any, rows: Int[np.ndarray, "r"]) -> tuple[Int[np.ndarray, "h"], Any]:
    """Fetch those of the rows (ascending) that this process's own devices hold, with their numbers.

    The arrays are divided along axis 0 alone, all in the same way. Nothing is sent between processes.
    """
    first = jax.tree.leaves(tree)[0]
    if isinstance(first, np.ndarray) or first.is_fully_addressable:
        return rows, jax.tree.map(lambda x: np.asarray(x)[rows], tree)
    starts = [shard.index[0].start or 0 for shard in first.addressable_shards]
    ends = [start + shard.data.shape[0] for start, shard in zip(starts, first.addressable_shards)]
    _, where = np.unique(starts, return_index=True)  # one of the devices that hold the same
    among = [rows[(rows >= starts[i]) & (rows < ends[i])] for i in where]

    def fetched(x: jax.Array) -> np.ndarray:
        data = [np.asarray(x.addressable_shards[i].data) for i in where]
        return np.concatenate([block[local_rows - starts[i]] for block, local_rows, i in zip(data, among, where)])

    return np.concatenate(among), jax.tree.map(fetched, tree)


def to_host(tree: Any) -> Any:
    """Fetch whole arrays as numpy on every process."""
    return jax.tree.map(_whole, tree) if jax.process_count() > 1 else jax.device_get(tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return jax.device_get(x)
    return multihost_utils.process_allgather(x, tiled=True)


def to_devices(tree: Any, sharding: Sharding) -> Any:
    """Lay out numpy arrays, equal on every process, over all devices; each process sends its devices their parts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__), tree)
