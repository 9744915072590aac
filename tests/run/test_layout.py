"""The two layouts of a run: what is refused, what sampling params hold, and what compiled programs gather."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from conftest import json_lines
from fake_chips import Chip
from jax.sharding import PartitionSpec
from tiny_programs import built, one_mesh

from oarjax.config.learning import LoraConfig
from oarjax.errors import ConfigError
from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy
from oarjax.models.sharding import ShardingError
from oarjax.models.weights import init_params, sampling_params
from oarjax.run.layout import check_layouts, param_shardings, training_layout
from oarjax.system.devices import DeviceError
from oarjax.system.mesh import make_mesh, rollout_mesh

MODEL = replace(tiny.model(), num_attention_heads=4, num_key_value_heads=2, head_dim=4, hidden_size=16, qk_norm=True)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_sampling_params(kv_heads):
    params = init_params(MODEL, jax.random.key(0))
    found = sampling_params(MODEL, params, kv_heads=kv_heads, dtype=jnp.bfloat16)
    k, wide = params["layers"]["attention"]["k"], found["layers"]["attention"]["k"]
    heads = k["kernel"].reshape(2, 16, 2, 4).repeat(kv_heads // 2, axis=2)
    np.testing.assert_array_equal(wide["kernel"], heads.reshape(2, 16, -1).astype(jnp.bfloat16))
    assert wide["bias"].shape == (2, kv_heads * 4)
    assert found["layers"]["attention"]["q"]["kernel"].dtype == jnp.bfloat16
    kept = (found["embed"]["embedding"], found["norm"]["scale"], found["layers"]["attention"]["k_norm"]["scale"])
    assert all(x.dtype == jnp.float32 for x in kept)  # they are read in float32
    with pytest.raises(ValueError, match="kv_heads: expected a multiple of 2, got 3"):
        sampling_params(MODEL, params, kv_heads=3, dtype=jnp.float32)


def test_repeated_key_heads_give_the_same_states(x64):
    params = init_params(MODEL, jax.random.key(0), dtype=jnp.float64)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, tiny.VOCAB)
    valid = jnp.ones(tokens.shape, bool)

    def states(model, params):
        policy = make_policy(model, remat="none", compute_dtype=jnp.float64)
        return policy.trunk(params, policy.embed(params, tokens), positions_of(valid), valid)[0]

    wide = sampling_params(MODEL, params, kv_heads=4, dtype=jnp.float64)
    found = states(replace(MODEL, num_key_value_heads=4), wide)
    np.testing.assert_allclose(found, states(MODEL, params), rtol=0, atol=1e-13)


def test_on_one_device_in_float32_rollouts_have_the_same_params():
    b = built()
    params = jax.device_put(init_params(tiny.model(), jax.random.key(3)), b.layout.params)
    jax.tree.map(np.testing.assert_array_equal, params, b.steps.rollout_params(params))


@pytest.mark.slow
def test_in_bfloat16_what_is_sampled_is_what_casting_at_use_would_sample():
    """Tokens and log-probs, bit for bit, from params cast beforehand and from the training ones."""
    b = built(policy__compute_dtype="bfloat16")
    params = jax.device_put(init_params(tiny.model(), jax.random.key(3)), b.layout.params)
    cast = b.steps.rollout_params(params)
    assert cast["layers"]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16
    for seed in range(2):
        ours, theirs = (b.steps.sample(p, tiny.prompts(), jax.random.key(seed)) for p in (cast, params))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_cudnn_is_refused_without_a_gpu_and_in_float32():
    with pytest.raises(
        ConfigError, match=r"policy.attention: cudnn has kernels for NVIDIA GPUs, and this run is on cpu"
    ):
        check_layouts(tiny.config(policy__attention="cudnn"), MODEL, one_mesh())
    gpu = make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=[Chip("gpu", 0, "NVIDIA H100 80GB HBM3")])
    check_layouts(tiny.config(policy__attention="cudnn"), MODEL, gpu)
    with pytest.raises(ConfigError, match=r"cudnn multiplies in bfloat16, got policy.compute_dtype float32; set"):
        check_layouts(tiny.config(policy__attention="cudnn", policy__compute_dtype="float32"), MODEL, gpu)


def test_what_does_not_divide_is_refused():
    mesh = one_mesh()
    check_layouts(tiny.config(), MODEL, mesh)
    with pytest.raises(DeviceError, match=r"rollout.tensor: 2 does not divide the 1 devices; set a divisor, or null"):
        check_layouts(tiny.config(rollout__tensor=2), MODEL, mesh)
    eight = make_mesh(slice=1, data=1, fsdp=8, tensor=1, devices=[Chip("cpu", n, "cpu") for n in range(8)])
    check_layouts(tiny.config(rollout__tensor=2, update__microbatch=8), MODEL, eight)
    with pytest.raises(ShardingError, match=r"rollout.tensor\) does not divide .* heads = 4 on mesh axis tensor = 8"):
        check_layouts(tiny.config(rollout__tensor=8, update__microbatch=8), MODEL, eight)
    experts = make_mesh(slice=1, data=1, expert=4, fsdp=2, tensor=1, devices=eight.devices.reshape(-1).tolist())
    with pytest.raises(ConfigError, match=r"mesh.expert: 4 needs a policy with experts, and this one has none; set 1"):
        check_layouts(tiny.config(update__microbatch=8), MODEL, experts)
    with pytest.raises(DeviceError, match=r"rollout.tensor: 4 does not divide the 2 devices that hold one expert;"):
        rollout_mesh(experts, tensor=4)
    assert rollout_mesh(experts, tensor=2).shape == {"data": 1, "expert": 4, "tensor": 2}
    with pytest.raises(ShardingError, match=r"rollout.prompts = 4 rows .* data = 8; .*, or a larger rollout.tensor"):
        check_layouts(tiny.config(update__microbatch=8), MODEL, eight)


PROGRAM = """
import json, math, sys
import jax
from oarjax.rollout import row_schedule
from oarjax.run.run import Run
from oarjax.run.shapes import ProgramShapes
from oarjax.tools.plan.hlo import COLLECTIVES, parse
from oarjax.system.mesh import make_mesh
from oarjax.models.qwen_config import QwenConfig
import tiny

