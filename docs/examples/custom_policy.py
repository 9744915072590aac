"""Train a custom policy, not a Qwen, by the public steps: python docs/examples/custom_policy.py

One attention layer over token and position embeddings. Anything that gives the four functions of ``oarjax.Policy``
can stand in its place: the sampler, every method of credit and the update know nothing else of a model.
"""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import oarjax
from oarjax import (
    AnswerSpan,
    Config,
    Grades,
    HostCallbacks,
    KVCache,
    Params,
    Policy,
    PromptBatch,
    Rollout,
    Shardings,
    TrainState,
)

VOCAB, WIDTH, LONGEST = 16, 32, 64
PAD, STOP = 0, 1


def make_params(key: jax.Array) -> Params:
    shapes = {"tokens": (VOCAB, WIDTH), "places": (LONGEST, WIDTH), "qkv": (3, WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) / WIDTH**0.5 for k, (name, shape) in zip(keys, shapes.items())}


def embed(params, tokens):
    return params["tokens"][tokens]


def trunk(params, embeddings, positions, valid, *, cache=None, prefix=None, visible=None):
    """Each token attends to itself and what stands before it: in its row, in its cache, in its group's prefix."""
    rows, count, _ = embeddings.shape
    x = embeddings + params["places"][positions]
    q, k, v = jnp.einsum("bnd,sde->sbne", x, params["qkv"])
    if cache is None:
        keys, values, seen = k, v, jnp.tril(jnp.ones((count, count), bool)) & valid[:, None, :]
    else:
        at = cache.length
        keys = jax.lax.dynamic_update_slice_in_dim(cache.k[0, :, :, 0], k, at, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(cache.v[0, :, :, 0], v, at, axis=1)
        slots = jax.lax.dynamic_update_slice_in_dim(cache.valid, valid, at, axis=1)
        seen = (jnp.arange(keys.shape[1]) <= at + jnp.arange(count)[:, None]) & slots[:, None, :]
        cache = KVCache(keys[None, :, :, None], values[None, :, :, None], slots, at + count)
    if prefix is not None:
        group = rows // prefix.valid.shape[0]
        there = jnp.repeat(prefix.valid, group, axis=0)[:, None, :]
        there = jnp.broadcast_to(there if visible is None else there & visible, (rows, count, there.shape[-1]))
        keys = jnp.concatenate([jnp.repeat(prefix.k[0, :, :, 0], group, axis=0), keys], axis=1)
        values = jnp.concatenate([jnp.repeat(prefix.v[0, :, :, 0], group, axis=0), values], axis=1)
        seen = jnp.concatenate([there, seen], axis=2)
    scores = jnp.where(seen, jnp.einsum("bnd,bcd->bnc", q, keys) / WIDTH**0.5, -1e9)
    mixed = jnp.einsum("bnc,bcd->bnd", jax.nn.softmax(scores), values)
    return x + jnp.tanh(mixed @ params["out"]), cache


def unembed(params, hidden):
    return hidden @ params["tokens"].T


def init_cache(rows, slots):
    empty = jnp.zeros((1, rows, slots, 1, WIDTH))
    return KVCache(empty, empty, jnp.zeros((rows, slots), bool), jnp.zeros((), jnp.int32))


policy = Policy(embed, trunk, unembed, init_cache)


# A task: say the prompt's number again, then stop -----------------------------------------------------------------


def prompts(draw: np.random.Generator, count: int) -> PromptBatch:
    numbers = draw.integers(2, VOCAB, (count, 1)).astype(np.int32)
    return PromptBatch(numbers, np.ones((count, 1), bool), numbers[:, 0])


def reward(rollout: Rollout) -> np.ndarray:
    """The share of a completion's tokens that are the prompt's number."""
    asked, said = rollout.tokens[:, :1], rollout.tokens[:, 1:]
    return ((said == asked) & rollout.completion).sum(1) / rollout.completion.sum(1)


def graded(rollout: Rollout):
    rewards = reward(rollout).astype(np.float32)
    rows = len(rewards)
    return lambda: Grades(rewards, {"share": rewards}, ["graded"] * rows, [None] * rows, [""] * rows)


def find_answers(rollout: Rollout) -> AnswerSpan:
    """The last token is the answer, the ones before it the reasoning."""
    place, length = np.arange(rollout.completion.shape[1]), rollout.completion.sum(1, keepdims=True)
    return AnswerSpan(place < length - 1, place == length - 1, length[:, 0] > 1)


def train(iterations: int, *, method: str = "oar_g", seed: int = 0) -> list[float]:
    """Mean reward of every iteration."""
    cfg = Config(
        run_dir="unused",
        seed=seed,
        iterations=iterations,
        policy={"path": "unused"},
        data={"train": {"source": "unused"}},
        rollout={"prompts": 8, "group_size": 8, "max_new": 8, "completion_bucket": 8},
        credit={"method": method},
        update={"microbatch": 32},
        optim={"lr": 2e-2, "warmup": 0},
    )
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    everywhere = NamedSharding(mesh, PartitionSpec())
    where = Shardings(state=everywhere, params=everywhere, rows=everywhere, replicated=everywhere)
    tx, _ = oarjax.make_optimizer(cfg)
    steps = oarjax.make_steps(policy, tx, where, cfg, stop_ids=(STOP,), pad_id=PAD)
    params, draw = make_params(jax.random.key(seed)), np.random.default_rng(seed)
    state = TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(seed))
    host = HostCallbacks(
        next_prompts=lambda: prompts(draw, cfg.rollout.prompts),
        submit=lambda asked: oarjax.GradedAtOnce(graded),
        find_answers=find_answers,
        fetch=jax.device_get,
        place=lambda tree, layout: jax.tree.map(jnp.asarray, tree),
        phase=lambda name: nullcontext(),
    )
    rewards = []
    for iteration in range(1, iterations + 1):
        state, done = oarjax.iterate(state, None, iteration, steps=steps, host=host, cfg=cfg)
        rewards.append(float(done.grades.rewards.mean()))
    return rewards


if __name__ == "__main__":
    for number, value in enumerate(train(40), 1):
        print(f"iteration {number:2}  reward {value:.2f}")
