"""Own credit and own losses: what they are given, what they must give, and a run with everything one's own."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import yaml
from conftest import CACHE, ROOT
from rich.console import Console

from oarjax.cli import main
from oarjax.config.loading import parse_config
from oarjax.credit.method import CreditMethod
from oarjax.credit.resolved import check_method, resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, Signals
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import ConfigError
from oarjax.grading.rewards import Sample, Unparseable
from oarjax.report.console import OnceWarnings
from oarjax.rl.loss import aggregate
from oarjax.run.adapters import trained_shapes
from oarjax.run.custom import check_loss, check_reweighing, check_weights, find_custom
from oarjax.step.iteration import iterate
from oarjax.step.programs import make_optimizer, make_steps
from oarjax.types import AnswerSpan, Mean

EXAMPLES = ROOT / "docs" / "examples"


def example(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


credit = example("custom_credit")
losses = example("custom_loss")


def steps_of(cfg, **own):
    policy, _, state = tiny.build(tiny.config())
    where = tiny.one_device()
    made = make_steps(policy, make_optimizer(cfg)[0], where, cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD, **own)
    return made, state


# Credit


SETTINGS = CreditSettings(method="custom", function="x.py:y")


def resolved(method, **changes):
    return resolve_method(replace(SETTINGS, **changes), custom=method)


def test_what_a_method_needs_and_whose_importance_it_reads():
    assert resolved(credit.later).signals == frozenset()
    assert resolved(credit.later).attribution.name == "custom"
    assert resolved(credit.proportional).signals == {"importance"}
    assert resolved(credit.proportional).attribution.name == "oar_p"
    assert resolved(credit.surprising).attribution.name == "custom"
    with pytest.raises(ConfigError, match=r"credit.method: custom needs a method; set credit.function, or"):
        resolve_method(SETTINGS)
    with pytest.raises(ConfigError, match=r"credit.function: needed when credit.method is custom"):
        tiny.config(credit__method="custom")
    with pytest.raises(ConfigError, match=r"credit.method: own was renamed to custom; set custom"):
        tiny.config(credit__method="own")


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("later", "proportional")), "surprising"]
)
def test_the_example_methods_keep_the_mass_and_train(name):
    cfg = tiny.config(credit={"method": "custom", "function": "x.py:y"})
    steps, state = steps_of(cfg, method=resolve_method(cfg.credit, custom=getattr(credit, name)))
    state, done = iterate(state, None, 1, steps=steps, host=tiny.host(), cfg=cfg)
    w, reasoning = done.weights, done.span.reasoning
    assert (w != 1).any()
    assert (w[~reasoning] == 1).all()
    np.testing.assert_allclose(np.where(reasoning, w, 0).sum(1), reasoning.sum(1), rtol=1e-4)
    assert done.metrics["skipped"] == 0


@pytest.mark.slow
def test_importance_of_ones_own_is_computed_by_the_rollout_policy_on_the_reasoning_alone():
    policy, _, state = tiny.build(tiny.config())
    steps, _ = steps_of(tiny.config())
    rollout = jax.device_get(steps.sample(state.params, tiny.prompts(), jax.random.key(1)))
    span = tiny.find_answers(rollout)
    rollout, span = jax.tree.map(jnp.asarray, (rollout, span))
    keys = jax.random.split(jax.random.key(0), len(rollout.ended))
    score = resolved(credit.surprising).scorer(policy, temperature=1.0, pad_id=0)
    found = score(state.params, rollout, span, keys, "last").importance
    expected = credit._surprisal(policy, state.params, rollout, span, keys, credit.Context(SETTINGS))
    np.testing.assert_array_equal(np.asarray(found), np.where(span.reasoning, expected, 0))
    gradient = jax.grad(lambda p: score(p, rollout, span, keys, "last").importance.sum())(state.params)
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradient))


def test_polarity_holds_for_own_methods():
    later = resolved(credit.later, polarity="correct")
    mask = jnp.ones((2, 4), bool)
    span = AnswerSpan(mask, ~mask, jnp.ones(2, bool))
    assert not later.signals
    w = later.weigher()(CreditInputs(Signals(), span, jnp.array([1.0, -1.0]), mask, jax.random.key(0)))
    assert (np.asarray(w) != 1).any(1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            CreditMethod(credit._later, needs=("logits",)),
            r"here: unknown needs 'logits'; expected some of importance",
        ),
        (CreditMethod(credit._later, score="oar_x"), r"here: score 'oar_x'; expected oar_p, .* function"),
        (CreditMethod(credit._later, score="permuted"), r"here: score 'permuted'; expected oar_p, .* function"),
        (
            CreditMethod(credit._later, needs=("importance",)),
            r"here: needs importance and has no score; expected oar_p",
        ),
    ],
)
def test_methods_that_ask_for_what_there_is_not(method, says):
    with pytest.raises(ConfigError, match=says):
        check_method(method, field="here")


def test_methods_that_give_the_wrong_shape_or_fail():
    def per_row(inputs):
        return inputs.advantages

    def whole(inputs):
        return inputs.span.reasoning

    def greedy(inputs):
        return inputs.signals.entropies + 1

    for weigh, says in (
        (per_row, r"here: expected one weight per token, .*, got float32\[2\]"),
        (whole, r"here: .*, got bool\[2, 8\]"),
        (greedy, r"here fails on completions \[2, 8\]: TypeError"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_weights(weigh, CreditMethod(weigh), field="here")
    check_weights(greedy, CreditMethod(greedy, needs=("entropies",)), field="here")


def surprise(inputs, context):
    return inputs.signals.logps


def over_entropy(inputs, context):
    return jnp.log(inputs.signals.entropies - inputs.signals.entropies)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (CreditMethod(surprise, needs=("logps",)), "finite and at least 0, got -.* at 14 of 14 tokens; clip them with"),
        (CreditMethod(over_entropy, needs=("entropies",)), "finite and at least 0, got -inf on random numbers, at 14"),
        (CreditMethod(over_entropy, needs=("entropies",), kind="bonus"), "expected finite numbers, got -inf on random"),
        (CreditMethod(surprise, needs=("logps",), kind="bonus"), None),
    ],
)
def test_weights_that_train_backwards_are_refused_before_a_run(method, says):
    weigh = resolved(method).weigher()
    if says is None:
        check_weights(weigh, method, field="credit.function: x.py:y")
        return
    with pytest.raises(ConfigError, match=rf"^credit.function: x.py:y: expected .*{says.removeprefix('expected ')}"):
        check_weights(weigh, method, field="credit.function: x.py:y")


@pytest.mark.parametrize(
    ("reweigh", "says"),
    [
        (lambda logps, batch, context: logps - batch.old_logps, "finite and at least 0, got -"),
        (lambda logps, batch, context: jnp.log(logps), "finite and at least 0, got nan"),
        (lambda logps, batch, context: logps.sum(1), r"expected token weights \[2, 8\], got"),
        (lambda logps, batch, context: jnp.exp(logps), None),
    ],
)
def test_weights_of_every_update_are_tried_too(reweigh, says):
    context = Context(CreditSettings())
    check_reweighing(CreditMethod(), context, field="here")  # none
    if says is None:
        check_reweighing(CreditMethod(reweigh=reweigh), context, field="here")
        return
    with pytest.raises(ConfigError, match=rf"^here: reweigh: .*{says}"):
        check_reweighing(CreditMethod(reweigh=reweigh), context, field="here")


@pytest.mark.parametrize("name", ["custom_agreement:agreed_p", "custom_agreement:agreed_g", "oracle:gated"])
def test_the_other_examples_pass(name):
    file, _, method = name.partition(":")
    method = getattr(example(file), method)
    check_weights(resolved(method).weigher(), method, field="here")


def test_negative_weights_are_counted_and_warned_of():
    cfg = tiny.config(credit={"method": "custom", "function": "x.py:y"})
    method = CreditMethod(
        lambda inputs, context: jnp.where(inputs.advantages[:, None] > 0, -0.5, 1.0) * jnp.ones(inputs.completion.shape)
    )
    steps, state = steps_of(cfg, method=resolve_method(cfg.credit, custom=method))
    _, done = iterate(state, None, 1, steps=steps, host=tiny.host(), cfg=cfg)
    assert done.metrics["negative_weights"] == pytest.approx((done.advantages > 0).mean())
    assert 0 < done.metrics["negative_weights"] < 1
    (warning,) = [w for w in OnceWarnings(Console(quiet=True)).check(1, done.metrics) if "credit.function" in w]
    assert "credit.function returned negative weights in" in warning
    assert "clip them with jnp.maximum" in warning


# Losses


@pytest.mark.slow
def test_an_own_loss_is_what_is_minimised():
    """The published loss as an own one updates as the built-in one does, and another does not."""
    from oarjax.step.loss import bound_loss

    cfg = tiny.config()
    same = bound_loss(cfg.loss, max_length=cfg.rollout.max_new)
    after = []
    for own in (None, same, losses.half_as_hard_on_failures):
        steps, state = steps_of(cfg, custom_loss=own)
        state, done = iterate(state, None, 1, steps=steps, host=tiny.host(), cfg=cfg)
        after.append(jax.device_get(state.params))
        assert np.isfinite(done.metrics["entropy"])
    builtin, again, other = (jax.tree.leaves(params) for params in after)
    assert all((a == b).all() for a, b in zip(builtin, again))
    assert any((a != b).any() for a, b in zip(builtin, other))


def test_losses_that_give_something_else_are_told():
    def bare(logps, entropies, batch):
        return logps.sum()

    def per_token(logps, entropies, batch):
        return Mean(logps, jnp.ones_like(logps)), {}

    def off_policy(logps, entropies, batch):
        return aggregate(logps - batch.old_logps, batch.completion, mode="dapo", max_length=1), {}

    cfg = tiny.config(loss__function="mine.py:loss")
    for loss, says in (
        (bare, r"loss.function: mine.py:loss: expected \(Mean\(total, count\), \{name: Mean\}\) .*, got float32\[\]"),
        (per_token, r"loss.function: mine.py:loss: expected .*, got \(Mean"),
        (off_policy, r"loss.function: mine.py:loss fails on completions \[2, 8\]: TypeError"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_loss(loss, cfg.loss, updates=1)
    check_loss(off_policy, tiny.config(loss__function="mine.py:loss").loss, updates=2)
    check_loss(losses.half_as_hard_on_failures, cfg.loss, updates=1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "loss.function=docs/examples/custom_loss.py:nothing",
            "loss.function: docs/examples/custom_loss.py defines no",
        ),
        (
            "loss.function=docs/examples/custom_policy.py:VOCAB",
            "expected a function, got docs/",
        ),
        (
            "credit.function=docs/examples/custom_probe.py:first_and_last",
            "expected a CreditMethod, got docs/",
        ),
        ("optim.function=optax.lionn", "optim.function: optax defines no lionn"),
        ("optim.function=optax.constant_schedule", "optim.function: optax:constant_schedule with learning_rate and {}"),
        ("optim.function=optax.lion optim.settings.bb1=.8", "unexpected keyword argument 'bb1'); expected an optax"),
        ("optim.b1=.8 optim.function=optax.lion", "optim.b1: AdamW's, and optim.function replaces it"),
        ("optim.settings={b1: .8}", "optim.settings: read with optim.function only"),
        (
            "loss.function=docs/examples/custom_loss.py:half_as_hard_on_failures loss.settings.shape=.3",
            "got an unexpected keyword argument 'shape'",
        ),
    ],
)
def test_what_is_named_must_be_there(tmp_path, monkeypatch, capsys, change, says):
    monkeypatch.chdir(ROOT)
    run = ["configs/demo.yaml", f"run_dir={tmp_path / 'run'}", f"compilation_cache={CACHE}", "credit.method=custom"]
    run += ["sft=null", "data.eval=null", "data.train.limit=4"]
    first = "credit.function=docs/examples/custom_credit.py:later"
    changes = [change] if change.startswith("optim.settings") else change.split()
    monkeypatch.setattr(sys, "argv", ["oarjax", "train", *run, first, *changes])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    if "optim" in change or "loss" in change:  # before the folder, whatever the data hold
        assert not (tmp_path / "run").exists()


def test_an_optimizer_that_fails_on_the_policys_parameters_alone(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import optax\n\n\ndef tuned(learning_rate):\n"
        "    sgd = optax.sgd(learning_rate)\n"
        "    return optax.GradientTransformation(lambda p: sgd.init({'kernel': p['kernel']}), sgd.update)\n"
    )
    cfg = tiny.config(optim__function=f"{tmp_path}/mine.py:tuned")
    found, params = find_custom(cfg), trained_shapes(cfg.lora, tiny.model())
    assert found.warm_optimizer is None
    with pytest.raises(ConfigError, match=r"optim.function: .*mine.py:tuned with .* fails \(KeyError: 'kernel'\)"):
        found.check_optimizers(cfg.optim, None, params)


# The other examples


def test_the_example_rewards():
    rewards = example("custom_reward")
    said = {"prompt": "1+1=", "completion": "#### 2", "answer": "3", "extracted": "2"}
    assert rewards.close(Sample(**said)) == 0.5
    with pytest.raises(Unparseable):
        rewards.close(Sample(**said | {"extracted": "two"}))
    assert rewards.brief(Sample(**said, tokens=40)) == 0.5
    assert rewards.brief(Sample(**said | {"extracted": None}, tokens=1)) == 0


def test_the_example_probe_reads_first_and_last():
    probe = example("custom_probe").first_and_last
    policy, _, state = tiny.build(tiny.config())
    hidden = jax.random.normal(jax.random.key(0), (2, 6, 16))
    answer = jnp.array([[0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]], bool)
    found = probe.read(policy, state.params, hidden, example("custom_probe").Reading(answer * 1, answer | True, answer))
    logits = policy.unembed(state.params, hidden)
    np.testing.assert_allclose(found[0], (logits[0, 2] + logits[0, 4]) / 2, rtol=1e-5)
    np.testing.assert_allclose(found[1], logits[1, 1], rtol=1e-5)


@pytest.mark.slow
def test_the_example_policy_learns():
    """Not a Qwen: four functions of one attention layer, under the public steps."""
    rewards = example("custom_policy").train(30, method="oar_p")
    assert np.mean(rewards[:3]) < 0.2
    assert np.mean(rewards[-5:]) > np.mean(rewards[:3]) + 0.2


@pytest.mark.slow
def test_a_run_with_everything_ones_own(tmp_path, monkeypatch, capsys):
    """Dataset, rewards, credit with a probe beneath it, and loss, by ``oarjax train`` and the page's own config."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "bring_your_own.md").read_text()
    block = page[page.index("# everything.yaml") :]
    tree = yaml.safe_load(block[: block.index("```")])
    policy = write_builtin_policy(tmp_path / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"ask": f"{n}+1=", "solution": f"{n + 1}"}) + "\n" for n in range(9)))
    tree["policy"]["path"], tree["data"]["train"]["source"] = str(policy), str(problems)
    tree |= {"run_dir": str(tmp_path / "run"), "device": "cpu", "compilation_cache": str(CACHE)}
    parse_config(tree)
    file = tmp_path / "everything.yaml"
    file.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(sys, "argv", ["oarjax", "train", str(file)])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (None, 0), capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == tree["iterations"]
    said = [json.loads(line) for line in Path(tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert set(said[0]["rewards"]) == {"close", "brief"}
    assert said[0]["prompt"].endswith("+1=")