def instructions(text):
    # every instruction with the number of loops around it
    program, found = parse(text), []

    def walk(name, loops):
        for i in program.computations[name].values():
            found.append((loops, i))
            for what in ("body", "condition", "calls", "to_apply"):
                if i.opcode in ("while", "fusion", "call", "async") and (called := i.called(what)):
                    walk(called, loops + (i.opcode == "while"))

    walk(program.entry, 0)
    return found

EMBED, VOCAB = 32, 88
model = QwenConfig.from_hf(dict(model_type="qwen2", vocab_size=VOCAB, hidden_size=EMBED, intermediate_size=48,
    num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1e4,
    max_position_embeddings=64, tie_word_embeddings=False))

def built(axes, **changes):
    mesh = make_mesh(slice=1, data=1, **axes)
    cfg = tiny.config(data__max_prompt=6, rollout__prompt_bucket=6, rollout__prompts=8, update__microbatch=16,
                      policy__head_chunk=32, update__epochs=2, **changes)
    return Run(cfg, model=model, mesh=mesh, stop_ids=(1,), pad_id=0)

def compiled(phase, axes, name="", **changes):
    programs = ProgramShapes(built(axes, **changes)).programs()
    (program,) = (p for p in programs if p.phase == phase and p.name.startswith(name))
    return instructions(program.lower().compile().as_text())

def collectives(found):
    return [(loops, i) for loops, i in found if i.opcode.removesuffix("-start") in COLLECTIVES]

def sizes(i):
    return [list(a.sizes) for a in i.type]

for phase in ("score", "update"):
    found = collectives(compiled(phase, {"fsdp": 8, "tensor": 1}, credit__method="entropy"))
    print(json.dumps({"phase": phase, "collectives": [[loops, i.opcode, sizes(i), i.op_name] for loops, i in found]}))

