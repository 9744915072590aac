"""Choices of experts: recorded by the sampler, replayed in score and update, and their load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TESTS
from toy_policy import left_padded, toy_policy

from oarjax.data.hf import load_params, read_config
from oarjax.models.moe import balance_loss
from oarjax.models.policy import positions_of, replaying
from oarjax.models.qwen import make_policy
from oarjax.rollout.logps import token_logps
from oarjax.rollout.sampler import Decoding, group_keys, sample
from oarjax.rollout.segments import SegmentedSampler
from oarjax.step.loss import router_metrics
from oarjax.step.minibatches import MinibatchPlan, cut, join, sizes_of, take, trim, widen
from oarjax.types import AnswerSpan, PromptBatch, Rollout, Routing

GROUP, NEW = 4, 10
SETTINGS = {"max_new": NEW, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "stop_ids": (3,), "pad_id": 0}


def prompts():
    tokens, valid = left_padded([[5, 6, 7], [9, 4], [8, 10, 11, 12]], 5)
    return PromptBatch(tokens, valid, jnp.arange(3, dtype=jnp.int32))


@pytest.fixture(scope="module", params=["moe_untied", "moe_delta_untied"])
def mixture(request):
    cfg, folder = read_config(TESTS / "golden" / "policy" / request.param)
    return cfg, load_params(folder, cfg)


def drawn(policy, params, key=0):
    draw = jax.jit(
        lambda p: sample(policy, p, prompts(), jax.random.key(key), group_size=GROUP, record_experts=True, **SETTINGS)
    )
    return draw(params)


def test_the_sampler_records_what_its_router_chose(mixture):
    """Prefill once per group, tokens one by one, and rows that end: the choices of one pass over whole rows."""
    cfg, params = mixture
    policy = make_policy(cfg, remat="none", experts="dense")
    rollout = drawn(policy, params)
    assert rollout.experts.shape == (*rollout.tokens.shape, cfg.num_hidden_layers, cfg.experts.per_token)
    assert rollout.experts.dtype == jnp.int8

    def routing(tokens, valid):
        counted = valid & jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
        rows = policy.embed(params, tokens), positions_of(valid), valid
        return policy.trunk(params, *rows)[0], *policy.routed(params, *rows, counted=counted)[::2], counted

    plain, hidden, found, counted = jax.jit(routing)(rollout.tokens, rollout.valid)
    np.testing.assert_array_equal(hidden, plain)
    seen = np.asarray(counted)
    assert not rollout.ended.all() or rollout.completion.sum() < rollout.completion.size
    np.testing.assert_array_equal(np.asarray(rollout.experts)[seen], np.asarray(found.chosen)[seen])
    ends = np.asarray(rollout.valid) & ~seen  # the last token of a row is no input of another
    assert (np.asarray(rollout.experts)[ends] == 0).all()
    # Load and probabilities are sums over the inputs that count, in every layer.
    layers = range(cfg.num_hidden_layers)
    counts = [np.bincount(found.chosen[..., layer, :][seen].ravel(), minlength=8) for layer in layers]
    np.testing.assert_array_equal(found.load, counts)
    np.testing.assert_allclose(found.probability.sum(-1), seen.sum(), rtol=1e-5)
    np.testing.assert_array_equal(found.tokens, seen.sum())


@pytest.mark.slow
def test_segments_record_the_same(mixture):
    """With rows that leave the batch and others that take their place."""
    cfg, params = mixture
    policy = make_policy(cfg, remat="none", experts="dense")
    want = drawn(policy, params)
    how = Decoding(NEW, 1.0, 0, 1.0, (3,), 0, record_experts=True)
    run = SegmentedSampler(
        policy, how, keys_of=lambda p, key: group_keys(p, key, group_size=GROUP), group=GROUP, segment=3, slots=4
    )
    found = run(params, prompts(), jax.random.key(0))
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_array_equal(found.experts, want.experts)


def test_choices_stay_with_their_tokens():
    """Through refills, left padding, rows taken, sorted by length and divided, and cuts: each choice is its token."""

    def rollout(width, completion):
        lengths = np.random.default_rng(width).integers(1, 7, (8, 2)) % [width, 7] + [[1, 0]]
        slots = np.arange(width + 6)
        valid = (slots >= width - lengths[:, :1]) & (slots < width + lengths[:, 1:])
        tokens = np.where(valid, np.random.default_rng(completion).integers(1, 100, valid.shape), 0)
        mask, zeros = valid[:, width:], np.zeros((8, 6), np.float32)
        experts = np.broadcast_to(tokens[..., None, None], (*tokens.shape, 2, 3)).astype(np.int8)
        return Rollout(tokens, valid, mask, zeros, zeros, mask.any(1), experts=experts)

    def check(rollout, count):
        assert np.count_nonzero(rollout.tokens) == count > 0
        np.testing.assert_array_equal(
            rollout.experts, np.broadcast_to(rollout.tokens[..., None, None], rollout.experts.shape)
        )

    both = join([rollout(3, 1), rollout(5, 2)])
    check(both, int(both.valid.sum()))
    rows = np.array([9, 2, 4, 15, 7, 0, 11, 3])
    chosen = widen(take(both, rows), 8)
    check(chosen, int(both.valid[rows].sum()))
    none = np.zeros((8, 6), bool)
    short = np.flatnonzero(chosen.completion.sum(1) <= 4)
    trimmed, _ = trim(chosen, AnswerSpan(none, none, none[:, 0]), short, length=4)
    check(take(trimmed, short), int(chosen.valid[short].sum()))
    sizes = sizes_of(chosen, prompt_bucket=2, completion_bucket=2)
    plan = MinibatchPlan(np.arange(8), 2, 2, 8, sizes)
    for minibatch, pieces in zip(plan.split(chosen), plan.pieces):
        for piece in pieces:
            for i in range(int(piece.start), int(piece.stop)):
                one = jax.tree.map(lambda x, i=i: x[i], minibatch)
                check(cut(one, piece.bucket, length=6), int(one.valid.sum()))


@pytest.mark.slow
def test_replay_keeps_log_probs_where_bfloat16_chooses_otherwise(mixture):
    """A router of nearly equal experts: the sampler's bfloat16 and float32 disagree on some; replayed, they agree."""
    cfg, params = mixture

    def near(path, x):  # all columns of a router almost one: choices hang on the last bits
        return 0.2 * x[..., :1] + 2e-3 * x if "'router'" in str(path) else x

    params = jax.tree.map_with_path(near, params)
    rollout = drawn(make_policy(cfg, remat="none", experts="dense", compute_dtype=jnp.bfloat16), params)
    policy = make_policy(cfg, remat="none", experts="dense")

    @jax.jit
    def gaps(rollout):
        def gap(policy):
            rows = rollout.tokens, rollout.valid
            logps, _ = token_logps(policy, params, *rows, completion_length=NEW, temperature=1.0, head_chunk=512)
            return jnp.where(rollout.completion, jnp.abs(logps - rollout.behaviour_logps), 0)

        return gap(policy), gap(replaying(policy, rollout.experts))

    recomputed, replayed = (float(x.max()) for x in gaps(rollout))
    print(recomputed, replayed)
    assert recomputed > 0.3
    assert replayed < 0.1


