"""A whole run as one frozen config: the sections, and the rules that hold between them.

A run is a YAML file plus ``key.sub=value`` overrides. Equations (``rl``, ``credit``, ``rollout``) see no config: they
take arrays and keyword scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from oarjax.config import rules, rules_outside
from oarjax.config.inputs import DataConfig, DistributedConfig, MeshConfig, PolicyConfig
from oarjax.config.learning import (
    AdvantageConfig,
    GradingConfig,
    LoraConfig,
    LossConfig,
    OptimConfig,
    RolloutConfig,
    SFTConfig,
    UpdateConfig,
)
from oarjax.config.outputs import (
    CheckpointConfig,
    EvalConfig,
    ExportConfig,
    HealthConfig,
    LabConfig,
    PlanConfig,
    ReportConfig,
)
from oarjax.config.section import Count, Section, Seed
from oarjax.credit.settings import CreditSettings

MAX_DRIFT = 0.2
"""Default of loss.off_policy.max_drift with update.lag, in nats per token."""


class Config(Section):
    """A whole run; each section is a class in ``oarjax/config`` that documents its fields."""

    run_dir: str = Field(description="folder for everything that the run writes")
    seed: Seed = Field(default=0, description="seed of all randomness: data order, sampling, noise of credit")
    iterations: Count = Field(default=100, description="number of iterations, each of prompts, rollouts and updates")
    device: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        default="auto", description="devices to run on; missing ones are an error"
    )
    compilation_cache: str | None = Field(
        default="~/.cache/oarjax/xla", description="folder of compiled programs; null = off"
    )
    compile_ahead: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="compile every program that the run may use in the background of its warm start and first "
        "iterations, with all prompts padded to one width; auto: on accelerators",
    )
    profile: tuple[Count, Count] | None = Field(
        default=None, description="first and last iteration to trace with JAX's profiler; null = none"
    )
    policy: PolicyConfig
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    data: DataConfig
    sft: SFTConfig | None = Field(default=None, description="supervised warm start before the iterations; null = none")
    rollout: RolloutConfig = RolloutConfig()
    grading: GradingConfig = GradingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    credit: CreditSettings = CreditSettings()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    report: ReportConfig = ReportConfig()
    export: ExportConfig = ExportConfig()
    lab: LabConfig = LabConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="before")
    @classmethod
    def _corrected(cls, tree: Any) -> Any:
        """Correct for a sampler from outside, a rounded cache or an older policy, unless the config says otherwise."""
        rollout, update = ((tree.get(name) if isinstance(tree, Mapping) else None) for name in ("rollout", "update"))
        fields = rollout if isinstance(rollout, Mapping) else {}
        differs = bool(fields.get("engine") or fields.get("from") or fields.get("cache") == "int8")
        lags = isinstance(update, Mapping) and update.get("lag") not in (None, 0)
        if not (differs or lags):
            return tree
        loss = tree.get("loss") or {}
        off = loss.get("off_policy") or {} if isinstance(loss, Mapping) else None
        if not isinstance(off, Mapping) or "weighting" in off:
            return tree
        default = {"weighting": "token_truncate"} | ({"max_drift": MAX_DRIFT} if lags else {})
        return {**tree, "loss": {**loss, "off_policy": {**default, **off}}}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """Refuse fields that contradict each other; the error names all of them."""
        problems = [
            *rules.check_paths(self.model_dump(mode="json")),
            *rules.check_policy(self.policy),
            *rules.check_devices(self.mesh, self.distributed),
            *rules.check_prompts(self.data),
            *rules.check_batches(self.rollout, self.update, self.sft),
            *rules.check_episodes(self.rollout, self.eval),
            *rules.check_environment(self.rollout, self.data, self.grading, self.credit, self.advantage),
            *rules.check_advantages(
                self.advantage, self.rollout.group_size, self.update, pools=self.data.difficulty is not None
            ),
            *rules.check_loss(self.loss, self.advantage, self.update),
            *rules.check_entropy(self.loss),
            *rules_outside.check_off_policy(self.loss, self.rollout),
            *rules_outside.check_outside(self.rollout, self.loss.off_policy, self.update, self.policy, self.iterations),
            *rules_outside.check_lag(self.update, self.rollout, self.data, self.checkpoint),
            *rules.check_reference(self.loss, self.lora, self.credit, self.eval, self.rollout),
            *rules.check_drift(self.eval, self.data),
            *rules.check_moments("optim", self.optim),
            *rules.check_optimizer("optim", self.optim),
            *(rules.check_moments("sft.optim", self.sft.optim) if self.sft else ()),
            *(rules.check_optimizer("sft.optim", self.sft.optim) if self.sft else ()),
            *rules.check_credit(self.credit),
            *rules.check_values(self.credit, self.update),
            *rules.check_soft(self.advantage, self.loss, self.update, self.credit),
            *rules.check_grading(self.grading, self.rollout.max_new),
            *rules.check_difficulty(self.data.difficulty, self.rollout),
            *rules.check_mixture(self.data, self.grading, self.advantage, self.sft),
            *rules.check_profile(self.profile, self.iterations),
            *rules.check_export(self.export),
            *rules.check_best(self.checkpoint, self.eval),
            *rules.check_lab(self.lab, self.credit),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self
