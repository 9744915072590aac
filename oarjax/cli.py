"""Define the ``oarjax`` command. Each subcommand has its own file, which is imported when it is called."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from shlex import quote
from typing import Annotated, NoReturn

import rich
import typer

import oarjax
from oarjax.cli_options import (
    BENCH_HELP,
    CREDIT_HELP,
    EVALUATE_HELP,
    PLAN_HELP,
    REPLAY_HELP,
    STUDY_HELP,
    TRAIN_HELP,
    AsJson,
    Device,
    Dtype,
    Extend,
    Family,
    Gradients,
    InitColumns,
    InitData,
    MinP,
    Overrides,
    RepetitionPenalty,
    Restart,
    RolloutFormat,
    SavedRollouts,
    StopTexts,
    Temperature,
    TemplateChoice,
    TemplateName,
    TopK,
    TopP,
    TrustCode,
    Version,
    check_configs,
    check_target,
    refuse_addresses,
    refuse_removed,
)
from oarjax.errors import UserError

app = typer.Typer(
    name="oarjax",
    help="Train Qwen policies with GRPO and Outcome-grounded Advantage Reshaping (OAR), in JAX.",
    epilog="Start with: oarjax train demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Version = False,
) -> None:
    """Define the options before a subcommand."""


@app.command(
    help=TRAIN_HELP,
    epilog="Example: oarjax train demo rollout.group_size=16 credit.method=oar_p run_dir=runs/p",
)
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.yaml",
            help="The run's config: a file, or the name of a shipped one such as demo.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    restart: Restart = False,
    extend: Extend = False,
) -> None:
    """Run ``oarjax train``; see ``TRAIN_HELP``."""
    check_configs([config], overrides)
    from oarjax.training.command import run

    run(config, overrides or [], restart=restart, extend=extend)


@app.command(epilog="Example: oarjax init demo sums.yaml --data sums.csv --columns exercise,result")
def init(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A shipped config, such as demo.", show_default="demo")
    ] = None,
    to: Annotated[
        Path | None, typer.Argument(metavar="FILE.yaml", help="File to write.", show_default="NAME.yaml")
    ] = None,
    data: InitData = None,
    columns: InitColumns = "",
) -> None:
    """Copy a shipped config here, to change it, or write one for your own data. Never overwrites a file."""
    if data is None:
        from oarjax.config.shipped import copy_shipped

        typer.echo(f"wrote {(to := copy_shipped(name or 'demo', to))}; change it, then: oarjax train {quote(str(to))}")
    else:
        from oarjax.data.starter import write_config

        typer.echo(write_config(data, to, base=name or "", columns=columns).message())


@app.command(epilog="Example: oarjax config rollout")
def config(
    section: Annotated[
        str, typer.Argument(metavar="SECTION", help="Such as rollout or credit.gate.", show_default="all")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the fields of a config: default, accepted values and meaning."""
    from oarjax.report.fields import show_fields

    show_fields(section, as_json=as_json)


@app.command(epilog='Example: oarjax sample runs/demo "7-3+4-8+2=" --count 4')
def sample(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="Run folder, checkpoint folder, HF folder or hub name.")
    ],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="One or more prompts.")],
    template: TemplateChoice = TemplateName.AUTO,
    count: Annotated[int, typer.Option(help="Completions per prompt.", min=1)] = 1,
    max_new: Annotated[int, typer.Option(help="Maximum tokens of a completion.", min=1)] = 256,
    family: Family = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: StopTexts = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same completions.")] = 0,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Also write ids and log-probs, for rollout.from.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Print completions of a policy."""
    check_target(policy)
    from oarjax.evaluate.sample import run

    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    filters["temperature"] = temperature
    run(policy, prompts, template.value, count, max_new, family, filters, stop or [], seed, record, trust_code)


@app.command(epilog="Example: oarjax status runs/demo")
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, on this machine or a mounted bucket.")],
    as_json: AsJson = False,
) -> None:
    """Print a run's progress: iteration, reward, speed, time left and last checkpoint."""
    from oarjax.report.status import show_status

    show_status(run, as_json=as_json)


@app.command(epilog="Example: oarjax report runs/demo")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder; the run may be in progress.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="File to write.", show_default="RUN/report.html")
    ] = None,
) -> None:
    """Write a run's report from its files: curves, groups of completions, results so far."""
    from oarjax.report.command import run as write

    write(run, out)


