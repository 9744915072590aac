"""Build a tiny run for tests: config, Qwen2 policy, steps, and a host that grades without workers."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.credit.method import built_in
from oarjax.credit.methods.keywords import KeywordTable
from oarjax.credit.registry import METHODS
from oarjax.models.policy import Policy
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import init_params
from oarjax.rollout.logps import token_logps
from oarjax.rollout.source import SamplerSource
from oarjax.step.host_callbacks import GradedAtOnce, HostCallbacks
from oarjax.step.programs import Shardings, make_optimizer, make_steps
from oarjax.step.steps import Steps
from oarjax.types import AnswerSpan, Grades, Params, PromptBatch, Rollout, TrainState

STOP, PAD, MARK = 1, 0, 2
VOCAB = 24


def model() -> QwenConfig:
    return QwenConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "initializer_range": 0.4,
        }
    )


init = jax.jit(init_params, static_argnums=0, static_argnames="dtype")
"""Weights of any policy by one program, where ``init_params`` by itself compiles one for every operation."""


@functools.cache
def _drawn_params() -> Params:
    return jax.device_get(init(model(), jax.random.key(3)))


def params(dtype=jnp.float32) -> Params:
    """Return the policy's first weights, drawn once per process: arrays of their own, as updates give memory up."""
    return jax.tree.map(lambda x: jnp.array(x, dtype), _drawn_params())


def norm(tree) -> float:
    """Return the norm over all arrays of a tree, by numpy: ``optax.tree.norm`` compiles programs for every shape."""
    return float(np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree))))


def config(**changes) -> Config:
    tree = {
        "run_dir": "unused",
        "iterations": 4,
        "policy": {"path": "unused", "remat": "none"},
        "data": {"train": {"source": "unused"}},
        "rollout": {"prompts": 4, "group_size": 4, "max_new": 10, "completion_bucket": 10},
        "credit": {"method": "uniform"},
        "update": {"microbatch": 4},
        "optim": {"lr": 1e-2, "warmup": 0},
    }
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return parse_config(tree)


def one_device() -> Shardings:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Shardings(state=everywhere, params=everywhere, rows=everywhere, replicated=everywhere)


def build(cfg: Config, keyword_table: KeywordTable | None = None) -> tuple[Policy, Steps, TrainState]:
    """Build programs and a fresh state; equal configs share programs, which compile once."""
    programs = _programs(cfg.model_dump_json()) if keyword_table is None else _build(cfg, keyword_table)
    policy, steps, tx, where = programs
    start = params()
    state = TrainState(jnp.zeros((), jnp.int32), start, tx.init(start), jax.random.key(cfg.seed))
    return policy, steps, jax.device_put(state, where.replicated)


@functools.lru_cache(maxsize=32)
def _programs(cfg: str):
    return _build(Config.model_validate_json(cfg), None)


def _build(cfg: Config, keyword_table: KeywordTable | None):
    policy = make_policy(model(), compute_dtype=jnp.float32, remat=cfg.policy.remat)
    tx, _ = make_optimizer(cfg)
    where = one_device()
    steps = make_steps(policy, tx, where, cfg, stop_ids=(STOP,), pad_id=PAD, keyword_table=keyword_table)
    return policy, _shared(steps, cfg), tx, where


SHARED = ("rollout", "advantage", "loss", "optim", "policy")
"""Sections that programs without credit depend on."""


def _shared(steps: Steps, cfg: Config) -> Steps:
    """Take the programs that credit and the choice of rows have no part in from a run of uniform credit."""
    sections = {name: getattr(cfg, name).model_dump() for name in SHARED}
    sections["advantage"]["soft"] = "off"  # without credit there is no reference answer
    plain = config(**sections)
    update = plain.update.model_copy(
        update={n: getattr(cfg.update, n) for n in ("epochs", "minibatches", "microbatch")}
    )
    plain = plain.model_copy(update={"update": update, "iterations": cfg.iterations})
    if cfg == plain:
        return steps
    names = ["rollout_params", "sample", "decoding", "equal_groups", "apply"]
    method = built_in(cfg.credit.method) if cfg.credit.method in METHODS else None
    if method is not None and method.loss is None and method.reweigh is None:
        names += ["denominator", "zeros", "accumulate"]
    common = _programs(plain.model_dump_json())[1]
    return steps._replace(**{name: getattr(common, name) for name in names})


