"""``oarjax bench``: time rollout, update, credit and a whole iteration on this machine.

The policies are random, written in the Hugging Face layout and read back by the usual loader.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from oarjax.data.hf import write_random_checkpoint
from oarjax.errors import ConfigError
from oarjax.models.weights import parameter_count
from oarjax.report.files import make_console
from oarjax.system.devices import choose_platform, use_compilation_cache
from oarjax.tools.bench import grading as bench_grading
from oarjax.tools.bench import growth as bench_growth
from oarjax.tools.bench import project as bench_project
from oarjax.tools.bench import ragged as bench_ragged
from oarjax.tools.bench import ragged_step as bench_ragged_step
from oarjax.tools.bench import ragged_update as bench_ragged_update
from oarjax.tools.bench import sides as bench_sides
from oarjax.tools.bench import step as bench_step
from oarjax.tools.bench.measure import (
    Compilations,
    Peak,
    TimedRuns,
    counted_compilations,
    machine_peak,
    measure,
    settled,
    share_text,
    spread,
)
from oarjax.tools.bench.work import BenchRow, Ours, WorkloadSizes, draw_tokens, make_rows

Sides = dict[str, dict[str, Callable[[], Any]]]
"""Side (ours, torch) -> row name -> work."""

COMMON = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
MODELS: dict[str, dict[str, Any]] = {
    "nano": COMMON
    | {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 4096,
    },
    "micro": COMMON
    | {
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "vocab_size": 16384,
    },
}
LONG_MODEL = MODELS["nano"]
WORKLOADS = ("W1", "W2", "W3", "W4")
STEPS, GRADING = "W6", "W7"
"""Minutes each: run only on request, W6 on policies of its own."""
RAGGED: dict[str, Callable[..., dict[str, Any]]] = {
    "W8": bench_ragged.bench_ragged,
    "W9": bench_ragged_update.bench_ragged_update,
    "W10": bench_ragged_step.bench_ragged_step,
    "W11": bench_ragged_step.bench_ragged_step,
}
"""Completions that differ in length, and the function that measures them."""


def run(
    model: str,
    only: str,
    repeats: int,
    as_json: bool,
    against: str | None,
    project: bool = False,
    growth: bool = False,
) -> None:
    """Run the workloads and print their tables, or one JSON document."""
    if project:
        projected = bench_project.document()
        print(json.dumps(projected, indent=2)) if as_json else make_console(markup=True).print(
            bench_project.table(projected)
        )
        return
    names = list(MODELS) if model == "both" else [model]
    if model not in (*MODELS, "both"):
        raise ConfigError(f"--model: expected {', '.join(MODELS)} or both, got {model}")
    workloads = [w.strip().upper() for w in only.split(",") if w.strip()] or list(WORKLOADS)
    if unknown := [w for w in workloads if w not in (*WORKLOADS, STEPS, GRADING, *RAGGED)]:
        raise ConfigError(
            f"--only: expected some of {','.join((*WORKLOADS, STEPS, GRADING, *RAGGED))}, got {','.join(unknown)}"
        )
    if against not in (None, "torch"):
        raise ConfigError(f"--against: expected torch, got {against}")
    if against == "torch" and importlib.util.find_spec("torch") is None:
        raise ConfigError('--against torch: torch is not installed; pip install "oarjax[parity]"')
    choose_platform("auto")
    console = make_console(sys.stderr if as_json else None, markup=True)
    if growth:
        grown = machine(None) | {"repeats": repeats}
        with tempfile.TemporaryDirectory(prefix="oarjax-bench-") as compiled:  # each program, for memory and for time
            use_compilation_cache(compiled)
            grown |= bench_growth.measure_growth(LONG_MODEL, bench_growth.BASE, repeats=repeats, status=console.status)
        grown["load_average_after"] = _load()
        print(json.dumps(grown, indent=2)) if as_json else console.print(bench_growth.table(grown))
        return
    # Without the cache, the number of compilations and their memory are those of a fresh run.
    jax.config.update("jax_enable_compilation_cache", False)
    peak = machine_peak()
    if against == "torch":
        from oarjax.tools.bench.against import product_flops

        peak = peak._replace(torch=product_flops(threads=threads(), device=torch_device(jax.devices()[0].platform)))
    document = machine(against) | {"repeats": repeats, "peak": peak._asdict()}
    document |= {part: [] for part in ("models", "credit", "ragged")}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` sends it: the same as Ctrl-C
    try:
        bench_workloads(
            document, names, workloads, repeats=repeats, peak=peak, against=against, console=console, show=not as_json
        )
    except KeyboardInterrupt:
        print_document(document | {"stopped": True}, as_json=as_json, console=console)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    print_document(document, as_json=as_json, console=console)


def print_document(document: dict[str, Any], *, as_json: bool, console: Console) -> None:
    """Print the document, or how to read the tables above."""
    document["load_average_after"] = _load()
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        console.print(footnote(document), style="dim")


def bench_workloads(
    document: dict[str, Any],
    names: list[str],
    workloads: list[str],
    *,
    repeats: int,
    peak: Peak,
    against: str | None,
    console: Console,
    show: bool,
) -> None:
    """Measure these workloads and add each to the document as it ends."""
    for name in names if set(workloads) & set(WORKLOADS) else []:
        result = bench_model(
            name,
            MODELS[name],
            WorkloadSizes(),
            workloads=workloads,
            repeats=repeats,
            peak=peak,
            against=against,
            console=console,
        )
        document["models"].append(result := settled(result, peak, machine_peak()))
        if show:
            console.print(table(result, against=against))
    for result in bench_of_steps(repeats=repeats, peak=peak, console=console, show=show) if STEPS in workloads else []:
        document["credit"].append(result)
    if GRADING in workloads:
        with console.status(GRADING), counted_compilations() as compiled:
            graded = bench_grading.bench_grading(workers=threads(), repeats=repeats, compiled=compiled)
        document["grading"] = graded
        if show:
            console.print(bench_grading.table(graded))
    for result in bench_of_ragged(workloads, repeats=repeats, peak=peak, against=against, console=console, show=show):
        document["ragged"].append(result)


def bench_model(
    name: str,
    fields: dict[str, Any],
    shapes: WorkloadSizes,
    *,
    workloads: list[str],
    repeats: int,
    peak: Peak,
    against: str | None,
    console: Console,
) -> dict[str, Any]:
    """Measure one policy; W3 includes W2's update, the unit of its multiples."""
    with tempfile.TemporaryDirectory(prefix="oarjax-bench-") as scratch:
        folder = write_random_checkpoint(Path(scratch) / name, fields, seed=0)
        tokens = draw_tokens(fields["vocab_size"], shapes, seed=0)
        ours = Ours(folder, shapes, tokens)
        sides: Sides = {"ours": ours.works}
        if against == "torch":
            from oarjax.tools.bench.against import Torch

            sides["torch"] = Torch(
                folder, shapes, tokens, ours.cfg, threads=threads(), device=torch_device(jax.devices()[0].platform)
            ).works
        bench_rows = [
            r
            for r in make_rows(ours.model, shapes)
            if r.workload in workloads or (r.name == "update" and "W3" in workloads)
        ]
        rows: list[dict[str, Any]] = []
        with counted_compilations() as compiled:
            for row in bench_rows:
                with console.status(f"{name}: {row.workload} {row.name}"):
                    rows.append(bench_row(row, sides, repeats=repeats, compiled=compiled, peak=peak))
    add_multiples(rows, sequences=shapes.prompts)
    return {
        "model": name,
        "parameters": parameter_count(ours.model),
        "config": fields,
        "settings": {
            "compute_dtype": "float32",
            "remat": ours.cfg.policy.remat,
            "microbatch": ours.cfg.update.microbatch,
            "head_chunk": ours.cfg.policy.head_chunk,
            "oar_p_chunk": ours.cfg.credit.masking.chunk,
            "probe": ours.cfg.credit.probe.mode,
        },
        "rows": rows,
    }


