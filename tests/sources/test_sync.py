"""New weights for an engine over real HTTP: whatever it keeps of the old ones is found before anything is trained."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stub_engine
import tiny
import unsound
from rich.console import Console
from stub_engine import name_of

from oarjax.config.inputs import MeshConfig, PolicyConfig
from oarjax.config.learning import EngineConfig, LoraConfig, RolloutConfig
from oarjax.config.loading import parse_config
from oarjax.data.hf import export, load_params, read_config, write_random_checkpoint
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import ConfigError
from oarjax.models.lora import init_adapters, join_params
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import abstract_params
from oarjax.report.files import read_metrics
from oarjax.rollout.source import Batch, Spent
from oarjax.run.served import Served, served_weights
from oarjax.sources import engine as module
from oarjax.sources.engine import EngineError, EngineSource
from oarjax.sources.sync import StaleWeights, shaken_params
from oarjax.sources.turns import Rules
from oarjax.storage.folder import locked
from oarjax.storage.stop import Stop
from oarjax.system.mesh import make_mesh
from oarjax.training import command

SIZES: dict[str, Any] = {
    **{"vocab_size": tiny.VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    **{"max_position_embeddings": 128, "initializer_range": 0.4},
}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "untied": {"model_type": "qwen3", "tie_word_embeddings": False},
}


@cache
def tensors(kind: str) -> list[str]:
    """Name the tensors of the untied model that the engine serves."""
    model = QwenConfig.from_hf(SIZES | KINDS[kind] | {"tie_word_embeddings": False})
    return [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(abstract_params(model, dtype=jnp.float32))]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Serve each kind of model: kind -> (server, its params, what makes a source that draws with it)."""
    root = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:

        @cache
        def of(kind):
            folder = write_random_checkpoint(root / kind, SIZES | KINDS[kind], seed=1)
            model, params = read_config(folder)[0], load_params(folder, read_config(folder)[0])
            served = export(root / f"{kind}-served", model, params, source=folder, untie=True)
            return stack.enter_context(stub_engine.engine(served)), params, model, folder, {}

        yield of


def start(world, kind, root, *, kept=(), drill=20, dtype: Literal["float32", "bfloat16"] = "float32"):
    """Return the server, the policy's params, and a source as a run that starts has it."""
    server, params, model, folder, programs = world(kind)
    served = load_params(folder, model)
    untied = {"head": {"kernel": served["embed"]["embedding"].T}} if model.tie_word_embeddings else {}
    server.params, server.kept, server.refuse = served | untied, kept, lambda paths: 0
    server.paths.clear()
    url = f"http://127.0.0.1:{server.server_port}"
    cfg = EngineConfig(url=url, weights=str(root / kind), dtype=dtype, drill=drill, retries=0, deadline=30.0)
    if dtype not in programs:
        parts = Served(model, make_mesh(**MeshConfig().model_dump()), folder, (tiny.STOP,), tiny.PAD)
        prompts = [[5 + n, 9, 3 + n] for n in range(8)]
        place = lambda tree, _: jax.tree.map(jnp.asarray, tree)  # noqa: E731
        policy = PolicyConfig(path="unused", remat="none")
        programs[dtype] = served_weights(cfg, policy, LoraConfig(), parts, prompts, place=place, fetch=jax.device_get)
    said: list[str] = []
    rules = Rules(tiny.VOCAB, (tiny.STOP,))
    source = EngineSource(cfg, RolloutConfig(max_new=6), rules, weights=programs[dtype], say=said.append)
    return server, params, source, said


def batch(iteration=1) -> Batch:
    return Batch(tiny.prompts(2), jax.random.key(0), iteration, 0, group_size=2, max_new=6)


def stepped(params, size):
    noise = shaken_params(params, jax.random.key(7))
    return jax.tree.map(lambda x, y: x + size * (y - x), params, noise)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_reloads_draws_with_the_new_weights(world, kind, tmp_path):
    server, params, source, said = start(world, kind, tmp_path)
    new = stepped(params, 1.0)
    for version, weights in enumerate((params, new)):
        source.sync(weights, version)
        turns = source.draw(batch())
        assert {int(v) for turn in turns for v in turn.versions} == {version}
        if not version:
            metrics = source.spent().metrics()
            assert metrics["sync_seconds"] > 0
            assert 0 <= metrics["sync_gap"] <= metrics["sync_gap/p99"] <= metrics["sync_gap/max"] < 1e-4
            assert source.spent() == Spent()
    reload = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    probe, draws = ["/inference/v1/generate"] * 8, ["/inference/v1/generate"] * 4
    assert server.paths == [*reload, *probe, *reload, *probe, *draws, *reload, *probe, *draws]  # one drill
    for path, x in jax.tree_util.tree_leaves_with_path(new):
        np.testing.assert_array_equal(dict(jax.tree_util.tree_leaves_with_path(server.params))[path], x)
    assert said == []


