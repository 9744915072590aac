"""Filters against transformers' processors, the loss over the truncated support, penalties and stop strings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_policy import left_padded, toy_params, toy_policy

from oarjax.config.outputs import SAMPLING_PRESETS
from oarjax.evaluate.fields import drawing
from oarjax.rollout.filters import Filters, filter_logits, penalise_repeated, seen_tokens
from oarjax.rollout.logps import logits_logps, token_logps
from oarjax.rollout.sampler import Decoding, group_keys, sample
from oarjax.rollout.segments import SegmentedSampler
from oarjax.rollout.stop_strings import cut_text, stop_table
from oarjax.types import PromptBatch

SETTINGS = [
    *SAMPLING_PRESETS.values(),
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.6, "min_p": 0.2, "repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
]


def ours(logits, tokens, valid, *, temperature, repetition_penalty, **filters):
    seen = seen_tokens(tokens, valid, vocab=logits.shape[-1])
    penalised = penalise_repeated(logits, seen, penalty=repetition_penalty)
    return filter_logits(penalised / temperature, **filters)


@pytest.mark.parametrize("settings", SETTINGS)
def test_equal_to_transformers_processors(settings):
    torch = pytest.importorskip("torch", reason="torch is not installed (extra parity)")
    from transformers import generation as hf

    how = drawing(None, **settings)
    rng = np.random.default_rng(3)
    logits, tokens = rng.normal(size=(8, 400)).astype(np.float32) * 4, rng.integers(0, 400, (8, 30))
    chain = [hf.RepetitionPenaltyLogitsProcessor(how["repetition_penalty"])]
    chain += [hf.TemperatureLogitsWarper(how["temperature"])]
    chain += [hf.TopKLogitsWarper(how["top_k"])] if how["top_k"] else []
    chain += [hf.TopPLogitsWarper(how["top_p"])] if how["top_p"] < 1 else []
    chain += [hf.MinPLogitsWarper(how["min_p"])] if how["min_p"] else []
    theirs = hf.LogitsProcessorList(chain)(torch.tensor(tokens), torch.tensor(logits)).numpy()
    got = np.asarray(ours(jnp.asarray(logits), jnp.asarray(tokens), jnp.ones(tokens.shape, bool), **how))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(theirs))
    np.testing.assert_allclose(got, theirs, rtol=1e-6)


def test_min_p_and_penalty_by_hand():
    # probabilities 16/32, 8/32, 4/32, 2/32, 2/32: a quarter of the highest is 4/32
    logits = jnp.log(jnp.array([[2.0, 16, 4, 2, 8]]))
    kept = np.isfinite(filter_logits(logits, top_k=0, top_p=1.0, min_p=0.25 - 1e-6))[0]
    np.testing.assert_array_equal(kept, [False, True, True, False, True])
    seen = seen_tokens(jnp.array([[4, 1, 0]]), jnp.array([[True, True, False]]), vocab=5)
    np.testing.assert_array_equal(seen, [[False, True, False, False, True]])  # padding does not count
    np.testing.assert_allclose(
        penalise_repeated(jnp.array([[-1.0, -2, 3, 4, 5]]), seen, penalty=2.0), [[-1, -4, 3, 4, 2.5]]
    )
    for wrong, message in ((Filters(min_p=1.5), "min_p: expected a share"), (Filters(top_k=-1), "top_k: expected 0")):
        with pytest.raises(ValueError, match=message):
            wrong.check()


def test_log_probs_over_the_truncated_support():
    # top-2 of p = (1/2, 1/4, 1/8, 1/8) keeps 2/3 and 1/3; a token outside joins: 1/8 of 1/2 + 1/4 + 1/8
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]] * 3))
    logps, entropies = logits_logps(logits, jnp.array([0, 1, 2]), temperature=1.0, filters=Filters(top_k=2))
    np.testing.assert_allclose(np.exp(logps), [2 / 3, 1 / 3, 1 / 7], rtol=1e-6)
    np.testing.assert_allclose(entropies[0], -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3)), rtol=1e-6)
    # its gradient is that of a softmax over what is kept: 1 - p for the token, -p for the others, 0 outside
    slope = jax.grad(lambda x: logits_logps(x, jnp.array([0] * 3), temperature=1.0, filters=Filters(2))[0][0])(logits)
    np.testing.assert_allclose(slope[0], [1 / 3, -1 / 3, 0, 0], atol=1e-6)


@pytest.fixture(scope="module")
def toy():
    return toy_policy(), toy_params(jax.random.key(3), scale=0.7)


def prompts():
    tokens, valid = left_padded([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 4)
    return PromptBatch(tokens, valid, jnp.arange(3, dtype=jnp.int32))


BYTES = [b"", *[bytes([97 + n % 7]) for n in range(1, 11)], b"ab", *[b"ca" for _ in range(11)]]


@pytest.mark.slow
def test_filtered_log_probs_are_the_losses_and_strings_end_a_row(toy):
    """Both samplers; the sampler's own record equals the loss's log-probs over the support that was drawn from."""
    policy, params = toy
    table = stop_table(["bc", "gg"], BYTES)
    how = {"max_new": 12, "temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.02}
    how |= {"stop_ids": (3,), "pad_id": 0, "stop_table": table}
    plain = jax.jit(lambda p, b, k: sample(policy, p, b, k, group_size=4, **how))
    rollout = plain(params, prompts(), jax.random.key(1))
    draw = SegmentedSampler(policy, Decoding(**how), keys_of=partial(group_keys, group_size=4), group=4, segment=3)
    segmented = draw(params, prompts(), jax.random.key(1))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), rollout, segmented)
    made = rollout.completion
    for filters, recorded in ((None, rollout.behaviour_logps), (Filters(9, 0.95, 0.02), rollout.filtered_logps)):
        logps, _ = token_logps(
            policy,
            params,
            rollout.tokens,
            rollout.valid,
            completion_length=12,
            temperature=0.9,
            head_chunk=64,
            filters=filters,
        )
        np.testing.assert_allclose(jnp.where(made, logps, 0), recorded, atol=1e-5)
    ended_by = set()
    for row in range(12):
        ids = np.asarray(rollout.tokens[row, -12:])[np.asarray(made[row])]
        text = b"".join(BYTES[i] for i in ids).decode()
        before = b"".join(BYTES[i] for i in ids[:-1]).decode()
        assert not any(stop in before for stop in ("bc", "gg"))
        found = any(stop in text for stop in ("bc", "gg"))
        assert bool(rollout.ended[row]) == (found or ids[-1] == 3)
        ended_by.add((found, bool(ids[-1] == 3), len(ids) == 12))
    assert len(ended_by) > 1
    assert any(found for found, *_ in ended_by)


@pytest.mark.slow
def test_a_penalty_makes_greedy_decoding_move_on(toy):
    policy, params = toy
    how = {"max_new": 8, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "stop_ids": (), "pad_id": 0}
    how |= {"repetition_penalty": 1e6}
    rollout = jax.jit(lambda p, b, k: sample(policy, p, b, k, group_size=1, **how))(
        params, prompts(), jax.random.key(0)
    )
    draw = SegmentedSampler(policy, Decoding(**how), keys_of=partial(group_keys, group_size=1), group=1, segment=3)
    segmented = draw(params, prompts(), jax.random.key(0))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), rollout, segmented)
    for row in range(3):
        ids = np.asarray(rollout.tokens[row])[np.asarray(rollout.valid[row])].tolist()
        assert len(set(ids)) == len(ids)  # nothing of prompt and completion comes twice
    score = partial(token_logps, completion_length=8, temperature=1.0, head_chunk=64)
    logps, _ = score(policy, params, rollout.tokens, rollout.valid)
    np.testing.assert_allclose(rollout.behaviour_logps, logps, atol=1e-5)  # without the penalty
    assert (np.asarray(rollout.filtered_logps) != np.asarray(rollout.behaviour_logps)).any()


# --- Stop strings ---------------------------------------------------------------------------------------------------


def final_state(table, ids):
    state = 0
    for token in ids:
        state = int(table[state, token])
    return state == len(table) - 1


def test_stop_strings_wherever_they_lie():
    """Against searching the text: random tokens of one to three letters, strings that overlap or hold each other."""
    rng = np.random.default_rng(0)
    pieces = [b"", *["".join(rng.choice(list("abc"), rng.integers(1, 4))).encode() for _ in range(30)], "é".encode()]
    for strings in (["abab"], ["aba", "bb", "babc"], ["a"], ["ca", "cab"], ["aé"]):
        table = stop_table(strings, pieces)
        assert table is not None
        for _ in range(60):
            ids = rng.integers(0, len(pieces), rng.integers(0, 6)).tolist()
            text = b"".join(pieces[i] for i in ids).decode()
            assert final_state(table, ids) == any(string in text for string in strings), (strings, text)


def test_texts_are_cut_before_the_first_string():
    assert cut_text("one\n\nQuestion: two###", ["###", "\n\nQuestion:"]) == "one"
    assert cut_text("one", ["###"]) == "one"
    assert cut_text("one", []) == "one"
    assert stop_table([], [b"a"]) is None
    with pytest.raises(ValueError, match="an empty string would end every completion"):
        stop_table([""], [b"a"])
    with pytest.raises(ValueError, match="at most 511 fit; shorten them"):
        stop_table(["x" * 600], [b"a"])


def test_presets_give_way_to_what_is_asked_for():
    assert drawing("qwen2.5", temperature=0.1, top_k=None) == {
        "temperature": 0.1, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert drawing("qwen3-thinking")["top_p"] == 0.95
