"""Names to specs, refusals, and the same logits on eight devices as on one."""

import json

import jax
import pytest
from eight_devices import on_eight_devices
from jax.sharding import PartitionSpec as Spec

from oarjax.models.qwen_config import QwenConfig
from oarjax.models.sharding import (
    ROLLOUT,
    RULES,
    ShardingError,
    batch_spec,
    check_divisible,
    check_rows,
    param_specs,
    repeated_kv_heads,
    training_rules,
    undivided,
)
from oarjax.models.weights import build_tree, divisible_pieces, logical_axes


@pytest.fixture
def cfg(data):
    return QwenConfig.from_hf(json.loads((data / "policy" / "qwen2_untied" / "config.json").read_text()))


def test_specs(cfg):
    specs = param_specs(logical_axes(cfg))
    assert specs["embed"]["embedding"] == Spec("tensor", "fsdp")
    assert specs["head"]["kernel"] == Spec("fsdp", "tensor")
    assert specs["layers"]["attention"]["q"] == {"kernel": Spec(None, "fsdp", "tensor"), "bias": Spec(None, "tensor")}
    assert specs["layers"]["attention"]["o"]["kernel"] == Spec(None, "tensor", "fsdp")
    assert specs["layers"]["mlp"]["down"]["kernel"] == Spec(None, "tensor", "fsdp")
    assert specs["layers"]["mlp_norm"]["scale"] == Spec(None, None)
    assert specs["norm"]["scale"] == Spec(None)
    assert batch_spec() == Spec(("slice", "data", "expert", "fsdp"))
    assert batch_spec({"data": 4, "tensor": 2}) == Spec(("data",))
    shapes = build_tree(cfg, lambda w: w.shape)
    assert jax.tree.structure(specs) == jax.tree.structure(shapes, is_leaf=lambda x: isinstance(x, tuple))


def test_experts_are_divided_whole(data):
    cfg = QwenConfig.from_hf(json.loads((data / "policy" / "moe_untied" / "config.json").read_text()))
    for rules, embed in ((RULES, "fsdp"), (ROLLOUT, None)):
        mlp = param_specs(logical_axes(cfg), rules=rules)["layers"]["mlp"]
        assert mlp["up"]["kernel"] == Spec(None, "expert", embed, "tensor")
        assert mlp["down"]["kernel"] == Spec(None, "expert", "tensor", embed)
        assert mlp["router"]["kernel"] == Spec(None, embed, None)


def test_rollout_layout_keeps_embeddings_whole(cfg):
    specs = param_specs(logical_axes(cfg), rules=ROLLOUT)
    assert specs["layers"]["attention"]["q"]["kernel"] == Spec(None, None, "tensor")


def test_an_axis_without_a_rule():
    with pytest.raises(KeyError, match="colour"):
        param_specs({"w": ("colour", "embed")})


def test_meshes_that_do_not_divide(cfg):
    """1 kv head on 4 tensor devices; 32 embedding columns on 3 fsdp devices."""
    axes, pieces = logical_axes(cfg), divisible_pieces(cfg)
    check_divisible(axes, pieces, {"data": 5, "fsdp": 4, "tensor": 1})
    with pytest.raises(ShardingError, match=r"kv_heads = 1 on mesh axis tensor = 4; choose mesh sizes"):
        check_divisible(axes, pieces, {"data": 1, "fsdp": 1, "tensor": 4})
    with pytest.raises(ShardingError, match="embed = 32 on mesh axis fsdp = 3"):
        check_divisible(axes, pieces, {"fsdp": 3})


def test_rows_that_do_not_divide():
    check_rows(12, {"data": 2, "fsdp": 3}, what="update.microbatch")
    with pytest.raises(ShardingError, match=r"update.microbatch = 10 rows .* slice x data x fsdp = 4; .* such as 12"):
        check_rows(10, {"slice": 1, "data": 2, "fsdp": 2, "tensor": 8}, what="update.microbatch")
    with pytest.raises(ShardingError, match=r"rollout.prompts = 10 rows .* axes data = 4; .* such as 12, or more"):
        check_rows(10, {"data": 4, "tensor": 8}, what="rollout.prompts", remedy=", or more")


@pytest.mark.parametrize(
    ("heads", "tensor", "place", "repeated"),
    [(8, 4, "tensor", 8), (4, 4, "tensor", 4), (2, 4, None, 4), (1, 8, None, 8)],
)
def test_fewer_key_heads_than_the_tensor_axis(heads, tensor, place, repeated):
    """In training their projections stay whole along it; for rollouts they are repeated."""
    assert training_rules(kv_heads=heads, tensor=tensor)["kv_heads"] == place
    assert repeated_kv_heads(heads, tensor=tensor) == repeated


def test_key_heads_that_nothing_divides():
    assert training_rules(kv_heads=4, tensor=6)["kv_heads"] == "tensor"
    assert repeated_kv_heads(4, tensor=6) == 4  # refused by check_divisible
    assert repeated_kv_heads(8, tensor=2) == 8


