"""Declare how a policy learns: rollouts, rewards, advantages, the loss and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oarjax.config.inputs import DatasetConfig
from oarjax.config.section import Count, Positive, Rate, Section, Share, Word


class RolloutConfig(Section):
    prompts: Positive = Field(default=32, description="prompts per iteration, over all hosts")
    group_size: Positive = Field(
        default=8,
        description="completions per prompt; 1 needs advantage.method=batch or problem, or advantage.function",
    )
    max_new: Positive = Field(default=1024, description="tokens of a completion at most")
    temperature: Annotated[float, Field(gt=0)] = Field(default=1.0, description="of sampling; the loss uses it too")
    top_k: Count = Field(default=0, description="0 = off")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="draw among the likeliest tokens of this mass; 1 = all"
    )
    min_p: Share = Field(default=0.0, description="least probability, as a share of the likeliest token's; 0 = off")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="logits of tokens of prompt and completion are divided by it, negative ones multiplied"
    )
    stop: tuple[Word, ...] = Field(
        default=(), description="strings that end a completion, of evaluations too; its text is cut before them"
    )
    tensor: Positive | None = Field(
        default=None, description="devices that share one copy of the policy while sampling; null = mesh.tensor"
    )
    prompt_bucket: Positive = Field(default=64, description="prompt lengths are padded up to a multiple of this")
    completion_bucket: Positive = Field(
        default=256, description="microbatches are padded to this times 1, 2, 3, 4, 6, 8, 12 ... tokens"
    )
    segment: Positive = Field(
        default=128,
        description="maximum decode steps before waiting rows may take the slots of finished rows",
    )
    cache_bucket: Positive | None = Field(
        default=None,
        description="slots of the KV cache that decoding reads at first; they double until completions fit; null = an "
        "eighth of max_new, at least 128",
    )
    slots: Positive | None = Field(
        default=None,
        description="completions decoded at once, over all devices; null = the whole batch. Fewer need less memory and "
        "more steps",
    )


class RewardConfig(Section):
    name: str = Field(description="a built-in reward, or a reward that grading.plugins register")
    weight: float = Field(default=1.0, description="the reward of a completion is the weighted sum")
    settings: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")


class GradingConfig(Section):
    rewards: tuple[RewardConfig, ...] = Field(
        default=(RewardConfig(name="math"),),
        description="by name; their weighted sum is the reward, the first one decides pass@1",
    )
    plugins: tuple[str, ...] = Field(default=(), description="Python files or modules that register rewards")
    workers: Annotated[int, Field(gt=0, le=1024)] | Literal["auto"] = Field(
        default="auto", description="processes on each host; auto: half as many as it has cores, 2 to 32"
    )
    deadline: Annotated[float, Field(gt=0)] = Field(default=5.0, description="seconds per answer")
    memory_mb: Positive = Field(default=2048, description="resident memory above which a worker is killed")
    call_deadline: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="seconds per call of a batch or group reward, and per sample of an async one"
    )
    concurrency: Positive = Field(default=16, description="samples of an async reward in flight")
    overlong_window: Count = Field(
        default=0, description="last tokens before max_new over which the penalty grows; 0 = off"
    )
    overlong_penalty: Rate = Field(default=1.0, description="subtracted from the reward of a completion cut at max_new")


class AdvantageConfig(Section):
    method: Literal["grpo", "rloo", "batch", "problem", "gdpo"] = Field(
        default="grpo",
        description="rloo: against the mean of the group's other rewards; batch: of all rewards; problem: of the "
        "problem's rewards in earlier iterations, of all until it has some; gdpo: each reward normalised on its own",
    )
    leave_one_out: bool = Field(
        default=False, description="of batch and problem: where all rewards are averaged, the row's own is left out"
    )
    discount: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="of method problem: each time a problem comes again, its earlier rewards weigh this much less",
    )
    soft: Literal["off", "reward", "split"] = Field(
        default="off",
        description="reward: in place of the grade, the probability p of the reference answer given the reasoning; "
        "split: that for the reasoning's tokens, grade - p for the answer's",
    )
    function: str | None = Field(
        default=None,
        description="custom advantages, file.py:name or module:name, see oarjax.rl.advantages.AdvantageFunction; the "
        "other fields of this section then do not apply",
    )
    scale: Literal["group", "batch", "problem", "none"] = Field(
        default="group",
        description="divide by the standard deviation of the group (GRPO), of the batch, of the problem's earlier "
        "rewards (for method problem), or by nothing (Dr. GRPO)",
    )
    ddof: Literal[0, 1] = Field(default=1, description="1: sample standard deviation; 0: population's")
    eps: Rate = Field(default=1e-4, description="added to the standard deviation")


OFF_POLICY_PRESETS = {
    "tis": {"weighting": "token_truncate", "low": 0.0, "high": 2.0},
    "icepop": {"weighting": "token_mask", "low": 0.5, "high": 5.0},
}
"""Truncated importance sampling with the cap of its report, and IcePop with the bounds of its paper."""


class OffPolicyConfig(Section):
    """Corrections for tokens that another policy drew; in YAML also the name of a preset, ``off_policy: icepop``."""

    weighting: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="none", description="of tokens or rows, by old / behaviour; see oarjax.rl.off_policy.importance_weights"
    )
    low: Rate = Field(default=0.0, description="lowest importance weight")
    high: Annotated[float, Field(gt=0)] = Field(default=2.0, description="highest importance weight")
    support: Literal["whole", "sampled"] = Field(
        default="whole",
        description="sampled: log-probs of the loss and of behaviour are renormalised over what rollout.top_k, top_p "
        "and min_p keep, each policy's by its own logits; the drawn token is always kept",
    )
    max_drift: Rate | None = Field(
        default=None,
        description="nats per token of log(behaviour / policy) above which a row of negative advantage is left out",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in OFF_POLICY_PRESETS:
            raise ValueError(f"expected fields, or one of the presets {', '.join(OFF_POLICY_PRESETS)}, got {value!r}")
        return OFF_POLICY_PRESETS[value]

    @model_validator(mode="after")
    def _ordered(self) -> OffPolicyConfig:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} exceeds high = {self.high}; lower it, or raise high")
        return self


class LossConfig(Section):
    function: str | None = Field(
        default=None,
        description="custom loss, file.py:name or module:name, see oarjax.step.loss.TokenLoss; of the fields "
        "below, only aggregation, kl_beta and kl_in (for the reference's log-probs) and mask_truncated still apply",
    )
    surrogate: Literal["clip", "cispo", "sapo", "gmpo"] = Field(
        default="clip", description="gmpo: clip_low and clip_high bound the log-ratio; its paper has .4 for both"
    )
    level: Literal["token", "sequence"] = Field(
        default="token", description="ratio per token, or one per sequence (GSPO)"
    )
    aggregation: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = Field(
        default="dapo",
        description="mean over tokens (dapo; bnpo: per microbatch), of rows' means (grpo), or over max_new (dr_grpo)",
    )
    clip_low: Share = Field(default=0.2, description="ratios below 1 - clip_low are clipped")
    clip_high: Rate = Field(default=0.28, description="ratios above 1 + clip_high are clipped")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(default=None, description="cap on the ratio if A < 0")
    ratio_cap: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="CISPO's absolute upper bound on the ratio"
    )
    sapo_positive: Annotated[float, Field(gt=0)] = Field(default=1.0, description="SAPO's temperature where A > 0")
    sapo_negative: Annotated[float, Field(gt=0)] = Field(default=1.05, description="and where A is 0 or below")
    kl_beta: Rate = Field(default=0.0, description="coefficient of the KL term to the start policy; 0 = off")
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="reward: kl_beta times log(policy / reference) is taken off every reward instead"
    )
    reference: Literal["device", "host"] = Field(
        default="device", description="memory that holds the KL term's reference policy between scoring passes"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="of the KL term, after Schulman")
    entropy_bonus: float = Field(default=0.0, description="coefficient of the entropy, which is added to the objective")
    router_balance: Rate = Field(
        default=0.0,
        description="coefficient of the load-balancing loss of experts (Switch, eq. 4), which is added to the loss",
    )
    off_policy: OffPolicyConfig = OffPolicyConfig()
    mask_truncated: bool = Field(default=False, description="leave completions cut at max_new out of the loss")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "sampler_correction_cap" in value:
            raise ValueError(
                "sampler_correction_cap is off_policy.high now; set off_policy: {weighting: token_truncate, high: "
                f"{value['sampler_correction_cap']}}}"
            )
        return value


class OptimConfig(Section):
    lr: Rate = Field(default=1e-6, description="learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate after the warm-up; linear and cosine end at 0"
    )
    warmup: Count = Field(default=10, description="updates of linear warm-up")
    b1: Share = Field(default=0.9, description="Adam's decay of the mean gradient")
    b2: Share = Field(default=0.95, description="Adam's decay of the mean squared gradient")
    weight_decay: Rate = Field(default=0.01, description="AdamW's")
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="gradients of a larger norm are scaled down to it"
    )
    moments: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of Adam's moments; bfloat16 halves their memory, needs b1 and b2 <= .99"
    )


class LoraConfig(Section):
    """Low-rank adapters: only they are trained, and the policy is stored once, in the compute dtype."""

    rank: Count = Field(default=0, description="0 = off: every weight is trained")
    alpha: Annotated[float, Field(gt=0)] = Field(default=32.0, description="adapters are scaled by alpha / rank")
    targets: Annotated[tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...], Field(min_length=1)] = Field(
        default=(
            "q",
            "k",
            "v",
            "o",
            "gate",
            "up",
            "down",
        ),
        description="matrices that get adapters",
    )

    start: str | None = Field(
        default=None, description="PEFT folder of adapters to start from; rank, alpha and targets must be its own"
    )

    @property
    def scale(self) -> float:
        """Return alpha / rank, the factor of the adapters' product."""
        return self.alpha / max(self.rank, 1)


class UpdateConfig(Section):
    epochs: Positive = Field(default=1, description="passes over a rollout")
    minibatches: Positive = Field(default=1, description="optimizer updates per epoch")
    microbatch: Positive = Field(default=32, description="rows per forward and backward pass, over all devices")
    skip_zero_variance: bool = Field(
        default=True,
        description="drop groups of equal rewards before credit and update, including their KL and entropy terms",
    )
    refills: Count = Field(default=0, description="extra rollouts of fresh prompts to replace dropped groups")
    fused: Literal["auto", "never"] = Field(
        default="auto",
        description="score and update in one pass: for oar_g with one update per rollout, without KL or reference "
        "answers, where grades are waited for before scoring anyway (skip_zero_variance or refills)",
    )


class SFTConfig(Section):
    data: DatasetConfig
    steps: Positive = Field(description="optimizer updates")
    batch: Positive = Field(default=64, description="pairs per update")
    microbatch: Positive = Field(default=64, description="rows per forward and backward pass")
    optim: OptimConfig = OptimConfig(lr=1e-3)
    max_length: Positive = Field(default=512, description="tokens of prompt and completion; longer pairs are left out")
