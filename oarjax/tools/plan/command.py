"""``oarjax plan``: does a run fit a TPU slice, and how long would a step take at the least? No TPU is needed.

The run's own programs are compiled for the slice by libtpu, the TPU's compiler, each in a process of its own. What it
says of memory decides; work is counted in the programs that it wrote.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oarjax.config.learning import EnvironmentConfig, RolloutConfig
from oarjax.config.loading import load_config
from oarjax.config.schema import Config
from oarjax.credit.registry import choices
from oarjax.errors import ConfigError
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import parameter_count
from oarjax.report.files import make_console
from oarjax.run.checks import check_lengths
from oarjax.run.custom import find_credit
from oarjax.run.memory import remedy
from oarjax.storage.durable import storage_errors
from oarjax.tools.plan.architecture import architecture_fields
from oarjax.tools.plan.expected import expected_step, survival_of
from oarjax.tools.plan.hlo import Executed
from oarjax.tools.plan.needs import needs_of
from oarjax.tools.plan.overlap import overlap_of
from oarjax.tools.plan.programs import (
    LEARNING,
    PROGRAMS,
    LargestShapes,
    evaluation_plan,
    mean_slots,
    phases_of_step,
    rollout_plan,
    shapes_of,
    times_of,
    with_method,
)
from oarjax.tools.plan.starting import describe_starting, starting_of
from oarjax.tools.plan.sums import (
    again_costs,
    analytic_flops,
    applied_bytes,
    count,
    largest_work,
    model_flops,
    phase_of,
    prompt_costs,
    read_bytes,
    step_of,
)
from oarjax.tools.plan.table import WORD, describe, markdown, terminal
from oarjax.tools.plan.topology import ENVIRONMENT, Slice, TopologyError, compiler_version, find_slice


def run(
    arguments: Sequence[str],
    *,
    topology: str | None,
    credit: str,
    phases: str,
    out: Path | None,
    write: Path | None,
    cache: str,
    timeout: int,
    jobs: int,
) -> bool:
    """Plan every config, print its table, write what was asked for; return True if everything fits.

    Raises:
        ConfigError: a bad config, no topology, or an unknown method.
        TopologyError: an unknown topology, no libtpu, or a compiler that failed.
    """
    console = make_console()
    configs = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if not configs:
        raise ConfigError("plan: give at least one config, such as configs/demo.yaml")
    compiler_version()
    plans = []
    for name in configs:
        cfg = load_config(name, overrides)
        where = topology_of(topology or cfg.plan.topology)
        console.print(f"{name}: compiling for {where.name}, minutes for a large policy", markup=False)
        fields = architecture_fields(cfg.policy.path, revision=cfg.policy.revision)
        experts = QwenConfig.from_hf(fields).experts is not None
        result = plan(
            name,
            cfg,
            where=where,
            fields=fields,
            work=work_of(cfg, phases_of(phases, cfg, experts=experts), methods_of(credit), experts=experts),
            cache=cache,
            timeout=timeout,
            jobs=jobs,
        )
        plans.append(result)
        console.print(terminal(result))
        for line in [*describe(result), *([describe_starting(result["starting"])] if result["starting"] else [])]:
            console.print(f"- {line}", markup=False, highlight=False)
        if not result["fits"]:
            for line in result["remedies"]:
                console.print(f"does not fit: {line}", style="bold red", markup=False)
    console.print(WORD, style="dim", markup=False)
    for path, text in ((out, json.dumps(plans, indent=1) + "\n"), (write, markdown(plans, numbers=out))):
        if path is not None:
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    return all(p["fits"] for p in plans)


def methods_of(credit: str) -> tuple[str, ...]:
    """Parse credit methods by name, separated by commas.

    Raises:
        ConfigError: an unknown one.
    """
    names = tuple(name.strip() for name in credit.split(",") if name.strip())
    for name in names:
        if name not in choices():
            raise ConfigError(f"--credit: unknown method {name}; accepted: {', '.join(choices())}")
    return names


def phases_of(phases: str, cfg: Config, *, experts: bool = False) -> tuple[str, ...]:
    """Parse phases by name, separated by commas, into the order of a step; all of the step where none is named.

    Raises:
        ConfigError: an unknown one, or one pass for score and update in a run that makes two.
    """
    step = phases_of_step(cfg, experts=experts)
    names = {name.strip() for name in phases.split(",") if name.strip()} or set(step)
    if names - set(PROGRAMS):
        raise ConfigError(f"--phases: unknown program in {phases!r}; accepted: {', '.join(PROGRAMS)}")
    if "fused" in names and "fused" not in step:
        raise ConfigError(
            "--phases: this run scores and updates in two passes and has no program fused; give score,update"
        )
    return tuple(name for name in PROGRAMS if name in names)


def work_of(
    cfg: Config, phases: Sequence[str], credit: Sequence[str], *, experts: bool = False
) -> list[tuple[str, str | None]]:
    """List the programs to compile: phase, and credit method if it is not the config's own.

    A further method has the program that computes its scores: in one pass with the update where a run of it would.
    """
    methods = [m for m in credit if m != cfg.credit.method]
    score_phase = next((phase for phase in phases if phase in ("score", "fused")), None)
    work: list[tuple[str, str | None]] = []
    for phase in phases:
        work.append((phase, None))
        if phase == score_phase:
            one_pass = {m: "fused" in phases_of_step(with_method(cfg, m), experts=experts) for m in methods}
            work += [("fused" if one_pass[m] and phase == "fused" else "score", m) for m in methods]
    return work


def topology_of(name: str | None) -> Slice:
    """Return the slice of a name, from the option or the config.

    Raises:
        ConfigError: neither the option nor the config names one.
        TopologyError: an unknown name.
    """
    if name is None:
        raise ConfigError("plan: no topology; give --topology v5e-16, or set plan.topology")
    return find_slice(name)


def plan(
    name: str,
    cfg: Config,
    *,
    where: Slice,
    fields: dict[str, Any],
    work: Sequence[tuple[str, str | None]],
    cache: str,
    timeout: int,
    jobs: int,
) -> dict[str, Any]:
    """Plan a config, of a policy with these fields of config.json, on a slice: numbers and text."""
    check_lengths(cfg, QwenConfig.from_hf(fields))
    common = {
        "config": cfg.model_dump(mode="json"),
        "fields": fields,
        "topology": where.name,
        "slices": max(cfg.mesh.slice, 1),
        "cache": str(Path(cache).expanduser()),
    }
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [common | {"phase": phase, "method": method} for phase, method in work]
        results = list(pool.map(lambda job: compile_apart(job, timeout=timeout), tasks))
    return document(name, cfg, where, fields, work, results, cache=Path(cache).expanduser())


def compile_apart(job: dict[str, Any], *, timeout: int) -> dict[str, Any]:
    """Compile one executable in a worker process; return its result.

    Raises:
        TopologyError: the worker crashed, took too long, or was refused something that the user can mend.
    """
    task = f"{job['phase']}{'' if job['method'] is None else ' ' + job['method']} for {job['topology']}"
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    try:
        process = subprocess.run(
            [sys.executable, "-m", "oarjax.tools.plan.worker"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment | ENVIRONMENT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TopologyError(f"plan: {task} was not compiled within {timeout} s; raise --timeout") from None
    answer = process.stdout.strip().splitlines()[-1:] or [""]
    if process.returncode or not answer[0].startswith("{"):
        message = "\n".join(process.stderr.strip().splitlines()[-8:])
        raise TopologyError(f"plan: the compiler failed on {task} (exit code {process.returncode}):\n{message}")
    result = json.loads(answer[0])
    if "error" in result:
        raise ConfigError(result["error"])
    return result


def document(
    name: str,
    cfg: Config,
    where: Slice,
    fields: dict[str, Any],
    work: Sequence[tuple[str, str | None]],
    results: Sequence[dict[str, Any]],
    *,
    cache: Path,
) -> dict[str, Any]:
    """Return the plan for JSON of what was compiled; the optimized programs are in the ``cache``."""
    model, s = QwenConfig.from_hf(fields), shapes_of(cfg)
    chips, turns = where.devices * max(cfg.mesh.slice, 1), turns_of(cfg.rollout.environment)
    mesh, resident = results[0]["mesh"], {k: v for r in results for k, v in r["resident"].items()}
    slots = slots_of(s, cfg.rollout, chips, cfg.rollout.tensor or mesh["tensor"])
    phases = []
    for (phase, method), result in zip(work, results):
        phase_cfg = with_method(cfg, method)
        totals = None
        if all("memory" in program for program in result["programs"]):
            totals = Executed()
            for program in (p for p in result["programs"] if p["steps"]):
                text = gzip.decompress((cache / f"{program['key']}.hlo.gz").read_bytes()).decode()
                times = program["steps"] if program["name"].endswith("prefill") else 1
                sizes = {"steps": program["steps"], "turns": turns, "slots": slots}
                totals.add(count(text, s, phase_cfg.credit, model, **sizes), times)
        phases.append(
            phase_of(
                result,
                name=phase,
                method=method,
                chip=where.chip,
                chips=chips,
                work=totals,
                experts=model.experts.count if model.experts else 0,
                model=model_flops(phase, model, phase_cfg),
                read=bytes_read(phase, model, s, cfg.rollout, chips=chips, mesh=mesh, resident=result["resident"]),
                slots=slots,
            )
        )
    parts = {"mesh": mesh, "versions": results[0]["versions"], "resident": resident, "phases": phases}
    return whole_of(name, cfg, where, fields, parts)


def slots_of(s: LargestShapes, rollout: RolloutConfig, chips: int, tensor: int) -> float:
    """Return how many slots of a row's cache a decode step reads on average."""
    return mean_slots(rollout_plan(s, rollout, blocks=chips // tensor), rollout.attention)


def bytes_read(
    phase: str,
    model: QwenConfig,
    s: LargestShapes,
    rollout: RolloutConfig,
    *,
    chips: int,
    mesh: Mapping[str, int],
    resident: Mapping[str, int],
) -> float:
    """Count the bytes of HBM that a phase has to read on a chip, where its program says less: to decode, and apply."""
    if phase == "apply":
        return applied_bytes(resident)
    if phase != "sample":
        return 0.0
    tensor = rollout.tensor or mesh["tensor"]
    slots = slots_of(s, rollout, chips, tensor)
    return read_bytes(model, s, rollout, chips=chips, tensor=tensor, expert=mesh["expert"], slots=slots)


def turns_of(environment: EnvironmentConfig | None) -> int:
    """Return the turns of a completion at most."""
    return 1 if environment is None else environment.turns


def whole_of(name: str, cfg: Config, where: Slice, fields: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of phases: the step, and remedies for those that do not fit.

    ``parts`` has ``phases``, and their ``mesh``, ``versions`` and ``resident``.
    """
    model, s, credit = QwenConfig.from_hf(fields), shapes_of(cfg), find_credit(cfg.credit)
    chips, work_of_step = where.devices * max(cfg.mesh.slice, 1), largest_work(model, cfg, credit)
    phases, tensor = parts["phases"], cfg.rollout.tensor or parts["mesh"]["tensor"]
    rows = rollout_plan(s, cfg.rollout, blocks=chips // tensor)
    evaluated = None if cfg.data.eval is None else evaluation_plan(s, cfg.rollout, cfg.eval, blocks=chips // tensor)
    fits = all(p["fits"] for p in phases)
    step_phases = [p for p in phases if p["method"] is None]  # what a step runs; other methods are beside it
    complete = fits and {p["name"] for p in step_phases} == set(phases_of_step(cfg, experts=model.experts is not None))
    result = {
        "config": name,
        "policy": cfg.policy.path,
        "parameters": parameter_count(model),
        "topology": where.name,
        "product": where.product,
        "slices": max(cfg.mesh.slice, 1),
        "chips": chips,
        "chip": asdict(where.chip),
        "mesh": parts["mesh"],
        "versions": parts["versions"],
        "remat": cfg.policy.remat,
        "attention": "splash" if cfg.policy.attention == "auto" else cfg.policy.attention,
        "credit": cfg.credit.method,
        "shapes": s._asdict(),
        "prompts": prompt_costs(model, s, cfg.rollout, work_of_step, credit),
        "again": again_costs(turns_of(cfg.rollout.environment), model, s, work_of_step),
        "resident": parts["resident"],
        "phases": phases,
        "step": step_of(step_phases, times_of(cfg.update), chip=where.chip, chips=chips) if complete else None,
        "expected": next((analytic_flops(cfg, model, s, p) for p in step_phases if p["name"] == "update"), None),
        "expected_fused": next((analytic_flops(cfg, model, s, p) for p in step_phases if p["name"] == "fused"), None),
        "fits": fits,
        "remedies": [f"{p['name']}: {remedy(p['name'], cfg)}" for p in phases if not p["fits"]],
        "notes": notes(
            phases,
            rows=s.rows,
            evaluated=0 if cfg.data.eval is None else cfg.eval.batch * cfg.eval.samples,
            cued=cfg.credit.answer.source == "reference",
        ),
        "starting": starting_of(cfg.rollout, rows, where, phases, evaluated=evaluated),
    }
    seconds = None if result["step"] is None else result["step"]["seconds_expected"]
    result["needs"] = needs_of(cfg, model, where, seconds=seconds)
    survival = survival_of(cfg.plan.lengths, limit=cfg.rollout.max_new)
    if survival is not None and result["step"] is not None:
        result["lengths"] = expected_step(cfg, model, result, survival, tensor=tensor)
    if result["step"] is not None:
        sizes = {"chips": chips, "tensor": tensor, "expert": parts["mesh"]["expert"]}
        weights = read_bytes(model, s._replace(rows=0, prompts=0), cfg.rollout, **sizes)
        drawing = cfg.rollout.devices
        result["lag"] = overlap_of(result, times_of(cfg.update), weights, tensor=tensor, drawing=drawing)
    return result


GATHERS = ("all-gather", "collective-permute")


def notes(phases: Sequence[dict[str, Any]], *, rows: int, evaluated: int, cued: bool) -> list[str]:
    """Note what a reader should know besides the numbers.

    A step has so many ``rows``, an evaluation's batch so many ``evaluated``; ones ``cued`` are scored with a cue.
    """
    lines = []
    if cued:
        lines.append("credit.answer.source reference makes scored rows longer by cue and answer: not in this plan.")
    if evaluated > rows:
        lines.append(f"An evaluation's batch is {evaluated} completions, more than a step's {rows}: not in this plan.")
    for p in phases:
        traffic = p.get("sent", {})
        if p["name"] in LEARNING and traffic.get("all-reduce", 0) > 8 * sum(traffic.get(kind, 0) for kind in GATHERS):
            lines.append(
                f"{p['name']} gathers weights by all-reduces, at twice the bytes, as XLA does over all of a slice "
                "in three dimensions; a smaller mesh.fsdp, with mesh.data beside it, avoids that."
            )
        total = p["hbm"]["total"]
        if p["fits"] and total > 0.95 * p["hbm"]["limit"]:
            lines.append(f"{p['name']} leaves less than 5% of HBM free, and the runtime wants some for itself.")
    return lines