# The memory table of a run lowers all of them, and sampling may have another mesh than training.
row_schedule.SHORT = 2  # rows that are done are dropped
apart = built({"fsdp": 8, "tensor": 1}, rollout__tensor=2, rollout__cache_bucket=5, data__eval={"source": "unused"},
              eval__batch=8)
lowered = [[p.phase, p.name] for p in ProgramShapes(apart).programs() if p.lower()]
print(json.dumps({"phase": "lowered", "phases": lowered}))

found = compiled("sample", {"fsdp": 2, "tensor": 4}, "decode 32")
print(json.dumps({
    "phase": "sample",
    "loops": [[loops, sizes(i)] for loops, i in found if i.opcode == "while"],
    "collectives": [[loops, i.opcode, sizes(i), i.op_name] for loops, i in collectives(found)],
}))
"""


@pytest.fixture(scope="module")
def programs():
    return {line["phase"]: line for line in json_lines(PROGRAM, devices=8, quick=True)}


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["score", "update"])
def test_the_head_is_gathered_once_and_not_once_per_chunk(programs, phase):
    """fsdp 8, five chunks. In the loop over microbatches the head is gathered; in that over chunks it is not."""
    heads = [c for c in programs[phase]["collectives"] if c[1].startswith("all-gather") and [32, 88] in c[2]]
    assert [loops for loops, *_ in heads] in ([0], [1]), heads


@pytest.mark.slow
def test_what_sampling_keeps_is_sharded_and_a_token_gathers_no_weights(programs):
    """data and fsdp 2, tensor 4: of 32 completions (8 prompts) 16 (4) lie on a device, with one of the 4 key heads."""
    loops = [sizes for depth, sizes in programs["sample"]["loops"] if depth == 0]
    (decode,) = (sizes for sizes in loops if [3, 1, 16, 4, 9] in sizes)
    caches = [size for size in decode if len(size) == 5]
    assert sorted(caches) == [
        [3, 1, 4, 4, 6],
        [3, 1, 4, 6, 4],
        [3, 1, 16, 4, 9],
        [3, 1, 16, 9, 4],
    ]  # keys and values: prompts, completions
    gathered = [c for c in programs["sample"]["collectives"] if c[1].startswith("all-gather")]
    within = [size for depth, _, sizes, _ in gathered if depth for size in sizes]
    assert within  # to draw a token, figures of its row's vocabulary; without any the next line would say nothing
    assert all(size[0] == 16 and 32 not in size and 88 not in size for size in within), within


@pytest.mark.slow
def test_programs_lower_where_sampling_has_another_mesh(programs):
    rollout = ["prefill", "decode 32 rows, 9 slots", "take 16 of 8 prompts", "decode 16 rows, 9 slots", "move rows"]
    held_out = ["prefill", "decode 8 rows, 9 slots"]
    phases = [["reshard", ""], *(["sample", name] for name in rollout), *(["evaluate", name] for name in held_out)]
    phases += [[phase, ""] for phase in ("score", "credit", "update", "apply")]
    assert programs["lowered"]["phases"] == phases


def test_the_state_of_any_optimizer_is_divided_like_the_params():
    """Moments of a param's shape lie where it lies; counts and factored moments are whole everywhere."""
    mesh, model = one_mesh(), replace(MODEL, hidden_size=128, intermediate_size=256)
    params = dict(jax.tree_util.tree_leaves_with_path(param_shardings(model, mesh)))
    wanted = {path: s for path, s in params.items() if s.spec != PartitionSpec()}
    for tx, moments in ((optax.adamw(1e-3), 2), (optax.lion(1e-3), 1), (optax.adafactor(1e-3), None)):
        state = training_layout(LoraConfig(), model, mesh, tx).state.opt_state
        leaves = jax.tree_util.tree_leaves_with_path(state)
        divided = [(path, s) for path, s in leaves if s.spec != PartitionSpec()]
        for path, sharding in divided:
            assert sharding == next(wanted[path[n:]] for n in range(len(path)) if path[n:] in wanted)
        if moments is None:  # adafactor factors its large matrices
            assert 0 < len(divided) < len(wanted)
        else:
            assert len(divided) == moments * len(wanted)
        assert any("count" in str(path) for path, s in leaves if s.spec == PartitionSpec())
