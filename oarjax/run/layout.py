"""Lay out a run's arrays over its devices: one layout for training, another for sampling."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from oarjax.config.inputs import PolicyConfig
from oarjax.config.learning import LoraConfig, LossConfig, RolloutConfig
from oarjax.config.schema import Config
from oarjax.config.section import changed
from oarjax.errors import ConfigError
from oarjax.kernels.decode_attention import kernel_problem
from oarjax.models.lora import merge_adapters
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.sharding import (
    ROLLOUT,
    batch_spec,
    check_divisible,
    param_specs,
    repeated_kv_heads,
    training_rules,
    undivided,
)
from oarjax.models.weights import divisible_pieces, logical_axes, sampling_params
from oarjax.run.adapters import trained_axes, trained_shapes
from oarjax.run.checks import check_batches
from oarjax.run.policy import bind_policy, compute_dtype_of
from oarjax.step.programs import RolloutLayout, Shardings, device_rows, prompt_rows_of
from oarjax.system.compiler import compiler_options
from oarjax.system.mesh import rollout_mesh
from oarjax.types import Params, TrainState


def check_layouts(cfg: Config, model: QwenConfig, mesh: Mesh) -> None:
    """Check that the mesh divides the policy and the batches, in training and in sampling.

    Raises:
        ConfigError: a setting of experts, and the policy has none, key heads that rollout.attention cannot hold, or
            cuDNN's attention without a GPU or in float32.
        ShardingError: it does not divide an axis; names the axis, both sizes and the remedy.
        DeviceError: rollout.tensor does not divide the devices.
    """
    rules = training_rules(kv_heads=model.num_key_value_heads, tensor=mesh.shape["tensor"])
    if model.experts is None:
        _refuse_experts(cfg.policy, cfg.loss, mesh)
    check_divisible(logical_axes(model), divisible_pieces(model), dict(mesh.shape), rules=rules)
    sampling = rollout_mesh(mesh, tensor=cfg.rollout.tensor or mesh.shape["tensor"])
    wide = sampling_model(model, tensor=sampling.shape["tensor"])
    what = "the mesh of rollouts (rollout.tensor)"
    check_divisible(logical_axes(wide), divisible_pieces(wide), dict(sampling.shape), rules=ROLLOUT, what=what)
    check_batches(cfg, dict(mesh.shape), dict(sampling.shape))
    _refuse_cudnn(cfg.policy, mesh)
    if cfg.rollout.attention == "kernel":
        sizes = wide.num_key_value_heads, wide.head_dim, compute_dtype_of(cfg.policy, sampling)
        if problem := kernel_problem(*sizes, sampling):
            raise ConfigError(f"rollout.attention: {problem}")
    rows = device_rows(NamedSharding(mesh, PartitionSpec(None, *batch_spec())), cfg.update.microbatch)
    prompt_rows_of(cfg.rollout, cfg.update, width=0, rows=rows, experts=model.experts is not None, auto=False)


def _refuse_cudnn(policy: PolicyConfig, mesh: Mesh) -> None:
    """Raise for cuDNN's attention on other devices than GPUs, and in another dtype than its own."""
    if policy.attention != "cudnn":
        return
    platform, compute = mesh.devices.flat[0].platform, compute_dtype_of(policy, mesh)
    if platform != "gpu":
        raise ConfigError(
            f"policy.attention: cudnn has kernels for NVIDIA GPUs, and this run is on {platform}; set auto"
        )
    if compute != "bfloat16":
        raise ConfigError(
            f"policy.attention: cudnn multiplies in bfloat16, got policy.compute_dtype {compute}; set bfloat16, or "
            "attention to auto"
        )


def _refuse_experts(policy: PolicyConfig, loss: LossConfig, mesh: Mesh) -> None:
    """Refuse what only a mixture of experts has.

    Raises:
        ConfigError: names the field and the value for other policies.
    """
    settings = {
        "mesh.expert": (mesh.shape["expert"], 1),
        "policy.router": (policy.router, "recompute"),
        "loss.router_balance": (loss.router_balance, 0.0),
    }
    for field, (value, default) in settings.items():
        if value != default:
            raise ConfigError(f"{field}: {value} needs a policy with experts, and this one has none; set {default}")


def training_layout(
    lora: LoraConfig, model: QwenConfig, mesh: Mesh, optimizer: optax.GradientTransformation
) -> Shardings:
    """Shard params and optimizer state over expert, fsdp and tensor, rows over slice, data, expert and fsdp."""

    def named(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    params = param_shardings(model, mesh)
    everywhere = named(PartitionSpec())
    trained, shapes = params, trained_shapes(lora, model)
    if lora.rank:  # whole over fsdp: small, and divided ones would have activations divided with them
        trained = param_shardings(model, mesh, axes=trained_axes(lora, model))
        trained = jax.tree.map(lambda sharding: named(undivided(sharding.spec, "fsdp")), trained)
    opt_state = _of_optimizer(optimizer, shapes, trained, everywhere)
    tree: Any = TrainState  # of shardings, one for every array of a state
    frozen = params if lora.rank else None
    return Shardings(
        state=tree(step=everywhere, params=trained, opt_state=opt_state, key=everywhere, frozen=frozen),
        params=params,
        rows=named(batch_spec()),
        replicated=everywhere,
        microbatches=named(PartitionSpec(None, *batch_spec())),
        options=compiler_options(everywhere),
    )


def _of_optimizer(optimizer: optax.GradientTransformation, shapes: Any, shardings: Any, default: NamedSharding) -> Any:
    """Shard an array of the optimizer's state like the param whose path ends its own, and shape is its own.

    Everything else, such as counts and factored moments, is ``default``.
    """
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    params = {path: (x.shape, s) for (path, x), s in zip(paths, jax.tree.leaves(shardings), strict=True)}

    def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
        ends = (params.get(path[start:]) for start in range(len(path)))
        return next((end[1] for end in ends if end is not None and end[0] == x.shape), default)

    return jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(optimizer.init, shapes))


