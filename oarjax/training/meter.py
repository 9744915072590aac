"""Measure the speed of iterations: seconds by phase, tokens per second, FLOPs, and their share of the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oarjax.config.schema import Config
from oarjax.costs import RowTokens, Work, iteration_flops
from oarjax.credit.resolved import ResolvedMethod
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of
from oarjax.run.adapters import trained_count
from oarjax.step.fused import fuses


@dataclass(frozen=True)
class Meter:
    """Measure every iteration of a run against the peak of its devices."""

    cfg: Config
    model: QwenConfig
    credit: ResolvedMethod
    peak: float  # FLOP/s of all devices
    prompt_rows: int = 1  # rows that share the pass over their prompt

    def measure(self, metrics: Mapping[str, float], phases: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of speed, from an iteration's other metrics and the seconds of its phases."""
        training, flops = phases["total"] - phases.get("evaluate", 0.0), self.flops(metrics)
        return {f"seconds/{name}": value for name, value in phases.items()} | {
            "seconds/training": training,
            "tokens_per_second": metrics["completion_tokens"] / training,
            "flops": flops,
            "mfu": flops / (training * self.peak),
        }

    def flops(self, metrics: Mapping[str, float]) -> float:
        """Count the FLOPs of an iteration from its metrics; see ``oarjax.costs``."""
        lora, update, loss = self.cfg.lora, self.cfg.update, self.cfg.loss
        rows = metrics["groups_drawn"] * self.cfg.rollout.group_size
        work = Work(
            row=RowTokens(
                metrics["prompt_tokens"] / rows,
                metrics["completion_tokens"] / rows,
                metrics["reasoning_length"],
                self.prompt_rows,
                metrics.get("reasoning_units"),
            ),
            prompts=metrics["groups_drawn"],
            rows=rows,
            used=metrics["rows_used"],
            epochs=update.epochs,
            old_logps=update.epochs * update.minibatches > 1,
            measured=bool(self.credit.measures),
            reference=self.credit.needs_reference(kl=loss.scores_reference),
            outcome=self.cfg.advantage.soft != "off",
            **self.credit.teacher_work(),
            adapters=trained_count(lora, self.model) if lora.rank else None,
            fused=fuses(update, self.credit, kl_beta=loss.kl_beta, experts=self.model.experts is not None),
        )
        return sum(iteration_flops(decoder_of(self.model), work, self.credit).values())
