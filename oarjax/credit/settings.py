"""Settings of the credit methods, of the gate, the probe and what else credit reads, with their defaults and ranges.

Standard dataclasses: a formula needs no config to be called. A config nests ``CreditSettings`` and validates it;
``oarjax.config.changes.changed`` validates changes to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from oarjax.credit.accepted import MethodName, NotEmpty, Preset, Word, setting
from oarjax.credit.record import CUSTOM
from oarjax.credit.registry import label, shelf
from oarjax.rl.ranges import Count, Positive, Range, Rate, Share


@dataclass(frozen=True)
class Settings:
    """Base of all settings: a config refuses unknown fields, NaN and infinities."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "validate_default": True,
        "allow_inf_nan": False,
    }


@dataclass(frozen=True)
class ProbeSettings(Settings):
    mode: Literal["last", "answer_mean", "answer_joint"] = setting(
        "answer_mean",
        "outcome that the reasoning is credited for: the distribution at the answer's first token, its "
        "mean over the answer, or the mean log-probability of the answer's tokens",
    )
    warmup_mode: Literal["last", "answer_mean", "answer_joint"] = setting("last", "mode in the first warmup_iterations")
    warmup_iterations: Count = setting(0, "iterations that use warmup_mode")
    function: str | None = setting(
        None, "custom probe in place of these modes, file.py:name or module:name; see oarjax.credit.probe.Probe"
    )


GATE_PRESETS = {
    "paper": {"tau": 0.4, "boost": 2.0},
    "readme": {"tau": 0.25, "boost": 1.0},
    "hard": {"rule": "level", "levels": "suppress", "tau": 0.5, "floor": 0.0, "mass": "free"},
}
"""Settings of the paper's main experiments, of the README of the released code, and a gate that only mutes (ours)."""


@dataclass(frozen=True)
class GateSettings(Settings):
    """Mapping from importance to weights; in YAML also the name of a preset, ``gate: readme``."""

    rule: Literal["quantile", "level"] = setting("quantile", "threshold: the row's tau-quantile, or tau itself")
    levels: Literal["both", "boost", "suppress"] = setting(
        "both", "boost: no weight below 1; suppress: no weight above 1; both before the mass is kept"
    )
    tau: Share = setting(0.4, "quantile or level of the threshold; tokens below it are suppressed")
    boost: Rate = setting(2.0, "the most important token has weight 1 + boost, before the mass is kept")
    floor: Share = setting(0.1, "lowest weight before the mass is kept")
    mass: Literal["kept", "free"] = setting("kept", "kept: rescale the weights of a row to mean 1; free: leave them")


@dataclass(frozen=True)
class AnswerSettings(Settings):
    style: Literal["boxed", "hash", "tag", "regex", "none"] = setting(
        "boxed",
        "how completions mark their answer; none: nothing is extracted and the whole completion is "
        "reasoning (custom probes)",
    )
    pattern: str | None = setting(None, "regular expression of style regex; group 1, or the match, is the answer")
    source: Literal["own", "reference"] = setting(
        "own", "answer to probe: the completion's own, or the cue followed by the reference answer"
    )
    cue: str | None = setting(None, "text between reasoning and reference answer; null = the style's marker")


@dataclass(frozen=True)
class MaskingSettings(Settings):
    """OAR-P, and the exact part of oar_screened."""

    counterfactual: Literal["mask", "second_choice", "mean_embedding", "deleted"] = setting(
        "mask", "what replaces a token; deleted: it is hidden from attention"
    )
    mask_id: Count | None = setting(None, "token id for counterfactual mask; null = the pad id")
    unit: Literal["token", "line", "sentence", "turn"] = setting(
        "token",
        "line, sentence, turn: one counterfactual per span, whose score is spread over its tokens; turn: what the "
        "policy wrote in one turn of an episode",
    )
    chunk: Positive = setting(
        4, "counterfactuals of a whole completion per row and forward; shorter suffixes have more"
    )
    buckets: Annotated[int, Range(ge=1, le=64)] = setting(
        8, "number of compiled suffix lengths; more save FLOPs and take longer to compile"
    )


@dataclass(frozen=True)
class FisherSettings(Settings):
    """OAR-F, and the screening part of oar_screened."""

    outcomes: Positive = setting(4, "most likely answers, treated exactly with one backward pass each")
    sampled: Count = setting(0, "additional backward passes, for answers sampled from the rest")


@dataclass(frozen=True)
class LocalSettings(Settings):
    """OAR-L, and the screening part of oar_screened."""

    window: Count = setting(2, "tokens after the changed token that are recomputed as well")
    answers: Positive = setting(4, "maximum number of answer tokens to read")


