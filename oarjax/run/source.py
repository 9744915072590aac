"""Read the files that a run is opened from: the policy's folder, and datasets encoded with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from oarjax.config.inputs import DataConfig, DatasetConfig, PolicyConfig
from oarjax.config.learning import EnvironmentConfig, SFTConfig
from oarjax.data.hf import read_tokenizer_folder
from oarjax.data.problems import load_problems
from oarjax.data.streams import Encoded, PromptOrder, encode_pairs, encode_problems
from oarjax.data.tasks import arithmetic as builtin
from oarjax.data.tasks.forks import write_forks_policy
from oarjax.data.tasks.stories import write_stories_policy
from oarjax.data.tasks.turns import write_turns_policy
from oarjax.data.tokenizer import encode, reply_ids
from oarjax.environments.contract import load_environment, tool_schemas
from oarjax.errors import ConfigError
from oarjax.storage.durable import check_guards, exists, storage_errors
from oarjax.storage.folder import has_progress
from oarjax.system.processes import check_shared, from_first, only_first


def policy_path(policy: PolicyConfig, folder: Path, *, seed: int, option: str) -> str:
    """Return the path to read the policy from; a built-in policy is first written below the run's folder.

    When a run resumes, its built-in policy is kept.

    Raises:
        ConfigError: the folder cannot be written; names the ``option`` that sets it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option.removesuffix('=...')}: cannot write to {folder}: {error}; set another {option}"
        ) from error
    check_shared(folder)
    target = folder / "policy"
    writers = {
        "builtin:arithmetic": _write_arithmetic,
        "builtin:forks": _write_forks,
        "builtin:stories": _write_stories,
        "builtin:turns": _write_turns,
        "builtin:random": _write_random,
    }
    write = writers.get(policy.path)
    if write is None or (policy.path == "builtin:random" and policy.tokenizer is None):
        return policy.path
    if not from_first(lambda: has_progress(folder) and exists(target / "config.json")):
        with storage_errors(target):
            only_first(lambda: write(policy, target, seed))
    return str(target)


def _write_arithmetic(policy: PolicyConfig, target: Path, seed: int) -> None:
    check_guards(target)
    builtin.write_builtin_policy(target, seed=seed)


def _write_forks(policy: PolicyConfig, target: Path, seed: int) -> None:
    check_guards(target)
    write_forks_policy(target, seed=seed)


def _write_stories(policy: PolicyConfig, target: Path, seed: int) -> None:
    check_guards(target)
    write_stories_policy(target, seed=seed)


def _write_turns(policy: PolicyConfig, target: Path, seed: int) -> None:
    check_guards(target)
    write_turns_policy(target, seed=seed)


def _write_random(policy: PolicyConfig, target: Path, seed: int) -> None:
    check_guards(target)
    tokenizer = read_tokenizer_folder(str(policy.tokenizer), revision=policy.revision)
    builtin.write_random_policy(target, tokenizer=tokenizer, seed=seed)


def read_prompts(
    cfg: DataConfig,
    data: DatasetConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    where: str,
    mixture: Sequence[DatasetConfig] = (),
    environment: EnvironmentConfig | None = None,
) -> Encoded:
    """Load problems and encode their prompts, those of ``mixture`` behind them; errors name ``where``, the section.

    Chat templates show the policy the tools of the ``environment``.
    """
    parts, offset = [], 0
    for section, source in {where: data, **{f"data.mixture.{n}": part for n, part in enumerate(mixture)}}.items():
        problems = [replace(problem, index=offset + problem.index) for problem in load_problems(source, where=section)]
        parts.append(encode_problems(problems, tokenizer, **rendering(cfg, environment), max_prompt=cfg.max_prompt))
        offset += len(problems)
    problems, prompts = sum((part.problems for part in parts), ()), sum((part.prompts for part in parts), ())
    return Encoded(problems, prompts, (), sum(part.dropped for part in parts), tuple(map(len, parts)))


def order_of(cfg: DataConfig, seed: int, share: Callable[[int], float] | None = None) -> PromptOrder:
    """Return the order of the training problems; ``share`` thins them, see ``PromptOrder``."""
    return PromptOrder(seed, cfg.shuffle, [part.weight for part in (cfg.train, *cfg.mixture)], share)


def read_pairs(
    sft: SFTConfig,
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    stop_ids: tuple[int, ...],
    environment: EnvironmentConfig | None = None,
    reply: Callable[[str], list[int]] | None = None,
) -> Encoded:
    """Load and encode the warm start's prompts and completions; ``reply``: the ids of what the environment says."""
    problems, stop = load_problems(sft.data, where="sft.data"), stop_token(tokenizer, stop_ids)
    options = {**rendering(cfg, environment), "max_length": sft.max_length, "stop_id": stop, "reply": reply}
    return encode_pairs(problems, tokenizer, **options)


def reply_of(
    environment: EnvironmentConfig | None, cfg: DataConfig, tokenizer: PreTrainedTokenizerFast, stops: tuple[int, ...]
) -> Callable[[str], list[int]] | None:
    """Return how an environment's words are written after a stop id; None without an environment.

    Raises:
        TextError: the chat template cannot append a turn.
    """
    if environment is None or environment.taskset is not None:  # they write their turns themselves
        return None
    if cfg.template == "plain":
        return partial(encode, tokenizer)
    texts, keep = [str(tokenizer.decode([id])) for id in stops], environment.thinking == "keep"
    reply_ids(tokenizer, "", texts, keep=keep, thinking=cfg.thinking)  # fails on a template that cannot
    return partial(reply_ids, tokenizer, stops=texts, keep=keep, thinking=cfg.thinking)


def stop_token(tokenizer: PreTrainedTokenizerFast, stop_ids: tuple[int, ...]) -> int:
    """Return the stop id that ends completions to imitate: the tokenizer's end token if it is a stop id."""
    end = tokenizer.eos_token_id
    return int(end) if end in stop_ids else stop_ids[0]


def rendering(cfg: DataConfig, environment: EnvironmentConfig | None) -> dict[str, Any]:
    """Return how prompts are rendered; chat templates list the tools of the ``environment``."""
    options = {name: getattr(cfg, name) for name in ("template", "system_prompt", "prompt_format", "thinking")}
    if environment is None or cfg.template == "plain" or environment.taskset is not None:
        return options
    field = "rollout.environment.name"
    environment_class = load_environment(environment.name, environment.settings, field=field)
    return {**options, "tools": tool_schemas(environment_class, field=field)}
