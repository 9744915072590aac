"""Rows are taken apart into turns and laid out again as arrays, with holes that the policy did not write."""

import jax
import numpy as np
import pytest
import tiny

from oarjax.rollout.source import Batch, RowId, SamplerSource, Turn, rollout_of, turns_of
from oarjax.types import PromptBatch

PROMPTS = PromptBatch(np.array([[9, 1, 2]], np.int32), np.array([[False, True, True]]), np.array([4], np.int32))  # type: ignore
BATCH = Batch(PROMPTS, jax.random.key(3), iteration=5, attempt=1, group_size=2, max_new=6)


def turn(request, tokens, *, finish="stop", version=4):
    logps = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return request, Turn(request.id, np.array(tokens, np.int32), logps, np.full(len(tokens), version, np.int32), finish)  # pyright: ignore[reportArgumentType]


def later(request, tokens, number):
    """A further turn of a row, whose ids so far are ``tokens``."""
    return request._replace(id=request.id._replace(turn=number), tokens=np.array(tokens, np.int32))


def test_a_request_per_row_names_it():
    requests = BATCH.requests
    assert [r.id for r in requests] == [RowId(5, 1, 0, 0), RowId(5, 1, 1, 0)]
    assert all(r.tokens.tolist() == [1, 2] and r.prompt_length == 2 and r.max_new == 6 for r in requests)
    assert requests[0].key == tuple(np.asarray(jax.random.key_data(BATCH.key)).tolist())


def test_turns_leave_holes_where_another_wrote():
    one, two = BATCH.requests
    drawn = [turn(one, [5, 6], version=3), turn(two, [5], finish="length")]
    drawn.append(turn(later(one, [1, 2, 5, 6, 30, 31], 1), [7]))
    rollout = rollout_of(BATCH, drawn, pad_id=0)
    assert rollout.tokens[0].tolist() == [9, 1, 2, 5, 6, 30, 31, 7, 0]
    assert rollout.completion[0].tolist() == [True, True, False, False, True, False]
    assert rollout.extent[0].tolist() == [True] * 5 + [False]
    assert rollout.filtered_logps[0].tolist() == [-1, -2, 0, 0, -1, 0]
    assert rollout.ended.tolist() == [True, False]
    assert rollout.origin is not None
    assert rollout.origin.turns[0].tolist() == [0, 0, 1, 1, 1, 0]
    assert rollout.origin.versions.tolist() == [[3, 3, -1, -1, 4, -1], [4, -1, -1, -1, -1, -1]]
    assert rollout.origin.episode.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1, 2, 5, 9, 30], "continue"), ([1, 2, 5], "continue"), ([1, 2, 5, 6, 30, 31, 32, 33], "room for 6")],
)
def test_ids_are_only_appended(tokens, message):
    one, two = BATCH.requests
    with pytest.raises(ValueError, match=message):
        rollout_of(BATCH, [turn(one, [5, 6]), turn(two, [5]), turn(later(one, tokens, 1), [7])], pad_id=0)


def test_every_row_has_a_turn():
    with pytest.raises(ValueError, match=r"rows \[1\] of 2"):
        rollout_of(BATCH, [turn(BATCH.requests[0], [5])], pad_id=0)


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_samplers_rollouts_come_back_bit_for_bit(top_k):
    cfg = tiny.config(rollout__top_k=top_k)
    _, steps, state = tiny.build(cfg)
    prompts, key = tiny.prompts(), jax.random.key(1)
    direct = jax.device_get(steps.sample(state.params, prompts, key))
    batch = Batch(prompts, key, 1, 0, cfg.rollout.group_size, cfg.rollout.max_new)
    source = SamplerSource(steps.sample, steps.decoding, steps.rollout_params, lambda prompts: prompts, jax.device_get)
    source.sync(state.params, 0)
    laid = rollout_of(batch, list(zip(batch.requests, source.draw(batch))), pad_id=steps.pad_id)
    for name in ("tokens", "valid", "completion", "behaviour_logps", "filtered_logps", "ended"):
        ours, theirs = getattr(laid, name), getattr(direct, name)
        assert ours.dtype == theirs.dtype, name
        assert np.array_equal(ours, theirs), name
    assert (turns_of(batch, direct, version=0)[0].whole_logps is None) == (top_k == 0)
