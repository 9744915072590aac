"""Write docs/data/plans.json, docs/plans.md and the headers of configs, for some configs or for all.

python docs/make_plans.py CONFIG...            compiles the programs of these configs for their slices
python docs/make_plans.py --check CONFIG...    lowers them alone, and marks phases whose programs are others by now
python docs/make_plans.py                      writes page and headers from the numbers that are there

A CONFIG is a name such as qwen3-4b_v6e-16. The other plans stay as they are, and the page says from which commit each
phase is. Compiling takes minutes for a phase of a large policy, lowering a tenth of them; commit what changes programs
first, since the commit is noted.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oarjax.config.loading import load_config
from oarjax.models.qwen_config import QwenConfig
from oarjax.tools.plan.architecture import architecture_fields
from oarjax.tools.plan.command import compile_apart, phases_of, plan, topology_of, work_of
from oarjax.tools.plan.programs import evaluation_plan, rollout_plan, shapes_of
from oarjax.tools.plan.starting import starting_of
from oarjax.tools.plan.table import headline, markdown

ROOT = Path(__file__).resolve().parents[1]
FILE, PAGE = Path("docs/data/plans.json"), Path("docs/plans.md")
CACHE, TIMEOUT = "~/.cache/oarjax/tools/plan", 3600
COMMAND = "python docs/make_plans.py"
HEADER = re.compile(r"# Planned by the TPU's compiler.*?bounds from peak rates\.\n", re.DOTALL)


def compiled(name: str) -> dict[str, Any]:
    """Plan a shipped config."""
    config = f"configs/{name}.yaml"
    cfg = load_config(ROOT / config)
    fields = architecture_fields(cfg.policy.path)
    experts = QwenConfig.from_hf(fields).experts is not None
    work = work_of(cfg, phases_of("", cfg, experts=experts), (), experts=experts)
    where = topology_of(cfg.plan.topology)
    return plan(config, cfg, where=where, fields=fields, work=work, cache=CACHE, timeout=TIMEOUT, jobs=1)


def lowered(name: str, phase: str) -> dict[str, Any]:
    """Return the commit and the keys of the programs of a phase, which are not compiled."""
    cfg = load_config(ROOT / "configs" / f"{name}.yaml")
    job = {
        "config": cfg.model_dump(mode="json"),
        "fields": architecture_fields(cfg.policy.path),
        "topology": topology_of(cfg.plan.topology).name,
        "slices": max(cfg.mesh.slice, 1),
        "options": {},
        "cache": "",
        "phase": phase,
        "method": None,
        "compile": False,
    }
    return compile_apart(job, timeout=TIMEOUT)


def checked(found: Mapping[str, Any], lower: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a plan whose phases have the commit of today where their programs are the same, else are ``changed``."""
    phases = []
    for phase in found["phases"]:
        now = lower(phase["name"])
        # An older plan has one program and its key.
        known = {phase["key"]} if "key" in phase else {program["key"] for program in phase["programs"]}
        same = known == {program["key"] for program in now["programs"]}
        kept = {name: value for name, value in phase.items() if name != "changed"}
        phases.append(kept | ({"commit": now["commit"]} if same else {"changed": True}))
    return {**found, "phases": phases}


def started(found: Mapping[str, Any]) -> dict[str, float] | None:
    """Return what a run of the plan's config compiles, at the costs that the plan has."""
    cfg = load_config(ROOT / found["config"])
    blocks = found["chips"] // (cfg.rollout.tensor or found["mesh"]["tensor"])
    rows = rollout_plan(shapes_of(cfg), cfg.rollout, blocks=blocks)
    evaluated = None
    if cfg.data.eval is not None:
        evaluated = evaluation_plan(shapes_of(cfg), cfg.rollout, cfg.eval, blocks=blocks)
    return starting_of(cfg.rollout, rows, topology_of(cfg.plan.topology), found["phases"], evaluated=evaluated)


def write(plans: list[dict[str, Any]]) -> None:
    """Write numbers, page and headers."""
    plans = [found | {"starting": started(found)} for found in plans]
    (ROOT / FILE).write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
    (ROOT / PAGE).write_text(markdown(plans, numbers=FILE, command=COMMAND), encoding="utf-8")
    for found in plans:
        path, summary = ROOT / found["config"], headline(found)
        text = path.read_text(encoding="utf-8")
        if summary not in text.replace("\n#", ""):
            lines = textwrap.wrap(summary, width=118, break_on_hyphens=False)
            header = "".join(f"# {line}\n" for line in lines)
            path.write_text(HEADER.sub(lambda _, new=header: new, text), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Make the plans of the configs named anew, or check them; keep the others."""
    names = [each for each in arguments if each != "--check"]
    plans = {Path(found["config"]).stem: found for found in json.loads((ROOT / FILE).read_text(encoding="utf-8"))}
    write([*plans.values()])
    for name in names:
        if "--check" in arguments:
            plans[name] = checked(plans[name], lambda phase, name=name: lowered(name, phase))
        else:
            plans[name] = compiled(name)
        write([*plans.values()])
        print(f"{name}: {'checked' if '--check' in arguments else 'compiled'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
