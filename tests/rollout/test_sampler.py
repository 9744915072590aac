import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TESTS, json_lines
from test_logps import array_shapes
from toy_policy import left_padded, toy_params, toy_policy

from oarjax.data.hf import load_params, read_config
from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy
from oarjax.rollout.filters import filter_logits
from oarjax.rollout.logps import token_logps
from oarjax.rollout.sampler import draw_token, problem_keys, rollout_key, sample, sample_rows
from oarjax.types import PromptBatch

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
OFF = {"top_k": 0, "top_p": 1.0}


def prompt_batch(slots, prompts=PROMPTS):
    tokens, valid = left_padded(prompts, slots)
    return PromptBatch(tokens, valid, jnp.arange(len(prompts), dtype=jnp.int32))


def sampler(policy, **keywords):
    settings = {"group_size": 2, "max_new": 8, "temperature": 1.0, **OFF, "stop_ids": (3, 11), "pad_id": 0} | keywords
    return jax.jit(lambda params, prompts, key: sample(policy, params, prompts, key, **settings))


@pytest.fixture(scope="module")
def toy():
    return toy_policy(), toy_params(jax.random.key(3), scale=0.7)


@pytest.fixture(scope="module")
def qwen():
    folder = TESTS / "golden" / "policy" / "qwen3_untied"
    cfg, folder = read_config(folder)
    return make_policy(cfg, remat="none"), load_params(folder, cfg, dtype=jnp.float32)


@partial(jax.jit, static_argnums=0)
def all_logits(policy, params, tokens, valid):
    hidden, _ = policy.trunk(params, policy.embed(params, tokens), positions_of(valid), valid)
    return policy.unembed(params, hidden)


def numpy_logps(policy, params, rollout, temperature, top_k, top_p):
    """Whole and filtered log-probs of every completion token, teacher-forced in whole arrays and sorted lists."""
    tokens, length = rollout.tokens, rollout.completion.shape[1]
    logits = np.asarray(all_logits(policy, params, tokens, rollout.valid), np.float64)[:, -length - 1 : -1]
    logits /= temperature
    whole, filtered = np.zeros(rollout.completion.shape), np.zeros(rollout.completion.shape)
    for b, t in zip(*np.nonzero(np.asarray(rollout.completion))):
        row, chosen = logits[b, t], int(tokens[b, tokens.shape[1] - length + t])
        order = np.argsort(-row)
        kept = order[: top_k or None]
        mass = np.exp(row[kept]) / np.exp(row[kept]).sum()
        kept = kept[np.cumsum(mass) - mass < top_p]
        assert chosen in kept
        whole[b, t] = row[chosen] - np.log(np.exp(row).sum())
        filtered[b, t] = row[chosen] - np.log(np.exp(row[kept]).sum())
    return whole, filtered


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 0.8)])
def test_log_probs_at_a_temperature_and_under_filters(qwen, top_k, top_p):
    """Prompts of three lengths, rows that end early and rows that do not. Each filter alone: the draws below."""
    policy, params = qwen
    kw = {"temperature": 0.7, "top_k": top_k, "top_p": top_p}
    rollout = sampler(policy, **kw, max_new=12, stop_ids=(3, 11, 20, 31, 40))(
        params, prompt_batch(6), jax.random.key(1)
    )
    assert 0 < rollout.ended.sum() < rollout.ended.size
    whole, filtered = numpy_logps(policy, params, rollout, **kw)
    np.testing.assert_allclose(rollout.behaviour_logps, whole, atol=1e-4)
    np.testing.assert_allclose(rollout.filtered_logps, filtered, atol=1e-4)
    unfiltered = top_k == 0 and top_p == 1
    assert np.array_equal(rollout.behaviour_logps, rollout.filtered_logps) == unfiltered
    settings = {"completion_length": 12, "temperature": 0.7, "head_chunk": 16}
    forced, _ = jax.jit(partial(token_logps, policy, **settings))(params, rollout.tokens, rollout.valid)
    np.testing.assert_allclose(rollout.behaviour_logps, np.where(rollout.completion, forced, 0), atol=1e-4)


