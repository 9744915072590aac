"""The two forms of the delta rule against its definition, states, and a policy with them against itself."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_policy import MODEL, VOCAB, delta_policy
from eight_devices import on_eight_devices
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tiny import init

from oarjax.kernels.decode_cache import Window
from oarjax.models import delta_kernel
from oarjax.models.delta_net import CHUNK, chunked, inverse_of, recurrent
from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import DeltaSizes
from oarjax.models.weights import init_params
from oarjax.rollout.logps import token_logps
from oarjax.rollout.sampler import Decoding, group_keys
from oarjax.rollout.segments import SegmentedSampler
from oarjax.tools.plan.hlo_text import parse
from oarjax.tools.plan.topology import ENVIRONMENT, TopologyError, find_slice, slice_devices
from oarjax.types import PromptBatch


def defined(q, k, v, log_decay, rate, memory):
    """S <- a S; S <- S + k (b (v - S^T k))^T; o = S^T q, row by row and head by head."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    memory = memory.copy()
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        for t in range(q.shape[1]):
            s = memory[b, h] * np.exp(log_decay[b, t, h])
            s = s + np.outer(k[b, t, h], rate[b, t, h] * (v[b, t, h] - s.T @ k[b, t, h]))
            memory[b, h], out[b, t, h] = s, s.T @ q[b, t, h]
    return out, memory


def one_device():
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


@pytest.mark.parametrize("new", [1, CHUNK + 7])
def test_both_forms_are_the_definition(new, x64):
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(2, new, 2, width)) for width in (4, 4, 3))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, rate = -draw.uniform(0, 2, (2, new, 2)), draw.uniform(0, 1, (2, new, 2))
    log_decay[0, new // 2 :], rate[0, new // 2 :] = 0, 0  # takes nothing in
    args = (q, k, v, log_decay, rate, draw.normal(size=(2, 2, 4, 3)))
    for form in (chunked, recurrent):
        for found, want in zip(form(*map(jnp.asarray, args)), defined(*args)):
            np.testing.assert_allclose(found, want, atol=1e-10)
    if new == 1:  # the second of three layers; the others' states stay
        *inputs, memory = map(jnp.asarray, args)
        states = jnp.stack([memory + 1, memory, memory + 2])
        out, after = delta_kernel.step(*inputs, states, number=jnp.int32(1), mesh=one_device())
        for found, want in zip((out, after[1]), defined(*args)):
            np.testing.assert_allclose(found, want, atol=1e-10)
        np.testing.assert_array_equal(after[::2], states[::2])


@pytest.mark.parametrize("size", [5, CHUNK])
def test_the_inverse_of_a_chunk(size, x64):
    """Of any system, with its derivative; in float32 exact where all keys are one, whose powers would overflow it."""
    draw = np.random.default_rng(1)
    system, change = draw.normal(size=(2, 3, size, size)) / size**0.5
    want = np.linalg.inv(np.eye(size) + np.tril(system, -1))
    found, moved = jax.jvp(inverse_of, (jnp.asarray(system),), (jnp.asarray(change),))
    np.testing.assert_allclose(found, want, atol=1e-10 * np.abs(want).max())
    step = 1e-6 * np.tril(change, -1)
    after, before = (np.linalg.inv(np.eye(size) + np.tril(system, -1) + sign * step) for sign in (1, -1))
    np.testing.assert_allclose(moved, (after - before) / 2e-6, atol=1e-5 * np.abs(moved).max())
    ones = jnp.ones((size, size), jnp.float32)
    np.testing.assert_array_equal(inverse_of(ones), np.eye(size) - np.eye(size, k=-1))
    # LAPACK's calls deadlock on CPUs of few cores where two run at once.
    args = [jnp.ones((1, size, 1, 2)), jnp.ones((1, size, 1)), jnp.ones((1, 1, 2, 2))]
    assert "triangular_solve" not in str(jax.make_jaxpr(chunked)(*args[:1] * 3, *args[1:2] * 2, args[2]))


@pytest.fixture(scope="module")
def tiny():
    """2 prompts of 5 (one left-padded by 2), 3 completions of 4 each, and the teacher-forced hidden states."""
    policy, params = delta_policy()
    prompt = jax.random.randint(jax.random.key(1), (2, 5), 0, VOCAB, jnp.int32)
    prompt_valid = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    completion = jax.random.randint(jax.random.key(2), (6, 4), 0, VOCAB, jnp.int32)
    tokens = jnp.concatenate([jnp.repeat(prompt, 3, 0), completion], 1)
    valid = jnp.concatenate([jnp.repeat(prompt_valid, 3, 0), jnp.ones((6, 4), bool)], 1)
    trunk = jax.jit(policy.trunk)
    positions = positions_of(valid)
    hidden = trunk(params, policy.embed(params, tokens), positions, valid)[0]
    cache = policy.init_cache(2, 5)
    first, prefix = trunk(params, policy.embed(params, prompt), positions_of(prompt_valid), prompt_valid, cache=cache)
    return SimpleNamespace(**locals())


def test_padding_changes_no_real_token(tiny):
    real = np.asarray(tiny.valid)
    bare = tiny.trunk(
        tiny.params,
        tiny.policy.embed(tiny.params, tiny.tokens[:1, real[0]]),
        tiny.positions[:1, real[0]],
        jnp.ones((1, int(real[0].sum())), bool),
    )[0]
    np.testing.assert_allclose(tiny.hidden[0, real[0]], bare[0], atol=1e-5)
    other = jnp.where(tiny.valid, tiny.tokens, (tiny.tokens + 7) % 31)
    hidden = tiny.trunk(tiny.params, tiny.policy.embed(tiny.params, other), tiny.positions, tiny.valid)[0]
    np.testing.assert_array_equal(hidden[real], tiny.hidden[real])
    np.testing.assert_allclose(
        tiny.first[np.asarray(tiny.prompt_valid)], tiny.hidden[::3, :5][real[::3, :5]], atol=1e-5
    )


@pytest.mark.parametrize("step", [1, 2])
def test_decoding_behind_a_shared_prefix_equals_teacher_forcing(tiny, step):
    """A row that ended decodes a pad first: neither state nor cache notice. The last slots stay unwritten."""
    cache = tiny.policy.init_cache(6, 7)

    def decode(at, valid, cache):
        return tiny.trunk(
            tiny.params,
            tiny.policy.embed(tiny.params, tiny.completion[:, at]),
            tiny.positions[:, 5:][:, at],
            jnp.full((6, step), valid),
            cache=cache,
            prefix=tiny.prefix,
        )

    if step == 2:
        cache = decode(slice(0, 2), False, cache)[1]
        np.testing.assert_allclose(cache.state.memory, jnp.repeat(tiny.prefix.state.memory, 3, axis=1), atol=1e-6)
    for t in range(0, 4, step):
        hidden, cache = decode(slice(t, t + step), True, cache)
        np.testing.assert_allclose(hidden, tiny.hidden[:, 5 + t : 5 + t + step], atol=5e-5)  # another form, float32


def test_rows_of_a_cache_and_a_row_that_starts_anew(tiny):
    """After one token: rows 4 and 0 go on, and a new row of prompt 0 takes the slot between them."""
    caches, window = tiny.policy.caches, Window(1, 3, 2)
    where = (tiny.positions[:, 5:6], jnp.ones((6, 1), bool))
    embeddings = tiny.policy.embed(tiny.params, tiny.completion)
    prefix = caches.prefix(tiny.prefix)
    _, cache = tiny.trunk(tiny.params, embeddings[:, :1], *where, cache=caches.init(6, 3), prefix=prefix)
    moved = caches.move(cache, jnp.array([[4, -1, 0, -1, -1, -1]]), None)
    hidden, part = tiny.trunk(
        tiny.params,
        jnp.stack([embeddings[4, 1], embeddings[1, 0], embeddings[0, 1]])[:, None],
        jnp.stack([tiny.positions[4, 6], tiny.positions[1, 5], tiny.positions[0, 6]])[:, None],
        jnp.ones((3, 1), bool),
        cache=caches.window(moved, window),
        prefix=caches.take(prefix, jnp.array([1, 0, 0])),
    )
    want = jnp.stack([tiny.hidden[4, 6], tiny.hidden[1, 5], tiny.hidden[0, 6]])
    np.testing.assert_allclose(hidden[:, 0], want, atol=1e-5)
    after = caches.restore(moved, part, window)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)
    np.testing.assert_array_equal(after.state.memory[:, :3], part.state.memory)
    np.testing.assert_array_equal(after.state.memory[:, 3:], moved.state.memory[:, 3:])


