"""maj@n: answers that the reward calls equal are one candidate."""

import numpy as np
from tiny import config

from oarjax.stats import majority_correct
from oarjax.training.votes import number_votes

NAN = float("nan")


def majority(answers, scores, reward="math"):
    scores = np.asarray(scores, float)
    votes = number_votes(answers, scores, config(grading__rewards=[{"name": reward}], grading__workers=1).grading)
    return votes.tolist(), majority_correct(votes, np.where(np.isnan(scores), NAN, scores >= 1)).tolist()


def test_equal_answers_in_other_words_vote_together():
    answers = [
        ["2", "1/2", "2", "0.5", r"\frac12"],  # three right ones in three forms against two equal texts
        ["1/3", r"\frac{1}{3}", "7", "7 eggs", "8"],  # two right, two wrong forms of 1/3
    ]
    votes, right = majority(answers, [[0, 1, 0, 1, 1], [0, 0, 1, 1, 0]])
    assert votes == [[0, 1, 0, 1, 1], [0, 0, 2, 2, 4]]
    assert right == [1, 0]  # by text it would be wrong in the first; of equals the first wins


def test_other_rewards_compare_texts():
    assert majority([["7", "7.0", "8"]], [[1, 1, 0]], "exact") == ([[0, 0, 2]], [1])
    assert majority([["7", "7.0", "8"]], [[1, 1, 0]], "format") == ([[0, 1, 2]], [1])


def test_ungraded_answers_keep_their_vote():
    votes, right = majority([[None, "7", "7.0"]], [[0, NAN, NAN]])
    assert votes == [[-1, 0, 0]]
    assert np.isnan(right[0])
