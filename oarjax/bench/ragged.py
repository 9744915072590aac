"""W8 of ``oarjax bench``: a rollout whose completions differ in length, in tokens that are not padding per second.

The policy is random, so nearly every token is equally likely and ``stops`` of them as stop ids end a completion with
the wanted chance. ``--against torch`` has ``generate`` of transformers, with its growing cache, draw completions of
the very lengths that ours had: both sides make the same number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from rich.table import Table

from oarjax.bench.measure import Compilations, spread
from oarjax.costs import sampling_flops
from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.models.weights import decoder_of
from oarjax.rollout.sampler import Decoding, group_keys
from oarjax.rollout.segments import SegmentedSampler
from oarjax.system.devices import peak_flops
from oarjax.types import PromptBatch

PAD = 0


@dataclass(frozen=True)
class Ragged:
    """Sizes of the workload."""

    rows: int = 64
    prompt_tokens: int = 64
    max_new: int = 512
    stops: int = 41  # of 4,096 tokens: a chance of 1% per token, completions of 100 tokens on average


RAGGED = Ragged()


def bench_ragged(
    folder: Path, vocab: int, shapes: Ragged, *, repeats: int, compiled: Compilations, torch_threads: int | None
) -> dict[str, Any]:
    """Useful tokens per second of ``repeats`` rollouts; torch's with so many threads in turn, where it is asked for."""
    model, source = read_config(folder)
    s, policy = shapes, make_policy(model, compute_dtype=jnp.float32)
    params = load_params(source, model)
    draw = np.random.default_rng(0)
    ids = draw.integers(s.stops, vocab, (s.rows, s.prompt_tokens)).astype(np.int32)
    prompts = PromptBatch(jnp.asarray(ids), jnp.ones(ids.shape, bool), jnp.arange(s.rows, dtype=jnp.int32))
    how = Decoding(s.max_new, 1.0, 0, 1.0, tuple(range(s.stops)), PAD)
    sampler = SegmentedSampler(policy, how, keys_of=partial(group_keys, group_size=1), group=1)

    def ours(seed: int) -> tuple[float, Int[np.ndarray, "B"]]:
        began = time.perf_counter()
        rollout = jax.block_until_ready(sampler(params, prompts, jax.random.key(seed)))
        return time.perf_counter() - began, np.asarray(rollout.completion).sum(1)

    theirs = None if torch_threads is None else torch_generate(folder, ids, s, threads=torch_threads)
    before = compiled.count
    for seed in range(repeats):  # the draws that are timed below, so that all their programs are compiled
        ours(seed)
    programs = compiled.count - before
    if theirs is not None:
        theirs(np.full(s.rows, min(s.max_new, 8)))
    sampler.spent()
    before, seconds, other, tokens, taken = compiled.count, [], [], [], []
    for seed in range(repeats):
        found, lengths = ours(seed)
        seconds.append(found)
        tokens.append(int(lengths.sum()))
        taken.append(sampler.spent())
        if theirs is not None:
            began = time.perf_counter()
            theirs(lengths)
            other.append(time.perf_counter() - began)
    warm, sizes = compiled.count - before, decoder_of(model)
    flops = [
        sampling_flops(sizes, prompts=s.rows, rows=s.rows, prompt=s.prompt_tokens, completion=made / s.rows)
        for made in tokens
    ]
    peak, where = peak_flops(jnp.float32)
    document = {
        "workload": "W8",
        "name": "ragged rollout",
        "what": f"{s.rows} x ({s.prompt_tokens}+{s.max_new}), {sum(tokens) / repeats / s.rows:.0f} on average",
        "useful_tokens": spread([float(made) for made in tokens]),
        "compilations": programs,
        "compilations_warm": warm,
        "peak_flops": {"per_second": peak, "from": where},
        "ours": {
            "tokens_per_second": spread([made / t for made, t in zip(tokens, seconds)]),
            "share_of_peak": spread([work / t / peak for work, t in zip(flops, seconds)]),
            "occupancy": spread([each["decode_occupancy"] for each in taken]),
            "padding": spread([each["decode_padding"] for each in taken]),
            "decode_steps": spread([each["decode_steps"] for each in taken]),
        },
        "speedup": None,
    }
    if theirs is not None:
        document["torch"] = {
            "tokens_per_second": spread([made / t for made, t in zip(tokens, other)]),
            "share_of_peak": spread([work / t / peak for work, t in zip(flops, other)]),
        }
        document["speedup"] = spread([b / a for a, b in zip(seconds, other)])
    return document


def torch_generate(
    folder: Path, ids: Int[np.ndarray, "B S"], shapes: Ragged, *, threads: int
) -> Callable[[Int[np.ndarray, "B"]], Any]:
    """(lengths) -> completions of these lengths by transformers, sampled with its growing cache."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    prompts = torch.as_tensor(ids, dtype=torch.long)

    class AtLengths(StoppingCriteria):
        eos_token_id = PAD  # tells generate that rows end one by one

        def __init__(self, lengths: Int[np.ndarray, "B"]):
            self.ends = torch.as_tensor(lengths) + prompts.shape[1]

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] >= self.ends

    def generate(lengths: Int[np.ndarray, "B"]) -> Any:
        made = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=shapes.max_new,
            pad_token_id=PAD,
            eos_token_id=None,
            use_cache=True,
            stopping_criteria=StoppingCriteriaList([AtLengths(lengths)]),
        )
        if made.shape[1] != prompts.shape[1] + lengths.max():
            raise RuntimeError(f"generate made {made.shape[1] - prompts.shape[1]} tokens, expected {lengths.max()}")
        return made

    return generate


def table(found: dict[str, Any]) -> Table:
    """Medians with minimum and maximum."""
    out = Table(title=f"W8 {found['name']}, {found['what']}", title_justify="left")
    for heading in ("", "useful tokens/s", "of matmul peak", "occupancy", "padding", "steps", "programs"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def cell(v: dict[str, Any], digits: str) -> str:
        return f"{v['median']:{digits}}\n[dim]{v['min']:{digits}}-{v['max']:{digits}}[/dim]"

    ours = found["ours"]
    shares = [cell(ours[name], digits) for name, digits in (("occupancy", ".2f"), ("padding", ".2f"))]
    speed = [cell(ours["tokens_per_second"], ",.0f"), cell(ours["share_of_peak"], ".1%")]
    out.add_row("oarjax", *speed, *shares, cell(ours["decode_steps"], ",.0f"), str(found["compilations"]))
    if "torch" in found:
        theirs = found["torch"]
        out.add_row("generate", cell(theirs["tokens_per_second"], ",.0f"), cell(theirs["share_of_peak"], ".1%"))
        out.add_row("ratio", cell(found["speedup"], ".2f") + "x")
    return out