@dataclass(frozen=True)
class ScreenSettings(Settings):
    share: Share = setting(0.2, "share of a row's reasoning that is scored exactly")
    by: Annotated[str, MethodName("screen.by", "random")] = setting(
        "oar_l", "method whose scores choose it; random: a control"
    )


@dataclass(frozen=True)
class SignedValuesSettings(Settings):
    by: Annotated[str, MethodName("signed_values.by", "entropy", "random")] = setting(
        "oar_l", "method whose scores choose the places; entropy: the policy's at each; random: the control"
    )
    places: Positive = setting(2, "tokens of a row that get values of their own")
    candidates: Positive = setting(4, "likeliest tokens that are tried at a place, beside the one that stands there")
    share: Share = setting(0.3, "of the row's advantage that all other tokens receive")


@dataclass(frozen=True)
class EntropySettings(Settings):
    share: Annotated[float, Range(gt=0, le=1)] = setting(0.2, "share of tokens that entropy_top keeps")
    scope: Literal["sequence", "batch"] = setting("batch", "tokens that the share is taken of")
    mass: Literal["kept", "free"] = setting("kept", "kept: rescale weights to mean 1 over the scope; free: leave them")


@dataclass(frozen=True)
class KeywordSettings(Settings):
    words: Annotated[tuple[Word, ...], NotEmpty()] = setting(
        ("therefore", "so", "thus", "hence", "because", "since", "but", "wait", "="), "words whose tokens are boosted"
    )
    boost: Rate = setting(2.0, "added to the weight of a keyword's tokens, before the mass is kept")


@dataclass(frozen=True)
class GrailSettings(Settings):
    mean: Rate = setting(1.0, "weight of a token of average saliency")
    spread: Rate = setting(0.5, "increase of the weight per standard deviation of log saliency")
    low: Rate = setting(0.5, "minimum weight")
    high: Rate = setting(5.0, "maximum weight")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} exceeds high = {self.high}; lower it, or raise high")


@dataclass(frozen=True)
class KtaeSettings(Settings):
    fisher: Rate = setting(1.0, "weight of Fisher's exact test in the strength of a token id")
    gain: Rate = setting(1.0, "weight of the information gain in the strength of a token id")
    scale: Rate = setting(1.0, "maximum bonus, in units of the advantage")

    def __post_init__(self) -> None:
        if self.fisher + self.gain == 0:
            raise ValueError("fisher and gain are both 0; raise one of them")


@dataclass(frozen=True)
class DgpoSettings(Settings):
    tau: Annotated[float, Range(gt=0)] = setting(0.5, "temperature: weights differ by exp(1 / tau)")
    kappa: Rate = setting(1.0, "exponent of the relative entropy")


@dataclass(frozen=True)
class CausalSpansSettings(Settings):
    spans: Annotated[int, Range(ge=2)] = setting(
        10, "maximum calculations and sentences to mask; half are calculations"
    )
    boost: Rate = setting(2.0, "weight of the most important tokens, before the mass is kept")
    floor: Rate = setting(0.5, "weight of importance 0; reasoning has 0.5 to 1, and a tenth of it on =, # and -")
    answer: Rate = setting(1.5, "weight of tokens after the reasoning")

    def __post_init__(self) -> None:
        if self.floor > self.boost:
            raise ValueError(f"floor = {self.floor} exceeds boost = {self.boost}; lower it, or raise boost")


@dataclass(frozen=True)
class FipoSettings(Settings):
    gamma: Share = setting(2 ** (-1 / 32), "discount of later tokens' changes; the default halves them every 32 tokens")
    clip: Share = setting(0.2, "maximum distance of a weight from 1")
    levels: Literal["boost", "both"] = setting("boost", "boost: weights in 1 .. 1 + clip; both: 1 - clip .. 1 + clip")
    drop: Annotated[float, Range(gt=0)] = setting(10.0, "tokens of a larger ratio to the rollout leave the sum")
    cap: Annotated[float, Range(gt=0)] = setting(
        10.0, "weights of tokens with a negative advantage and a ratio above this are limited to 0.8 .. 1"
    )


@dataclass(frozen=True)
class CriticSearchSettings(Settings):
    share: Share = setting(0.25, "share of the advantage that comes from the turns' labels")


@dataclass(frozen=True)
class TurnRewardsSettings(Settings):
    values: Literal["rewards", "differences"] = setting(
        "rewards", "differences: the marks are values after each turn, and their differences its rewards"
    )
    discount: Share = setting(1.0, "of later turns' rewards in a turn's return; 0: its own reward alone")
    weight: Rate = setting(1.0, "advantage per unit of return that a turn has above its row's mean")


@dataclass(frozen=True)
class TurnOarSettings(Settings):
    by: Annotated[str, MethodName("turn_oar.by")] = setting("oar_g", "method whose scores weigh tokens and turns")
    share: Literal["importance", "rewards", "equal"] = setting(
        "importance", "share of a turn: by the sum of its scores, by credit.turn_rewards, or that of the row"
    )


