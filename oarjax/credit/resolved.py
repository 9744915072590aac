"""A credit method that a run has resolved: the method, its settings, and the functions that score and weigh tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from oarjax.costs import RowTokens
from oarjax.credit.clean_pass import LinearPass
from oarjax.credit.diagnose import ess_ratio, top_mass
from oarjax.credit.gate import polarised
from oarjax.credit.method import CreditMethod, built_in, scorer_of
from oarjax.credit.probe import Probe, ProbeMode, outcome_probe
from oarjax.credit.record import CUSTOM, KINDS, MEASURES, OF_REFERENCE, SIGNALS, Kind
from oarjax.credit.registry import choices
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, KeywordTable, Scored, required
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy, grouped
from oarjax.types import AnswerSpan, Mean, Params, Rollout, TrainBatch

Scorer = Callable[[Params, Rollout, AnswerSpan, Key[Array, "B"], ProbeMode], Scored]
"""(params, rollout, span, row keys, probe mode) -> scores."""

SharedScorer = Callable[[Params, LinearPass, Rollout, AnswerSpan, Key[Array, "B"], ProbeMode], Float[Array, "B T"]]
"""(params, clean pass, rollout, span, row keys, probe mode) -> importance."""

TokenCredit = Callable[[CreditInputs], Float[Array, "B T"]]
"""What ``weigh`` receives -> what the method's kind says; outside the completion unused."""

Reweigher = Callable[[Float[Array, "B T"], TrainBatch], TrainBatch]
"""(current log-probs, microbatch) -> the microbatch with token advantages of this update."""

Auxiliary = Callable[[Params, Float[Array, "B T D"], TrainBatch], Float[Array, "B T"]]
"""(params, final states that predict the tokens, microbatch) -> a term for every token's loss, 0 outside."""


