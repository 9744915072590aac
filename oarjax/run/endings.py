"""Encode the reference answers that ``credit.answer.source: reference`` puts in place of a completion's own."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerFast

from oarjax.credit.answer_text import CUES
from oarjax.credit.settings import AnswerSettings
from oarjax.data.problems import Problem
from oarjax.data.tokenizer import encode
from oarjax.errors import ConfigError
from oarjax.step.spans import Ending


def reference_endings(
    answer: AnswerSettings, tokenizer: PreTrainedTokenizerFast, problems: Mapping[int, Problem]
) -> dict[int, Ending]:
    """Encode the cue and the reference answer of every problem, for ``credit.answer.source: reference``.

    Raises:
        ConfigError: the answer style has no cue, or a reference has no tokens.
    """
    cue = CUES.get(answer.style) if answer.cue is None else answer.cue
    if cue is None:
        raise ConfigError(f"credit.answer.cue: style {answer.style} has no default cue; set credit.answer.cue")
    cue_ids = encode(tokenizer, cue)
    endings = {i: (cue_ids, encode(tokenizer, problem.reference)) for i, problem in problems.items()}
    for i, (_, reference_ids) in endings.items():
        if not reference_ids:
            raise ConfigError(f"credit.answer.source: problem {i} has an empty reference answer; set source=own")
    return endings
