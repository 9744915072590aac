"""From a credit config to functions: what each method asks for, shares and refuses, and every one in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from oarjax.credit.method import built_in
from oarjax.credit.methods.keywords import keyword_table
from oarjax.credit.registry import METHODS, choices, label
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import CreditInputs, Scored, Signals
from oarjax.errors import ConfigError
from oarjax.rollout.logps import token_logps
from oarjax.step.iteration import iterate
from oarjax.types import AnswerSpan, SampledRows

PIECES = [b"", b"", b"#", *(b"%c" % (ord("a") + i) for i in range(tiny.VOCAB - 3))]
TABLE = keyword_table(["d", "=f"], lambda text: [PIECES.index(bytes([c])) for c in text.encode()], PIECES)


def test_every_method_says_what_it_needs_and_has_a_name():
    assert label("permuted", "oar_f") == "OAR-F permuted"
    assert (label("oar_g", "oar_f"), label("custom", "oar_f")) == ("OAR-G", "custom")
    assert resolve_method(CreditSettings(method="entropy_top")).signals == {"entropies"}
    assert resolve_method(CreditSettings(method="permuted", permuted_of="oar_p")).attribution is built_in("oar_p")
    assert resolve_method(CreditSettings(method="random")).attribution is built_in("random")


def test_what_a_method_lacks_is_told_when_the_run_is_built():
    with pytest.raises(ConfigError, match=r"credit.method: keywords needs the words as token ids; give make_steps"):
        tiny.build(tiny.config(credit__method="keywords"))
    with pytest.raises(ConfigError, match=r"credit.grail: low = 2.0 exceeds high = 1.0; lower it, or raise high"):
        tiny.config(credit__method="grail", credit__grail={"low": 2.0, "high": 1.0})
    for method in (*choices("permuted_of"), "grail"):
        with pytest.raises(
            ConfigError, match=f"credit.method: {method} needs an answer and credit.answer.style is none"
        ):
            tiny.build(tiny.config(credit__method=method, credit__answer__style="none"))
    tiny.build(tiny.config(credit__method="entropy", credit__answer__style="none"))


def test_a_signal_that_a_caller_forgot_is_named():
    span = AnswerSpan(jnp.ones((1, 3), bool), jnp.zeros((1, 3), bool), jnp.ones(1, bool))
    args = span, jnp.ones(1), jnp.ones((1, 3), bool), jax.random.key(0)
    for method, record in METHODS.items():
        weigh = resolve_method(CreditSettings(method=method)).weigher(keyword_table=TABLE)
        if wanted := "|".join(set(record.needs) - {"keyword_table", "teacher_prompt"}):  # these two are no signals
            with pytest.raises(ValueError, match=f"credit method {method}: needs the signal ({wanted}), got None"):
                weigh(CreditInputs(Signals(), *args))


def scored(cfg):
    """What the score program finds of one rollout."""
    policy, steps, state = tiny.build(cfg)
    rollout = jax.device_get(steps.sample(state.params, tiny.prompts(), jax.random.key(1)))
    span = tiny.find_answers(rollout)
    sampled = SampledRows(rollout, span, np.arange(16, dtype=np.int32))
    rows = jax.tree.map(lambda x: jnp.asarray(x)[None], sampled)
    scores = steps.score(state.params, None, rows, jax.random.key(2), 0, jnp.int32(1), probe="last")
    return policy, state.params, rollout, span, scores


def both_of(policy, params, rollout):
    """Log-probs and entropies of one whole forward."""
    settings = {"completion_length": 10, "temperature": 1.0, "head_chunk": 64}
    forward = jax.jit(lambda params, *rows: token_logps(policy, params, *rows, **settings))
    return forward(params, np.asarray(rollout.tokens), np.asarray(rollout.valid))


@pytest.mark.parametrize("method", ["uniform", "oar_g", pytest.param("oar_p", marks=pytest.mark.slow)])
def test_old_logps_are_the_same_whether_the_attribution_made_the_states_or_not(method):
    policy, params, rollout, _, scores = scored(tiny.config(credit__method=method, update__epochs=2))
    expected, _ = both_of(policy, params, rollout)
    mask = rollout.completion
    np.testing.assert_allclose(np.asarray(scores.old_logps)[0][mask], np.asarray(expected)[mask], rtol=1e-5, atol=1e-6)
    assert scores.measured is None
    assert (scores.importance is None) == (method == "uniform")


def test_entropies_are_computed_for_the_methods_that_need_them_alone():
    policy, params, rollout, _, scores = scored(tiny.config(credit__method="entropy"))
    _, expected = both_of(policy, params, rollout)
    mask = rollout.completion
    entropies = np.asarray(scores.measured["entropies"])[0]
    np.testing.assert_allclose(entropies[mask], np.asarray(expected)[mask], rtol=1e-5, atol=1e-6)
    assert scores.old_logps is None
    assert scores.importance is None
    *_, plain = scored(tiny.config(credit__method="uniform"))
    assert plain == type(plain)()


def test_methods_without_attribution_score_nothing():
    for method in ("uniform", "entropy", "entropy_top", "keywords", "random"):
        credit, policy = resolve_method(CreditSettings(method=method)), tiny.build(tiny.config())[0]
        score = credit.scorer(policy, temperature=1.0, pad_id=0)
        assert score(None, None, None, None, "last") == Scored(None, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "method", ["entropy_top", "keywords", "random", pytest.param("entropy", marks=pytest.mark.slow)]
)
def test_two_iterations_of_training(method):
    """Through the whole path: sampled, scored, weighed, updated twice; the weights are what the method promises.

    Methods with a pass of their own train in tests/training/test_train_methods.py, through the command.
    """
    cfg = tiny.config(credit__method=method, update__minibatches=2)
    _, steps, state = tiny.build(cfg, keyword_table=TABLE)
    start, world = state.params, tiny.host()
    before = jax.device_get(start)
    for n in (1, 2):
        state, done = iterate(state, None, n, steps=steps, host=world, cfg=cfg)
        assert np.isfinite(done.metrics["grad_norm"])
        assert done.metrics["skipped"] == 0
        w, reasoning = done.weights, done.span.reasoning
        assert np.isfinite(w).all()
        assert (w >= 0).all()
        assert (w != 1).any()
        if method != "entropy_top":  # it reweights more than the reasoning
            assert (w[~reasoning] == 1).all()
            np.testing.assert_allclose(np.where(reasoning, w, 0).sum(1), reasoning.sum(1), rtol=1e-4)
    assert int(state.step) == 4
    after = jax.device_get(state.params)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))


@pytest.mark.slow
@pytest.mark.parametrize("polarity", ["correct", "wrong"])
def test_polarity_in_training(polarity):
    cfg = tiny.config(credit__method="oar_g", credit__polarity=polarity)
    _, steps, state = tiny.build(cfg)
    _, done = iterate(state, None, 1, steps=steps, host=tiny.host(), cfg=cfg)
    weighed = (done.weights != 1).any(1)
    assert weighed.any()
    assert ((done.advantages[weighed] > 0) == (polarity == "correct")).all()


@pytest.mark.parametrize("skip", [True, False])
def test_the_top_share_of_a_batch_is_among_rows_that_teach(skip):
    """Leaving out groups of equal rewards changes the work and not the weights."""

    def reward(rollout):  # two of the four groups are constant
        return np.where(np.arange(16) < 8, np.arange(16) % 2, 1.0)

    cfg = tiny.config(credit__method="entropy_top", update__skip_zero_variance=skip)
    _, steps, state = tiny.build(cfg)
    _, done = iterate(state, None, 1, steps=steps, host=tiny.host(reward=reward), cfg=cfg)
    taught = done.rollout.completion & (np.arange(16) < 8)[:, None]
    assert (done.weights[~taught] == 1).all()
    assert done.weights[taught].sum() == pytest.approx(taught.sum(), rel=1e-5)
    assert 0.1 < (done.weights[taught] > 0).mean() < 0.4
