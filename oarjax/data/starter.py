"""Write a config for a user's own data: recognise the columns, hold some rows out, change a config's section data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import yaml

from oarjax.config.inputs import DatasetConfig
from oarjax.config.learning import SFTConfig
from oarjax.config.loading import parse_config, read_tree
from oarjax.config.shipped import shipped_configs
from oarjax.data.problems import Problem, load_problems
from oarjax.data.rows import DataError, read_rows
from oarjax.errors import ConfigError
from oarjax.stats import wilson_interval

PROMPTS = ("question", "prompt", "problem", "instruction", "query", "input", "text")
ANSWERS = (
    *("answer", "solution", "reference", "ground_truth", "target", "expected", "gold", "label"),
    *("output", "response", "completion"),
)
"""Names of columns that are recognised, in any case, the first ones first."""

BASE = "gsm8k_qwen2.5-0.5b"
"""The shipped config that is changed if none is named: a small policy that reads any text."""

HELD_OUT, MOST_HELD_OUT = 0.1, 256
"""Share and maximum number of prompts that are held out for evaluations."""

BOTH = ".prompt_field and init --data.answer_field"
OPTIONS = {".source": "init --data", BOTH: "--columns", ".prompt_field": "--columns", ".answer_field": "--columns"}
"""Fields of a dataset's config, and the command's options in their place."""

FAR_LONGER = 4
"""A hundredth of the prompts, or one, does not set max_prompt where the longest is so many times the rest's."""

MISSING = ("", "nan")
"""Answers that stand for none."""

SUMS = frozenset("0123456789+-")
"""Characters of a sum that does not end in =."""


class Written(NamedTuple):
    """Files that were written, and what is in them."""

    config: Path
    train: Path
    eval: Path
    rows: tuple[int, int]  # of train and eval
    columns: tuple[str, str]  # of prompts and answers
    policy: str
    notes: tuple[str, ...] = ()

    def message(self) -> str:
        """Say what was written and what comes next."""
        (train, held_out), (prompt, answer) = self.rows, self.columns
        half = 100 * (wilson_interval(0.5, held_out)[1] - 0.5)  # of a 95% interval, widest in the middle
        lines = [
            f"pass@1 on {held_out} held-out prompts is known to ±{half:.0f} points at worst; more rows make it finer"
        ]
        if not self.policy.startswith("builtin:") and not Path(self.policy).expanduser().exists():
            lines.append(f"{self.policy} is downloaded at the first start, which needs the extra hub")
        lines += self.notes
        lines.append(f"change it, then: oarjax train {quote(str(self.config))}")
        return (
            f"wrote {self.config} for {self.policy}, {self.train} ({train} rows) and {self.eval} ({held_out} held "
            f"out); prompts are in {prompt}, answers in {answer}\n" + "\n".join(lines)
        )


