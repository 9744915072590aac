"""``oarjax evaluate``: benchmarks by name, on a run, a checkpoint or any Qwen policy; resumes after a kill."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import reduce
from importlib.metadata import version
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from oarjax.config.learning import EnvironmentConfig, GradingConfig
from oarjax.config.section import flatten
from oarjax.data.streams import Encoded
from oarjax.errors import ConfigError
from oarjax.evaluate.benchmarks import Asked, read_names
from oarjax.evaluate.fields import (
    as_run_asks,
    batch_of,
    config_of,
    config_tree,
    own_problems,
    sampling_preset,
    with_batch,
)
from oarjax.evaluate.results import INTERVALS, benchmark_result, compare, print_comparison, print_results, read_result
from oarjax.evaluate.samples import SampleLines
from oarjax.evaluate.target import Target, find_target, load_target, weights_digest
from oarjax.grading.recorded import setup_of
from oarjax.report.console import Progress, resumable
from oarjax.report.files import make_console, visible
from oarjax.run.run import Run, open_run
from oarjax.storage.durable import cannot_read, exists, storage_errors, write_durably
from oarjax.storage.folder import locked
from oarjax.storage.stop import Stop
from oarjax.storage.trust import check_trust, code_places, environment_code
from oarjax.system.json import number, to_json
from oarjax.system.processes import from_first, only_first
from oarjax.training.held_out import Graded, first_rewards, graded_batches
from oarjax.training.votes import number_votes
from oarjax.types import Params

SETTINGS = (
    "seed",
    "data.template",
    "data.system_prompt",
    "data.thinking",
    "data.prompt_format",
    "data.max_prompt",
    "rollout.max_new",
    "rollout.environment",
    "grading.rewards",
    "grading.plugins",
    "grading.deadline",
    "grading.memory_mb",
    "credit.answer.style",
    "credit.answer.pattern",
    "rollout.stop",
    "eval.samples",
    "eval.temperature",
    "eval.top_k",
    "eval.top_p",
    "eval.min_p",
    "eval.repetition_penalty",
)
"""Fields that its results depend on, besides policy and problems."""


class Part(NamedTuple):
    """One benchmark, ready to be sampled."""

    name: str
    prompt: str
    run: Run

    @property
    def encoded(self) -> Encoded:
        return self.run.train


def run(
    target: str,
    *,
    data: str | None,
    k: int | None,
    temperature: float | None,
    prompt: str,
    overrides: Sequence[str],
    out: Path | None,
    as_json: bool,
    family: str | None = None,
    trust_code: bool = False,
) -> None:
    """Evaluate, print the table or the JSON, and write results.json and samples.jsonl.

    Raises:
        UntrustedCode: the run names code that is not known to be the user's own, and ``trust_code`` was not given.
    """
    console = make_console(sys.stderr if as_json else None)
    origin = find_target(target)
    benchmarks = [own_problems(origin, target)] if data is None else read_names(data)
    benchmarks = [as_run_asks(origin, benchmark, prompt) for benchmark in benchmarks]
    preset = sampling_preset(family)
    folder = out or _folder(target, origin, benchmarks, k, temperature, family)
    trees = [
        (a.name, *config_tree(origin, a.benchmark, prompt, k, temperature, preset, overrides, folder))
        for a in benchmarks
    ]
    configs = [config_of(tree) for _, _, tree in trees]
    if origin.folder is not None:
        plugins_given = any(o.startswith("grading.plugins=") for o in overrides)
        for cfg in configs:
            places = [code for code in code_places(cfg) if not (plugins_given and code.startswith("grading.plugins="))]
            check_trust(places, origin.folder, source=str(origin.folder / "config.yaml"), trusted=trust_code)
    if not any(o.startswith("eval.batch=") for o in overrides):
        configs = [with_batch(cfg, batch_of(configs[0])) for cfg in configs]
    parts = [Part(name, asks, open_run(cfg, console, evaluates=True)) for (name, asks, _), cfg in zip(trees, configs)]
    first = parts[0].run
    with ExitStack() as stack:
        stack.enter_context(resumable(console, folder))
        stack.enter_context(Stop())
        if first.first:
            stack.enter_context(locked(folder, option="--out"))
        stack.enter_context(storage_errors(folder))
        identity = _identity(origin, parts)
        only_first(lambda: _claim(folder, identity))
        _announce(console, parts, folder)
        result = {**identity, "version": version("oarjax"), "intervals": INTERVALS}
        samples = stack.enter_context(closing(SampleLines(folder / "samples.jsonl"))) if first.first else None
        params = load_target(origin, first)
        for part in parts:
            records, cfg = evaluate_part(part, params, samples), part.run.cfg
            if samples is not None:
                count = cfg.eval.samples
                figures = benchmark_result(with_votes(records, cfg.grading, samples=count), samples=count)
                result["benchmarks"][part.name] |= figures
    if first.first:
        text = to_json(result, indent=1)
        with storage_errors(folder):
            write_durably(folder / "results.json", text + "\n")
        if as_json:
            print(text)
        else:
            print_results(console, result)
            console.print(f"written to {folder}", markup=False)


def run_compare(ours: Path, theirs: Path, *, as_json: bool) -> None:
    """Print the paired differences of two evaluations (``oarjax compare``)."""
    comparison = compare(read_result(ours), read_result(theirs))
    if as_json:
        print(to_json(comparison, indent=1))
    else:
        print_comparison(make_console(), comparison)


def with_votes(records: list[dict[str, Any]], grading: GradingConfig, *, samples: int) -> list[dict[str, Any]]:
    """Return samples in order, with the number of each one's answer among those of its problem."""
    rows = sorted(records, key=lambda r: (r["problem"], r["sample"]))
    answers = [[r["answer"] for r in rows[at : at + samples]] for at in range(0, len(rows), samples)]
    scores = np.asarray([number(r["score"]) for r in rows], float).reshape(-1, samples)
    votes = number_votes(answers, scores, grading)
    return [r | {"vote": int(vote)} for r, vote in zip(rows, votes.ravel())]


