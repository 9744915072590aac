"""Sources, errors, filters, order, resuming, padding."""

import json
import sys
import types
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from oarjax.config.inputs import DatasetConfig
from oarjax.data.problems import Problem, load_problems, reference_answer
from oarjax.data.rows import DataError
from oarjax.data.streams import (
    Encoded,
    PromptOrder,
    PromptStream,
    SFTStream,
    Stream,
    bucketed,
    encode_pairs,
    encode_problems,
    eval_batches,
    eval_order,
    pad_prompts,
)
from oarjax.data.tasks.arithmetic import write_tokenizer
from oarjax.data.tokenizer import TokenizerError, encode, load_tokenizer

ROWS = [
    {"question": "1+2=", "answer": "one and two\n#### 3"},
    {"question": "10+20=", "answer": 30},
    {"question": "2+2=", "answer": "4"},
]
PLAIN = {"template": "plain", "system_prompt": None, "prompt_format": "{prompt}"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def load(source, **fields):
    return load_problems(DatasetConfig(source=str(source), **fields))


def encoded(lengths):
    """Problems whose prompts are (10 * row, 10 * row + 1, ...), of these lengths."""
    problems = tuple(Problem(f"p{row}", "0", 100 + row) for row in range(len(lengths)))
    prompts = tuple(list(range(10 * row, 10 * row + length)) for row, length in enumerate(lengths))
    return Encoded(problems, prompts, (), 0)


def stream(count=10, *, prompts=4, seed=3, shuffle=True):
    rows = encoded([1 + row % 3 for row in range(count)])
    return PromptStream(rows, PromptOrder(seed, shuffle), prompts=prompts, bucket=2, pad_id=999)


def rows_of(batches):
    return [problem.index - 100 for _, problems in batches for problem in problems]


# --- sources ---------------------------------------------------------------------------------------------------


def test_json_lines(jsonl):
    problems = load(jsonl)
    assert [p.prompt for p in problems] == ["1+2=", "10+20=", "2+2="]
    assert [p.reference for p in problems] == ["3", "30", "4"]
    assert problems[0].answer == "one and two\n#### 3"  # kept whole, for SFT
    assert [p.index for p in problems] == [0, 1, 2]
    assert load(jsonl, limit=2) == problems[:2]


def test_parquet_holds_the_same_problems(jsonl, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [row | {"answer": str(row["answer"])} for row in ROWS]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load(tmp_path / "rows.parquet") == load(jsonl)
    with pytest.raises(DataError, match=r"row 0: no field 'text', only 'question', 'answer'"):
        load(tmp_path / "rows.parquet", prompt_field="text")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"torn.parquet: not readable as Parquet"):
        load(tmp_path / "torn.parquet")


def test_reference_answer():
    assert reference_answer("48/2=24\n48+24=72\n#### 72") == "72"
    assert reference_answer("a #### 1 then #### 1,000 ") == "1,000"  # the last one
    assert reference_answer(r"\frac{1}{2}") == r"\frac{1}{2}"


def test_missing_field_names_line_fields_and_setting(jsonl):
    with pytest.raises(
        DataError,
        match=r"rows.jsonl line 1: no field 'problem', only 'question', 'answer'; set data.train.prompt_field",
    ):
        load(jsonl, prompt_field="problem")
    with pytest.raises(DataError, match=r"set data.eval.answer_field to one of them"):
        load_problems(DatasetConfig(source=str(jsonl), answer_field="solution"), where="data.eval")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "1", "answer": "1"}\n{"question": ', r"bad.jsonl line 2: not JSON"),
        ('\n["1", "1"]\n', r"bad.jsonl line 2: expected one object per line, got a list"),
        ('{"question": "1", "answer": null}\n', r"line 1: field 'answer' is None; expected text or a number"),
        ('{"question": "1", "answer": true}\n', r"line 1: field 'answer' is True; expected text or a number"),
        ("\n \n", r"bad.jsonl holds no rows"),
        ('{"question": "1", "answer": "1", "image": "a.png"}\n', r"line 1: field 'image' holds a picture"),
        ('{"question": "<|image_pad|> 1", "answer": "1"}\n', r"line 1: field 'question' holds a picture"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "bad.jsonl")


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(DataError, match=r"data.train.source: no file .*nowhere.jsonl"):
        load(tmp_path / "nowhere.jsonl")
    (tmp_path / "rows.xml").write_text("<rows/>")
    with pytest.raises(DataError, match=r"expected a .jsonl, .json, .csv, .parquet file or a folder .*rows.xml"):
        load(tmp_path / "rows.xml")


def test_csv_and_json_hold_the_same_problems(jsonl, tmp_path):
    lines = ["\ufeffquestion,answer", *(f'{row["question"]},"{row["answer"]}"' for row in ROWS)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "marked.jsonl").write_text("\ufeff" + jsonl.read_text())
    assert load(tmp_path / "rows.csv") == load(tmp_path / "rows.json") == load(jsonl) == load(tmp_path / "marked.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"question,answer\n1+2=,3,4\n", r"line 2: expected 2 values, one per column"),
        ("rows.csv", b"question,answer\n1+2=\n", r"line 2: expected 2 values, one per column"),
        ("rows.csv", b"question,question\n1,2\n", r"expected each name once"),
        ("rows.csv", b"", r"no first line with names of columns"),
        ("rows.csv", b'question,answer\n1+2=,"3\n', r"line 2: not CSV \("),
        ("rows.csv", b"question,answer\n1+2=,\xff\n", r"not CSV in UTF-8 .*; save it as"),
        ("rows.json", b'{"question": "1"}\n{"question": "2"}', r"one object per line is called .jsonl"),
        ("rows.json", b'{"question": "1"}', r"expected a list of objects, got a dict"),
        ("rows.json", b"[1]", r"row 0: expected an object, got a int"),
    ],
)
def test_bad_csv_and_json_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_a_saved_dataset(tmp_path, monkeypatch):
    """With the library's one call replaced: a dataset, one per split, and a folder that holds none."""

    def load_from_disk(path):
        if path.endswith("splits"):
            return {"train": ROWS, "test": ROWS[:1]}
        if path.endswith("empty"):
            raise FileNotFoundError("neither a dataset nor a dataset dict")
        return ROWS

    library = types.ModuleType("datasets")
    library.load_from_disk = load_from_disk
    for name in ("rows", "splits", "empty"):
        (tmp_path / name).mkdir()
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert [p.reference for p in load(tmp_path / "rows")] == ["3", "30", "4"]
    assert [p.reference for p in load(tmp_path / "splits", split="test")] == ["3"]
    with pytest.raises(DataError, match=r"data.train.split: .*splits has no split 'val'; set one of train, test"):
        load(tmp_path / "splits", split="val")
    with pytest.raises(DataError, match=r"cannot read the folder .*empty as a saved dataset .*save_to_disk"):
        load(tmp_path / "empty")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"rows' is a folder, and reading it needs the package datasets"):
        load(tmp_path / "rows")


CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]


def test_a_chat_is_rendered_whole(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}="
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": CHAT, "answer": "3"}))
    (problem,) = load(tmp_path / "rows.jsonl")
    assert (problem.prompt, problem.reference, problem.columns["question"]) == ("1+2=", "3", CHAT)
    asked = {"prompt_format": "{prompt}0", "max_prompt": 99}

    def rendered(problems, **changes):
        settings = {"template": "chat", "system_prompt": "9", **asked} | changes
        (ids,) = encode_problems(problems, tokenizer, **settings).prompts
        return tokenizer.decode(ids)

    own = replace(problem, chat=({"role": "system", "content": "7"}, *problem.chat[1:]))
    assert rendered([own]) == "7;1+2=0;="  # its own system prompt
    assert rendered([replace(problem, chat=problem.chat[1:])]) == "9;1+2=0;="  # the config's
    with pytest.raises(TokenizerError, match=r"list of messages; set data.template to chat"):
        rendered([problem], template="plain")


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user", "content": 1}], r"line 1: field 'question', message 0 is .*expected a role"),
        ([{"role": "robot", "content": "1"}], r"message 0 is .*expected a role"),
        (["1+2="], r"message 0 is '1\+2='; expected a role"),
        ([*CHAT, {"role": "assistant", "content": "3"}], r"ends in a message of role 'assistant'"),
        ([], r"field 'question' is \[\]; expected text or a number"),
    ],
)
def test_bad_chats_are_named(tmp_path, chat, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": chat, "answer": "3"}))
    with pytest.raises(DataError, match=message):
        load(tmp_path / "rows.jsonl")


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow; install oarjax\[hub\]"):
        load(tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"'openai/gsm8k' is not a local file.*install oarjax\[hub\]"):
        load("openai/gsm8k")


def test_hub_dataset(monkeypatch):
    """With the library's one call replaced: what is asked for, and what a failure says."""
    asked = {}

    def load_dataset(path, name, *, split, revision):
        asked.update(path=path, name=name, split=split, revision=revision)
        if split == "nope":
            raise ConnectionError("no route to host")
        return iter(ROWS) if split == "test" else pictures()

    def pictures():  # a column that decodes only when its row is read
        yield ROWS[0]
        raise OSError("cannot identify image file '/etc/passwd'")

    hub = types.ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    problems = load("openai/gsm8k", name="main", split="test", revision="abc", limit=2)
    assert asked == {"path": "openai/gsm8k", "name": "main", "split": "test", "revision": "abc"}
    assert [p.reference for p in problems] == ["3", "30"]
    with pytest.raises(DataError, match=r"cannot load 'openai/gsm8k' .*split 'nope'.*ConnectionError: no route"):
        load("openai/gsm8k", split="nope")
    with pytest.raises(
        DataError, match=r"gsm8k row 1: cannot be read \(OSError: cannot identify image file '/etc/pass"
    ):
        load("openai/gsm8k", split="train")


def test_builtin_source():
    problems = load("builtin:arithmetic", split="eval", limit=3)
    assert [p.index for p in problems] == [0, 1, 2]
    assert all(p.prompt.endswith("=") and p.reference.isdigit() for p in problems)
    longer = load("builtin:arithmetic", split="eval", limit=3, arithmetic={"terms": 9})
    assert min(len(p.prompt) for p in longer) > max(len(p.prompt) for p in problems)
    with pytest.raises(DataError, match=r"data.train: .* no split 'test'; set one of train, eval, sft"):
        load("builtin:arithmetic", split="test")
    with pytest.raises(DataError, match=r"data.train: .* fewer than 800 problems of 2 numbers .*, or lower limit"):
        load("builtin:arithmetic", split="eval", limit=800, arithmetic={"terms": 2, "highest": 9})
    with pytest.raises(DataError, match=r"one of builtin:forks, .*, builtin:arithmetic, got 'builtin:chess'; set"):
        load("builtin:chess")


# --- encoding --------------------------------------------------------------------------------------------------


def test_long_prompts_are_counted_and_left_out(jsonl, tokenizer):
    result = encode_problems(load(jsonl), tokenizer, **PLAIN, max_prompt=4)
    assert [p.prompt for p in result.problems] == ["1+2=", "2+2="]  # 10+20= has six characters
    assert [p.index for p in result.problems] == [0, 2]  # still the dataset's row numbers
    assert (len(result), result.dropped) == (2, 1)
    assert result.by_index[2].prompt == "2+2="
    assert result.prompts[1] == [6, 14, 6, 18]
    assert encode_problems(load(jsonl), tokenizer, **PLAIN, max_prompt=6).dropped == 0
    with pytest.raises(DataError, match=r"all 3 prompts are longer than 3 tokens; raise data.max_prompt"):
        encode_problems(load(jsonl), tokenizer, **PLAIN, max_prompt=3)


def test_pairs_end_in_the_stop_token(tokenizer):
    problems = [Problem("1+2=", "#### 3", 0), Problem("1+2=", "1+2=3;#### 3", 1)]
    result = encode_pairs(problems, tokenizer, **PLAIN, max_length=8, stop_id=2)
    assert result.completions == ([3, 25, 7, 2],)  # ####, space, 3, <|im_end|>
    assert result.dropped == 1
    assert encode_pairs(problems, tokenizer, **PLAIN, max_length=14, stop_id=2).dropped == 0  # 4 + 9 + stop
    with pytest.raises(DataError, match=r"all 2 pairs are longer than 7 tokens; raise sft.max_length"):
        encode_pairs(problems, tokenizer, **PLAIN, max_length=7, stop_id=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "the prompt '' encodes to no tokens; fill"), ("1+\ud800", "the tokenizer cannot encode '1[+]")],
)
def test_a_text_that_cannot_be_encoded_is_told_with_its_line(tokenizer, tmp_path, text, says):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*ROWS, ROWS[0] | {"question": text}]))
    with pytest.raises(TokenizerError, match=f"^{tmp_path}/rows.jsonl line 4: {says}"):
        encode_problems(load(tmp_path / "rows.jsonl"), tokenizer, **PLAIN, max_prompt=8)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "two"}))
    with pytest.raises(TokenizerError, match=f"^{tmp_path}/rows.jsonl line 1: the tokenizer cannot encode 'two'"):
        encode_pairs(load(tmp_path / "rows.jsonl"), tokenizer, **PLAIN, max_length=8, stop_id=2)


