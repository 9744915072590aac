"""Benchmarks by name, and how each family of policies is asked: what ``oarjax evaluate`` fills a config with.

Nothing here is read or downloaded before it is asked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from oarjax.config.inputs import DatasetConfig
from oarjax.data.rows import read_rows
from oarjax.data.tokenizer import can_think
from oarjax.errors import ConfigError

STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
"""The sentence that Qwen2.5-Math and Qwen3 were trained with."""


@dataclass(frozen=True)
class Benchmark:
    """A dataset with a name, and the longest completion that its problems are given."""

    data: dict[str, Any]  # fields of data.eval
    max_new: int = 3072  # with prompts of up to 1024 tokens, Qwen2.5-Math's 4096 positions
    settings: dict[str, Any] = field(default_factory=dict)  # further config fields, by their path
    prompt: str | None = None  # the one template that fits it; None = by the policy's family
    named: bool = True  # False: a file or dataset of the user's own


BENCHMARKS = {
    "gsm8k": Benchmark(
        {"source": "openai/gsm8k", "name": "main", "split": "test"},
        max_new=1024,
        settings={"grading.rewards": [{"name": "math", "settings": {"percent_as_unit": True}}]},
    ),
    "math500": Benchmark({"source": "HuggingFaceH4/MATH-500", "split": "test", "prompt_field": "problem"}),
    "aime24": Benchmark({"source": "HuggingFaceH4/aime_2024", "split": "train", "prompt_field": "problem"}),
    "aime25": Benchmark({"source": "math-ai/aime25", "split": "test", "prompt_field": "problem"}),
    "amc23": Benchmark({"source": "math-ai/amc23", "split": "test"}),
    "demo": Benchmark(
        {"source": "builtin:arithmetic", "split": "eval", "arithmetic": {"highest": 9}},
        max_new=32,
        settings={
            "data.max_prompt": 16,
            "rollout.prompt_bucket": 16,
            "grading.rewards": [{"name": "exact"}],
            "credit.answer.style": "hash",
        },
        prompt="plain",
    ),
}

EXAMPLES = (
    (
        "A baker fills 6 trays with 8 rolls each and sells 29 of the rolls. How many rolls are left?",
        "Six trays of 8 rolls are 6 * 8 = 48 rolls. After selling 29 of them, 48 - 29 = 19 are left.",
        "19",
    ),
    (
        "What is the value of $x$ if $3x - 7 = 11$?",
        "Adding 7 on both sides gives $3x = 18$. Dividing by 3 gives $x = 6$.",
        "6",
    ),
    (
        "A coat costs $80. Its price is lowered by 15%. What does it cost now, in dollars?",
        "15% of 80 is 0.15 * 80 = 12. The coat now costs 80 - 12 = 68 dollars.",
        "68",
    ),
    (
        "A fair die is rolled twice. What is the probability that both rolls show a number above 4?",
        "Two of the six numbers, 5 and 6, are above 4, so each roll has probability 1/3, and both 1/3 * 1/3 = 1/9.",
        "\\frac{1}{9}",
    ),
)
"""Worked problems for base policies: question, reasoning, answer."""

FIRST_ANSWER = r"(?s)\A.*?[Tt]he answer is:?\s*\$?([^\n]*?)\$?\.?\s*(?:\n|\Z)"
"""The first answer of a completion: a base policy continues with further questions of its own."""


def few_shot() -> str:
    """Write the worked problems as a prompt's format."""
    examples = [f"Question: {q}\nAnswer: {steps} The answer is {answer}." for q, steps, answer in EXAMPLES]
    return "\n\n".join([*examples, "Question: {prompt}\nAnswer:"])


PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"data.template": "chat", "data.prompt_format": f"{{prompt}}\n{STEP_BY_STEP}"},
    "qwen-math": {"data.template": "chat", "data.system_prompt": STEP_BY_STEP},
    "qwen3": {"data.template": "chat", "data.prompt_format": f"{{prompt}}\n{STEP_BY_STEP}", "data.thinking": True},
    "qwen3-no-thinking": {
        "data.template": "chat",
        "data.prompt_format": f"{{prompt}}\n{STEP_BY_STEP}",
        "data.thinking": False,
    },
    "few-shot": {
        "data.template": "plain",
        "data.prompt_format": few_shot(),
        "credit.answer.style": "regex",
        "credit.answer.pattern": FIRST_ANSWER,
    },
    "plain": {"data.template": "plain"},
}
"""--prompt -> config fields: the tokenizer's chat template, with what each family of policies expects, or none."""


def family_prompt(policy: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the template of ``PROMPTS`` for a policy, by its tokenizer; Qwen-Math's also by its name.

    A tokenizer cannot tell a base policy from an instructed one where both have a chat template, as Qwen2.5's do.
    """
    if tokenizer.chat_template is None:
        return "few-shot"
    if can_think(tokenizer):
        return "qwen3"
    return "qwen-math" if "math" in policy.lower() or STEP_BY_STEP in str(tokenizer.chat_template) else "chat"


@dataclass(frozen=True)
class Asked:
    """One entry of --data."""

    name: str
    benchmark: Benchmark


def read_names(text: str) -> list[Asked]:
    """Parse ``--data``: benchmarks, ``name=file`` for a local copy of one, files, hub datasets, comma-separated.

    Raises:
        ConfigError: none, one twice, or a file that is not there.
    """
    benchmarks = [_read_name(part.strip()) for part in text.split(",") if part.strip()]
    if not benchmarks:
        raise ConfigError(
            f"--data: expected names out of {', '.join(BENCHMARKS)}, name=file.jsonl, .jsonl or .parquet files, or hub "
            f"datasets, with commas between them, got {text!r}"
        )
    name, times = Counter(a.name for a in benchmarks).most_common(1)[0]
    if times > 1:
        raise ConfigError(
            f"--data: {times} of {text!r} are called {name!r}, and results are kept by name (a file's is its own "
            "without folder and ending); name each once, rename a file, or evaluate them one at a time"
        )
    return benchmarks


def _read_name(text: str) -> Asked:
    if text in BENCHMARKS:
        return Asked(text, BENCHMARKS[text])
    name, sep, path = text.partition("=")
    if sep and name not in BENCHMARKS:
        raise ConfigError(f"--data: unknown benchmark {name!r}; name=file accepts {', '.join(BENCHMARKS)}")
    source = path if sep else text
    if not source.endswith((".jsonl", ".parquet")) and (sep or "/" not in source):
        raise ConfigError(
            f"--data: {source!r} is neither a benchmark ({', '.join(BENCHMARKS)}), a .jsonl or .parquet file, nor a "
            "hub dataset such as openai/gsm8k"
        )
    if source.endswith((".jsonl", ".parquet")) and not Path(source).expanduser().is_file():
        raise ConfigError(f"--data: no file {source}; give the path of an existing .jsonl or .parquet file")
    benchmark = BENCHMARKS[name] if sep else Benchmark({})
    return Asked(
        name if sep else Path(source).stem,
        replace(benchmark, data={"source": source}, named=bool(sep)),
    )


FIELDS = [(q, a) for a in ("answer", "ground_truth", "gt") for q in ("question", "problem", "prompt")]
"""Names that fields have in math datasets, in the order in which they are tried."""


def find_fields(data: DatasetConfig) -> DatasetConfig:
    """Complete a dataset without named fields by the first pair of ``FIELDS`` that its first row has, if any.

    Raises:
        DataError: it cannot be read.
    """
    _, row = next(read_rows(data, where="data.eval"), ("", {}))
    for question, answer in FIELDS:
        if question in row and answer in row:
            return data.model_copy(update={"prompt_field": question, "answer_field": answer})
    return data
