"""Saved completions: text, ids, messages, what TRL and verl write, and what is wrong with a line."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oarjax.data.rows import DataError
from oarjax.data.tokenizer import TokenizerError, chat_ids, encode, rendered_ids, token_bytes
from oarjax.report.files import CompletionRow, CompletionsWriter
from oarjax.tools.lab.saved_rollouts import SavedRollout, read_rollouts


def saved(tmp_path, *lines):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_text_and_ids(tmp_path):
    path = saved(
        tmp_path,
        {"prompt": "1+1=", "completion": "#### 2", "reference": 2},
        "",
        {"prompt_ids": [1, 2], "prompt": "unused", "completion_ids": [3], "extra": None},
    )
    assert read_rollouts(path) == [SavedRollout("1+1=", "#### 2", "2"), SavedRollout([1, 2], [3], None)]


def test_completions_of_a_run_are_read(tmp_path):
    with CompletionsWriter(tmp_path / "completions.jsonl") as writer:
        writer.write(3, [CompletionRow("1+1=", "#### 3", 0.0, "3", "graded", reference="2")])
    assert read_rollouts(tmp_path / "completions.jsonl") == [SavedRollout("1+1=", "#### 3", "2")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"line 2: not JSON"),
        ("[1]", r"line 2: expected an object, got list"),
        ({"prompt": "x"}, r'line 2: no completion; each line needs "prompt"'),
        ({"prompt": "", "completion": "y"}, r"line 2: no prompt"),
        ({"prompt_ids": ["a"], "completion": "y"}, r"line 2: prompt_ids: expected a list of token ids, got \['a'\]"),
        ({"prompt": "x", "completion_ids": []}, r"line 2: completion_ids: expected a list of token ids, got \[\]"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, says):
    with pytest.raises(DataError, match=says):
        read_rollouts(saved(tmp_path, {"prompt": "x", "completion": "y"}, line))


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(DataError, match=r"--rollouts: no file .*none\.jsonl; give a JSONL or Parquet file"):
        read_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no rollouts"):
        read_rollouts(saved(tmp_path, ""))


# Other libraries' files

ASKED = "system\nBe brief.\nuser\n1+1=\nassistant\n"
TRL_ROWS = {
    "step": [5, 5, 5],
    "prompt": [ASKED, ASKED, ASKED],
    "completion": ["1+1=2\n#### 2", "3", ""],
    "accuracy_reward": [1.0, 0.0, None],
    "advantage": [0.7, -0.7, 0.0],
}


def trl_file(folder, step, **columns):
    rows = TRL_ROWS | {"step": [step] * 3} | columns
    folder.mkdir(exist_ok=True)
    parquet.write_table(pa.table(rows), folder / f"completions_{step:05d}.parquet")
    return folder / f"completions_{step:05d}.parquet"


def test_trl_parquet(tmp_path):
    found = read_rollouts(trl_file(tmp_path, 5, solution=["so #### 2", "2", "2"]))
    assert found == [  # the third said nothing
        SavedRollout(ASKED, "1+1=2\n#### 2", "2", rendered=True),
        SavedRollout(ASKED, "3", "2", rendered=True),
    ]
    assert [r.reference for r in read_rollouts(trl_file(tmp_path, 6), "trl")] == [None, None]


def test_trl_messages(tmp_path):
    asked = [[{"role": "user", "content": "1+1="}]] * 3
    said = [[{"role": "assistant", "content": text}] for text in ("2", "3", "4")]
    found = read_rollouts(trl_file(tmp_path, 5, prompt=asked, completion=said))
    assert found[0] == SavedRollout([{"role": "user", "content": "1+1="}], "2", None, rendered=True)


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path):
    for step in (100, 20, 3):
        trl_file(tmp_path / "run", step, completion=[f"{step}", "x", "y"])
    assert [r.completion for r in read_rollouts(tmp_path / "run")[::3]] == ["3", "20", "100"]


def verl_lines(truths):
    common = {"input": ASKED, "score": 1.0, "step": 3, "acc": True, "pred": "2", "request_id": "a1"}
    return [common | {"output": f"#### {n}", "gts": truth} for n, truth in enumerate(truths)]


def test_verl_lines(tmp_path):
    found = read_rollouts(saved(tmp_path, *verl_lines(["2", 3, ["4"], None, {"tests": []}])))
    assert [r.reference for r in found] == ["2", "3", "4", None, None]
    assert found[0] == SavedRollout(ASKED, "#### 0", "2", rendered=True)


def test_verl_lines_of_earlier_versions_have_no_truth(tmp_path):
    lines = [{k: v for k, v in line.items() if k != "gts"} for line in verl_lines(["2"])]
    assert read_rollouts(saved(tmp_path, *lines)) == [SavedRollout(ASKED, "#### 0", None, rendered=True)]


def test_messages_of_ones_own(tmp_path):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    line = {"prompt": [{"role": "user", "content": parts, "extra": 1}], "completion": "2", "reference": "2"}
    assert read_rollouts(saved(tmp_path, line)) == [SavedRollout([{"role": "user", "content": "1+1="}], "2", "2")]


def test_a_run_s_own_parquet(tmp_path):
    parquet.write_table(pa.table({"prompt": ["1+1="], "completion": ["2"]}), tmp_path / "own.parquet")
    assert read_rollouts(tmp_path / "own.parquet") == [SavedRollout("1+1=", "2", None)]


@pytest.mark.parametrize(
    ("line", "form", "says"),
    [
        (
            {"question": "x", "text": "y"},
            "auto",
            r"expected the fields of .*, got 'question', 'text'; set --",
        ),
        (
            {"prompt": "x", "completion": "y"},
            "verl",
            r"input: expected text or chat messages .*, got None",
        ),
        ({"input": "x", "output": 3}, "auto", r"output: expected text or chat messages \(format verl\), got 3"),
        ({"step": 1, "prompt": "x", "completion": [1]}, "auto", r"expected chat messages with role and text content"),
        (
            {"prompt": "x", "completion": [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "5"}]},
            "auto",
            r"expected one turn of the assistant, got the turns tool, assistant; .* as a separate rollout",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": "y"}, "auto", r"got \{'role'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, line, form, says):
    with pytest.raises(DataError, match=says):
        read_rollouts(saved(tmp_path, line), form)


def test_an_unreadable_parquet_is_named(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"broken\.parquet: not readable as Parquet"):
        read_rollouts(tmp_path / "broken.parquet")


# Special tokens that were lost

CHAT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def chatty():
    """A character-level tokenizer with a chat template like Qwen's."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    letters = dict.fromkeys((*special, "\n", *map(chr, range(32, 127))))
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(letters)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[2], pad_token=special[0])
    fast.chat_template = CHAT
    return fast


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "1+1="}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\n\nb"}],
        [*({"role": r, "content": c} for r, c in (("user", "1"), ("assistant", "2"), ("user", "3")))],
    ],
)
@pytest.mark.parametrize("switch", [{}, {"enable_thinking": False}])
def test_lost_special_tokens_are_put_back(chatty, turns, switch):
    ids, table = chat_ids(chatty, turns, **switch), token_bytes(chatty, 200)
    text = chatty.decode(ids, skip_special_tokens=True)
    assert "<|im_start|>" not in text
    assert rendered_ids(chatty, text, table) == (ids, True)
    whole = chatty.decode(ids)
    assert rendered_ids(chatty, whole, table) == (ids, False), "nothing was lost"


@pytest.mark.parametrize(
    "text",
    [
        "1+1=",
        "user\n1+1=",
        "assistant\n",
        "x user\n1\nassistant\n",
        "user\n1\nuser\n2\nassistant\n",
        "user\n1\nassistant\nSo",
    ],
)
def test_other_texts_are_taken_as_they_stand(chatty, text):
    assert rendered_ids(chatty, text, token_bytes(chatty, 200)) == (encode(chatty, text), False)


def test_an_answer_that_was_begun_is_gone_on_with(chatty):
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is"}]
    assert chatty.decode(chat_ids(chatty, turns)).endswith("<|im_start|>assistant\nIt is")


def test_messages_need_a_template(chatty):
    bare = PreTrainedTokenizerFast(tokenizer_object=chatty.backend_tokenizer)
    with pytest.raises(TokenizerError, match="chat messages need a chat template"):
        chat_ids(bare, [{"role": "user", "content": "1"}])
