"""A run builds each part once, and its programs are bound in one place, traced once and compiled once."""

from __future__ import annotations

import ast
import io
from collections import Counter
from pathlib import Path

import pytest
from jax import monitoring
from micro import micro_config
from rich.console import Console
from tiny_programs import built

import oarjax
from oarjax.config.loading import load_config
from oarjax.config.section import changed
from oarjax.storage.stop import Stop
from oarjax.training.command import train_once

PACKAGE = Path(oarjax.__file__).parent
PROGRAMS = ("prepare", "score", "credit", "denominator", "accumulate", "apply", "add_microbatches", "apply_sums")
DECODING = ("_decode_rows", "take_rows", "move_rows", "empty_cache")
"""Compiled when a rollout first needs them with so many rows and slots."""


def test_programs_are_bound_in_one_place():
    calls = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "make_steps"
    ]
    assert calls == ["run/run.py"]


def test_parts_are_built_once():
    run = built()
    for part in ("policy", "layout", "rollout_layout", "steps"):
        assert getattr(run, part) is getattr(run, part)
    other = run.with_config(changed(run.cfg, seed=1))
    assert (other.cfg.seed, other.mesh, other.model) == (1, run.mesh, run.model)
    assert other.steps is not run.steps
    assert run.with_config(run.cfg) is run


@pytest.mark.parametrize("part", ["source", "tokenizer", "table", "train", "pairs"])
def test_a_run_of_a_model_and_a_mesh_alone_has_no_data(part):
    for run in (built(), built().with_config(changed(built().cfg, seed=1))):
        with pytest.raises(ValueError, match="no tokenizer, data or weights; use open_run"):
            getattr(run, part)


@pytest.mark.slow
def test_every_program_is_traced_and_compiled_once(tmp_path):
    """Warm start, evaluation, memory table and three iterations with evaluations, through the command."""
    heard: list[tuple[str, str]] = []  # (event, program), and a mark after every line of metrics

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        kind = {"jaxpr_trace_duration": "traced", "backend_compile_duration": "compiled"}.get(event.split("/")[-1])
        if kind is not None:
            name = str(kwargs["fun_name"])
            heard.append((kind, name.removeprefix("jit(").removesuffix(")").removeprefix("jit_")))

    changes = ["iterations=3", "eval.every=1", "sft.steps=3", "checkpoint.every=0", "checkpoint.warm_start=0"]
    changes += ["update.refills=0", "update.skip_zero_variance=false", "report.memory=on"]
    cfg = load_config(micro_config(tmp_path), changes)
    monitoring.register_event_duration_secs_listener(listen)
    try:
        with Stop() as stop:
            train_once(cfg, Console(file=io.StringIO()), stop, lambda: heard.append(("line", "")))
    finally:
        monitoring.unregister_event_duration_listener(listen)
    counts = Counter(heard)
    found = {name: (counts["traced", name], counts["compiled", name]) for name in PROGRAMS}
    assert found == dict.fromkeys(PROGRAMS, (1, 1))
    lines = [at for at, (kind, _) in enumerate(heard) if kind == "line"]  # the start, then each iteration
    assert len(lines) == 4
    # Iterations 2 and 3 compile nothing but sizes of a rollout that none before them had.
    later = [(kind, name) for kind, name in heard[lines[1] + 1 : lines[3]] if kind != "traced" and name not in DECODING]
    assert later == [("line", "")]
