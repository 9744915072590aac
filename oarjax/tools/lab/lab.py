"""The credit lab: score completions by every method, run both oracles, and measure agreement and cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.config.changes import changed
from oarjax.config.inputs import DatasetConfig
from oarjax.credit.controls.random_scores import random_scores
from oarjax.credit.diagnose import spearman
from oarjax.credit.kinds import relative, token_advantages
from oarjax.credit.oar.oar_g import row_keys
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import CreditInputs, Signals
from oarjax.data.problems import Problem
from oarjax.data.streams import right_pad
from oarjax.data.tasks.truth import token_truth
from oarjax.errors import ConfigError
from oarjax.grading.recorded import Grading
from oarjax.report.files import token_texts
from oarjax.run.run import Run
from oarjax.stats import bootstrap_interval
from oarjax.step.minibatches import take
from oarjax.tools.lab.agreement import CausalEvidence, agreement, best_agreement, concentration
from oarjax.tools.lab.completions import Completions, completion_ids, read_answer
from oarjax.tools.lab.interventions import Branches
from oarjax.tools.lab.oracles import Continuation, Direct, RewardsOf, Total, direct_flips, total_flips
from oarjax.tools.lab.programs import LabPrograms, RowProgram, with_method
from oarjax.tools.lab.results import LabCompletion, LabResult, MethodResult
from oarjax.tools.lab.values import compare_values
from oarjax.tools.plan.jaxpr_flops import flop_counter
from oarjax.types import AnswerSpan, Grades, Hints, PromptBatch, Rollout

WARM_UP = 2
"""Untimed calls before the timed ones."""


@dataclass(frozen=True)
class MethodScores:
    """Scores of one program over all completions, with their cost."""

    scores: Any  # [R, T], or of a method without scores its signals by name
    repeated: Any  # the same, with other noise
    seconds: np.ndarray  # [batches], per completion
    forwards: np.ndarray  # [batches]


# Oracles -----------------------------------------------------------------------------------------------------------


def completion_rewards(rewards_of: RewardsOf, completions: Completions) -> np.ndarray:
    """Grade every completion by the first reward; NaN where the reference is unknown."""
    continuations = [Continuation(ids, True) for ids in completion_ids(completions.rollout)]
    return rewards_of(range(len(continuations)), continuations)


def grade_continuations(
    submit: Callable[..., Callable[[], Grades]],
    completions: Completions,
    rows: Sequence[int],
    continuations: Sequence[Continuation],
    *,
    reward: str,
    pad_id: int,
) -> np.ndarray:
    """Grade continuations for the rows' problems by a ``reward``, duplicates only once.

    Args:
        submit: (problems by number, prompts, rollout) -> a function that waits for the grades.
    """
    keys = [(row, *c.tokens, c.ended) for row, c in zip(rows, continuations)]
    distinct = list(dict.fromkeys(key for key in keys if completions.referenced[key[0]]))
    values: dict[tuple[int, ...], float] = {}
    if distinct:
        ids = [list(key[1:-1]) for key in distinct]
        tokens, is_token = right_pad(ids, length=max(map(len, ids)), pad_id=pad_id)
        problem_rows = np.array([key[0] for key in distinct], np.int32)
        zeros = np.zeros(is_token.shape, np.float32)
        ended = np.array([bool(key[-1]) for key in distinct])
        rollout = Rollout(tokens, is_token, is_token, zeros, zeros, ended)  # type: ignore[arg-type]
        numbered = dict(enumerate(completions.problems))
        batch = PromptBatch(tokens[:, :0], is_token[:, :0], problem_rows)  # type: ignore[arg-type]
        values = dict(zip(distinct, submit(numbered, batch, rollout)().per_reward[reward].tolist()))
    return np.array([values.get(key, np.nan) for key in keys], np.float32)


def oracles(
    run: Run, programs: LabPrograms, rewards_of: RewardsOf, completions: Completions, rewards: np.ndarray
) -> tuple[Direct, Total]:
    """Apply both interventions to every reasoning token."""
    lab, rollout = run.cfg.lab, completions.rollout
    decode = partial(programs.decode, length=rollout.completion.shape[1])

    def decode_on_host(tokens: Any, valid: Any, branches: Branches, *, width: int, max_new: int) -> Rollout:
        return run.fetch(decode(tokens, valid, branches, width=width, max_new=max_new))

    choice = _in_batches(programs.choose, (rollout,), lab.batch)
    direct = direct_flips(
        decode_on_host,
        programs.changes,
        rollout,
        completions.span,
        choice,
        answer_of=partial(read_answer, run.cfg.credit.answer, run.table),
        answer_tokens=lab.answer_tokens,
        batch=lab.batch,
        rows=lab.branches,
        pad_id=run.pad_id,
    )
    total = total_flips(
        decode_on_host,
        rollout,
        completions.span,
        choice,
        rewards,
        rewards_of=rewards_of,
        limit=max(run.cfg.rollout.max_new, rollout.completion.shape[1]),
        rows=lab.branches,
        stop_ids=run.stop_ids,
    )
    return direct, total


def _batches(rows: int, batch: int) -> list[np.ndarray]:
    """Split row numbers into batches of equal size; the last is padded by repeating its rows."""
    return [np.resize(np.arange(start, min(start + batch, rows)), batch) for start in range(0, rows, batch)]


def _in_batches(fn: Callable[..., Any], trees: tuple[Any, ...], batch: int) -> Any:
    """Map ``fn`` over all rows of the trees, ``batch`` at a time, and join the results."""
    rows = len(jax.tree.leaves(trees)[0])
    parts = [jax.device_get(fn(*take(trees, indices))) for indices in _batches(rows, batch)]
    return jax.tree.map(lambda *xs: np.concatenate(xs)[:rows], *parts)


# Scores ------------------------------------------------------------------------------------------------------------


def score_methods(
    run: Run, programs: LabPrograms, completions: Completions, credits: Sequence[CreditSettings]
) -> dict[CreditSettings, MethodScores]:
    """Score by every method that needs the policy, and measure time and FLOPs: batch by batch, methods in turn.

    Raises:
        ConfigError: a custom method needs importance and signals that are read off the policy's states.
    """
    lab, rollout = run.cfg.lab, completions.rollout
    scorers: dict[Any, tuple[RowProgram, AnswerSpan | Hints]] = {}
    noisy: dict[Any, bool] = {}
    for credit in credits:
        method = with_method(run, credit)
        signals, measures = method.credit.signals, method.credit.measures
        noisy[credit] = method.credit.draws_noise
        if "importance" in signals and measures:
            raise ConfigError(
                f"lab.methods: expected methods with one signal, got {credit.function}, which needs importance and "
                f"{', '.join(sorted(measures))}; leave it out, or compute one of the two in the method itself"
            )
        if "importance" in signals:
            scorers[credit] = programs.attribute(credit), method.find_answers(rollout)
        elif measures:
            scorers[credit] = programs.measure(measures), lab_hints(run, completions, credit)
    jitted = {credit: jax.jit(fn) for credit, (fn, _) in scorers.items()}
    out: dict[Any, list[tuple[Any, Any, float, float]]] = {credit: [] for credit in scorers}
    counters: dict[Any, Callable[..., float]] = {}
    keys = [jax.random.fold_in(jax.random.key(run.cfg.seed), draw) for draw in range(2)]
    for number, indices in enumerate(_batches(len(completions.problems), lab.batch)):
        part = run.place(take(replace(rollout, origin=None), indices), "rows")
        first, second = (row_keys(key, jnp.asarray(indices)) for key in keys)
        forward = programs.params, part, take(completions.span, indices), first
        if number == 0:
            counters[None] = flop_counter(programs.forward, *forward)
        unit = counters[None](*forward)
        for credit, (fn, span) in scorers.items():
            args = programs.params, part, run.place(take(span, indices), "rows")
            if number == 0:
                counters[credit] = flop_counter(fn, *args, first)
                for _ in range(WARM_UP):
                    jax.block_until_ready(jitted[credit](*args, first))
            start = time.perf_counter()
            scores = jax.block_until_ready(jitted[credit](*args, first))
            seconds = (time.perf_counter() - start) / lab.batch
            repeated = jitted[credit](*args, second) if noisy[credit] else scores
            forwards = counters[credit](*args, first) / unit
            out[credit].append((*jax.device_get((scores, repeated)), seconds, forwards))
    rows = len(completions.problems)

    def joined(parts: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *xs: np.concatenate(xs)[:rows], *parts)

    return {
        credit: MethodScores(
            joined([p[0] for p in parts]),
            joined([p[1] for p in parts]),
            np.array([p[2] for p in parts]),
            np.array([p[3] for p in parts]),
        )
        for credit, parts in out.items()
    }


def lab_hints(run: Run, completions: Completions, credit: CreditSettings) -> Hints:
    """Return the marks and teacher's prompts that a method reads, of the completions to compare on."""
    hints = with_method(run, credit).hints_for(dict(enumerate(completions.problems)))
    return Hints() if hints is None else hints(completions.rollout, np.arange(len(completions.problems)))