@app.command(help=EVALUATE_HELP, epilog="Example: oarjax evaluate runs/demo --data demo --k 8")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Run folder (its export, else its newest checkpoint), checkpoint folder, HF folder or hub name.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY.SUB=VALUE...",
            help="Config fields, such as rollout.max_new=4096 eval.batch=16 data.eval.limit=100 mesh.tensor=4.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="NAMES", help="Comma-separated.", show_default=False)] = None,
    k: Annotated[int | None, typer.Option(help="Samples per problem.", min=1, show_default="1; the run's")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 = greedy.", min=0.0, show_default="0 for one sample, 1 for more; the run's")
    ] = None,
    family: Family = None,
    prompt: Annotated[
        str,
        typer.Option(help="chat, qwen-math, qwen3, qwen3-no-thinking, few-shot or plain; auto: by the tokenizer."),
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="below the run's, or in runs/evaluate")
    ] = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Run ``oarjax evaluate``; see ``EVALUATE_HELP``."""
    check_target(target, overrides)
    from oarjax.evaluate.command import run

    run(
        target,
        data=data,
        k=k,
        temperature=temperature,
        family=family,
        prompt=prompt,
        overrides=overrides or [],
        out=out,
        as_json=as_json,
        trust_code=trust_code,
    )


@app.command(epilog="Example: oarjax compare runs/a/evaluate/demo-k8 runs/b/evaluate/demo-k8")
def compare(
    ours: Annotated[Path, typer.Argument(metavar="A", help="results.json of oarjax evaluate, or its folder.")],
    theirs: Annotated[Path, typer.Argument(metavar="B", help="The evaluation to compare with, on the same problems.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations problem by problem: differences with 95% intervals."""
    from oarjax.evaluate.command import run_compare

    run_compare(ours, theirs, as_json=as_json)


@app.command(epilog="Example: oarjax export runs/demo/export exported --dtype bfloat16")
def export(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="HF folder, hub name, run or checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write; must not exist yet.")],
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the weights; keep = as they are stored.")] = Dtype.KEEP,
    shard_gb: Annotated[
        float, typer.Option(help="Maximum GB of a weights file; larger weights are split, with an index.", min=1e-6)
    ] = 5.0,
    adapters: Annotated[bool, typer.Option("--adapters", help="Of a LoRA run, its adapters alone, for PEFT.")] = False,
    untie: Annotated[bool, typer.Option("--untie", help="Write a tied head by itself, for rollout.engine.")] = False,
) -> None:
    """Write a policy as an HF folder (safetensors, config, tokenizer) that transformers and vLLM load.

    For a run folder this is its export or, before that exists, its newest checkpoint with adapters merged.
    """
    from oarjax.evaluate.export import run, run_adapters

    run_adapters(source, target) if adapters else run(source, target, dtype.value, shard_gb, untie)


@app.command(help=CREDIT_HELP, epilog="Example: oarjax credit demo_credit lab.problems=200 run_dir=runs/credit")
def credit(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="Policy, problems and section lab.", show_default=False)
    ],
    overrides: Overrides = None,
    rollouts: SavedRollouts = None,
    form: Annotated[
        RolloutFormat, typer.Option("--format", help="Format of the saved completions; auto: detected by their fields.")
    ] = RolloutFormat.AUTO,
    gradients: Gradients = False,
    as_json: AsJson = False,
) -> None:
    """Run ``oarjax credit``; see ``CREDIT_HELP``."""
    check_configs([config], overrides)
    from oarjax.tools.lab.command import run

    run(config, overrides or [], as_json, rollouts, form.value, gradients=gradients)


@app.command(help=STUDY_HELP, epilog="Example: oarjax study study_demo --quick")
def study(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="Base config, arms, seeds and sweep.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY.SUB=VALUE...", help="Fields of the study to change; values are YAML.", show_default=False
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Apply the config's section quick, and write to run_dir-quick.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs at once, each on separate cores; 0 = only collect the finished runs.",
            min=0,
            show_default="one per core if the config's device is cpu, else 1",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Markdown page to paste the results into, between its marks.", show_default=False),
    ] = None,
) -> None:
    """Run ``oarjax study``; see ``STUDY_HELP``."""
    from oarjax.tools.study.config import load_study, make_plan

    make_plan(load_study(config, overrides or [], quick=quick))  # a typo is reported before jax is imported
    from oarjax.tools.study.command import run

    run(config, overrides or [], quick=quick, jobs=jobs, page=page)