@dataclass(frozen=True)
class ShearSettings(Settings):
    window: Positive = setting(100, "tokens per window, whose states are compared as a set")
    stride: Positive = setting(25, "tokens between the starts of two windows")
    epsilon: Annotated[float, Range(gt=0)] = setting(
        0.05, "Sinkhorn's regularisation, over the states' mean norm; ours"
    )
    iterations: Positive = setting(50, "Sinkhorn's iterations; ours")

    def __post_init__(self) -> None:
        if self.stride > self.window:
            raise ValueError(f"stride = {self.stride} exceeds window = {self.window}; lower it, or raise window")


@dataclass(frozen=True)
class RlsdSettings(Settings):
    """RLSD and SERL."""

    strength: Share = setting(0.5, "share of the teacher at the first iteration")
    iterations: Positive = setting(50, "iterations over which that share decays to 0, where the method equals GRPO")
    clip: Share = setting(0.2, "the teacher's ratio is clipped to 1 - clip .. 1 + clip")


@dataclass(frozen=True)
class SdpgSettings(Settings):
    beta: Rate = setting(1e-3, "coefficient of the KL term towards the teacher")
    rows: Literal["all", "correct"] = setting("all", "rows with the KL term; correct: those of advantage > 0")


@dataclass(frozen=True)
class DeltaSettings(Settings):
    low: Rate = setting(0.8, "weight of a token far on the other side, before the mass is kept")
    high: Rate = setting(1.2, "weight of a token far on its own side, before the mass is kept")
    rounds: Count = setting(1, "times that the centroids are recomputed")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} exceeds high = {self.high}; lower it, or raise high")


@dataclass(frozen=True)
class CreditSettings(Settings):
    method: Annotated[str, MethodName(None, CUSTOM)] = setting(
        "oar_g", f"a method of oarjax.credit.registry, or custom; {shelf()}"
    )
    function: str | None = setting(None, "for method custom: file.py:name or module:name of an oarjax.CreditMethod")
    permuted_of: Annotated[str, MethodName("permuted_of")] = setting("oar_g", "method whose weights permuted shuffles")
    polarity: Literal["both", "correct", "wrong"] = setting(
        "both", "rows to reweight: all, or only those of positive (correct) or negative (wrong) advantage"
    )
    estimator: Literal["linearised", "noisy"] = setting("linearised", "OAR-G's estimator of the importance")
    sigma: Annotated[float, Range(gt=0)] = setting(1e-3, "standard deviation of OAR-G's noise on the embeddings")
    draws: Positive = setting(1, "samples of OAR-G's noise, one backward pass each")
    masking: MaskingSettings = MaskingSettings()
    fisher: FisherSettings = FisherSettings()
    local: LocalSettings = LocalSettings()
    screen: ScreenSettings = ScreenSettings()
    signed_values: SignedValuesSettings = SignedValuesSettings()
    entropy: EntropySettings = EntropySettings()
    keywords: KeywordSettings = KeywordSettings()
    grail: GrailSettings = GrailSettings()
    ktae: KtaeSettings = KtaeSettings()
    delta: DeltaSettings = DeltaSettings()
    dgpo: DgpoSettings = DgpoSettings()
    causal_spans: CausalSpansSettings = CausalSpansSettings()
    fipo: FipoSettings = FipoSettings()
    critic_search: CriticSearchSettings = CriticSearchSettings()
    turn_rewards: TurnRewardsSettings = TurnRewardsSettings()
    turn_oar: TurnOarSettings = TurnOarSettings()
    shear: ShearSettings = ShearSettings()
    rlsd: RlsdSettings = RlsdSettings()
    sdpg: SdpgSettings = SdpgSettings()
    marks: str | None = setting(
        None,
        "for egca, critic_search, serl, turn_rewards, turn_oar: file.py:name or module:name of (prompt, completion, "
        "reference) -> list of (start, end, value) in characters, or of (prompt, turns, reference) -> value of every "
        "turn of an episode; null: the environment's rewards",
    )
    teacher: str = setting(
        "{prompt}\n\nThe answer is {answer}.",
        "for rlsd, serl, sdpg: the prompt that turns the policy into its own teacher",
    )
    probe: ProbeSettings = ProbeSettings()
    gate: Annotated[GateSettings, Preset(GATE_PRESETS)] = GateSettings()
    answer: AnswerSettings = AnswerSettings()

    @property
    def label(self) -> str:
        """Return the method's name in tables, curves and reports."""
        return label(self.method, self.permuted_of, self.function)

    @property
    def labels_tokens(self) -> bool:
        """Return True if tokens are numbered by the line, sentence or calculation that they belong to."""
        return self.masking.unit != "token" or self.method == "causal_spans"
