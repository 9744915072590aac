"""Write docs/data/plans.json, docs/plans.md, a table of docs/cost.md and the headers of configs.

python docs/make_plans.py CONFIG...            compiles the programs of these configs for their slices
python docs/make_plans.py --phases=sample,apply CONFIG...    compiles these phases alone, and keeps the others
python docs/make_plans.py --check CONFIG...    lowers them alone, and marks phases whose programs are others by now
python docs/make_plans.py --beside NAME...     compiles variants that pages cite, for docs/data/plans_beside.json
python docs/make_plans.py                      writes pages and headers from the numbers that are there

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
from functools import partial
from pathlib import Path
from typing import Any

from oarjax.config.loading import load_config
from oarjax.models.qwen_config import QwenConfig
from oarjax.tools.plan.architecture import architecture_fields
from oarjax.tools.plan.command import bytes_read, compile_apart, phases_of, plan, topology_of, whole_of, work_of
from oarjax.tools.plan.programs import shapes_of
from oarjax.tools.plan.sums import with_seconds
from oarjax.tools.plan.table import headline, markdown
from oarjax.tools.study.page import between, table

ROOT = Path(__file__).resolve().parents[1]
FILE, BESIDE, PAGE = Path("docs/data/plans.json"), Path("docs/data/plans_beside.json"), Path("docs/plans.md")
BEFORE = Path("docs/data/plans_before.json")  # of commit fe2bcd7
SERVED = (  # 256 requests at once, each with a prompt of its own
    "policy.path=Qwen/Qwen3-8B plan.topology=v6e-4 mesh.fsdp=4 data.max_prompt=1024 rollout.prompts=256 "
    "rollout.group_size=1 rollout.max_new=1024 advantage.method=batch advantage.scale=batch"
)
VARIANTS = {  # name: config, changes and phase
    "served": ("qwen3-4b_v6e-16", SERVED, "sample"),
    "1.5b-int8": ("qwen2.5-1.5b_v5e-8", "rollout.cache=int8", "sample"),
    "1.5b-kernel": ("qwen2.5-1.5b_v5e-8", "rollout.attention=kernel", "sample"),
    "1.5b-kernel-int8": ("qwen2.5-1.5b_v5e-8", "rollout.attention=kernel rollout.cache=int8", "sample"),
    "8b-long-kernel": ("qwen3-8b_long_v5p-64", "rollout.attention=kernel", "sample"),
    "7b-v5p-grpo": ("qwen2.5-7b_v5p-32", "credit.method=uniform", "update"),
    "7b-v5e-grpo": ("qwen2.5-7b_v5e-64", "credit.method=uniform", "update"),
    "8b-long-grpo": ("qwen3-8b_long_v5p-64", "credit.method=uniform", "update"),
    "8b-32k": ("qwen3-8b_long_v5p-64", "rollout.max_new=32256 policy.remat=full", "fused"),
    "8b-32k-grpo": ("qwen3-8b_long_v5p-64", "rollout.max_new=32256 policy.remat=full credit.method=uniform", "update"),
    "8b-32k-sample": ("qwen3-8b_long_v5p-64", "rollout.max_new=32256 rollout.slots=256", "sample"),
    "7b-8k": ("qwen2.5-7b_v5p-32", "rollout.max_new=7680 update.microbatch=32", "fused"),
    "7b-8k-grpo": ("qwen2.5-7b_v5p-32", "rollout.max_new=7680 update.microbatch=32 credit.method=uniform", "update"),
    "7b-8k-sample": ("qwen2.5-7b_v5p-32", "rollout.max_new=7680 rollout.slots=512", "sample"),
    "7b-v5e-2x32": ("qwen2.5-7b_v5e-64", "mesh.data=2 mesh.fsdp=32", "fused"),
    "7b-v5p-shared": ("qwen2.5-7b_v5p-32", "update.prompt_rows=4", "fused"),
}
COST, MARKS = Path("docs/cost.md"), ("<!-- steps by plan -->", "<!-- end of steps by plan -->")
STEPS = (  # what, config with remat, rows at once in sampling, and variants of OAR-G's pass and GRPO's update
    ("7B v5p-32, remat `projections`", "qwen2.5-7b_v5p-32", "", "", "7b-v5p-grpo"),
    ("7B v5e-64, remat `attention`", "qwen2.5-7b_v5e-64", "", "", "7b-v5e-grpo"),
    ("7B v5p-32, 32 rows, `rollout.slots` 512", "qwen2.5-7b_v5p-32", "7b-8k-sample", "7b-8k", "7b-8k-grpo"),
    ("8B v5p-64, remat `projections`", "qwen3-8b_long_v5p-64", "", "", "8b-long-grpo"),
    ("the same, remat `full`, `rollout.slots` 256", "qwen3-8b_long_v5p-64", "8b-32k-sample", "8b-32k", "8b-32k-grpo"),
)
CACHE, TIMEOUT = "~/.cache/oarjax/tools/plan", 3600
COMMAND = "python docs/make_plans.py"
OLDER = (
    "Counted by an earlier version: {}. Bytes of slices that are read ahead are too many there, every sampled token "
    "reads a full cache, sums over devices are float32, and expected seconds leave out the compiler's cycles."
)
HEADER = re.compile(r"# Planned by the TPU's compiler.*?bounds from peak rates\.\n", re.DOTALL)


def compiled(name: str, phases: str = "", known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Plan a shipped config; with ``phases`` these alone, the others as ``known``."""
    config = f"configs/{name}.yaml"
    cfg = load_config(ROOT / config)
    fields = architecture_fields(cfg.policy.path)
    experts = QwenConfig.from_hf(fields).experts is not None
    work = work_of(cfg, phases_of(phases, cfg, experts=experts), (), experts=experts)
    where = topology_of(cfg.plan.topology)
    made = plan(config, cfg, where=where, fields=fields, work=work, cache=CACHE, timeout=TIMEOUT, jobs=1)
    if known is None:
        return made
    every = {p["name"]: p for p in [*known["phases"], *made["phases"]]}
    resident = {**known["resident"], **made["resident"]}
    return renewed(made | {"phases": [*every.values()], "resident": resident})


