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
from rich.table import Table

from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.costs import sampling_flops
from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.models.weights import decoder_of
from oarjax.rollout.sampler import Decoding, group_keys
from oarjax.rollout.segments import SegmentedSampler
from oarjax.tools.bench.measure import Compilations, Peak, spread
from oarjax.tools.bench.work import PAD
from oarjax.types import PromptBatch

BEFORE, ALONE = "before", "prompt per row"
"""Other ways of an iteration, see ``ragged_step``."""


@dataclass(frozen=True)
class Ragged:
    """Sizes of W8 to W11."""

    rows: int = 64
    prompt_tokens: int = 64
    max_new: int = 512
    stops: int = 41  # of 4,096 tokens: a chance of 1% per token, completions of 100 tokens on average
    bucket: int = 64  # of completions in scores and updates
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
    tree: dict[str, dict[str, Any]] = {
        "policy": {"path": "unused", "compute_dtype": "float32", "remat": "none", "attention": "xla"},
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
    changed = {name: tree.get(name, {}) | fields for name, fields in sections.items()}
    return parse_config({"run_dir": "unused"} | tree | changed)


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
    """Measure useful tokens per second of ``repeats`` rollouts, and torch's in turn, if requested."""
    model, source = read_config(folder)
    s, policy = shapes, make_policy(model, compute_dtype=jnp.float32)
    params = load_params(source, model)
    ids = draw_prompts(vocab, s, count=s.rows)
    prompts = PromptBatch(jnp.asarray(ids), jnp.ones(ids.shape, bool), jnp.arange(s.rows, dtype=jnp.int32))
    decoding = Decoding(s.max_new, 1.0, 0, 1.0, tuple(range(s.stops)), PAD)
    sampler = SegmentedSampler(policy, decoding, keys_of=partial(group_keys, group_size=1), group=1)

    def ours(seed: int) -> tuple[float, Int[np.ndarray, "B"]]:
        began = time.perf_counter()
        rollout = jax.block_until_ready(sampler(params, prompts, jax.random.key(seed)))
        return time.perf_counter() - began, np.asarray(rollout.completion).sum(1)

    theirs = None
    if against is not None:
        from oarjax.tools.bench.ragged_against import RaggedTorch

        other_side = RaggedTorch(folder, ragged_config(s), **against._asdict())
        theirs = other_side.waited(partial(other_side.complete, ids))
    before = compiled.count
    for seed in range(repeats):  # the draws that are timed below, so that all their programs are compiled
        ours(seed)
    programs = compiled.count - before
    if theirs is not None:
        theirs(np.full(s.rows, min(s.max_new, 8)))
    sampler.spent()
    before, seconds, other, tokens, spent = compiled.count, [], [], [], []
    for seed in range(repeats):
        elapsed, lengths = ours(seed)
        seconds.append(elapsed)
        tokens.append(int(lengths.sum()))
        spent.append(sampler.spent().metrics())
        if theirs is not None:
            began = time.perf_counter()
            theirs(lengths)
            other.append(time.perf_counter() - began)
    warm, sizes = compiled.count - before, decoder_of(model)
    flops = [
        sampling_flops(sizes, prompts=s.rows, rows=s.rows, prompt=s.prompt_tokens, completion=count / s.rows)
        for count in tokens
    ]
    document = {
        "workload": "W8",
        "name": "ragged rollout",
        "what": f"{s.rows} x ({s.prompt_tokens}+{s.max_new}), {sum(tokens) / repeats / s.rows:.0f} on average",
        "useful_tokens": spread([float(count) for count in tokens]),
        "compilations": programs,
        "compilations_warm": warm,
        "ours": {
            "tokens_per_second": spread([count / t for count, t in zip(tokens, seconds)]),
            "share_of_peak": spread([peak.share(work, t) for work, t in zip(flops, seconds)]),
            "occupancy": spread([each["decode_occupancy"] for each in spent]),
            "padding": spread([each["decode_padding"] for each in spent]),
            "decode_steps": spread([each["decode_steps"] for each in spent]),
        },
        "speedup": None,
    }
    if theirs is not None:
        document["torch"] = {
            "tokens_per_second": spread([count / t for count, t in zip(tokens, other)]),
            "share_of_peak": spread([peak.share(work, t) for work, t in zip(flops, other)]),
        }
        document["speedup"] = spread([b / a for a, b in zip(seconds, other)])
    return document


def table(result: dict[str, Any]) -> Table:
    """Tabulate medians with minimum and maximum."""
    out = Table(title=f"W8 {result['name']}, {result['what']}", title_justify="left")
    for heading in ("", "useful tokens/s", "of matmul peak", "occupancy", "padding", "steps", "programs"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    if "compile_seconds" in result:
        out.caption = f"{result['compilations']} programs, compiled in {result['compile_seconds']:.0f} s beside"

    def cell(v: dict[str, Any] | None, digits: str) -> str:
        return "-" if v is None else f"{v['median']:{digits}}\n[dim]{v['min']:{digits}}-{v['max']:{digits}}[/dim]"

    ours = result["ours"]
    shares = [cell(ours[name], digits) for name, digits in (("occupancy", ".2f"), ("padding", ".2f"))]
    speed = [cell(ours["tokens_per_second"], ",.0f"), cell(ours["share_of_peak"], ".1%")]
    out.add_row("oarjax", *speed, *shares, cell(ours["decode_steps"], ",.0f"), str(result["compilations"]))
    if "torch" in result:
        theirs = result["torch"]
        out.add_row("generate", cell(theirs["tokens_per_second"], ",.0f"), cell(theirs["share_of_peak"], ".1%"))
        out.add_row("ratio", cell(result["speedup"], ".2f") + "x")
    return out