FAMILIES = """
mesh = make_mesh(slice=1, data=2, fsdp=2, tensor=2)
for path in sys.argv[1:]:
    cfg, folder = read_config(path)
    golden = np.load(folder / "golden.npz")
    with jax.enable_x64(True):  # the golden logits' own rounding, of float32, is up to 7e-5
        params, ids = placed(cfg, folder, np.tile(golden["ids"], (2, 1)), mesh, dtype=jnp.float64)
        kernel = params["layers"]["mlp"]["gate"]["kernel"]
        assert kernel.addressable_shards[0].data.size * 4 == kernel.size  # fsdp x tensor
        policy = make_policy(cfg, remat="none", mesh=mesh, compute_dtype=jnp.float64)
        divided = jax.jit(partial(logits, policy=policy))(params, ids)
        np.testing.assert_allclose(divided, np.tile(golden["logits"], (2, 1, 1)), atol=1e-4, rtol=0)
    if cfg.experts is not None:
        params, ids = placed(cfg, folder, np.tile(golden["ids"], (2, 1)), mesh)
        here = gradient(make_policy(cfg, remat="none"), load_params(folder, cfg), np.tile(golden["ids"], (2, 1)))
        same(gradient(make_policy(cfg, remat="none", mesh=mesh), params, ids), here)
    print(path, "equal on", len(jax.devices()), "devices")
"""

EXPERTS = """
from oarjax.models import moe

def loss_and_logits(params, ids, policy):
    out = logits(params, ids, policy)
    return jax.nn.log_softmax(out)[..., 5].mean(), out

cfg, folder = read_config(sys.argv[1])
golden, whole = np.load(folder / "golden.npz"), load_params(folder, cfg)
here = gradient(make_policy(cfg, remat="none"), whole, golden["ids"])
for kind, fsdp, tensor, moe.ROWS_AT_ONCE in (("grouped", 2, 1, 0), ("dense", 1, 2, 2048)):
    mesh = make_mesh(slice=1, data=1, expert=4, fsdp=fsdp, tensor=tensor)
    params, ids = placed(cfg, folder, np.tile(golden["ids"], (4, 1)), mesh)
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape[1] * 4 == kernel.shape[1]
    policy = make_policy(cfg, remat="none", mesh=mesh, experts=kind)
    step = jax.jit(jax.grad(loss_and_logits, has_aux=True), static_argnums=2).lower(params, ids, policy).compile()
    found, out = jax.device_get(step(params, ids))
    np.testing.assert_allclose(out, np.tile(golden["logits"], (4, 1, 1)), atol=1e-4, rtol=0)
    same(found, here)
    gathered = [line for line in step.as_text().splitlines() if " all-gather" in line]
    assert gathered
    every = [line for line in gathered if any(shape in line for shape in ("[8,32,20]", "[8,20,32]", "[2,8,"))]
    assert not every, every  # no device gathers the matrices of all 8 experts

# The linearised states pulled back, under vmap, as OAR-G and OAR-F do.
def pulled(params, ids, ct, policy):
    valid, clean = jnp.ones(ids.shape, bool), policy.embed(params, ids)
    _, push = jax.linearize(lambda e: policy.trunk(params, e, positions_of(valid), valid)[0], clean)
    return jax.vmap(jax.linear_transpose(push, clean))(ct)[0]

ct = jnp.cos(jnp.arange(2 * ids.size * 32)).reshape(2, *ids.shape, 32)
want = jax.jit(partial(pulled, policy=make_policy(cfg, remat="none", experts=kind)))(whole, np.asarray(ids), ct)
found = jax.jit(partial(pulled, policy=policy))(params, ids, ct)
np.testing.assert_allclose(found, want, atol=1e-3, rtol=1e-3)
print("equal on", len(jax.devices()), "devices")
"""


def test_eight_devices_give_the_golden_logits(data):
    """And the gradients of one device, of experts."""
    folders = [str(data / "policy" / kind) for kind in ("qwen3_tied", "moe_untied", "delta_untied")]
    assert on_eight_devices(FAMILIES, *folders).count("equal on 8 devices") == 3


@pytest.mark.slow
def test_whole_experts_on_a_mesh_axis_of_four(data):
    """Logits, gradients and pullbacks of one device, and nobody gathers all experts of a matrix."""
    assert "equal on 8 devices" in on_eight_devices(EXPERTS, str(data / "policy" / "moe_delta_untied"))


def test_adapters_are_whole_over_fsdp():
    assert undivided(Spec(None, "fsdp", None), "fsdp") == Spec(None, None, None)
    assert undivided(Spec(None, None, ("tensor", "fsdp")), "fsdp") == Spec(None, None, "tensor")
    assert undivided(Spec(None, "fsdp", "tensor"), "fsdp") == Spec(None, None, "tensor")
    assert undivided(Spec(), "fsdp") == Spec()
