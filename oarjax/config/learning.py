"""Declare how a policy learns: rollouts, rewards, advantages, the loss and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from oarjax.config.inputs import DatasetConfig
from oarjax.config.section import Count, Positive, Rate, Section, Settings, Share, Word


class EngineConfig(Section):
    """A vLLM server that draws the rollouts of training; evaluations draw with the run's own sampler."""

    url: str = Field(description="http://host:port; served with --enable-scale-out --logprobs-mode processed_logprobs")
    model: str | None = Field(default=None, description="the server's name of the policy; null = its only one")
    deadline: Annotated[float, Field(gt=0)] = Field(default=600.0, description="seconds per completion and attempt")
    retries: Count = Field(default=3, description="further attempts at a completion that failed")
    concurrency: Positive = Field(default=256, description="completions asked for at once")
    weights: Word | None = Field(
        default=None,
        description="folder that the server reads, too: every iteration's weights are written there, the server "
        "reloads them, and a probe checks that it did; null = it keeps those that it was started with",
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="of the server (--dtype) and of the weights written for it"
    )
    drill: Count = Field(
        default=20,
        description="syncs between drills, which push noise to see whether any tensor is kept; one is at every start; "
        "0 = no others",
    )


VERIFIERS = "verifiers:"
"""Begins the name of an environment that is a taskset of verifiers, and no class."""
MOST_DRIVEN = 1024
"""Episodes of a taskset that are played at once: each may have a connection to the token server."""


class EnvironmentConfig(Section):
    name: str = Field(
        description="environment of an episode: a built-in one, file.py:Class, module:Class, or verifiers:TASKSET"
    )
    settings: Settings = Field(
        default_factory=dict,
        description="keyword arguments of the class; for a taskset the fields of verifiers' EnvConfig",
    )
    turns: Positive = Field(default=8, description="maximum turns of the policy in an episode")
    deadline: Annotated[float, Field(gt=0)] = Field(default=10.0, description="time limit of a step, in seconds")
    thinking: Literal["template", "keep"] = Field(
        default="template",
        description="what becomes of thinking in earlier turns; template: as the chat template has it, refused if it "
        "drops it, since rows are only appended to; keep: it stays in the row",
    )

    @property
    def taskset(self) -> str | None:
        """Return the taskset of verifiers that is named; None for a class."""
        return self.name.removeprefix(VERIFIERS) if self.name.startswith(VERIFIERS) else None


class RolloutConfig(Section):
    prompts: Positive = Field(default=32, description="prompts per iteration, over all hosts")
    group_size: Positive = Field(
        default=8,
        description="completions per prompt; 1 needs advantage.method=batch or problem, or advantage.function",
    )
    max_new: Positive = Field(default=1024, description="maximum completion length in tokens")
    temperature: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="sampling temperature; also applied in the loss"
    )
    top_k: Count = Field(default=0, description="sample from the k most likely tokens; 0 = off")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="sample from the most likely tokens that together have this probability; 1 = off"
    )
    min_p: Share = Field(default=0.0, description="minimum probability, as a share of the most likely token's; 0 = off")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        description="divides positive logits, and multiplies negative ones, of tokens that the prompt or completion "
        "contains",
    )
    stop: tuple[Word, ...] = Field(
        default=(), description="strings that end a completion, also in evaluations; the text is cut before them"
    )
    tensor: Positive | None = Field(
        default=None, description="devices that shard one copy of the policy while sampling; null = mesh.tensor"
    )
    devices: Positive | None = Field(
        default=None,
        description="with update.lag: the last so many devices draw while the mesh of the others learns; null = all do "
        "both in turn",
    )
    attention: Literal["plain", "kernel"] = Field(
        default="plain",
        description="how a decode step reads the KV cache: plain reads all slots of a program, kernel (a TPU kernel) "
        "those that a row has written",
    )
    cache: Literal["policy", "int8"] = Field(
        default="policy",
        description="numbers of the KV cache of training's rollouts; policy: the compute dtype, int8: rounded, which "
        "loss.off_policy then corrects for; evaluations draw with policy, what is trained",
    )
    prompt_bucket: Positive = Field(default=64, description="prompts are padded to a multiple of this many tokens")
    completion_bucket: Positive = Field(
        default=128, description="microbatches are padded to this times 1 to 8, 10, 12, 14, 16, 20 ... tokens"
    )
    segment: Positive = Field(
        default=128, description="maximum decode steps before waiting rows may take the slots of finished rows"
    )
    cache_bucket: Positive | None = Field(
        default=None,
        description="initial slots of the KV cache that decoding reads; they double until completions fit; null = an "
        "eighth of max_new, at least 128",
    )
    slots: Positive | None = Field(
        default=None,
        description="completions decoded at once, over all devices; null = the whole batch. Fewer need less memory "
        "but more steps",
    )
    engine: EngineConfig | None = Field(default=None, description="draws in place of the run's sampler; null = none")
    environment: EnvironmentConfig | None = Field(
        default=None, description="answers the policy's turns, up to max_new tokens in all; null = single turns"
    )
    __annotations__["from"] = "tuple[Word, ...]"  # a keyword of Python, but the plain word in YAML
    vars()["from"] = Field(
        default=(),
        description="files, or folders of them, with rollouts to train on instead of drawing any; see docs/rollouts.md",
    )

    @property
    def recorded(self) -> tuple[str, ...]:
        """Return the field ``from``."""
        return getattr(self, "from")

    @property
    def outside(self) -> str | None:
        """Return the field that names another source than the run's sampler."""
        return "rollout.engine" if self.engine else "rollout.from" if self.recorded else None


