"""Write docs/data/programs.json: what the device programs of the shipped configs cost, by the compiler of CPUs.

python docs/make_programs.py            writes it
python docs/make_programs.py --print    prints it instead

Eight virtual devices, two layers, the real widths and vocabulary; the demo as it is, on one device. Nothing is run and
no weight exists. For each program: ``peak`` bytes per device with what lies beside it, and ``flops`` per device, loops
of unknown length counted once. ``at_most`` bounds how many programs of each kind a run compiles. A test holds the
file against the code: where a number grows on purpose, write the file anew and say in the commit what it buys.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402

from oarjax.config.loading import load_config  # noqa: E402
from oarjax.data.tasks.arithmetic import builtin_config  # noqa: E402
from oarjax.models.qwen_config import QwenConfig  # noqa: E402
from oarjax.run.memory import peak_bytes  # noqa: E402
from oarjax.run.shapes import ProgramShapes  # noqa: E402
from oarjax.system.mesh import make_mesh  # noqa: E402
from oarjax.tools.plan.programs import planned  # noqa: E402
from oarjax.tools.plan.published_sizes import PUBLISHED  # noqa: E402

HERE = Path(__file__).resolve().parent
FILE = HERE / "data" / "programs.json"
CONFIGS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "qwen2.5-7b_v5e-64": (f"mesh.fsdp={DEVICES}", "update.prompt_rows=1"),  # as on their chips
    "qwen2.5-7b_v5e-8_lora": ("update.prompt_rows=1",),
}
"""Config -> overrides that fit it to the devices."""
PHASES = {"qwen2.5-7b_v5e-8_lora": ("reshard", "update", "fused", "apply")}
"""Where not all are compiled: the others are another config's. A config has update or fused."""
LAYERS = 2


def measure(name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Compile the programs of one config."""
    cfg = load_config(HERE.parent / "configs" / f"{name}.yaml", [*overrides, "device=cpu", "data.eval=null"])
    fields = PUBLISHED.get(cfg.policy.path)
    model = QwenConfig.from_hf(builtin_config() if fields is None else {**fields, "num_hidden_layers": LAYERS})
    devices = jax.devices()[: 1 if fields is None else DEVICES]
    run = planned(cfg, model, make_mesh(**cfg.mesh.model_dump(), devices=devices))
    found = {}
    shapes = ProgramShapes(run)
    for program in shapes.programs():
        if name in PHASES and program.phase not in PHASES[name]:
            continue
        compiled = program.lower().compile()
        memory = compiled.memory_analysis()
        peak = peak_bytes(memory, platform="cpu") + shapes.beside(program, read=memory.argument_size_in_bytes)
        title = f"{program.phase}: {program.name}" if program.name else program.phase
        found[title] = {"peak": peak, "flops": compiled.cost_analysis().get("flops", 0.0)}
    return {"programs": found, "at_most": shapes.program_counts()}


def grown(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what is more in ``now``: peaks by 1%, FLOPs by 0.1%, counts, and programs that are new.

    Peaks are compared where both were compiled by the same minor version of JAX.
    """
    same_compiler = before["jax"].split(".")[:2] == now["jax"].split(".")[:2]
    room = {"peak": 1.01, "flops": 1.001} if same_compiler else {"flops": 1.001}
    found = []
    for name, config in now["configs"].items():
        old = before["configs"].get(name, {"programs": {}, "at_most": {}})
        for title, program in config["programs"].items():
            known = old["programs"].get(title)
            if known is None:
                found.append(f"{name}: {title} is new")
                continue
            more = [what for what, most in room.items() if program[what] > most * known[what]]
            found += [f"{name}: {title}: {what} {known[what]:,.0f} -> {program[what]:,.0f}" for what in more]
        for kind, count in config["at_most"].items():
            if count > old["at_most"].get(kind, 0):
                found.append(f"{name}: at most {count} programs of {kind}, {old['at_most'].get(kind, 0)} before")
    return found


def main(arguments: list[str]) -> int:
    found = {"jax": jax.__version__, "configs": {name: measure(name, extra) for name, extra in CONFIGS.items()}}
    if arguments == ["--print"]:
        print(json.dumps(found))
        return 0
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
