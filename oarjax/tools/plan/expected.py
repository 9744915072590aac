"""A step under a distribution of completion lengths, beside the worst case that a plan compiles. Arithmetic alone.

Decoding: rows that are done are dropped as soon as the next smaller bucket holds the rest, and the cache grows by its
bucket; the rows that end are taken to be spread evenly over the devices. Score and update: microbatches of rows sorted
by length, each padded to its own bucket. Times scale the plan's own: matrix products with the positions computed, bytes
of HBM with the slots read, all-reduces of decoding with its rows; what score and update send between chips stays, since
the microbatches are as many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oarjax.config.outputs import LengthsConfig
from oarjax.config.schema import Config
from oarjax.errors import ConfigError
from oarjax.kernels.decode_attention import padded_slots
from oarjax.models.qwen_config import QwenConfig
from oarjax.step.minibatches import completion_buckets, padded
from oarjax.storage.durable import read_lines
from oarjax.tools.plan.lengths import (
    DecodingWork,
    empirical_survival,
    expected_decoding,
    lognormal_survival,
    mean_length,
    padding_share,
    sorted_lengths,
    unit_survival,
)
from oarjax.tools.plan.programs import mean_slots, planned_prompt_rows, rollout_plan, shapes_of, times_of
from oarjax.tools.plan.sums import model_flops, read_bytes


def survival_of(lengths: LengthsConfig | None, *, limit: int) -> np.ndarray | None:
    """Return P(length > t) of the config's ``plan.lengths``; None where it names none.

    Raises:
        ConfigError: the file of measured lengths holds none.
    """
    if lengths is None:
        return None
    if lengths.completions is None:
        return lognormal_survival(mean=float(lengths.mean or 0), sigma=lengths.sigma, limit=limit)
    path = Path(lengths.completions).expanduser()
    token_counts = [len(line["tokens"]) for line in read_lines(path) if line.get("tokens")]
    if not token_counts:
        raise ConfigError(
            f"plan.lengths.completions: {path} holds no completions; give the completions.jsonl of a run, or mean and "
            "sigma"
        )
    return empirical_survival(token_counts, limit=limit)


def expected_step(
    cfg: Config, model: QwenConfig, plan: Mapping[str, Any], survival: np.ndarray, *, tensor: int
) -> dict[str, Any]:
    """Compute decode steps, occupancy, padding and seconds per phase under these lengths, for a complete plan.

    ``tensor`` devices share one copy of the policy while sampling. Seconds are the plan's own kind: nothing overlapped.
    """
    s, chips = shapes_of(cfg), plan["chips"]
    rows = rollout_plan(s, cfg.rollout, blocks=chips // tensor)
    sizes = sorted(b.rows for b in rows.buckets)
    decoding = expected_decoding(
        survival,
        rows=s.rows,
        segment=1,  # rows are dropped as soon as that fits the next bucket
        row_bucket=lambda n: rows.blocks * next(size for size in sizes if size * rows.blocks >= min(n, s.rows)),
        slots_at=lambda step: rows.size_of(min(step + 1, rows.cache_sizes()[-1])),
    )
    if cfg.rollout.attention == "kernel":  # each row as far as it is written, while it draws
        slot_reads = s.rows * sum(alive * padded_slots(step) for step, alive in enumerate(survival))
        decoding = decoding._replace(slot_reads=slot_reads)
    rows_of_minibatch, shared = s.rows // cfg.update.minibatches, planned_prompt_rows(cfg.update)
    group = cfg.rollout.group_size // cfg.update.minibatches
    units = survival if shared == 1 else unit_survival(survival, group=group, rows=shared)
    longest = sorted_lengths(units, rows=rows_of_minibatch // shared, microbatch=s.microbatch // shared)
    padded_lengths = padded(longest, completion_buckets(cfg.rollout.completion_bucket, s.completion)).tolist()
    worst = float(s.completion)
    times = times_of(cfg.update)
    seconds: dict[str, float] = {}
    scale = _sampling_scales(
        decoding,
        cfg,
        partial(read_bytes, model, rollout=cfg.rollout, chips=chips, tensor=tensor, expert=plan["mesh"]["expert"]),
        mean=mean_slots(rows, cfg.rollout.attention),
    )
    for phase in plan["phases"]:
        name = phase["name"]
        if phase["method"] is None:
            shares = (_flops_share(name, model, cfg, padded_lengths), 1.0, 1.0)
            seconds[name] = times[name] * _seconds(phase, *(scale if name == "sample" else shares))
    return {
        "mean": mean_length(survival),
        "decode_steps": decoding.steps,
        "occupancy": decoding.occupancy,
        "rows_in_use": decoding.row_steps / decoding.steps,
        "padding_share": padding_share(
            survival, padded_lengths, rows=rows_of_minibatch, microbatch=s.microbatch, prompt=s.prompt / shared
        ),
        "padding_share_unsorted": 1 - (s.prompt + mean_length(survival)) / (s.prompt + worst),
        "seconds": seconds,
    }


def _seconds(phase: Mapping[str, Any], products: float, memory: float, links: float) -> float:
    """Return the seconds of a phase with each part scaled, nothing overlapped."""
    parts = phase["seconds"]
    return max(products * parts["products"], memory * parts["memory"]) + links * parts["links"]


def _flops_share(name: str, model: QwenConfig, cfg: Config, lengths: list[int]) -> float:
    """Return the model FLOPs of microbatches padded to these completion lengths, over those of all at max_new."""

    def flops(length: int) -> float:
        shorter = cfg.rollout.model_copy(update={"max_new": length})
        return model_flops(name, model, cfg.model_copy(update={"rollout": shorter}))

    full_flops = flops(cfg.rollout.max_new)
    if not full_flops:
        return 1.0
    by_length = {length: flops(length) for length in set(lengths)}
    return sum(by_length[length] for length in lengths) / (len(lengths) * full_flops)


def _sampling_scales(
    decoding: DecodingWork, cfg: Config, read_of: Callable[..., float], *, mean: float
) -> tuple[float, float, float]:
    """Return (products, HBM bytes, link bytes) of decoding over those of the worst case, which reads ``mean`` slots."""
    s = shapes_of(cfg)
    share = decoding.row_steps / (s.rows * s.completion)
    worst, weights = read_of(s, slots=mean), read_of(s._replace(rows=0, prompts=0))
    prompts = read_of(s._replace(rows=0)) - weights
    slots = worst - weights - prompts
    bytes_read = weights * decoding.steps / s.completion + prompts * share
    bytes_read += slots * decoding.slot_reads / (s.rows * s.completion * mean)
    return share, bytes_read / worst, share
