"""The field's methods one by one, each worked by hand, and each in training. What all keep is in the contract."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import ROOT
from scipy.optimize import linear_sum_assignment
from scipy.stats import fisher_exact
from toy_policy import toy_params, toy_policy

from oarjax.credit.experimental import gtpo, shear
from oarjax.credit.experimental.critic_search import turn_advantages
from oarjax.credit.experimental.dgpo import dgpo_weights
from oarjax.credit.experimental.egca import span_weights
from oarjax.credit.gate import oar_weights
from oarjax.credit.measures import measure
from oarjax.credit.method import built_in
from oarjax.credit.methods import delta, ktae, rlsd, serl
from oarjax.credit.methods.crpo import decoupled_advantages
from oarjax.credit.methods.fipo import future_weights
from oarjax.credit.methods.rlsd import teacher_weights
from oarjax.credit.methods.sdpg import teacher_kl
from oarjax.credit.methods.token_baseline import baseline_advantages
from oarjax.credit.record import MEASURES
from oarjax.credit.registry import METHODS
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, Signals
from oarjax.errors import ConfigError
from oarjax.rollout.filters import Filters
from oarjax.rollout.logps import last_states
from oarjax.step.hints import marked_tokens
from oarjax.step.iteration import iterate
from oarjax.system.plugins import import_object
from oarjax.types import AnswerSpan, Hints, Privileged, Rollout

gtpo_advantages = jax.jit(gtpo.gtpo_advantages)
key_token_bonus = jax.jit(ktae.key_token_bonus, static_argnames=("fisher", "gain", "scale"))
delta_weights = jax.jit(delta.delta_weights, static_argnames="rounds")
divergence_weights = jax.jit(shear.divergence_weights, static_argnames=("window", "stride", "epsilon", "iterations"))
wasserstein = jax.jit(shear.wasserstein, static_argnames=("epsilon", "iterations"))
"""One program for each shape, instead of one for each operation."""


# One iteration of training each -------------------------------------------------------------------------------------

CHANGES: dict[str, dict] = {
    "crpo": {"grading__rewards": [{"name": "test"}]},  # as the host names it
    "fipo": {"update__epochs": 2},
    "shear": {"credit__shear": {"window": 3, "stride": 2, "iterations": 5}},
}
"""What a method needs of the config."""


def world(batches=None):
    """A host that marks every third token and has a longer prompt for the teacher."""

    def hints(rollout, problems):
        rows, length = rollout.completion.shape
        turns = np.where(rollout.completion, np.arange(length) // 3, 0).astype(np.int32)
        tokens = np.random.default_rng(0).integers(3, tiny.VOCAB, (rows, 9)).astype(np.int32)
        return Hints((turns % 2).astype(np.float32), turns, Privileged(tokens, np.ones(tokens.shape, bool)))

    return tiny.host(batches=batches)._replace(hints=hints)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ktae", "dgpo", "shear", "egca", "critic_search", "crpo", "fipo", "sdpg"])
def test_one_iteration_of_training(method):
    """One method of each kind and source of signals; where it allows that, with the programs of plain GRPO.

    Methods that compare no rows run without groups.
    """
    record, base, batches = built_in(method), {"update__skip_zero_variance": False}, None
    if record.coupling == "row" and record.advantage is None:
        base |= {"rollout__prompts": 16, "rollout__group_size": 1, "advantage__method": "batch"}
        base |= {"advantage__scale": "batch"}
        batches = [tiny.prompts(16)]
    cfg = tiny.config(credit__method=method, **base, **CHANGES.get(method, {}))
    _, plain, state = tiny.build(tiny.config(**base))
    _, own, _ = tiny.build(cfg)
    steps = own._replace(sample=plain.sample)
    if record.loss is None and record.reweigh is None:
        steps = plain._replace(score=own.score, credit=own.credit, advantages=own.advantages)
    before = jax.device_get(state.params)
    reference = jax.tree.map(lambda x: 0.5 * x, state.params)
    state, done = iterate(state, reference, 1, steps=steps, host=world(batches), cfg=cfg)
    assert done.metrics["skipped"] == 0
    assert np.isfinite(done.metrics["grad_norm"])
    mixed = done.advantages != 0
    assert mixed.any()
    assert np.isfinite(done.weights).all()
    if method == "sdpg":
        assert done.metrics["auxiliary"] > 0
    elif method not in ("fipo", "crpo"):
        assert (done.weights[mixed] != 1).any()
    after = jax.device_get(state.params)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].coupling == "group"])
def test_methods_of_groups_need_them_whole(method):
    with pytest.raises(ConfigError, match=rf"update.minibatches: credit.method {method} compares the rows of a group"):
        tiny.build(tiny.config(credit__method=method, update__minibatches=2))


def test_weights_per_update_need_several():
    with pytest.raises(
        ConfigError, match=r"update.epochs: credit.method fipo weighs tokens by how the policy has changed"
    ):
        tiny.build(tiny.config(credit__method="fipo"))


# Signals ------------------------------------------------------------------------------------------------------------


def test_signals_are_what_the_whole_distributions_say():
    policy, T = toy_policy(), 5
    params, other = (toy_params(jax.random.key(k)) for k in (0, 1))
    tokens = jax.random.randint(jax.random.key(2), (2, 8), 0, 23)
    valid = jnp.ones((2, 8), bool)
    teacher = Privileged(jnp.ones((2, 4), jnp.int32), jnp.ones((2, 4), bool))
    settings = {"completion_length": T, "temperature": 0.7, "head_chunk": 3}

    def measured(wanted, *, filters=None, **others):
        program = jax.jit(partial(measure, policy, signals=wanted, filters=filters, **settings))
        return program(params, tokens=tokens, valid=valid, **others)

    found = measured(MEASURES, reference=other, teacher=teacher)

    def distribution(weights, tokens, valid):
        states = last_states(policy, weights, tokens, valid, completion_length=T)
        return states, np.asarray(jax.nn.softmax(policy.unembed(weights, states) / 0.7), np.float64)

    (states, p), (_, q) = distribution(params, tokens, valid), distribution(other, tokens, valid)
    longer = jnp.concatenate([teacher.tokens, tokens[:, -T:]], 1)
    _, told = distribution(params, longer, jnp.ones(longer.shape, bool))
    chosen = np.eye(23)[np.asarray(tokens)[:, -T:]]
    entropy = -(p * np.log(p)).sum(-1)
    expected = {
        "logps": np.log((p * chosen).sum(-1)),
        "entropies": entropy,
        "spread": entropy / np.log(23),
        "score_norms": ((chosen - p) ** 2).sum(-1),
        "hellinger": 1 - np.sqrt(p * q).sum(-1),
        "teacher_logps": np.log((told * chosen).sum(-1)),
        "hidden": states,
    }
    assert set(found) == set(expected) == set(MEASURES)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-4, atol=2e-5, err_msg=name)

    # Over a truncated support: the four likeliest tokens, and the one that was drawn.
    kept = np.where((p >= np.sort(p, -1)[..., -4:-3]) | (chosen == 1), p, 0)
    kept /= kept.sum(-1, keepdims=True)
    expected = {
        "logps": np.log((kept * chosen).sum(-1)),
        "entropies": -np.where(kept > 0, kept * np.log(np.where(kept > 0, kept, 1)), 0).sum(-1),
        "score_norms": ((chosen - kept) ** 2).sum(-1),
    }
    found = measured(set(expected), filters=Filters(top_k=4))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-4, atol=2e-5, err_msg=name)


# KTAE ---------------------------------------------------------------------------------------------------------------

CORRECT = jnp.array([True, True, False, False])
ALL = jnp.ones((4, 2), bool)
ONE_GROUP = jnp.zeros(4, jnp.int32)


def test_ktae_by_hand():
    # 5 is in both correct rows and in one wrong one: a, b, c, d = 2, 1, 0, 1. Fisher's p is 1, so f = 0; the gain is
    # 1 - .75 H(2/3) = .3113 bits. Frequencies .5 and .25 of four tokens each: tf = .6 and 1/3. x = asin 1 - asin
    # sqrt .5 + 1.8 - .5556 = 2.0298, and the bonus 2 sigmoid(.3113 / 2 x) - 1 = .1567.
    # 7 is in one correct row alone: the ratio of frequencies saturates at 1. 8 is in one row of each side: nothing.
    tokens = jnp.array([[5, 7], [5, 8], [5, 8], [6, 6]])
    bonus = key_token_bonus(tokens, ALL, CORRECT, ~CORRECT, ONE_GROUP)
    np.testing.assert_allclose(bonus, [[0.1567, 1], [0.1567, 0], [0.1567, 0], [-1, -1]], atol=2e-4)
    half = key_token_bonus(tokens, ALL, CORRECT, ~CORRECT, ONE_GROUP, gain=3.0, fisher=1.0, scale=0.5)
    assert half[0, 0] == pytest.approx(0.5 * np.tanh(0.75 * 0.311278 * 2.0298 / 2), rel=1e-4)


def test_sums_over_groups_are_float64_in_a_float64_run(x64):
    """The same by hand as above, and a reward's weight that float32 would round."""
    tokens = jnp.array([[5, 7], [5, 8], [5, 8], [6, 6]])
    bonus = key_token_bonus(tokens, ALL, CORRECT, ~CORRECT, ONE_GROUP)
    gain = 1 + 0.75 * (2 / 3 * np.log2(2 / 3) + 1 / 3 * np.log2(1 / 3))
    tf = 0.6, 1 / 3
    x = np.pi / 4 + tf[0] / (tf[1] + 1e-5) - tf[1] / (tf[0] + 1e-5)
    assert bonus[0, 0] == pytest.approx(np.tanh(gain / 2 * x / 2), rel=1e-12)
    rewards = jnp.array([[1.0], [0.0], [0.0], [0.0]])
    found = decoupled_advantages(rewards, [0.1], group_size=4, scale="none", ddof=1, eps=1e-4)
    np.testing.assert_allclose(found, [0.075, -0.025, -0.025, -0.025], rtol=1e-14)


