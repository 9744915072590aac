"""Answer spans: hand-worked rows over one-letter tokens, and real outputs in their own and in odd encodings."""

import json
import random

import numpy as np
import pytest

from oarjax.credit.answer_span import byte_extent, find_answers, find_units, whole_completion
from oarjax.credit.answer_text import check_pattern, extract_answer
from oarjax.step.spans import with_reference
from oarjax.types import Rollout

BYTES = [bytes([i]) for i in range(256)] + [b""]  # ids 0..255 are bytes, 256 is a stop token
STOP = 256


def spans(texts, table=BYTES, **kw):
    """find_answers over texts, one byte per token, right-padded with zeros."""
    rows = [list(t.encode() if isinstance(t, str) else t) if not isinstance(t, list) else t for t in texts]
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
    completion = np.array([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return find_answers(tokens, completion, table, **({"style": "boxed"} | kw))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1}, no, \boxed{2}", "2"),  # the last one
        (r"\boxed{\frac{1}{2}} or \boxed{3", r"\frac{1}{2}"),  # the last complete one
        (r"\boxed{\frac{1}{2}", None),  # the brace of the fraction does not close the box
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace needs no partner
        (r"\boxed{a\\}", r"a\\"),  # the backslash before the brace is itself escaped
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {7} and \fbox{ 8 }", "8"),
        (r"\boxed 7", None),
        (r"\boxed{3} then \boxed{ }", None),  # the last one is blank
        ("{} } {\\boxed{1}", "1"),  # stray braces outside
        ("no box", None),
    ],
)
def test_boxed(text, answer):
    assert extract_answer(text, style="boxed") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a\n#### 18", "18"),
        ("#### 1\n####  1,234 \nand on", "1,234"),
        ("#### 1\n####", None),
        ("##### Title 5", None),
        ("### 5", None),
    ],
)
def test_hash(text, answer):
    assert extract_answer(text, style="hash") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\n 5\n</answer>", "5"),
        ("<answer>1</answer><answer>2</answer> <answer>3", "2"),
        ("<answer><answer>4</answer>", "4"),
        ("</answer> <answer>", None),
        ("<answer> </answer>", None),
    ],
)
def test_tag(text, answer):
    assert extract_answer(text, style="tag") == answer


def test_regex_takes_the_last_match_and_its_first_group():
    assert extract_answer("A: 1\nA: 22 ", style="regex", pattern=r"A: (\d+)") == "22"
    assert extract_answer("x 1 y 22 z", style="regex", pattern=r"\d+") == "22"
    assert extract_answer("A: 1 B", style="regex", pattern=r"A: (\d)|B") == "1"  # group 1 took no part in the last
    assert extract_answer("none", style="regex", pattern=r"A: (\d+)") is None


def test_bad_patterns_are_named():
    with pytest.raises(ValueError, match=r"answer pattern '\(' is not a regular expression"):
        check_pattern("(")
    with pytest.raises(ValueError, match="matches empty text"):
        check_pattern("x*")
    with pytest.raises(ValueError, match=r"set credit\.answer\.pattern"):
        check_pattern(None)


def test_a_catastrophic_pattern_ends_in_a_warning():
    with pytest.warns(UserWarning, match="ran too long"):
        span = spans(["a" * 64 + "b"], style="regex", pattern=r"(a|aa)+$")
    assert not span.has_answer[0]
    assert not span.reasoning.any()


def test_tokens_of_a_row_by_hand():
    r"""a=1 \boxed{42}. STOP: 4 reasoning bytes, 7 of the marker, 2 of the answer, brace, stop, stop token."""
    row = [*rb"a=1 \boxed{42}.", STOP]
    span = spans([row])
    assert span.reasoning[0].tolist() == [True] * 4 + [False] * 12
    assert span.answer[0].tolist() == [False] * 11 + [True] * 2 + [False] * 3
    assert span.has_answer.tolist() == [True]
    assert all(isinstance(a, np.ndarray) for a in (span.reasoning, span.answer, span.has_answer))


def test_a_token_shared_with_marker_or_brace_is_answer():
    table = [b"so ", rb"x \bo", b"xed", rb"{\fr", b"ac{1}{2", b"}}.", b" end"]
    span = spans([[0, 1, 2, 3, 4, 5, 6]], table)
    assert span.answer[0].tolist() == [False, False, False, True, True, True, False]
    assert span.reasoning[0].tolist() == [True] + [False] * 6  # token 1 holds some of the marker


def test_white_space_is_no_answer():
    table = [rb"\boxed{", b" ", b"7", b" \n", b"}"]
    assert spans([[0, 1, 2, 3, 4]], table).answer[0].tolist() == [False, False, True, False, False]
    hashed = spans([[0, 1, 2, 3]], [b"####", b" ", b"18", b" \n"], style="hash")
    assert hashed.answer[0].tolist() == [False, False, True, False]