def variant(name: str) -> dict[str, Any]:
    """Plan one phase of a shipped config with changes."""
    config, changes, phase = VARIANTS[name]
    cfg = load_config(ROOT / f"configs/{config}.yaml", changes.split())
    fields, where = architecture_fields(cfg.policy.path), topology_of(cfg.plan.topology)
    found = plan(name, cfg, where=where, fields=fields, work=[(phase, None)], cache=CACHE, timeout=TIMEOUT, jobs=1)
    kept = {part: found[part] for part in ("chips", "shapes", "versions")}
    return {"config": config, "changes": changes, **kept, "phase": found["phases"][0]}


def lowered(name: str, phase: str) -> dict[str, Any]:
    """Return the commit and the keys of the programs of a phase, which are not compiled."""
    cfg = load_config(ROOT / "configs" / f"{name}.yaml")
    job = {
        "config": cfg.model_dump(mode="json"),
        "fields": architecture_fields(cfg.policy.path),
        "topology": topology_of(cfg.plan.topology).name,
        "slices": max(cfg.mesh.slice, 1),
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


def renewed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Compute anew what follows from what the programs of a plan's phases count."""
    cfg = load_config(ROOT / found["config"])
    where, fields = topology_of(cfg.plan.topology), architecture_fields(cfg.policy.path)
    sizes = {"chips": found["chips"], "mesh": found["mesh"], "resident": found["resident"]}
    read_of = partial(bytes_read, model=QwenConfig.from_hf(fields), s=shapes_of(cfg), rollout=cfg.rollout, **sizes)
    phases = [with_seconds(p, where.chip, read=read_of(p["name"])) if "executed" in p else p for p in found["phases"]]
    plan = whole_of(found["config"], cfg, where, fields, {**found, "phases": phases})
    older = [p["name"] for p in found["phases"] if "seconds_compiler" not in p]
    return plan | {"notes": [*plan["notes"], *([OLDER.format(", ".join(older))] if older else [])]}


def write(plans: list[dict[str, Any]]) -> None:
    """Write numbers, page and headers."""
    plans = [renewed(found) for found in plans]
    (ROOT / FILE).write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
    beside = json.loads((ROOT / BESIDE).read_text(encoding="utf-8"))
    before = json.loads((ROOT / BEFORE).read_text(encoding="utf-8"))
    page = markdown(plans, numbers=FILE, command=COMMAND, served=beside["served"], before=before)
    (ROOT / PAGE).write_text(page, encoding="utf-8")
    cost = (ROOT / COST).read_text(encoding="utf-8")
    (ROOT / COST).write_text(between(cost, *MARKS, steps_table(plans, beside)), encoding="utf-8")
    for found in plans:
        path, summary = ROOT / found["config"], headline(found)
        text = path.read_text(encoding="utf-8")
        if summary not in text.replace("\n#", ""):
            lines = textwrap.wrap(summary, width=118, break_on_hyphens=False)
            header = "".join(f"# {line}\n" for line in lines)
            path.write_text(HEADER.sub(lambda _, new=header: new, text), encoding="utf-8")


def steps_table(plans: list[dict[str, Any]], beside: Mapping[str, Any]) -> str:
    """Tabulate expected seconds of rollout, GRPO's update and OAR-G's scores and update, and their ratios."""
    phases = {Path(found["config"]).stem: {p["name"]: p for p in found["phases"]} for found in plans}
    rows = [["", "completions", "rollout", "GRPO's update", "OAR-G's scores and update", "over GRPO's update"]]
    rows[0].append("step over GRPO's")
    for what, config, sample, fused, update in STEPS:
        found = phases[config]["sample"] if not sample else beside[sample]["phase"]
        scored = phases[config]["fused"] if not fused else beside[fused]["phase"]
        rollout, grpo, oar = (p["seconds_expected"] for p in (found, beside[update]["phase"], scored))
        seconds = [f"{t:,.1f}" if t < 1000 else f"{t:,.0f}" for t in (rollout, grpo, oar)]
        ratios = [f"{oar / grpo:.2f}", f"{(rollout + oar) / (rollout + grpo):.2f}"]
        rows.append([what, f"{beside[update]['shapes']['completion']:,}", *seconds, *ratios])
    return table(rows)


def main(arguments: list[str]) -> int:
    """Make the plans of the configs named anew, or check them; keep the others."""
    names = [each for each in arguments if not each.startswith("--")]
    phases = next((each.removeprefix("--phases=") for each in arguments if each.startswith("--phases=")), "")
    if "--beside" in arguments:
        for name in names:
            beside = json.loads((ROOT / BESIDE).read_text(encoding="utf-8")) | {name: variant(name)}
            (ROOT / BESIDE).write_text(json.dumps(beside, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {beside[name]['phase']['seconds_expected']:.1f} s", flush=True)
        names = []
    plans = {Path(found["config"]).stem: found for found in json.loads((ROOT / FILE).read_text(encoding="utf-8"))}
    write([*plans.values()])
    for name in names:
        if "--check" in arguments:
            plans[name] = checked(plans[name], lambda phase, name=name: lowered(name, phase))
        else:
            plans[name] = compiled(name, phases, plans[name] if phases else None)
        write([*plans.values()])
        print(f"{name}: {'checked' if '--check' in arguments else 'compiled'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
