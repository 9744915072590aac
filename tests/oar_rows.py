"""Build small batches of answered completions for tests of the outcome probe and both kinds of attribution."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from oarjax.credit.clean_pass import linear_pass
from oarjax.credit.oar.oar_g import gradient_times_input
from oarjax.credit.probe import outcome_probe
from oarjax.types import AnswerSpan


class Row(NamedTuple):
    """Token ids in order: prompt | reasoning | cue (neither) | answer | rest."""

    prompt: tuple[int, ...]
    reasoning: tuple[int, ...]
    cue: tuple[int, ...]
    answer: tuple[int, ...]  # empty: no answer
    rest: tuple[int, ...] = ()

    @property
    def completion(self) -> tuple[int, ...]:
        return self.reasoning + self.cue + self.answer + self.rest


ROWS = (
    Row((3, 5, 4), (6, 9, 2, 11, 7), (12,), (8, 14)),
    Row((10, 2), (7, 13, 4), (12,), (15,), (1,)),
    Row((9, 9, 3, 16), (5, 6, 8, 10, 17, 3, 2), (12,), (18, 4, 6)),
    Row((2, 7, 5), (8, 3, 6, 4), (), ()),
)
PROMPT, LENGTH = 4, 12


def batch(rows=ROWS, *, prompt=PROMPT, length=LENGTH, pad=0):
    """Return tokens [B, prompt + length], valid and span; prompts padded on the left, completions on the right."""
    shape = (len(rows), prompt + length)
    tokens, valid = np.full(shape, pad, np.int32), np.zeros(shape, bool)
    reasoning, answer = np.zeros((2, len(rows), length), bool)
    for i, row in enumerate(rows):
        ids = row.prompt + row.completion
        start = prompt - len(row.prompt)
        tokens[i, start : start + len(ids)] = ids
        valid[i, start : start + len(ids)] = True
        reasoning[i, : len(row.reasoning)] = True
        at = len(row.reasoning) + len(row.cue)
        answer[i, at : at + len(row.answer)] = True
    span = AnswerSpan(jnp.asarray(reasoning), jnp.asarray(answer), jnp.asarray(answer.any(1)))
    return jnp.asarray(tokens), jnp.asarray(valid), span


def single(row):
    """Return a batch of one row without padding."""
    return batch([row], prompt=len(row.prompt), length=len(row.completion))


def noise_importance(policy, params, tokens, valid, span, noise, *, estimator, mode, temperature):
    """Compute OAR-G of a batch for some noise."""
    clean = linear_pass(policy, params, tokens, valid, completion_length=span.answer.shape[1])
    probe = outcome_probe(mode, temperature=temperature)
    return gradient_times_input(policy, params, clean, tokens, valid, span, noise, probe=probe, estimator=estimator)