def test_tokens_without_bytes():
    """Special tokens, ids beyond the table and the padding: no answer; before the marker they reason."""
    row = [STOP, 999, *rb"\boxed{4", STOP, *b"2}"]
    span = spans([row, list(rb"\boxed{4")])
    assert span.answer[0].nonzero()[0].tolist() == [9, 11]
    assert span.reasoning[0].nonzero()[0].tolist() == [0, 1]
    assert span.has_answer.tolist() == [True, False]
    assert not span.answer[1].any()


def test_what_is_not_completion_is_not_read():
    tokens = np.array([list(rb"\boxed{1}\boxed{2}")], np.int32)
    completion = np.arange(18)[None] < 9
    assert find_answers(tokens, completion, BYTES, style="boxed").answer[0].nonzero()[0].tolist() == [7]


def test_permuting_rows_permutes_spans():
    texts = [r"x \boxed{1}", "none", r"longer \boxed{22} text"]
    order = [2, 0, 1]
    one, two = spans(texts), spans([texts[i] for i in order])
    for name in ("reasoning", "answer", "has_answer"):
        np.testing.assert_array_equal(getattr(one, name)[order], getattr(two, name))


def test_malformed_utf8_keeps_positions_exact():
    text = b"\xff\xe4\xb8 \xe4\xb8\xad \\boxed{\xc3\xa9\x80} \xf0"  # broken bytes in front, inside and behind
    extent = byte_extent(text, style="boxed")
    assert extent is not None
    assert text[extent.start : extent.end] == b"\xc3\xa9\x80"
    assert text[extent.marker :].startswith(b"\\boxed")
    span = spans([text])
    assert bytes(np.array(list(text))[span.answer[0]].tolist()) == b"\xc3\xa9\x80"


def encodings(ids, table, rng):
    """The ids themselves, one token per byte, and two random cuts into tokens (characters may be cut as well)."""
    by_bytes = {piece: i for i, piece in reversed(list(enumerate(table))) if piece}
    longest = min(12, max(map(len, by_bytes)))
    text = b"".join(table[i] for i in ids)

    def cut():
        at, found = 0, []
        while at < len(text):
            options = [n for n in range(1, longest + 1) if text[at : at + n] in by_bytes]
            size = rng.choice(options)
            found.append(by_bytes[text[at : at + size]])
            at += size
        return found

    return text, [ids, [by_bytes[bytes([b])] for b in text], cut(), cut()]


def check(ids, table, answer, rng):
    """Whether the canonical span exceeds the answer, after checking every encoding."""
    text, ways = encodings(ids, table, rng)
    last = text.rindex(answer.encode(), text.rindex(b"\\boxed{"))
    exceeds = False
    for way in ways:
        span = spans([way], table)
        assert span.has_answer[0]
        where = span.answer[0].nonzero()[0]
        np.testing.assert_array_equal(where, np.arange(where[0], where[-1] + 1))
        pieces = [table[way[i]] for i in where]
        start = sum(len(table[i]) for i in way[: where[0]])
        stop = start + sum(map(len, pieces))
        assert start <= last, "starts behind the answer's first character"
        assert stop >= last + len(answer.encode()), "ends before the answer's last character"
        assert last < start + len(pieces[0]), "a whole token too early"
        assert last + len(answer.encode()) > stop - len(pieces[-1]), "a whole token too late"
        marker = text.rindex(b"\\boxed{")
        before = sum(len(table[i]) for i, on in zip(way, span.reasoning[0]) if on)
        assert marker - max(map(len, table)) < before <= marker
        assert not (span.reasoning & span.answer).any()
        if way is ids:
            exceeds = (start, stop) != (last, last + len(answer.encode()))
    return exceeds


def test_real_outputs(data):
    doc = json.loads((data / "span" / "outputs.json").read_text())
    table = [b""] * (max(map(int, doc["table"])) + 1)
    for index, piece in doc["table"].items():
        table[int(index)] = bytes.fromhex(piece)
    rng = random.Random(0)
    exceeding = 0
    for output in doc["outputs"]:
        assert b"".join(table[i] for i in output["ids"]).decode() == output["text"]
        assert extract_answer(output["text"], style="boxed") == output["answer"]
        span = spans([output["ids"]], table)
        decoded = b"".join(table[i] for i, on in zip(output["ids"], span.answer[0]) if on).decode()
        assert decoded == output["decoded"]
        exceeding += check(output["ids"], table, output["answer"], rng)
    assert exceeding == sum(output["decoded"] != output["answer"] for output in doc["outputs"]) == 6