def param_shardings(model: QwenConfig, mesh: Mesh, *, axes: Any = None) -> Any:
    """Return training shardings of the params, or of a tree with other ``axes`` and the same axis names."""
    rules = training_rules(kv_heads=model.num_key_value_heads, tensor=mesh.shape["tensor"])
    specs = param_specs(logical_axes(model) if axes is None else axes, rules=rules)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def rows_sharding(mesh: Mesh, layout: str) -> NamedSharding:
    """Return the sharding of "rows" or of "microbatches", whose axis 1 is divided, to train.

    Raises:
        ValueError: another layout.
    """
    lead = {"rows": (), "microbatches": (None,)}.get(layout)
    if lead is None:
        raise ValueError(f"layout: expected prompts, rows or microbatches, got {layout!r}")
    return NamedSharding(mesh, PartitionSpec(*lead, *batch_spec()))


def sampling_model(model: QwenConfig, *, tensor: int) -> QwenConfig:
    """Return the model with its key heads repeated, so that every device of the tensor axis has one."""
    return replace(model, num_key_value_heads=repeated_kv_heads(model.num_key_value_heads, tensor=tensor))


def rollout_layout(
    settings: PolicyConfig, rollout: RolloutConfig, lora: LoraConfig, model: QwenConfig, mesh: Mesh
) -> RolloutLayout:
    """Lay out a whole policy on each group of rollout.tensor devices, so that decoding a token gathers no weights.

    The policy has the compute dtype, and the devices and their order are those of ``mesh``. The samples equal those of
    the training params. Adapters are merged into their matrices, so decoding does not see them.
    """
    sampling = rollout_mesh(mesh, tensor=rollout.tensor or mesh.shape["tensor"])
    wide = sampling_model(model, tensor=sampling.shape["tensor"])
    if settings.attention == "cudnn":  # refused in a program that takes arrays of two meshes; a prompt is read once
        settings = changed(settings, attention="blocked")
    bound = partial(bind_policy, settings, wide, sampling, adapter_scale=lora.scale, decode=rollout.attention)
    compute = compute_dtype_of(settings, sampling)
    shardings = param_shardings(model, mesh)
    specs = param_specs(logical_axes(wide), rules=ROLLOUT)
    rollout_shardings = jax.tree.map(lambda spec: NamedSharding(sampling, spec), specs, is_leaf=_is_spec)
    tensor_differs = sampling.shape["tensor"] != mesh.shape["tensor"]

    def prepare(params: Params) -> Params:
        if lora.rank:
            params = jax.tree.map(jax.lax.with_sharding_constraint, merge_adapters(params, scale=lora.scale), shardings)
        cast = sampling_params(model, params, kv_heads=model.num_key_value_heads, dtype=compute)
        cast = jax.tree.map(_constrained, params, cast, shardings)  # cast before the move: half the bytes
        if tensor_differs:
            cast = jax.tree.map(partial(_gathered, mesh, sampling, wide != model), cast, logical_axes(model))
        return sampling_params(model, cast, kv_heads=wide.num_key_value_heads, dtype=compute)

    rows = NamedSharding(sampling, batch_spec(sampling.shape))
    rounds = rollout.cache == "int8"
    policies = {"policy": bound(int8=rounds), "evaluated": bound() if rounds else None}
    return RolloutLayout(**policies, prepare=prepare, params=rollout_shardings, rows=rows)


def _constrained(old: Any, new: Any, sharding: NamedSharding) -> Any:
    return new if new is old else jax.lax.with_sharding_constraint(new, sharding)


def _gathered(mesh: Mesh, sampling: Mesh, repeated: bool, x: Any, names: tuple[str, ...]) -> Any:
    """Move x towards a tensor axis of another size; no device ever holds more of x than after the move.

    The compiler alone would gather all of x first. Three steps avoid that: x is resharded to its embedding axis, is
    gathered along that axis, and is then resharded to the other axis (by the caller).
    """
    if not any(ROLLOUT[name] == "tensor" for name in names):
        return x
    if "embed" not in names or ("kv_heads" in names and repeated):  # small
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
    lead = [ROLLOUT[name] if name == "expert" else None for name in names[: names.index("embed")]]
    for on, axes in ((mesh, ("fsdp", "tensor")), (sampling, "tensor")):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(on, PartitionSpec(*lead, axes)))
    return x


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