def prompts(count: int = 4, seed: int = 0) -> PromptBatch:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 7, count)
    return PromptBatch(
        tokens=draw.integers(3, VOCAB, (count, 6)).astype(np.int32),
        valid=np.arange(6) >= 6 - lengths[:, None],
        problem=np.arange(count, dtype=np.int32),
    )


def drawn(params, prompts, key, **_):
    """Return a rollout without a sampler: completions of 1 to 10 tokens, most of which stop. Takes sample's place."""
    draw = np.random.default_rng(5)
    rows, T = 4 * len(prompts.problem), 10
    lengths = draw.integers(1, T + 1, rows)
    completion = np.arange(T) < lengths[:, None]
    tokens = np.where(completion, draw.integers(3, VOCAB, (rows, T)), PAD)
    before = [np.repeat(np.asarray(x), 4, axis=0) for x in (prompts.tokens, prompts.valid)]
    logps = np.where(completion, -draw.random((rows, T)), 0).astype(np.float32)
    return Rollout(
        np.concatenate([before[0], tokens], 1).astype(np.int32),
        np.concatenate([before[1], completion], 1),
        completion,
        logps,
        logps,
        draw.random(rows) < 0.8,
    )


def find_answers(rollout) -> AnswerSpan:
    """Take the last generated token before the stop as the answer, all tokens before it as the reasoning."""
    length = rollout.completion.sum(1) - rollout.ended
    place = np.arange(rollout.completion.shape[1])
    has_answer = length >= 2
    return AnswerSpan(
        reasoning=(place < length[:, None] - 1) & has_answer[:, None],
        answer=(place == length[:, None] - 1) & has_answer[:, None],
        has_answer=has_answer,
    )


def grades(rewards: np.ndarray) -> Grades:
    n = len(rewards)
    rewards = rewards.astype(np.float32)
    verdicts = ["graded" if np.isfinite(r) else "timeout" for r in rewards]
    return Grades(rewards, {"test": rewards}, verdicts, [None] * n, [""] * n)


def even_tokens(rollout) -> np.ndarray:
    """Reward completions more than half of whose tokens are even."""
    ids = np.asarray(rollout.tokens)[:, -rollout.completion.shape[1] :]
    return (((ids % 2 == 0) & rollout.completion).sum(1) * 2 > rollout.completion.sum(1)).astype(np.float32)


def host(reward=even_tokens, batches=None) -> HostCallbacks:
    source = iter(batches) if batches is not None else (prompts(seed=i) for i in range(10**6))
    return HostCallbacks(
        next_prompts=lambda: next(source),
        submit=lambda batch: GradedAtOnce(lambda rollout: lambda: grades(reward(rollout))),
        find_answers=find_answers,
        fetch=jax.device_get,
        place=lambda tree, layout: jax.tree.map(jnp.asarray, tree),
        phase=lambda name: nullcontext(),
    )


def sampler(steps: Steps, params: Params) -> SamplerSource:
    """Return a source of the sampler's turns, with parameters of version 3."""
    source = SamplerSource(
        steps.sample, steps.decoding, steps.rollout_params, lambda prompts: prompts, jax.device_get, steps.sample_on
    )
    source.sync(params, 3)
    return source


def logps_of(policy: Policy, params: Params, rollout: Rollout, *, temperature: float) -> np.ndarray:
    """Return the log-probs of whole rows, 0 for what the policy did not write."""
    made = rollout.completion
    how = {"completion_length": made.shape[1], "temperature": temperature, "head_chunk": 64}
    forward = jax.jit(lambda params, tokens, valid: token_logps(policy, params, tokens, valid, **how)[0])
    return np.where(made, forward(params, np.asarray(rollout.tokens), np.asarray(rollout.valid)), 0)