def bench_of_steps(*, repeats: int, peak: Peak, console: Console, show: bool) -> Iterator[dict[str, Any]]:
    """Measure W6 on its policies."""
    with tempfile.TemporaryDirectory(prefix="oarjax-bench-") as scratch, counted_compilations() as compiled:
        for name, setting in bench_step.step_settings(COMMON).items():
            folder = write_random_checkpoint(Path(scratch) / name, setting.fields, seed=0)
            result = bench_step.bench_steps(
                name, setting, folder, repeats=repeats, compiled=compiled, peak=peak, status=console.status
            )
            result = settled(result, peak, machine_peak())
            if show:
                console.print(bench_step.table(result))
            yield result


def bench_of_ragged(
    workloads: list[str], *, repeats: int, peak: Peak, against: str | None, console: Console, show: bool
) -> Iterator[dict[str, Any]]:
    """Measure W8 to W11 on nano."""
    settings = None
    if against is not None:
        settings = bench_ragged.TorchSettings(threads(), torch_device(jax.devices()[0].platform))
    with tempfile.TemporaryDirectory(prefix="oarjax-bench-") as scratch, counted_compilations() as compiled:
        names = [name for name in RAGGED if name in workloads]
        folder = write_random_checkpoint(Path(scratch) / "ragged", LONG_MODEL, seed=0) if names else Path(scratch)
        for name in names:
            start_seconds = compiled.seconds
            with console.status(name):
                result = RAGGED[name](
                    folder,
                    LONG_MODEL["vocab_size"],
                    bench_ragged.PROMPTS if name == "W11" else bench_ragged.RAGGED,
                    repeats=repeats,
                    compiled=compiled,
                    peak=peak,
                    against=settings,
                )
            result = settled(result, peak, machine_peak()) | {"compile_seconds": compiled.seconds - start_seconds}
            if show:
                console.print(bench_sides.table(result))
            yield result


