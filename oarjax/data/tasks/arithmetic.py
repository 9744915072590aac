"""builtin:arithmetic and builtin:random: a task and policies for runs without a checkpoint or a dataset.

builtin:random is a tiny random Qwen2 for any tokenizer, with as many embedding rows as the real Qwen, to try out real
data on a small machine. builtin:arithmetic is chained sums, a character-level tokenizer and a tiny Qwen2 policy.

A problem is a chain such as ``37+25-18=``. Its written-out solution goes one step at a time,
``37+25=62;62-18=44;#### 44``, and answers as GSM8K does. The supervised split mixes two habits: part of its
completions write the steps out; the rest answer at once, and a small policy mostly gets that wrong. A policy that is
warmed up on it has only to learn from its rewards to write the steps out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from oarjax.data.hf import tokenizer_files, write_random_checkpoint
from oarjax.data.tokenizer import load_tokenizer, pad_id, stop_ids

MARKER = "####"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = "0123456789+-*/=;.,()? \n"
VOCABULARY = 151_936
"""Rows of the embedding of Qwen2.5 up to 3B and of Qwen3."""
SIZES = {"train": 20_000, "eval": 500, "sft": 20_000}
"""Problems of each split unless a limit is set."""


def arithmetic_rows(
    split: str, *, rows: int | None, terms: int, highest: int, written: float, seed: int
) -> Iterator[dict[str, str]]:
    """Generate ``rows`` distinct problems of a split, by default its size, as ``question`` and ``answer`` fields.

    ``terms`` numbers are chained by + and -; every running total lies in 0..``highest`` and is drawn uniformly, so the
    question gives no hint to the last total. In the sft split the answer is the completion to imitate: written out
    with probability ``written``, else the bare answer. In train and eval it is the written-out solution, whose last
    part is the reference. A hash of the question decides its split, so splits never share a question, whatever their
    seeds.

    Raises:
        ValueError: the split is unknown, or has fewer problems than ``rows``.
    """
    if split not in SIZES:
        raise ValueError(f"builtin:arithmetic has no split {split!r}; set one of {', '.join(SIZES)}")
    draw = random.Random(f"{split}/{seed}/{terms}/{highest}")
    questions: set[str] = set()
    size = rows or SIZES[split]
    for _ in range(size):
        for _ in range(10_000):
            question, steps, answer = arithmetic_problem(draw, terms=terms, highest=highest)
            if question not in questions and split_of(question) == split:
                break
        else:
            raise ValueError(
                f"builtin:arithmetic has fewer than {size} problems of {terms} numbers up to {highest} for {split} "
                f"(found {len(questions)}); raise terms or highest, or lower limit"
            )
        questions.add(question)
        write_out = split != "sft" or draw.random() < written
        yield {"question": question, "answer": f"{steps}{MARKER} {answer}" if write_out else f"{MARKER} {answer}"}


def arithmetic_problem(draw: random.Random, *, terms: int, highest: int) -> tuple[str, str, str]:
    """Draw a chain: the question ``37+25-18=``, its steps ``37+25=62;62-18=44;`` and its answer ``44``."""
    total = draw.randint(0, highest)
    question, steps = str(total), ""
    for _ in range(terms - 1):
        next_total = draw.randrange(highest)  # among the totals other than this one
        next_total += next_total >= total
        change = f"{'+' if next_total >= total else '-'}{abs(next_total - total)}"
        question += change
        steps += f"{total}{change}={next_total};"
        total = next_total
    return f"{question}=", steps, str(total)


def split_of(question: str) -> str:
    """Return a question's split: an eighth of all questions is eval's, train and sft share the rest equally."""
    bucket = hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % 16
    return "eval" if bucket < 2 else "train" if bucket < 9 else "sft"


def computed_tokens(tokens: Sequence[str]) -> list[bool]:
    """Mark the tokens that hold digits of a step's result: the 62 and the 44 of 37+25=62;62-18=44;

    These carry the computation: the answer's digits are copied from the last result, and each step starts from the
    result before it. The text before the ``=`` is copied from the question.
    """
    return tokens_with(tokens, [match.span(1) for match in re.finditer(r"=([0-9]+);", "".join(tokens))])


def first_wrong_step(question: str, tokens: Sequence[str]) -> list[bool]:
    """Mark the first mistake of a written-out solution: a step's result, or its left side if that is miscopied.

    A left side is right if it is the running total and the next change of the question. A solution whose steps are all
    right, even if it is incomplete, and an answer without steps have no marks.
    """
    start, *changes = re.findall(r"[+-]?[0-9]+", question)
    total = start
    for number, step in enumerate(re.finditer(r"([0-9]+)([+-][0-9]+)=([0-9]+);", "".join(tokens).partition(MARKER)[0])):
        expected = (total, changes[number] if number < len(changes) else None, str(int(step[1]) + int(step[2])))
        for part in (1, 2, 3):
            if step[part] != expected[part - 1]:
                return tokens_with(tokens, [step.span(part)])
        total = step[3]
    return [False] * len(tokens)


def tokens_with(tokens: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Mark the tokens that hold a character of one of the spans (start, end) of their joined text."""
    ends = list(itertools.accumulate(map(len, tokens)))
    return [any(start < end and end - len(t) < stop for start, stop in spans) for t, end in zip(tokens, ends)]


