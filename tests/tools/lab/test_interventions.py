"""The two oracles on a policy whose deciding tokens are known, and against one forward or decoding per token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_policy import toy_params, toy_policy

from oarjax.models.policy import Policy, positions_of
from oarjax.rollout.sampler import sample
from oarjax.tools.lab.interventions import Branches, answer_choice_changes, branch_prompts, choices
from oarjax.tools.lab.oracles import Branch, Continuation, decode_branches, direct_flips, total_flips
from oarjax.types import AnswerSpan, KVCache, Rollout

V, STOP = 10, 0


def chain_policy() -> Policy:
    """Each token has a usual follower and a second one; after the marker 4 the answer is 8 where a 7 was seen, else 6.

    1 -> 2 (9)   2 -> 7 (5)   7 -> 3 (9)   5 -> 3   9 -> 5   3 -> 4 (9)   4 -> 6, or 8 after a 7   6, 8 -> stop
    """
    table = np.zeros((V, V), np.float32)
    for token, follower, second in [(1, 2, 9), (2, 7, 5), (7, 3, 9), (5, 3, 9), (9, 5, 2), (3, 4, 9), (4, 6, 1)]:
        table[token, follower], table[token, second] = 2, 1
    table[[6, 8], STOP] = 2
    table = jnp.asarray(table)

    def embed(params, tokens):
        return jnp.pad(jax.nn.one_hot(tokens, V), ((0, 0), (0, 0), (0, V)))

    def trunk(params, embeddings, positions, valid, *, cache=None, prefix=None):
        one_hot = embeddings[..., :V] * valid[..., None]
        seen = jnp.cumsum(one_hot, axis=1)
        if prefix is not None:
            before = (prefix.k[0, :, :, 0] * prefix.valid[..., None]).sum(1)
            seen += jnp.repeat(before, len(seen) // len(before), axis=0)[:, None]
        if cache is not None:
            seen += (cache.k[0, :, :, 0] * cache.valid[..., None]).sum(1)[:, None]
            at, o = cache.length, jnp.zeros_like(cache.length)
            k = jax.lax.dynamic_update_slice(cache.k, one_hot[None, :, :, None], (o, o, at, o, o))
            slots = jax.lax.dynamic_update_slice(cache.valid, valid, (o, at))
            cache = KVCache(k, k, slots, at + valid.shape[1])
        return jnp.concatenate([seen, embeddings[..., :V]], axis=-1), cache

    def unembed(params, hidden):
        seen, last = hidden[..., :V], hidden[..., V:]
        bonus = 5 * jnp.minimum(seen[..., 7], 1) * last[..., 4]
        return last @ table + bonus[..., None] * jax.nn.one_hot(8, V)

    def init_cache(rows, slots):
        empty = jnp.zeros((1, rows, slots, 1, V))
        return KVCache(empty, empty, jnp.zeros((rows, slots), bool), jnp.zeros((), jnp.int32))

    return Policy(embed, trunk, unembed, init_cache)


def rollout_of(prompts, completions, *, width, length, ended=True) -> Rollout:
    tokens, valid = np.zeros((len(prompts), width + length), np.int32), np.zeros((len(prompts), width + length), bool)
    for row, (p, c) in enumerate(zip(prompts, completions)):
        tokens[row, width - len(p) : width + len(c)] = [*p, *c]
        valid[row, width - len(p) : width + len(c)] = True
    zeros = np.zeros((len(prompts), length), np.float32)
    return Rollout(tokens, valid, valid[:, width:], zeros, zeros, np.full(len(prompts), ended))


def programs(policy, params, *, length, stop_ids=(STOP,)):
    """(decode, changes, choices of a rollout) as the command builds them."""

    @functools.partial(jax.jit, static_argnames=("width", "max_new"))
    def decode(tokens, valid, branches, *, width, max_new):
        prompts = branch_prompts(tokens, valid, branches, completion_length=length, width=width)
        return sample(
            policy, params, prompts, jax.random.key(0), group_size=1, max_new=max_new, temperature=0.0, top_k=0,
            top_p=1.0, stop_ids=stop_ids, pad_id=0,
        )  # fmt: skip

    @jax.jit
    def changes(r, reasoning, answer, other):
        return answer_choice_changes(policy, params, r.tokens, r.valid, reasoning, answer, other, chunk=2, buckets=3)

    def choose(r):
        return choices(policy, params, jnp.asarray(r.tokens), jnp.asarray(r.valid), completion_length=length)

    return decode, changes, jax.jit(choose)


def span_of(completions, length, *, marker=4) -> AnswerSpan:
    """What comes before the last marker reasons; the token after it is the answer."""
    reasoning, answer = np.zeros((2, len(completions), length), bool)
    for row, ids in enumerate(completions):
        at = len(ids) - 1 - ids[::-1].index(marker)
        reasoning[row, :at], answer[row, at + 1] = True, True
    return AnswerSpan(reasoning, answer, answer.any(1))


def answer_of(ids):
    return str(ids[ids.index(4) + 1]) if 4 in ids[:-1] else None


def rewards_of(rows, found):
    return np.array([float(answer_of(c.tokens) == "8") for c in found], np.float32)


COMPLETIONS = [[2, 7, 3, 4, 8, STOP], [9, 5, 3, 4, 6, STOP]]
"""From prompt 1: the policy's own greedy completion, and one that begins with its second choice."""