class RewardConfig(Section):
    name: str = Field(description="a built-in reward, or one that grading.plugins register")
    weight: float = Field(default=1.0, description="weight in the sum that is a completion's reward")
    settings: Settings = Field(default_factory=dict, description="keyword arguments passed to the reward")


class GradingConfig(Section):
    rewards: tuple[RewardConfig, ...] = Field(
        default=(RewardConfig(name="math"),),
        description="rewards by name; their weighted sum is trained on, the first one decides pass@1",
    )
    plugins: tuple[str, ...] = Field(default=(), description="Python files or modules that register rewards")
    workers: Annotated[int, Field(gt=0, le=1024)] | Literal["auto"] = Field(
        default="auto", description="grading processes per host; auto: half the number of cores, 2 to 32"
    )
    deadline: Annotated[float, Field(gt=0)] = Field(default=5.0, description="time limit per answer, in seconds")
    memory_mb: Positive = Field(default=2048, description="resident memory above which a worker is killed")
    call_deadline: Annotated[float, Field(gt=0)] = Field(
        default=60.0,
        description="time limit per call of a batch or group reward, and per sample of an async one, in seconds",
    )
    concurrency: Positive = Field(default=16, description="maximum concurrent samples of an async reward")
    overlong_window: Count = Field(
        default=0, description="tokens before max_new over which the overlong penalty grows linearly; 0 = off"
    )
    overlong_penalty: Rate = Field(
        default=1.0, description="maximum overlong penalty, subtracted from the reward of a completion cut at max_new"
    )


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
        description="of method problem and data.difficulty: each time a problem comes again, its earlier rewards weigh "
        "this much less",
    )
    soft: Literal["off", "reward", "split"] = Field(
        default="off",
        description="reward: in place of the grade, the probability p of the reference answer given the reasoning; "
        "split: that for the reasoning's tokens, grade - p for the answer's",
    )
    function: str | None = Field(
        default=None,
        description="custom advantages, file.py:name or module:name, see oarjax.AdvantageFunction; the "
        "other fields of this section, but settings, then do not apply",
    )
    settings: Settings = Field(default_factory=dict, description="keyword arguments of that function")
    scale: Literal["group", "batch", "problem", "none"] = Field(
        default="group",
        description="divide by the standard deviation of the group (GRPO), of the batch, of the problem's earlier "
        "rewards (for method problem), or by nothing (Dr. GRPO)",
    )
    ddof: Literal[0, 1] = Field(default=1, description="1: sample standard deviation; 0: population standard deviation")
    eps: Rate = Field(default=1e-4, description="added to the standard deviation")


OFF_POLICY_PRESETS = {
    "tis": {"weighting": "token_truncate", "low": 0.0, "high": 2.0},
    "icepop": {"weighting": "token_mask", "low": 0.5, "high": 5.0},
}
"""Truncated importance sampling with the cap of its report, and IcePop with the bounds of its paper."""