def test_adapters_are_merged_into_what_an_engine_is_given(world, tmp_path):
    _, params, model, folder, _ = world("tied")
    lora = LoraConfig(rank=2)
    adapters = init_adapters(jax.random.key(0), params, rank=lora.rank, targets=lora.targets)
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)  # B begins at zero
    engine = EngineConfig(url="http://127.0.0.1:1", weights=str(tmp_path), dtype="float32")
    parts = Served(model, make_mesh(**MeshConfig().model_dump()), folder, (tiny.STOP,), tiny.PAD)
    policy = PolicyConfig(path="unused", remat="none")
    weights = served_weights(engine, policy, lora, parts, [[5]], place=lambda tree, _: tree, fetch=jax.device_get)
    written = Path(weights.write(weights.plain(join_params(params, adapters)), 0))
    given, before, low = map(named, (load_params(written, read_config(written)[0]), params, adapters))
    merged = [name.removesuffix(".lora_a") for name in low if name.endswith(".lora_a")]
    assert len(merged) == len(lora.targets)
    for name in merged:
        change = lora.scale * low[f"{name}.lora_a"] @ low[f"{name}.lora_b"]
        np.testing.assert_allclose(given[f"{name}.kernel"], before[f"{name}.kernel"] + change, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(given["head.kernel"], given["embed.embedding"].T)  # though it is tied


def named(tree: Any) -> dict[str, np.ndarray]:
    return {name_of(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(("kind", "kept"), [(kind, name) for kind in KINDS for name in tensors(kind)])
def test_a_drill_finds_any_tensor_that_is_kept(world, kind, kept, tmp_path):
    _, params, source, _ = start(world, kind, tmp_path, kept=(kept,))
    source.sync(params, 0)
    with pytest.raises(StaleWeights, match=r"after a sync to a drill's weights .* nothing was trained") as error:
        source.draw(batch())
    assert error.value.exit_code == 2
    if kept != "head.kernel" and kind == "untied":
        assert f"nearest is {kept} kept" in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_reloads_nothing_is_found_in_either_dtype(world, dtype, tmp_path):
    _, params, source, _ = start(world, "untied", tmp_path, kept=("*",), dtype=dtype)
    source.sync(params, 0)
    with pytest.raises(StaleWeights, match="off by"):
        source.draw(batch())


def test_what_an_update_moves_is_found_by_the_next_drill_alone(world, tmp_path):
    server, params, source, _ = start(world, "untied", tmp_path, drill=2)
    source.sync(params, 0)
    source.draw(batch())
    server.kept = ("norm.scale",)
    source.sync(stepped(params, 1e-6), 1)
    source.draw(batch())  # below what the probe can see
    source.sync(stepped(params, 2e-6), 2)
    with pytest.raises(StaleWeights, match="a drill's weights"):
        source.draw(batch())


@pytest.mark.parametrize("at", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"])
@pytest.mark.parametrize("push", [1, 2])
def test_a_failure_within_a_drill_ends_the_run_and_the_next_start_begins_with_one(world, at, push, tmp_path):
    server, params, source, _ = start(world, "tied", tmp_path)
    server.refuse = lambda paths: 500 if paths[-1] == at and paths.count(at) == push else 0
    source.sync(params, 0)
    with pytest.raises(EngineError, match=f"{at}.*status 500") as error:
        source.draw(batch())
    assert error.value.exit_code == 75
    server.refuse = lambda paths: 0
    again = EngineSource(source._engine, source._rollout, source._rules, weights=world("tied")[4]["float32"])
    server.paths.clear()
    again.sync(params, 0)
    again.draw(batch())
    assert server.paths.count("/collective_rpc") == 2
    embedding = np.asarray(params["embed"]["embedding"])
    np.testing.assert_array_equal(server.params["embed"]["embedding"], embedding)
    np.testing.assert_array_equal(server.params["head"]["kernel"], embedding.T)


def test_a_server_without_the_calls_is_told_of_before_anything_is_computed(world, tmp_path):
    server, _, source, _ = start(world, "tied", tmp_path)
    server.refuse = lambda paths: 404 if paths[-1] == "/resume" else 0
    with pytest.raises(EngineError, match=r"(?s)/resume: .*status 404.* VLLM_SERVER_DEV_MODE=1"):
        source.probe()


@pytest.mark.slow
def test_a_run_trains_through_an_engine_and_resumes_when_it_has_died(tmp_path):
    policy = write_builtin_policy(tmp_path / "policy", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    model = read_config(policy)[0]
    served = export(tmp_path / "served", model, load_params(policy, model), source=policy, untie=True)
    run = tmp_path / "run"
    with stub_engine.engine(served) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        engine = {"url": url, "weights": str(tmp_path / "weights"), "dtype": "float32", "retries": 0}
        rollout = unsound.MICRO["rollout"] | {"engine": engine}
        tree = unsound.MICRO | {"run_dir": str(run), "policy": {"path": str(policy)}, "iterations": 3}
        tree |= {"rollout": rollout, "checkpoint": {"every": 10}}

        def drawn():
            return server.paths.count("/inference/v1/generate")

        died = 1 + 8 + 8 + 16 + 8 + 5  # the start, two probes and its rows, a probe and some rows
        server.refuse = lambda paths: 500 if drawn() > died else 0
        with pytest.raises(EngineError, match="of 16 rows were drawn"):
            command.train_once(parse_config(tree), Console(quiet=True), Stop())
        assert len(read_metrics(run / "metrics.jsonl")) == 1
        with locked(tmp_path / "weights"), pytest.raises(ConfigError, match=r"engine.weights: .* is in use by pro"):
            command.train_once(parse_config(tree), Console(quiet=True), Stop())
        server.refuse = lambda paths: 0
        before = drawn()
        command.train_once(parse_config(tree), Console(quiet=True), Stop())
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert 0 < rows[1]["rows_redrawn"] < 16
    assert "rows_redrawn" not in rows[0]
    assert drawn() - before == 1 + 8 + 8 + rows[1]["rows_redrawn"] + 8 + 16  # nothing of the first iteration
    assert [row["sync_seconds"] > 0 for row in rows[1:]] == [True, True]
    assert server.paths.count("/collective_rpc") == 2 + 1 + 2 + 1  # a drill at either start