def evaluate_part(part: Part, params: Params, samples: SampleLines | None) -> list[dict[str, Any]]:
    """Return all samples of a benchmark: those on disk, and the rest drawn and written batch by batch.

    ``samples`` is the first process's; the others draw along and know only what they drew.
    """
    run, cfg, total = part.run, part.run.cfg, len(part.encoded)
    count = cfg.eval.samples
    records: list[dict[str, Any]] = []

    def look() -> int:
        if samples is not None:
            records.extend(samples.known(part.name, total, samples=count, batch=cfg.eval.batch))
        return len(records) // count

    skip = from_first(look)
    if skip:
        run.console.print(f"{visible(part.name)}: {skip} of {total} problems are known already", markup=False)
    if skip == total:
        return records
    with ExitStack() as stack:
        stack.callback(lambda: run.environments and run.environments.close())
        grader = stack.enter_context(run.grader())
        progress = stack.enter_context(Progress(total, label=part.name, console=run.console))
        for batch in graded_batches(run, grader, params, part.encoded, skip=skip):
            batch_records = sample_records(part, batch)
            if samples is not None:
                samples.write(batch_records)
            records += batch_records
            scores = [r["score"] for r in records if r["score"] is not None]
            metrics = {"score": sum(scores) / len(scores) if scores else math.nan}
            metrics["length"] = sum(r["tokens"] for r in records) / len(records)
            progress.update(len(records) // count, metrics)
    if lost := [r for r in records if r["score"] is None]:
        first = f"{lost[0]['verdict']}, {lost[0]['note']}" if lost[0]["note"] else lost[0]["verdict"]
        run.console.print(
            f"warning: {visible(part.name)}: {len(lost)} of {len(records)} completions have no grade and are left out, "
            f"the first: {visible(first)}; see verdict and note in samples.jsonl",
            markup=False,
        )
    return records


def sample_records(part: Part, batch: Graded) -> list[dict[str, Any]]:
    """Make the lines of samples.jsonl for a batch."""
    run, rollout, grades = part.run, batch.rollout, batch.grades
    scores = first_rewards(batch, run.cfg.grading.rewards[0].name).reshape(-1)
    texts = run.texts(rollout)
    count = run.cfg.eval.samples
    problems = [part.encoded.by_index[int(p)] for p in batch.problems for _ in range(count)]
    return [
        {
            "benchmark": part.name,
            "problem": problem.index,
            "sample": row % count,
            "prompt": problem.prompt,
            "completion": texts[row],
            "answer": grades.answers[row],
            "reference": problem.reference,
            "score": float(scores[row]) if scores[row] == scores[row] else None,
            "verdict": grades.verdicts[row],
            "note": grades.notes[row],
            "tokens": int(rollout.completion[row].sum()),
            "ended": bool(rollout.ended[row]),
        }
        for row, problem in enumerate(problems)
    ]


# Its folder -----------------------------------------------------------------------------------------------------


def _folder(
    target: str, origin: Target, asked: Sequence[Asked], k: int | None, temperature: float | None, family: str | None
) -> Path:
    """Choose where results go by default: in the run's folder, or in runs/ under the policy's name.

    Results of a checkpoint, named or the newest, have its iteration in their folder's name.
    """
    settings = "" if k is None else f"-k{k}"
    settings += "" if temperature is None else f"-t{temperature:g}"
    settings += "" if family is None else f"-{family}"
    what = "-".join(a.name for a in asked) + settings
    path = Path(target).expanduser()
    if origin.checkpoint is not None:
        what = f"{origin.checkpoint.name}-{what}"
    if (path / "config.yaml").is_file():
        return path / "evaluate" / what
    if origin.checkpoint is not None:
        return origin.checkpoint.parent.parent / "evaluate" / what
    return Path("runs") / "evaluate" / f"{'-'.join(path.parts[-2:]).strip('/')}-{what}"


# What makes two evaluations the same ------------------------------------------------------------------------------


def _identity(target: Target, parts: Sequence[Part]) -> dict[str, Any]:
    """Collect all that the results depend on: policy, problems and settings."""
    first = parts[0].run
    return {
        "policy": {
            "weights": weights_digest(target, first.source) if first.first else "",
            "compute_dtype": first.compute_dtype.name,
        },
        "benchmarks": {
            part.name: {
                "data": _digest([[p.index, p.prompt, p.reference, *p.chat] for p in part.encoded.problems]),
                "columns": _digest([p.columns for p in part.encoded.problems]),
                "left_out": part.encoded.dropped,
                "prompt": part.prompt,
                "settings": _settings(part.run.cfg.model_dump(mode="json")),
                "number": number,
                "plugins": setup_of({}, _code(part.run.cfg.grading, part.run.cfg.rollout.environment)),
            }
            for number, part in enumerate(parts)
        },
    }


def _code(grading: GradingConfig, environment: EnvironmentConfig | None) -> list[str]:
    return [*grading.plugins, *filter(None, [environment_code(environment)])]


def _settings(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: reduce(getitem, name.split("."), tree) for name in SETTINGS}


def _digest(rows: list[Any]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _claim(folder: Path, identity: dict[str, Any]) -> None:
    """Claim a folder for this evaluation, or resume it there.

    Raises:
        ConfigError: it holds another one; names what differs.
        StorageError: it cannot be read.
    """
    identity_file = folder / "evaluation.json"
    if exists(identity_file):
        saved, current = flatten(_claimed(identity_file)), flatten(identity)
        differ = [name for name in sorted(saved | current) if saved.get(name) != current.get(name)]
        if differ:
            resume = "" if "policy.weights" in differ else ", or the command that it was started with to resume it"
            raise ConfigError(
                f"--out: {folder} holds another evaluation ({'; '.join(differ)} differ); give another --out{resume}"
            )
    elif exists(folder / "samples.jsonl"):
        raise ConfigError(f"--out: {folder} holds samples of another evaluation; give another --out")
    write_durably(identity_file, json.dumps(identity, indent=1))


def _claimed(path: Path) -> dict[str, Any]:
    """Read which evaluation a folder belongs to.

    Raises:
        ConfigError: the file that says so is damaged, or something else.
        StorageError: it cannot be read.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"expected an object, got {type(tree).__name__}")
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--out: {path} is damaged or belongs to no evaluation ({error}); give another --out"
        ) from None
    return tree


def _announce(console: Console, parts: Sequence[Part], folder: Path) -> None:
    cfg = parts[0].run.cfg
    facts = {name: value for name, value in parts[0].run.facts().items() if name in ("device", "mesh", "policy")}
    facts["samples"] = f"{cfg.eval.samples} a problem, " + (
        f"temperature {cfg.eval.temperature:g}" if cfg.eval.temperature else "greedy"
    )
    for part in parts:
        dropped = part.encoded.dropped
        dropped_note = f", {dropped} over {part.run.cfg.data.max_prompt} tokens LEFT OUT" if dropped else ""
        limit = part.run.cfg.rollout.max_new
        facts[part.name] = f"{len(part.encoded)} problems, prompt {part.prompt}, up to {limit} tokens{dropped_note}"
    facts["folder"] = folder
    for name, value in facts.items():
        console.print(visible(f"{name:<12}{value}"), markup=False)
