"""Choices, shared options and help texts of the ``oarjax`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from oarjax.errors import UserError
from oarjax.system.paths import path_problem


class TemplateName(StrEnum):
    AUTO = "auto"
    CHAT = "chat"
    PLAIN = "plain"


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class Dtype(StrEnum):
    KEEP = "keep"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class RolloutFormat(StrEnum):
    AUTO = "auto"
    OARJAX = "oarjax"
    TRL = "trl"
    VERL = "verl"


TRAIN_HELP = (
    "Train a policy and report how much it improved.\n\n"
    "Every iteration samples completions, grades them, assigns credit to every token and updates the policy. The run "
    "folder holds the whole config, metrics.jsonl, completions.jsonl, the trained policy as an HF folder and "
    "report.html. The same command resumes a stopped run; a different config needs another folder. oarjax config lists "
    "the fields, and oarjax config credit.method the methods of credit."
)

AS_HELP = "Sampling as model cards recommend it: qwen3-thinking, qwen3-instruct or qwen2.5."

TRUST_HELP = "Run the Python code that the run's files name, even if it is not known to be yours; see docs/trust.md."

EVALUATE_HELP = (
    "Evaluate a policy on benchmarks by name: pass@1, pass@k, avg@k and maj@k with 95% intervals.\n\n"
    "Benchmarks: gsm8k, math500, aime24, aime25, amc23 (from the hub, or name=file for a local copy), demo, any file "
    "(.jsonl, .parquet) or hub dataset; without --data, a run's held-out problems. Of a run, these and files are asked "
    "with its prompt, lengths, sampling and rewards, unless an option says otherwise. Writes results.json, and "
    "samples.jsonl with every sample; the same command resumes a stopped evaluation."
)

CREDIT_HELP = (
    "Compare methods of token credit on a policy's completions.\n\n"
    "Compares the tokens that each method credits with exact OAR-P and with the tokens that decide the answer, which "
    "are found by changing one token at a time; also measures the spread of its weights and its cost. Writes "
    "credit.json, credit.png and credit.html, which colours every completion's tokens by the method of your choice."
)

STUDY_HELP = (
    "Does a method learn better? Train several arms of one run config, each with several seeds.\n\n"
    "All arms of a seed have the same start, problems and noise, and the same number of rollouts unless an arm says "
    "otherwise. A field such as the learning rate may be chosen for each arm on seeds of its own. Every arm and seed "
    "has a run folder: finished runs are kept, unfinished runs resume from their checkpoint. Writes study.json, "
    "study.md, curves.png with 95% intervals over seeds, and frontier.png if the config has a sweep."
)

REPLAY_HELP = (
    "Find where a batch stops being finite.\n\n"
    "A run keeps batches whose loss, gradient, importance or log-probabilities were not finite in its folder "
    "bad_batches. This command recomputes such a batch in float32 (scores, credit, loss and gradient, row by row) and "
    "prints the quantity, row and parameters in which the first value that is not finite appears."
)

PLAN_HELP = (
    "Does a run fit a TPU slice, and how fast can a step be at best? No TPU is needed.\n\n"
    'Compiles the run\'s programs for the slice with the TPU compiler (pip install "oarjax\\[aot]"), each in a '
    "separate process: reshard (to the layout for sampling), sample, score and update. Prints the memory that the "
    "compiler reports, the FLOPs and bytes that the programs execute and send, and times from peak rates. Exits with "
    "code 1 and the remedy if something does not fit."
)

BENCH_HELP = (
    "Workloads, comma-separated: W1 to W4 (default), W6 steps, W7 grading; completions that differ in "
    "length: W8 rollout, W9 update and log-probs, W10 iteration, W11 with long prompts."
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.SUB=VALUE...",
        help="Config fields to change; values are YAML. The error for an unknown name or value lists what is accepted.",
        show_default=False,
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Start from scratch; the old run_dir is kept as run_dir.old.")]
Extend = Annotated[
    bool,
    typer.Option("--extend", help="Train a run for more iterations, though its learning rate falls with them."),
]
InitData = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Write a config for these rows (.csv, .json, .jsonl, .parquet) and hold a tenth of them out.",
        show_default=False,
    ),
]
InitColumns = Annotated[
    str,
    typer.Option(
        "--columns", metavar="PROMPTS,ANSWERS", help="Columns of --data.", show_default="recognised by their names"
    ),
]
SavedRollouts = Annotated[
    Path | None,
    typer.Option(
        help="Saved completions instead of new ones, a file or a folder of files: JSON lines with prompt and "
        "completion, as text, chat messages or prompt_ids and completion_ids, and reference; or files of TRL "
        "(log_completions) or verl (rollout_data_dir).",
        show_default=False,
    ),
]
Gradients = Annotated[
    bool,
    typer.Option(
        "--gradients",
        help="Also compare the methods' minibatch gradients with the expected gradient of GRPO: direction, noise and "
        "the noise's sources.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
TrustCode = Annotated[bool, typer.Option("--trust-code", help=TRUST_HELP)]
Family = Annotated[str | None, typer.Option("--as", metavar="FAMILY", help=AS_HELP, show_default=False)]
TemplateChoice = Annotated[
    TemplateName, typer.Option(help="auto: as in the run, else the tokenizer's chat template or plain.")
]
Temperature = Annotated[float | None, typer.Option(help="0 = greedy.", min=0.0, show_default="1, or the family's")]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k most likely tokens; 0 = off.", min=0, show_default="0")
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the most likely tokens of this total probability; 1 = off.",
        min=0.0,
        max=1.0,
        show_default="1",
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Minimum probability, as a share of the highest; 0 = off.", min=0.0, max=1.0, show_default="0"),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Of tokens that occurred before; 1 = off.", min=0.01, show_default="1")
]
StopTexts = Annotated[
    list[str] | None, typer.Option(help="End at this text and print what is before it.", show_default=False)
]


def check_configs(paths: Sequence[str | Path], overrides: Sequence[str] | None) -> None:
    """Validate configs before a command imports jax, so that a typo or a missing file is reported at once.

    Raises:
        ConfigError: a file is missing or a field is wrong.
    """
    from oarjax.config.loading import check_files, load_config

    for path in paths:
        check_files(load_config(path, list(overrides or [])).model_dump(mode="json"))


def check_target(text: str, overrides: Sequence[str] | None = None) -> None:
    """Check a command's target, and the overrides of an evaluation, before jax is imported.

    Raises:
        ConfigError: there is no such folder, or a field does not exist.
    """
    from oarjax.evaluate.early import check_exists, check_fields

    if not Path(text).name.isdecimal():  # of a checkpoint, for which ``find_target`` has a better error
        check_exists(text)
    check_fields(overrides or [])


def print_version(requested: bool) -> bool:
    """Print the versions of oarjax, Python and JAX and end, if ``requested``; imports none of them."""
    if requested:
        installed = {name: version(name) for name in ("oarjax", "jax", "flax", "transformers")}
        python = f"python {sys.version.split()[0]}"
        typer.echo(", ".join([*(f"{name} {number}" for name, number in installed.items()), python]))
        raise typer.Exit
    return requested


Version = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print versions and exit.")
]


def refuse_removed(arguments: list[str]) -> None:
    """Refuse options of train that a study replaces.

    Raises:
        UserError: names the study.
    """
    options = {argument.partition("=")[0] for argument in arguments[1:]} & {"--compare", "--seeds"}
    if arguments[:1] == ["train"] and options:
        raise UserError(
            f"train {options.pop()}: replaced by a study; run oarjax study study_grpo base=CONFIG.yaml run_dir=FOLDER "
            "'seeds=[0, 1]'"
        )


def refuse_addresses(arguments: list[str]) -> None:
    """Refuse an address of a bucket where a file or folder is meant: Python would write into a folder of that name."""
    for argument in arguments:
        text = argument.partition("=")[2] if argument.startswith("--") else argument
        if text.startswith(("gs://", "s3://")) and (problem := path_problem(text)) is not None:
            raise UserError(problem)