def write_tokenizer(folder: Path | str, *, letters: str = LETTERS) -> None:
    """Write a character-level tokenizer in the HF layout, with ``####`` as one token and Qwen's three special tokens.

    It has no unknown token, so a character outside the vocabulary raises an error instead of being lost.
    """
    save_tokenizer(folder, (MARKER, *letters), pieces=rf"{MARKER}|[\s\S]")


def save_tokenizer(folder: Path | str, tokens: Sequence[str], *, pieces: str) -> None:
    """Write a tokenizer in the HF layout: Qwen's three special tokens, then ``tokens``.

    ``pieces`` is a pattern that splits every text into tokens; nothing is lost between its matches.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate((*SPECIAL, *tokens))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_text, _, end_of_turn = SPECIAL
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_of_turn,
            "pad_token": end_of_text,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})


def builtin_config(
    *, hidden: int = 96, layers: int = 3, heads: int = 4, kv_heads: int = 2, ffn: int = 256, vocab: int = 32
) -> dict[str, Any]:
    """Return config.json of a tiny tied Qwen2, its embedding padded beyond the tokenizer as in Qwen."""
    size = len(SPECIAL) + 1 + len(LETTERS)
    if vocab < size:
        raise ValueError(f"vocab: expected at least {size}, the tokenizer's size, got {vocab}")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def write_builtin_policy(
    folder: Path | str,
    *,
    seed: int,
    hidden: int = 96,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 256,
    vocab: int = 32,
) -> Path:
    """Write a tiny random Qwen2 with its tokenizer as an HF folder, which is read like any other checkpoint."""
    fields = builtin_config(hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab)
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(scratch)
        return write_random_checkpoint(Path(folder), fields, seed=seed, tokenizer=Path(scratch))


def write_random_policy(folder: Path | str, *, tokenizer: Path, seed: int) -> Path:
    """Write a tiny random Qwen2 as an HF folder, for the tokenizer of another folder.

    Its embedding has Qwen's ``VOCABULARY`` rows, or as many as a larger tokenizer needs, in multiples of 128.

    Raises:
        TokenizerError: the folder holds no usable tokenizer.
    """
    reader = load_tokenizer(tokenizer)
    stops = stop_ids(tokenizer, reader)
    rows = max(VOCABULARY, -(-(max(reader.get_vocab().values()) + 1) // 128) * 128)
    fields = builtin_config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=rows)
    fields |= {"bos_token_id": pad_id(reader), "eos_token_id": list(stops), "max_position_embeddings": 2048}
    with tempfile.TemporaryDirectory() as scratch:
        for file in tokenizer_files(tokenizer):
            shutil.copyfile(file, Path(scratch) / file.name)
        _write_json(
            Path(scratch) / "generation_config.json", {"eos_token_id": list(stops), "pad_token_id": pad_id(reader)}
        )
        return write_random_checkpoint(Path(folder), fields, seed=seed, tokenizer=Path(scratch))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