def bench_row(row: BenchRow, sides: Sides, *, repeats: int, compiled: Compilations, peak: Peak) -> dict[str, Any]:
    """Run one row on every side; ``speedup`` is torch's seconds over ours, pair by pair: above 1 ours is faster."""
    result = measure({side: works[row.name] for side, works in sides.items()}, repeats=repeats, compiled=compiled)
    out: dict[str, Any] = {
        "workload": row.workload,
        "name": row.name,
        "what": row.what,
        "unit": row.unit,
        "model_flops": row.flops,
    }
    for side, m in result.items():
        out[side] = m.summary() | {
            "value": spread([in_unit(row, s) for s in m.seconds]),
            "gflops_per_second": row.flops / 1e9 / spread(m.seconds)["median"],
            "share_of_peak": spread([peak.share(row.flops, s) for s in m.seconds]),
        }
    out["speedup"] = pairwise(result["torch"], result["ours"]) if "torch" in result else None
    return out


def in_unit(row: BenchRow, seconds: float) -> float:
    """Convert a run's seconds to the row's unit."""
    return row.amount / seconds if row.unit == "tokens/s" else seconds / row.amount


def pairwise(a: TimedRuns, b: TimedRuns) -> dict[str, Any]:
    """Divide the seconds of a by those of b, run by run."""
    return spread([x / y for x, y in zip(a.seconds, b.seconds)])


def add_multiples(rows: list[dict[str, Any]], *, sequences: int) -> None:
    """Add credit per sequence as a multiple of the same side's update per sequence."""
    update = next((r for r in rows if r["name"] == "update"), None)
    for row in rows:
        for side in ("ours", "torch"):
            if row["workload"] == "W3" and update is not None and side in row:
                per_sequence = update[side]["seconds"]["median"] / sequences
                row[side]["updates_per_sequence"] = row[side]["value"]["median"] / per_sequence


