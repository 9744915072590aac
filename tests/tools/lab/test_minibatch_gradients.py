"""The gradients of ``oarjax credit --gradients`` are those of training, and its figures those of the gradients."""

import io
import json
import math
from collections.abc import Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from conftest import CACHE
from rich.console import Console

from oarjax.config.loading import parse_config
from oarjax.credit.resolved import resolve_method
from oarjax.data.tasks.forks import write_forks_policy
from oarjax.errors import ConfigError
from oarjax.grading.rewards import Sample
from oarjax.models.weights import init_params
from oarjax.run.run import open_run
from oarjax.step.gradients import add_microbatches, apply_sums, gradient_sums, no_sums
from oarjax.step.loss import policy_gradient
from oarjax.step.minibatches import Bucket, Piece
from oarjax.tools.lab.command import measure_credit
from oarjax.tools.lab.minibatch_gradients import gradient_config, gradient_program, measure_gradients
from oarjax.tools.lab.results import gradient_notes, read_lab, tables
from oarjax.types import Grades, TrainBatch, TrainState


def config(tmp_path, **changes):
    task = {"source": "builtin:forks", "split": "train", "forks": {"filler": 2}}
    tree = {
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
        "compilation_cache": str(CACHE),
        "policy": {"path": str(tmp_path / "policy"), "remat": "none"},
        "data": {"template": "plain", "max_prompt": 8, "train": task | {"limit": 20}},
        "rollout": {"prompts": 4, "group_size": 4, "max_new": 8, "prompt_bucket": 4, "completion_bucket": 8},
        "grading": {"rewards": [{"name": "exact"}], "workers": 1},
        "credit": {"answer": {"style": "regex", "pattern": "[0-9]"}, "masking": {"buckets": 1}},
        "update": {"microbatch": 8},
        "lab": {"problems": 4, "shortest": 1, "bootstrap": 50, "gradients": {"minibatches": 3, "prompts": 6}},
    }
    return parse_config(tree | changes)


def test_one_update_of_the_labs_size_without_terms_that_have_no_credit(tmp_path):
    cfg = config(tmp_path, loss={"kl_beta": 0.1, "entropy_bonus": 0.2}, update={"microbatch": 16, "refills": 2})
    found = gradient_config(cfg, cfg.credit)
    assert found.rollout.prompts == 6
    assert (found.update.microbatch, found.update.refills) == (8, 0)  # 8 divides 24 rows, 16 does not
    assert (found.loss.kl_beta, found.loss.entropy_bonus) == (0, 0)


@pytest.mark.parametrize("aggregation", ["dapo", pytest.param("bnpo", marks=pytest.mark.slow)])
def test_gradients_are_those_of_an_update(aggregation):
    """Plain descent by 1 on uncut rows moves the params by the gradient of pieces; the last microbatch has no rows."""
    cfg = tiny.config(loss__aggregation=aggregation)
    policy, steps, state = tiny.build(cfg)
    rng = np.random.default_rng(0)
    mask = np.arange(10) < np.array([4, 10, 0])[:, None, None] - rng.integers(0, 3, (3, 4, 1))
    batch = TrainBatch(
        tokens=jnp.asarray(rng.integers(3, tiny.VOCAB, (3, 4, 16)), jnp.int32),
        valid=jnp.ones((3, 4, 16), bool),
        completion=jnp.asarray(mask),
        advantages=jnp.asarray(rng.standard_normal((3, 4, 10)), jnp.float32),
        old_logps=None,
        ref_logps=None,
        behaviour_logps=jnp.zeros((3, 4, 10)),
    )
    used = jnp.asarray(2, jnp.int32)
    denominator = steps.denominator(jnp.asarray(mask.reshape(12, 10)))
    pieces = Piece(Bucket(6, 4), np.int32(0), np.int32(1)), Piece(Bucket(6, 10), np.int32(1), np.int32(2))
    gradient = gradient_program(steps, by_piece=aggregation == "bnpo", size=10**6)
    found = gradient(state, batch, pieces, denominator)
    method, head_chunk = resolve_method(cfg.credit), cfg.policy.head_chunk
    loss = policy_gradient(policy, cfg.rollout, cfg.loss, method, head_chunk=head_chunk)
    sgd = optax.sgd(1.0)
    start = TrainState(state.step, state.params, sgd.init(state.params), state.key)
    given = None if aggregation == "bnpo" else denominator
    sums_of = gradient_sums(loss)
    sums = add_microbatches(sums_of, no_sums(sums_of, start, batch), start, batch, 0, used)
    moved, _ = apply_sums(sgd, start, sums, given)
    wanted = jax.tree.map(lambda a, b: np.ravel(a - b), state.params, moved.params)
    np.testing.assert_allclose(found, np.concatenate(jax.tree.leaves(wanted)), atol=2e-6)
    assert float(jnp.linalg.norm(found)) > 0.01