def test_unrolled_blocks_give_the_same_states(tiny):
    model = replace(MODEL, num_hidden_layers=7)  # two blocks and a delta net
    params = init(model, jax.random.key(5))

    def hidden(unroll):
        policy = make_policy(model, remat="none", unroll=unroll)
        return jax.jit(policy.trunk)(params, policy.embed(params, tiny.tokens), tiny.positions, tiny.valid)[0]

    np.testing.assert_allclose(hidden(2)[tiny.valid], hidden(1)[tiny.valid], atol=5e-5)


def test_steps_in_place_behind_states_that_were_begun(tiny, monkeypatch):
    """As a rollout decodes on a TPU: rows take their prefix's states before the loop, and a kernel updates them."""
    monkeypatch.setattr(delta_kernel, "step_for", lambda *_: partial(delta_kernel.step, mesh=one_device()))
    policy = make_policy(MODEL, remat="none", mesh=one_device())
    prefix, trunk = policy.caches.prefix(tiny.prefix), jax.jit(policy.trunk)
    cache = policy.caches.begin(policy.caches.init(6, 3), prefix)
    np.testing.assert_array_equal(cache.state.memory, jnp.repeat(tiny.prefix.state.memory, 3, axis=1))
    nowhere = jax.tree.map(jnp.zeros_like, prefix.state)  # no step reads it again
    for t in range(3):
        hidden, cache = trunk(
            tiny.params,
            tiny.policy.embed(tiny.params, tiny.completion[:, t : t + 1]),
            tiny.positions[:, 5 + t : 6 + t],
            jnp.ones((6, 1), bool),
            cache=cache,
            prefix=replace(prefix, state=nowhere),
        )
        np.testing.assert_allclose(hidden[:, 0], tiny.hidden[:, 5 + t], atol=5e-5)  # another form, float32


