"""The credit lab: completions, every method's scores on them, both oracles, and what it all cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.batches import bucket, join, take, trim
from oarjax.cli.flop_count import flop_counter
from oarjax.cli.interventions import Continued, Direct, Total, direct_flips, total_flips
from oarjax.cli.session import Session, facts
from oarjax.config import ConfigError, CreditConfig, changed
from oarjax.credit.random import random_scores
from oarjax.credit.signals import Signals
from oarjax.host.builtin import computed_tokens
from oarjax.host.data import eval_batches, left_pad, right_pad
from oarjax.host.grade import Grader
from oarjax.host.lab_results import LabCompletion, LabResult, MethodResult, figure
from oarjax.host.problems import Problem
from oarjax.host.report import token_texts
from oarjax.host.saved_rollouts import SavedRollout
from oarjax.host.tokenizer import encode, render_prompt, text_of
from oarjax.logps import token_logps
from oarjax.methods import attribution, scorer, signals, weigher
from oarjax.oar.agreement import Evidence, agreement, best_agreement, concentration
from oarjax.oar.answer import extract_answer
from oarjax.oar.diagnose import spearman
from oarjax.oar.gradient import row_keys
from oarjax.oar.intervene import Branches, answer_choice_changes, branch_prompts, choices
from oarjax.policy import positions_of
from oarjax.sampling import sample
from oarjax.types import AnswerSpan, Params, PromptBatch, Rollout

WARM_UP = 2
"""Calls before the clock counts."""


class Programs(NamedTuple):
    """What runs on the device. Those that take params first are timed and counted."""

    params: Params
    sample: Callable[..., Rollout]  # (prompts, key)
    choose: Callable[..., Any]  # (rollout) -> Choices
    decode: Callable[..., Rollout]  # see oarjax.cli.interventions.Decode
    changes: Callable[..., Any]  # see AnswerChanges there
    forward: Callable[..., Any]  # (params, rollout, span, row keys) -> states: the unit of cost
    entropies: Callable[..., Any]  # (params, rollout, span, row keys) -> [b, T]
    attribute: Callable[[CreditConfig], Callable[..., Any]]  # -> (params, rollout, span, row keys) -> [b, T]


@dataclass(frozen=True)
class Drawn:
    """Completions to compare on, numpy, with their problems."""

    rollout: Rollout
    span: AnswerSpan
    problems: list[Problem]
    referenced: np.ndarray  # bool [R]: the right answer is known
    considered: int  # completions that these were taken from


@dataclass(frozen=True)
class Scored:
    """One scoring program over all completions."""

    scores: np.ndarray  # [R, T]
    again: np.ndarray  # [R, T], with other noise
    seconds: np.ndarray  # [batches], per completion
    forwards: np.ndarray  # [batches]


def make_programs(session: Session, params: Params) -> Programs:
    """Bind the policy. Nothing is compiled yet."""
    cfg, policy = session.cfg, session.policy
    roll, masking, pad = cfg.rollout, cfg.credit.masking, session.pad_id
    draw = partial(sample, policy, group_size=1, stop_ids=session.stop_ids, pad_id=pad)
    temperature = roll.temperature if cfg.lab.temperature is None else cfg.lab.temperature

    @jax.jit
    def sampled(params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        return draw(
            params, prompts, key, max_new=roll.max_new, temperature=temperature, top_k=roll.top_k, top_p=roll.top_p
        )

    @jax.jit
    def choose(params: Params, r: Rollout) -> Any:
        return choices(policy, params, r.tokens, r.valid, completion_length=r.completion.shape[1])

    @partial(jax.jit, static_argnames=("length", "width", "max_new"))
    def decoded(
        params: Params, tokens: Any, valid: Any, branches: Branches, *, length: int, width: int, max_new: int
    ) -> Rollout:
        prompts = branch_prompts(tokens, valid, branches, completion_length=length, width=width)
        return draw(params, prompts, jax.random.key(0), max_new=max_new, temperature=0.0, top_k=0, top_p=1.0)

    @jax.jit
    def changes(params: Params, r: Rollout, reasoning: Any, answer: Any, other: Any) -> Any:
        return answer_choice_changes(
            policy, params, r.tokens, r.valid, reasoning, answer, other, chunk=masking.chunk, buckets=masking.buckets
        )

    def forward(params: Params, r: Rollout, span: AnswerSpan, keys: Any) -> Any:
        return policy.trunk(params, policy.embed(params, r.tokens), positions_of(r.valid), r.valid)[0]

    def entropies(params: Params, r: Rollout, span: AnswerSpan, keys: Any) -> Any:
        return token_logps(
            policy,
            params,
            r.tokens,
            r.valid,
            completion_length=r.completion.shape[1],
            temperature=roll.temperature,
            head_chunk=cfg.policy.head_chunk,
        )[1]

    def attribute(credit: CreditConfig) -> Callable[..., Any]:
        probe = as_method(session, credit).own_probe
        score = scorer(credit, policy, temperature=roll.temperature, pad_id=pad, own_probe=probe)
        return lambda params, r, span, keys: score(params, r, span, keys, credit.probe.mode).importance

    return Programs(
        params=params,
        sample=partial(sampled, params),
        choose=partial(choose, params),
        decode=partial(decoded, params),
        changes=partial(changes, params),
        forward=forward,
        entropies=entropies,
        attribute=attribute,
    )


# Completions -------------------------------------------------------------------------------------------------------


def draw_completions(session: Session, programs: Programs) -> Drawn:
    """One completion per problem of data.eval (or data.train), in order, until enough have an answer.

    Raises:
        ConfigError: none has an answer after enough reasoning.
    """
    cfg = session.cfg
    source = session.train if session.held_out is None else session.held_out
    rollouts, spans, problems, considered = [], [], [], 0
    batches = eval_batches(source, batch=cfg.eval.batch, bucket=cfg.rollout.prompt_bucket, pad_id=session.pad_id)
    for number, (prompts, found, real) in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(cfg.seed), number)
        rollout = session.fetch(programs.sample(session.place(prompts, "rows"), key))
        span = session.find_answers(rollout)
        rows = usable_rows(span, shortest=cfg.lab.shortest)
        rows = rows[rows < real][: cfg.lab.problems - len(problems)]
        enough = len(problems) + len(rows) == cfg.lab.problems
        considered += int(rows[-1]) + 1 if enough else real
        rollouts.append(take(rollout, rows))
        spans.append(take(span, rows))
        problems += [found[row] for row in rows]
        if enough:
            break
    if not problems:
        raise ConfigError(_nothing_to_compare(considered, cfg.lab.shortest, cfg.credit.answer.style))
    whole = join(rollouts)
    span = jax.tree.map(lambda *parts: np.concatenate(parts), *spans)
    return _trimmed(session, whole, span, problems, np.ones(len(problems), bool), considered)


def saved_completions(session: Session, saved: Sequence[SavedRollout]) -> Drawn:
    """Saved rollouts that have an answer, the first ``lab.problems`` of them.

    Raises:
        ConfigError: none has one after enough reasoning, or one is longer than the policy's positions.
    """
    cfg, tokenizer = session.cfg, session.tokenizer

    def prompt_ids(s: SavedRollout) -> list[int]:
        if not isinstance(s.prompt, str):
            return s.prompt
        return render_prompt(
            tokenizer,
            s.prompt,
            template=cfg.data.template,
            system_prompt=cfg.data.system_prompt,
            prompt_format=cfg.data.prompt_format,
        )

    prompts = [prompt_ids(s) for s in saved]
    completions = [encode(tokenizer, s.completion) if isinstance(s.completion, str) else s.completion for s in saved]
    most = session.model.max_position_embeddings
    for n, ids in enumerate(zip(prompts, completions), 1):
        if sum(map(len, ids)) > most or not all(0 <= i < session.model.vocab_size for part in ids for i in part):
            raise ConfigError(
                f"--rollouts: rollout {n} has {sum(map(len, ids))} tokens or an id that is not the policy's; it has "
                f"max_position_embeddings = {most} and {session.model.vocab_size} ids"
            )
    longest = max(map(len, completions))
    tokens, valid = left_pad(prompts, length=max(map(len, prompts)), pad_id=session.pad_id)
    made, completion = right_pad(completions, length=longest, pad_id=session.pad_id)
    zeros = np.zeros(completion.shape, np.float32)
    rollout = Rollout(
        tokens=np.concatenate([tokens, made], 1),  # type: ignore[arg-type]
        valid=np.concatenate([valid, completion], 1),  # type: ignore[arg-type]
        completion=completion,  # type: ignore[arg-type]
        behaviour_logps=zeros,  # type: ignore[arg-type]
        filtered_logps=zeros,  # type: ignore[arg-type]
        ended=np.ones(len(saved), bool),  # type: ignore[arg-type]
    )
    span = session.find_answers(rollout)
    rows = usable_rows(span, shortest=cfg.lab.shortest)[: cfg.lab.problems]
    if len(rows) == 0:
        raise ConfigError(_nothing_to_compare(len(saved), cfg.lab.shortest, cfg.credit.answer.style))
    texts = [s.prompt if isinstance(s.prompt, str) else text_of(p, session.table) for s, p in zip(saved, prompts)]
    problems = [Problem(texts[r], saved[r].reference or "", index=n) for n, r in enumerate(rows)]
    referenced = np.array([saved[r].reference is not None for r in rows])
    return _trimmed(session, take(rollout, rows), take(span, rows), problems, referenced, len(saved))


def usable_rows(span: AnswerSpan, *, shortest: int) -> np.ndarray:
    """Rows with an answer after at least ``shortest`` tokens of reasoning."""
    reasoning, answer = np.asarray(span.reasoning), np.asarray(span.answer)
    return np.flatnonzero(np.asarray(span.found) & answer.any(1) & (reasoning.sum(1) >= shortest))


def _nothing_to_compare(considered: int, shortest: int, style: str) -> str:
    return (
        f"lab: none of {considered} completions has an answer (credit.answer.style {style}) after at least {shortest} "
        "tokens of reasoning; give a trained policy, its own answer style, a lower lab.shortest, or --rollouts"
    )


def _trimmed(
    session: Session,
    rollout: Rollout,
    span: AnswerSpan,
    problems: list[Problem],
    referenced: np.ndarray,
    considered: int,
) -> Drawn:
    """Without the positions that no completion reaches."""
    full = rollout.completion.shape[1]
    longest = int(np.asarray(rollout.completion).sum(1).max())
    length = bucket(longest, min(session.cfg.rollout.completion_bucket, 8), full)
    short, cut = trim(rollout, span, np.arange(len(problems)), length=length)
    return Drawn(short, cut, problems, referenced, considered)


# Oracles -----------------------------------------------------------------------------------------------------------


def own_rewards(session: Session, grader: Grader, drawn: Drawn) -> np.ndarray:
    """The first reward of every completion, NaN where the right answer is not known."""
    completions = [Continued(ids, True) for ids in completion_ids(drawn.rollout)]
    return graded(session, grader, drawn, list(range(len(completions))), completions)


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """Every completion without its padding."""
    made = np.asarray(rollout.completion)
    return [row[mask].tolist() for row, mask in zip(np.asarray(rollout.tokens)[:, -made.shape[1] :], made)]


def graded(
    session: Session, grader: Grader, drawn: Drawn, rows: Sequence[int], found: Sequence[Continued]
) -> np.ndarray:
    """The config's first reward of completions of the given rows' problems; each different one is graded once."""
    different = list(dict.fromkeys((row, *c.tokens, c.ended) for row, c in zip(rows, found) if drawn.referenced[row]))
    values: dict[tuple[int, ...], float] = {}
    if different:
        ids = [list(key[1:-1]) for key in different]
        tokens, made = right_pad(ids, length=max(map(len, ids)), pad_id=session.pad_id)
        owners = [key[0] for key in different]
        zeros = np.zeros(made.shape, np.float32)
        ended = np.array([bool(key[-1]) for key in different])
        rollout = Rollout(tokens, made, made, zeros, zeros, ended)  # type: ignore[arg-type]
        numbered = {n: problem for n, problem in enumerate(drawn.problems)}
        batch = PromptBatch(tokens[:, :0], made[:, :0], np.asarray(owners, np.int32))  # type: ignore[arg-type]
        grades = session.submit(grader, numbered, batch, rollout)()
        values = dict(zip(different, grades.per_reward[session.cfg.grading.rewards[0].name].tolist()))
    return np.array([values.get((row, *c.tokens, c.ended), np.nan) for row, c in zip(rows, found)], np.float32)


def oracles(
    session: Session, programs: Programs, grader: Grader, drawn: Drawn, rewards: np.ndarray
) -> tuple[Direct, Total]:
    """Both interventions on every reasoning token."""
    lab, answer, rollout = session.cfg.lab, session.cfg.credit.answer, drawn.rollout
    decode = partial(programs.decode, length=rollout.completion.shape[1])

    def fetched(tokens: Any, valid: Any, branches: Branches, *, width: int, max_new: int) -> Rollout:
        return session.fetch(decode(tokens, valid, branches, width=width, max_new=max_new))

    def answer_of(ids: Sequence[int]) -> str | None:
        try:
            return extract_answer(text_of(list(ids), session.table), style=answer.style, pattern=answer.pattern)
        except TimeoutError:
            return None

    choice = _in_batches(programs.choose, (rollout,), lab.batch)
    direct = direct_flips(
        fetched,
        programs.changes,
        rollout,
        drawn.span,
        choice,
        answer_of=answer_of,
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
    """Row numbers in batches of one size; the last is filled up with its own rows again."""
    return [np.resize(np.arange(start, min(start + batch, rows)), batch) for start in range(0, rows, batch)]


def _in_batches(fn: Callable[..., Any], trees: tuple[Any, ...], batch: int) -> Any:
    """``fn`` over all rows of the trees, ``batch`` at a time, joined."""
    rows = len(jax.tree.leaves(trees)[0])
    parts = [jax.device_get(fn(*take(trees, chosen))) for chosen in _batches(rows, batch)]
    return jax.tree.map(lambda *xs: np.concatenate(xs)[:rows], *parts)


# Scores ------------------------------------------------------------------------------------------------------------


def score_everything(
    session: Session, programs: Programs, drawn: Drawn, credits: Sequence[CreditConfig]
) -> dict[CreditConfig, Scored]:
    """Scores of every method that needs the policy, with time and FLOPs, batch by batch and the methods in turn."""
    lab, rollout = session.cfg.lab, drawn.rollout
    works: dict[Any, tuple[Callable[..., Any], AnswerSpan]] = {}
    for credit in credits:
        if "importance" in signals(credit):
            works[credit] = programs.attribute(credit), as_method(session, credit).find_answers(rollout)
        elif "entropies" in signals(credit):
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


def draws_noise(credit: CreditConfig) -> bool:
    """Whether another key gives other scores."""
    kind = attribution(credit)
    if credit.method in ("random", "permuted"):
        return True
    if kind == "oar_g":
        return credit.estimator == "noisy" or credit.probe.mode != "answer_joint"
    by_fisher = kind == "oar_f" or (kind == "oar_screened" and credit.screen.by == "oar_f")
    return by_fisher and credit.fisher.sampled > 0


def as_method(session: Session, credit: CreditConfig) -> Session:
    """The session of a run with this method: its own units of the reasoning, keywords and probe."""
    return session.with_config(session.cfg.model_copy(update={"credit": credit}))


class Judged(NamedTuple):
    """A method's verdict on the tokens of all completions, [R, T]."""

    ranking: np.ndarray
    again: np.ndarray  # with other noise
    weights: np.ndarray