class MethodCredit(NamedTuple):
    """A method's credit of the tokens of all completions, [R, T]."""

    ranking: np.ndarray  # scores to rank tokens by
    repeated: np.ndarray  # the ranking with other noise
    weights: np.ndarray


def credit_tokens(
    run: Run, completions: Completions, credit: CreditSettings, scored: MethodScores | None, rewards: np.ndarray
) -> MethodCredit:
    """Compute a method's weights and its ranking: its raw scores, or its weights if it has no scores."""
    method = with_method(run, credit)
    weigh = method.credit.weigher(keyword_table=method.keyword_table)
    rollout, kind = completions.rollout, method.credit.kind
    answers = replace(completions.span, units=method.find_answers(rollout).units)
    span, is_token = jax.tree.map(jnp.asarray, (answers, rollout.completion))
    advantages = jnp.where(jnp.asarray(rewards) > 0, 1.0, -1.0)
    hints = lab_hints(run, completions, credit)
    _, groups = np.unique([p.index for p in completions.problems], return_inverse=True)
    extras = {"marks": hints.marks, "turns": hints.turns, "groups": groups}
    extras["tokens"] = np.asarray(rollout.tokens)[:, -is_token.shape[1] :]

    @jax.jit  # all as arguments: XLA would spend seconds on folding constants
    def weights_of(
        inputs: dict[str, Any], span: AnswerSpan, advantages: jax.Array, is_token: jax.Array, key: jax.Array
    ) -> jax.Array:
        credit_of_kind = weigh(CreditInputs(Signals(**inputs, iteration=1), span, advantages, is_token, key))
        shaped = token_advantages(kind, credit_of_kind, advantages, is_token)
        return relative(kind, credit_of_kind, shaped, advantages, is_token)

    def rank_and_weigh(scores: Any, key: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        by_name = {} if scores is None else scores if isinstance(scores, dict) else {"importance": scores}
        inputs = jax.tree.map(jnp.asarray, extras | by_name)
        weights = np.asarray(weights_of(inputs, span, advantages, is_token, key))
        if credit.method == "random":
            return np.asarray(random_scores(key, jnp.arange(is_token.shape[0]), tokens=is_token.shape[1])), weights
        ranking = next(iter(by_name.values())) if set(by_name) in ({"importance"}, {"entropies"}) else None
        if ranking is None or kind != "weights" or credit.method in ("permuted", "custom"):
            return weights, weights
        return ranking, weights

    keys = [jax.random.fold_in(jax.random.key(run.cfg.seed), draw) for draw in range(2)]
    ranking, weights = rank_and_weigh(None if scored is None else scored.scores, keys[0])
    repeated, _ = rank_and_weigh(None if scored is None else scored.repeated, keys[1])
    return MethodCredit(ranking, repeated, weights)


# All of the lab ----------------------------------------------------------------------------------------------------


def run_lab(run: Run, programs: LabPrograms, grader: Grading, completions: Completions) -> LabResult:
    """Compute everything that ``oarjax credit`` prints and writes."""
    cfg, console = run.cfg, run.console
    lab = cfg.lab
    methods = {name: changed(cfg.credit, changes) for name, changes in lab.methods.items()}
    exact = changed(cfg.credit, {"method": "oar_p"})
    graded_by: dict[str, Any] = {"reward": cfg.grading.rewards[0].name, "pad_id": run.pad_id}
    rewards_of = partial(grade_continuations, partial(run.submit, grader), completions, **graded_by)
    with console.status("oracles: changing tokens and decoding again"):
        rewards = completion_rewards(rewards_of, completions)
        direct, total = oracles(run, programs, rewards_of, completions, rewards)
    with console.status("scores of every method"):
        scored = score_methods(run, programs, completions, list(dict.fromkeys([exact, *methods.values()])))
    credited = {name: credit_tokens(run, completions, c, scored.get(c), rewards) for name, c in methods.items()}
    reasoning = np.asarray(completions.span.reasoning)
    texts = [token_texts([run.table[i] for i in ids]) for ids in completion_ids(completions.rollout)]
    computed, wrong_step = known_tokens(
        cfg.data.eval or cfg.data.train, completions.problems, texts, reasoning, rewards
    ) or (None, None)
    evidence = CausalEvidence(
        jnp.asarray(reasoning),
        jnp.asarray(scored[exact].scores),
        jnp.asarray(direct.flips),
        jnp.asarray(total.flips) if completions.referenced.any() else None,
        None if computed is None else jnp.asarray(computed),
        None if wrong_step is None else jnp.asarray(wrong_step),
    )
    over_batches = partial(bootstrap_interval, resamples=lab.bootstrap, seed=cfg.seed)
    over_problems = partial(over_batches, problems=np.array([p.index for p in completions.problems]))

    @jax.jit
    def measured(
        evidence: CausalEvidence, ranking: jax.Array, repeated: jax.Array, weights: jax.Array
    ) -> dict[str, jax.Array]:
        values = agreement(ranking, evidence, share=lab.share)
        values |= concentration(weights, evidence.reasoning, share=lab.share)
        return values | {"repeat": spearman(ranking, repeated, evidence.reasoning)}

    results = []
    for name, credit in methods.items():
        values = measured(evidence, *map(jnp.asarray, credited[name]))
        if not with_method(run, credit).credit.draws_noise:
            del values["repeat"]
        figures = {k: over_problems(np.asarray(v, np.float64)) for k, v in values.items()}
        cost, no_cost = scored.get(credit), np.zeros(1)
        figures["forwards"] = over_batches(no_cost if cost is None else cost.forwards)
        figures["seconds"] = over_batches(no_cost if cost is None else cost.seconds)
        results.append(MethodResult(name, lab.methods[name], figures))
    masks = {"direct": (direct.flips, direct.usable), "total": (total.flips, total.usable)}
    if computed is not None:
        masks["computed"] = computed, np.ones(len(computed), bool)
    shares = {
        name: over_problems(np.where(usable, (mask & reasoning).sum(1) / reasoning.sum(1), np.nan))
        for name, (mask, usable) in masks.items()
    }
    ceiling = jax.jit(partial(best_agreement, share=lab.share))(evidence)
    best = {k: over_problems(np.asarray(v, np.float64)) for k, v in ceiling.items()}
    facts = {k: str(v) for k, v in run.facts().items()} | {
        "completions": _count_text(completions),
        "reasoning tokens": f"{reasoning.sum(1).mean():.1f} on average, {reasoning.sum():,} in all",
        "decoded for the oracles": f"{direct.decoded:,} answers, {total.decoded:,} continuations",
    }
    if wrong_step is not None:
        failed = (rewards <= 0).sum()
        facts["first wrong step"] = f"known in {wrong_step.any(1).sum()} of {failed} failed completions"
    return LabResult(
        title=cfg.policy.path,
        facts=facts,
        share=lab.share,
        interval=(
            f"±: half of a 95% interval, percentile bootstrap over {_units_text(completions)} "
            f"({lab.bootstrap:,} resamples); of forwards and time over batches of {lab.batch}"
        ),
        oracles=shares,
        best=best,
        methods=results,
        completions=collect_completions(
            completions,
            lab.shown,
            partial(read_answer, cfg.credit.answer, run.table),
            rewards,
            texts,
            credited,
            direct.flips,
            total.flips,
            computed,
            wrong_step,
        ),
        values=compare_values(run, programs, rewards_of, completions) if lab.continuations else None,
    )


def _count_text(completions: Completions) -> str:
    """Describe how many completions are compared, and out of how many."""
    count, out_of = len(completions.problems), f"with an answer, out of {completions.considered}"
    answered = completions.answered
    return f"{count} {out_of}" if count == answered else f"the first {count} of {answered} {out_of}"


def _units_text(completions: Completions) -> str:
    """Describe the units that the intervals resample."""
    problems = len({p.index for p in completions.problems})
    if problems == len(completions.problems):
        return f"{problems} problems"
    return f"{problems} prompts, each with its rollouts"


def known_tokens(
    data: DatasetConfig,
    problems: Sequence[Problem],
    texts: Sequence[Sequence[str]],
    reasoning: np.ndarray,
    rewards: np.ndarray,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Mark the tokens known to carry the computation, and the first wrong step of failed completions, [R, T] each.

    None for a task that is not built in.
    """
    computed, wrong_step = np.zeros(reasoning.shape, bool), np.zeros(reasoning.shape, bool)
    for row, (problem, tokens) in enumerate(zip(problems, texts)):
        truth = token_truth(data, problem.prompt, tokens)
        if truth is None:
            return None
        computed[row, : len(tokens)] = truth.computed
        wrong_step[row, : len(tokens)] = truth.wrong_step
    return computed & reasoning, wrong_step & reasoning & (rewards <= 0)[:, None]


def collect_completions(
    completions: Completions,
    shown: int,
    answer_of: Callable[[Sequence[int]], str | None],
    rewards: np.ndarray,
    texts: Sequence[Sequence[str]],
    credited: Mapping[str, MethodCredit],
    direct: np.ndarray,
    total: np.ndarray,
    known: np.ndarray | None,
    wrong_step: np.ndarray | None,
) -> list[LabCompletion]:
    """Collect the first ``shown`` completions for the page."""
    collected, ids = [], completion_ids(completions.rollout)
    for row, tokens in enumerate(texts[:shown]):
        n = len(tokens)

        def short(x: np.ndarray, row: int = row, n: int = n) -> list[float]:
            return [float(f"{v:.4g}") for v in x[row, :n]]

        collected.append(
            LabCompletion(
                prompt=completions.problems[row].prompt,
                answer=answer_of(ids[row]),
                reference=completions.problems[row].reference if completions.referenced[row] else None,
                reward=float(rewards[row]),
                tokens=list(tokens),
                is_reasoning=np.asarray(completions.span.reasoning)[row, :n].tolist(),
                is_answer=np.asarray(completions.span.answer)[row, :n].tolist(),
                direct=direct[row, :n].tolist(),
                total=total[row, :n].tolist(),
                known=[] if known is None else known[row, :n].tolist(),
                wrong=[] if wrong_step is None else wrong_step[row, :n].tolist(),
                scores={name: short(c.ranking) for name, c in credited.items()},
                weights={name: short(c.weights) for name, c in credited.items()},
            )
        )
    return collected
