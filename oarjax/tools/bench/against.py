"""Run torch's side of ``oarjax bench --against torch``: plain PyTorch and transformers on the same folder and tokens.

It is written as one would without a library for reinforcement learning: ``generate`` with its KV cache, fused
attention, logits only where needed, autograd. OAR follows the published code: OAR-G one sequence at a time, OAR-P the
masked copies of one sequence as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from oarjax.config.schema import Config
from oarjax.system.devices import fastest_run
from oarjax.tools.bench.work import PAD, Tokens, WorkloadSizes


def product_flops(*, threads: int, device: str) -> float:
    """Return the FLOP/s of torch's fastest float32 matrix product within a second, of the size that ours are."""
    torch.set_num_threads(threads)
    x = torch.ones((1024, 1024), dtype=torch.float32, device=device)

    def product() -> None:
        (x @ x)[0, 0].item()  # waits

    product()
    return 2 * 1024**3 / fastest_run(product, seconds=1.0)


class TorchPolicy:
    """A policy in torch, with the parts of an iteration."""

    def __init__(self, folder: Path, cfg: Config, *, threads: int, device: str):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        disable_progress_bar()
        self.cfg, self.device = cfg, device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self.model = model.to(device).eval()
        o = cfg.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=o.lr, betas=(o.b1, o.b2), weight_decay=o.weight_decay
        )

    def generate(self, prompts: torch.Tensor, new: int, **options: Any) -> torch.Tensor:
        """Sample up to ``new`` tokens after every prompt, with a cache that grows."""
        return self.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            pad_token_id=PAD,
            eos_token_id=None,
            use_cache=True,
            **options,
        )

    def token_logps(self, ids: torch.Tensor, length: int) -> torch.Tensor:
        """Return log-probs of the last ``length`` tokens, [B, length]."""
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
        flat = F.cross_entropy(logits.flatten(0, 1), ids[:, -length:].flatten(), reduction="none")
        return -flat.view(len(ids), length)

    def token_losses(self, ids: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Compute clipped losses of the last T tokens, one per advantage, [B, T]; the ratio is 1."""
        c = self.cfg.loss
        logps = self.token_logps(ids, advantages.shape[1])
        ratio = torch.exp(logps - logps.detach())
        clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def descend(self) -> None:
        """Update the weights with the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.optim.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outcome(self, embeddings: torch.Tensor, at: slice) -> torch.Tensor:
        """Return log P of the mean of the logits that predict the answer, [B, V]."""
        places = torch.arange(at.start, at.stop, device=self.device)
        logits = self.model(inputs_embeds=embeddings, use_cache=False, logits_to_keep=places).logits
        return F.log_softmax(logits.mean(1), -1)

    def importance(self, ids: torch.Tensor, reasoning: slice, answer: slice) -> torch.Tensor:
        """Compute |<dJ/de at the noisy point, e>| of one sequence's reasoning, with a clean and a noisy pass."""
        with torch.no_grad():
            clean = self.model.get_input_embeddings()(ids[None])
            target = self.outcome(clean, answer)
            noise = torch.zeros_like(clean)
            noise[:, reasoning].normal_(std=self.cfg.credit.sigma)
        noisy = (clean + noise).requires_grad_()
        divergence = (target.exp() * (target - self.outcome(noisy, answer))).sum()
        (gradient,) = torch.autograd.grad(divergence, noisy)
        return (gradient * clean).sum(-1).abs()[0, reasoning]

    def gate(self, scores: torch.Tensor) -> torch.Tensor:
        """Compute weights of reasoning tokens from their importance, [B, R], mean 1."""
        g, h = self.cfg.credit.gate, torch.log1p(scores)
        low, high = h.amin(1, keepdim=True), h.amax(1, keepdim=True)
        h = (h - low) / (high - low).clamp(min=1e-12)  # equal scores: weights of 1
        c = torch.quantile(h, g.tau, dim=1, keepdim=True)
        w = torch.where(h < c, (h / (c + 1e-8)).clamp(min=g.floor), 1 + g.boost * (h - c) / (1 - c + 1e-8))
        return w * w.shape[1] / w.sum(1, keepdim=True)

    def waited(self, work: Callable[..., Any]) -> Callable[..., None]:
        """Return the work followed by a wait for the device."""

        def run(*args: Any) -> None:
            work(*args)
            if self.device == "cuda":
                torch.cuda.synchronize()

        return run


class Torch(TorchPolicy):
    """The work of every row of the table with torch, by the row's name."""

    def __init__(self, folder: Path, shapes: WorkloadSizes, tokens: Tokens, cfg: Config, *, threads: int, device: str):
        super().__init__(folder, cfg, threads=threads, device=device)
        self.shapes = shapes
        prompts, rows, credit, groups = (
            torch.as_tensor(x, dtype=torch.long, device=device)
            for x in (tokens.prompts, tokens.rows, tokens.credit, tokens.groups)
        )
        groups = groups.repeat_interleave(shapes.group_size, 0)
        length, size = shapes.new_tokens, shapes.group_size
        advantages = torch.randn(len(rows), length, device=device)
        rewards = (torch.arange(len(groups), device=device) % size < (size + 1) // 2).float().view(-1, size)
        group_advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1)
        self.works: dict[str, Callable[[], Any]] = {
            name: self.waited(work)
            for name, work in {
                "rollout": lambda: self.rollout(prompts),
                "update": lambda: self.update(rows, advantages),
                "log-probs": lambda: self.log_probs(rows),
                "OAR-G linearised": lambda: self.gradient_importance(credit),
                "OAR-G noisy": lambda: self.gradient_importance(credit),
                "OAR-P": lambda: [self.masked_importance(ids) for ids in credit],
                "iteration": lambda: self.iteration(groups, group_advantages),
            }.items()
        }

    def rollout(self, prompts: torch.Tensor) -> torch.Tensor:
        new_tokens = self.shapes.new_tokens
        return self.generate(prompts, new_tokens, min_new_tokens=new_tokens)

    @torch.no_grad()
    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        return self.token_logps(ids, self.shapes.new_tokens)

    def update(self, ids: torch.Tensor, advantages: torch.Tensor) -> None:
        self.token_losses(ids, advantages).mean().backward()
        self.descend()

    def gradient_importance(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.importance(ids, *self.places()) for ids in rows])

    @torch.no_grad()
    def masked_importance(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute KL of the clean outcome to that of each copy with one reasoning token masked."""
        reasoning, answer = self.places()
        count = self.shapes.reasoning
        copies = ids.repeat(count, 1)
        copies[torch.arange(count), torch.arange(reasoning.start, reasoning.stop)] = PAD
        embed = self.model.get_input_embeddings()
        target = self.outcome(embed(ids[None]), answer)
        return (target.exp() * (target - self.outcome(embed(copies), answer))).sum(-1)

    def iteration(self, prompts: torch.Tensor, advantages: torch.Tensor) -> None:
        ids = self.rollout(prompts)
        scores = self.gradient_importance(ids)
        weights = torch.ones(len(ids), self.shapes.new_tokens, device=self.device)
        weights[:, : self.shapes.reasoning] = self.gate(scores)
        self.update(ids, weights * advantages[:, None])

    def places(self) -> tuple[slice, slice]:
        """Return the reasoning positions, and those that predict the answer."""
        s = self.shapes
        answer = s.prompt_tokens + s.reasoning + s.cue - 1
        return slice(s.prompt_tokens, s.prompt_tokens + s.reasoning), slice(answer, answer + s.answer)