def judge(session: Session, drawn: Drawn, credit: CreditConfig, scored: Scored | None, rewards: np.ndarray) -> Judged:
    """Weights, and what tokens are ranked by: the raw scores, or the weights of a method that has none."""
    weigh = weigher(credit, keyword_table=as_method(session, credit).keyword_table())
    rollout, wants = drawn.rollout, signals(credit)
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
            return np.asarray(random_scores(key, rows=made.shape[0], tokens=made.shape[1])), weights
        return (weights if scores is None or credit.method == "permuted" else scores), weights

    keys = [jax.random.fold_in(jax.random.key(session.cfg.seed), draw) for draw in range(2)]
    ranking, weights = once(None if scored is None else scored.scores, keys[0])
    again, _ = once(None if scored is None else scored.again, keys[1])
    return Judged(ranking, again, weights)


# The whole ---------------------------------------------------------------------------------------------------------


def run_lab(session: Session, programs: Programs, grader: Grader, drawn: Drawn) -> LabResult:
    """Everything that ``oarjax credit`` prints and writes."""
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
    known = known_tokens(session, texts, reasoning)
    evidence = Evidence(
        jnp.asarray(reasoning),
        jnp.asarray(scored[exact].scores),
        jnp.asarray(direct.flips),
        jnp.asarray(total.flips) if drawn.referenced.any() else None,
        None if known is None else jnp.asarray(known),
    )
    made = partial(figure, resamples=lab.bootstrap, seed=cfg.seed)
    results = []
    for name, credit in methods.items():
        j = judged[name]
        values: dict[str, Any] = dict(agreement(jnp.asarray(j.ranking), evidence, share=lab.share))
        values |= concentration(jnp.asarray(j.weights), evidence.reasoning, share=lab.share)
        if draws_noise(credit):
            values["repeat"] = spearman(jnp.asarray(j.ranking), jnp.asarray(j.again), evidence.reasoning)
        cost = scored.get(credit)
        values |= {"forwards": np.zeros(1), "seconds": np.zeros(1)}
        if cost is not None:
            values |= {"forwards": cost.forwards, "seconds": cost.seconds}
        figures = {k: made(np.asarray(v, np.float64)) for k, v in values.items()}
        results.append(MethodResult(name, lab.methods[name], figures))
    masks = {"direct": (direct.flips, direct.usable), "total": (total.flips, total.usable)}
    if known is not None:
        masks["computed"] = known, np.ones(len(known), bool)
    named = {
        name: made(np.where(usable, (mask & reasoning).sum(1) / reasoning.sum(1), np.nan))
        for name, (mask, usable) in masks.items()
    }
    best = {k: made(np.asarray(v, np.float64)) for k, v in best_agreement(evidence, share=lab.share).items()}
    told = {k: str(v) for k, v in facts(session).items()} | {
        "completions": f"{len(drawn.problems)} with an answer, out of {drawn.considered}",
        "reasoning tokens": f"{reasoning.sum(1).mean():.1f} on average, {reasoning.sum():,} in all",
        "decoded for the oracles": f"{direct.decoded:,} answers, {total.decoded:,} continuations",
    }
    return LabResult(
        title=cfg.policy.path,
        facts=told,
        share=lab.share,
        interval=(
            f"±: half of a 95% interval, percentile bootstrap over {len(drawn.problems)} problems "
            f"({lab.bootstrap:,} resamples); of forwards and time over batches of {lab.batch}"
        ),
        oracles=named,
        best=best,
        methods=results,
        completions=shown_completions(session, drawn, rewards, texts, judged, direct.flips, total.flips, known),
    )