def test_ktae_fishers_test_is_scipys():
    tables = np.array([[2, 0, 0, 2], [3, 1, 1, 3], [4, 0, 2, 2], [1, 0, 3, 4], [5, 2, 0, 1], [8, 1, 0, 7]])
    found = ktae._fisher_p(*(jnp.asarray(x, jnp.float32)[None] for x in tables.T))[0]
    expected = [fisher_exact([[a, b], [c, d]])[1] for a, b, c, d in tables]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_ktae_counts_within_the_group_and_the_completion():
    tokens = jnp.array([[5, 7], [5, 8], [5, 8], [6, 6]])
    twice = jnp.concatenate([tokens, tokens + 1])[jnp.array([0, 5, 2, 7, 4, 1, 6, 3])]
    correct, groups = jnp.tile(jnp.array([True, True, False, False]), 2), jnp.array([0, 1, 0, 1, 1, 0, 1, 0])
    alone = key_token_bonus(tokens, ALL, CORRECT, ~CORRECT, ONE_GROUP)
    mixed = key_token_bonus(twice, jnp.ones((8, 2), bool), correct, ~correct, groups)
    np.testing.assert_allclose(mixed[jnp.array([0, 5, 2, 7])], alone, atol=1e-6)
    np.testing.assert_allclose(mixed[jnp.array([4, 1, 6, 3])], alone, atol=1e-6)
    one_sided = key_token_bonus(tokens, ALL, jnp.ones(4, bool), jnp.zeros(4, bool), ONE_GROUP)
    np.testing.assert_array_equal(one_sided, np.zeros((4, 2)))
    short = key_token_bonus(tokens, ALL.at[3, 1].set(False), CORRECT, ~CORRECT, ONE_GROUP)
    assert short[3, 1] == 0
    assert short[0, 0] != alone[0, 0]  # wrong rows have three tokens now