def box_by_depth(text):
    """An independent reading of the last box, for outputs without escaped braces."""
    at = text.rindex("\\boxed{")
    depth = 0
    for end in range(at + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[at + 7 : end].strip()
    raise ValueError(text)


@pytest.mark.slow
def test_all_real_outputs(shared):
    from oarjax.data.tokenizer import encode, load_tokenizer, token_bytes

    tokenizer = load_tokenizer(shared / "tokenizer")
    table = token_bytes(tokenizer, 151_936)
    rng = random.Random(0)
    by_bytes = {piece: i for i, piece in reversed(list(enumerate(table))) if piece}
    outputs = exceeding = 0
    for line in (shared / "data" / "math_model_outputs.jsonl").read_text().splitlines():
        for text in json.loads(line)["outputs"]:
            ids = encode(tokenizer, text)
            # Only tokens that the text contains: a table of the whole vocabulary would be rebuilt per output.
            raw = text.encode()
            pieces = {raw[i : i + n] for i in range(len(raw)) for n in range(1, 9)} & by_bytes.keys()
            used = sorted({by_bytes[p] for p in pieces} | set(ids))
            place = {index: at for at, index in enumerate(used)}
            small = [table[index] for index in used]
            exceeding += check([place[i] for i in ids], small, box_by_depth(text), rng)
            outputs += 1
    assert (outputs, exceeding) == (400, 104)


def row(text, width):
    ids = list(text.encode())
    tokens = np.array([ids + [0] * (width - len(ids))], np.int32)
    return tokens, np.arange(width)[None] < len(ids)


def test_units_end_with_lines_or_sentences():
    text = "Pi is 3.14. So\nwhat? 1+1=2;2+2=4"
    tokens, completion = row(text, 40)

    def pieces(unit):
        number = find_units(tokens, completion, BYTES, unit=unit)[0, : len(text)]
        return ["".join(c for c, n in zip(text, number) if n == i) for i in range(number.max() + 1)]

    assert pieces("line") == ["Pi is 3.14. So\n", "what? 1+1=2;2+2=4"]
    assert pieces("sentence") == ["Pi is 3.14.", " So\n", "what?", " 1+1=2;", "2+2=4"]


def test_a_token_belongs_to_the_unit_in_which_it_begins():
    table = [b"a", b"b.\nc", b"d", b""]
    tokens = np.array([[0, 1, 2, 3, 9]], np.int32)
    units = find_units(tokens, np.array([[True] * 4 + [False]]), table, unit="line")
    assert units.tolist() == [[0, 0, 1, 1, 0]]


def test_without_an_answer_the_whole_completion_reasons():
    tokens = np.array([[65, 66, STOP, 0], [STOP, 0, 0, 0]], np.int32)
    completion = np.array([[True, True, True, False], [True, False, False, False]])
    span = whole_completion(tokens, completion, BYTES)
    assert span.reasoning.tolist() == [[True, True, False, False], [False] * 4]
    assert span.has_answer.tolist() == [True, False]
    assert not span.answer.any()


def rollout_of(tokens, completion, ended, prompt=2):
    tokens = np.concatenate([np.full((len(tokens), prompt), 80, np.int32), tokens], axis=1)
    valid = np.concatenate([np.ones((len(tokens), prompt), bool), completion], axis=1)
    zeros = np.zeros(completion.shape, np.float32)
    return Rollout(tokens, valid, completion, zeros, zeros, np.array(ended))


def test_a_reference_answer_takes_the_place_of_ones_own():
    texts = [r"ab\boxed{7}.", "abc"]
    tokens, completion = (np.concatenate(x) for x in zip(*(row(t, 14) for t in texts)))
    tokens[1, 3], completion[1, 3] = STOP, True
    span = find_answers(tokens, completion, BYTES, style="boxed")
    rollout = rollout_of(tokens, completion, [True, True])
    endings = [(list(b"= "), list(b"12")), (list(b"= "), list(b"4"))]
    probed, at = with_reference(rollout, span, endings, room=4)
    made = probed.tokens[:, 2:]
    assert bytes(made[0, :6].tolist()) == b"ab= 12"
    assert bytes(made[1, :6].tolist()) == b"abc= 4", "without an answer, all but the stop token reasons"
    assert probed.completion.sum(1).tolist() == [6, 6]
    assert at.reasoning.sum(1).tolist() == [2, 3]
    assert at.answer[0].nonzero()[0].tolist() == [4, 5]
    assert at.answer[1].nonzero()[0].tolist() == [5]
    assert at.has_answer.all()
    assert probed.valid[:, :2].all()
    with pytest.raises(ValueError, match=r"row 0 needs 2 [+] 2 tokens for cue and answer.*there is room for 3"):
        with_reference(rollout, span, endings, room=3)
