"""Runs that meet values that are not finite: nothing is lost, the run stops, and replay finds the place."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from unsound import MICRO

from oarjax.cli import main
from oarjax.data.hf import load_params, read_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.report.files import read_completions, read_metrics
from oarjax.run.run import Run
from oarjax.step.metrics import all_finite
from oarjax.storage.bad_batches import read_bad_batch, read_params
from oarjax.tools.replay import command
from oarjax.tools.replay.replay import GroupFinding, _last_group
from oarjax.training import trainer

PLUGIN = """
import math
import optax
from oarjax.grading.rewards import Sample, reward
from oarjax.credit.probe import Probe

@reward("replay_long")
def long(sample: Sample) -> float:
    return float(sample.tokens + len(sample.completion.replace("1", "")))

calls = []

@reward("nan_or_inf")
def nan_or_inf(sample: Sample) -> float:
    calls.append(sample)
    if len(calls) <= 2:  # the trial before training, which refuses such a reward
        return 1.0
    digits = sum(map(ord, sample.completion)) + sample.tokens
    return (math.nan, math.inf, 0.0, 1.0, 2.0)[digits % 5]

@reward("huge")
def huge(sample: Sample) -> float:
    return 3e38 - 1e37 * sample.tokens

def _nan(policy, params, hidden, reading):
    return hidden[:, -1].sum(-1) * math.nan

nan_probe = Probe(read=_nan, kind="scalar", reads="completion")

def leap(learning_rate, times):  # a config's largest rate, a million, leaves all finite
    return optax.chain(optax.adamw(learning_rate, b2=0.95, weight_decay=0.01), optax.scale(times))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A policy, a plugin, and a config that uses both."""
    folder = tmp_path_factory.mktemp("base")
    write_builtin_policy(folder / "policy", seed=0, hidden=16, layers=2, heads=2, kv_heads=1, ffn=16)
    (folder / "mine.py").write_text(PLUGIN)
    tree = MICRO | {"run_dir": "given", "policy": {"path": str(folder / "policy")}}
    tree["grading"] = {"rewards": [{"name": "replay_long"}], "workers": 1, "plugins": [str(folder / "mine.py")]}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture(scope="module", autouse=True)
def graders():
    """Let runs with the same rewards share their grading process."""
    started, make = {}, Run.grader
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def grader(run):
            settings = run.cfg.grading.model_dump_json() + repr(run.cfg.credit.answer)
            if settings not in started:
                started[settings] = stack.enter_context(make(run))
            return nullcontext(started[settings])

        patch.setattr(Run, "grader", grader)
        yield


@pytest.fixture
def oarjax(monkeypatch, capfd):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def command(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oarjax", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("TERM", "dumb")
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        return code, *capfd.readouterr()

    return command


def leap(base, times):
    """Changes of a config whose optimizer makes AdamW's step, at the largest rate there is, ``times`` as long."""
    return "optim.lr=1e6", f"optim.function={base / 'mine.py'}:leap", f"optim.settings={{times: {times:.1e}}}"


def train(oarjax, base, folder, *changes):
    return oarjax("train", base / "run.yaml", f"run_dir={folder}", *changes)


def replayed(oarjax, err):
    """What the command that the message names prints as JSON; its tables must come too, of what it found once."""
    *_, file = err.split("oarjax replay ")
    file = "".join(file.split())  # the message may be wrapped
    replay, findings = command.replay, []

    def replay_once(*args, **named):
        if not findings:
            findings.append(replay(*args, **named))
        return findings[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "replay", replay_once)
        code, out, err = oarjax("replay", file)
        assert code == 0, err
        assert "begins at: " in out
        code, out, err = oarjax("replay", file, "--json", "--device", "cpu")
        assert code == 0, err
    found = json.loads(out)
    assert found["params_of_step"] == found["header"]["step"]
    return found