def known_tokens(session: Session, texts: Sequence[Sequence[str]], reasoning: np.ndarray) -> np.ndarray | None:
    """Tokens known to carry the computation, [R, T]; None where the task is not the built-in one."""
    data = session.cfg.data.eval or session.cfg.data.train
    if data.source != "builtin:arithmetic":
        return None
    out = np.zeros(reasoning.shape, bool)
    for row, tokens in enumerate(texts):
        out[row, : len(tokens)] = computed_tokens(tokens)
    return out & reasoning


def shown_completions(
    session: Session,
    drawn: Drawn,
    rewards: np.ndarray,
    texts: Sequence[Sequence[str]],
    judged: Mapping[str, Judged],
    direct: np.ndarray,
    total: np.ndarray,
    known: np.ndarray | None,
) -> list[LabCompletion]:
    """The first ``lab.shown`` completions, for the page."""
    answer = session.cfg.credit.answer
    shown = []
    for row, tokens in enumerate(texts[: session.cfg.lab.shown]):
        n = len(tokens)
        text = text_of(completion_ids(drawn.rollout)[row], session.table)

        def short(x: np.ndarray, row: int = row, n: int = n) -> list[float]:
            return [float(f"{v:.4g}") for v in x[row, :n]]

        shown.append(
            LabCompletion(
                prompt=drawn.problems[row].prompt,
                answer=extract_answer(text, style=answer.style, pattern=answer.pattern),
                reference=drawn.problems[row].reference if drawn.referenced[row] else None,
                reward=float(rewards[row]),
                tokens=list(tokens),
                is_reasoning=np.asarray(drawn.span.reasoning)[row, :n].tolist(),
                is_answer=np.asarray(drawn.span.answer)[row, :n].tolist(),
                direct=direct[row, :n].tolist(),
                total=total[row, :n].tolist(),
                known=[] if known is None else known[row, :n].tolist(),
                scores={name: short(j.ranking) for name, j in judged.items()},
                weights={name: short(j.weights) for name, j in judged.items()},
            )
        )
    return shown
