"""Runs that train adapters: through the command, exported at the end or from a checkpoint, and sharded."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CACHE, json_lines
from rich.console import Console

from oarjax.config.loading import load_config
from oarjax.config.section import changed
from oarjax.data.hf import load_params, read_config
from oarjax.evaluate import export as export_command
from oarjax.evaluate.target import find_target, load_target
from oarjax.report.files import read_metrics
from oarjax.rollout.logps import token_logps
from oarjax.run.run import open_run
from oarjax.storage.checkpoint import Checkpoints
from oarjax.storage.stop import Stop
from oarjax.training import command, trainer, warm_start
from oarjax.training.trainer import Trained

SMALL = [
    "lora.rank=4",
    "lora.alpha=8",
    "loss.kl_beta=0.01",
    "loss.entropy_bonus=-0.1",  # so small a policy earns no reward in three iterations: this moves it all the same
    "sft.steps=30",
    "sft.batch=16",
    "sft.microbatch=16",
    "sft.optim.warmup=0",
    "sft.optim.lr=0.02",
    "sft.data.limit=64",
    "data.train.limit=20",
    "data.eval.limit=16",
    "rollout.prompts=8",
    "rollout.group_size=2",
    "rollout.max_new=16",
    "update.microbatch=16",
    "update.skip_zero_variance=false",
    "eval.batch=16",
    "report.html=false",
    f"compilation_cache={CACHE}",
    "checkpoint.every=1",
    "credit.method=uniform",
    "optim.schedule=constant",
    "optim.lr=0.01",
    "optim.moments=bfloat16",
    "grading.workers=1",
    "iterations=3",
]


def config(data, folder):
    return load_config(data.parent.parent / "configs/demo.yaml", [*SMALL, f"run_dir={folder}"])


def weights(folder):
    model, source = read_config(folder)
    return load_params(source, model)


@pytest.mark.slow
def test_a_run_of_adapters_from_start_to_export(tmp_path, data, monkeypatch):
    """A warm start, three iterations with a KL term, the merged export, and the same of checkpoints without one.

    That such a run resumes bit for bit is shown by those that are killed, in tests/faults.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    losses, ended = [], []

    class Told(warm_start.Progress):
        def update(self, number, shown, *rest):
            losses.append(shown["loss"])
            super().update(number, shown, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "Progress", Told)
        patch.setattr(command, "train", lambda *args, **named: ended.append(trainer.train(*args, **named)) or ended[0])
        command.train_once(config(data, whole), Console(quiet=True), Stop())
    # Norms and the small random embeddings are frozen, so no logit leaves about +-0.6: this is near the most.
    assert losses[-1] < losses[0] - 0.3

    # The adapters beside the warm start's weights are the exported policy.
    (trained,) = ended
    assert isinstance(trained, Trained)
    base, exported = weights(whole / "start"), weights(whole / "export")
    session = open_run(config(data, whole), Console(quiet=True))
    rows = jnp.asarray(np.random.default_rng(0).integers(3, 14, (4, 20)), jnp.int32)

    def logps(params):
        args = (session.policy, params, rows, jnp.ones(rows.shape, bool))
        return token_logps(*args, completion_length=12, temperature=1.0, head_chunk=64)[0]

    np.testing.assert_allclose(logps(trained.params), logps(exported), atol=1e-4)
    assert float(jnp.abs(logps(exported) - logps(base)).max()) > 1e-3
    ids = torch.tensor(np.asarray(rows)).long()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(whole / "export")(ids).logits.detach()
    picked = torch.log_softmax(theirs[:, 7:19], -1).gather(-1, ids[:, 8:, None])[..., 0]
    np.testing.assert_allclose(logps(trained.params), picked, atol=1e-3)
    for name in ("embed", "norm"):
        jax.tree.map(np.testing.assert_array_equal, base[name], exported[name])

    # Checkpoints hold adapters and their moments, and nothing of the base.
    with Checkpoints(whole / "checkpoints", keep=2) as checkpoints:
        arrays = checkpoints.finished()[3]["arrays"]
    names = [name for name in arrays if name.startswith("params")]
    assert len(names) == 14
    assert all(name.endswith(("lora_a", "lora_b")) for name in names)
    assert {arrays[f"opt_state/1/0/{m}/{n[7:]}"].split("[")[0] for m in ("mu", "nu") for n in names} == {"bfloat16"}

    shutil.copytree(whole, parts, ignore=shutil.ignore_patterns("export"))
    target = find_target(str(parts))  # without an export: the checkpoint's adapters, merged into the start
    assert target.policy == str(parts / "start")
    cfg = config(data, parts)
    cfg = changed(cfg, policy=changed(cfg.policy, path=target.policy))
    merged = load_target(target, open_run(cfg, Console(quiet=True)))
    jax.tree.map(np.testing.assert_array_equal, merged, exported)
    export_command.run(str(parts), tmp_path / "early", "keep", 1.0)
    jax.tree.map(np.testing.assert_array_equal, weights(tmp_path / "early"), merged)
    kl = [row.get("kl") for row in read_metrics(whole / "metrics.jsonl")]
    assert kl[1] == pytest.approx(0, abs=1e-7)  # the reference is the base itself
    assert kl[-1] > 0
    drift = [row.get("kl_start") for row in read_metrics(whole / "metrics.jsonl")]
    assert drift[:3] == [None] * 3  # measured with evaluations, of the rollout before the update
    assert drift[3] > 0