@app.command(help=REPLAY_HELP, epilog="Example: oarjax replay runs/demo/bad_batches/iteration-000012.safetensors")
def replay(
    file: Annotated[Path, typer.Argument(metavar="BATCH.safetensors", help="In RUN/bad_batches/.", show_default=False)],
    device: Annotated[Device, typer.Option(help="auto: the best that JAX finds.")] = Device.AUTO,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Run ``oarjax replay``; see ``REPLAY_HELP``."""
    from oarjax.tools.replay.command import run

    run(file, device=device.value, as_json=as_json, trust_code=trust_code)


@app.command(help=PLAN_HELP, epilog="Example: oarjax plan qwen2.5-7b_v5p-32 --credit oar_p")
def plan(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.yaml... [KEY.SUB=VALUE...]", help="Configs, and fields to change.", show_default=False
        ),
    ],
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Such as v5e-16 or v5e:4x4.", show_default="the config's plan.topology"),
    ] = None,
    credit: Annotated[
        str, typer.Option(metavar="METHODS", help="Further credit methods to compile, comma-separated.")
    ] = "",
    phases: Annotated[str, typer.Option(metavar="NAMES", help="Programs to compile; all of a step if none.")] = "",
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the tables as a Markdown page.")] = None,
    cache: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for the results of compiled programs.")
    ] = "~/.cache/oarjax/tools/plan",
    timeout: Annotated[int, typer.Option(help="Seconds for one program.", min=1)] = 3600,
    jobs: Annotated[int, typer.Option(help="Programs compiled at once, 1 to 2 GiB of memory each.", min=1)] = 2,
) -> None:
    """Run ``oarjax plan``; see ``PLAN_HELP``."""
    check_configs([a for a in arguments if "=" not in a], [a for a in arguments if "=" in a])
    from oarjax.tools.plan.command import run

    paths = {"out": out, "write": write, "cache": cache}
    if not run(arguments, topology=topology, credit=credit, phases=phases, timeout=timeout, jobs=jobs, **paths):
        raise typer.Exit(1)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="nano, micro or both: small random policies.")] = "nano",
    only: Annotated[str, typer.Option(help=BENCH_HELP)] = "",
    repeats: Annotated[int, typer.Option(help="Warm runs per row.", min=1)] = 5,
    as_json: AsJson = False,
    against: Annotated[str | None, typer.Option(help="torch: alternate with plain PyTorch.")] = None,
    project: Annotated[bool, typer.Option("--project", help="Compute the cost of credit for a 7B policy.")] = False,
    growth: Annotated[bool, typer.Option("--growth", help="Time and memory of a step as its sizes double.")] = False,
) -> None:
    """Time rollout, update, credit, a whole iteration or grading on this machine."""
    from oarjax.tools.bench.command import run

    run(model, only, repeats, as_json, against, project, growth)


@app.command(epilog="Example: oarjax accept --out report.json")
def accept(
    out: Annotated[Path, typer.Option(help="The report; a page of the same name is written beside it.")] = Path(
        "report.json"
    ),
    only: Annotated[str, typer.Option(metavar="NAMES", help="Stages, with commas between.", show_default="all")] = "",
    device: Annotated[Device, typer.Option(help="auto: the best that JAX finds.")] = Device.AUTO,
    folder: Annotated[
        Path | None,
        typer.Option(help="What the stages write; one for all hosts.", show_default="beside the report"),
    ] = None,
    bucket: Annotated[Path | None, typer.Option(help="Mounted bucket to measure.", show_default=False)] = None,
) -> None:
    """Check a machine: devices against their data sheet, numbers, compilation, speed, runs, SIGTERM and storage."""
    from oarjax.tools.accept.command import run

    if not run(out, only=only, device=device.value, folder=folder, bucket=bucket):
        raise typer.Exit(1)


STOPPED = (75, 130)
"""Exit codes of commands that a signal stopped: ``storage.stop.RESUMABLE``, and Ctrl-C where nothing resumes."""


def main() -> None:
    """Run the command; a user's error prints a message without traceback and exits with 2 (75 for storage)."""
    try:
        refuse_addresses(sys.argv[1:])
        refuse_removed(sys.argv[1:])
        app()
    except SystemExit as error:
        wrapped = getattr(sys.exit, "__code__", None)  # of a tracker: W&B replaces sys.exit and leaves it so
        frames = traceback.walk_tb(error.__traceback__)
        file, line = [(f.f_code.co_filename, line) for f, line in frames if f.f_code is not wrapped][-1]
        ours = tuple(os.path.dirname(str(module.__file__)) for module in (oarjax, typer, rich))  # rich: a closed pipe
        if file.startswith(ours) or "click" in Path(file).parts:
            _leave(error.code, stopped=error.code in STOPPED)
            raise
        _fail(UserError(f"{file}, line {line}, calls sys.exit: code of a run returns or raises"))
    except Exception as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    """Print an error and end this process, the others of its run as well."""
    from oarjax.report.files import print_error

    code = print_error(error)
    if peers := sys.modules.get("oarjax.system.peers"):  # else no others have been joined
        peers.leave_others(code, agreed=isinstance(error, UserError) and error.everywhere)
    _leave(code)
    sys.exit(code)


def _leave(code: str | int | None, *, stopped: bool = False) -> None:
    if (background := sys.modules.get("oarjax.system.background")) and not isinstance(code, str):
        background.leave(code or 0, stopped=stopped)


if __name__ == "__main__":
    main()
