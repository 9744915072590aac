"""Run a program on eight virtual devices, with what such programs share."""

import os
import subprocess
import sys

from conftest import virtual_devices

HEADER = """
import sys, numpy as np, jax, jax.numpy as jnp
from functools import partial
from jax.sharding import NamedSharding
from oarjax.system.mesh import make_mesh
from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.models.weights import divisible_pieces, logical_axes
from oarjax.models.policy import positions_of
from oarjax.models.sharding import batch_spec, check_divisible, param_specs

def logits(params, ids, policy):
    valid = jnp.ones(ids.shape, bool)
    return policy.unembed(params, policy.trunk(params, policy.embed(params, ids), positions_of(valid), valid)[0])

def loss(params, ids, policy):
    return jax.nn.log_softmax(logits(params, ids, policy))[..., 5].mean()

def gradient(policy, *args):
    return jax.device_get(jax.jit(jax.grad(partial(loss, policy=policy)))(*args))

def placed(cfg, folder, ids, mesh, dtype=jnp.float32):
    check_divisible(logical_axes(cfg), divisible_pieces(cfg), dict(mesh.shape))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(logical_axes(cfg)))
    params = load_params(folder, cfg, dtype=dtype, shardings=shardings)
    return params, jax.device_put(ids, NamedSharding(mesh, batch_spec()))

def same(found, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3), found, want)
"""


def on_eight_devices(program, *arguments):
    """Run a program in a process of its own, since the number of devices is fixed at start; return what it printed."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": virtual_devices(8),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    command = [sys.executable, "-c", HEADER + program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
