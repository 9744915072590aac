"""The commands as functions, for notebooks and scripts: the same runs and files, and nothing printed but warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from oarjax.cli.credit import measure_credit
from oarjax.cli.layout import lay_out
from oarjax.cli.session import open_session
from oarjax.cli.train import train_once
from oarjax.config import Config
from oarjax.host.lab_results import LabResult
from oarjax.host.problems import Problem
from oarjax.host.report import read_metrics, token_texts
from oarjax.host.stop import Stop, Stopped
from oarjax.policy import Policy
from oarjax.steps import make_optimizer
from oarjax.types import AnswerSpan, Params, PromptBatch, Rollout


def train(cfg: Config, *, watch: Callable[[list[dict[str, Any]]], object] | None = None) -> Path:
    """What ``oarjax train`` does, and the run's folder. A run that was stopped goes on; one that has ended is kept.

    Args:
        watch: called with the metrics so far, one record per iteration, whenever there are new ones.

    Raises:
        KeyboardInterrupt: the cell was interrupted; what has been done is saved, and the same call goes on.
        ConfigError: see ``oarjax.cli.train``; and what the parts of a run raise.
    """
    folder = Path(cfg.run_dir).expanduser()

    def seen() -> None:
        if watch is not None:
            watch(read_metrics(folder / "metrics.jsonl"))

    try:
        with Stop() as stop:
            train_once(cfg, _WarningsOnly(), stop, seen)
    except Stopped:
        raise KeyboardInterrupt(f"{folder} is saved; run this again to go on with it") from None
    seen()  # of a run that had ended before there was nothing new
    return folder


def credit_lab(cfg: Config) -> LabResult:
    """What ``oarjax credit`` does: methods of token credit on a policy's own completions. Its files are written too."""
    return measure_credit(cfg, _WarningsOnly())


class Parts(NamedTuple):
    """What a training loop of one's own starts from. Its functions take rollouts on the device, or numpy."""

    policy: Policy
    params: Params  # float32
    prompts: Iterator[tuple[PromptBatch, list[Problem]]]  # without end: rollout.prompts of data.train at a time
    stop_ids: tuple[int, ...]
    pad_id: int
    texts: Callable[[Rollout], list[str]]  # of every completion
    tokens: Callable[[Rollout], list[list[str]]]  # the same, token by token
    find_answers: Callable[[Rollout], AnswerSpan]  # as credit.answer says


def open_parts(cfg: Config) -> Parts:
    """The policy, data and tokenizer of a config, for a loop of one's own."""
    session = open_session(cfg, _WarningsOnly())
    tx, _ = make_optimizer(cfg)
    stream = session.prompts()

    def tokens(rollout: Rollout) -> list[list[str]]:
        made = np.asarray(rollout.completion)
        ids = np.asarray(rollout.tokens)[:, -made.shape[1] :]
        return [token_texts([session.table[i] for i in row[mask]]) for row, mask in zip(ids, made)]

    return Parts(
        policy=session.policy,
        params=session.load(lay_out(session, tx)),
        prompts=((jax.tree.map(jnp.asarray, prompts), problems) for prompts, problems in stream),
        stop_ids=session.stop_ids,
        pad_id=session.pad_id,
        texts=session.completions,
        tokens=tokens,
        find_answers=session.find_answers,
    )


class _WarningsOnly(Console):
    """Prints warnings, on plain lines; what else a command says is seen better in the run's files."""

    def __init__(self) -> None:
        super().__init__(force_jupyter=False, force_terminal=False, highlight=False, width=110)

    def print(self, *objects: Any, **options: Any) -> None:
        if objects and str(objects[0]).startswith("warning: "):
            super().print(*objects, **options)