@dataclass(frozen=True)
class ResolvedMethod:
    """A credit method with its settings; ``resolve_method`` makes it, once per run."""

    method: CreditMethod
    settings: CreditSettings
    attribution: CreditMethod
    """The method whose importance is computed: itself, or the one whose scores it reads."""
    probe: Probe | None = None
    """A custom probe, which replaces the built-in modes, except for GRAIL and causal spans, which have their own."""

    @property
    def kind(self) -> Kind:
        return self.method.kind

    @property
    def signals(self) -> frozenset[str]:
        """The signals that the method needs beside spans, advantages and masks."""
        return frozenset(self.method.needs)

    @property
    def measures(self) -> frozenset[str]:
        """The signals that are read off the policy's states; see ``oarjax.credit.measures``."""
        return self.signals & set(MEASURES)

    @property
    def draws_noise(self) -> bool:
        """Return True if another key gives other scores or weights; a custom method may draw."""
        if self.method.noisy is True or self.settings.method == CUSTOM:
            return True
        noisy = self.attribution.noisy
        return noisy if isinstance(noisy, bool) else noisy(self.settings)

    @property
    def keeps_states(self) -> bool:
        """Return True if the clean pass of scoring also serves log-probabilities and signals."""
        return self.attribution.name != CUSTOM

    @property
    def grouped(self) -> bool:
        """Return True if scoring computes the prompt of several rows of a group once."""
        return self.attribution.grouped

    def forwards(self, row: RowTokens, d: Decoder) -> float:
        """Count the scoring of one row, in clean passes over that row."""
        return self.attribution.forwards_of(self.settings, row, d)

    def needs_reference(self, *, kl: bool) -> bool:
        """Return whether rollouts are scored under the reference policy too: for the KL term, or for a signal."""
        return kl or bool(self.signals & OF_REFERENCE)

    def teacher_work(self) -> dict[str, bool]:
        """Return the uses of a teacher's prompts, as fields of ``oarjax.costs.Work``."""
        return {"teacher": "teacher_logps" in self.signals, "distilled": "teacher_prompt" in self.signals}

    def check_updates(self, *, epochs: int, minibatches: int) -> None:
        """Reject numbers of updates that the method cannot work with.

        Raises:
            ConfigError: several minibatches for a method that compares the rows of a group, since minibatches divide
                groups; or one update per rollout for a method that recomputes its weights in every update.
        """
        if self.method.reweigh is not None and epochs * minibatches == 1:
            raise ConfigError(
                f"update.epochs: credit.method {self.method.name} weighs tokens by how the policy has changed since "
                "the rollout and needs several updates per rollout, got 1; raise it, or update.minibatches"
            )
        if self.kind == "values" and epochs * minibatches > 1:
            raise ConfigError(
                f"update.epochs: {epochs} with update.minibatches {minibatches} and credit.method {self.method.name}, "
                "whose values are those of the policy that drew the rows; set both to 1"
            )
        if self.method.coupling == "group" and minibatches > 1:
            raise ConfigError(
                f"update.minibatches: credit.method {self.method.name} compares the rows of a group, so a minibatch "
                f"must contain whole groups, got {minibatches}; set 1, and raise update.epochs for more updates"
            )

    def check_groups(self, group_size: int) -> None:
        """Reject groups of one row for a method that compares the rows of a group.

        Raises:
            ConfigError: it is such a method.
        """
        if group_size == 1 and (self.method.coupling == "group" or self.method.advantage is not None):
            raise ConfigError(
                f"rollout.group_size: credit.method {self.method.name} compares the rows of a group and needs at least "
                "2, got 1; raise it, or set another method"
            )

    def scorer(self, policy: Policy, *, temperature: float, pad_id: int) -> Scorer:
        """Return a function (params, rollout, span, row keys, probe mode) -> importance and clean states, or None.

        No gradient flows to ``params``, and scores outside the reasoning are 0.

        Raises:
            ConfigError: the method reads an answer and the config looks for none, its settings cannot go together, or
                the policy cannot compute what it needs.
        """
        method = self.attribution
        if "importance" not in method.needs or method.score is None:
            return lambda params, rollout, span, keys, mode: Scored(None)
        self._check_answer()
        self._check_policy(policy)
        if method.check is not None:
            method.check(self.settings, self.probe)
        score, context_for = scorer_of(method), partial(self._context, temperature, pad_id)
        policy = policy if method.grouped else grouped(policy, 1)

        def scores(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
            context = context_for(mode)
            scored = score(policy, jax.lax.stop_gradient(params), r, span, keys, context)
            importance = required(scored, "importance", context)
            return scored._replace(importance=jnp.where(span.reasoning, importance, 0))

        return scores

    def shared_scorer(self, policy: Policy, *, temperature: float, pad_id: int) -> SharedScorer | None:
        """Return the ``scorer`` that starts from a clean pass shared with an update; None if the method has none."""
        if self.method.shared is None:
            return None
        score, context_for = self.method.shared, partial(self._context, temperature, pad_id)

        def scores(
            params: Params, clean: LinearPass, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode
        ) -> Float[Array, "B T"]:
            importance = score(policy, jax.lax.stop_gradient(params), clean, r, span, keys, context_for(mode))
            return jnp.where(span.reasoning, importance, 0)

        return scores

    def _context(self, temperature: float, pad_id: int, mode: ProbeMode) -> Context:
        """Return what a score function receives; masks are the pad token unless masking.mask_id is set."""
        mask_id = pad_id if self.settings.masking.mask_id is None else self.settings.masking.mask_id
        probe = self.probe or outcome_probe(mode, temperature=temperature)
        return Context(self.settings, temperature=temperature, mask_id=mask_id, probe=probe)

    def _check_policy(self, policy: Policy) -> None:
        screened = self.attribution.name == "oar_screened"
        method = (
            built_in(self.settings.screen.by) if screened and self.settings.screen.by != "random" else self.attribution
        )
        if policy.first_slots is None and method.cuts:
            raise ConfigError(
                f"credit.{'screen.by' if screened else 'method'}: {method.name} recomputes single positions of a "
                "row, but this policy's gated delta nets depend on every earlier token; set credit.method to oar_p, "
                "oar_g or oar_f, or credit.screen.by to oar_f"
            )

    def _check_answer(self) -> None:
        probed, answer = self.attribution.answer == "probed", self.settings.answer
        reads = probed and (self.probe is None or self.probe.reads == "answer")
        if (self.attribution.answer == "read" or reads) and answer.style == "none" and answer.source == "own":
            probe = "a credit.probe.function that reads the completion, " if probed else ""
            raise ConfigError(
                f"credit.method: {self.attribution.name} needs an answer and credit.answer.style is none; set the "
                f"style of your completions' answers, {probe}or a method such as entropy"
            )

    def weigher(self, *, keyword_table: KeywordTable | None = None) -> TokenCredit:
        """Return a function (inputs) -> the method's result [B, T], under polarity.

        Rows without reasoning or answer get ones from the methods that reweight the reasoning. ``entropy_top`` over a
        batch leaves rows of advantage 0 out of its share: they have no gradient, and a run that skips them must get the
        same weights.

        Raises:
            ConfigError: the method needs what is not there.
        """
        if "keyword_table" in self.signals and keyword_table is None:
            raise ConfigError(
                f"credit.method: {self.method.name} needs the words as token ids; give make_steps or weigher a "
                "keyword_table (oarjax.credit.methods.keywords.keyword_table)"
            )
        weigh, context = self.method.weigh, Context(self.settings, keyword_table=keyword_table)

        def weights(inputs: CreditInputs) -> Float[Array, "B T"]:
            raw = weigh(inputs, context)
            return polarised(raw, inputs.advantages, polarity=self.settings.polarity, kind=self.kind)

        return weights

    def reweigher(self) -> Reweigher | None:
        """Return the method's weights per update; None where it has none."""
        if self.method.reweigh is None:
            return None
        function, context = self.method.reweigh, Context(self.settings)

        def reweighed(logps: Float[Array, "B T"], batch: TrainBatch) -> TrainBatch:
            weights = jax.lax.stop_gradient(function(jax.lax.stop_gradient(logps), batch, context))
            return replace(batch, advantages=jnp.where(batch.completion, weights * batch.advantages, 0))

        return reweighed

    def auxiliary_loss(self, policy: Policy, *, temperature: float, head_chunk: int) -> Auxiliary | None:
        """Return the method's term of the loss; None where it has none."""
        if self.method.loss is None:
            return None
        function, context = self.method.loss, Context(self.settings, temperature=temperature, head_chunk=head_chunk)
        policy = grouped(policy, 1)

        def term(params: Params, hidden: Float[Array, "B T D"], batch: TrainBatch) -> Float[Array, "B T"]:
            return jnp.where(batch.completion, function(policy, params, hidden, batch, context), 0)

        return term


def resolve_method(
    settings: CreditSettings, *, custom: CreditMethod | None = None, probe: Probe | None = None
) -> ResolvedMethod:
    """Resolve the configured method, with the ``custom`` one where credit.method is custom, and a custom probe.

    Raises:
        ConfigError: credit.method is custom, and there is no custom method.
    """
    if settings.method != CUSTOM:
        method = built_in(settings.method)
    elif custom is None:
        raise ConfigError(
            "credit.method: custom needs a method; set credit.function, or give "
            "oarjax.credit.resolved.resolve_method a custom one (oarjax.CreditMethod)"
        )
    else:
        method = custom
    source = method.score if "importance" in method.needs else None
    if not isinstance(source, str):
        return ResolvedMethod(method, settings, method, probe)
    name = {"permuted_of": settings.permuted_of, "turn_oar.by": settings.turn_oar.by}.get(source, source)
    return ResolvedMethod(method, settings, built_in(name), probe)


def check_method(method: CreditMethod, *, field: str) -> None:
    """Reject a custom method with an unknown signal, kind or score.

    Raises:
        ConfigError: naming ``field``.
    """
    if unknown := set(method.needs) - set(SIGNALS):
        raise ConfigError(
            f"{field}: unknown needs {', '.join(map(repr, sorted(unknown)))}; expected some of {', '.join(SIGNALS)}"
        )
    if method.kind not in KINDS:
        raise ConfigError(f"{field}: kind {method.kind!r}; expected one of {', '.join(KINDS)}")
    score, scored = method.score, choices("score")
    if isinstance(score, str) and score not in scored:
        raise ConfigError(f"{field}: score {score!r}; expected {', '.join(scored)} or a function")
    if "importance" in method.needs and score is None:
        raise ConfigError(f"{field}: needs importance and has no score; expected {', '.join(scored)} or a function")


def credit_metrics(w: Float[Array, "B T"], span: AnswerSpan, completion: Bool[Array, "B T"]) -> dict[str, Mean]:
    """Measure the concentration of the weights over rows that reason, and the share of rows without an answer."""
    rows = completion.any(-1)
    reasoning_rows = rows & span.reasoning.any(-1)

    def row_mean(values: Float[Array, "B"], among: Bool[Array, "B"]) -> Mean:
        defined = among & jnp.isfinite(values)  # weights of 0 throughout have no concentration
        return Mean(jnp.sum(jnp.where(defined, values, 0)), jnp.sum(defined).astype(jnp.float32))

    return {
        "ess": row_mean(ess_ratio(w, span.reasoning), reasoning_rows),
        "top10": row_mean(top_mass(w, span.reasoning, share=0.1), reasoning_rows),
        "no_answer": row_mean((~span.has_answer).astype(jnp.float32), rows),
    }
