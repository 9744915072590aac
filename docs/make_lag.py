"""Print what ``update.lag`` can bring at most, by docs/data/plans.json; docs/rollouts.md quotes it.

python docs/make_lag.py

Each plan as it is, with completions of 1,024 tokens (one: 7,680) that all reach their limit, and scaled to 256 of up to
32,768 tokens: matrix products by model FLOPs, bytes of HBM by what decoding reads, links by tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oarjax.config.loading import load_config
from oarjax.config.schema import Config
from oarjax.models.qwen_config import QwenConfig
from oarjax.tools.plan.architecture import architecture_fields
from oarjax.tools.plan.expected import expected_step
from oarjax.tools.plan.lengths import lognormal_survival
from oarjax.tools.plan.overlap import overlap_of
from oarjax.tools.plan.programs import mean_slots, rollout_plan, shapes_of, times_of
from oarjax.tools.plan.sums import model_flops, read_bytes

FILE = Path(__file__).resolve().parent / "data/plans.json"
LONG, PROMPTS, SIGMA = 32768, 32, 0.8


def scaled(plan: dict[str, Any], cfg: Config, now: Config, model: QwenConfig, *, tensor: int) -> dict[str, Any]:
    """Return a plan of ``cfg`` with the shapes of another config."""
    shapes = [shapes_of(each) for each in (cfg, now)]
    rows = [rollout_plan(s, c.rollout, blocks=plan["chips"] // tensor) for s, c in zip(shapes, (cfg, now))]
    sizes = {"chips": plan["chips"], "tensor": tensor, "expert": plan["mesh"]["expert"]}
    before, after = (
        read_bytes(model, s, c.rollout, **sizes, slots=mean_slots(r, c.rollout.attention))
        for s, c, r in zip(shapes, (cfg, now), rows)
    )
    tokens = shapes[1].rows * shapes[1].completion / (shapes[0].rows * shapes[0].completion)
    phases = []
    for phase in plan["phases"]:
        whole = model_flops(phase["name"], model, cfg)
        work = model_flops(phase["name"], model, now) / whole if whole else 1.0
        share = {"products": work, "memory": after / before, "links": tokens}
        share = share if phase["name"] == "sample" else dict.fromkeys(share, work)
        seconds = {name: value * share[name] for name, value in phase["seconds"].items()}
        in_turn = max(seconds["products"], seconds["memory"]) + seconds["links"]
        phases.append(phase | {"seconds": seconds, "seconds_in_turn": in_turn})
    return plan | {"phases": phases, "shapes": shapes[1]._asdict()}


def gain(plan: dict[str, Any], cfg: Config, model: QwenConfig, *, tensor: int) -> str:
    """Describe the best division of the plan's slice."""
    empty, sizes = (
        shapes_of(cfg)._replace(rows=0, prompts=0),
        {"chips": plan["chips"], "tensor": tensor, "expert": plan["mesh"]["expert"]},
    )
    weights = read_bytes(model, empty, cfg.rollout, **sizes)
    found = overlap_of({"needs": {"weights": 0}} | plan, times_of(cfg.update), weights, tensor=tensor)
    return "none" if found is None else f"{found['gain']:.2f} with {found['chips']} chips that draw"


def main() -> None:
    for plan in json.loads(FILE.read_text()):
        if plan["chips"] == 1 or plan["step"] is None:
            continue
        cfg = load_config(FILE.parents[2] / plan["config"])
        model = QwenConfig.from_hf(architecture_fields(cfg.policy.path))
        tensor = cfg.rollout.tensor or plan["mesh"]["tensor"]
        longer = cfg.rollout.model_copy(update={"max_new": LONG, "prompts": PROMPTS})
        now = cfg.model_copy(update={"rollout": longer})
        long = scaled(plan, cfg, now, model, tensor=tensor)
        survival = lognormal_survival(mean=LONG / 4, sigma=SIGMA, limit=LONG)
        spread = long | {"lengths": expected_step(now, model, long, survival, tensor=tensor)}
        print(
            f"{plan['config']}, {plan['chips']} chips: {gain(plan, cfg, model, tensor=tensor)}; of {LONG:,} tokens, "
            f"all at the limit: {gain(long, now, model, tensor=tensor)}; lognormal of mean {LONG // 4:,}: "
            f"{gain(spread, now, model, tensor=tensor)}"
        )


if __name__ == "__main__":
    main()
