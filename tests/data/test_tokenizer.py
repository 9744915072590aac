"""Loading, stop set, token bytes and prompts, on a small byte-level BPE, the built-in characters and Qwen's own."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oarjax.data.tasks.arithmetic import write_tokenizer
from oarjax.data.tokenizer import (
    TokenizerError,
    encode,
    load_tokenizer,
    pad_id,
    render_prompt,
    reply_ids,
    stop_ids,
    text_of,
    token_bytes,
)

TEXTS = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
    "  two  spaces\tand a tab\r\n",
    "naïve café, Ж, 数学, 𝔽₂, 🙂, e\u0301",
    r"so \boxed{\frac{1}{2}} it is",
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE in Qwen's layout: 256 bytes, 40 merges, the special tokens and one added word."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=296, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    write_tokenizer(folder)
    return folder


def test_bytes_of_byte_level_ids_spell_the_text(bpe):
    tokenizer = load_tokenizer(bpe)
    table = token_bytes(tokenizer, 320)
    assert len(table) == 320
    for text in TEXTS:
        ids = encode(tokenizer, text)
        assert b"".join(table[i] for i in ids) == text.encode()
        assert text_of(ids, table) == text
    vocab = tokenizer.get_vocab()
    assert table[vocab["<|im_end|>"]] == table[vocab["<|endoftext|>"]] == b""  # special
    assert table[vocab["<think>"]] == b"<think>"  # added, but text
    assert table[len(vocab) :] == [b""] * (320 - len(vocab))  # the embedding's padding
    assert sorted(b for b in table if len(b) == 1) == [bytes([b]) for b in range(256)]  # every byte once


def test_bytes_do_not_need_the_canonical_encoding(bpe):
    """Sampled ids may spell a word byte by byte: the text is the same."""
    tokenizer = load_tokenizer(bpe)
    table = token_bytes(tokenizer, 320)
    single = {value: index for index, value in enumerate(table) if len(value) == 1}
    ids = [single[bytes([byte])] for byte in "数学".encode()]
    assert ids != encode(tokenizer, "数学") or len(ids) == 6
    assert text_of(ids, table) == "数学"
    assert text_of(ids[:-1], table) == "数\ufffd"  # a character cut short


def test_vocabulary_larger_than_the_model_is_refused(bpe):
    tokenizer = load_tokenizer(bpe)
    with pytest.raises(TokenizerError, match=r"ids up to 299, but the model's vocabulary only 299"):
        token_bytes(tokenizer, 299)


def test_stop_set_is_the_union(bpe, tmp_path):
    tokenizer = load_tokenizer(bpe)
    vocab = tokenizer.get_vocab()
    end_of_text, end_of_turn = vocab["<|endoftext|>"], vocab["<|im_end|>"]
    assert stop_ids(tmp_path, tokenizer) == (end_of_text, end_of_turn)  # no generation_config.json
    for declared, more in ((7, {7}), ([9, 7], {7, 9}), (None, set())):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert stop_ids(tmp_path, tokenizer) == tuple(sorted({end_of_text, end_of_turn} | more))
    assert pad_id(tokenizer) == end_of_text


def test_missing_end_and_padding_are_named(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    bare = load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no token ends a completion; set eos_token"):
        stop_ids(tmp_path, bare)
    with pytest.raises(TokenizerError, match="no padding token; set pad_token"):
        pad_id(bare)


def test_chat_template_opens_the_assistants_turn(bpe):
    tokenizer = load_tokenizer(bpe)
    vocab = tokenizer.get_vocab()
    ids = render_prompt(
        tokenizer, "2+2?", template="chat", system_prompt="Be brief.", prompt_format=r"{prompt} Use \boxed{}."
    )
    table = token_bytes(tokenizer, 300)
    assert text_of(ids, table) == "system\nBe brief.\nuser\n2+2? Use \\boxed{}.\nassistant\n"
    start, end = vocab["<|im_start|>"], vocab["<|im_end|>"]
    assert [i for i in ids if i in (start, end)] == [start, end, start, end, start]


def test_thinking_is_switched_where_the_template_can(bpe):
    tokenizer = load_tokenizer(bpe)
    rendered = {"template": "chat", "system_prompt": None, "prompt_format": "{prompt}"}
    with pytest.raises(TokenizerError, match=r"data\.thinking: the chat template has no enable_thinking; set"):
        render_prompt(tokenizer, "2+2?", **rendered, thinking=True)
    tokenizer.chat_template = str(tokenizer.chat_template) + "{% if enable_thinking is false %}No.{% endif %}"
    table = token_bytes(tokenizer, 300)
    whole = {
        on: text_of(render_prompt(tokenizer, "2+2?", **rendered, thinking=on), table) for on in (None, True, False)
    }
    assert whole[True] == whole[None]
    assert whole[False] == whole[None] + "No."


def test_a_reply_follows_the_stop_token_as_the_chat_template_writes_it(bpe):
    tokenizer = load_tokenizer(bpe)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "cd"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    reply = reply_ids(tokenizer, "cd", ["<|endoftext|>", "<|im_end|>"], keep=False)
    assert tokenizer.decode(reply) == str(whole).partition("b<|im_end|>")[2]
    assert tokenizer.decode(reply).startswith("\n<|im_start|>user\ncd<|im_end|>")


def test_a_template_that_drops_earlier_thinking_is_refused_unless_it_stays(bpe):
    tokenizer = load_tokenizer(bpe)
    tokenizer.chat_template = CHAT.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(TokenizerError, match=r"set rollout\.environment\.thinking to keep"):
        reply_ids(tokenizer, "cd", ["<|im_end|>"], keep=False)
    kept = reply_ids(tokenizer, "cd", ["<|im_end|>"], keep=True)
    tokenizer.chat_template = CHAT
    assert kept == reply_ids(tokenizer, "cd", ["<|im_end|>"], keep=False)


def test_tools_are_shown_by_templates_that_can(bpe):
    tokenizer = load_tokenizer(bpe)
    asked = {"template": "chat", "system_prompt": None, "prompt_format": "{prompt}"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with pytest.raises(TokenizerError, match="shows no tools"):
        render_prompt(tokenizer, "2+2?", **asked, tools=tools)
    tokenizer.chat_template = "{% for t in tools %}{{ t.function.name }} {% endfor %}" + CHAT
    table = token_bytes(tokenizer, 300)
    assert text_of(render_prompt(tokenizer, "2+2?", **asked, tools=tools), table).startswith("add user\n2+2?")


def test_plain_template(bpe):
    tokenizer = load_tokenizer(bpe)
    table = token_bytes(tokenizer, 300)

    def plain(system_prompt, prompt_format):
        ids = render_prompt(
            tokenizer, "2+2?", template="plain", system_prompt=system_prompt, prompt_format=prompt_format
        )
        return text_of(ids, table)

    assert plain(None, "{prompt}") == "2+2?"
    assert plain("Sums.", "Q: {prompt}\nA:") == "Sums.\n\nQ: 2+2?\nA:"
    with pytest.raises(TokenizerError, match=r"data.prompt_format 'solve': expected \{prompt\}"):
        plain(None, "solve")


def test_missing_chat_template_names_the_remedy(characters):
    tokenizer = load_tokenizer(characters)
    with pytest.raises(TokenizerError, match=r"no chat template; set data.template to plain"):
        render_prompt(tokenizer, "1+2=", template="chat", system_prompt=None, prompt_format="{prompt}")


def test_empty_prompt_is_an_error(characters):
    tokenizer = load_tokenizer(characters)
    with pytest.raises(TokenizerError, match="the prompt '' encodes to no tokens; fill it in"):
        render_prompt(tokenizer, "", template="plain", system_prompt=None, prompt_format="{prompt}")


@pytest.mark.parametrize("split", [False, True])
def test_ids_are_those_of_transformers_whatever_its_file_cuts_or_pads(bpe, split):
    tokenizer = load_tokenizer(bpe)
    tokenizer.split_special_tokens = split
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    found = [encode(tokenizer, text) for text in (*TEXTS, "<|im_end|>")]
    assert found == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*TEXTS, "<|im_end|>")]
    assert (len(found[-1]) == 1) == (not split)


def test_characters_round_trip_and_keep_their_ids(characters):
    tokenizer = load_tokenizer(characters)
    table = token_bytes(tokenizer, 32)
    ids = encode(tokenizer, "37+25=62;#### 62")
    assert ids == [7, 11, 14, 6, 9, 18, 10, 6, 19, 3, 25, 10, 6]  # 3 special, ####, then 0123456789+-*/=;.,()? \n
    assert text_of([*ids, 2], table) == "37+25=62;#### 62"
    assert stop_ids(characters, tokenizer) == (0, 2)
    assert pad_id(tokenizer) == 0


def test_unknown_character_is_an_error_not_a_loss(characters):
    with pytest.raises(TokenizerError, match="cannot encode '3 apples': its vocabulary lacks 'a', 'p'"):
        encode(load_tokenizer(characters), "3 apples")
    with pytest.raises(TokenizerError, match=r"cannot encode '1\+1=.ud800': it contains half of a surrogate pair"):
        encode(load_tokenizer(characters), "1+1=\ud800")


def test_characters_survive_a_config_that_says_qwen2(characters, tmp_path):
    """The trap: beside a Qwen2 config.json AutoTokenizer rebuilds the file as byte-level BPE and loses characters."""
    for file in characters.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "Qwen2Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert text_of(encode(tokenizer, "1 + 2 = #### 3\n"), token_bytes(tokenizer, 32)) == "1 + 2 = #### 3\n"


def test_vocabulary_that_reads_back_wrong_is_refused(characters, tmp_path):
    tree = json.loads((characters / "tokenizer.json").read_text())
    tree["normalizer"] = {"type": "Replace", "pattern": {"String": "7"}, "content": "1"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"'7' encodes to \[5\], which decodes to '1'; expected the same text"):
        load_tokenizer(tmp_path)


def test_other_decoders_are_refused_by_name(characters, tmp_path):
    tree = json.loads((characters / "tokenizer.json").read_text())
    tree["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="decodes with Metaspace; expected ByteLevel"):
        load_tokenizer(tmp_path)


def test_missing_folder_and_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"expected tokenizer\.json, or vocab\.json with merges\.txt"):
        load_tokenizer(tmp_path)


def test_vocab_and_merges_without_tokenizer_json(bpe, tmp_path):
    """Older Qwen folders: the class rebuilds the same ids from the two files."""
    tree = json.loads((bpe / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(tree["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in tree["model"]["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    table = token_bytes(tokenizer, 320)
    assert text_of(encode(tokenizer, "#### 72 数学"), table) == "#### 72 数学"


def test_qwens_own_tokenizer(shared):
    tokenizer = load_tokenizer(shared / "tokenizer")
    table = token_bytes(tokenizer, 151_936)
    assert encode(tokenizer, "hello world") == [14990, 1879]
    assert stop_ids(shared / "tokenizer", tokenizer) == (151643, 151645)
    assert pad_id(tokenizer) == 151643
    gsm8k = (shared / "data" / "gsm8k_test.jsonl").read_text().splitlines()[:50]
    for text in (*TEXTS, *(json.loads(line)["answer"] for line in gsm8k)):
        ids = encode(tokenizer, text)
        # Qwen normalises to composed characters (NFC) before it splits
        assert b"".join(table[i] for i in ids).decode() == text.replace("e\u0301", "é")
    ids = render_prompt(tokenizer, "2+2?", template="chat", system_prompt=None, prompt_format="{prompt}")
    assert ids == [151644, 872, 198, 17, 10, 17, 30, 151645, 198, 151644, 77091, 198]