def write_config(source: str, target: Path | None = None, *, base: str = "", columns: str = "") -> Written:
    """Write a config that trains on a dataset, with a tenth of its prompts held out, and the two parts as JSON lines.

    All rows of a prompt go to the same part, chosen by the prompt's digest. Nothing is overwritten.

    Args:
        source: a file or folder, see ``data.train.source``.
        target: the config's file; None = the source's name with .yaml here.
        base: a config, shipped or a file, whose other sections are kept; empty = ``BASE``. Without a target the name
            of a .yaml that is neither is the target.
        columns: names of the columns of prompts and answers, "PROMPTS,ANSWERS"; empty = by their names.

    Raises:
        ConfigError: columns are not recognised, a file exists or cannot be written, or the base is no config.
        DataError: the rows cannot be read, or have fewer than two prompts.
    """
    file = Path(base)
    if target is None and file.suffix == ".yaml" and not (file.exists() or file.stem in shipped_configs()):
        base, target = "", file  # the file to write, not one to begin from
    tree = json.loads(json.dumps(read_tree(base or BASE)))  # no part of it twice, as YAML's anchors have it
    with _options_named():
        prompt, answer = pair = _columns(source, columns)
        config = DatasetConfig(source=source, prompt_field=prompt, answer_field=answer)
        problems = load_problems(config, where="init --data")
        _refuse_halves(problems)
    train, held_out = _divided(problems)
    name = Path(source).name.partition(".")[0]
    target = target or Path(f"{name}.yaml")
    parts = [target.with_name(f"{target.stem}.{part}.jsonl") for part in ("train", "eval")]
    fields = {"prompt_field": prompt, "answer_field": answer}
    max_prompt, longer = _longest(problems, tree["policy"]["path"])
    tree["data"] |= {
        "max_prompt": max(tree["data"].get("max_prompt", 0), max_prompt),
        "train": {"source": str(parts[0]), **fields},
        "eval": {"source": str(parts[1]), **fields},
    }
    bare = tree.get("sft") and all(p.prompt and set(p.prompt) <= SUMS for p in problems)
    if bare and tree["sft"]["data"]["source"] == "builtin:arithmetic" and "prompt_format" not in tree["data"]:
        tree["data"]["prompt_format"] = "{prompt}="  # as the warm start's prompts end, after which it writes steps
    if not base:
        numbers = sum(any(c.isdigit() for c in p.reference) for p in problems) > len(problems) / 2
        tree["grading"] = {"rewards": [{"name": "math" if numbers else "exact"}]}
        tree["rollout"] |= {"prompts": 16, "max_new": 256}
        tree["iterations"] = 100
        del tree["plan"], tree["report"]  # of one chip, and of TensorBoard
    tree |= {"run_dir": f"runs/{target.stem}"}
    cfg = parse_config(tree, source=base or BASE)  # whatever was changed fits the rest
    policy = cfg.policy.path
    text = _HEAD.format(source=source, base=base or BASE, target=target, policy=policy) + yaml.dump(
        tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True
    )
    if existing := next((path for path in (target, *parts) if path.exists()), None):
        raise ConfigError(f"init: {existing} exists; give another file, or remove it")
    for path, content in zip((*parts, target), (*map(_lines, (train, held_out)), text)):
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"init: {path} cannot be written: {error.strerror}; give another file") from error
    notes = (*_unusual(problems, longer, cfg.data.max_prompt), *_beyond(cfg.sft, problems))
    if cfg.sft is not None:
        overrides = f"{quote(f'policy.path={cfg.run_dir}/start')} sft=null"
        notes += (f"the warm start stays in {cfg.run_dir}/start: other runs on this data take it with {overrides}",)
    return Written(target, parts[0], parts[1], (len(train), len(held_out)), pair, policy, notes)


@contextmanager
def _options_named() -> Iterator[None]:
    """Name options of the command where an error names a dataset's fields."""
    try:
        yield
    except DataError as error:
        text = str(error)
        for field, option in OPTIONS.items():
            text = text.replace(f"init --data{field}", option)
        raise DataError(text) from error


def _refuse_halves(problems: Sequence[Problem]) -> None:
    """Refuse text that no file can hold, before any is written.

    Raises:
        DataError: names the first such row.
    """
    for p in problems:
        try:
            json.dumps(p.columns, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{p.place}: holds {half!r}, half of a surrogate pair, which is not a character; correct the text, or "
                "leave the row out"
            ) from None


def _unusual(problems: Sequence[Problem], longer: int, max_prompt: int) -> Iterator[str]:
    """Say which rows training leaves out or cannot grade."""
    if longer > max_prompt:
        yield (
            f"a few prompts are far longer than the rest: those over {max_prompt} tokens are left out; "
            f"data.max_prompt={longer} takes them all"
        )
    blank = sum(not p.prompt.strip() for p in problems)
    if blank:
        yield f"{blank} of {len(problems)} prompts are blank, so nothing is asked: remove these rows"
    missing = sum(p.answer.strip().lower() in MISSING for p in problems)
    if missing:
        yield f"{missing} of {len(problems)} answers are blank or NaN, so no completion is right: remove these rows"
    answers: dict[str, set[str]] = {}
    for p in problems:
        answers.setdefault(_key(p), set()).add(p.reference.strip())
    several = sum(len(found) > 1 for found in answers.values())
    if several:
        yield f"{several} of {len(answers)} prompts stand with different answers in several rows: keep the right ones"


def _beyond(sft: SFTConfig | None, problems: Sequence[Problem]) -> Iterator[str]:
    """Say which prompts and answers the built-in policy does not learn to read or write in its warm start."""
    if sft is None or sft.data.source != "builtin:arithmetic":
        return
    from oarjax.data.tasks.arithmetic import LETTERS  # loads JAX

    unknown = sorted({letter for p in problems for letter in p.prompt + p.reference} - set(LETTERS))
    if unknown:
        letters = " ".join(map(repr, unknown[:10])) + (" ..." if unknown[10:] else "")
        yield f"the built-in policy cannot read {letters}: without a NAME, init takes a policy that reads any text"
    highest, terms = sft.data.arithmetic.highest, sft.data.arithmetic.terms
    mismatches = sum(len(re.findall(r"\d+", p.prompt)) != terms for p in problems)
    if mismatches:
        yield (
            f"{mismatches} of {len(problems)} prompts do not have {terms} numbers, all that the warm start shows: set "
            "sft.data.arithmetic.terms to yours, or give sft.data solutions of yours where they differ"
        )
    outside = sum(not _shown(p.reference, highest) for p in problems if p.answer.strip().lower() not in MISSING)
    if outside:
        yield (
            f"{outside} of {len(problems)} answers are not numbers from 0 to {highest}, all that the warm start shows: "
            f"raise sft.data.arithmetic.highest, or give sft.data solutions of yours"
        )