def threads() -> int:
    """Count the CPUs that this process may use, which is also XLA's number of threads on a CPU."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_device(platform_name: str) -> str:
    """Return the device that torch must run on for a comparison.

    Raises:
        ConfigError: JAX is on a device that this torch cannot use.
    """
    if platform_name == "cpu":
        return "cpu"
    import torch

    if platform_name in ("gpu", "cuda") and torch.cuda.is_available():
        return "cuda"
    raise ConfigError(
        f"--against torch: JAX runs on {platform_name} and this torch cannot; "
        "set JAX_PLATFORMS=cpu to compare both on the CPU, or install a torch for this device"
    )


def machine(against: str | None) -> dict[str, Any]:
    """Describe the machine and the versions."""
    names = ["oarjax", "jax", "flax", *(["torch", "transformers"] if against else [])]
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "platform": jax.devices()[0].platform,
        "device": jax.devices()[0].device_kind,
        "threads": threads(),
        "load_average_before": _load(),
    }


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def table(result: dict[str, Any], *, against: str | None) -> Table:
    """Tabulate medians with minimum and maximum, within 80 columns; the JSON document has every number."""
    out = Table(title=f"{result['model']}, {result['parameters']:,} parameters, float32", title_justify="left")
    columns = ["oarjax", "torch", "torch/oarjax"] if against else ["oarjax", "programs", "peak MiB"]
    for heading, side in zip(["", "work", *columns], ("left", "left", "right", "right", "right")):
        out.add_column(heading, justify=side, no_wrap=True)
    for row in result["rows"]:
        cells = [row["workload"], f"{row['name']}\n[dim]{row['what']}[/dim]", value_text(row, "ours")]
        if against:
            s = row["speedup"]
            cells += [value_text(row, "torch"), f"{s['median']:.2f}x\n[dim]{s['min']:.2f}-{s['max']:.2f}[/dim]"]
        else:
            cells += [str(row["ours"]["compilations"]), f"{row['ours']['peak_rss_mb']:,.0f}"]
        out.add_row(*cells)
    return out


def value_text(row: dict[str, Any], side: str) -> str:
    """Format a cell: the median with its unit, the range, for credit the multiple of an update, the share of peak."""
    v, unit = row[side]["value"], row["unit"]
    digits = ",.0f" if unit == "tokens/s" else ".4f" if v["median"] < 0.1 else ".3f"
    multiple = row[side].get("updates_per_sequence")
    notes = "" if multiple is None else f"\n[dim]{multiple:.2f} x update[/dim]"
    notes += f"\n[dim]{share_text(row[side]['share_of_peak'])} of peak[/dim]"
    return f"{v['median']:{digits}} {unit}\n[dim]{v['min']:{digits}}-{v['max']:{digits}}[/dim]{notes}"


def footnote(document: dict[str, Any]) -> str:
    """Explain how to read the table."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    paired = ""
    if "torch" in document["versions"]:
        paired = (
            " Sides ran in turn; the ratio is pair by pair, above 1 oarjax is faster. "
            "On a busy machine several torch threads wait for one another: bind the command to one core (taskset -c 0)."
        )
    peak = document["peak"]
    torch_peak = "" if peak["torch"] is None else f" and {peak['torch'] / 1e9:,.0f} by torch's"
    return (
        f"Medians of {document['repeats']} warm runs, minimum and maximum below. {document['threads']} CPU thread(s), "
        f"peak {peak['flops'] / 1e9:,.0f} GFLOP/s of float32 matrix products{torch_peak} ({peak['source']}; a dash "
        "where it was another by more than a tenth after the work), "
        f"device {document['device']}, load {document['load_average_before']:.1f} before.{paired} {versions}"
    )