SHARDED = """
from oarjax.models import delta_kernel
from oarjax.models.delta_net import recurrent

mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
keys = jax.random.split(jax.random.key(0), 6)
q, k, v = (jax.random.normal(key, (8, 1, 16, 128)) / 11 for key in keys[:3])
decay, rate = (jax.random.uniform(key, (8, 1, 16)) for key in keys[3:5])
states = jax.random.normal(keys[5], (2, 8, 16, 128, 128))
want = recurrent(q, k, v, -decay, rate, states[1])
out, after = jax.jit(lambda *x: delta_kernel.step(*x, number=jnp.int32(1), mesh=mesh))(q, k, v, -decay, rate, states)
far = max(float(jnp.abs(a - b).max()) for a, b in zip((out, after[1], after[0]), (*want, states[0])))
print(far < 2e-6, after.addressable_shards[0].data.shape)
"""


@pytest.mark.slow
def test_the_kernel_with_rows_over_eight_devices():
    assert on_eight_devices(SHARDED).splitlines() == ["True (2, 2, 16, 128, 128)"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:1x1", "v5p:2x2x1"])
def test_a_step_on_a_tpu_moves_no_states_and_no_weights(name, monkeypatch):
    """In the compiled loop states are in the kernel's hands alone, and no block's weights leave their stack."""
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    try:
        devices = slice_devices(find_slice(name))[:1]
    except TopologyError:
        pytest.skip("libtpu is not installed (extra aot)")
    mesh = Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))
    wide = DeltaSizes(interval=3, key_heads=8, value_heads=8, key_dim=128, value_dim=128, taps=4)
    model = replace(MODEL, hidden_size=256, intermediate_size=384, num_hidden_layers=8, head_dim=128, delta=wide)
    policy = make_policy(model, mesh=mesh, compute_dtype=jnp.bfloat16)

    def decoded(params, cache, prefix):
        tokens, alive = jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1), bool)

        def step(_, part):
            return policy.trunk(params, policy.embed(params, tokens), tokens, alive, cache=part, prefix=prefix)[1]

        return jax.lax.fori_loop(0, 3, step, policy.caches.begin(cache, prefix))

    def made():
        caches = policy.caches.init(8, 64), policy.caches.init(2, 32)
        return init_params(model, jax.random.key(0), dtype=jnp.bfloat16), *caches

    place = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(made))
    jax.config.update("jax_enable_compilation_cache", False)  # there are no devices to load programs on
    try:
        program = parse(jax.jit(decoded, donate_argnums=1).lower(*shapes).compile().as_text())
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    every = [i for instructions in program.computations.values() for i in instructions.values()]
    bodies = {i.called("body") for i in every if i.opcode == "while"}
    inside = [i for name in bodies for i in program.computations[str(name)].values()]
    moved = [i for i in inside if i.opcode not in ("parameter", "get-tuple-element", "tuple", "while", "bitcast")]
    assert {i.name.split(".")[0] for i in moved if any(a.sizes[-4:] == (8, 8, 128, 128) for a in i.type)} == {
        "delta_step"
    }
    assert not [i.name for i in moved if any(a.sizes in ((2, 256, 384), (2, 384, 256)) for a in i.type)]


def test_no_place_in_the_middle_can_be_computed_again(tiny):
    embeddings = tiny.policy.embed(tiny.params, tiny.completion[:2])
    with pytest.raises(ValueError, match="recurrent state cannot skip tokens of a prefix"):
        tiny.policy.trunk(
            tiny.params,
            embeddings,
            tiny.positions[:2, 5:],
            jnp.ones((2, 4), bool),
            prefix=tiny.prefix,
            visible=jnp.ones((2, 4, 5), bool),
        )


@pytest.mark.slow
def test_sampled_log_probs_are_the_teacher_forced_ones(tiny):
    """Rows that end leave, waiting ones take their places, the cache grows: 8 rows, at most 4 at once."""
    how = Decoding(max_new=9, temperature=1.0, top_k=0, top_p=1.0, stop_ids=(1, 2, 3, 4), pad_id=0)
    sampler = SegmentedSampler(
        tiny.policy, how, keys_of=lambda p, k: group_keys(p, k, group_size=4), group=4, segment=3, cache_bucket=6,
        slots=4, fewest=4,
    )  # fmt: skip
    drawn = sampler(tiny.params, PromptBatch(tiny.prompt, tiny.prompt_valid, jnp.arange(2)), jax.random.key(5))
    assert len(set(drawn.completion.sum(1).tolist())) > 3
    again, _ = jax.jit(
        token_logps, static_argnums=0, static_argnames=("completion_length", "temperature", "head_chunk")
    )(tiny.policy, tiny.params, drawn.tokens, drawn.valid, completion_length=9, temperature=1.0, head_chunk=64)
    np.testing.assert_allclose(jnp.where(drawn.completion, again, 0), drawn.behaviour_logps, atol=2e-5)
