"""Segmented rollouts draw what the sampler of one program draws, whatever is decoded together."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import json_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_policy import left_padded, toy_params, toy_policy

from oarjax.kernels import decode_cache
from oarjax.kernels.decode_cache import Window, append, heads_first, layer, opened
from oarjax.models.policy import move_rows, take_rows, window_of, with_window
from oarjax.rollout.row_schedule import RowBucket, arrange, fewest_left, first_layout, make_plan, next_layout
from oarjax.rollout.sampler import BLOCK, Decoding, sample_rows
from oarjax.rollout.segments import SegmentedSampler
from oarjax.types import KVCache, PromptBatch

HOW = Decoding(max_new=13, temperature=1.0, top_k=0, top_p=1.0, stop_ids=(3, 11), pad_id=0)
PROMPTS, GROUP, WIDTH = 6, 4, 6


def keys_of(prompts, key):
    """Noise by the prompt's number, so that the order of prompts changes no draw."""
    rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.repeat(prompts.problem, GROUP))
    return jax.vmap(jax.random.fold_in)(rows, jnp.tile(jnp.arange(GROUP), prompts.problem.shape[0]))


def prompt_batch(seed, order=range(PROMPTS), width=WIDTH):
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(1, 22, draw.integers(1, WIDTH + 1)).tolist() for _ in range(PROMPTS)]
    tokens, valid = left_padded([prompts[i] for i in order], width)
    return PromptBatch(tokens, valid, jnp.asarray(order, jnp.int32))


@pytest.fixture(scope="module")
def toy():
    """A policy in float64, the one-program sampler, and a segmented one per setting, compiled once each."""
    with jax.enable_x64(True):
        policy = toy_policy()
        params = toy_params(jax.random.key(3), scale=0.7, dtype=jnp.float64)
        static = jax.jit(lambda batch, key: sample_rows(policy, params, batch, keys_of(batch, key), **HOW._asdict()))
        made = {}

        def segmented(**options):
            name = str(options)
            if name not in made:
                made[name] = SegmentedSampler(policy, HOW, keys_of=keys_of, group=GROUP, **options)
            return lambda batch, key, **more: made[name](params, batch, key, **more)

        yield static, segmented, made


SETTINGS = [{"segment": 3, "cache_bucket": 7}, {"segment": 4, "cache_bucket": 12, "slots": 9}]


@settings(max_examples=12, deadline=None)
@given(
    options=st.sampled_from(SETTINGS),
    seed=st.integers(0, 1000),
    key=st.integers(0, 1000),
    order=st.permutations(range(PROMPTS)),
)
def test_the_same_tokens_whatever_is_decoded_together(toy, options, seed, key, order):
    """Row order, group, left padding, segments, slots: tokens and ends exactly, log-probs to 1e-12, in float64."""
    static, segmented, _ = toy
    with jax.enable_x64(True):
        want = jax.device_get(static(prompt_batch(seed), jax.random.key(key)))
        got = jax.device_get(segmented(**options)(prompt_batch(seed, order), jax.random.key(key)))
    rows = np.concatenate([np.arange(GROUP) + GROUP * order.index(p) for p in range(PROMPTS)])
    assert want.behaviour_logps.dtype == np.float64
    for name in ("tokens", "valid", "completion", "ended"):
        np.testing.assert_array_equal(getattr(got, name)[rows], getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.behaviour_logps[rows], want.behaviour_logps, atol=1e-12)
    np.testing.assert_allclose(got.filtered_logps[rows], want.filtered_logps, atol=1e-12)