# GTPO ---------------------------------------------------------------------------------------------------------------


def test_gtpo_by_hand():
    # correct rows: 1.15, 1.05 | 1.05, 1.15, mean 1.1, std .05; wrong: -1.04, -1.16 | -1.16, -1.04, mean -1.1, std .06
    entropies = jnp.array([[3.0, 1.0], [1.0, 3.0], [4.0, 1.0], [1.0, 4.0], [9.0, 9.0]])
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0, 0.0])
    found = gtpo_advantages(entropies, jnp.ones((5, 2), bool), advantages, jnp.zeros(5, jnp.int32))
    a, b = 0.05 / 0.0501, 0.06 / 0.0601
    np.testing.assert_allclose(found, [[a, -a], [-a, a], [b, -b], [-b, b], [0, 0]], rtol=1e-3, atol=1e-6)


def test_gtpo_shares_out_among_the_rows_that_are_alive():
    # the second row ends after a token: at the second position the first has all of d_t = 1, so r = 1.15, 1.1 | 1.05
    entropies, completion = jnp.array([[3.0, 1.0], [1.0, 7.0]]), jnp.array([[True, True], [True, False]])
    found = gtpo_advantages(entropies, completion, jnp.ones(2), jnp.zeros(2, jnp.int32))
    std = np.std([1.15, 1.1, 1.05]) + 1e-4
    np.testing.assert_allclose(np.asarray(found)[completion], np.array([0.05, 0, -0.05]) / std, atol=1e-4)


