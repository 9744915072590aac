"""One step of all rows' gated delta nets on a TPU, in place: every state is read once and written once.

``delta_net.recurrent`` reads a state twice, since what a token finds in it decides what it adds. Here a block of
states, as many of a row's heads as ``BLOCK`` bytes hold, stays on the chip for both; the kernel writes it back where
it lay among those of all layers. The sums are float32, in another order than there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from oarjax.models.delta_net import Rule
from oarjax.models.qwen_config import DeltaSizes
from oarjax.models.sharding import row_axes

BLOCK = 2 * 2**20
"""Bytes of a block, of which four are under way: two that are read, two that are written."""
NAME = "delta_step"
"""Start of the kernel's name in programs."""
LANES, SUBLANES = 128, 8


def step_for(sizes: DeltaSizes, rows: int, dtype: DTypeLike, mesh: Mesh | None) -> Rule | None:
    """Return ``step`` on this mesh; None where it is ``delta_net.recurrent``'s: on other platforms, of other sizes."""
    if mesh is None or mesh.devices.flat[0].platform != "tpu" or jnp.dtype(dtype) != jnp.float32:
        return None
    fits = sizes.value_dim % LANES == 0 and sizes.key_dim % LANES == 0 and sizes.value_heads % SUBLANES == 0
    return partial(step, mesh=mesh) if fits and rows % (mesh.size // mesh.shape.get("tensor", 1)) == 0 else None


def step(
    q: Float[Array, "B 1 Hv dk"],
    k: Float[Array, "B 1 Hv dk"],
    v: Float[Array, "B 1 Hv dv"],
    log_decay: Float[Array, "B 1 Hv"],
    rate: Float[Array, "B 1 Hv"],
    memory: Float[Array, "L B Hv dk dv"],
    *,
    number: Int[Array, ""],
    mesh: Mesh,
) -> tuple[Float[Array, "B 1 Hv dv"], Float[Array, "L B Hv dk dv"]]:
    """Return what ``recurrent`` returns for one layer's states, and the states of all layers, in the same memory."""
    q, k, v, log_decay, rate = (x[:, 0] for x in (q, k, v, log_decay, rate))
    decay = jnp.exp(log_decay)
    factors = jnp.stack([decay, decay * rate, jnp.sum(q * k, axis=-1)], axis=-1)
    row, states = PartitionSpec(row_axes(mesh.shape)), PartitionSpec(None, row_axes(mesh.shape))
    sharded_step = jax.shard_map(
        partial(device_step, interpret=mesh.devices.flat[0].platform != "tpu"),
        mesh=mesh,
        in_specs=(PartitionSpec(), row, row, row, row, states),
        out_specs=(row, states),
        check_vma=False,
    )
    out, memory = sharded_step(number.reshape(1).astype(jnp.int32), q, k, v * rate[..., None], factors, memory)
    return out[:, None], memory


def device_step(
    number: Int[Array, "1"],
    q: Float[Array, "B Hv dk"],
    k: Float[Array, "B Hv dk"],
    v: Float[Array, "B Hv dv"],
    factors: Float[Array, "B Hv 3"],
    memory: Float[Array, "L B Hv dk dv"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "L B Hv dk dv"]]:
    """Run one device's rows; v is scaled by the rate, and factors are (decay, decay * rate, q . k) of each head."""
    _, rows, heads, dk, dv = memory.shape
    limit = max(BLOCK // (dk * dv * memory.dtype.itemsize), SUBLANES)
    block = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= limit and (n % SUBLANES == 0 or n == heads))

    def kernel(number: Any, q: Any, k: Any, v: Any, factors: Any, memory_in: Any, out: Any, memory_out: Any) -> None:
        queries, keys = q[0].T, k[0].T  # a head's in a column, beside the rows of its state
        for head in range(block):
            at_head = slice(head, head + 1)
            state, key, (decay, decayed_rate, q_dot_k) = (
                memory_in[0, 0, head],
                keys[:, at_head],
                (factors[0, at_head, i : i + 1] for i in range(3)),
            )
            prediction = jnp.sum(state * key, axis=0, keepdims=True)
            error = v[0, at_head] - decayed_rate * prediction
            readout = jnp.sum(state * queries[:, at_head], axis=0, keepdims=True)
            out[0, at_head] = decay * readout + q_dot_k * error
            memory_out[0, 0, head] = decay * state + key * error

    def of_row(*last: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, *last), lambda row, part, number: (row, part, 0))

    states = pl.BlockSpec((1, 1, block, dk, dv), lambda row, part, number: (number[0], row, part, 0, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct((rows, heads, dv), v.dtype), jax.ShapeDtypeStruct(memory.shape, memory.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, heads // block),
            in_specs=[of_row(dk), of_row(dk), of_row(dv), of_row(3), states],
            out_specs=[of_row(dv), states],
        ),
        input_output_aliases={5: 1},
        name=NAME,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )
    return call(number, q, k, v, factors, memory)
