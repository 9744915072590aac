from dataclasses import replace

import jax
import numpy as np
import pytest
import unsound

from oarjax.step.minibatches import (
    Bucket,
    MinibatchPlan,
    Piece,
    bucket,
    completion_buckets,
    cut,
    informative_first,
    join,
    join_grades,
    padded,
    padding_share,
    prompt_buckets,
    sizes_of,
    take,
    trim,
    trim_evidence,
    widen,
)
from oarjax.types import AnswerSpan, Grades, Rollout


def rollout(prompt: int, lengths: list[int], room: int, first: int = 0) -> Rollout:
    """Rows whose tokens are 100 * row + position, one prompt token less than there is room for."""
    rows = np.arange(first, first + len(lengths))
    completion = np.arange(room) < np.array(lengths)[:, None]
    valid = np.concatenate([np.arange(prompt) > 0, np.ones(room, bool)])[None].repeat(len(lengths), 0)
    valid[:, prompt:] = completion
    return Rollout(
        tokens=(100 * rows[:, None] + np.arange(prompt + room)).astype(np.int32),
        valid=valid,
        completion=completion,
        behaviour_logps=-completion.astype(np.float32),
        filtered_logps=-completion.astype(np.float32),
        ended=np.array(lengths) < room,
    )


def span_of(r: Rollout) -> AnswerSpan:
    return AnswerSpan(reasoning=r.completion, answer=np.zeros_like(r.completion), has_answer=r.completion.any(1))


def test_bucket_rounds_up_to_the_step_and_stops_at_the_limit():
    assert [bucket(n, 16, 40) for n in (0, 1, 16, 17, 33, 40)] == [16, 16, 16, 32, 40, 40]


def test_buckets_are_few_and_end_with_the_limit():
    assert prompt_buckets(64, 512) == [64, 128, 192, 256, 384, 512]
    assert prompt_buckets(256, 8192) == [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert completion_buckets(8, 180) == [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 180]
    for sizes in (prompt_buckets, completion_buckets):
        assert sizes(48, 48) == [48]
        assert sizes(64, 10) == [10]
        assert sizes(16, 40) == [16, 32, 40]
    assert padded([1, 64, 65, 300, 512], prompt_buckets(64, 512)).tolist() == [64, 64, 128, 384, 512]


def test_a_row_reaches_as_far_as_its_ids_not_as_its_trained_tokens():
    r = rollout(3, [8, 2], room=8)
    r.completion[0, 1:5] = False  # written by an environment
    np.testing.assert_array_equal(sizes_of(r, prompt_bucket=2, completion_bucket=2), [[2, 8], [2, 2]])
    r.completion[0] = np.arange(8) < 1
    with pytest.raises(ValueError, match="reach 8 tokens, more than 4"):
        trim(r, span_of(r), np.array([0]), length=4)


def test_rows_are_sorted_into_microbatches_by_length_and_never_across_minibatches():
    # prompts of 2 of 3 tokens; completions of 1 .. 8 tokens have buckets 2, 2, 4, 4, 6, 6, 8, 8
    r = rollout(3, [8, 1, 7, 2, 3, 6, 4, 5], room=8)
    sizes = sizes_of(r, prompt_bucket=2, completion_bucket=2)
    np.testing.assert_array_equal(sizes, [[2, n] for n in (8, 2, 8, 2, 4, 6, 4, 6)])
    plan = MinibatchPlan(np.arange(8), 2, 2, 8, sizes)
    assert [rows.tolist() for rows in plan.chosen] == [[4, 6, 0, 2], [1, 3, 5, 7]]
    assert plan.pieces == [
        (Piece(Bucket(2, 4), 0, 1), Piece(Bucket(2, 8), 1, 2)),
        (Piece(Bucket(2, 2), 0, 1), Piece(Bucket(2, 6), 1, 2)),
    ]
    # 2 x 2 rows of 2 + 4, 2 + 8; 2 x 2 rows of 2 + 2, 2 + 6. Real: 2 tokens of each prompt and 36 of completions
    assert padding_share(plan, r, [1, 1]) == pytest.approx(1 - (16 + 36) / (2 * (6 + 10 + 4 + 8)))
    assert padding_share(plan, r, [3, 0]) == pytest.approx(1 - (8 + 22) / (2 * (6 + 10)))
    together = MinibatchPlan(np.arange(8), 1, 4, 8, np.full((8, 2), 5))
    assert together.pieces == [(Piece(Bucket(5, 5), 0, 2),)]
    assert MinibatchPlan(np.arange(0), 1, 4, 8, sizes).pieces == [(Piece(Bucket(2, 2), 0, 0),)]
    assert MinibatchPlan(np.arange(5), 1, 4, 8).pieces == [(Piece(None, 0, 2),)]


def test_a_cut_microbatch_keeps_the_end_of_the_prompt_and_the_start_of_the_completion():
    r = widen(rollout(3, [2, 1], room=6), 5)
    assert r.tokens.shape == (2, 11)
    short = cut(r, Bucket(2, 4), length=6)
    np.testing.assert_array_equal(short.tokens[0], [1, 2, 3, 4, 5, 6])
    assert short.valid[0].tolist() == [True] * 4 + [False] * 2
    assert short.completion.shape == (2, 4)
    assert short.ended.shape == (2,)
    # what is measured on other completions keeps its two positions more
    longer = cut(rollout(3, [2, 1], room=8), Bucket(2, 4), length=6, room=2)
    assert longer.tokens.shape == (2, 8)
    assert longer.completion.shape == (2, 6)
    assert cut(r, None, length=6) is r


def test_a_kept_batch_loses_the_columns_that_no_row_fills():
    full = unsound.evidence()
    flat = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), full.rollout)
    wide = widen(flat, 9)
    rollout = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), wide)
    kept = trim_evidence(replace(full, rollout=rollout))
    jax.tree.map(np.testing.assert_array_equal, kept, full)