# --- padding ---------------------------------------------------------------------------------------------------


def test_prompts_are_left_padded_by_length():
    """The pad id inside a prompt is a real token."""
    batch = pad_prompts([[5], [0, 7, 0]], length=4, pad_id=0, problems=[8, 9])
    np.testing.assert_array_equal(batch.tokens, [[0, 0, 0, 5], [0, 0, 7, 0]])
    np.testing.assert_array_equal(batch.valid, [[0, 0, 0, 1], [0, 1, 1, 1]])
    np.testing.assert_array_equal(batch.problem, [8, 9])
    assert (batch.tokens.dtype, batch.valid.dtype, batch.problem.dtype) == (np.int32, np.bool_, np.int32)


def test_lengths_are_rounded_up_to_the_bucket():
    assert [bucketed([[1] * n], 8) for n in (1, 8, 9)] == [8, 8, 16]
    for batch, problems in (next(stream(seed=seed)) for seed in range(6)):  # lengths 1 to 3 in buckets of 2
        longest = max(1 + (problem.index - 100) % 3 for problem in problems)
        assert batch.tokens.shape == (4, 4 if longest == 3 else 2)


# --- order -----------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_row_once_in_a_new_order():
    """10 rows in batches of 4: five batches are two epochs, and the third straddles them."""
    batches = stream()
    rows = rows_of(next(batches) for _ in range(5))
    first, second = rows[:10], rows[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != sorted(first)


def test_order_is_a_function_of_the_seed():
    def rows(seed):
        batches = stream(seed=seed)
        return rows_of(next(batches) for _ in range(4))

    assert rows(3) == rows(3)
    assert rows(3) != rows(4)
    assert rows(2**40) != rows(3)


def test_shuffle_off_keeps_the_datasets_order():
    batches = stream(shuffle=False)
    assert rows_of(next(batches) for _ in range(5)) == [*range(10), *range(10)]


def test_more_prompts_than_rows_repeats_rows():
    batches = stream(3, prompts=8)
    assert Counter(rows_of([next(batches)])).most_common()[-1][1] == 2  # 8 = 3 + 3 + 2


def test_batches_hold_what_their_problems_say():
    for batch, problems in (next(stream(shuffle=False)), next(stream())):
        np.testing.assert_array_equal(batch.problem, [p.index for p in problems])
        for tokens, valid, problem in zip(batch.tokens, batch.valid, problems):
            row = problem.index - 100
            np.testing.assert_array_equal(tokens[valid], range(10 * row, 10 * row + 1 + row % 3))


# --- resuming --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_restored_stream_goes_on_exactly(taken):
    """Through JSON, as a checkpoint would, and across an epoch's end."""
    original = stream()
    for _ in range(taken):
        next(original)
    state = json.loads(json.dumps(original.state()))
    expected = [next(original) for _ in range(5)]
    resumed = stream()
    next(resumed)  # a position of its own is overwritten
    resumed.restore(state)
    for want, got in zip(expected, (next(resumed) for _ in range(5))):
        assert got[1] == want[1]
        np.testing.assert_array_equal(got[0].tokens, want[0].tokens)


def test_a_position_of_other_data_is_refused():
    state = stream().state()
    for other in (stream(11), stream(seed=4), stream(prompts=2), stream(shuffle=False)):
        with pytest.raises(DataError, match=r"data: the saved position belongs to .*'rows': 10"):
            other.restore(state)


# --- evaluation and SFT ----------------------------------------------------------------------------------------


def test_evaluation_takes_every_problem_once_in_order():
    batches = list(eval_batches(encoded([1, 2, 3, 4, 5]), batch=2, bucket=4, pad_id=0))
    assert [real for _, _, real in batches] == [2, 2, 1]
    assert [p.index for _, problems, real in batches for p in problems[:real]] == [100, 101, 102, 103, 104]
    assert [batch.tokens.shape for batch, _, _ in batches] == [(2, 4), (2, 4), (2, 8)]
    last, problems, _ = batches[-1]
    assert problems[1] == problems[0]  # the filling
    np.testing.assert_array_equal(last.tokens[1], last.tokens[0])


def test_evaluation_takes_the_longest_first_and_goes_on_anywhere():
    data = encoded([1, 5, 3, 5, 4])
    assert eval_order(data) == [1, 3, 4, 2, 0]
    batches = list(eval_batches(data, batch=2, bucket=4, pad_id=0, order=eval_order(data)))
    assert [p.index for _, problems, real in batches for p in problems[:real]] == [101, 103, 104, 102, 100]
    assert [batch.tokens.shape for batch, _, _ in batches] == [(2, 8), (2, 4), (2, 4)]
    rest = list(eval_batches(data, batch=2, bucket=4, pad_id=0, order=eval_order(data)[3:]))
    assert [p.index for _, problems, real in rest for p in problems[:real]] == [102, 100]
    assert not list(eval_batches(data, batch=2, bucket=4, pad_id=0, order=[]))


def sft_stream(tokenizer):
    problems = [Problem("1+2=", "#### 3", 0), Problem("10+20=", "10+20=30;#### 30", 1)]
    pairs = encode_pairs(problems, tokenizer, **PLAIN, max_length=64, stop_id=2)
    return SFTStream(pairs, batch=2, prompt_bucket=4, completion_bucket=8, pad_id=0, seed=0)


def test_sft_batches_lie_like_training_batches(tokenizer):
    """Prompt at the right edge of S = 8, completion at the left edge of T = 16, its stop token imitated too."""
    batch = next(sft_stream(tokenizer))
    assert batch.tokens.shape == batch.valid.shape == (2, 24)
    assert batch.completion.shape == (2, 16)
    np.testing.assert_array_equal(batch.valid[:, 8:], batch.completion)
    short = int(np.argmin(batch.completion.sum(axis=1)))
    assert sorted(batch.completion.sum(axis=1)) == [4, 14]  # "####", " ", "3", stop; 9 + 1 + 1 + 2 + stop
    assert list(batch.tokens[short]) == [0] * 4 + [5, 14, 6, 18] + [3, 25, 7, 2] + [0] * 12
    np.testing.assert_array_equal(np.flatnonzero(batch.valid[short]), range(4, 12))


def test_sft_streams_resume(tokenizer):
    whole, resumed = sft_stream(tokenizer), sft_stream(tokenizer)
    next(whole)
    resumed.restore(whole.state())
    for _ in range(3):
        np.testing.assert_array_equal(next(whole).tokens, next(resumed).tokens)


def test_stream_takes_any_row_count():
    assert Stream(1, batch=3, seed=0, shuffle=True).next_rows() == [0, 0, 0]
    ones = Stream(3, batch=1, seed=0, shuffle=True)
    assert sorted(ones.next_rows() + ones.next_rows() + ones.next_rows()) == [0, 1, 2]


def test_gsm8k_with_qwens_chat_template(shared):
    tokenizer = load_tokenizer(shared / "tokenizer")
    problems = load(shared / "data" / "gsm8k_train.jsonl", limit=300)
    result = encode_problems(
        problems, tokenizer, template="chat", system_prompt=None, prompt_format="{prompt}", max_prompt=100
    )
    lengths = [len(tokenizer(p.prompt)["input_ids"]) + 8 for p in problems]  # 8 ids of template around the text
    assert result.dropped == sum(length > 100 for length in lengths) > 0
    assert [len(ids) for ids in result.prompts] == [length for length in lengths if length <= 100]
    assert problems[0].reference == "72"


def test_demonstrations_of_turns_imitate_the_policys_alone(tokenizer):
    columns = {"turns": ["1", "23", "4"]}
    problems = [Problem("1+1=", "unused", 0, "row 0", columns), Problem("1+1=", "2", 1, "row 1", {})]
    encoded = encode_pairs(
        problems, tokenizer, **PLAIN, max_length=64, stop_id=2, reply=lambda said: encode(tokenizer, said)
    )
    ids = lambda text: encode(tokenizer, text)  # noqa: E731
    assert encoded.completions[0] == [*ids("1"), 2, *ids("23"), *ids("4"), 2]
    assert encoded.observed[0] == [False, False, True, True, False, False]
    assert encoded.completions[1] == [*ids("2"), 2]
    batch = next(SFTStream(encoded, batch=2, prompt_bucket=8, completion_bucket=8, pad_id=0, seed=0))
    extent = batch.valid[:, -batch.completion.shape[1] :]
    assert sorted((extent & ~batch.completion).sum(1).tolist()) == [0, 2]
    assert extent.sum() == 8
