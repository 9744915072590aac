"""Run torch's side of W8, W9 and W10: completions that differ in length, with plain PyTorch and transformers.

Updates and log-probs run in microbatches of as many rows as ours, in one of two ways: unsorted rows padded to the
longest of all, or rows sorted by length, each microbatch padded to its own longest. Padding is on the right, where
causal attention never looks, so that no mask slows attention down. OAR-G runs one sequence at a time, as published.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from transformers import StoppingCriteria, StoppingCriteriaList

from oarjax.config.schema import Config
from oarjax.tools.bench.against import TorchPolicy
from oarjax.tools.bench.work import PAD


class AtLengths(StoppingCriteria):
    """End every row at its own length."""

    eos_token_id = PAD  # tells generate that rows end one by one

    def __init__(self, ends: torch.Tensor):
        self.ends = ends

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self.ends


class RaggedTorch(TorchPolicy):
    """The work of W8, W9 and W10 on rows with prompts of equal length."""

    def __init__(self, folder: Path, cfg: Config, *, threads: int, device: str):
        super().__init__(folder, cfg, threads=threads, device=device)
        self.rows = cfg.update.microbatch

    def complete(self, ids: Int[np.ndarray, "B S"], lengths: Int[np.ndarray, "B"]) -> torch.Tensor:
        """Sample completions of these lengths, [B, S + longest]."""
        prompts = self.placed(ids)
        ends = self.placed(lengths) + prompts.shape[1]
        longest = int(lengths.max())
        rows = self.generate(prompts, longest, stopping_criteria=StoppingCriteriaList([AtLengths(ends)]))
        if rows.shape[1] != prompts.shape[1] + longest:
            raise RuntimeError(f"generate returned {rows.shape[1] - prompts.shape[1]} tokens, expected {longest}")
        return rows

    def update(
        self, ids: torch.Tensor, lengths: Int[np.ndarray, "B"], advantages: torch.Tensor, *, by_length: bool
    ) -> None:
        """Update the weights with the mean loss of all tokens of the completions."""
        for rows, longest in self.microbatches(lengths, by_length=by_length):
            losses = self.token_losses(self.cut(ids[rows], lengths, longest), advantages[rows, :longest])
            real = torch.arange(longest, device=self.device) < self.placed(lengths)[rows, None]
            (torch.where(real, losses, 0).sum() / int(lengths.sum())).backward()
        self.descend()

    @torch.no_grad()
    def log_probs(self, ids: torch.Tensor, lengths: Int[np.ndarray, "B"], *, by_length: bool) -> list[torch.Tensor]:
        """Return the log-probs of every microbatch's completions."""
        microbatches = self.microbatches(lengths, by_length=by_length)
        return [self.token_logps(self.cut(ids[rows], lengths, longest), longest) for rows, longest in microbatches]

    def weights(self, ids: torch.Tensor, lengths: Int[np.ndarray, "B"], *, answer: int) -> torch.Tensor:
        """Compute OAR-G's weights [B, T]; a completion's last ``answer`` tokens are its answer; 1 without reasoning."""
        longest = int(lengths.max())
        prompt = ids.shape[1] - longest
        out = torch.ones(len(ids), longest, device=self.device)
        for row, length in enumerate(lengths.tolist()):
            if length > answer:
                end = prompt + length
                answer_slice = slice(end - answer - 1, end - 1)
                scores = self.importance(ids[row, :end], slice(prompt, end - answer), answer_slice)
                out[row, : length - answer] = self.gate(scores[None])[0]
        return out

    def microbatches(
        self, lengths: Int[np.ndarray, "B"], *, by_length: bool
    ) -> Iterator[tuple[Int[np.ndarray, "b"], int]]:
        """Yield the rows of every microbatch and the completion length that they are padded to."""
        order = np.argsort(lengths, kind="stable") if by_length else np.arange(len(lengths))
        for start in range(0, len(order), self.rows):
            rows = order[start : start + self.rows]
            yield rows, int(lengths[rows].max() if by_length else lengths.max())

    def cut(self, ids: torch.Tensor, lengths: Int[np.ndarray, "B"], longest: int) -> torch.Tensor:
        """Cut rows that are padded to the longest of all to ``longest`` tokens of completion."""
        return ids[:, : ids.shape[1] - int(lengths.max()) + longest]

    def padding(self, lengths: Int[np.ndarray, "B"], prompt: int, *, by_length: bool) -> float:
        """Return the share of the computed positions that hold no token."""
        microbatches = self.microbatches(lengths, by_length=by_length)
        computed = sum(len(rows) * (prompt + longest) for rows, longest in microbatches)
        return 1 - (int(lengths.sum()) + len(lengths) * prompt) / computed

    def placed(self, x: np.ndarray) -> torch.Tensor:
        """Move an array to torch's device."""
        dtype = torch.long if np.issubdtype(x.dtype, np.integer) else torch.float32
        return torch.as_tensor(x, dtype=dtype, device=self.device)