SHARDED = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from oarjax.run.layout import rollout_layout, training_layout
from oarjax.run.policy import bind_policy
from oarjax.step.state import new_state
from oarjax.system.mesh import make_mesh
from oarjax.models.lora import all_params
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import init_params
from oarjax.step.minibatches import Piece
from oarjax.step.programs import make_steps
from oarjax.types import TrainBatch
import tiny

model = QwenConfig.from_hf(dict(model_type="qwen2", vocab_size=24, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e4,
    max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.2))
cfg = tiny.config(lora__rank=4, policy__remat="full")
sgd = optax.sgd(1.0)  # what an update subtracts is the gradient
draw = np.random.default_rng(0)
rows = {"tokens": draw.integers(3, 24, (1, 8, 16)).astype(np.int32), "valid": np.ones((1, 8, 16), bool),
        "completion": np.ones((1, 8, 8), bool), "advantages": draw.normal(size=(1, 8, 8)).astype(np.float32)}

def outcome(fsdp, tensor):
    mesh = make_mesh(slice=1, data=1, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: fsdp * tensor])
    layout = training_layout(cfg.lora, model, mesh, sgd)
    policy = bind_policy(cfg.policy, model, mesh, adapter_scale=cfg.lora.scale)
    steps = make_steps(policy, sgd, layout, cfg, stop_ids=(1,), pad_id=0,
                       rollout=rollout_layout(cfg.policy, cfg.rollout, cfg.lora, model, mesh))
    state = new_state(jax.device_put(init_params(model, jax.random.key(3)), layout.params), sgd, layout, seed=0,
                      lora=cfg.lora)
    batch = TrainBatch(**jax.device_put(rows, layout.microbatches), old_logps=None, ref_logps=None,
                       behaviour_logps=None)
    used, count = np.int32(1), np.float32(64)
    noisy = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)  # with B = 0, A has no gradient
    state = state.replace(params=jax.tree.map(lambda x: jax.device_put(noisy(x), x.sharding), state.params))
    before = jax.device_get(state.params)
    merged = jax.device_get(steps.rollout_params(all_params(state)))
    state, metrics = steps.updates.update(state, batch, (Piece(None, np.int32(0), used),), count)
    pair = state.params["layers"]["attention"]["q"]
    where = [list(pair[name].sharding.spec) for name in ("lora_a", "lora_b")]
    gradients = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), before, state.params)
    return {"gradients": gradients, "merged": merged, "loss": metrics["loss"].value}, where

def error(tree, other):
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other))]
    return float(max(np.abs(x - y).max() for x, y in pairs) / max(np.abs(x).max() for x, y in pairs))

(one, _), (four, where) = outcome(1, 1), outcome(2, 2)
print(json.dumps({"where": where} | {name: error(tree, four[name]) for name, tree in one.items()}))
"""


@pytest.mark.slow
def test_adapters_are_divided_as_their_matrices_and_learn_the_same():
    (found,) = json_lines(SHARDED, devices=4, quick=True)
    assert found["where"] == [[None, None, None], [None, None, "tensor"]]
    for name in ("gradients", "merged", "loss"):
        assert found[name] < 1e-5, found
