"""Completions that the credit lab compares methods on: sampled from the policy, or saved ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from oarjax.config.inputs import DataConfig
from oarjax.credit.answer_text import extract_answer
from oarjax.credit.settings import AnswerSettings
from oarjax.data.problems import Problem
from oarjax.data.streams import eval_batches, left_pad, right_pad
from oarjax.data.tokenizer import chat_ids, encode, errors_at, render_prompt, rendered_ids, text_of
from oarjax.errors import ConfigError
from oarjax.run.run import Run
from oarjax.step.minibatches import bucket, join, take, trim
from oarjax.tools.lab.programs import LabPrograms
from oarjax.tools.lab.saved_rollouts import SavedRollout
from oarjax.types import AnswerSpan, Rollout


@dataclass(frozen=True)
class Completions:
    """Completions to compare methods on, as numpy arrays, with their problems."""

    rollout: Rollout
    span: AnswerSpan
    problems: list[Problem]
    referenced: np.ndarray  # bool [R]: the reference answer is known
    answered: int  # usable completions among those considered; this record holds the first of them
    considered: int  # completions searched for an answer


def sample_completions(run: Run, programs: LabPrograms) -> Completions:
    """Sample ``lab.samples`` completions per problem of data.eval (else data.train), until enough have an answer.

    Raises:
        ConfigError: no completion has an answer after enough reasoning.
    """
    cfg = run.cfg
    source = run.train if run.held_out is None else run.held_out
    rollouts, spans, problems, considered = [], [], [], 0
    order = [row for row in range(len(source)) for _ in range(cfg.lab.samples)]
    padding = {"bucket": cfg.rollout.prompt_bucket, "pad_id": run.pad_id}
    batches = eval_batches(source, batch=cfg.eval.batch, **padding, order=order)
    for number, (prompts, batch_problems, real) in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(cfg.seed), number)
        rollout = run.fetch(programs.sample(run.place(prompts, "prompts"), key))
        span = run.find_answers(rollout)
        rows = usable_rows(span, shortest=cfg.lab.shortest)
        rows = rows[rows < real][: cfg.lab.problems - len(problems)]
        is_last = len(problems) + len(rows) == cfg.lab.problems
        considered += int(rows[-1]) + 1 if is_last else real
        rollouts.append(take(rollout, rows))
        spans.append(take(span, rows))
        problems += [batch_problems[row] for row in rows]
        if is_last:
            break
    if not problems:
        raise ConfigError(_nothing_to_compare(considered, cfg.lab.shortest, cfg.credit.answer.style))
    rollout = join(rollouts)
    span = jax.tree.map(lambda *parts: np.concatenate(parts), *spans)
    step = min(cfg.rollout.completion_bucket, 8)
    return _trimmed(step, rollout, span, problems, np.ones(len(problems), bool), len(problems), considered)


def saved_completions(run: Run, saved: Sequence[SavedRollout]) -> Completions:
    """Select the first ``lab.problems`` saved rollouts that have an answer. Rollouts of one prompt share a problem.

    Raises:
        ConfigError: no rollout has an answer after enough reasoning, or a rollout is longer than the policy allows.
    """
    cfg = run.cfg
    encoded = [_ids(run, s, number) for number, s in enumerate(saved, 1)]
    prompts, completions = [prompt for prompt, _, _ in encoded], [completion for _, completion, _ in encoded]
    restored = sum(is_restored for _, _, is_restored in encoded)
    if restored:
        run.console.print(
            f"the prompts of {restored} of {len(saved)} rollouts were saved without special tokens; they are restored "
            "from the chat template, which renders the same text",
            soft_wrap=True,
        )
    longest = max(map(len, completions))
    tokens, valid = left_pad(prompts, length=max(map(len, prompts)), pad_id=run.pad_id)
    completion_tokens, is_token = right_pad(completions, length=longest, pad_id=run.pad_id)
    zeros = np.zeros(is_token.shape, np.float32)
    rollout = Rollout(
        tokens=np.concatenate([tokens, completion_tokens], 1),  # type: ignore[arg-type]
        valid=np.concatenate([valid, is_token], 1),  # type: ignore[arg-type]
        completion=is_token,  # type: ignore[arg-type]
        behaviour_logps=zeros,  # type: ignore[arg-type]
        filtered_logps=zeros,  # type: ignore[arg-type]
        ended=np.ones(len(saved), bool),  # type: ignore[arg-type]
    )
    span = run.find_answers(rollout)
    usable = usable_rows(span, shortest=cfg.lab.shortest)
    rows = usable[: cfg.lab.problems]
    if len(rows) == 0:
        raise ConfigError(_nothing_to_compare(len(saved), cfg.lab.shortest, cfg.credit.answer.style))
    texts = [s.prompt if isinstance(s.prompt, str) else text_of(p, run.table) for s, p in zip(saved, prompts)]
    numbers: dict[tuple[int, ...], int] = {}  # of each distinct prompt
    indices = [numbers.setdefault(tuple(prompts[r]), len(numbers)) for r in rows]
    problems = [Problem(texts[r], saved[r].reference or "", index=n) for n, r in zip(indices, rows)]
    referenced = np.array([saved[r].reference is not None for r in rows])
    step = min(cfg.rollout.completion_bucket, 8)
    return _trimmed(step, take(rollout, rows), take(span, rows), problems, referenced, len(usable), len(saved))


def _ids(run: Run, saved: SavedRollout, number: int) -> tuple[list[int], list[int], bool]:
    """Encode a saved prompt and completion; also return whether the prompt's special tokens were restored.

    Raises:
        ConfigError: an id is outside the policy's vocabulary, or there are more tokens than its positions.
        TextError: the tokenizer cannot encode a text.
    """
    location, completion = f"--rollouts: {saved.place or f'rollout {number}'}", saved.completion
    with errors_at(location):
        prompt, restored = _prompt_ids(saved, run.cfg.data, run.tokenizer, run.table)
        completion = encode(run.tokenizer, completion) if isinstance(completion, str) else completion
    tokens, vocabulary = [*prompt, *completion], run.model.vocab_size
    foreign = next((i for i in tokens if not 0 <= i < vocabulary), None)
    if foreign is not None:
        raise ConfigError(
            f"{location}: expected the policy's token ids, 0 to {vocabulary - 1}, got {foreign}; set policy.path to "
            "the policy that this rollout was sampled from"
        )
    if len(tokens) > (limit := run.model.max_position_embeddings):
        raise ConfigError(
            f"{location}: expected at most {limit} tokens, the policy's max_position_embeddings, got {len(tokens)}; "
            "leave this rollout out, or set policy.path to a policy with more positions"
        )
    return prompt, completion, restored


def _prompt_ids(
    saved: SavedRollout, data: DataConfig, tokenizer: PreTrainedTokenizerFast, table: list[bytes]
) -> tuple[list[int], bool]:
    """Encode a saved prompt; also return whether its special tokens were restored."""
    prompt = saved.prompt
    if isinstance(prompt, str):
        if saved.rendered:
            return rendered_ids(tokenizer, prompt, table)
        settings = data.model_dump(include={"template", "system_prompt", "prompt_format", "thinking"})
        return render_prompt(tokenizer, prompt, **settings), False
    if isinstance(prompt[0], dict):
        switch = {} if data.thinking is None else {"enable_thinking": data.thinking}
        return chat_ids(tokenizer, prompt, **switch), False  # type: ignore[arg-type]
    return prompt, False  # type: ignore[return-value]


def usable_rows(span: AnswerSpan, *, shortest: int) -> np.ndarray:
    """Select the rows with an answer after at least ``shortest`` tokens of reasoning."""
    reasoning, answer = np.asarray(span.reasoning), np.asarray(span.answer)
    return np.flatnonzero(np.asarray(span.has_answer) & answer.any(1) & (reasoning.sum(1) >= shortest))


def _nothing_to_compare(considered: int, shortest: int, style: str) -> str:
    return (
        f"lab: none of {considered} completions has an answer (credit.answer.style {style}) after at least {shortest} "
        "tokens of reasoning; set a trained policy, its answer style or a lower lab.shortest, or pass --rollouts"
    )


def _trimmed(
    step: int,
    rollout: Rollout,
    span: AnswerSpan,
    problems: list[Problem],
    referenced: np.ndarray,
    answered: int,
    considered: int,
) -> Completions:
    """Trim the positions that no completion reaches."""
    full = rollout.completion.shape[1]
    longest = int(np.asarray(rollout.completion).sum(1).max())
    length = bucket(longest, step, full)
    short, cut = trim(rollout, span, np.arange(len(problems)), length=length)
    return Completions(short, cut, problems, referenced, answered, considered)


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """Return every completion's ids without padding."""
    is_token = np.asarray(rollout.completion)
    return [row[mask].tolist() for row, mask in zip(np.asarray(rollout.tokens)[:, -is_token.shape[1] :], is_token)]


def read_answer(answer: AnswerSettings, table: Sequence[bytes], ids: Sequence[int]) -> str | None:
    """Extract a completion's answer; None if it has none, or if extraction takes too long."""
    if answer.style == "none":
        return None
    try:
        return extract_answer(text_of(list(ids), table), style=answer.style, pattern=answer.pattern)
    except TimeoutError:
        return None
