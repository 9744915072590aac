"""Signed values against forced branches: the figures by hand, and branches whose reward is known by their token."""

import numpy as np
import pytest

from oarjax.data.problems import Problem
from oarjax.tools.lab.completions import Completions
from oarjax.tools.lab.results import value_notes
from oarjax.tools.lab.values import ListedTokens, measure_values, value_figures
from oarjax.types import AnswerSpan, Rollout


def test_figures_by_hand():
    # Two rows with a place each. Row 0 lists two tokens; row 1 one, whose advantage is 0.
    v = np.array([[[0.8, 0.2, 9.0]], [[0.4, 9.0, 9.0]]])
    q = np.array([[[0.5, 0.2, 9.0]], [[0.1, 9.0, 9.0]]])
    pi = np.array([[[0.5, 0.25, 0.9]], [[0.3, 0.9, 0.9]]])
    listed = np.array([[[True, True, False]], [[True, False, False]]])
    drawn = np.array([[[True, False, True]], [[True, False, False]]])
    found = value_figures(v, q, pi, listed, drawn, continuations=36)
    # b = .6 and V = .4: (.2, -.4, 0) and (.1, -.2, 0) are proportional
    assert found["correlation"] == pytest.approx(1)
    assert found["sign"] == 1  # of -.2, which alone reaches 1 / 6
    assert found["bias_drawn"] == pytest.approx(0.3)  # .3 and .3
    assert found["bias_others"] == pytest.approx(0)
    noise = (0.25 + 0.16 + 0.09) / 3 / 35
    assert found["ceiling"] == pytest.approx((1 - noise / np.var([0.1, -0.2, 0.0])) ** 0.5)
    none = value_figures(v, q, pi, listed & False, drawn, continuations=36)
    assert all(np.isnan(x) for x in none.values())


def test_branches_are_decoded_from_the_forced_token_and_graded():
    """Token 5 earns 1 whatever follows. v says .9 and .3 of it and of token 4, but in the last row the reverse."""
    rows, length = 4, 6
    tokens = np.tile(np.arange(10, 10 + length, dtype=np.int32), (rows, 1))
    tokens[:, 2] = [4, 5, 4, 5]
    mask, zeros = np.ones(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
    prompt = np.full((rows, 2), 3, np.int32)
    rollout = Rollout(
        np.concatenate([prompt, tokens], 1), np.ones((rows, 8), bool), mask, zeros, zeros, np.ones(rows, bool)
    )
    problems = [Problem(str(r), "5", index=r) for r in range(rows)]
    completions = Completions(rollout, AnswerSpan(mask, mask, mask[:, 0]), problems, mask[:, 0], rows, rows)
    shape = (rows, 1, 2)
    v = np.tile([0.9, 0.3], (rows, 1, 1))
    v[3] = [[0.3, 0.9]]
    listed = ListedTokens(
        np.full(shape[:2], 2), np.tile([5, 4], (rows, 1, 1)), v, np.full(shape, 0.5), np.ones(shape, bool)
    )
    asked = []

    def decode(tokens, valid, branches, *, width, max_new):
        asked.append(len(branches.row))
        written = np.full((len(branches.row), max_new), 7, np.int32)
        nothing = np.zeros(written.shape, np.float32)
        return Rollout(written, written > 0, written > 0, nothing, nothing, np.zeros(len(written), bool))

    def rewards_of(numbers, ends):
        assert all(len(end.tokens) == length and end.tokens[3:] == [7] * 3 for end in ends)
        return np.array([float(end.tokens[2] == 5) for end in ends])

    sizes = {"continuations": 9, "branches": 24, "limit": length, "stop_ids": (1,)}
    found = measure_values(listed, completions, decode=decode, rewards_of=rewards_of, **sizes)
    assert asked == [24] * 3  # 4 rows x 2 tokens x 9 branches, 24 at a time
    assert found["correlation"].mean == pytest.approx(0.5)  # three rows agree, one is opposed
    assert found["sign"].mean == pytest.approx(0.75)
    assert found["ceiling"].mean == 1
    # v - Q of the drawn: .3, -.1, .3 and -.7
    assert found["bias_drawn"].mean == pytest.approx(-0.05)
    assert "correlation 0.50" in value_notes(found)[0]
