"""Time W8, W10 and W11 of ``oarjax bench`` beside those of an earlier commit, and write docs/data/bench_before.json.

git worktree add ../before fe2bcd7
python docs/make_before.py ../before            8 draws of each; all figures of the file anew
python docs/make_before.py ../before --draws 2  fewer
python docs/make_before.py ../before --plans qwen3-4b_v6e-16 ...
    compiles that commit's programs of scores and update for the slices of these configs, minutes each, counts them as
    docs/make_plans.py counts today's, and adds the compiler's seconds to docs/data/plans_before.json

One process runs this tree, another the earlier one, in turn on the same draws; a run in which a program was compiled is
repeated, and completions of other lengths are refused. Alone on the machine it takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
OUT, PLANS = HERE / "data" / "bench_before.json", HERE / "data" / "plans_before.json"
CACHE = Path("~/.cache/oarjax/tools/plan").expanduser()
LONG = {"prompt_tokens": 192, "max_new": 256, "group_size": 8}
SHAPES = {
    "W8": "64 rows, prompts of 64 tokens, completions of up to 512",
    "W10": "16 prompts x 4, prompts of 64 tokens, completions of up to 512",
    "W11": "8 prompts x 8, prompts of 192 tokens, completions of up to 256",
}
COMPILE = """
import json, sys
from oarjax.config import load_config
from oarjax.plan.architecture import architecture_fields
from oarjax.plan.command import compile_apart, topology_of
from oarjax.plan.programs import shapes_of

config, phase, cache = sys.argv[1:]
cfg = load_config(config)
job = {"config": cfg.model_dump(mode="json"), "fields": architecture_fields(cfg.policy.path), "options": {}}
job |= {"topology": topology_of(cfg, None).name, "slices": max(cfg.mesh.slice, 1), "phase": phase, "method": None}
result = compile_apart(job | {"cache": cache}, timeout=7200)
print(json.dumps(result | {"name": phase, "shapes": shapes_of(cfg)._asdict()}))
"""
"""What compiles a phase by the names that the earlier commit has."""
WORKS = ("W8", "W10 GRPO", "W10 OAR-G", "W11 GRPO", "W11 OAR-G")


class Draw(NamedTuple):
    """One warm run of some work."""

    seconds: float
    lengths: list[int]


def main() -> None:
    """Time both trees in turn, or answer for one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path, help="the earlier commit's tree")
    parser.add_argument("--draws", type=int, default=8, help="of each work")
    parser.add_argument("--plans", nargs="+", metavar="CONFIG", help="count the plans of these instead")
    parser.add_argument("--serve", action="store_true", help="time what standard input names, in this process")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.plans:
        for name in options.plans:
            add_plan(options.before.resolve(), f"configs/{name}.yaml")
        return
    trees = {"before": options.before.resolve(), "now": HERE.parent}
    load = os.getloadavg()
    sides = {name: started(tree) for name, tree in trees.items()}
    works: dict[str, Any] = {}
    for work in WORKS:
        runs: dict[str, list[Draw]] = {name: [] for name in sides}
        for number in range(1, options.draws + 1):
            for name, side in sides.items():
                runs[name].append(asked(side, work, number))
            if runs["before"][-1].lengths != runs["now"][-1].lengths:
                sys.exit(f"{work}, draw {number}: the two trees draw completions of other lengths")
            print(work, number, *(f"{name} {each[-1].seconds:.2f} s" for name, each in runs.items()), flush=True)
        seconds = {name: [round(draw.seconds, 3) for draw in draws] for name, draws in runs.items()}
        shape = SHAPES[work.split()[0]]
        works[work] = {"shape": shape, "tokens": [sum(draw.lengths) for draw in runs["now"]], "seconds": seconds}
    for side in sides.values():
        side.communicate()
    versions = {name: importlib.import_module(name).__version__ for name in ("jax", "numpy")}
    settings = {"python": platform.python_version(), "threads": len(os.sched_getaffinity(0))} | versions
    commits = {name: commit(tree) for name, tree in trees.items()}
    made = {"policy": "1.5M parameters, float32", "commits": commits, "machine": settings, "load_before": load}
    OUT.write_text(
        json.dumps(made | {"load_after": os.getloadavg(), "works": works}, indent=1) + "\n", encoding="utf-8"
    )


