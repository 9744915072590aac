"""Completions that the credit lab compares methods on: sampled from the policy, or saved ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from oarjax.config import ConfigError
from oarjax.credit.answer_text import extract_answer
from oarjax.data.problems import Problem
from oarjax.data.streams import eval_batches, left_pad, right_pad
from oarjax.data.tokenizer import chat_ids, encode, errors_at, render_prompt, rendered_ids, text_of
from oarjax.lab.programs import Programs
from oarjax.lab.saved_rollouts import SavedRollout
from oarjax.training.minibatches import bucket, join, take, trim
from oarjax.training.run import Run
from oarjax.types import AnswerSpan, Rollout


@dataclass(frozen=True)
class Drawn:
    """Completions to compare methods on, as numpy, with their problems."""

    rollout: Rollout
    span: AnswerSpan
    problems: list[Problem]
    referenced: np.ndarray  # bool [R]: the reference answer is known
    answered: int  # considered completions with an answer; these are the first of them
    considered: int  # completions searched for an answer


def draw_completions(session: Run, programs: Programs) -> Drawn:
    """Sample one completion per problem of data.eval (or data.train), in order, until enough have an answer.

    Raises:
        ConfigError: no completion has an answer after enough reasoning.
    """
    cfg = session.cfg
    source = session.train if session.held_out is None else session.held_out
    rollouts, spans, problems, considered = [], [], [], 0
    batches = eval_batches(source, batch=cfg.eval.batch, bucket=cfg.rollout.prompt_bucket, pad_id=session.pad_id)
    for number, (prompts, found, real) in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(cfg.seed), number)
        rollout = session.fetch(programs.sample(session.place(prompts, "prompts"), key))
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
    return _trimmed(session, whole, span, problems, np.ones(len(problems), bool), len(problems), considered)


def saved_completions(session: Run, saved: Sequence[SavedRollout]) -> Drawn:
    """Select the first ``lab.problems`` saved rollouts that have an answer; those of one prompt are one problem.

    Raises:
        ConfigError: none has an answer after enough reasoning, or one is longer than the policy's positions.
    """
    cfg = session.cfg
    found = [_ids(session, s, number) for number, s in enumerate(saved, 1)]
    prompts, completions = [prompt for prompt, _, _ in found], [completion for _, completion, _ in found]
    restored = sum(again for _, _, again in found)
    if restored:
        session.console.print(
            f"the prompts of {restored} of {len(saved)} rollouts were saved without special tokens; the chat "
            "template gives these texts, and its tokens are taken",
            soft_wrap=True,
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
    usable = usable_rows(span, shortest=cfg.lab.shortest)
    rows = usable[: cfg.lab.problems]
    if len(rows) == 0:
        raise ConfigError(_nothing_to_compare(len(saved), cfg.lab.shortest, cfg.credit.answer.style))
    texts = [s.prompt if isinstance(s.prompt, str) else text_of(p, session.table) for s, p in zip(saved, prompts)]
    numbers: dict[tuple[int, ...], int] = {}  # of each different prompt
    indices = [numbers.setdefault(tuple(prompts[r]), len(numbers)) for r in rows]
    problems = [Problem(texts[r], saved[r].reference or "", index=n) for n, r in zip(indices, rows)]
    referenced = np.array([saved[r].reference is not None for r in rows])
    return _trimmed(session, take(rollout, rows), take(span, rows), problems, referenced, len(usable), len(saved))


def _ids(session: Run, saved: SavedRollout, number: int) -> tuple[list[int], list[int], bool]:
    """Encode a saved prompt and completion; also return whether the prompt's special tokens were restored.

    Raises:
        ConfigError: an id outside the policy's vocabulary, or more tokens than its positions.
        TextError: a text that its tokenizer cannot encode.
    """
    place, made = f"--rollouts: {saved.place or f'rollout {number}'}", saved.completion
    with errors_at(place):
        prompt, restored = _prompt_ids(session, saved)
        completion = encode(session.tokenizer, made) if isinstance(made, str) else made
    tokens, vocabulary = [*prompt, *completion], session.model.vocab_size
    foreign = next((i for i in tokens if not 0 <= i < vocabulary), None)
    if foreign is not None:
        raise ConfigError(
            f"{place}: id {foreign} is not the policy's, whose ids are 0 to {vocabulary - 1}; set policy.path to the "
            "policy that it was sampled from"
        )
    if len(tokens) > (most := session.model.max_position_embeddings):
        raise ConfigError(
            f"{place}: {len(tokens)} tokens, more than the policy's max_position_embeddings = {most}; leave this "
            "rollout out, or set policy.path to a policy with more"
        )
    return prompt, completion, restored


def _prompt_ids(session: Run, saved: SavedRollout) -> tuple[list[int], bool]:
    """Encode a saved prompt; also return whether its special tokens were restored."""
    data, tokenizer, prompt = session.cfg.data, session.tokenizer, saved.prompt
    if isinstance(prompt, str):
        if saved.rendered:
            return rendered_ids(tokenizer, prompt, session.table)
        settings = data.model_dump(include={"template", "system_prompt", "prompt_format", "thinking"})
        return render_prompt(tokenizer, prompt, **settings), False
    if isinstance(prompt[0], dict):
        switch = {} if data.thinking is None else {"enable_thinking": data.thinking}
        return chat_ids(tokenizer, prompt, **switch), False  # type: ignore[arg-type]
    return prompt, False  # type: ignore[return-value]


def usable_rows(span: AnswerSpan, *, shortest: int) -> np.ndarray:
    """Select the rows with an answer after at least ``shortest`` tokens of reasoning."""
    reasoning, answer = np.asarray(span.reasoning), np.asarray(span.answer)
    return np.flatnonzero(np.asarray(span.found) & answer.any(1) & (reasoning.sum(1) >= shortest))


def _nothing_to_compare(considered: int, shortest: int, style: str) -> str:
    return (
        f"lab: none of {considered} completions has an answer (credit.answer.style {style}) after at least {shortest} "
        "tokens of reasoning; set a trained policy, its answer style, a lower lab.shortest, or --rollouts"
    )


def _trimmed(
    session: Run,
    rollout: Rollout,
    span: AnswerSpan,
    problems: list[Problem],
    referenced: np.ndarray,
    answered: int,
    considered: int,
) -> Drawn:
    """Trim the positions that no completion reaches."""
    full = rollout.completion.shape[1]
    longest = int(np.asarray(rollout.completion).sum(1).max())
    length = bucket(longest, min(session.cfg.rollout.completion_bucket, 8), full)
    short, cut = trim(rollout, span, np.arange(len(problems)), length=length)
    return Drawn(short, cut, problems, referenced, answered, considered)


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """Return every completion's ids without padding."""
    made = np.asarray(rollout.completion)
    return [row[mask].tolist() for row, mask in zip(np.asarray(rollout.tokens)[:, -made.shape[1] :], made)]


def answer_given(session: Run, ids: Sequence[int]) -> str | None:
    """The answer that a completion gives, None where it gives none."""
    answer = session.cfg.credit.answer
    if answer.style == "none":
        return None
    try:
        return extract_answer(text_of(list(ids), session.table), style=answer.style, pattern=answer.pattern)
    except TimeoutError:
        return None
