"""The supervised warm start: imitate prompt and answer pairs before any reinforcement."""

from __future__ import annotations

import jax
import numpy as np

from oarjax.batches import Deck
from oarjax.cli.session import Session, lay_out, new_state
from oarjax.host.data import SFTStream
from oarjax.host.progress import Progress
from oarjax.steps import make_sft_optimizer, make_sft_step
from oarjax.types import Params, TrainBatch


def warm_start(session: Session, params: Params) -> Params:
    """Minimise the mean negative log-probability of the completions' tokens."""
    cfg, pairs = session.cfg.sft, session.pairs
    if cfg is None or pairs is None:
        raise ValueError("warm_start: the config has no sft section")
    tx, _ = make_sft_optimizer(cfg)
    layout = lay_out(session, tx)
    step = make_sft_step(session.policy, tx, layout, head_chunk=session.cfg.policy.head_chunk)
    state = new_state(params, tx, layout, seed=session.cfg.seed)
    stream = SFTStream(
        pairs,
        batch=cfg.batch,
        prompt_bucket=session.cfg.rollout.prompt_bucket,
        completion_bucket=session.cfg.rollout.completion_bucket,
        pad_id=session.pad_id,
        seed=session.cfg.seed,
    )
    deck = Deck(np.arange(cfg.batch), 1, cfg.microbatch, cfg.batch)
    every = max(cfg.steps // 20, 1)
    with Progress(cfg.steps, label="sft", console=session.console) as progress:
        for number in range(1, cfg.steps + 1):
            batch = next(stream)
            (hand,) = deck.deal(
                TrainBatch(  # numpy until it is placed
                    tokens=batch.tokens,  # pyright: ignore[reportArgumentType]
                    valid=batch.valid,  # pyright: ignore[reportArgumentType]
                    completion=batch.completion,  # pyright: ignore[reportArgumentType]
                    advantages=np.zeros(batch.completion.shape, np.float32),  # pyright: ignore[reportArgumentType]
                    old_logps=None,
                    ref_logps=None,
                    behaviour_logps=None,
                )
            )
            state, metrics = step(state, session.place(hand, "microbatches"), deck.used[0])
            if number % every == 0 or number == cfg.steps:
                shown = {name: float(mean.value) for name, mean in jax.device_get(metrics).items()}
                progress.update(number, shown)
    return state.params