def add_plan(tree: Path, config: str) -> None:
    """Add the compiler's seconds of an earlier tree's scores and update of a config to the plans beside ours."""
    from oarjax.config.loading import load_config
    from oarjax.models.qwen_config import QwenConfig
    from oarjax.tools.plan.architecture import architecture_fields
    from oarjax.tools.plan.command import topology_of
    from oarjax.tools.plan.programs import LargestShapes
    from oarjax.tools.plan.sums import count, phase_of

    plans, cfg = json.loads(PLANS.read_text(encoding="utf-8")), load_config(HERE.parent / config)
    model, where = QwenConfig.from_hf(architecture_fields(cfg.policy.path)), topology_of(cfg.plan.topology)
    for phase in plans[config].keys() - {"sample"}:
        known = plans[config][phase]
        command = [sys.executable, "-c", COMPILE, config, phase, str(CACHE)]
        said = subprocess.check_output(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, text=True)
        result = json.loads(said.splitlines()[-1])
        text = gzip.decompress((CACHE / f"{result['key']}.hlo.gz").read_bytes()).decode()
        sizes = {"chips": where.chips * max(cfg.mesh.slice, 1), "experts": model.experts.count if model.experts else 0}
        work = count(text, LargestShapes(**result["shapes"]), cfg.credit, model)
        result |= {"programs": [result]}
        more = {"method": None, "chip": where.chip, "model": known["model"], "read": 0.0, **sizes}
        found = phase_of(result, name=phase, work=work, **more)
        if abs(found["executed"] / known["executed"] - 1) > 0.001:
            sys.exit(f"{config}, {phase}: executes {found['executed']:.4g}, planned with {known['executed']:.4g}")
        known["seconds_compiler"] = found["seconds_compiler"]
        print(config, phase, f"{found['seconds_compiler']:.1f} s", flush=True)
    PLANS.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


def commit(tree: Path) -> str:
    """Return a tree's commit, with a plus sign if files differ from it."""
    git = partial(subprocess.run, cwd=tree, capture_output=True, text=True, check=True)
    changed = git(["git", "status", "--porcelain", "--", "oarjax"]).stdout
    return git(["git", "rev-parse", "HEAD"]).stdout.strip() + "+" * bool(changed)


def started(tree: Path) -> subprocess.Popen[str]:
    """Start a process that runs a tree's package."""
    command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--serve"]
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def asked(side: subprocess.Popen[str], work: str, number: int) -> Draw:
    """Let a process do a draw of some work."""
    assert side.stdin is not None
    assert side.stdout is not None
    side.stdin.write(json.dumps([work, number]) + "\n")
    side.stdin.flush()
    for line in side.stdout:
        if line.startswith("["):
            return Draw(*json.loads(line))
    sys.exit(f"{work}, draw {number}: the process ended")


def serve() -> None:
    """Answer lines of [work, number] by lines of [seconds, lengths]."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    bench = "oarjax.tools.bench" if importlib.util.find_spec("oarjax.tools") else "oarjax.bench"
    measure, command = (importlib.import_module(f"{bench}.{name}") for name in ("measure", "command"))
    hf = importlib.import_module("oarjax.data.hf")
    works: dict[str, Callable[[int], Draw]] = {}
    with tempfile.TemporaryDirectory() as scratch, measure.counted_compilations() as compiled:
        folder = hf.write_random_checkpoint(Path(scratch) / "policy", command.LONG_MODEL, seed=0)
        vocab = command.LONG_MODEL["vocab_size"]
        for line in sys.stdin:
            work, number = json.loads(line)
            if work not in works:
                make = rollout if work == "W8" else partial(iteration, work=work)
                works[work] = make(bench, folder, vocab)
            print(json.dumps(measure.warm(partial(works[work], number), compiled)), flush=True)


def rollout(bench: str, folder: Path, vocab: int) -> Callable[[int], Draw]:
    """Make W8's rollout, by the names that the benchmark's module has in both trees."""
    r: ModuleType = importlib.import_module(f"{bench}.ragged")
    shapes = r.RAGGED
    model, source = r.read_config(folder)
    params, policy = r.load_params(source, model), r.make_policy(model, compute_dtype=r.jnp.float32)
    ids = r.draw_prompts(vocab, shapes, count=shapes.rows)
    rows = r.jnp.arange(shapes.rows, dtype=r.jnp.int32)
    prompts = r.PromptBatch(r.jnp.asarray(ids), r.jnp.ones(ids.shape, bool), rows)
    decoding = r.Decoding(shapes.max_new, 1.0, 0, 1.0, tuple(range(shapes.stops)), r.PAD)
    sampler = r.SegmentedSampler(policy, decoding, keys_of=partial(r.group_keys, group_size=1), group=1)

    def draw(number: int) -> Draw:
        sampler.spent()
        start = time.perf_counter()
        drawn = r.jax.block_until_ready(sampler(params, prompts, r.jax.random.key(number)))
        return Draw(time.perf_counter() - start, r.np.asarray(drawn.completion).sum(1).tolist())

    return draw


def iteration(bench: str, folder: Path, vocab: int, *, work: str) -> Callable[[int], Draw]:
    """Make an iteration of W10 or W11."""
    workload, name = work.split(" ", 1)
    step = importlib.import_module(f"{bench}.ragged_step")
    shapes = step.Ragged(**(LONG if workload == "W11" else {}))
    iterations = step.RaggedIterations(folder, vocab, shapes, step.CREDIT[name])

    def draw(number: int) -> Draw:
        done = iterations(step.OURS, number)
        return Draw(done.seconds, done.lengths.tolist())

    return draw


if __name__ == "__main__":
    main()
