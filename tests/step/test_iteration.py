import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from oarjax.config.loading import parse_config
from oarjax.config.outputs import EvalConfig
from oarjax.credit.registry import METHODS
from oarjax.credit.resolved import resolve_method
from oarjax.errors import ConfigError
from oarjax.rollout.sampler import rollout_key
from oarjax.step.history import RewardHistory
from oarjax.step.iteration import NOISE, ORDER, add_metrics, iterate
from oarjax.step.sampling import fewest_evaluated
from oarjax.types import Mean


def run(cfg, iterations=1, **kwargs):
    _, steps, state = tiny.build(cfg)
    world = tiny.host(**kwargs)
    done = None
    for n in range(1, iterations + 1):
        state, done = iterate(state, state.params, n, steps=steps, host=world, cfg=cfg)
    return state, done


def difference(a, b) -> float:
    """Largest difference of two trees, relative to the largest entry."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.fixture(scope="module")
def oar():
    return run(tiny.config(credit__method="oar_g", update__fused="never"))


def test_leaving_out_groups_of_equal_rewards_changes_the_work_not_the_update():
    def reward(rollout):  # two of the four groups are constant
        return np.where(np.arange(16) < 8, tiny.even_tokens(rollout), 1.0)

    skip, a = run(tiny.config(update__skip_zero_variance=True), reward=reward)
    keep, b = run(tiny.config(update__skip_zero_variance=False), reward=reward)
    assert a.metrics["rows_used"] == 8
    assert b.metrics["rows_used"] == 16
    assert a.metrics["grad_norm"] == pytest.approx(b.metrics["grad_norm"], rel=1e-5)  # Adam would hide another scale
    assert difference(skip.params, keep.params) < 1e-6


def test_microbatches_are_the_whole_batch():
    """Of every aggregation: tests/rl/test_loss.py."""
    whole, a = run(tiny.config(update__microbatch=16))
    parts, b = run(tiny.config())  # of 4 rows
    assert difference(whole.params, parts.params) < 1e-3  # one Adam step, whose size is nearly sign(gradient)
    assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], rel=1e-5, abs=1e-6)
    assert a.metrics["grad_norm"] == pytest.approx(b.metrics["grad_norm"], rel=1e-4)


def test_uniform_credit_is_grpo():
    """With weights of 1 the advantages of a row are its group advantage, and OAR's gate with nothing to do agrees."""
    a, plain = run(tiny.config(credit__method="uniform"))
    assert (plain.weights == 1).all()
    b, _ = run(tiny.config(credit__method="oar_g", credit__gate={"tau": 0.0, "boost": 0.0}))
    assert difference(a.params, b.params) < 1e-6


def test_oar_reweights_reasoning_and_keeps_its_mass(oar):
    _, done = oar
    reasoning = done.span.reasoning & (done.weights != 1)
    assert reasoning.any()
    assert (done.weights[~done.span.reasoning] == 1).all()
    rows = (done.weights != 1).any(1)
    means = np.where(done.span.reasoning, done.weights, 0).sum(1)[rows] / done.span.reasoning.sum(1)[rows]
    np.testing.assert_allclose(means, 1, atol=1e-5)


def test_permuted_weights_are_oars_on_other_tokens(oar):
    _, oar = oar
    _, control = run(tiny.config(credit__method="permuted"))
    assert not np.allclose(oar.weights, control.weights)
    for row in range(16):
        mask = oar.span.reasoning[row]
        np.testing.assert_allclose(np.sort(oar.weights[row, mask]), np.sort(control.weights[row, mask]), rtol=1e-6)


def test_an_ungraded_row_teaches_nothing_and_is_counted():
    def reward(rollout):
        return np.where(np.arange(16) == 5, np.nan, tiny.even_tokens(rollout))

    _, done = run(tiny.config(), reward=reward)
    assert done.metrics["ungraded"] == 1 / 16
    assert done.metrics["verdict/timeout"] == 1 / 16
    assert done.advantages[5] == 0


def test_nothing_to_learn_leaves_the_policy_alone():
    cfg = tiny.config()
    _, _, start = tiny.build(cfg)
    state, done = run(cfg, reward=lambda r: np.ones(16))
    assert done.metrics["zero_variance"] == 1
    assert done.metrics["rows_used"] == 0
    assert int(state.step) == 0
    assert difference(state.params, start.params) == 0


