"""The ``oarjax`` command. Each subcommand lives in its own file and is imported when it is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="oarjax",
    help="Train Qwen policies with GRPO and Outcome-grounded Advantage Reshaping (OAR), in JAX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="A run's config; see configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Fields to change.")]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also train with plain GRPO and permuted weights."),
    ] = False,
    seeds: Annotated[str, typer.Option(help="Seeds of --compare, comma-separated; default: the config's own.")] = "",
) -> None:
    """Train a policy: rollouts, grades, credit per token, updates, evaluation, export."""
    from oarjax.cli.train import run

    run(config, overrides or [], compare=compare, seeds=[int(s) for s in seeds.split(",") if s])


@app.command()
def sample(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="HF folder or hub name, e.g. runs/demo/export.")],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="One or more prompts.")],
    template: Annotated[str, typer.Option(help="chat or plain.")] = "chat",
    count: Annotated[int, typer.Option(help="Completions per prompt.", min=1)] = 1,
    max_new: Annotated[int, typer.Option(help="Tokens at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.", min=0.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 = off.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off.", min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
) -> None:
    """Print completions of a policy."""
    from oarjax.cli.sample import run

    run(policy, prompts, template, count, max_new, temperature, top_k, top_p, seed)


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="HF folder or hub name to read.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write; must not exist.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or keep.")] = "keep",
) -> None:
    """Write a policy as an HF folder (safetensors, config, tokenizer) that transformers loads."""
    from oarjax.cli.export import run

    run(source, target, dtype)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="nano, micro or both: random policies made on the spot.")] = "nano",
    only: Annotated[str, typer.Option(help="Workloads, comma-separated: W1,W2,W3,W4; default: all.")] = "",
    repeats: Annotated[int, typer.Option(help="Warm runs per row.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    against: Annotated[str | None, typer.Option(help="torch: run plain PyTorch in turn with this package.")] = None,
) -> None:
    """Time rollout, update, credit and a whole iteration on this machine."""
    from oarjax.cli.bench import run

    run(model, only, repeats, as_json, against)


def main() -> None:
    """Run the command; an error that the user can mend is one red line and exit code 2, not a traceback."""
    from oarjax.cli.errors import USER_ERRORS, show

    try:
        app()
    except USER_ERRORS as error:
        show(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
