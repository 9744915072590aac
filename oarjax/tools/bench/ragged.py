"""W8 of ``oarjax bench``: time a rollout whose completions differ in length, in tokens without padding per second.

The policy is random, so nearly all tokens are equally likely, and ``stops`` of them as stop ids end a completion with
the intended chance. ``--against torch`` lets ``generate`` of transformers, with its growing cache, draw completions of
exactly the lengths that ours had: both sides generate the same number of tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.costs import sampling_flops
from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.models.weights import decoder_of
from oarjax.rollout.sampler import Decoding, group_keys
from oarjax.rollout.segments import SegmentedSampler
from oarjax.tools.bench.measure import Compilations, Peak, seconds_of, warm
from oarjax.tools.bench.sides import TimedDraw, compare, share_in_use
from oarjax.tools.bench.work import PAD
from oarjax.types import PromptBatch

LAYERS = 8
"""At least as many as the policies have: on a CPU all are computed in one iteration of the loop over layers."""
BEFORE, ALONE = "before", "prompt per row"
"""Other ways of an iteration, see ``ragged_step``."""


@dataclass(frozen=True)
class Ragged:
    """Sizes of W8 to W11."""

    rows: int = 64
    prompt_tokens: int = 64
    max_new: int = 512
    stops: int = 41  # of 4,096 tokens: a chance of 1% per token, completions of 100 tokens on average
    bucket: int = 64  # of completions in scores and updates, the default of a run
    finer: int = 16  # W9's other buckets: four times the programs, for where compiling is cheap
    group_size: int = 4  # W10 and W11
    answer: int = 8  # W10 and W11: last tokens of a completion, OAR-G's answer
    compared: str = BEFORE  # other side of W10, or W11's


RAGGED = Ragged()
PROMPTS = Ragged(prompt_tokens=192, max_new=256, group_size=8, compared=ALONE)
"""W11: prompts as long as completions, which the rows of a group can share."""


class TorchSettings(NamedTuple):
    """Settings of torch's side."""

    threads: int
    device: str


def draw_prompts(vocab: int, shapes: Ragged, *, count: int) -> Int[np.ndarray, "P S"]:
    """Draw uniform ids without stop ids."""
    ids = np.random.default_rng(0).integers(shapes.stops, vocab, (count, shapes.prompt_tokens))
    return ids.astype(np.int32)


def ragged_config(shapes: Ragged, **sections: dict[str, Any]) -> Config:
    """Return the config of W9 to W11; ``sections`` override its fields."""
    cpu = jax.devices()[0].platform == "cpu"
    policy = {"path": "unused", "compute_dtype": "float32", "remat": "none", "attention": "xla"}
    tree: dict[str, dict[str, Any]] = {
        "policy": {**policy, "unroll": LAYERS if cpu else 1},
        "data": {"train": {"source": "unused"}, "max_prompt": shapes.prompt_tokens},
        "rollout": {
            "prompts": shapes.rows // shapes.group_size,
            "group_size": shapes.group_size,
            "max_new": shapes.max_new,
            "prompt_bucket": shapes.prompt_tokens,
            "completion_bucket": shapes.bucket,
        },
        "update": {"microbatch": min(shapes.rows, 4 if cpu else 8)},
    }
    merged = {name: tree.get(name, {}) | fields for name, fields in sections.items()}
    return parse_config({"run_dir": "unused"} | tree | merged)


def shape_text(shapes: Ragged) -> str:
    """Describe the rows of a draw."""
    return f"{shapes.rows} x ({shapes.prompt_tokens}+{shapes.max_new})"


def bench_ragged(
    folder: Path,
    vocab: int,
    shapes: Ragged,
    *,
    repeats: int,
    compiled: Compilations,
    peak: Peak,
    against: TorchSettings | None,
) -> dict[str, Any]:
    """Measure ``repeats`` rollouts, and torch's in turn, if requested."""
    model, source = read_config(folder)
    s, policy = shapes, make_policy(model, compute_dtype=jnp.float32)
    params, sizes = load_params(source, model), decoder_of(model)
    ids = draw_prompts(vocab, s, count=s.rows)
    prompts = PromptBatch(jnp.asarray(ids), jnp.ones(ids.shape, bool), jnp.arange(s.rows, dtype=jnp.int32))
    decoding = Decoding(s.max_new, 1.0, 0, 1.0, tuple(range(s.stops)), PAD)
    sampler = SegmentedSampler(policy, decoding, keys_of=partial(group_keys, group_size=1), group=1)
    generate = None
    if against is not None:
        from oarjax.tools.bench.ragged_against import RaggedTorch

        other_side = RaggedTorch(folder, ragged_config(s), **against._asdict())
        generate = other_side.waited(partial(other_side.complete, ids))
        generate(np.full(s.rows, min(s.max_new, 8)))  # warm

    def ours(number: int) -> TimedDraw:
        sampler.spent()
        start = time.perf_counter()
        rollout = jax.block_until_ready(sampler(params, prompts, jax.random.key(number)))
        seconds, spent = time.perf_counter() - start, sampler.spent().metrics()
        lengths = np.asarray(rollout.completion).sum(1)
        mean = float(lengths.mean())
        flops = sampling_flops(sizes, prompts=s.rows, rows=s.rows, prompt=s.prompt_tokens, completion=mean)
        return TimedDraw(seconds, lengths, flops, spent["decode_occupancy"], spent["decode_padding"])

    def draw(number: int) -> dict[str, dict[str, TimedDraw]]:
        sides = {"oarjax": (first := warm(partial(ours, number), compiled))}
        if generate is not None:
            seconds = seconds_of(partial(generate, first.lengths))
            sides["generate"] = first._replace(seconds=seconds, occupancy=share_in_use(first.lengths), padding=None)
        return {"rollout": sides}

    return compare(draw, "W8", "ragged rollout", shape_text(s), repeats=repeats, compiled=compiled, peak=peak)