def sound(folder, iterations):
    """All of a run that was stopped by its health is there, and what it trained is finite."""
    records = read_metrics(folder / "metrics.jsonl")
    assert [r["iteration"] for r in records] == list(range(1, iterations + 1))
    assert {n for n, _ in read_completions(folder / "completions.jsonl")} == set(range(1, iterations + 1))
    checkpoints = sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())
    assert checkpoints[-1] == iterations
    return records


@pytest.mark.slow
def test_a_rate_that_explodes(oarjax, base, tmp_path):
    """Steps of 1e39 are infinite in float32: every update would leave infinite params, none is taken."""
    size = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 16}
    teacher = write_builtin_policy(tmp_path / "teacher", seed=7, **size)
    taught = (f"loss.teacher={teacher}", "loss.kl_in=token", "loss.kl_beta=1", "update.skip_zero_variance=false")
    code, out, err = train(oarjax, base, tmp_path / "run", *leap(base, 1e33), "health.stop_after=3", *taught)
    assert code == 2
    assert (
        "iteration 3, optimizer step 0, phase update: params not finite: nothing could be learned in 3 updates" in err
    )
    assert out.count("would have made parameters infinite") == 1
    records = sound(tmp_path / "run", 3)
    assert [r["skipped_in_a_row"] for r in records] == [1, 2, 3]
    assert [r["nonfinite/params"] for r in records] == [1, 1, 1]
    assert [r["nonfinite/gradient"] for r in records] == [0, 0, 0]
    assert len(list((tmp_path / "run" / "bad_batches").glob("params-*"))) == 1
    found = replayed(oarjax, err)
    assert found["place"].startswith("the optimizer's step: the gradient is finite")
    assert "with a learning rate of 1e+06 the step is not: lower the rate" in found["place"]
    assert all(row["replayed"] is None for row in found["rows"])
    assert all(row["grad_norm"] > 0 for row in found["rows"])  # the teacher's, in groups of equal rewards too


@pytest.mark.slow
def test_adapters_are_replayed_over_the_weights_below_them(oarjax, base, tmp_path):
    """What is kept are the adapters; the rest is read from where the run read it."""
    changes = (*leap(base, 1e33), "health.stop_after=2", "lora.rank=2", "loss.kl_beta=0.1")
    code, _, err = train(oarjax, base, tmp_path / "run", *changes)
    assert code == 2, err
    (kept,) = (tmp_path / "run" / "bad_batches").glob("params-*")
    assert {path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(read_params(kept))[0]} == {
        "lora_a",
        "lora_b",
    }
    found = replayed(oarjax, err)
    assert found["place"].startswith("the optimizer's step: the gradient is finite")
    names = [group["name"] for group in found["groups"]]
    assert names[:2] == ["layers.attention.q.lora_a", "layers.attention.q.lora_b"]
    assert len(names) == 14
    norms = {group["name"]: group["grad_norm"] for group in found["groups"]}
    assert norms["layers.mlp.down.lora_b"] > 0
    assert norms["layers.mlp.down.lora_a"] == 0  # B is still 0


@pytest.mark.slow
def test_params_that_grow_until_nothing_is_finite(oarjax, base, tmp_path):
    """Steps of 1e30 take one update to params that are finite and good for nothing."""
    code, _, err = train(oarjax, base, tmp_path / "run", *leap(base, 1e24), "health.stop_after=3")
    assert code == 2
    assert "nothing could be learned in 3 updates in a row" in err
    header, _ = read_bad_batch(next(iter(sorted((tmp_path / "run" / "bad_batches").glob("iteration-*")))))
    params = read_params(tmp_path / "run" / "bad_batches" / header.params)
    assert all_finite(params)
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(params)) > 1e29
    sound(tmp_path / "run", header.number + 2)
    found = replayed(oarjax, err)
    assert found["place"].startswith("log-probs of row 0")
    assert all(row["replayed"] == "log-probs" for row in found["rows"])
    assert sum(group["params"] for group in found["groups"]) == 0