def test_an_even_router_has_a_balance_loss_of_k_and_even_loads():
    """Two layers, 4 experts, k = 2: loads of 4 / 2 tokens each are 1; all on one pair gives E k / 2 = 4."""
    even = Routing(jnp.zeros((2, 1, 4, 2), jnp.int8), jnp.full((2, 4), 2.0), jnp.full((2, 4), 1.0), jnp.full(2, 4.0))
    assert float(balance_loss(even)) == pytest.approx(2)
    assert {name: float(m.value) for name, m in router_metrics(even).items()} == pytest.approx(
        {"router/load_max": 1, "router/idle": 0, "router/entropy": 1}
    )
    pair = jnp.array([[4.0, 4.0, 0, 0]] * 2)
    uneven = Routing(even.chosen, pair, pair / 2, even.tokens)
    assert float(balance_loss(uneven)) == pytest.approx(4)
    assert {name: float(m.value) for name, m in router_metrics(uneven).items()} == pytest.approx(
        {"router/load_max": 2, "router/idle": 0.5, "router/entropy": 0.5}
    )


def test_replay_needs_experts():
    policy = toy_policy()
    assert replaying(policy, None) is policy
    with pytest.raises(ValueError, match="experts: this policy has no experts"):
        replaying(policy, jnp.zeros((1, 2, 1, 1), jnp.int8))
