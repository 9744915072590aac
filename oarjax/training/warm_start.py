"""Run the supervised warm start: imitate prompt and answer pairs before reinforcement."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from oarjax.data.streams import SFTBatch, SFTStream
from oarjax.models.lora import all_params
from oarjax.report.console import OnceWarnings, Progress
from oarjax.run.adapters import plain_params
from oarjax.run.layout import training_layout
from oarjax.run.run import Run
from oarjax.step.minibatches import MinibatchPlan, row_sizes
from oarjax.step.programs import make_sft_optimizer, make_sft_steps
from oarjax.step.state import new_state
from oarjax.storage.checkpoint import Checkpoints
from oarjax.storage.durable import Failures
from oarjax.storage.folder import refuse_another_config
from oarjax.storage.stop import Stop
from oarjax.training.health import Health
from oarjax.types import Params, TrainBatch


def warm_start(run: Run, params: Params, stop: Stop, *, on_step: Callable[[], object] | None = None) -> Params:
    """Minimise the mean negative log-probability of the completions' tokens; plain params in, plain params out.

    With ``lora.rank`` it trains separate adapters and merges them at the end: the iterations start from plain weights
    in the same dtype, with fresh adapters. The memory of ``params`` is reused.

    Its checkpoints are in the folder ``sft``; a stopped warm start resumes, and ends as if it had not been stopped.

    Args:
        on_step: called after every step.

    Raises:
        ConfigError: the folder holds a warm start of another config.
        Stopped: ``stop`` was signalled; all finished work is saved.
        StorageError: a checkpoint cannot be written, and checkpoint.on_failure is stop.
        UnhealthyRun: health.stop_after steps in a row were skipped.
    """
    cfg, pairs, saving = run.cfg.sft, run.pairs, run.cfg.checkpoint
    if cfg is None or pairs is None:
        raise ValueError("warm_start: the config has no sft section")
    optimizer, _ = make_sft_optimizer(cfg, function=run.custom.warm_optimizer)
    layout = training_layout(run.cfg.lora, run.model, run.mesh, optimizer)
    steps = make_sft_steps(run.policy, optimizer, layout, head_chunk=run.cfg.policy.head_chunk)
    state = new_state(params, optimizer, layout, seed=run.cfg.seed, lora=run.cfg.lora, copy=False)
    bucket = cfg.completion_bucket or run.cfg.rollout.completion_bucket
    stream = SFTStream(
        pairs,
        batch=cfg.batch,
        prompt_bucket=run.cfg.rollout.prompt_bucket,
        completion_bucket=bucket,
        pad_id=run.pad_id,
        seed=run.cfg.seed,
    )
    shown_every, first = max(cfg.steps // 20, 1), 0
    warnings = OnceWarnings(run.console)
    health = Health(run, run.folder, warnings)
    failures = Failures(saving.on_failure, warnings.say)
    with stop.held(), ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(run.folder / "sft", keep=saving.keep))
        if (newest := checkpoints.trusted(lambda text: warnings.say(text, text))) is not None:
            what = f"{checkpoints.folder}, checkpoint {newest:06d}"
            saved = checkpoints.finished()[newest]["record"]["config"]
            refuse_another_config(saved, run.cfg, what=what, extend=True)
            state, record = checkpoints.restore(newest, like=state)
            stream.restore(record["data"])
            first = newest
            run.console.print(f"the warm start resumes after step {first}", markup=False)
        progress = stack.enter_context(
            Progress(cfg.steps, label="sft", console=run.console, compiles=first < cfg.steps, stop=stop)
        )
        tokens, since = 0, time.perf_counter()
        for number in range(first + 1, cfg.steps + 1):
            batch = next(stream)
            tokens += int(batch.completion.sum())
            plan = by_length(batch, cfg.microbatch, bucket)
            (rows,) = plan.split(train_batch(batch))
            state, metrics = steps.update(state, run.place(rows, "microbatches"), plan.pieces[0], None)
            if failure := health.imitated(number, rows, plan.used[0], metrics, state):
                raise failure
            if on_step is not None:
                on_step()
            if number % shown_every == 0 or number == cfg.steps:
                names = ("loss", "entropy", "grad_norm")
                values = {name: float(jax.device_get(metrics[name]).value) for name in names if name in metrics}
                spent = time.perf_counter() - since
                progress.update(number, values | {"tok/s": tokens / spent})
                tokens, since = 0, time.perf_counter()
            stopping = stop.asked()
            if saving.warm_start and (stopping or (number % saving.warm_start == 0 and number < cfg.steps)):
                with failures.handled():
                    record = {"version": version("oarjax"), "config": run.cfg.model_dump(mode="json")}
                    checkpoints.save(number, state, {**record, "data": stream.state()})
            if stopping:
                with failures.handled():
                    checkpoints.settle()
                stop.obey()
        with failures.handled():  # wait for the last checkpoint, though it is no longer needed
            checkpoints.settle()
    return plain_params(run.cfg.lora, all_params(state), layout.params)


def by_length(batch: SFTBatch, microbatch: int, bucket: int) -> MinibatchPlan:
    """Divide pairs into microbatches of similar completions; prompts stay as wide as they are, for few programs."""
    rows, length = batch.completion.shape
    width = batch.tokens.shape[1] - length
    sizes = row_sizes(batch.valid, length=length, prompt_bucket=width, completion_bucket=bucket)
    return MinibatchPlan(np.arange(rows), 1, microbatch, rows, sizes)


def train_batch(batch: SFTBatch) -> TrainBatch:
    """Return pairs as the rows of an update; numpy until it is placed."""
    arrays: Any = batch
    zeros: Any = np.zeros(batch.completion.shape, np.float32)
    return TrainBatch(arrays.tokens, arrays.valid, arrays.completion, zeros, None, None, None)