def test_what_a_row_holds_after_its_end(toy):
    """The stop token is in; then pads, not valid, log-prob 0. Each stop id stops; a cut row has not ended."""
    policy, params = toy
    rollout = sampler(policy, group_size=24, pad_id=11)(params, prompt_batch(5), jax.random.key(2))
    tokens, stops = np.asarray(rollout.tokens[:, 5:]), (3, 11)
    last = set()
    for row, mask, ended in zip(tokens, np.asarray(rollout.completion), np.asarray(rollout.ended)):
        first = next((t + 1 for t in range(8) if row[t] in stops), None)
        assert ended == (first is not None and mask.sum() == first)
        assert mask.sum() == (first or 8)
        assert mask[: mask.sum()].all()
        assert (row[mask.sum() :] == 11).all()
        last.add(int(row[mask.sum() - 1]) if ended else "cut")
    assert {3, 11, "cut"} <= last
    assert rollout.completion.sum(1).min() == 1  # a first token that stops
    np.testing.assert_array_equal(rollout.valid[:, 5:], rollout.completion)
    np.testing.assert_array_equal(rollout.behaviour_logps != 0, rollout.completion)
    np.testing.assert_array_equal(rollout.tokens[:, :5], np.repeat(prompt_batch(5).tokens, 24, 0))


def test_rows_that_stop_at_the_limit_have_ended(toy):
    """With one new token, a stop id ends and anything else is cut."""
    policy, params = toy
    rollout = sampler(policy, max_new=1, group_size=40)(params, prompt_batch(5), jax.random.key(2))
    assert rollout.completion.all()
    np.testing.assert_array_equal(rollout.ended, np.isin(rollout.tokens[:, -1], (3, 11)))
    assert 0 < rollout.ended.sum() < 120