@pytest.mark.slow
def test_params_that_are_damaged_on_the_way(oarjax, base, tmp_path, monkeypatch):
    """One number of one layer turns NaN before the third iteration."""
    iterate = trainer.iterate

    def poisoned(state, reference, iteration, **kwargs):
        if iteration == 3:
            layers = state.params["layers"]
            down = layers["mlp"]["down"]["kernel"].at[1, 2, 3].set(jnp.nan)
            layers = layers | {"mlp": layers["mlp"] | {"down": {"kernel": down}}}
            state = state.replace(params=state.params | {"layers": layers})
        return iterate(state, reference, iteration, **kwargs)

    monkeypatch.setattr(trainer, "iterate", poisoned)
    code, out, err = train(oarjax, base, tmp_path / "run", "health.stop_after=2", "health.bad_batches=2")
    assert code == 2
    assert "iteration 4, optimizer step 2, phase sample: behaviour_logps" in err
    assert "return to an earlier checkpoint" in out
    records = sound(tmp_path / "run", 4)
    assert [r["nonfinite/behaviour_logps"] for r in records] == [0, 0, 1, 1]
    found = replayed(oarjax, err)
    assert found["place"].startswith("the params themselves: layers.mlp.down.kernel, layers 1 (1 numbers in 1 groups)")
    (group,) = [g for g in found["groups"] if g["params"]]
    assert (group["name"], group["params_at"]) == ("layers.mlp.down.kernel", [1])
    assert {row["recorded"] for row in found["rows"]} == {"the sampler's log-probs"}


@pytest.mark.slow
def test_a_probe_that_gives_nan(oarjax, base, tmp_path):
    """Every row keeps weights of 1, and the run goes on as plain GRPO."""
    probe = [f"credit.probe.function={base / 'mine.py'}:nan_probe", "credit.method=oar_g", "iterations=3"]
    code, out, err = train(oarjax, base, tmp_path / "run", *probe, "export.folder=export")
    assert code == 0, err
    records = sound(tmp_path / "run", 3)
    assert all(r["nonfinite/importance"] > 0 and r["nonfinite/weights"] == 0 and r["skipped"] == 0 for r in records)
    assert all(set(row.weights) <= {1.0} for _, row in read_completions(tmp_path / "run" / "completions.jsonl"))
    assert out.count("token importance that is not finite") == 1
    code, _, err = train(oarjax, base, tmp_path / "plain", "iterations=3", "export.folder=export")
    assert code == 0, err
    both = [
        load_params(read_config(tmp_path / n / "export")[1], read_config(tmp_path / n / "export")[0])
        for n in ("run", "plain")
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *both)
    found = replayed(oarjax, "oarjax replay " + out.split("oarjax replay ")[1].split("\n")[0])
    assert found["place"].startswith("importance of row ")
    reasons = {(row["recorded"], row["replayed"]) for row in found["rows"]}
    assert ("importance", "importance") in reasons
    assert reasons <= {("importance", "importance"), (None, None)}  # rows that do not reason have none
    assert all(np.isfinite(row["grad_norm"]) for row in found["rows"])


@pytest.mark.slow
def test_rewards_that_are_nan_or_infinite(oarjax, base, tmp_path):
    code, _, err = train(oarjax, base, tmp_path / "run", "grading.rewards=[{name: nan_or_inf}]", "iterations=3")
    assert code == 0, err
    records = sound(tmp_path / "run", 3)
    assert any(r["ungraded"] > 0 for r in records)
    assert all(r.get("skipped", 0) == 0 and np.isfinite(r["reward"]) for r in records)
    assert not (tmp_path / "run" / "bad_batches").exists()


@pytest.mark.slow
def test_rewards_that_overflow(oarjax, base, tmp_path):
    change = ["grading.rewards=[{name: huge}]", "health.stop_after=2", "health.params_mb=0"]
    code, out, err = train(oarjax, base, tmp_path / "run", *change)
    assert code == 2
    assert "phase credit: advantages; phase update: loss, gradient not finite" in err
    assert out.count("rewards are too large to add up") == 1
    sound(tmp_path / "run", 2)
    assert not list((tmp_path / "run" / "bad_batches").glob("params-*"))
    found = replayed(oarjax, err)  # with the params of the newest checkpoint, which are the same
    assert found["place"].startswith("advantage of row ")
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    *_, file = err.split("oarjax replay ")
    code, _, err = oarjax("replay", "".join(file.split()))
    assert code == 2
    assert "larger than health.params_mb=0 and were not kept, and" in err
    assert "has no checkpoint; raise health.params_mb, or set checkpoint.every" in err


