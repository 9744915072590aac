"""``oarjax replay``: recompute a kept batch in float32, row by row, to find where it is not finite."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oarjax.config.loading import parse_config
from oarjax.config.section import changed
from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.report.files import make_console, short
from oarjax.run.run import Run
from oarjax.run.teacher import read_teacher
from oarjax.step.state import moving_reference
from oarjax.storage.bad_batches import BadBatchError, Header, read_bad_batch, read_params
from oarjax.storage.checkpoint import finished
from oarjax.storage.durable import refuse_special
from oarjax.storage.folder import start_folder, without_removed
from oarjax.storage.trust import check_trust, code_places
from oarjax.system.devices import choose_platform, use_compilation_cache
from oarjax.system.json import to_json
from oarjax.system.mesh import make_mesh
from oarjax.tools.replay.replay import Finding, listed_layers, replay
from oarjax.training.run_files import restored_state
from oarjax.types import Params

MACHINE = ("compilation_cache", "compile_ahead", "device", "mesh", "distributed", "profile", "run_dir")
MACHINE += ("report", "export", "checkpoint", "plan", "lab")
"""Fields of a kept batch's config that are about the machine it was made on. A replay ignores them: the file may be
somebody else's, and what lies in a compilation cache is executed."""

SHOWN = 20
"""Maximum number of rows in a table."""


def run(file: Path, *, device: str, as_json: bool, trust_code: bool = False) -> None:
    """Replay a file and show where the first value that is not finite appears."""
    console, folder = make_console(sys.stderr if as_json else None), file.absolute().parent.parent
    refuse_special(file.parent, *(folder / name for name in ("checkpoints", "policy", "start")))
    header, evidence = read_bad_batch(file)
    run = open_replay(header, file, device=device, console=console, trust_code=trust_code)
    params, step = load_batch_params(header, file, run)
    frozen = load_frozen(header, run)
    compared = header.kind != "sft" and run.credit.needs_reference(kl=run.cfg.loss.scores_reference)
    loss, reference = run.cfg.loss, None
    if compared and (frozen is None or loss.reference_every or loss.teacher is not None):
        reference = load_reference(header, run)
    _show_header(console, header, step)
    with (
        jax.default_matmul_precision("highest"),  # TPUs and GPUs multiply float32 in fewer bits by default
        redirect_stdout(sys.stderr) if as_json else nullcontext(),  # a user's loss or method may print
    ):
        finding = replay(header, evidence, params, run, frozen=frozen, reference=reference)
    if as_json:
        print(to_json({"header": asdict(header), "params_of_step": step, **asdict(finding)}))
    else:
        _show(console, finding)


def open_replay(header: Header, file: Path, *, device: str, console: Console, trust_code: bool = False) -> Run:
    """Open the run that kept the batch, in float32 on one device, with the user's own compilation cache.

    Raises:
        UntrustedCode: the file names code that is not known to be the user's, and ``trust_code`` is not set.
    """
    folder = file.absolute().parent.parent
    tree = {name: value for name, value in without_removed(header.config).items() if name not in MACHINE}
    cfg = parse_config(tree | {"run_dir": str(folder)}, source=str(file))
    check_trust(code_places(cfg), folder, source=str(file), trusted=trust_code)
    cfg = changed(cfg, policy=changed(cfg.policy, compute_dtype="float32"), rollout=changed(cfg.rollout, tensor=None))
    choose_platform(device)
    use_compilation_cache(cfg.compilation_cache)
    places = [Path(header.policy), folder / "policy", folder.parent / "policy"]  # folders may have been moved
    policy = next((path for path in places if (path / "config.json").is_file()), None)
    model, source = read_config(policy or cfg.policy.path, revision=cfg.policy.revision)
    return Run(
        cfg,
        console,
        folder=folder,
        mesh=make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
        model=model,
        source=source,
        policy=make_policy(
            model, compute_dtype=jnp.dtype(jnp.float32), remat=cfg.policy.remat, adapter_scale=cfg.lora.scale
        ),
    )


