"""W6 of ``oarjax bench``: time a whole training step with every method of credit, beside plain GRPO's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from oarjax.data.tasks.arithmetic import builtin_config
from oarjax.tools.bench.measure import Compilations, Peak, measure, share_text, spread
from oarjax.tools.bench.work import Ours, Watch, WorkloadSizes, draw_tokens, half_constant, half_right, watched
from oarjax.tools.plan.jaxpr_flops import executed_flops

GRPO = "GRPO"
ASKED = {"update": {"skip_zero_variance": False}}
"""Fields of what is read off the reference answer: all rows are scored."""
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    GRPO: {"credit": {"method": "uniform"}},
    "OAR-G, 1 draw": {"credit": {"method": "oar_g"}},
    "OAR-G, 4 draws": {"credit": {"method": "oar_g", "draws": 4}},
    "OAR-F": {"credit": {"method": "oar_f"}},
    "OAR-L": {"credit": {"method": "oar_l"}},
    "screened OAR-P": {"credit": {"method": "oar_screened"}},
    "OAR-P": {"credit": {"method": "oar_p"}},
    "signed values": ASKED | {"credit": {"method": "signed_values", "answer": {"source": "reference"}}},
    "signed values by entropy": ASKED
    | {"credit": {"method": "signed_values", "signed_values": {"by": "entropy"}, "answer": {"source": "reference"}}},
    "soft reward": ASKED
    | {"credit": {"method": "uniform", "answer": {"source": "reference"}}, "advantage": {"soft": "reward"}},
}
"""Sections of the config, with the defaults of a run elsewhere. The answer of a row stands for the reference."""
GOALS = {"OAR-G, 1 draw": 1.3, "OAR-G, 4 draws": 1.9, "screened OAR-P": 2.0, "OAR-P": 6.0}
"""Goal for the time of a step over plain GRPO's, without skipped rows."""
PROGRAMS = ("sample", "score", "credit", "accumulate", "fused_add", "apply")


@dataclass(frozen=True)
class StepSetting:
    """A policy and the shapes of a step."""

    fields: dict[str, Any]  # of its config.json
    shapes: WorkloadSizes
    microbatch: int


def step_settings(common: dict[str, Any]) -> dict[str, StepSetting]:
    """Return the demo (completions as long as its trained policy's: 34 of 38 tokens reason) and a wider policy."""
    wide = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 1536}
    return {
        "demo": StepSetting(
            builtin_config(),
            WorkloadSizes(prompt_tokens=16, new_tokens=48, reasoning=34, cue=2, answer=2, groups=32, group_size=8),
            microbatch=64,
        ),
        "wide": StepSetting(
            common | wide | {"vocab_size": 16384},
            WorkloadSizes(prompt_tokens=64, new_tokens=136, reasoning=128, cue=4, answer=4, groups=2, group_size=4),
            microbatch=4,
        ),
    }


def counted(totals: dict[str, float]) -> Watch:
    """Wrap programs so that each call adds its executed FLOPs to ``totals``."""

    def around(name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        traced = getattr(program, "whole", program)  # a rollout is a loop on the host over several programs

        def run(*args: Any, **static: Any) -> Any:
            totals[name] = totals.get(name, 0.0) + executed_flops(lambda *a: traced(*a, **static), *args)
            return program(*args, **static)

        return run

    return watched(PROGRAMS, around)


def step_flops(ours: Ours, sections: dict[str, Any], setting: StepSetting, *, skip: bool) -> dict[str, float]:
    """Count the executed FLOPs of each program of one step."""
    totals: dict[str, float] = {}
    _step(ours, sections, setting, skip=skip, watch=counted(totals))()
    return totals


def _step(ours: Ours, sections: dict[str, Any], setting: StepSetting, *, skip: bool, **more: Any) -> Callable[[], Any]:
    """Return one iteration's work; with ``skip`` every second group has equal rewards and is skipped."""
    update = {"microbatch": setting.microbatch, "skip_zero_variance": True} | sections.get("update", {})
    cfg = ours.changed(**sections | {"update": update})
    return ours.iteration(cfg, rewards=half_constant if skip else half_right, **more)


def bench_steps(
    name: str,
    setting: StepSetting,
    folder: Path,
    *,
    repeats: int,
    compiled: Compilations,
    peak: Peak,
    status: Callable[[str], Any],
) -> dict[str, Any]:
    """Measure each method against GRPO in turn (GRPO, method, GRPO, method ...), with all rows and with half."""
    s = setting.shapes
    ours = Ours(folder, s, draw_tokens(setting.fields["vocab_size"], s, seed=0))
    rows = []
    for skip in (False, True):
        flops = {}
        for method, sections in METHODS.items():
            with status(f"W6 {name}: counting {method}"):
                flops[method] = step_flops(ours, sections, setting, skip=skip)
        plain = _step(ours, METHODS[GRPO], setting, skip=skip)
        for method, sections in METHODS.items():
            if method == GRPO:
                continue
            sides = {GRPO: plain, method: _step(ours, sections, setting, skip=skip)}
            with status(f"W6 {name}: {method}"):
                measured = measure(sides, repeats=repeats, compiled=compiled)
            executed = sum(flops[method].values())
            of_grpo = spread([a / b for a, b in zip(measured[method].seconds, measured[GRPO].seconds)])
            rows.append(
                {
                    "method": method,
                    "rows": "half skipped" if skip else "all",
                    "of_grpo": of_grpo,
                    "goal": None if skip else GOALS.get(method),
                    "executed_flops": flops[method],
                    "flops_of_grpo": executed / sum(flops[GRPO].values()),
                    "share_of_peak": spread([peak.share(executed, seconds) for seconds in measured[method].seconds]),
                    "grpo": measured[GRPO].summary() | {"executed_flops": flops[GRPO]},
                }
                | measured[method].summary()
            )
    what = f"{s.groups} x {s.group_size} ({s.prompt_tokens}+{s.new_tokens}, {s.reasoning} of reasoning)"
    return {"workload": "W6", "name": name, "what": what, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """Tabulate a whole step over GRPO's: seconds, executed FLOPs, and the goal."""
    out = Table(title=f"W6 step, {result['name']}: {result['what']}", title_justify="left")
    out.add_column("method", no_wrap=True)
    out.add_column("rows", no_wrap=True)
    for heading in ("s", "of peak", "of GRPO", "FLOPs of GRPO", "goal"):
        out.add_column(heading, justify="right", no_wrap=True)
    for r in result["rows"]:
        ratio = r["of_grpo"]
        out.add_row(
            r["method"],
            r["rows"],
            f"{r['seconds']['median']:.2f}",
            share_text(r["share_of_peak"]),
            f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
            f"{r['flops_of_grpo']:.2f}",
            "" if r["goal"] is None else f"{r['goal']}",
        )
    return out