def test_the_same_bits_again_and_as_few_programs_as_the_plan_has(toy):
    _, segmented, made = toy
    with jax.enable_x64(True):
        for options in SETTINGS:
            first, again = (segmented(**options)(prompt_batch(5), jax.random.key(2)) for _ in range(2))
            jax.tree.map(np.testing.assert_array_equal, first, again)
            sampler = made[str(options)]
            plan = sampler.plan(prompt_batch(5))
            used = {(b._replace(rows=b.rows // plan.blocks), slots) for b, slots in sampler._programs}
            assert used <= set(plan.sizes())
            assert 1 < len(used) == sampler._decode._cache_size()
            assert sampler.decode_programs == len(used)


def arguments(args, more):
    """Shapes and types of a call's arguments, and its keywords."""
    leaves, tree = jax.tree.flatten(args)
    return str(tree), tuple((x.shape, str(x.dtype)) for x in leaves), tuple(sorted(more.items()))


def test_the_programs_that_run_are_those_that_are_listed(toy, monkeypatch):
    """Those of a few rollouts, with all rows and with some of them; a plan and the table of memory read the list."""
    _, segmented, made = toy
    with jax.enable_x64(True):
        for options in SETTINGS:
            run = segmented(**options)
            sampler, called = made[str(options)], {}
            batch, key = prompt_batch(5), jax.random.key(2)
            params = toy_params(jax.random.key(3), scale=0.7, dtype=jnp.float64)
            listed = sampler.programs(params, batch, key)
            assert len({each.name for each in listed}) == len(listed)
            known = {id(each.jitted): set() for each in listed}
            for each in listed:
                known[id(each.jitted)].add(arguments(each.args, each.static))
            for name in ("_prefill", "_decode", "_take", "_move"):
                jitted = getattr(sampler, name)

                def record(*args, jitted=jitted, called=called, **more):
                    called.setdefault(id(jitted), set()).add(arguments(args, more))
                    return jitted(*args, **more)

                monkeypatch.setattr(sampler, name, record)
            for seed in range(4):
                run(batch, jax.random.key(seed))
            monkeypatch.undo()
            assert all(shapes <= known[jitted] for jitted, shapes in called.items())
            assert len(called) == 4
            decode = [each for each in listed if each.name.startswith("decode")]
            assert len(decode) == len(sampler.plan(batch).sizes())
            assert 1 < sum(each.largest for each in decode) + 1 < len(decode)
            counted = sampler.plan(batch).full_steps()
            assert {each.static["slots"]: each.steps for each in decode if each.steps} == counted


def test_what_decoding_took(toy):
    """Counted again from the lengths: every row decodes from its second token on."""
    _, segmented, made = toy
    options = SETTINGS[0]
    with jax.enable_x64(True):
        run = segmented(**options)
        made[str(options)].spent()
        lengths = np.asarray(run(prompt_batch(7), jax.random.key(4)).completion.sum(1), float)
    spent = made[str(options)]._spent
    assert spent.steps == lengths.max() - 1
    assert spent.tokens == (lengths - 1).sum()
    assert spent.attended == (lengths * (lengths - 1) / 2).sum()
    assert spent.tokens < spent.row_steps < len(lengths) * spent.steps
    assert spent.attended < spent.slots_read < spent.row_steps * (HOW.max_new - 1)
    found = made[str(options)].spent().metrics()
    assert found["decode_occupancy"] == spent.tokens / spent.row_steps
    assert found["decode_padding"] == 1 - spent.attended / spent.slots_read
    assert made[str(options)].spent().metrics() == {"decode_steps": 0.0}


def test_rows_are_reported_once_as_they_ended(toy):
    _, segmented, _ = toy
    reports = []

    def report(news):
        reports.append(news._make(map(np.asarray, news)))

    with jax.enable_x64(True):
        for options in SETTINGS:
            reports.clear()
            run = segmented(**options)
            rollout = jax.device_get(run(prompt_batch(7), jax.random.key(4), report=report))
            lengths, last = rollout.completion.sum(1), rollout.tokens[:, -HOW.max_new :]
            rows = np.concatenate([news.rows for news in reports]).tolist()
            assert len(reports) > 1
            assert len(rows) == len(set(rows)) < len(lengths)
            if "slots" not in options:  # a long row that began early may end before a short one
                assert lengths[rows].max() < lengths.max()
            for news in reports:
                for row in news.rows:
                    assert news.lengths[row] == lengths[row]
                    assert news.ended[row] == rollout.ended[row]
                    np.testing.assert_array_equal(news.tokens[row, : lengths[row]], last[row, : lengths[row]])


def to_the_nearest_edge(logits, uniforms, token):
    """Distance of a draw's two uniforms to an edge of their distributions: blocks of 128 tokens, tokens of a block."""
    mass = np.exp(logits - logits.max())
    blocks = np.pad(mass, (0, -len(mass) % BLOCK)).reshape(-1, BLOCK)
    distributions = blocks.sum(1), blocks[token // BLOCK]
    return min(abs(np.cumsum(p) / p.sum() - u).min() for p, u in zip(distributions, uniforms))


def differing_rows(want, got, logits_of, uniforms_of, *, tolerance):
    """Count rows that differ, each from a token on at whose draw a uniform met an edge; raise for any other."""
    assert got.behaviour_logps.dtype == np.float32
    T = want.completion.shape[1]
    differs = want.tokens[:, -T:] != got.tokens[:, -T:]
    first = np.where(differs.any(1), differs.argmax(1), T)
    same = np.arange(T) < first[:, None]
    np.testing.assert_allclose(got.behaviour_logps * same, want.behaviour_logps * same, atol=tolerance)
    rows = np.flatnonzero(differs.any(1))
    for row in rows:
        t = first[row]
        distance = to_the_nearest_edge(logits_of(row, t), uniforms_of(row, t), want.tokens[row, t - T])
        assert distance < tolerance, f"row {row} differs at token {t}, {distance:.1e} from any edge"
    return len(rows)


def test_float32_differs_by_rounding_alone():
    """Of 1,200 rows not one in 1,000, and none without cause; the rule is tried on weights that are a little off."""
    with jax.enable_x64(False):
        how = Decoding(max_new=13, temperature=1.0, top_k=0, top_p=1.0, stop_ids=tuple(range(3, 11)), pad_id=0)
        policy, params = toy_policy(), toy_params(jax.random.key(3), vocab=200, scale=0.7)
        tokens = jax.random.randint(jax.random.key(1), (300, WIDTH), 11, 200)
        batch, key = PromptBatch(tokens, jnp.ones(tokens.shape, bool), jnp.arange(300)), jax.random.key(2)
        static = jax.jit(lambda params, key: sample_rows(policy, params, batch, keys_of(batch, key), **how._asdict()))
        run = SegmentedSampler(policy, how, keys_of=keys_of, group=GROUP, segment=6, cache_bucket=6, fewest=1000)
        want = jax.device_get(static(params, key))
        row_keys = keys_of(batch, key)

        @jax.jit
        def all_logits(params, ids):
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
            hidden, _ = policy.trunk(params, policy.embed(params, ids), positions, jnp.ones(ids.shape, bool))
            return policy.unembed(params, hidden)

        with jax.enable_x64(True):  # what follows a token does not reach its logits
            exact = np.asarray(all_logits(jax.tree.map(lambda x: x.astype(jnp.float64), params), want.tokens))

        def logits_of(row, t):
            return exact[row, WIDTH + t - 1]

        def uniforms_of(row, t):
            return np.asarray(jax.random.uniform(jax.random.fold_in(row_keys[row], t), (2,)))

        def differ(got, tolerance=1e-4):
            return differing_rows(want, jax.device_get(got), logits_of, uniforms_of, tolerance=tolerance)

        assert differ(run(params, batch, key)) < 1200 / 1000
        assert run.decode_programs > 1
        assert differ(static(jax.tree.map(lambda x: x * (1 + 1.5e-4), params), key), 1e-3) > 5
        with pytest.raises(AssertionError, match="from any edge"):
            differ(static(params, jax.random.key(3)))


def test_one_new_token_needs_no_decoding(toy):
    with jax.enable_x64(True):
        policy, params = toy_policy(), toy_params(jax.random.key(3), dtype=jnp.float64)
        run = SegmentedSampler(policy, HOW._replace(max_new=1), keys_of=keys_of, group=GROUP)
        rollout = run(params, prompt_batch(0), jax.random.key(0))
    assert rollout.completion.all()
    assert run.spent().metrics() == {"decode_steps": 0.0}
    assert run.decode_programs == 0


# The host's decisions -------------------------------------------------------------------------------------------------


def plan_of(**changes):
    given = {"prompts": 8, "width": 16, "group": 4, "max_new": 64, "cache_bucket": 16, "slots": None, "blocks": 1}
    return make_plan(**given | changes)


def test_rows_halve_and_share_their_prefix_where_a_group_is_likely_whole():
    assert plan_of().buckets == (RowBucket(32, 4), RowBucket(16, 1), RowBucket(8, 1))
    assert plan_of(prompts=32, group=16).buckets[:4] == (
        RowBucket(512, 16),
        RowBucket(256, 4),
        RowBucket(128, 2),
        RowBucket(64, 1),
    )
    assert plan_of(prompts=3).buckets == (RowBucket(12, 4), RowBucket(8, 1))
    assert plan_of(prompts=1).buckets == (RowBucket(4, 4),)
    # Prompts of 512 positions: 16 copies of one beside 16 rows are more than 32 rows of 64 and 8 prompts.
    assert plan_of(width=512).buckets == (RowBucket(32, 4), RowBucket(8, 1))
    # Four devices: no block has fewer rows than another, and all together no fewer than 8.
    assert plan_of(blocks=4).buckets == (RowBucket(8, 4), RowBucket(4, 1), RowBucket(2, 1))
    assert plan_of(slots=12).buckets == (RowBucket(12, 1), RowBucket(8, 1))
    assert plan_of(blocks=4, slots=12).buckets == (RowBucket(3, 1), RowBucket(2, 1))


def test_slots_double():
    plan = plan_of()
    assert [plan.slots_after(s, s) for s in (0, 16, 32)] == [16, 32, 63]
    assert [s for b, s in plan.sizes() if b.rows == 8] == [63, 32, 16]
    assert plan_of(max_new=2, cache_bucket=1).cache_sizes() == plan_of(max_new=1, cache_bucket=1).cache_sizes() == [1]
    assert plan_of(cache_bucket=63).cache_sizes() == [63]
    few = plan_of(slots=8)
    assert few.slots_after(64, 20) == 64  # 20 slots are needed, 32 are kept, at least 16 are new
    assert few.slots_after(64, 64) == max(s for _, s in few.sizes()) == 80


@pytest.mark.parametrize("bucket", [16, 24, 63, 64])
def test_two_programs_stand_for_the_steps_of_all(bucket):
    """In steps and in slots read, of a rollout of 64 tokens a row, the first of which is the prefill's."""
    plan = plan_of(cache_bucket=bucket)
    slots = written = read = 0
    while written < 63:
        slots = plan.slots_after(slots, slots)
        read, written = read + slots * (min(slots, 63) - written), min(slots, 63)
    counted = plan.full_steps()
    assert sum(counted.values()) == pytest.approx(63)
    assert sum(each * steps for each, steps in counted.items()) == pytest.approx(read)
    assert len(counted) == (2 if bucket < 63 else 1)
    assert plan_of(slots=8).full_steps() == {80: 4 * 63}


def test_rows_are_dropped_as_soon_as_the_rest_fits():
    plan = plan_of(prompts=4, group=8)
    assert plan.buckets[1] == RowBucket(16, 2)
    alive = np.ones((1, 32), bool)
    alive[0, ::2] = False
    now = first_layout(plan)
    assert fewest_left(plan, now, alive, ~alive & alive).tolist() == [16]
    after = next_layout(plan, now, alive, ~alive & alive)
    assert after.rows.tolist() == [list(range(1, 32, 2))]
    assert after.places(now).tolist() == after.rows.tolist()
    assert after.prompts(8).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    # Three rows of each of four prompts in pairs need 16 slots; five of each need 24, and one must go per pair.
    odd = np.arange(32).reshape(1, 32) % 8 < 5
    assert next_layout(plan, now, odd, ~odd & odd) is now
    assert fewest_left(plan, now, odd, ~odd & odd).tolist() == [16]
    three = np.arange(32).reshape(1, 32) % 8 < 3
    assert next_layout(plan, now, three, ~three & three).rows[0, :8].tolist() == [0, 1, 2, -1, 8, 9, 10, -1]


def test_waiting_rows_take_free_slots_and_no_others_move():
    plan = plan_of(prompts=3, slots=4)
    alive, waiting = np.ones((1, 12), bool), np.ones((1, 12), bool)
    first = next_layout(plan, first_layout(plan), alive, waiting)
    assert first.rows.tolist() == [[0, 1, 2, 3]]
    waiting[0, :4] = alive[0, 1] = alive[0, 3] = False
    second = next_layout(plan, first, alive, waiting)
    assert second.rows.tolist() == [[0, 4, 2, 5]]
    assert second.places(first).tolist() == [[0, -1, 2, -1]]
    assert next_layout(plan, second, alive, np.where(np.arange(12) < 6, False, waiting)) is second


def test_every_block_keeps_its_own_rows():
    plan = plan_of(prompts=4, group=8, blocks=2)
    alive = np.zeros((2, 16), bool)
    alive[0, :7], alive[1, 9] = True, True
    after = next_layout(plan, first_layout(plan), alive, np.zeros_like(alive))
    assert after.bucket == RowBucket(8, 2)
    assert after.rows.tolist() == [[0, 1, 2, 3, 4, 5, 6, -1], [9] + [-1] * 7]
    alive[0, 8:] = True  # one block that is too full holds the other
    assert next_layout(plan, first_layout(plan), alive, np.zeros_like(alive)).rows.shape == (2, 16)


def test_arrange_says_how_many_slots_it_needs():
    assert len(arrange(np.array([0, 1, 4, 8]), RowBucket(4, 2), group=4)) == 6
    assert arrange(np.array([5]), RowBucket(4, 2), group=4).tolist() == [5, -1, -1, -1]


# Caches ---------------------------------------------------------------------------------------------------------------


def filled_cache(rows=6, slots=3):
    shape = (2, rows, slots, 1, 4)
    k = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return KVCache(k, -k, jnp.ones((rows, slots), bool).at[1, 0].set(False), jnp.asarray(slots, jnp.int32))


def test_rows_of_a_cache():
    cache = filled_cache()
    some = take_rows(cache, jnp.array([4, 1, -1]))
    np.testing.assert_array_equal(some.k[:, :2], cache.k[:, jnp.array([4, 1])])
    np.testing.assert_array_equal(some.v[:, :2], cache.v[:, jnp.array([4, 1])])
    np.testing.assert_array_equal(some.valid, [[True] * 3, [False, True, True], [False] * 3])
    blocks = take_rows(cache, jnp.array([[2], [0]]))
    np.testing.assert_array_equal(blocks.k, cache.k[:, jnp.array([2, 3])])


def test_rows_move_within_a_cache_and_old_slots_are_dropped():
    cache = filled_cache()
    moved = jax.jit(move_rows)(cache, jnp.array([[1, 2, -1], [0, 1, 2]]), None)
    np.testing.assert_array_equal(moved.k, cache.k[:, jnp.array([1, 2, 0, 3, 4, 5])])
    np.testing.assert_array_equal(moved.valid, np.array(cache.valid)[[1, 2, 0, 3, 4, 5]] & (np.arange(6) != 2)[:, None])
    assert int(moved.length) == 3
    dropped = move_rows(cache, jnp.arange(6)[None], jnp.int32(2))
    np.testing.assert_array_equal(dropped.v[:, :, 0], cache.v[:, :, 2])
    assert int(dropped.length) == 1


def test_the_window_of_a_cache_and_back():
    cache, window = filled_cache(), Window(2, 2, 2)
    part = window_of(cache, window)
    np.testing.assert_array_equal(part.k, cache.k[:, jnp.array([0, 1, 3, 4]), :2])
    after = with_window(cache, part.replace(k=part.k + 1, valid=~part.valid), window)
    mine = np.isin(np.arange(6), [0, 1, 3, 4])[:, None] & (np.arange(3) < 2)
    np.testing.assert_array_equal(after.k, cache.k + mine[None, :, :, None, None])
    np.testing.assert_array_equal(after.valid, np.array(cache.valid) ^ mine)


def assert_same(cache, other):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(cache), jax.tree.leaves(other))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [Window(2, 3, 3), Window(2, 2, 3), Window(1, 4, 2)])
def test_a_decode_cache_is_the_same_cache_heads_first(window, int8):
    """Reads, writes and moves through a window are those of a plain cache; each slot is rounded for itself."""
    in_order = partial(heads_first, int8=int8)
    cache = filled_cache().replace(length=jnp.asarray(1, jnp.int32))
    other, plain = opened(in_order(cache), window), window_of(cache, window)
    k, v, *steps = layer(other, jnp.int32(1))
    assert_same([k, v, *steps], layer(in_order(plain), jnp.int32(1)))
    if not int8:
        np.testing.assert_array_equal(k.transpose(1, 3, 0, 2), plain.k[1])
        np.testing.assert_array_equal(v.transpose(1, 2, 0, 3), plain.v[1])
    np.testing.assert_array_equal(decode_cache.written(other), plain.valid & (jnp.arange(window.slots) < 1))
    rows = window.blocks * window.rows
    new = jnp.full((2, rows, 1, 1, 4), 7.0, jnp.float32)
    after = decode_cache.closed(
        in_order(cache),
        append(other, new.transpose(0, 3, 1, 4, 2), -new.transpose(0, 3, 1, 2, 4), jnp.ones((rows, 1), bool)),
    )
    part = plain.replace(
        k=plain.k.at[:, :, 1].set(7.0),
        v=plain.v.at[:, :, 1].set(-7.0),
        valid=plain.valid.at[:, 1].set(True),
        length=jnp.int32(2),
    )
    want = in_order(with_window(cache, part, window))
    assert_same(after, want)
    places, drop = jnp.array([[1, 2, 0], [2, -1, 0]]), jnp.int32(1)
    moved = decode_cache.move(want, places, drop)
    assert_same(moved, in_order(move_rows(with_window(cache, part, window), places, drop)))
    assert_same(decode_cache.take_rows(want, places), in_order(take_rows(with_window(cache, part, window), places)))


@pytest.mark.parametrize("name", ["segment", "cache_bucket", "slots"])
def test_refuses_numbers_below_one(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        SegmentedSampler(toy_policy(), HOW, keys_of=keys_of, group=GROUP, **{name: 0})


# Devices --------------------------------------------------------------------------------------------------------------

EIGHT_DEVICES = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
from oarjax.models.qwen import make_policy
from oarjax.models.weights import init_params, sampling_params
from oarjax.rollout.sampler import Decoding, group_keys, sample_rows
from oarjax.rollout.segments import SegmentedSampler
from oarjax.system.mesh import make_mesh
from oarjax.run.layout import rollout_layout, sampling_model
import tiny

model, prompts = tiny.model(), tiny.prompts(8)
params = jax.tree.map(lambda x: x.astype(jnp.float64), init_params(model, jax.random.key(3)))
how, keys = Decoding(21, 1.0, 0, 1.0, (tiny.STOP, 3, 5), tiny.PAD), partial(group_keys, group_size=4)
for axes, cache, options in json.loads(sys.argv[1]):
    one = make_policy(model, compute_dtype=jnp.float64, int8=cache == "int8")
    static = jax.jit(lambda p, b, k: sample_rows(one, p, b, keys(b, k), **how._asdict()))
    want = jax.device_get(static(params, prompts, jax.random.key(1)))
    mesh = make_mesh(slice=1, **axes)
    cfg = tiny.config(rollout__prompts=8)
    where = rollout_layout(cfg.policy, cfg.rollout, cfg.lora, model, mesh)
    wide = sampling_model(model, tensor=axes["tensor"])
    policy = make_policy(wide, compute_dtype=jnp.float64, mesh=where.rows.mesh, int8=cache == "int8")
    laid = sampling_params(model, params, kv_heads=wide.num_key_value_heads, dtype=jnp.float64)
    laid, asked = jax.device_put(laid, where.params), jax.device_put(prompts, where.rows)
    run = SegmentedSampler(policy, how, keys_of=keys, group=4, rows=where.rows, fewest=2, **options)
    listed = {each.lower().as_text(): each.name for each in run.programs(laid, asked, jax.random.key(1))}
    called = {}

    def recorded(name, jitted):
        def call(*args, **static):
            called.setdefault(jitted.lower(*args, **static).as_text(), name)
            return jitted(*args, **static)
        call.eval_shape = jitted.eval_shape
        return call

    for name in ("_prefill", "_decode", "_take", "_move"):
        setattr(run, name, recorded(name, getattr(run, name)))
    got, again = (run(laid, asked, jax.random.key(1)) for _ in range(2))
    blocks = len({str(s.index) for s in got.tokens.addressable_shards})
    got, again = jax.device_get((got, again))
    print(json.dumps({
        "blocks": blocks,
        "tokens": bool((got.tokens == want.tokens).all() & (got.ended == want.ended).all()),
        "again": bool((got.behaviour_logps == again.behaviour_logps).all()),
        "logps": float(abs(got.behaviour_logps - want.behaviour_logps).max()),
        "decode_programs": run.decode_programs,
        "kinds": len(set(called.values())),
        "unlisted": [name for text, name in called.items() if text not in listed],
        **run.spent().metrics(),
    }), flush=True)
"""
MESHES = [
    ({"data": 8, "fsdp": 1, "tensor": 1}, "policy", {"segment": 6, "cache_bucket": 7}),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "int8", {"segment": 4, "cache_bucket": 8, "slots": 8}),
]


@pytest.mark.slow
def test_eight_devices_draw_what_one_does():
    """Two meshes in float64: rows over 8 devices; over 4, key heads over two, fewer slots than rows, and int8."""
    found = json_lines(EIGHT_DEVICES, json.dumps(MESHES), devices=8, quick=True, timeout=900)
    assert [line["blocks"] for line in found] == [8, 4]
    for line in found:
        print(line)
        assert line["tokens"], line
        assert line["again"], line
        assert line["logps"] < 1e-12, line
        assert line["decode_occupancy"] > 0.3, line
        assert line["decode_programs"] > 2, line
        # A plan compiles those that are listed: of the same text, with the same shardings.
        assert (line["kinds"], line["unlisted"]) == (4, []), line


def test_rows_go_on_with_their_noise_and_to_their_limit(toy):
    """A row cut after any of its tokens and continued is the row drawn at once; the turn before counts to max_new."""
    static, _, _ = toy
    seed, key = 5, jax.random.key(9)
    with jax.enable_x64(True):
        policy, params = toy_policy(), toy_params(jax.random.key(3), scale=0.7, dtype=jnp.float64)
        want = jax.device_get(static(prompt_batch(seed), key))
        lengths = want.completion.sum(1)
        cuts = np.minimum(np.arange(len(lengths)) % 5, lengths - 1)  # tokens of the first turn; 0: none
        rows = [
            np.concatenate([want.tokens[b, :WIDTH][want.valid[b, :WIDTH]], want.tokens[b, WIDTH : WIDTH + n]])
            for b, n in enumerate(cuts)
        ]
        tokens, valid = left_padded([row.tolist() for row in rows], WIDTH + 4)
        more = PromptBatch(tokens, valid, jnp.arange(len(rows), dtype=jnp.int32), jnp.asarray(cuts, jnp.int32))

        def row_keys(prompts, key):
            all_keys = keys_of(prompt_batch(seed), key)
            return all_keys[prompts.problem]

        on = SegmentedSampler(policy, HOW, keys_of=row_keys, group=1, segment=3, cache_bucket=7)
        got = jax.device_get(on(params, more, key))
    for b, n in enumerate(cuts):
        left = lengths[b] - n
        assert got.completion[b].sum() == left
        np.testing.assert_array_equal(
            got.tokens[b, -HOW.max_new :][:left], want.tokens[b, WIDTH + n : WIDTH + lengths[b]]
        )
        np.testing.assert_allclose(got.behaviour_logps[b, :left], want.behaviour_logps[b, n : lengths[b]], atol=1e-12)
    np.testing.assert_array_equal(got.ended, want.ended)
    assert (~want.ended).any()  # some rows were cut at max_new, and so were they continued
