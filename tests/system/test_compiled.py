"""Two processes: the second start finds every compiled program on both."""

import json
import os
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, virtual_devices

from oarjax.system.compiled import cache_on_every_process, remove_broken_entries

PROGRAM = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import monitoring
from oarjax.system.devices import use_compilation_cache
from oarjax.system.processes import join_processes

number, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
join_processes(coordinator=f"127.0.0.1:{port}", processes=2, process=number, timeout=60)
own = use_compilation_cache(str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name.rsplit("/", 1)[-1]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.NamedSharding(mesh, jax.P("data"))
rows = jax.make_array_from_callback((2, 8), split, lambda _: np.ones((1, 8), np.float32))
total = jax.jit(lambda x: jnp.sin(x).sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(rows)
hits = events.count("cache_hits")
print(json.dumps({"folder": own.name, "hits": hits, "misses": events.count("compile_requests_use_cache") - hits}))
"""


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def start_both(folders, port):
    environment = os.environ | {"XLA_FLAGS": virtual_devices(1), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, "-c", PROGRAM, str(n), str(port), str(folder)] for n, folder in enumerate(folders)]
    both = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for c in commands]
    try:
        outputs = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], outputs[0][1][-2000:] + outputs[1][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.slow
def test_the_second_start_compiles_nothing_on_either_process(tmp_path):
    first = start_both([tmp_path, tmp_path], free_port())
    assert [result["folder"] for result in first] == ["process-0-of-2", "process-1-of-2"]
    assert all(result["misses"] > 0 and result["hits"] == 0 for result in first)
    second = start_both([tmp_path, tmp_path], free_port())
    assert [result["misses"] for result in second] == [0, 0]
    assert all(result["hits"] > 0 for result in second)


def test_one_process_keeps_its_folder(tmp_path):
    assert cache_on_every_process(tmp_path) == tmp_path
    assert not list(tmp_path.iterdir())


ALONE = """
import sys, warnings
import jax, jax.numpy as jnp
from jax import monitoring
from oarjax.system.devices import use_compilation_cache

use_compilation_cache(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name.rsplit("/", 1)[-1]))
warnings.simplefilter("error")
jax.jit(lambda x: jnp.sin(x).sum())(jnp.ones(8))
print(events.count("compile_requests_use_cache") - events.count("cache_hits"))
"""


def test_a_cache_with_torn_entries_heals(tmp_path):
    def misses() -> int:
        command = [sys.executable, "-c", ALONE, str(tmp_path)]
        environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return int(done.stdout)

    first = misses()
    assert first > 0
    entries = list(tmp_path.glob("*-cache"))
    assert len(entries) == first
    entries[0].write_bytes(entries[0].read_bytes()[:100])
    assert misses() == 1, "the torn one is compiled again, without a warning"
    assert misses() == 0, "and was written again"
    entries[0].write_bytes(b"")
    assert remove_broken_entries(tmp_path) == 1
    assert remove_broken_entries(tmp_path) == 0
    assert len(list(tmp_path.glob("*-cache"))) == first - 1
    assert remove_broken_entries(tmp_path / "nothing") == 0
