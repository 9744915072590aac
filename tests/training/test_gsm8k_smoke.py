"""configs/gsm8k_smoke_cpu.yaml: a vocabulary of 151,936, a chat template and a byte-level tokenizer in every phase.

With Qwen's own tokenizer and GSM8K where they lie beside the checkout, and with a made-up tokenizer of the same size
and kind everywhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import CACHE, ROOT, SHARED
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from oarjax.data.hf import load_params, read_config, read_fields
from oarjax.data.tasks.arithmetic import VOCABULARY, write_random_policy, write_tokenizer
from oarjax.data.tokenizer import encode, load_tokenizer, render_prompt, stop_ids, text_of, token_bytes
from oarjax.report.files import read_completions, read_metrics

SPECIAL = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEASURED = """
import sys
from oarjax.cli import main
from oarjax.tools.bench.measure import peak_memory_mb  # of this program alone; ru_maxrss begins with the parent's
try:
    main()
finally:
    print("peak MiB", peak_memory_mb(), file=sys.stderr)
"""


def write_wide_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of Qwen's size and special ids: 256 bytes, then words, one in 90 with a q in it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = range(10**6, 10**6 + 151643 - len(letters))
    words = ("Ġ" + "".join("abcdefghij"[int(d)] for d in str(n)) + "q" * (n % 90 == 0) for n in numbers)
    vocab = {token: index for index, token in enumerate((*letters, *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_wide_tokenizer(tmp_path_factory.mktemp("wide") / "tokenizer")


def test_random_policy_for_a_byte_level_tokenizer_of_qwens_size(wide, tmp_path):
    folder = write_random_policy(tmp_path / "policy", tokenizer=wide, seed=0)
    cfg, _ = read_config(folder)
    assert cfg.vocab_size == VOCABULARY == 151_936
    tokenizer = load_tokenizer(folder)
    assert stop_ids(folder, tokenizer) == (151643, 151645)
    assert read_fields(folder)["eos_token_id"] == [151643, 151645]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [151643, 151645]
    assert load_params(folder, cfg)["embed"]["embedding"].shape == (151_936, 32)

    table = token_bytes(tokenizer, cfg.vocab_size)
    assert len(table) == 151_936
    assert all(table[index] == b"" for index in (*SPECIAL.values(), *range(151646, 151936)))  # special, and padding
    ids = render_prompt(tokenizer, "Why é?", template="chat", system_prompt="Think.", prompt_format="{prompt}\n")
    assert [index for index in ids if index >= 151643] == [151644, 151645, 151644, 151645, 151644]
    assert text_of(ids, table) == "system\nThink.\nuser\nWhy é?\n\nassistant\n"
    assert encode(tokenizer, "é")[0] < 256


def test_random_policy_for_a_small_tokenizer_has_the_wide_vocabulary_too(tmp_path):
    write_tokenizer(tmp_path / "letters")
    folder = write_random_policy(tmp_path / "policy", tokenizer=tmp_path / "letters", seed=0)
    assert read_config(folder)[0].vocab_size == 151_936
    assert stop_ids(folder, load_tokenizer(folder)) == (0, 2)
    files = {p.name for p in folder.iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.slow
def test_two_iterations_within_4_gib(request, tmp_path):
    """With the config's policy, and with the real tokenizer and GSM8K where they lie."""
    if SHARED.is_dir():
        tokenizer, problems = SHARED / "tokenizer", SHARED / "data" / "gsm8k_train.jsonl"
    else:
        tokenizer, problems = request.getfixturevalue("wide"), tmp_path / "problems.jsonl"
        rows = [
            {"question": f"Ann has {n} eggs, Bo {n + 1}. Both?", "answer": f"so\n#### {2 * n + 1}"} for n in range(9)
        ]
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", str(ROOT / "configs" / "gsm8k_smoke_cpu.yaml"), f"run_dir={tmp_path / 'run'}"]
    command += [f"data.train.source={problems}", f"compilation_cache={CACHE}"]
    command += [f"policy.tokenizer={tokenizer}"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak = float(done.stderr.rpartition("peak MiB")[2])
    print(f"peak resident memory {peak:.0f} MiB")
    assert peak < 4096

    first, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for record in (first, last):
        assert record["entropy"] == pytest.approx(np.log(VOCABULARY), rel=0.02)  # a random policy over all tokens
        assert record["sampler_gap"] < 1e-3
        assert record["rows_used"] > 0
        assert 0 < record["grad_norm"] < np.inf
        assert 0 < record["ess"] <= 1
    rows = read_completions(tmp_path / "run" / "completions.jsonl")
    assert all("".join(row.tokens) == row.completion for _, row in rows)
    found = [row for _, row in rows if row.answer is not None]
    assert all("q" in row.answer.lower() for row in found)
    assert all(any(row.is_answer) for row in found)
