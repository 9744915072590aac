"""The credit lab: score completions by every method, run both oracles, and measure agreement and cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.config import ConfigError, CreditConfig, changed
from oarjax.credit.bind import draws_noise, signals, weigher
from oarjax.credit.controls import random_scores
from oarjax.credit.diagnose import spearman
from oarjax.credit.oar.oar_g import row_keys
from oarjax.credit.signals import Signals
from oarjax.data.problems import Problem
from oarjax.data.streams import right_pad
from oarjax.data.truth import token_truth
from oarjax.grading.grader import Grader
from oarjax.lab.agreement import Evidence, agreement, best_agreement, concentration
from oarjax.lab.completions import Drawn, answer_given, completion_ids
from oarjax.lab.interventions import Branches
from oarjax.lab.oracles import Continued, Direct, Total, direct_flips, total_flips
from oarjax.lab.programs import Programs, as_method
from oarjax.lab.results import LabCompletion, LabResult, MethodResult
from oarjax.plan.jaxpr_flops import flop_counter
from oarjax.report.files import token_texts
from oarjax.stats import bootstrap_interval
from oarjax.training.minibatches import take
from oarjax.training.run import Run
from oarjax.types import AnswerSpan, PromptBatch, Rollout

WARM_UP = 2
"""Calls before the clock counts."""


@dataclass(frozen=True)
class Scored:
    """Scores of one program over all completions, with their cost."""

    scores: np.ndarray  # [R, T]
    again: np.ndarray  # [R, T], with other noise
    seconds: np.ndarray  # [batches], per completion
    forwards: np.ndarray  # [batches]


# Oracles -----------------------------------------------------------------------------------------------------------


def own_rewards(session: Run, grader: Grader, drawn: Drawn) -> np.ndarray:
    """Grade every completion by the first reward; NaN where the reference is unknown."""
    completions = [Continued(ids, True) for ids in completion_ids(drawn.rollout)]
    return graded(session, grader, drawn, list(range(len(completions))), completions)


def graded(session: Run, grader: Grader, drawn: Drawn, rows: Sequence[int], found: Sequence[Continued]) -> np.ndarray:
    """Grade completions of the rows' problems by the config's first reward, each distinct one once."""
    different = list(dict.fromkeys((row, *c.tokens, c.ended) for row, c in zip(rows, found) if drawn.referenced[row]))
    values: dict[tuple[int, ...], float] = {}
    if different:
        ids = [list(key[1:-1]) for key in different]
        tokens, made = right_pad(ids, length=max(map(len, ids)), pad_id=session.pad_id)
        owners = [key[0] for key in different]
        zeros = np.zeros(made.shape, np.float32)
        ended = np.array([bool(key[-1]) for key in different])
        rollout = Rollout(tokens, made, made, zeros, zeros, ended)  # type: ignore[arg-type]
        numbered = dict(enumerate(drawn.problems))
        batch = PromptBatch(tokens[:, :0], made[:, :0], np.asarray(owners, np.int32))  # type: ignore[arg-type]
        grades = session.submit(grader, numbered, batch, rollout)()
        values = dict(zip(different, grades.per_reward[session.cfg.grading.rewards[0].name].tolist()))
    return np.array([values.get((row, *c.tokens, c.ended), np.nan) for row, c in zip(rows, found)], np.float32)


def oracles(
    session: Run, programs: Programs, grader: Grader, drawn: Drawn, rewards: np.ndarray
) -> tuple[Direct, Total]:
    """Apply both interventions to every reasoning token."""
    lab, rollout = session.cfg.lab, drawn.rollout
    decode = partial(programs.decode, length=rollout.completion.shape[1])

    def fetched(tokens: Any, valid: Any, branches: Branches, *, width: int, max_new: int) -> Rollout:
        return session.fetch(decode(tokens, valid, branches, width=width, max_new=max_new))

    choice = _in_batches(programs.choose, (rollout,), lab.batch)
    direct = direct_flips(
        fetched,
        programs.changes,
        rollout,
        drawn.span,
        choice,
        answer_of=partial(answer_given, session),
        answer_tokens=lab.answer_tokens,
        batch=lab.batch,
        rows=lab.branches,
        pad_id=session.pad_id,
    )
    total = total_flips(
        fetched,
        rollout,
        drawn.span,
        choice,
        rewards,
        rewards_of=partial(graded, session, grader, drawn),
        limit=max(session.cfg.rollout.max_new, rollout.completion.shape[1]),
        rows=lab.branches,
        stop_ids=session.stop_ids,
    )
    return direct, total


def _batches(rows: int, batch: int) -> list[np.ndarray]:
    """Split row numbers into batches of one size; the last is padded by repeating its rows."""
    return [np.resize(np.arange(start, min(start + batch, rows)), batch) for start in range(0, rows, batch)]


def _in_batches(fn: Callable[..., Any], trees: tuple[Any, ...], batch: int) -> Any:
    """Map ``fn`` over all rows of the trees, ``batch`` at a time, and join the results."""
    rows = len(jax.tree.leaves(trees)[0])
    parts = [jax.device_get(fn(*take(trees, chosen))) for chosen in _batches(rows, batch)]
    return jax.tree.map(lambda *xs: np.concatenate(xs)[:rows], *parts)


# Scores ------------------------------------------------------------------------------------------------------------


def score_everything(
    session: Run, programs: Programs, drawn: Drawn, credits: Sequence[CreditConfig]
) -> dict[CreditConfig, Scored]:
    """Score by every method that needs the policy, with time and FLOPs, batch by batch and the methods in turn."""
    lab, rollout = session.cfg.lab, drawn.rollout
    works: dict[Any, tuple[Callable[..., Any], AnswerSpan]] = {}
    for credit in credits:
        wants = signals(credit, as_method(session, credit).custom_method)
        if {"importance", "entropies"} <= wants:
            raise ConfigError(
                f"lab.methods: {credit.function} needs importance and entropies, and the lab compares one signal a "
                "method; leave it out, or let it compute the other"
            )
        if "importance" in wants:
            works[credit] = programs.attribute(credit), as_method(session, credit).find_answers(rollout)
        elif "entropies" in wants:
            works[credit] = programs.entropies, drawn.span
    jitted = {credit: jax.jit(fn) for credit, (fn, _) in works.items()}
    out: dict[Any, list[tuple[Any, Any, float, float]]] = {credit: [] for credit in works}
    counters: dict[Any, Callable[..., float]] = {}
    keys = [jax.random.fold_in(jax.random.key(session.cfg.seed), draw) for draw in range(2)]
    for number, chosen in enumerate(_batches(len(drawn.problems), lab.batch)):
        part = session.place(take(rollout, chosen), "rows")
        first, second = (row_keys(key, jnp.asarray(chosen)) for key in keys)
        forward = programs.params, part, take(drawn.span, chosen), first
        if number == 0:
            counters[None] = flop_counter(programs.forward, *forward)
        unit = counters[None](*forward)
        for credit, (fn, span) in works.items():
            args = programs.params, part, session.place(take(span, chosen), "rows")
            if number == 0:
                counters[credit] = flop_counter(fn, *args, first)
                for _ in range(WARM_UP):
                    jax.block_until_ready(jitted[credit](*args, first))
            start = time.perf_counter()
            scores = jax.block_until_ready(jitted[credit](*args, first))
            seconds = (time.perf_counter() - start) / lab.batch
            again = jitted[credit](*args, second) if draws_noise(credit) else scores
            forwards = counters[credit](*args, first) / unit
            out[credit].append((np.asarray(scores), np.asarray(again), seconds, forwards))
    rows = len(drawn.problems)
    return {
        credit: Scored(
            np.concatenate([p[0] for p in parts])[:rows],
            np.concatenate([p[1] for p in parts])[:rows],
            np.array([p[2] for p in parts]),
            np.array([p[3] for p in parts]),
        )
        for credit, parts in out.items()
    }


class Judged(NamedTuple):
    """A method's ranking and weights of the tokens of all completions, [R, T]."""

    ranking: np.ndarray
    again: np.ndarray  # with other noise
    weights: np.ndarray


