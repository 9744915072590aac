"""Write a run's weights for an engine, and read log-probs off them by our own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from oarjax.config.inputs import PolicyConfig
from oarjax.config.learning import EngineConfig, LoraConfig
from oarjax.data.hf import export, remove_half_written
from oarjax.data.streams import bucketed, pad_prompts
from oarjax.errors import ConfigError
from oarjax.models.qwen_config import QwenConfig
from oarjax.rollout.logps import token_logps
from oarjax.rollout.source import Batch
from oarjax.run.adapters import plain_params
from oarjax.run.layout import param_shardings
from oarjax.run.policy import bind_policy
from oarjax.sources.sync import Weights, shaken_params
from oarjax.storage.durable import storage_errors
from oarjax.system.processes import only_first
from oarjax.types import Params

PROMPTS, LENGTH = 8, 16
"""Prompts of a probe at least, and tokens of their completions."""


class Served(NamedTuple):
    """The model that an engine serves, and where its files come from."""

    model: QwenConfig
    mesh: Mesh
    source: Path
    stop_ids: tuple[int, ...]
    pad_id: int


def served_weights(
    engine: EngineConfig,
    policy: PolicyConfig,
    lora: LoraConfig,
    served: Served,
    prompts: Sequence[Sequence[int]],
    *,
    place: Callable[[Any, str], Any],
    fetch: Callable[[Any], Any],
) -> Weights:
    """Return how weights reach an engine.

    Args:
        prompts: what a probe may ask.
        place, fetch: those of a run.
    """
    model, mesh, folder = served.model, served.mesh, Path(engine.weights or "").expanduser().absolute()
    shardings, dtype = param_shardings(model, mesh), jnp.dtype(engine.dtype)
    rows = -(-PROMPTS // mesh.size) * mesh.size
    probe_prompts = [list(prompts[b % len(prompts)]) for b in range(rows)]
    batch = pad_prompts(probe_prompts, length=bucketed(probe_prompts, 8), pad_id=served.pad_id, problems=range(rows))

    def logps_in(name: str) -> Callable[[Params, Any, Any], Float[np.ndarray, "B T"]]:
        bound = bind_policy(policy.model_copy(update={"compute_dtype": name}), model, mesh, adapter_scale=lora.scale)

        @jax.jit
        def logps(params: Params, tokens: Any, valid: Any) -> Any:
            params = jax.tree.map(lambda x: x.astype(jnp.dtype(name)), params)
            head = {"completion_length": LENGTH, "temperature": 1.0, "head_chunk": policy.head_chunk}
            return token_logps(bound, params, tokens, valid, **head)[0]

        return lambda params, tokens, valid: fetch(logps(params, *place((tokens, valid), "rows")))

    def write(params: Params, number: int) -> str:
        at = folder / str(number)
        only_first(lambda: remove_half_written(at))
        try:
            with storage_errors(at):
                export(at, model, params, source=served.source, dtype=dtype, stop_ids=served.stop_ids, untie=True)
        except FileExistsError as error:
            raise ConfigError(f"rollout.engine.weights: {error}") from error
        return str(at)

    exact = logps_in("float32")
    return Weights(
        probe=Batch(batch, jax.random.key(0), 0, 0, 1, LENGTH),
        pad_id=served.pad_id,
        plain=partial(plain_params, lora, shardings=shardings),
        shake=jax.jit(shaken_params, out_shardings=shardings),
        write=write,
        exact=exact,
        rounded=exact if engine.dtype == "float32" else logps_in(engine.dtype),
    )