def test_a_gradient_is_followed_backwards():
    """The backward pass goes from the head down: where it first goes wrong is the highest layer, or what is above."""

    def group(name, rows=0, at=()):
        return GroupFinding(name, params=0, params_at=[], rows=rows, gradient_at=list(at), grad_norm=1.0)

    below = [
        group("embed.embedding", 2),
        group("layers.mlp.up.kernel", 2, [0, 1]),
        group("layers.mlp.down.kernel", 1, [0]),
    ]
    assert _last_group([*below, group("norm.scale")]) == "layers.mlp.up.kernel, layer 1"
    assert _last_group([*below, group("norm.scale", 1)]) == "norm.scale"
    assert _last_group([below[0], group("norm.scale")]) == "embed.embedding"
    assert _last_group([group("norm.scale")]) == "their norm, which is too large for float32"


def test_what_cannot_be_replayed(oarjax, tmp_path):
    code, _, err = oarjax("replay", tmp_path / "iteration-000001.safetensors")
    assert code == 2
    assert "no such file; a run keeps its bad batches in RUN_FOLDER/bad_batches" in err
    code, out, _ = oarjax("replay", "--help")
    assert code == 0
    for words in ("BATCH.safetensors", "--device", "--json", "bad_batches/iteration-000012.safetensors"):
        assert words in out


@pytest.mark.slow
def test_a_warm_start_that_explodes(oarjax, base, tmp_path):
    sft = {"data": MICRO["data"]["train"] | {"split": "sft"}, "steps": 9, "batch": 4, "microbatch": 4, "max_length": 48}
    optim = {"lr": 1e6, "warmup": 0, "function": f"{base / 'mine.py'}:leap", "settings": {"times": 1e33}}
    tree = yaml.safe_load((base / "run.yaml").read_text()) | {"sft": sft | {"optim": optim}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    code, out, err = oarjax("train", tmp_path / "sft.yaml", f"run_dir={tmp_path / 'run'}", "health.stop_after=2")
    assert code == 2
    assert "sft 2, optimizer step 0, phase update: params not finite: nothing could be learned in 2 updates" in err
    assert "oarjax replay" in out
    assert not (tmp_path / "run" / "start").exists()  # a start that learned nothing is no start
    found = replayed(oarjax, err)
    assert "with a learning rate of 1e+06 the step is not: lower the rate" in found["place"]
    assert len(found["rows"]) == 4


@pytest.mark.slow
def test_a_batch_of_everything_there_is(oarjax, base, tmp_path):
    """Several updates, a reference policy, importance on the reference answer: replay needs each part of the file."""
    change = ["update.epochs=2", "update.minibatches=2", "loss.kl_beta=0.1", "credit.method=oar_g", "iterations=1"]
    change += ["credit.answer.source=reference", "credit.answer.cue='='", "grading.rewards=[{name: huge}]"]
    code, out, err = train(oarjax, base, tmp_path / "run", *change)
    assert code == 0, err  # four updates were skipped, one fewer than health.stop_after
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record["skipped_in_a_row"] == 4
    (file,) = (tmp_path / "run" / "bad_batches").glob("iteration-*")
    _, evidence = read_bad_batch(file)
    assert evidence.probed is not None
    assert evidence.scores.old_logps.shape == evidence.scores.ref_logps.shape == evidence.completion.shape
    found = replayed(oarjax, "oarjax replay " + out.split("oarjax replay ")[1].split("\n")[0])
    assert len(found["rows"]) == 8
    assert {row["replayed"] for row in found["rows"]} == {"advantage"}
    assert {row["recorded"] for row in found["rows"]} == {"advantage"}
