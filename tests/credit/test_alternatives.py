"""The alternatives to OAR one by one, each worked by hand. What all must keep is in test_credit_contract.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.credit.controls.permuted import permuted_weights
from oarjax.credit.controls.random_scores import random_scores
from oarjax.credit.diagnose import ess_ratio
from oarjax.credit.gate import polarised, reweighted_rows
from oarjax.credit.groups import peer_sum, peers_of
from oarjax.credit.method import weigh_uniform
from oarjax.credit.methods.entropy_top import entropy_top_weights, selected
from oarjax.credit.methods.grail import grail_weights, log_zscores
from oarjax.credit.methods.keywords import NONE, keyword_table, keyword_tokens, keyword_weights
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, Signals, required
from oarjax.data.tokenizer import encode as tokenizer_encode
from oarjax.data.tokenizer import load_tokenizer, token_bytes
from oarjax.types import AnswerSpan

RNG = np.random.default_rng(0)
WEIGHTS = jnp.asarray(RNG.lognormal(size=(5, 16)), jnp.float32)
REASONING = jnp.asarray(RNG.random((5, 16)) < 0.6).at[4].set(False)


def test_uniform():
    inputs = CreditInputs(
        Signals(), AnswerSpan(REASONING, ~REASONING, jnp.ones(5, bool)), jnp.ones(5), REASONING, jax.random.key(0)
    )
    np.testing.assert_array_equal(weigh_uniform(inputs, Context(CreditSettings())), np.ones((5, 16)))


# Permuted, random


def test_permuted_keeps_the_histogram_and_the_other_tokens():
    shuffled = permuted_weights(WEIGHTS, REASONING, jax.random.key(3), jnp.arange(5))
    for old, new, mask in zip(WEIGHTS, shuffled, REASONING):
        np.testing.assert_array_equal(np.sort(old[mask]), np.sort(new[mask]))
        np.testing.assert_array_equal(old[~mask], new[~mask])
    assert (np.asarray(shuffled) != np.asarray(WEIGHTS)).sum() > 10
    np.testing.assert_allclose(ess_ratio(shuffled, REASONING)[:4], ess_ratio(WEIGHTS, REASONING)[:4], rtol=1e-6)


def test_permuted_depends_on_the_key_and_the_row():
    same = jnp.tile(jnp.arange(16.0), (5, 1))
    everywhere = jnp.ones((5, 16), bool)
    one, two = (permuted_weights(same, everywhere, jax.random.key(k), jnp.arange(5)) for k in (0, 1))
    assert (one != two).any()
    assert len({tuple(row) for row in np.asarray(one)}) == 5
    np.testing.assert_array_equal(one, permuted_weights(same, everywhere, jax.random.key(0), jnp.arange(5)))


def test_padding_changes_nothing():
    key = jax.random.key(7)
    wide, mask = jnp.pad(WEIGHTS, ((0, 2), (0, 9))), jnp.pad(REASONING, ((0, 2), (0, 9)))
    plain = permuted_weights(WEIGHTS, REASONING, key, jnp.arange(5))
    np.testing.assert_array_equal(permuted_weights(wide, mask, key, jnp.arange(7))[:5, :16], plain)
    order = jnp.array([3, 0, 4])  # nor does it matter which rows stand beside it
    np.testing.assert_array_equal(permuted_weights(WEIGHTS[order], REASONING[order], key, order), plain[order])


def test_every_order_is_equally_likely():
    # 6 orders of 3 tokens over 1200 rows: 200 each, std sqrt(1200 * 1/6 * 5/6) = 13; 65 is 5 of these
    rows = 1200
    weights = jnp.tile(jnp.array([0.0, 1.0, 2.0]), (rows, 1))
    shuffled = permuted_weights(weights, jnp.ones((rows, 3), bool), jax.random.key(11), jnp.arange(rows))
    _, counts = np.unique(np.asarray(shuffled), axis=0, return_counts=True)
    assert len(counts) == 6
    assert np.abs(counts - 200).max() < 65


def test_random_scores_are_uniform_and_every_position_has_its_own():
    scores = np.asarray(random_scores(jax.random.key(5), jnp.arange(40), tokens=50))
    assert len(np.unique(scores)) > 1990  # of 2000
    assert scores.min() >= 0
    assert scores.max() <= 1
    # mean of 2000 uniform numbers: std 1 / sqrt(12 * 2000) = .0065
    assert abs(scores.mean() - 0.5) < 0.03
    np.testing.assert_array_equal(random_scores(jax.random.key(5), jnp.arange(3), tokens=7), scores[:3, :7])
    assert (random_scores(jax.random.key(6), jnp.arange(40), tokens=50) != scores).mean() > 0.99


# Entropy, top share


ENTROPIES = jnp.array([[0.1, 0.5, 0.2, 0.9, 0.3, 9.0], [2.0, 1.0, 3.0, 4.0, 5.0, 9.0]])
VALID = jnp.array([[True] * 5 + [False]] * 2)


def test_entropy_top_of_each_sequence():
    # ceil(.2 * 5): one of five is taken, weight 5
    expected = [[0, 0, 0, 5, 0, 1], [0, 0, 0, 0, 5, 1]]
    np.testing.assert_allclose(entropy_top_weights(ENTROPIES, VALID, share=0.2, scope="sequence"), expected)
    free = entropy_top_weights(ENTROPIES, VALID, share=0.2, scope="sequence", mass="free")
    np.testing.assert_array_equal(free, [[0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1]])


def test_entropy_top_of_the_batch():
    # the two largest of ten, both in the second row; 10 tokens' mass on 2
    expected = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 5, 5, 1]]
    np.testing.assert_allclose(entropy_top_weights(ENTROPIES, VALID, share=0.2, scope="batch"), expected)
    one_row = VALID.at[1].set(False)
    np.testing.assert_allclose(
        entropy_top_weights(ENTROPIES, one_row, share=0.2, scope="batch"), [[0, 0, 0, 5, 0, 1], [1] * 6]
    )


def test_entropy_top_takes_as_many_tokens_as_its_released_code():
    """Released: max(1, int(n share + .9999)), in float64; a quantile at 1 - share takes one of 4 at .3, not two."""
    for share in (0.05, 0.2, 0.25, 0.3, 0.5, 0.77, 1.0):
        counts = np.array([1, 2, 4, 7, 10, 99, 100, 1001, 3_000_001])
        expected = [max(1, int(n * share + 0.9999)) for n in counts.tolist()]
        np.testing.assert_array_equal(selected(jnp.asarray(counts), share), expected)
    weights = entropy_top_weights(ENTROPIES[:1, :4], VALID[:1, :4], share=0.3, scope="sequence")
    np.testing.assert_allclose(weights, [[0, 2, 0, 2]])


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_entropies_tied_with_the_cut_are_all_taken(scope):
    tied = jnp.array([[1.0, 2.0, 2.0, 2.0, 0.0]])
    weights = entropy_top_weights(tied, jnp.ones((1, 5), bool), share=0.2, scope=scope)
    np.testing.assert_allclose(weights, [[0, 5 / 3, 5 / 3, 5 / 3, 0]], rtol=1e-6)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_row_with_an_unusable_entropy_counts_for_nothing(scope):
    broken = ENTROPIES.at[1, 2].set(jnp.nan)
    weights = entropy_top_weights(broken, VALID, share=0.2, scope=scope)
    np.testing.assert_allclose(weights, [[0, 0, 0, 5, 0, 1], [1] * 6])


def test_entropy_top_says_what_is_wrong(unchecked):
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got 0"):
        entropy_top_weights(ENTROPIES, VALID, share=0)
    with pytest.raises(ValueError, match="scope must be sequence or batch, got 'group'"):
        entropy_top_weights(ENTROPIES, VALID, scope="group")
    with pytest.raises(ValueError, match="mass must be kept or free, got 'half'"):
        entropy_top_weights(ENTROPIES, VALID, mass="half")


# GRAIL


def test_grail_hand_worked():
    # logs 0, 1, 2: mean 1, variance 2/3, z = -1.2247, 0, 1.2247. 1 + .5 z = .388, clipped to .5; 1; 1.612
    saliency = jnp.exp(jnp.array([[0.0, 1.0, 2.0, 9.0, 9.0, 9.0, 9.0]]))
    reasoning = jnp.array([[True, True, True, False, False, False, False]])
    answer = jnp.array([[False, False, False, False, True, False, False]])
    completion = jnp.array([[True, True, True, True, True, True, False]])
    np.testing.assert_allclose(log_zscores(saliency, reasoning)[0, :3], [-1.2247, 0, 1.2247], atol=1e-4)
    weights = grail_weights(saliency, reasoning, answer, completion, mean=1.1, spread=0.5, low=0.5, high=5.0)
    np.testing.assert_allclose(weights, [[0.5, 1.1, 1.7124, 1.1, 5, 1.1, 1]], atol=1e-4)


def test_grail_rows_without_an_answer_or_with_broken_saliency_get_ones():
    saliency = jnp.array([[1.0, 2.0, 3.0], [1.0, jnp.nan, 3.0], [1.0, -1.0, 3.0], [1.0, 2.0, jnp.nan]])
    reasoning = jnp.array([[True, True, False]] * 4)
    answer = jnp.array([[False, False, False], [False, False, True], [False, False, True], [False, False, True]])
    weights = grail_weights(saliency, reasoning, answer, jnp.ones((4, 3), bool))
    np.testing.assert_array_equal(weights[:3], np.ones((3, 3)))
    np.testing.assert_allclose(weights[3], [0.5, 1.5, 5], atol=1e-4)  # the broken one is not used; z = -1, 1


def test_grail_out_of_range():
    args = jnp.ones((1, 2)), *[jnp.ones((1, 2), bool)] * 3
    for bad in ({"low": 2.0, "high": 1.0}, {"low": -1.0}, {"mean": -1.0}, {"spread": -1.0}):
        with pytest.raises(ValueError, match="expected 0 <= low <= high, mean >= 0 and spread >= 0"):
            grail_weights(*args, **bad)


# Keywords


PIECES = [b"so", b" so", b"al", b" the", b"re", b"fore", b" ", b"=", b"==", b"So", b"(so,", b"n", b"\xc3\xa9", b""]
SO, _SO, AL, _THE, RE, FORE, SPACE, IS, EQUAL, CAPITAL, INSIDE, N, ACCENT, STOP = range(14)


def encode(text: str) -> list[int]:
    """What a tokenizer would do that splits into " the" + "re" + "fore" and cannot write most capitals."""
    known = {"so": [SO], " so": [_SO], "So": [CAPITAL], " So": [SPACE, CAPITAL], " therefore": [_THE, RE, FORE]}
    if text not in known | {"=": [IS], " =": [SPACE, IS]}:
        raise ValueError(f"cannot encode {text!r}")
    return (known | {"=": [IS], " =": [SPACE, IS]})[text]


WORDS = keyword_table(["so", "therefore", "="], encode, PIECES)
find = jax.jit(lambda tokens, completion: keyword_tokens(tokens, completion, WORDS))


def found(ids, *, length=None):
    """1 where a token belongs to a keyword, of a row padded with something that would continue a word."""
    tokens = np.full((1, 8), N, np.int32)
    tokens[0, : len(ids)] = ids
    completion = np.arange(8)[None] < (len(ids) if length is None else length)
    return np.asarray(find(tokens, completion))[0].astype(int).tolist()[: len(ids)]


def test_keyword_spellings():
    grams = {tuple(int(i) for i in row if i != NONE) for row in WORDS.grams}
    # single tokens with nothing but spaces and punctuation around the word, in any case, and the tokenizer's own
    assert grams == {(SO,), (_SO,), (CAPITAL,), (INSIDE,), (SPACE, CAPITAL), (_THE, RE, FORE), (IS,), (SPACE, IS)}


def test_keywords_of_one_and_of_several_tokens():
    assert found([_SO, SPACE, N, SO, SPACE, SO]) == [1, 0, 0, 0, 0, 1]  # the second follows a letter
    assert found([AL, _THE, RE, FORE, SPACE, RE, FORE]) == [0, 1, 1, 1, 0, 0, 0]
    assert found([CAPITAL, _THE, RE, FORE]) == [1, 1, 1, 1]


def test_a_keyword_inside_a_longer_word_is_none():
    assert found([AL, SO]) == [0, 0]
    assert found([_SO, N]) == [0, 0]  # " son"
    assert found([ACCENT, SO]) == [0, 0]
    assert found([SO, ACCENT]) == [0, 0]
    assert found([_THE, RE, FORE, N]) == [0, 0, 0, 0]
    assert found([AL, _SO, SPACE, N]) == [0, 1, 0, 0]  # the space parts them
    assert found([AL, INSIDE, N]) == [0, 1, 0]  # so does punctuation
    assert found([N, IS, N, EQUAL]) == [0, 1, 0, 0]


def test_keywords_end_with_the_completion():
    assert found([AL, _THE, RE, FORE], length=3) == [0, 0, 0, 0]
    assert found([_SO, N], length=1) == [1, 0]  # what stands in the padding continues nothing
    assert found([_SO, STOP]) == [1, 0]


def test_no_spelling_at_all_is_an_error():
    with pytest.raises(ValueError, match="none of 'wait', 'thus' can be written in this vocabulary"):
        keyword_table(["wait", "thus"], encode, PIECES)
    with pytest.raises(ValueError, match="none of no words can be written"):
        keyword_table([], encode, PIECES)


def test_encodings_that_do_not_read_back_are_left_out():
    table = keyword_table(["so"], lambda text: [N], PIECES)
    assert table.grams.tolist() == [[SO], [_SO], [CAPITAL], [INSIDE]]


def test_keyword_weights_hand_worked():
    # 3, 1, 1, 3 on the reasoning: mean 2, so 1.5, .5, .5, 1.5; the last token is none of it, whatever it is
    hits = jnp.array([[True, False, False, True, True]])
    reasoning = jnp.array([[True, True, True, True, False]])
    np.testing.assert_allclose(keyword_weights(hits, reasoning, boost=2.0), [[1.5, 0.5, 0.5, 1.5, 1]])
    np.testing.assert_array_equal(keyword_weights(hits, reasoning, boost=0.0), np.ones((1, 5)))
    with pytest.raises(ValueError, match="boost must be >= 0, got -1"):
        keyword_weights(hits, reasoning, boost=-1.0)


# Polarity, signals


def test_polarity_leaves_rows_of_the_other_sign_at_one():
    weights, advantages = jnp.full((3, 2), 2.0), jnp.array([1.5, 0.0, -0.5])
    for polarity, expected in [("both", [2, 2, 2]), ("correct", [2, 1, 1]), ("wrong", [1, 1, 2])]:
        np.testing.assert_array_equal(polarised(weights, advantages, polarity=polarity)[:, 0], expected)
    np.testing.assert_array_equal(reweighted_rows(advantages, polarity="wrong"), [False, False, True])


def test_unknown_polarity(unchecked):
    with pytest.raises(ValueError, match="polarity must be both, correct or wrong, got 'right'"):
        polarised(jnp.ones((1, 2)), jnp.ones(1), polarity="right")


def test_a_missing_signal_is_named():
    with pytest.raises(ValueError, match=r"credit method entropy: needs the signal entropies, got None"):
        required(Signals(), "entropies", Context(CreditSettings(method="entropy")))


def test_keywords_with_qwens_tokenizer(shared):
    tokenizer = load_tokenizer(shared / "tokenizer")
    table = token_bytes(tokenizer, 151936)
    words = ("therefore", "so", "hence", "wait", "but", "=")
    known = keyword_table(words, partial(tokenizer_encode, tokenizer), table)
    text = "So x = 3. Therefore, 2+3=5; also wait\n\nBut the sonata, (so) hence\nwhence butter a==b reso a =\n4"
    ids = np.array([tokenizer_encode(tokenizer, text)], np.int32)
    hits = np.asarray(keyword_tokens(jnp.asarray(ids), jnp.ones(ids.shape, bool), known))[0]
    pieces = [table[i].decode() for i in ids[0][hits]]
    assert pieces == ["So", " =", " Therefore", "=", " wait", "But", "so", " hence", " =\n"]


def test_sums_over_a_group_keep_the_precision_of_their_values(x64):
    peers, values = peers_of(jnp.array([0, 0, 1])), jnp.array([1.0, 1e-12, 3.0], jnp.float64)
    np.testing.assert_array_equal(peer_sum(peers, values), np.array([1.0 + 1e-12, 1.0 + 1e-12, 3.0]))
    assert peer_sum(peers, values.astype(jnp.bfloat16)).dtype == jnp.float32