@functools.cache
def chain_programs():
    """Compiled once for all tests: every completion has room for 7 tokens."""
    return programs(chain_policy(), {}, length=7)


def both(completions, rewards, *, batch=2, rows=3):
    length = 7
    rollout, span = rollout_of([[3, 1], [1]], completions, width=3, length=length), span_of(completions, length)
    decode, changes, choose = chain_programs()
    choice = choose(rollout)
    direct = direct_flips(
        decode, changes, rollout, span, choice, answer_of=answer_of, answer_tokens=3, batch=batch, rows=rows, pad_id=0
    )
    total = total_flips(
        decode, rollout, span, choice, np.asarray(rewards, np.float32), rewards_of=rewards_of, limit=length,
        rows=rows, stop_ids=(STOP,),
    )  # fmt: skip
    return choice, direct, total


def test_choices_are_the_first_and_the_next():
    choice, _, _ = both(COMPLETIONS, [1, 0])
    assert choice.first[0, :6].tolist() == [2, 7, 3, 4, 8, STOP]
    assert choice.other[0, :4].tolist() == [9, 5, 9, 9]
    assert choice.first[1, :3].tolist() == [2, 5, 3]
    assert choice.other[1, :3].tolist() == [2, 2, 9]  # where the completion has another token, the first choice


@pytest.mark.parametrize(("batch", "rows"), [(2, 3), (5, 16)])
def test_the_deciding_tokens_are_found(batch, rows):
    """Row 0, 2 7 3: only the 7 decides the answer given the rest; but without the 2, no 7 is written.

    Row 1, 9 5 3: no single change of the rest puts a 7 in. With the 2 instead of the 9 the policy goes on 7 3 4 8; with
    2 instead of the 5 as well; 9 instead of the 3 leads to 5 3 4 6.
    """
    _, direct, total = both(COMPLETIONS, [1, 0], batch=batch, rows=rows)
    assert direct.flips[:, :3].tolist() == [[False, True, False], [False, False, False]]
    assert total.flips[:, :3].tolist() == [[True, True, False], [True, True, False]]
    assert not direct.flips[:, 3:].any()
    assert not total.flips[:, 3:].any()
    assert direct.usable.all()
    assert total.usable.all()
    assert direct.decoded == 1, "only the change that moves a greedy choice is decoded"


def test_the_unchanged_text_is_continued_greedily_too():
    """2 5 3 4 6 was drawn, not greedy: without its 5 the policy writes 2 7 3 4 8. So for token 2 the comparison is
    2 | 7 3 4 8 (reward 1) against 9 | 5 3 4 6 (reward 0): a flip, though the drawn completion itself got 0 as well.
    """
    completions = [[2, 5, 3, 4, 6, STOP], COMPLETIONS[1]]
    _, _, total = both(completions, [0, 0])
    assert total.flips[0, :3].tolist() == [True, True, False]
    assert total.decoded == 6 + 1  # three changes in each row, and one continuation of unchanged text


def test_unknown_rewards_leave_the_row_out():
    _, _, total = both(COMPLETIONS, [np.nan, 0])
    assert total.usable.tolist() == [False, True]
    assert not total.flips[0].any()