def judge(session: Run, drawn: Drawn, credit: CreditConfig, scored: Scored | None, rewards: np.ndarray) -> Judged:
    """Compute a method's weights, and its ranking: the raw scores, or the weights of a method without scores."""
    own = as_method(session, credit)
    weigh = weigher(credit, keyword_table=own.keyword_table, custom_method=own.custom_method)
    rollout, wants = drawn.rollout, signals(credit, own.custom_method)
    made = np.asarray(rollout.completion)
    advantages = jnp.where(jnp.asarray(rewards) > 0, 1.0, -1.0)

    def once(scores: np.ndarray | None, key: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        values = None if scores is None else jnp.asarray(scores)
        given = Signals(
            importance=values if "importance" in wants else None,
            entropies=values if "entropies" in wants else None,
            tokens=jnp.asarray(rollout.tokens)[:, -made.shape[1] :] if "tokens" in wants else None,
        )
        weights = np.asarray(weigh(given, jax.tree.map(jnp.asarray, drawn.span), advantages, jnp.asarray(made), key))
        if credit.method == "random":
            return np.asarray(random_scores(key, jnp.arange(made.shape[0]), tokens=made.shape[1])), weights
        return (weights if scores is None or credit.method in ("permuted", "custom") else scores), weights

    keys = [jax.random.fold_in(jax.random.key(session.cfg.seed), draw) for draw in range(2)]
    ranking, weights = once(None if scored is None else scored.scores, keys[0])
    again, _ = once(None if scored is None else scored.again, keys[1])
    return Judged(ranking, again, weights)


# The whole ---------------------------------------------------------------------------------------------------------


def run_lab(session: Run, programs: Programs, grader: Grader, drawn: Drawn) -> LabResult:
    """Compute everything that ``oarjax credit`` prints and writes."""
    cfg, console = session.cfg, session.console
    lab = cfg.lab
    methods = {name: changed(cfg.credit, changes) for name, changes in lab.methods.items()}
    exact = changed(cfg.credit, {"method": "oar_p"})
    with console.status("oracles: changing tokens and decoding on"):
        rewards = own_rewards(session, grader, drawn)
        direct, total = oracles(session, programs, grader, drawn, rewards)
    with console.status("scores of every method"):
        scored = score_everything(session, programs, drawn, list(dict.fromkeys([exact, *methods.values()])))
    judged = {name: judge(session, drawn, c, scored.get(c), rewards) for name, c in methods.items()}
    reasoning = np.asarray(drawn.span.reasoning)
    texts = [token_texts([session.table[i] for i in ids]) for ids in completion_ids(drawn.rollout)]
    known, wrong = known_tokens(session, drawn.problems, texts, reasoning, rewards) or (None, None)
    evidence = Evidence(
        jnp.asarray(reasoning),
        jnp.asarray(scored[exact].scores),
        jnp.asarray(direct.flips),
        jnp.asarray(total.flips) if drawn.referenced.any() else None,
        None if known is None else jnp.asarray(known),
        None if wrong is None else jnp.asarray(wrong),
    )
    over_batches = partial(bootstrap_interval, resamples=lab.bootstrap, seed=cfg.seed)
    over_problems = partial(over_batches, problems=np.array([p.index for p in drawn.problems]))
    results = []
    for name, credit in methods.items():
        j = judged[name]
        values: dict[str, Any] = dict(agreement(jnp.asarray(j.ranking), evidence, share=lab.share))
        values |= concentration(jnp.asarray(j.weights), evidence.reasoning, share=lab.share)
        if draws_noise(credit):
            values["repeat"] = spearman(jnp.asarray(j.ranking), jnp.asarray(j.again), evidence.reasoning)
        figures = {k: over_problems(np.asarray(v, np.float64)) for k, v in values.items()}
        cost, nothing = scored.get(credit), np.zeros(1)
        figures["forwards"] = over_batches(nothing if cost is None else cost.forwards)
        figures["seconds"] = over_batches(nothing if cost is None else cost.seconds)
        results.append(MethodResult(name, lab.methods[name], figures))
    masks = {"direct": (direct.flips, direct.usable), "total": (total.flips, total.usable)}
    if known is not None:
        masks["computed"] = known, np.ones(len(known), bool)
    named = {
        name: over_problems(np.where(usable, (mask & reasoning).sum(1) / reasoning.sum(1), np.nan))
        for name, (mask, usable) in masks.items()
    }
    best = {k: over_problems(np.asarray(v, np.float64)) for k, v in best_agreement(evidence, share=lab.share).items()}
    shown_facts = {k: str(v) for k, v in session.facts().items()} | {
        "completions": _taken(drawn),
        "reasoning tokens": f"{reasoning.sum(1).mean():.1f} on average, {reasoning.sum():,} in all",
        "decoded for the oracles": f"{direct.decoded:,} answers, {total.decoded:,} continuations",
    }
    if wrong is not None:
        shown_facts["first wrong step"] = f"known in {wrong.any(1).sum()} of {(rewards <= 0).sum()} failed completions"
    return LabResult(
        title=cfg.policy.path,
        facts=shown_facts,
        share=lab.share,
        interval=(
            f"±: half of a 95% interval, percentile bootstrap over {_resampled(drawn)} "
            f"({lab.bootstrap:,} resamples); of forwards and time over batches of {lab.batch}"
        ),
        oracles=named,
        best=best,
        methods=results,
        completions=shown_completions(session, drawn, rewards, texts, judged, direct.flips, total.flips, known, wrong),
    )


def _taken(drawn: Drawn) -> str:
    """Describe how many completions were taken, and out of how many."""
    taken, out_of = len(drawn.problems), f"with an answer, out of {drawn.considered}"
    return f"{taken} {out_of}" if taken == drawn.answered else f"the first {taken} of {drawn.answered} {out_of}"


def _resampled(drawn: Drawn) -> str:
    """Describe the units that the intervals resample."""
    problems = len({p.index for p in drawn.problems})
    if problems == len(drawn.problems):
        return f"{problems} problems"
    return f"{problems} prompts, each with its rollouts"


def known_tokens(
    session: Run,
    problems: Sequence[Problem],
    texts: Sequence[Sequence[str]],
    reasoning: np.ndarray,
    rewards: np.ndarray,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Mark the tokens known to carry the computation, and the first wrong step of failed completions, [R, T] each.

    None where the task is not a built-in one.
    """
    known, wrong = np.zeros(reasoning.shape, bool), np.zeros(reasoning.shape, bool)
    for row, (problem, tokens) in enumerate(zip(problems, texts)):
        truth = token_truth(session.cfg.data.eval or session.cfg.data.train, problem.prompt, tokens)
        if truth is None:
            return None
        known[row, : len(tokens)] = truth.computed
        wrong[row, : len(tokens)] = truth.wrong
    return known & reasoning, wrong & reasoning & (rewards <= 0)[:, None]


def shown_completions(
    session: Run,
    drawn: Drawn,
    rewards: np.ndarray,
    texts: Sequence[Sequence[str]],
    judged: Mapping[str, Judged],
    direct: np.ndarray,
    total: np.ndarray,
    known: np.ndarray | None,
    wrong: np.ndarray | None,
) -> list[LabCompletion]:
    """Collect the first ``lab.shown`` completions for the page."""
    shown, ids = [], completion_ids(drawn.rollout)
    for row, tokens in enumerate(texts[: session.cfg.lab.shown]):
        n = len(tokens)

        def short(x: np.ndarray, row: int = row, n: int = n) -> list[float]:
            return [float(f"{v:.4g}") for v in x[row, :n]]

        shown.append(
            LabCompletion(
                prompt=drawn.problems[row].prompt,
                answer=answer_given(session, ids[row]),
                reference=drawn.problems[row].reference if drawn.referenced[row] else None,
                reward=float(rewards[row]),
                tokens=list(tokens),
                is_reasoning=np.asarray(drawn.span.reasoning)[row, :n].tolist(),
                is_answer=np.asarray(drawn.span.answer)[row, :n].tolist(),
                direct=direct[row, :n].tolist(),
                total=total[row, :n].tolist(),
                known=[] if known is None else known[row, :n].tolist(),
                wrong=[] if wrong is None else wrong[row, :n].tolist(),
                scores={name: short(j.ranking) for name, j in judged.items()},
                weights={name: short(j.weights) for name, j in judged.items()},
            )
        )
    return shown