class OffPolicyConfig(Section):
    """Corrections for tokens that another policy drew; in YAML also the name of a preset, ``off_policy: icepop``."""

    weighting: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="none",
        description="importance weights old / behaviour per token or sequence, truncated to low .. high, or masked "
        "outside; see oarjax.rl.off_policy.importance_weights",
    )
    low: Rate = Field(default=0.0, description="lower bound of the importance weights")
    high: Annotated[float, Field(gt=0)] = Field(default=2.0, description="upper bound of the importance weights")
    support: Literal["whole", "sampled"] = Field(
        default="whole",
        description="sampled: log-probs of the loss and of behaviour are renormalised over what rollout.top_k, top_p "
        "and min_p keep, each policy's by its own logits; the drawn token is always kept",
    )
    max_drift: Rate | None = Field(
        default=None,
        description="exclude rows of negative advantage whose mean log(behaviour / policy) per token exceeds this, in "
        "nats; null = off",
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


RECORDED = "recorded"
"""The ``loss.teacher`` whose log-probs come with the rollouts."""


class LossConfig(Section):
    function: str | None = Field(
        default=None,
        description="custom loss, file.py:name or module:name, see oarjax.TokenLoss; of the fields "
        "below, only settings, aggregation, mask_truncated, router_balance, off_policy.support and what makes the "
        "reference's log-probs (kl_beta, kl_in, teacher, reference, reference_every) apply",
    )
    settings: Settings = Field(default_factory=dict, description="keyword arguments of that function")
    surrogate: Literal["clip", "cispo", "sapo", "gmpo", "vespo", "dppo"] = Field(
        default="clip",
        description="gmpo: clip_low and clip_high bound the log-ratio, its paper has .4 for both; dppo: they bound the "
        "change of the probability, .2 for both in prime-rl",
    )
    level: Literal["token", "sequence"] = Field(default="token", description="ratio per token, or per sequence (GSPO)")
    aggregation: Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo"] = Field(
        default="dapo",
        description="mean over all tokens (dapo), over those of each microbatch (bnpo), of row means (grpo), of row "
        "sums (luspo), or sum over rows * max_new (dr_grpo)",
    )
    clip_low: Share = Field(default=0.2, description="ratios below 1 - clip_low are clipped")
    clip_high: Rate = Field(default=0.28, description="ratios above 1 + clip_high are clipped")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="upper bound on the ratio where A < 0; null = off"
    )
    ratio_cap: Annotated[float, Field(gt=0)] = Field(default=5.0, description="CISPO's upper bound on the ratio")
    sapo_positive: Annotated[float, Field(gt=0)] = Field(default=1.0, description="SAPO's temperature where A > 0")
    sapo_negative: Annotated[float, Field(gt=0)] = Field(default=1.05, description="SAPO's temperature where A <= 0")
    vespo_k_positive: Rate = Field(default=2.0, description="VESPO's power of a row's ratio where A >= 0")
    vespo_lambda_positive: Annotated[float, Field(gt=0)] = Field(default=3.0, description="its decay where A >= 0")
    vespo_k_negative: Rate = Field(default=3.0, description="VESPO's power of a row's ratio where A < 0")
    vespo_lambda_negative: Annotated[float, Field(gt=0)] = Field(default=2.0, description="its decay where A < 0")
    kl_beta: Rate = Field(default=0.0, description="coefficient of the KL term towards the reference policy; 0 = off")
    kl_in: Literal["loss", "reward", "token"] = Field(
        default="loss",
        description="where the KL term applies; reward, token: kl_beta * log(policy / reference) is subtracted from "
        "the rewards, or from the advantage of each token (on-policy distillation, with teacher), instead",
    )
    teacher: str | None = Field(
        default=None,
        description="HF folder or hub name of the reference policy, with the policy's tokenizer; recorded: its "
        "log-probs come with the rollouts of rollout.from; null = the initial policy",
    )
    reference: Literal["device", "host"] = Field(
        default="device", description="memory that holds the reference policy between scoring passes"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="Schulman's estimator of the KL term")
    kl_corrected: bool = Field(
        default=False, description="multiply the KL term by the policy ratio, which makes it unbiased (DeepSeek-V3.2)"
    )
    reference_every: Count = Field(
        default=0,
        description="iterations after which the policy becomes the reference; 0 = the initial policy stays it",
    )
    entropy_bonus: float = Field(default=0.0, description="coefficient of the entropy, added to the objective")
    entropy_target: Rate | None = Field(
        default=None,
        description="nats per token at or below which entropy_bonus grows, and above which it shrinks and is not "
        "applied (Skywork-OR1); null = it is constant",
    )
    entropy_step: Rate = Field(default=0.005, description="change of the adaptive entropy_bonus per update")
    entropy_highest: Rate = Field(default=1.0, description="largest adaptive entropy_bonus")
    router_balance: Rate = Field(
        default=0.0, description="coefficient of the experts' load-balancing loss (Switch, eq. 4), added to the loss"
    )
    off_policy: OffPolicyConfig = OffPolicyConfig()
    mask_truncated: bool = Field(default=False, description="exclude completions cut at max_new from the loss")

    @property
    def scores_reference(self) -> bool:
        """Return True if rollouts are scored under the policy of the KL term."""
        return self.kl_beta > 0 and self.teacher != RECORDED

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
    lr: Rate = Field(default=1e-6, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after the warm-up; linear and cosine decay to 0"
    )
    warmup: Count = Field(default=10, description="updates of linear warm-up")
    b1: Share = Field(default=0.9, description="Adam's decay rate of the mean gradient")
    b2: Share = Field(default=0.95, description="Adam's decay rate of the mean squared gradient")
    weight_decay: Rate = Field(default=0.01, description="AdamW's weight decay")
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="maximum norm of the gradient; larger gradients are scaled down"
    )
    moments: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of Adam's moments; bfloat16 halves their memory and requires b1 and b2 <= .99",
    )
    function: str | None = Field(
        default=None,
        description="another optimizer, optax.lion for one, module:name or file.py:name, see "
        "oarjax.OptimizerFunction; b1, b2, weight_decay and moments then do not apply",
    )
    settings: Settings = Field(default_factory=dict, description="keyword arguments of that function")

    @field_validator("function")
    @classmethod
    def _with_colon(cls, value: str | None) -> str | None:
        """Write a dotted path as module:name, which all fields that name code have."""
        if value is None or ":" in value or "." not in value or value.endswith(".py"):
            return value
        return ":".join(value.rsplit(".", 1))


