"""The table against the checkpoints, the NNX modules and the params."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from oarjax.models.layers import Qwen
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import (
    abstract_params,
    divisible_pieces,
    init_params,
    logical_axes,
    lookup,
    weight_table,
)

KINDS = ["qwen2_tied", "qwen2_untied", "qwen2_yarn", "qwen3_tied", "qwen3_untied", "moe_untied", "delta_untied"]
KINDS += ["moe_delta_untied", "next_untied"]


def config(folder):
    return QwenConfig.from_hf(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_the_checkpoints(kind, data):
    """Written by transformers: every tensor of the file is in the table, and nothing else."""
    folder = data / "policy" / kind
    table = {name: w.file_shape for w in weight_table(config(folder)) for name in w.names}
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == table  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_tree_is_the_modules(kind, data):
    cfg = config(data / "policy" / kind)
    model = nnx.eval_shape(lambda: Qwen(cfg, compute_dtype=jnp.float32, rngs=nnx.Rngs(0)))
    modules = nnx.as_pure(nnx.split(model, nnx.Param, ...)[1])
    shapes = {tuple(part.key for part in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(modules)}
    assert shapes == {w.path: w.shape for w in weight_table(cfg)}


def test_axes_pieces_and_shapes_go_together(data):
    cfg = config(data / "policy" / "qwen3_untied")
    for weight in weight_table(cfg):
        assert len(weight.shape) == len(weight.axes) == len(weight.pieces)
        assert all(size % pieces == 0 for size, pieces in zip(weight.shape, weight.pieces))
    assert lookup(logical_axes(cfg), weight_table(cfg)[0]) == ("vocab", "embed")
    k = divisible_pieces(cfg)["layers"]["attention"]["k"]["kernel"]
    assert k == (2, 32, 4)  # 40 columns, but only 4 whole heads
    assert jax.tree.leaves(abstract_params(cfg, dtype=jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_initial_values(data):
    cfg = config(data / "policy" / "qwen2_untied")
    params = init_params(cfg, jax.random.key(3), dtype=jnp.float32)
    layers = params["layers"]
    # 64 x 32 and 2 x 32 x 48 draws of std 0.02: their std is known to about 3%
    for matrix in (params["embed"]["embedding"], params["head"]["kernel"], layers["mlp"]["gate"]["kernel"]):
        assert float(matrix.std()) == pytest.approx(0.02, rel=0.1)
        assert abs(float(matrix.mean())) < 0.002
    np.testing.assert_array_equal(layers["attention"]["q"]["bias"], 0.0)
    np.testing.assert_array_equal(layers["mlp_norm"]["scale"], 1.0)
    assert not np.array_equal(layers["mlp"]["gate"]["kernel"], layers["mlp"]["up"]["kernel"])
    assert not np.array_equal(layers["mlp"]["gate"]["kernel"][0], layers["mlp"]["gate"]["kernel"][1])


def test_initial_values_depend_on_the_key(data):
    cfg = config(data / "policy" / "qwen2_tied")
    first, again, other = (init_params(cfg, jax.random.key(k)) for k in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"]["embedding"], other["embed"]["embedding"])
