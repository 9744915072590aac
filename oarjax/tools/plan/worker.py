"""One phase's executables, in a process of their own: ``python -m oarjax.tools.plan.worker`` with a job on its input.

A compiler that runs out of memory, crashes or hangs takes this process with it and no other. The last line of the
output is the result as JSON; what the compiler printed before it does not matter.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from oarjax.config.inputs import MeshConfig
from oarjax.config.loading import parse_config
from oarjax.errors import UserError
from oarjax.models.qwen_config import QwenConfig
from oarjax.run.shapes import PhaseProgram, ProgramShapes
from oarjax.system.checkout import commit
from oarjax.system.devices import DeviceError
from oarjax.system.mesh import make_mesh, rollout_mesh
from oarjax.tools.plan.links import link_table
from oarjax.tools.plan.programs import LEARNING, PROGRAMS, planned, with_method
from oarjax.tools.plan.topology import Slice, compiler_version, find_slice, slice_devices

TOO_LARGE = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def plan(job: dict[str, Any]) -> dict[str, Any]:
    """Lower the programs of one phase, and compile each unless the cache knows the same program.

    Gives what is ``resident`` (bytes per chip), the ``ways`` of collectives by the devices of a group, the
    ``programs``, see ``compile_program``, and the ``commit`` whose programs they are.
    """
    target = find_slice(job["topology"])
    cfg = with_method(parse_config(job["config"]), job["method"])
    devices = slice_devices(target, slices=job["slices"])
    mesh = planned_mesh(cfg.mesh, cfg.rollout.devices, devices)
    shapes, phase = ProgramShapes(planned(cfg, QwenConfig.from_hf(job["fields"]), mesh)), job["phase"]
    sampling = rollout_mesh(mesh, tensor=cfg.rollout.tensor or mesh.shape["tensor"])
    ways = link_table(mesh, target) if phase != "sample" else {}
    ways = link_table(sampling, target) | ways if phase in ("sample", "reshard") else ways
    return {
        "resident": shapes.resident(phase),
        "versions": {"jax": jax.__version__, "libtpu": compiler_version()},
        "commit": commit(),
        "mesh": dict(mesh.shape),
        "ways": [[members, asdict(way)] for members, way in sorted(ways.items())],
        "programs": [compile_program(program, shapes, target, job) for program in PROGRAMS[phase](shapes)],
    }


def planned_mesh(sizes: MeshConfig, drawing: int | None, devices: Sequence[Any]) -> Mesh:
    """Arrange all devices of a slice for training, those of rollout.devices among them.

    Raises:
        DeviceError: the axes do not multiply to their number.
    """
    try:
        return make_mesh(**sizes.model_dump(), devices=devices)
    except DeviceError as error:
        if drawing is None:
            raise
        raise DeviceError(
            f"{error}; a plan has all devices draw and learn in turn, rollout.devices: {drawing} too: plan "
            "rollout.devices=null on a slice of the devices that learn"
        ) from error


def compile_program(program: PhaseProgram, shapes: ProgramShapes, target: Slice, job: dict[str, Any]) -> dict[str, Any]:
    """Compile one program, or read what is known of it.

    Gives its ``name`` and ``key``, the ``steps`` that it stands for, the bytes that lie ``beside`` it, and ``memory``
    and ``seconds`` or, where it does not fit, ``needs`` and ``has`` (bytes). The optimized program is in the cache as
    <key>.hlo.gz. A job that says not to ``compile`` gets name and key alone.
    """
    start = time.perf_counter()
    lowered = program.lower()
    versions = {"jax": jax.__version__, "libtpu": compiler_version()}
    # The mesh's order is part of the program, and the text names devices by number only.
    order = str(shapes.mesh.devices.flatten().tolist())
    # A program that learns has options of the compiler, which its text does not show.
    options = shapes.layout.options if program.phase in LEARNING else {}
    made_of = [lowered.as_text(), target.name, order, versions, options]
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    fields = {"name": program.name, "key": key, "steps": program.steps}
    if not job.get("compile", True):
        return fields
    folder = Path(job["cache"])
    answer_file = folder / f"{key}.json"
    if answer_file.is_file():
        result = json.loads(answer_file.read_text())
        return fields | result | {"beside": shapes.beside(program, read=_read(result)), "cached": True}
    lower_seconds, cpu = time.perf_counter() - start, time.process_time()
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result = too_large(str(error), target.chip.memory)
    else:
        m = compiled.memory_analysis()
        _write(folder / f"{key}.hlo.gz", gzip.compress(compiled.as_text().encode(), mtime=0))
        result = {
            "memory": {
                "peak": m.peak_memory_in_bytes,
                "arguments": m.argument_size_in_bytes,
                "outputs": m.output_size_in_bytes,
                "aliased": m.alias_size_in_bytes,
            }
        }
    result |= {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "lower_seconds": lower_seconds,
    }
    _write(answer_file, json.dumps(result).encode())
    return fields | result | {"beside": shapes.beside(program, read=_read(result)), "cached": False}


def _read(result: dict[str, Any]) -> int | None:
    """Return the bytes of the arguments that the program reads; None if it does not fit."""
    return result["memory"]["arguments"] if "memory" in result else None


def too_large(message: str, limit: float) -> dict[str, Any]:
    """Parse the bytes that a program needs and a chip has; needs is None if the message does not say."""
    match = TOO_LARGE.search(message)
    needs, has = (float(match[1]) * UNITS[match[2]], float(match[3]) * UNITS[match[4]]) if match else (None, limit)
    return {"needs": needs, "has": has, "message": message.strip().splitlines()[0]}


def _write(path: Path, content: bytes) -> None:
    """Write all of a file or none of it: other workers read here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}-{time.time_ns()}")
    fresh.write_bytes(content)
    fresh.rename(path)


def main() -> None:
    # JAX's own cache writes programs of a topology and cannot read them again.
    jax.config.update("jax_enable_compilation_cache", False)
    # Kernels carry the files and lines that they were traced from, which would be part of a program's key.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        result = plan(json.load(sys.stdin))
    except UserError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