# Token baseline -----------------------------------------------------------------------------------------------------


def test_token_baseline_by_hand():
    # W at 0: .5, 1, .5, so B = (1 - 1 - .5) / 2 = -.25; at 1: 1, 2, B = (2 - 2) / 3 = 0; at 2 one row is alive
    norms = jnp.array([[0.5, 0.5, 0.5], [1.0, 1.0, 9.0], [0.5, 9.0, 9.0]])
    completion = jnp.arange(3) < jnp.array([[3], [2], [1]])
    found = baseline_advantages(norms, completion, jnp.array([2.0, -1.0, -1.0]), jnp.zeros(3, jnp.int32))
    expected = [[2.25, 2, 2], [-0.75, -1], [-0.75]]
    np.testing.assert_allclose(np.asarray(found)[completion], np.concatenate(expected), rtol=1e-6)


def test_token_baseline_does_not_depend_on_a_shift_of_the_returns():
    norms = jnp.asarray(np.random.default_rng(0).random((4, 5)), jnp.float32)
    args = norms, jnp.ones((4, 5), bool)
    returns = jnp.array([1.0, 0.0, 0.0, 1.0])
    a, b = (baseline_advantages(*args, returns - shift, ONE_GROUP) for shift in (0.0, 0.5))
    np.testing.assert_allclose(a, b, atol=1e-6)


# DelTA --------------------------------------------------------------------------------------------------------------


def test_delta_by_hand():
    # v = h = 1, 0 | -1, 0, centroids +-.5, margins 2, 0 on either side, std 1, q = sigmoid(2), .5, w = 1.1523, 1;
    # after a round the centroids are +-.8808 / 1.3808 = .6379, margins 2.5516, 0, q = .9277, .5, w = 1.1711, 1
    hidden = jnp.array([[[1.0], [0.0]], [[-1.0], [0.0]], [[5.0], [5.0]]])
    args = hidden, jnp.full((3, 2), -50.0), jnp.ones((3, 2), bool), jnp.array([1.0, -1.0, 0.0])
    for rounds, (a, b) in enumerate([(1.1523188, 1.0), (1.1710765, 1.0)]):
        row = [2 * a / (a + b), 2 * b / (a + b)]
        np.testing.assert_allclose(delta_weights(*args, rounds=rounds), [row, row, [1, 1]], rtol=2e-4)


def test_delta_certain_tokens_have_no_gradient():
    # with pi(y) = 1 every v is 0, and so is every margin
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
    weights = delta_weights(hidden, jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.array([1.0, -1.0]))
    np.testing.assert_allclose(weights, np.ones((2, 3)), rtol=1e-6)


# DGPO, FIPO, CRPO ---------------------------------------------------------------------------------------------------


def test_dgpo_by_hand():
    # d g / tau = 1, .5, 0: exponentials 2.7183, 1.6487, 1 of 5.3670, times 3 tokens
    weights = dgpo_weights(
        jnp.array([[0.5, 0.5, 0.0, 1.0]]), jnp.array([[1.0, 0.5, 1.0, 1.0]]), jnp.arange(4)[None] < 3, tau=0.5
    )
    np.testing.assert_allclose(weights, [[1.5195, 0.9216, 0.5590, 1]], atol=1e-4)


def test_fipo_by_hand():
    # changes .1, 0, -.2, halved per step: sums .05, -.1, -.2, exponentials 1.0513, .9048, .8187, the last clipped
    old = jnp.array([[-1.0, -1.0, -1.0, -1.0]])
    new = old + jnp.array([[0.1, 0.0, -0.2, 5.0]])
    args = new, old, jnp.arange(4)[None] < 3, jnp.ones((1, 4))
    weights = future_weights(*args, gamma=0.5, clip=0.15, levels="both")
    np.testing.assert_allclose(weights, [[1.0513, 0.9048, 0.85, 1]], atol=1e-4)
    np.testing.assert_allclose(future_weights(*args, gamma=0.5, clip=0.15), [[1.0513, 1, 1, 1]], atol=1e-4)
    with pytest.raises(ValueError, match="future_weights: expected gamma and clip in"):
        future_weights(*args, gamma=1.5)