def _shown(answer: str, highest: int) -> bool:
    """Return whether an answer is a whole number from 0 to ``highest``, however written: 4.0 is 4."""
    try:
        value = float(answer)
    except ValueError:
        return False
    return value.is_integer() and 0 <= value <= highest


_HEAD = """# Train {policy} on {source}; all that is not about data is from {base}.
#   oarjax train {target}
#   oarjax train {target} credit.method=uniform run_dir=runs/grpo    # plain GRPO
# The first reward decides pass@1. A reward of your own: grading.plugins=[my_rewards.py], its name in grading.rewards.
# If memory runs out: a smaller update.microbatch, rollout.prompts or rollout.max_new.
# A name such as Qwen/... is downloaded at the first start. 0.5B parameters take minutes an iteration on a CPU.
"""


class _Dumper(yaml.SafeDumper):
    """Write texts of several lines in quotes, on one line where they fit."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _columns(source: str, asked: str) -> tuple[str, str]:
    """Return the columns of prompts and answers.

    Raises:
        ConfigError: they are not recognised; lists those that are there.
        DataError: there are no rows.
    """
    first = next(read_rows(DatasetConfig(source=source), where="init --data"), None)
    if first is None:
        raise DataError(f"init --data: {source} holds no rows; give another file")
    names = list(first[1])
    if asked:
        columns = [name.strip() for name in asked.split(",")]
        if len(columns) != 2 or not set(columns) <= set(names):
            raise ConfigError(f"init --columns: expected two of {', '.join(names)}, as PROMPTS,ANSWERS, got {asked}")
        return columns[0], columns[1]
    by_name = {name.strip().lower(): name for name in reversed(names)}
    prompt, answer = (next((by_name[n] for n in candidates if n in by_name), None) for candidates in (PROMPTS, ANSWERS))
    if prompt is None or answer is None:
        other = next(
            (f"; its columns are divided by {mark!r}: write commas" for mark in ";\t|" if mark in names[0]), ""
        )
        if source.endswith(".csv") and not other:
            other = "; the first line of a CSV file must name its columns"
        raise ConfigError(
            f"init --data: {source} has the columns {', '.join(names)}; expected one of {', '.join(PROMPTS)} for the "
            f"prompts and one of {', '.join(ANSWERS)} for the answers; name yours with --columns PROMPTS,ANSWERS{other}"
        )
    return prompt, answer


def _divided(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Divide problems into those to train on and those held out, in the dataset's order."""
    digests = {_key(p): sha256(_key(p).encode()).hexdigest() for p in problems}
    if len(digests) < 2:
        raise DataError("init --data: all rows have the same prompt; at least two are needed, one to hold out")
    count = min(MOST_HELD_OUT, max(1, round(len(digests) * HELD_OUT)))
    held_out = set(sorted(digests, key=digests.__getitem__)[:count])
    return [p for p in problems if _key(p) not in held_out], [p for p in problems if _key(p) in held_out]


def _key(problem: Problem) -> str:
    return json.dumps([problem.prompt.strip(), *problem.chat])


def _longest(problems: Sequence[Problem], policy: str) -> tuple[int, int]:
    """Bound prompts' tokens in steps of 32, at two bytes each, or of a built-in policy one.

    Returns:
        A bound of all prompts but those ``FAR_LONGER`` than the rest, and a bound of all.
    """
    step = 32 if policy.startswith("builtin:") else 64
    lengths = sorted(sum(len(turn["content"].encode()) for turn in p.chat) or len(p.prompt.encode()) for p in problems)
    few = max(1, len(lengths) // 100) if len(lengths) >= 20 else 0
    longest, usual = lengths[-1], lengths[-1 - few]
    return 32 * math.ceil((usual if longest > FAR_LONGER * usual else longest) / step), 32 * math.ceil(longest / step)


def _lines(problems: Sequence[Problem]) -> str:
    rows: list[dict[str, Any]] = [problem.columns for problem in problems]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