def test_two_buckets_give_the_same_completions(qwen):
    policy, params = qwen
    prompts = [list(range(1, 1 + n)) for n in (16, 9, 2)]
    run = sampler(policy, temperature=0.7)
    small, large = (run(params, prompt_batch(s, prompts), jax.random.key(3)) for s in (16, 24))
    np.testing.assert_array_equal(small.tokens[:, 16:], large.tokens[:, 24:])
    np.testing.assert_array_equal(small.ended, large.ended)
    np.testing.assert_allclose(small.behaviour_logps, large.behaviour_logps, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen3_untied"])
def test_greedy_equals_transformers_golden(kind, data):
    """16 greedy tokens of left-padded prompts, and their log-probs at temperature 1 (test_parity_sampling.py)."""
    golden = np.load(data / "sampling" / f"{kind}.npz")
    cfg, folder = read_config(data / "policy" / kind)
    policy, params = make_policy(cfg, remat="none"), load_params(folder, cfg, dtype=jnp.float32)
    prompts = PromptBatch(
        jnp.asarray(golden["ids"]), jnp.asarray(golden["valid"]), jnp.arange(len(golden["ids"]), dtype=jnp.int32)
    )
    run = sampler(policy, group_size=1, max_new=16, temperature=0.0, stop_ids=tuple(golden["stop_ids"].tolist()))
    rollout = run(params, prompts, jax.random.key(0))
    np.testing.assert_array_equal(rollout.tokens[:, golden["ids"].shape[1] :], golden["tokens"])
    np.testing.assert_array_equal(rollout.ended, golden["ended"])
    assert 0 < golden["ended"].sum() < len(golden["ended"])
    np.testing.assert_allclose(rollout.behaviour_logps, golden["logps"], atol=1e-4)


# Draws --------------------------------------------------------------------------------------------


def draws(logits, count, **keywords):
    uniforms = jax.random.uniform(jax.random.key(7), (count, 2))
    run = jax.jit(lambda z, u: draw_token(jnp.broadcast_to(z, (count, z.size)), u, **keywords))
    return [np.asarray(x) for x in run(jnp.asarray(logits, jnp.float32), uniforms)]


@pytest.mark.parametrize(
    ("top_k", "top_p", "count"), [(0, 1.0, 200_000), (0, 0.9, 40_000), (20, 1.0, 40_000), (20, 0.9, 40_000)]
)
def test_draws_follow_the_softmax(top_k, top_p, count):
    """Chi-square over 300 tokens (three blocks, the last part-filled) at temperature 0.7.

    Fewer draws under filters: what these leave is renormalised as the whole was, and the log-probs check it exactly.
    """
    logits = np.random.default_rng(0).normal(size=300) * 1.5
    tokens, logps, filtered = draws(logits, count, temperature=0.7, top_k=top_k, top_p=top_p)
    scaled = logits / 0.7
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept = np.argsort(-probs)[: top_k or None]
    kept = kept[np.cumsum(probs[kept]) - probs[kept] < top_p * probs[kept].sum()]
    expected = np.zeros(300)
    expected[kept] = probs[kept] / probs[kept].sum()
    counts = np.bincount(tokens, minlength=300)
    assert counts[expected == 0].sum() == 0
    often = expected * count > 5
    chi = ((counts - count * expected)[often] ** 2 / (count * expected[often])).sum()
    freedom = often.sum() - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(logps, np.log(probs)[tokens], atol=1e-5)
    np.testing.assert_allclose(filtered, np.log(expected[tokens]), atol=1e-5)


def test_draws_are_even_over_a_vocabulary_of_qwens_size():
    """Equal logits: token v is drawn exactly where the uniforms name it; the ends of [0, 1) stay inside."""
    vocab = 151_936
    logits = jnp.zeros((6, vocab))
    edge = np.nextafter(np.float32(1), np.float32(0))
    uniforms = jnp.array([[0, 0], [edge, edge], [0.5, 0], [0.5, 0.5], [1000.5 / 1187, 77.5 / 128], [0, edge]])
    token, logp, _ = draw_token(logits, uniforms, temperature=1.0, **OFF)
    # 1,187 blocks of 128; 0.5 * 1187 = 593.5, so block 593.
    np.testing.assert_array_equal(token, [0, vocab - 1, 593 * 128, 593 * 128 + 64, 1000 * 128 + 77, 127])
    np.testing.assert_allclose(logp, -np.log(vocab), rtol=1e-6)


def test_tokens_that_cannot_occur_are_never_drawn():
    logits = np.full(300, -np.inf)
    logits[[0, 130, 299]] = [0.0, 1.0, 2.0]
    tokens, _, _ = draws(logits, 5_000, temperature=1.0, **OFF)
    assert set(tokens) == {0, 130, 299}


def test_filters_by_hand():
    # Probabilities 16/32, 8/32, 4/32, 2/32, 2/32.
    logits = jnp.log(jnp.array([[2.0, 16, 4, 2, 8]]))

    def kept(**keywords):
        return np.nonzero(np.isfinite(filter_logits(logits, **keywords)[0]))[0].tolist()

    assert kept(top_k=0, top_p=1.0) == [0, 1, 2, 3, 4]
    assert kept(top_k=2, top_p=1.0) == [1, 4]
    assert kept(top_k=4, top_p=1.0) == [0, 1, 2, 3, 4]  # a tie with the fourth
    assert kept(top_k=0, top_p=0.45) == [1]
    assert kept(top_k=0, top_p=0.55) == [1, 4]
    assert kept(top_k=0, top_p=0.8) == [1, 2, 4]
    assert kept(top_k=2, top_p=0.6) == [1]  # 16/24 of what top-k left
    assert kept(top_k=0, top_p=1e-6) == [1]
    assert kept(top_k=99, top_p=1.0) == [0, 1, 2, 3, 4]


def test_filters_equal_sorting_on_random_logits():
    logits = np.random.default_rng(1).normal(size=(50, 200)).astype(np.float32) * 3
    order = np.argsort(-logits, axis=-1)
    mass = np.exp(np.take_along_axis(logits, order, -1).astype(np.float64))
    mass /= mass.sum(-1, keepdims=True)
    within = np.cumsum(mass, -1) - mass < 0.9
    want = np.zeros(logits.shape, bool)
    np.put_along_axis(want, order, within, -1)
    got = np.isfinite(filter_logits(jnp.asarray(logits), top_k=0, top_p=0.9))
    np.testing.assert_array_equal(got, want)
    got = np.isfinite(filter_logits(jnp.asarray(logits), top_k=7, top_p=1.0))
    np.testing.assert_array_equal(got.sum(-1), 7)
    assert (np.where(got, logits, np.inf).min(-1) >= np.sort(logits, -1)[:, -7]).all()


# Noise --------------------------------------------------------------------------------------------


@cache
def flat():
    """Every token equally likely whatever came before: what is drawn is the noise itself."""
    run = sampler(toy_policy(), group_size=4, max_new=6, stop_ids=())
    return run, toy_params(jax.random.key(0), vocab=1024, scale=0.0)


def noise(key, count=4):
    run, params = flat()
    return np.asarray(run(params, prompt_batch(4, [[1, 2]] * count), key).tokens[:, 4:])


def test_no_two_steps_rows_or_batches_share_noise():
    """6 steps x 16 rows x 4 batches over 1,024 ids: 384 draws of one source would repeat whole rows or columns."""
    root = jax.random.key(5)
    batches = [noise(rollout_key(root, step=s, batch=b)) for s, b in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    rows = [tuple(row) for batch in batches for row in batch]
    columns = [tuple(column) for batch in batches for column in batch.T]
    assert len(set(rows)) == 64
    assert len(set(columns)) == 24
    # Pairs that agree by chance: about 384^2 / 2 / 1024 = 72; sharing any axis would give far more.
    values = np.concatenate([b.ravel() for b in batches])
    pairs = sum(n * (n - 1) // 2 for n in np.unique(values, return_counts=True)[1])
    assert 40 < pairs < 110
    np.testing.assert_array_equal(batches[0], noise(rollout_key(root, step=0, batch=0)))  # and the same on resume


def test_more_prompts_leave_the_earlier_rows_alone():
    key = jax.random.key(6)
    np.testing.assert_array_equal(noise(key, count=4), noise(key, count=7)[:16])


FOUR_DEVICES = """
import jax, numpy as np
from test_sampler import prompt_batch, sampler
from toy_policy import toy_params, toy_policy
policy, params = toy_policy(), toy_params(jax.random.key(3), scale=0.7)
prompts = prompt_batch(4, [[1, 2], [3], [4, 5, 6], [7]])
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.device_put(prompts, jax.NamedSharding(mesh, jax.P("data")))
run = sampler(policy)
one, many = (run(params, p, jax.random.key(1)) for p in (prompts, split))
assert len(many.tokens.sharding.device_set) == 4, many.tokens.sharding
np.testing.assert_array_equal(one.tokens, many.tokens)
np.testing.assert_allclose(one.behaviour_logps, many.behaviour_logps, atol=1e-5)
"""


@pytest.mark.slow
def test_rows_split_over_devices_draw_the_same():
    """In a process of its own, since the number of devices is fixed when jax starts."""
    json_lines(FOUR_DEVICES, devices=4, quick=True)


# The program --------------------------------------------------------------------------------------


def test_the_loop_stops_when_every_row_has_ended():
    calls = []
    policy = toy_policy(on_token=calls.append)
    params = toy_params(jax.random.key(0), scale=0.5)
    always = tuple(range(23))
    sampler(policy, max_new=50, stop_ids=always)(params, prompt_batch(4), jax.random.key(0))
    jax.effects_barrier()
    assert calls == [4]  # the prefill alone: every first token stops
    calls.clear()
    rollout = sampler(policy, max_new=50, stop_ids=always[:4])(params, prompt_batch(4), jax.random.key(0))
    jax.effects_barrier()
    steps = int(rollout.completion.sum(1).max())
    assert 1 < steps < 50
    assert len(calls) == steps  # one prefill, then one less than the longest row
    calls.clear()
    sampler(policy, max_new=5, stop_ids=())(params, prompt_batch(4), jax.random.key(0))
    jax.effects_barrier()
    assert len(calls) == 5  # the last token is not fed back


def program(policy, params, **keywords):
    run = sampler(policy, **keywords)
    jaxpr = jax.make_jaxpr(run)(params, prompt_batch(37), jax.random.key(0))
    return str(jaxpr), array_shapes(jaxpr.jaxpr, [])


def test_the_prefix_is_read_by_the_group_and_never_copied(qwen):
    """37 prompt slots, 3 prompts, 5 rows each: no array of 15 rows has the prompt's slots and a head's width."""
    policy, params = qwen
    _, shapes = program(policy, params, group_size=5)
    kv, width = policy.init_cache(1, 1).k.shape[3:]
    assert {(2, kv, 3, width, 37), (2, kv, 3, 37, width)} <= set(shapes)  # the prefix itself, of 2 layers
    copies = [s for s in shapes if 37 in s and np.prod(s) >= 15 * 37 * kv * width]
    assert all(15 not in s and 5 not in s for s in copies), copies


def test_filters_that_are_off_are_not_in_the_program(toy):
    def primitives(**keywords):
        return set(re.findall(r" = ([a-z_0-9]+)[\[ ]", program(*toy, **keywords)[0]))

    off, on = primitives(), primitives(top_k=3, top_p=0.9)
    assert not {"sort", "top_k", "debug_callback"} & off
    assert not {"sort", "top_k"} & on
    assert {"bitcast_convert_type", "shift_right_arithmetic"} <= on
    assert "while" in off


def test_refuses_keywords_out_of_range(toy):
    for wrong, text in [
        ({"group_size": 0}, "sample: group_size must be an integer >= 1, got 0"),
        ({"max_new": 0}, "sample: max_new must be an integer >= 1, got 0"),
        ({"temperature": -1.0}, "sample: temperature must be a number >= 0, got -1.0"),
        ({"top_k": -1}, "sample: top_k must be an integer >= 0, got -1"),
        ({"top_p": 0.0}, r"sample: top_p must be a number in \(0, 1\], got 0.0"),
    ]:
        with pytest.raises(ValueError, match=text):
            sampler(toy[0], **wrong)(toy[1], prompt_batch(4), jax.random.key(0))


def test_noise_of_a_problem_is_its_own(toy):
    """Whatever else is in the batch, and in whatever order: a problem's samples are the same."""
    policy, params = toy
    settings = {"max_new": 8, "temperature": 1.0, **OFF, "stop_ids": (3, 11), "pad_id": 0}
    run = jax.jit(lambda batch, keys: sample_rows(policy, params, batch, keys, **settings))

    def drawn(order, samples):
        batch = prompt_batch(4, [PROMPTS[i] for i in order]).replace(problem=jnp.asarray(order, jnp.int32) + 7)
        keys = problem_keys(jax.random.key(5), batch.problem, samples=samples)
        rollout = run(batch, keys)
        made = np.asarray(rollout.tokens[:, 4:]).reshape(len(order), samples, -1)
        return dict(zip(order, made.tolist()))

    whole = drawn([0, 1, 2], 3)
    assert drawn([2, 0, 1], 3) == whole
    assert drawn([1], 2) == {1: whole[1][:2]}
    assert len({str(row) for rows in whole.values() for row in rows}) > 6


def test_as_many_keys_for_every_prompt(toy):
    policy, params = toy
    settings = {"max_new": 8, "temperature": 1.0, **OFF, "stop_ids": (3,), "pad_id": 0}
    with pytest.raises(ValueError, match="as many for each of the 3 prompts, got 4"):
        sample_rows(policy, params, prompt_batch(4), jax.random.split(jax.random.key(0), 4), **settings)