def test_a_row_without_a_clean_answer_is_not_usable():
    rollout, span = rollout_of([[1]], [[2, 7, 3, 4, 8]], width=3, length=7), span_of([[2, 7, 3, 4, 8]], 7)
    decode, changes, choose = chain_programs()
    found = direct_flips(
        decode, changes, rollout, span, choose(rollout), answer_of=lambda ids: None, answer_tokens=2, batch=1, rows=2,
        pad_id=0,
    )  # fmt: skip
    assert found.usable.tolist() == [False]
    assert not found.flips.any()


def test_a_change_to_the_stop_token_ends_the_text():
    decode, _, _ = chain_programs()
    rollout = rollout_of([[1]], [COMPLETIONS[0]], width=3, length=7)
    found = decode_branches(
        decode, rollout, [Branch(0, 2, 1, STOP, 4), Branch(0, 2, 1, 5, 1)], rows=2, stop_ids=(STOP,)
    )
    assert found == [Continuation([2, STOP], True), Continuation([2, 5, 3], False)]


def test_branches_are_moved_to_the_right_edge():
    tokens = jnp.array([[0, 11, 12, 21, 22, 23, 24], [13, 14, 15, 31, 32, 0, 0]])
    valid = jnp.array([[False, *[True] * 6], [*[True] * 5, False, False]])
    branches = Branches(*(jnp.array(x) for x in ([0, 1, 0], [2, 1, 4], [1, -1, 0], [99, 99, 98])))
    found = branch_prompts(tokens, valid, branches, completion_length=4, width=6)
    seen = [[int(t) for t, v in zip(*row) if v] for row in zip(found.tokens, found.valid)]
    assert seen == [[11, 12, 21, 99], [13, 14, 15, 31], [11, 12, 98, 22, 23, 24]]
    assert found.valid[:, -1].all()
    assert found.problem.tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match=r"expected a width in 1\.\.7, the rollout's, got 8"):
        branch_prompts(tokens, valid, branches, completion_length=4, width=8)


def test_screening_equals_one_forward_per_change():
    """Random attention policy: a change departs where, written out in ids, some greedy choice of the answer differs."""
    policy, params = toy_policy(), toy_params(jax.random.key(5), scale=2.0)
    rollout = rollout_of([[3, 5], [7]], [[4, 9, 2, 11, 6, 8, 1, 3], [12, 4, 5, 1, 9]], width=2, length=9)
    reasoning, answer = np.zeros((2, 2, 9), bool)
    reasoning[0, :5], reasoning[1, :3], answer[0, 6:8], answer[1, 4] = True, True, True, True
    _, _, choose = programs(policy, params, length=9)
    other = np.asarray(choose(rollout).other)

    @jax.jit
    def predicted(ids):
        valid = jnp.ones(ids.shape, bool)
        hidden, _ = policy.trunk(params, policy.embed(params, ids), positions_of(valid), valid)
        return policy.unembed(params, hidden).argmax(-1)

    # The answers must be the policy's own: two rounds, as a later choice depends on an earlier one.
    for _ in range(2):
        for row in range(2):
            ids = np.asarray(predicted(jnp.asarray(rollout.tokens[row, rollout.valid[row]])[None]))[0]
            at = np.flatnonzero(answer[row])
            rollout.tokens[row, 2 + at] = ids[rollout.valid[row, :2].sum() + at - 1]
    found = answer_choice_changes(
        policy, params, jnp.asarray(rollout.tokens), jnp.asarray(rollout.valid), jnp.asarray(reasoning),
        jnp.asarray(answer), jnp.asarray(other), chunk=2, buckets=3,
    )  # fmt: skip
    expected = np.zeros(reasoning.shape, bool)
    for row, t in np.argwhere(reasoning):
        ids = rollout.tokens[row].copy()
        ids[2 + t] = other[row, t]
        ids = ids[rollout.valid[row]]
        at = np.flatnonzero(answer[row]) + rollout.valid[row, :2].sum()
        expected[row, t] = (np.asarray(predicted(jnp.asarray(ids)[None]))[0, at - 1] != ids[at]).any()
    np.testing.assert_array_equal(found, expected)
    assert 0 < expected.sum() < reasoning.sum()
