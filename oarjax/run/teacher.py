"""Read the policy that a run's KL term compares with, where it is not the policy that training starts from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from oarjax.config.inputs import PolicyConfig
from oarjax.config.learning import RECORDED
from oarjax.data.hf import load_params, read_config
from oarjax.data.hf_files import CheckpointError
from oarjax.data.tokenizer import load_tokenizer
from oarjax.errors import ConfigError
from oarjax.models.policy import Policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import abstract_params
from oarjax.run.layout import param_shardings
from oarjax.run.policy import bind_policy, compute_dtype_of
from oarjax.types import Params


class Teacher(NamedTuple):
    """Hold a teacher's architecture, the folder of its weights, and its functions; only its log-probs are computed."""

    model: QwenConfig
    source: Path
    policy: Policy

    def load(self, settings: PolicyConfig, mesh: Mesh) -> Params:
        """Read the weights into the training layout, in the compute dtype."""
        dtype = compute_dtype_of(settings, mesh)
        return load_params(self.source, self.model, dtype=dtype, shardings=param_shardings(self.model, mesh))


def read_teacher(path: str | None, settings: PolicyConfig, mesh: Mesh) -> Teacher | None:
    """Read the teacher of ``loss.teacher``; None without one, or where its log-probs are recorded.

    Raises:
        UserError: there is no such policy.
    """
    if path is None or path == RECORDED:
        return None
    try:
        model, source = read_config(path)
    except CheckpointError as error:
        raise CheckpointError(f"loss.teacher: {error}") from error
    return Teacher(model, source, bind_policy(settings, model, mesh, adapter_scale=1.0))


def teacher_shapes(path: str | None, settings: PolicyConfig, mesh: Mesh) -> Params | None:
    """Return the shapes of a teacher's params, as ``Teacher.load`` lays them out; None without one."""
    teacher = read_teacher(path, settings, mesh)
    if teacher is None:
        return None
    shapes = abstract_params(teacher.model, dtype=compute_dtype_of(settings, mesh))
    shardings = param_shardings(teacher.model, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def policy_of(teacher: Teacher | None) -> Policy | None:
    """Return a teacher's functions, None without one."""
    return teacher and teacher.policy


def check_teacher(path: str | None, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that a teacher reads and writes the policy's tokens.

    Raises:
        ConfigError: its tokenizer has other tokens.
    """
    if path not in (None, RECORDED) and load_tokenizer(read_config(path)[1]).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"loss.teacher: {path} has other tokens than the policy, and they are compared token by token; set a "
            "teacher with the policy's tokenizer"
        )