def test_truncated_completions_can_be_left_out_of_the_loss():
    cfg = tiny.config(loss__mask_truncated=True, update__skip_zero_variance=False)
    everything, _ = run(tiny.config())
    assert int(everything.step) == 1
    ended_only, done = run(cfg)
    assert 0 < done.rollout.ended.sum() < 16
    assert difference(everything.params, ended_only.params) > 1e-4
    # where only truncated completions are graded nothing is left to train on
    nothing, _ = run(cfg, reward=lambda rollout: np.where(rollout.ended, np.nan, np.arange(16) % 2))
    assert int(nothing.step) == 0


def test_refills_replace_groups_of_equal_rewards():
    calls = []

    def reward(rollout):
        calls.append(1)
        return np.where(np.arange(16) < 8, np.arange(16) % 2, 1.0)  # groups 0, 1 informative, 2, 3 not

    _, done = run(tiny.config(update__refills=3), reward=reward)
    assert done.metrics["groups_drawn"] == 8
    assert done.metrics["zero_variance"] == 1 / 2  # of all that was drawn
    assert done.metrics["reward"] == 3 / 4  # not of the groups picked for their unequal rewards
    assert done.metrics["rows_used"] == 16
    np.testing.assert_array_equal(done.problems, [0, 1, 0, 1])  # from the first draw and the second
    first, second = (tiny.prompts(seed=n).tokens[:2] for n in (0, 1))
    np.testing.assert_array_equal(done.rollout.tokens[::4, :6], [*first, *second])


SINGLES = {"rollout__prompts": 16, "rollout__group_size": 1, "advantage__method": "batch", "advantage__scale": "none"}


@pytest.mark.parametrize("method", ["uniform", "oar_g"])
def test_a_batch_baseline_needs_no_groups(method):
    """One completion per problem; rows whose advantage is 0 are left out, and nothing else changes."""

    def reward(rollout):  # the batch's mean is 1/2, the reward of half the rows
        return np.repeat([0.0, 0.5, 0.5, 1.0], 4)

    cfg = {**SINGLES, "credit__method": method, "update__fused": "never"}
    batches = [tiny.prompts(16)]
    skip, a = run(tiny.config(**cfg), reward=reward, batches=batches)
    keep, b = run(tiny.config(**cfg, update__skip_zero_variance=False), reward=reward, batches=batches)
    assert (a.metrics["rows_used"], b.metrics["rows_used"]) == (8, 16)
    assert a.metrics["zero_variance"] == b.metrics["zero_variance"] == 1 / 2
    assert a.metrics["groups_drawn"] == 16
    np.testing.assert_array_equal(a.advantages, np.repeat([-0.5, 0, 0, 0.5], 4))
    _, one_pass = run(tiny.config(**cfg | {"update__fused": "auto"}), reward=reward, batches=batches)
    assert one_pass.metrics["rows_used"] == 8
    assert one_pass.metrics["grad_norm"] == pytest.approx(a.metrics["grad_norm"], rel=1e-4)
    assert a.metrics["grad_norm"] == pytest.approx(b.metrics["grad_norm"], rel=1e-5)
    assert difference(skip.params, keep.params) < 1e-6


def test_a_problems_own_past_decides_what_is_skipped_and_refilled():
    """Every problem was solved before: what is solved again has no gradient, wherever that is asked."""

    def reward(rollout):
        return np.repeat([0.0, 1.0, 1.0, 1.0], 4)

    history = RewardHistory()
    history.add(np.arange(16), np.ones(16))
    cfg = SINGLES | {"advantage__method": "problem", "credit__method": "oar_g"}
    results = {}
    for name, changes in {
        "skip": {"update__fused": "never"},
        "keep": {"update__fused": "never", "update__skip_zero_variance": False},
        "fused": {},
    }.items():
        world = tiny.host(reward=reward, batches=[tiny.prompts(16)])._replace(past=history.of)
        _, steps, state = tiny.build(tiny.config(**cfg, **changes))
        _, results[name] = iterate(state, state.params, 1, steps=steps, host=world, cfg=tiny.config(**cfg, **changes))
    assert [done.metrics["rows_used"] for done in results.values()] == [4, 16, 4]
    assert results["skip"].metrics["zero_variance"] == 3 / 4
    np.testing.assert_array_equal(results["skip"].advantages, np.repeat([-1.0, 0, 0, 0], 4))
    norms = [done.metrics["grad_norm"] for done in results.values()]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
    world = tiny.host(reward=reward, batches=[tiny.prompts(16, seed=n) for n in range(4)])._replace(past=history.of)
    refilled = tiny.config(**cfg, update__refills=3)
    _, steps, state = tiny.build(refilled)
    _, done = iterate(state, state.params, 1, steps=steps, host=world, cfg=refilled)
    assert (done.metrics["groups_drawn"], done.metrics["rows_used"]) == (64, 16)
    np.testing.assert_array_equal(done.drawn.problems, np.tile(np.arange(16), 4))