class LoraConfig(Section):
    """Low-rank adapters: only they are trained, and the policy is stored once, in the compute dtype."""

    rank: Count = Field(default=0, description="rank of the adapters; 0 = off: every weight is trained")
    alpha: Annotated[float, Field(gt=0)] = Field(default=32.0, description="adapters are scaled by alpha / rank")
    targets: Annotated[tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...], Field(min_length=1)] = Field(
        default=("q", "k", "v", "o", "gate", "up", "down"), description="matrices that get adapters"
    )

    start: str | None = Field(
        default=None, description="PEFT folder of adapters to start from; rank, alpha and targets must match it"
    )

    @property
    def scale(self) -> float:
        """Return alpha / rank, the factor of the adapters' product."""
        return self.alpha / max(self.rank, 1)


class UpdateConfig(Section):
    epochs: Positive = Field(default=1, description="passes over each rollout")
    minibatches: Positive = Field(default=1, description="optimizer updates per epoch")
    microbatch: Positive = Field(default=32, description="rows per forward and backward pass, over all devices")
    prompt_rows: Positive | Literal["auto"] = Field(
        default="auto",
        description="rows of a group that share the pass over their prompt in scores and updates, and the padding of "
        "the longest of them; a divisor of the group's rows in a minibatch and of a device's in a microbatch; 1 = off. "
        "auto: by the config's lengths on a CPU; 1 on accelerators, with experts and for loss.aggregation bnpo",
    )
    skip_zero_variance: bool = Field(
        default=True,
        description="drop groups of equal rewards before credit and update, including their KL and entropy terms",
    )
    refills: Count = Field(default=0, description="maximum extra rollouts of fresh prompts, to replace dropped groups")
    lag: Count = Field(
        default=0,
        description="iterations by which the policy that draws an iteration's rollouts is older than the one before "
        "it, so that an engine or rollout.devices draw while others are learned from; 0 = off; see docs/rollouts.md",
    )
    fused: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: score and update in one pass where oar_g makes one update per rollout, without KL or "
        "reference answers, and grades are needed before scoring anyway (skip_zero_variance or refills)",
    )


class WarmStartOptimConfig(OptimConfig):
    lr: Rate = Field(default=1e-3, description="peak learning rate of the warm start")


class SFTConfig(Section):
    data: DatasetConfig
    steps: Positive = Field(description="optimizer updates")
    batch: Positive = Field(default=64, description="pairs per update")
    microbatch: Positive = Field(default=64, description="rows per forward and backward pass")
    optim: WarmStartOptimConfig = WarmStartOptimConfig()
    max_length: Positive = Field(default=512, description="maximum tokens of a pair; longer ones are dropped")
    completion_bucket: Positive | None = Field(
        default=None, description="as rollout.completion_bucket, for the microbatches of pairs; null = that"
    )