@pytest.mark.parametrize("settings", [{}, {"levels": "both"}, {"gamma": 0.5, "clip": 0.5, "drop": 2.0, "cap": 1.5}])
def test_fipo_is_the_released_formula(settings, x64):
    """In float64, token by token: sums without ratios above drop, and the cap of unlikely tokens of A < 0."""
    draw = np.random.default_rng(5)
    old, new = -draw.exponential(2, (6, 40)), -draw.exponential(2, (6, 40))
    new[:, 7], old[:, 7] = -0.1, -4.5  # a ratio of 81
    old[4, 3], new[4, 3] = -60.0, -1.0  # beyond the bound of 20
    completion = np.arange(40) < np.array([40, 33, 12, 8, 40, 0])[:, None]
    advantages = np.broadcast_to(np.array([1.0, -1.0, 0.0, -0.5, -2.0, 1.0])[:, None], (6, 40))
    gamma, clip = settings.get("gamma", 2 ** (-1 / 32)), settings.get("clip", 0.2)
    drop, cap, low = settings.get("drop", 10), settings.get("cap", 10), 1 - clip * (settings.get("levels") == "both")
    expected = np.ones((6, 40))
    for i, t in zip(*np.nonzero(completion)):
        total = 0.0
        for k in range(t, 40):
            change = min(max(new[i, k] - old[i, k], -20.0), 20.0)
            if completion[i, k] and change <= np.log(drop):
                total += gamma ** (k - t) * change
        expected[i, t] = min(max(np.exp(total), low), 1 + clip)
        if advantages[i, t] < 0 and np.exp(min(new[i, t] - old[i, t], 20.0)) > cap:
            expected[i, t] = min(max(expected[i, t], 0.8), 1.0)
    found = future_weights(*map(jnp.asarray, (new, old, completion, advantages)), **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found.dtype == np.float64
    assert (expected > 1).any()
    assert (expected[:, 7][advantages[:, 7] < 0] <= 1).all()


def test_crpo_by_hand():
    # each reward is 0, 1 twice: mean .5, std .5774, so +-.8659 of each, half of both; the second group is constant
    rewards = jnp.array(
        [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 5.0], [1.0, 5.0], [1.0, 5.0], [1.0, 5.0]]
    )
    found = decoupled_advantages(rewards, [0.5, 0.5], group_size=4, scale="group", ddof=1, eps=1e-4)
    np.testing.assert_allclose(found, [0, 0, 0.8659, -0.8659, 0, 0, 0, 0], atol=1e-4)
    uneven = decoupled_advantages(rewards[:4], [2.0, 0.5], group_size=4, scale="group", ddof=1, eps=1e-4)
    np.testing.assert_allclose(uneven, 0.8659 * np.array([1.5, -1.5, 2.5, -2.5]), atol=1e-3)
    with pytest.raises(ValueError, match="2 rewards and 1 weights"):
        decoupled_advantages(rewards, [1.0], group_size=4, scale="group", ddof=1, eps=1e-4)


# Marks: EGCA, CriticSearch -------------------------------------------------------------------------------------------


def test_egca_by_hand():
    completion = jnp.array([[True] * 4 + [False], [True] * 5])
    marked = jnp.array([[False, True, True, False, True], [False] * 5])
    np.testing.assert_allclose(span_weights(marked, completion), [[0, 2, 2, 0, 1], [1] * 5])