def test_refills_of_single_rows_go_on_until_rewards_differ():
    batches = [tiny.prompts(16, seed=n) for n in range(2)]

    def reward(rollout):  # the first batch is too easy
        return np.ones(16) if (rollout.tokens[:, :6] == batches[0].tokens).all() else np.arange(16) % 2

    _, done = run(tiny.config(**SINGLES, update__refills=3), reward=reward, batches=batches)
    assert done.metrics["groups_drawn"] == 32
    assert done.metrics["rows_used"] == 16


def test_groups_of_one_are_refused_where_groups_are_compared():
    with pytest.raises(ConfigError, match=r"rollout\.group_size: grpo needs at least 2 completions per prompt, got 1"):
        parse_config(tiny.config().model_dump() | {"rollout": {"prompts": 16, "group_size": 1}})
    with pytest.raises(ConfigError, match=r"rollout\.group_size: credit\.method ktae compares the rows"):
        tiny.build(tiny.config(**SINGLES, credit__method="ktae"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_groups_of_one_or_is_refused_by_name(method):
    """Iterations of one method of each kind: above, in tests/credit/test_field.py and test_signed_values.py."""
    needs = {"credit__answer": {"source": "reference"}, "update__skip_zero_variance": False}
    changes = needs if method == "signed_values" else {}
    credit = resolve_method(tiny.config(**SINGLES, credit__method=method, **changes).credit)
    compares = method in ("crpo", "gtpo", "ktae", "shear", "token_baseline")
    message = rf"rollout\.group_size: credit\.method {method} compares the rows of a group and needs at least 2, got 1"
    with pytest.raises(ConfigError, match=message) if compares else nullcontext():
        credit.check_groups(1)


def test_epochs_and_minibatches_each_update():
    state, done = run(tiny.config(update__epochs=2, update__minibatches=2))
    assert int(state.step) == 4
    assert done.metrics["ratio"] != 1
    assert done.metrics["sampler_gap"] < 1e-4  # old log-probs are the sampler's


@pytest.mark.parametrize(
    "changes", [{"update__epochs": 2}, pytest.param({"credit__method": "oar_g"}, marks=pytest.mark.slow)]
)
def test_over_the_truncated_support_sampler_old_and_new_log_probs_are_of_one_distribution(changes):
    """In a score and an update of their own, and in the pass that they share; nothing moves at this learning rate."""
    cfg = tiny.config(rollout__top_k=3, loss__off_policy={"support": "sampled"}, optim__lr=1e-12, **changes)
    _, done = run(cfg)
    gap = np.abs(done.rollout.filtered_logps - done.rollout.behaviour_logps)[done.rollout.completion]
    assert gap.mean() > 0.1
    assert done.metrics["sampler_gap"] < 1e-4
    assert done.metrics["ratio"] == pytest.approx(1, abs=1e-4)


def test_metrics_of_updates_are_added():
    one, two = Mean(jnp.float32(3), jnp.float32(2)), Mean(jnp.float32(5), jnp.float32(6))
    both = add_metrics({"loss": one, "kl": one}, {"loss": two, "ratio": two})
    values = {name: float(mean.value) for name, mean in both.items()}
    assert values == pytest.approx({"loss": 1, "kl": 1.5, "ratio": 5 / 6})


def test_a_reference_model_pulls_the_policy_back():
    """KL to itself is 0 at the first update and not after."""
    cfg = tiny.config(loss__kl_beta=0.1)
    _, steps, state = tiny.build(cfg)
    reference = jax.tree.map(lambda x: x.copy(), state.params)
    world, kl = tiny.host(), []
    for n in (1, 2):
        state, done = iterate(state, reference, n, steps=steps, host=world, cfg=cfg)
        kl.append(done.metrics["kl"])
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[1] > 1e-6


def test_two_iterations_draw_different_noise():
    cfg = tiny.config()
    _, steps, state = tiny.build(cfg)
    batch = tiny.prompts()
    frozen = state.params
    draws = []
    for n in (1, 2):
        world = tiny.host(batches=[batch], reward=lambda r: np.ones(16))
        state, done = iterate(state, frozen, n, steps=steps, host=world, cfg=cfg)
        draws.append(np.asarray(done.rollout.tokens))
    assert (draws[0] != draws[1]).any(1).sum() >= 12  # a few short completions may well be alike


@pytest.mark.slow
def test_training_raises_the_reward():
    cfg = tiny.config(iterations=25, credit__method="oar_g", optim__lr=2e-2, rollout__prompts=8, update__microbatch=32)
    _, steps, state = tiny.build(cfg)
    world = tiny.host(batches=(tiny.prompts(8, seed=i) for i in range(30)))
    rewards = []
    for n in range(1, 26):
        state, done = iterate(state, state.params, n, steps=steps, host=world, cfg=cfg)
        rewards.append(done.metrics["reward"])
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2


@pytest.mark.parametrize(
    "method",
    ["uniform", pytest.param("oar_g", marks=pytest.mark.slow), pytest.param("oar_p", marks=pytest.mark.slow)],
)
def test_one_compilation_serves_any_number_of_rows(method):
    cfg = tiny.config(credit__method=method, seed=1)  # a config of its own: programs that no other test has called
    _, steps, state = tiny.build(cfg)
    for n, constant in enumerate((0, 4, 12), start=1):
        world = tiny.host(
            batches=[tiny.prompts()], reward=lambda r, c=constant: np.where(np.arange(16) < c, 1, np.arange(16) % 2)
        )
        state, done = iterate(state, state.params, n, steps=steps, host=world, cfg=cfg)
        assert done.metrics["rows_used"] == 16 - constant
    learning = (steps.score, steps.accumulate) if steps.fused_add is None else (steps.fused_add,)
    assert [program._cache_size() for program in (*learning, steps.apply)] == [1] * (len(learning) + 1)
    assert steps.sample.decode_programs == 1


@pytest.mark.parametrize(("max_new", "drawn", "evaluated"), [(127, [16], 64), (128, [16, 8], 16)])
def test_rows_are_dropped_from_128_tokens_on(max_new, drawn, evaluated):
    cfg = tiny.config(rollout__max_new=max_new)
    _, steps, _ = tiny.build(cfg)
    assert [bucket.rows for bucket in steps.sample.plan(tiny.prompts()).buckets] == drawn
    assert fewest_evaluated(EvalConfig(batch=32, samples=2), cfg.rollout) == evaluated


def test_every_purpose_has_its_own_noise():
    """No key of a row's tokens, of OAR-G's noise or of the permutation is another's."""
    root = jax.random.key(0)
    keys = []
    for iteration in (1, 2):
        for batch in (0, 1, NOISE, ORDER):
            base = rollout_key(root, step=iteration, batch=batch)
            keys += [jax.random.fold_in(base, row) for row in range(8)]
            keys += [jax.random.fold_in(jax.random.fold_in(base, row), t) for row in range(8) for t in range(8)]
    numbers = {tuple(jax.random.key_data(k).tolist()) for k in keys}
    assert len(numbers) == len(keys)


@pytest.mark.slow
def test_importance_is_measured_on_what_is_probed():
    """The same rollout as "probed" changes nothing; another answer in it changes importance and nothing else."""
    changes = {"credit__method": "oar_p", "update__skip_zero_variance": False, "update__epochs": 2}
    cfg = tiny.config(**changes)
    _, steps, state = tiny.build(cfg)

    def weigh(probed):
        where = tiny.host(batches=[tiny.prompts()])._replace(probed=probed)
        return iterate(jax.tree.map(jnp.copy, state), None, 1, steps=steps, host=where, cfg=cfg)[1]

    def longer(rollout, span, other):
        """Two positions more, and where asked another token as the answer."""
        tokens = np.array(rollout.tokens)
        T = rollout.completion.shape[1]
        at = np.pad(np.asarray(span.answer), ((0, 0), (tokens.shape[1] - T, 0)))
        tokens = np.where(at & other, (tokens + 1) % tiny.VOCAB, tokens)

        def pad(x):
            return np.pad(np.asarray(x), ((0, 0), (0, 2)))

        rollout = dataclasses.replace(
            rollout,
            tokens=pad(tokens),
            valid=pad(rollout.valid),
            completion=pad(rollout.completion),
            behaviour_logps=pad(rollout.behaviour_logps),
            filtered_logps=pad(rollout.filtered_logps),
        )
        return rollout, dataclasses.replace(span, reasoning=pad(span.reasoning), answer=pad(span.answer))

    plain = weigh(None)
    same = weigh(lambda rollout, span, _: longer(rollout, span, False))
    np.testing.assert_allclose(same.weights, plain.weights, rtol=0, atol=1e-4)
    cfg = tiny.config(**changes, credit__probe__mode="answer_joint")
    _, steps, state = tiny.build(cfg)
    same, other = (weigh(lambda rollout, span, _, x=x: longer(rollout, span, x)) for x in (False, True))
    assert np.abs(other.weights - same.weights).max() > 1e-3
    np.testing.assert_array_equal(other.rollout.tokens, plain.rollout.tokens)