def load_batch_params(header: Header, file: Path, run: Run) -> tuple[Params, int]:
    """Load the params of the batch and their optimizer step, from the file beside it or the nearest checkpoint.

    Raises:
        BadBatchError: there is neither a file nor a checkpoint.
    """
    if header.params is not None:
        return jax.tree.map(jnp.asarray, read_params(file.parent / header.params)), header.step
    near = _nearest(header, run.folder)
    if near is not None:
        state = restored_state(run, near)
        return state.params, int(state.step)
    raise BadBatchError(
        f"{file}: the params were larger than health.params_mb={run.cfg.health.params_mb} and were not kept, and "
        f"{run.folder / 'checkpoints'} has no checkpoint; raise health.params_mb, or set checkpoint.every, before the "
        "next run"
    )


def _nearest(header: Header, folder: Path) -> Path | None:
    """Return the checkpoint nearest to the params of a batch, those of the iteration before it; None without any."""
    folder = folder / "checkpoints"
    near = sorted(finished(folder), key=lambda n: abs(n - header.number + 1)) if header.kind == "iteration" else []
    return folder / f"{near[0]:06d}" if near else None


def load_frozen(header: Header, run: Run) -> Params | None:
    """Load the weights below the adapters, in the dtype that the run held them in; None without lora.rank."""
    if run.cfg.lora.rank == 0:
        return None
    source = run.source if header.kind == "sft" else _start(run)
    return load_params(source, run.model, dtype=jnp.dtype(header.compute_dtype))


def load_reference(header: Header, run: Run) -> Params:
    """Load the policy that the KL term compares with; one that moves is read from the nearest checkpoint."""
    if (teacher := read_teacher(run.cfg.loss.teacher, run.cfg.policy, run.mesh)) is not None:
        return teacher.load(run.cfg.policy, run.mesh)
    near = _nearest(header, run.folder) if run.cfg.loss.reference_every else None
    return load_params(_start(run), run.model) if near is None else moving_reference(restored_state(run, near))


def _start(run: Run) -> Path:
    """Return the folder of the policy that the iterations started from: after the warm start if there was one."""
    return (start_folder(run.folder, "start") if run.cfg.sft else None) or run.source


def _show_header(console: Console, header: Header, step: int) -> None:
    nonfinite = "; ".join(f"phase {phase}: {', '.join(names)}" for phase, names in header.wrong.items())
    older = "" if step == header.step else f" (replayed with those of the nearest checkpoint, step {step})"
    console.print(
        Text(
            f"{header.kind} {header.number}, minibatch {header.minibatch}, params of step {header.step}{older}; "
            f"not finite in the run: {nonfinite}. Now in float32 on {jax.default_backend()}."
        ),
        soft_wrap=True,
    )


def _show(console: Console, finding: Finding) -> None:
    rows = [row for row in finding.rows if row.recorded or row.replayed] or finding.rows[:5]
    table = Table("row", "first in the run", "first in float32", "loss", "gradient norm")
    for row in rows[:SHOWN]:
        texts = (row.recorded or "-", row.replayed or "-", short(row.loss), short(row.grad_norm))
        table.add_row(str(row.row), *texts)
    console.print(table)
    if len(rows) > SHOWN:
        console.print(f"and {len(rows) - SHOWN} more rows")
    table = Table("parameters", "not finite", "rows with such a gradient", "layers", "gradient norm")
    bad = [g for g in finding.groups if g.params or g.rows]
    for group in (bad or finding.groups)[:SHOWN]:
        layers = listed_layers(sorted({*group.params_at, *group.gradient_at})) or "-"
        table.add_row(group.name, str(group.params), str(group.rows), layers, short(group.grad_norm))
    console.print(table)
    console.print(Text("begins at: ", style="bold").append(Text(finding.place, style="default")), soft_wrap=True)