def test_critic_search_by_hand():
    # one good turn of two: .25 - .75 on it, -.75 elsewhere; two good ones share .25; no turns: A
    labels = jnp.array([[1.0, 1, -1, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    turns = jnp.array([[1, 1, 2, 0], [1, 2, 2, 0], [0, 0, 0, 0]])
    found = turn_advantages(labels, turns, jnp.ones((3, 4), bool), -jnp.ones(3))
    np.testing.assert_allclose(found, [[-0.5, -0.5, -0.75, -0.75], [-0.625] * 3 + [-0.75], [-1] * 4], rtol=1e-5)


def test_marks_become_tokens_by_their_characters():
    table = [b"", b"12+7", b"=2", b"0", b";\xc3", b"\xa9", b"x"]
    ids = np.array([[9, 1, 2, 3, 4, 5, 6, 0]])
    mask, zeros = np.ones((1, 7), bool), np.zeros((1, 7), np.float32)
    rollout = Rollout(ids.astype(np.int32), np.ones((1, 8), bool), mask, zeros, zeros, np.ones(1, bool))
    values_of = partial(marked_tokens, table, rollout, [("12+7=", "19")], name="here")

    def marker(prompt, completion, reference):
        assert (prompt, completion, reference) == ("12+7=", "12+7=20;\u00e9x", "19")
        return [(5, 7), (8, 9, -2.0)]

    values, numbers = values_of(marker)
    np.testing.assert_array_equal(values, [[0, 1, 1, -2, -2, 0, 0]])
    np.testing.assert_array_equal(numbers, [[0, 1, 1, 2, 2, 0, 0]])
    with pytest.raises(ConfigError, match=r"credit.marks: here returns \(3, 99, 1.0\) for a completion of 10 char"):
        values_of(lambda *_: [(3, 99)])
    with pytest.raises(ConfigError, match=r"credit.marks: here fails on a completion: ZeroDivisionError"):
        values_of(lambda *_: 1 / 0)


def test_the_examples_mark_steps():
    file = ROOT / "docs" / "examples" / "custom_marks.py"
    wrong, steps = (
        import_object(f"{file}:{name}", field="x", expected=object) for name in ("first_wrong_sum", "labelled_steps")
    )
    text = "12+7=19;19-3=15;15+1=17;#### 17"
    assert steps("", text, "") == [(0, 7, 1.0), (8, 15, -1.0), (16, 23, -1.0)]
    assert wrong("", text, "") == [(8, 15, 1.0)]


def test_the_oracle_marks_what_decides_on_every_built_in_task():
    file = ROOT / "docs" / "examples" / "oracle.py"
    deciding, gated = (import_object(f"{file}:{name}", field="x", expected=object) for name in ("deciding", "gated"))

    def marked(prompt, text):
        return "".join(text[start:end] for start, end, _ in deciding(prompt, text, ""))

    assert marked("3+9=", "3+9=12;#### 12") == "312"
    assert marked("37=", "abAcdDxA#### AD") == "AD"
    assert marked("375=", "3+7=0;ab0+5=5;cd#### 5") == "05"
    story = "Anna keeps 7 nuts in a wooden box under the bed. Then she finds 2 more behind the old door."
    assert marked(story, "We add as it says: 7 + 2 = 9. It is \\boxed{9}.") == "add7+29"
    reasoning = jnp.arange(6)[None] < 5
    signals = Signals(marks=jnp.array([[0.0, 1, 0, 0, 1, 1]]))
    span, context = AnswerSpan(reasoning, ~reasoning, jnp.ones(1, bool)), Context(CreditSettings())
    args = jnp.ones(1), reasoning, jax.random.key(0)
    weights = gated.weigh(CreditInputs(signals, span, *args), context)
    expected = oar_weights(jnp.array([[0.0, 1, 0, 0, 1, 0]]), reasoning)
    np.testing.assert_allclose(weights, expected)
    assert weights[0, 1] > weights[0, 0]


def test_the_example_of_agreement_averages_a_group_at_each_place():
    file = ROOT / "docs" / "examples" / "custom_agreement.py"
    group_mean, agreed = (import_object(f"{file}:{n}", field="x", expected=object) for n in ("group_mean", "agreed_g"))
    scores = jnp.expm1(jnp.array([[1.0, 2.0, 0.0], [4.0, 1.0, 9.0], [0.5, 0.25, 0.0]]))  # log1p gives these back
    reasoning = jnp.array([[True, True, True], [True, True, False], [True, True, True]])
    groups = jnp.array([7, 7, 3])
    # Rows over their largest: .5, 1, 0 and 1, .25; the third place of the second row is no reasoning.
    expected = [[0.75, 0.625, 0.0], [0.75, 0.625, 0.0], [1.0, 0.5, 0.0]]
    np.testing.assert_allclose(group_mean(scores, reasoning, groups), expected, rtol=1e-5)
    span = AnswerSpan(reasoning, ~reasoning, jnp.ones(3, bool))
    rest = jnp.ones(3), jnp.ones((3, 3), bool), jax.random.key(0)
    weights = agreed.weigh(
        CreditInputs(Signals(importance=scores, groups=groups), span, *rest), Context(CreditSettings())
    )
    np.testing.assert_allclose(weights, oar_weights(jnp.array(expected), reasoning), rtol=1e-5)
    assert agreed.coupling == "group"


# Teacher: RLSD, SERL, SDPG -------------------------------------------------------------------------------------------


def test_rlsd_by_hand():
    # a token twice as likely to the teacher: exp(D) = 2, clipped to 1.2, and for A < 0 .5, clipped to .8; half of each
    teacher, logps = jnp.log(jnp.array([[0.4, 0.22], [0.4, 0.22]])), jnp.log(jnp.array([[0.2, 0.2], [0.2, 0.2]]))
    args = teacher, logps, jnp.ones((2, 2), bool), jnp.array([2.0, -1.0])
    np.testing.assert_allclose(teacher_weights(*args, 0.5), [[1.1, 1.05], [0.9, 0.954545]], rtol=1e-5)
    signals = Signals(teacher_logps=teacher, logps=logps, iteration=26, marks=jnp.array([[1.0, 0], [0, -1]]))
    span, key = AnswerSpan(args[2], args[2], jnp.ones(2, bool)), jax.random.key(0)
    rest, context = (span, args[3], args[2], key), Context(CreditSettings(method="serl"))
    weights = serl.weigh(CreditInputs(signals, *rest), context)  # half-way: a quarter of each
    np.testing.assert_allclose(weights, [[1.05, 1], [1, 0.977273]], rtol=1e-5)
    late = CreditInputs(signals._replace(iteration=51), *rest)
    np.testing.assert_array_equal(rlsd.weigh(late, context), np.ones((2, 2)))


def test_sdpg_is_the_kl_of_the_whole_distributions_and_moves_the_student_alone():
    policy, params = toy_policy(), toy_params(jax.random.key(0))
    mine, other = (jax.random.normal(jax.random.key(k), (2, 3, 8)) for k in (1, 2))

    def total(params, mine, other):
        return teacher_kl(policy, params, mine, other, temperature=0.5, head_chunk=2).sum()

    p, q = (np.asarray(jax.nn.softmax(policy.unembed(params, x) / 0.5), np.float64) for x in (mine, other))
    value, moved = jax.jit(jax.value_and_grad(total, argnums=(1, 2)))(params, mine, other)
    assert value == pytest.approx((p * np.log(p / q)).sum(), rel=1e-4)
    assert (np.asarray(moved[0]) != 0).any()
    assert (np.asarray(moved[1]) == 0).all()
    same = jax.jit(jax.grad(total))(params, mine, mine)  # at the teacher the KL has its least value
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(same)) < 1e-5


# SHEAR -------------------------------------------------------------------------------------------------


def test_sinkhorn_falls_to_the_exact_distance():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(6, 3)), draw.normal(size=(6, 3)) + 0.5
    cost = np.linalg.norm(x[:, None] - y, axis=-1)
    exact = cost[linear_sum_assignment(cost)].mean()
    padded = jnp.concatenate([jnp.asarray(x, jnp.float32), jnp.full((2, 3), 99.0)])
    args = padded, jnp.asarray(y, jnp.float32), jnp.arange(8) < 6, jnp.ones(6, bool)
    found = [float(wasserstein(*args, epsilon=e, iterations=400)) for e in (1.0, 0.1, 0.02)]
    assert found[0] > found[1] > found[2] > 0.999 * exact
    assert found[2] == pytest.approx(exact, rel=0.01)


def test_shear_by_hand():
    # windows of two: 0, 0 and 4, 4 against 0, 0 and 0, 0. Distances 0 and 4, mean norm 1; the other row meets 0, 0
    hidden = jnp.array([[0.0, 0, 4, 4], [0, 0, 0, 0], [9, 9, 9, 9]])[..., None]
    args = hidden, jnp.ones((3, 4), bool), jnp.array([1.0, -1.0, 1.0]), jnp.array([0, 0, 1])
    weights = divergence_weights(*args, window=2, stride=2, epsilon=0.05, iterations=20)
    np.testing.assert_allclose(weights, [[0, 0, 4, 4], [0, 0, 0, 0], [1, 1, 1, 1]], atol=1e-4)
    with pytest.raises(ValueError, match="expected 0 < stride <= window"):
        divergence_weights(*args, window=2, stride=3)