def test_trim_keeps_every_generated_token():
    r = rollout(3, [2, 4], room=6)
    short, span = trim(r, span_of(r), np.arange(2), length=4)
    assert short.tokens.shape == (2, 7)
    assert short.completion.sum() == r.completion.sum()
    np.testing.assert_array_equal(span.reasoning, r.completion[:, :4])
    np.testing.assert_array_equal(short.behaviour_logps, r.behaviour_logps[:, :4])
    np.testing.assert_array_equal(short.tokens, r.tokens[:, :7])


def test_trim_refuses_to_cut_a_completion():
    r = rollout(3, [2, 5], room=6)
    with pytest.raises(ValueError, match="completions reach 5 tokens, more than 4"):
        trim(r, span_of(r), np.arange(2), length=4)
    short, _ = trim(r, span_of(r), np.array([0]), length=4)  # the long row is left out anyway
    assert short.completion[0].sum() == 2


def test_join_left_pads_the_shorter_prompts():
    both = join([rollout(2, [1, 2], room=3), rollout(4, [3, 3], room=3, first=2)])
    assert both.tokens.shape == (4, 7)
    assert not both.valid[:2, :3].any()  # two columns of padding and the unused prompt slot
    np.testing.assert_array_equal(both.tokens[0, 2:], np.arange(5))
    np.testing.assert_array_equal(both.completion.sum(1), [1, 2, 3, 3])


def test_split_rows_come_back_in_their_places():
    # 5 of 8 rows to 2 minibatches of 2 microbatches of 2: rows 0, 4, 7 to the first and 2, 5 to the second
    plan = MinibatchPlan(np.array([0, 2, 4, 5, 7]), minibatches=2, microbatch=2, capacity=8)
    minibatches = plan.split(np.arange(10, 18))
    np.testing.assert_array_equal(minibatches[0], [[10, 14], [17, 0]])
    np.testing.assert_array_equal(minibatches[1], [[12, 15], [0, 0]])
    assert [int(n) for n in plan.used] == [2, 1]
    values = [np.stack([x, x], -1) for x in minibatches]
    back = plan.collect(values, np.full((8, 3), -1))
    np.testing.assert_array_equal(back[:, 0], [10, -1, 12, -1, 14, 15, -1, 17])
    assert (back[:, 2] == -1).all()  # columns that were trimmed away stay


def test_an_empty_plan_has_shapes_and_no_work():
    plan = MinibatchPlan(np.array([], int), minibatches=1, microbatch=4, capacity=8)
    (minibatch,) = plan.split({"x": np.ones((8, 5), bool)})
    assert minibatch["x"].shape == (2, 4, 5)
    assert not minibatch["x"].any()
    assert plan.used[0] == 0


def test_a_capacity_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="8 rows do not divide into 1 minibatches of microbatches of 3 rows"):
        MinibatchPlan(np.arange(8), 1, 3, 8).split(np.arange(8))
    with pytest.raises(ValueError, match="9 rows chosen, room for 8"):
        MinibatchPlan(np.arange(9), 1, 4, 8).split(np.arange(9))


def test_refilling_keeps_informative_groups_in_drawing_order():
    # groups 1 and 2 are constant; three groups wanted: 0, 3, 4
    rows = informative_first(np.array([False, True, True, False, False]), prompts=3, group_size=2)
    np.testing.assert_array_equal(rows, [0, 1, 6, 7, 8, 9])
    # too few informative ones: the first constant one fills up
    rows = informative_first(np.array([True, True, False]), prompts=2, group_size=2)
    np.testing.assert_array_equal(rows, [0, 1, 4, 5])


def test_grades_are_joined_and_chosen_alike():
    a = Grades(np.float32([1, 0]), {"math": np.float32([1, 0])}, ["graded", "graded"], ["1", "2"], ["", ""])
    b = Grades(
        np.float32([np.nan, 1]), {"math": np.float32([np.nan, 1])}, ["timeout", "graded"], [None, "4"], ["x", ""]
    )
    both = join_grades([a, b], np.array([2, 0]))
    np.testing.assert_array_equal(both.rewards, np.float32([np.nan, 1]))
    np.testing.assert_array_equal(both.per_reward["math"], both.rewards)
    assert (both.verdicts, both.answers, both.notes) == (["timeout", "graded"], [None, "1"], ["x", ""])


def test_take_picks_rows_of_a_tree():
    assert take({"a": np.arange(4)}, np.array([3, 1]))["a"].tolist() == [3, 1]