def rewarded(*, by):
    """A grader whose rewards follow the completions' tokens, without workers."""

    class Grader:
        def submit(self, samples: Sequence[Sample]) -> Future[Grades]:
            done: Future[Grades] = Future()
            done.set_result(tiny.grades(np.array([by(s.completion) for s in samples])))
            return done

    return Grader()


@pytest.mark.slow
def test_figures_of_a_tiny_policy(tmp_path):
    """Plain GRPO beside itself is 1, its token shares add up, and methods agree with what they are made of."""
    write_forks_policy(tmp_path / "policy", seed=0)
    methods = {"OAR-G": {"method": "oar_g"}, "entropy": {"method": "entropy"}, "random": {"method": "random"}}
    cfg = config(tmp_path, lab={"methods": methods, "gradients": {"minibatches": 3, "prompts": 24}})
    run = open_run(cfg, Console(file=io.StringIO()))
    params = init_params(run.model, jax.random.key(0))
    found = measure_gradients(run, params, rewarded(by=lambda text: sum(map(str.islower, text)) / max(len(text), 1)))
    by_name = {m.name: m.figures for m in found.methods}
    assert list(by_name) == [*methods, "uniform (GRPO)", "truth", "truth through the gate"]
    plain = by_name["uniform (GRPO)"]
    for name in ("ratio", "norm", "inverse_ess", "law", "deciding"):
        assert plain[name].mean == pytest.approx(1, abs=1e-5)
    assert plain["cosine"].mean > 0
    assert plain["cosine"].low < plain["cosine"].mean < plain["cosine"].high
    assert by_name["random"]["inverse_ess"].mean > 1.1
    assert found.figures["rho"].mean == pytest.approx(
        plain["pivotal"].mean / (plain["pivotal"].mean + plain["other"].mean)
    )
    assert 0 < found.figures["reward"].mean < 1
    assert "3 of 24 prompts x 4 rollouts" in found.facts["minibatches"]
    assert "inner products exact" in found.facts["gradients"]
    with pytest.raises(ConfigError, match=r"lab.gradients: the rewards within every group are equal"):
        measure_gradients(run, params, rewarded(by=lambda text: 0.0))


@pytest.mark.slow
def test_the_command_writes_and_reads_them_back(tmp_path):
    write_forks_policy(tmp_path / "policy", seed=0)
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"question": f"{n}=", "answer": "#### 1"}) for n in range(8)))
    data = {"template": "plain", "max_prompt": 8, "train": {"source": str(problems)}}
    lab = {"problems": 2, "shortest": 1, "bootstrap": 50, "methods": {"entropy": {"method": "entropy"}}}
    cfg = config(
        tmp_path,
        data=data,
        lab=lab | {"gradients": {"minibatches": 3, "sketch": 64}},
        grading={"rewards": [{"name": "odd_length"}], "workers": 1, "plugins": [str(_plugin(tmp_path))]},
    )
    result = measure_credit(cfg, Console(file=io.StringIO()), gradients=True)
    again = read_lab(tmp_path / "run" / "credit.json")
    assert again.gradients is not None
    assert result.gradients is not None
    for a, b in zip(again.gradients.methods, result.gradients.methods):
        assert a.name == b.name
        for name, interval in b.figures.items():
            assert a.figures[name].mean == interval.mean or math.isnan(interval.mean)
    assert "rho" not in again.gradients.figures, "nothing is known of another task"
    assert "estimated from count sketches of 64" in again.gradients.facts["gradients"]
    titles = [title for title, *_ in tables(again)]
    assert titles[-2:] == ["Gradients: how well one minibatch points", "Gradients: where the noise comes from"]
    page = (tmp_path / "run" / "credit.html").read_text()
    assert all(note.split(";")[0] in page for note in gradient_notes(again.gradients))


def _plugin(folder):
    path = folder / "length.py"
    path.write_text(
        "from oarjax.grading.rewards import reward\n\n\n"
        "@reward('odd_length')\ndef odd_length(sample):\n    return float(len(sample.completion) % 2)\n"
    )
    return path
