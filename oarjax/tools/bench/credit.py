"""W5 of ``oarjax bench``: time scores over long reasoning, beside OAR-P as whole forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from rich.table import Table

from oarjax.credit.probe import Probe, divergence, outcome_probe, reading_of
from oarjax.models.policy import Policy, positions_of
from oarjax.models.qwen import make_policy
from oarjax.step.steps import Steps
from oarjax.tools.bench.measure import Compilations, Peak, measure, share_text, spread
from oarjax.tools.bench.work import PAD, Ours, WorkloadSizes, draw_tokens, spans, unchanged
from oarjax.tools.plan.jaxpr_flops import executed_flops
from oarjax.types import AnswerSpan, Params

LONG = WorkloadSizes(prompt_tokens=64, credit_rows=1, reasoning=512, cue=4, answer=4)
PLAIN, SHARED = "OAR-P plain", "OAR-P shared prompt"
SCORES: dict[str, dict[str, Any]] = {
    SHARED: {"method": "oar_p", "masking": {"buckets": 1}},
    "OAR-P": {"method": "oar_p"},
    "screened OAR-P": {"method": "oar_screened"},
    "OAR-L": {"method": "oar_l"},
    "OAR-F": {"method": "oar_f"},
    "OAR-G, 1 draw": {"method": "oar_g"},
    "OAR-G, 4 draws": {"method": "oar_g", "draws": 4},
}
"""Fields of credit, with the defaults of a run elsewhere; OAR-P with one bucket recomputes whole completions."""


def plain_importance(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    probe: Probe,
    reasoning: int,
    chunk: int,
) -> Float[Array, "R B"]:
    """Compute OAR-P as the paper states it: a whole forward for each of the first ``reasoning`` tokens.

    ``chunk`` forwards are vmapped at a time; no keys or values are kept.
    """
    length = span.answer.shape[1]
    start = tokens.shape[1] - length
    reading, positions = reading_of(tokens, valid, span), positions_of(valid)

    def outcome(ids: Int[Array, "B N"]) -> Array:
        hidden, _ = policy.trunk(params, policy.embed(params, ids), positions, valid)
        return probe.read(policy, params, hidden[:, start - 1 : -1], reading)

    before = outcome(tokens)

    def score(t: Int[Array, ""]) -> Float[Array, "B"]:
        return divergence(probe, before, outcome(tokens.at[:, start + t].set(PAD)))

    return jax.lax.map(score, jnp.arange(reasoning), batch_size=chunk)


def plain(ours: Ours) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the plain form as a jitted function, and its arguments."""
    s, cfg = ours.shapes, ours.cfg
    policy = make_policy(ours.model, compute_dtype=jnp.float32, remat=cfg.policy.remat)
    probe = outcome_probe(cfg.credit.probe.mode, temperature=cfg.rollout.temperature)
    ids = jnp.asarray(ours.tokens.credit)
    marked = jax.tree.map(jnp.asarray, spans(len(ids), s.reasoning + s.cue + s.answer, s))

    @jax.jit
    def scores(params: Params, tokens: Array, valid: Array, span: AnswerSpan) -> Array:
        return plain_importance(
            policy,
            params,
            tokens,
            valid,
            span,
            probe=probe,
            reasoning=s.reasoning,
            chunk=cfg.credit.masking.chunk,
        )

    return scores, (ours.params, ids, jnp.ones(ids.shape, bool), marked)


def only_counted(counts: list[float]) -> Callable[[Steps], Steps]:
    """Replace ``score`` by a count of its executed FLOPs."""

    def watched(steps: Steps) -> Steps:
        def score(*args: Any, **static: Any) -> None:
            counts.append(executed_flops(lambda *a: steps.score(*a, **static), *args))

        return steps._replace(score=score)

    return watched


def score_flops(ours: Ours, names: Iterable[str] = tuple(SCORES)) -> dict[str, float]:
    """Count executed FLOPs of the plain form and of the methods ``names``; runs nothing else."""
    scores, args = plain(ours)
    out = {PLAIN: executed_flops(scores, *args)}
    for name in names:
        counts: list[float] = []
        ours.importance(watch=only_counted(counts), **SCORES[name])()
        out[name] = sum(counts)
    return out


def bench_long(
    folder: Path,
    vocab: int,
    shapes: WorkloadSizes,
    *,
    repeats: int,
    compiled: Compilations,
    peak: Peak,
    names: Iterable[str] = tuple(SCORES),
) -> dict[str, Any]:
    """Measure executed FLOPs, seconds and memory of every form in turn, with ratios to the plain form, run by run."""
    ours = Ours(folder, shapes, draw_tokens(vocab, shapes, seed=0))
    flops = score_flops(ours, names)
    scores, args = plain(ours)
    works: dict[str, Callable[[], Any]] = {PLAIN: lambda: jax.block_until_ready(scores(*args))}
    works |= {name: ours.importance(watch=unchanged, **SCORES[name]) for name in names}
    result = measure(works, repeats=repeats, compiled=compiled, warm_up=1)
    s = shapes
    return {
        "workload": "W5",
        "what": f"{s.credit_rows} x ({s.prompt_tokens}+{s.reasoning}+{s.cue}+{s.answer})",
        "rows": [
            result[name].summary()
            | {
                "name": name,
                "executed_flops": flops[name],
                "flops_of_plain": flops[name] / flops[PLAIN],
                "plain_over_this": spread([a / b for a, b in zip(result[PLAIN].seconds, result[name].seconds)]),
                "gflops_per_second": flops[name] / 1e9 / spread(result[name].seconds)["median"],
                "share_of_peak": spread([peak.share(flops[name], seconds) for seconds in result[name].seconds]),
            }
            for name in works
        ],
    }


def table(result: dict[str, Any]) -> Table:
    """Tabulate FLOPs, seconds and the two ratios to the plain form."""
    out = Table(title=f"W5 scores over long reasoning, {result['what']}", title_justify="left")
    out.add_column("method", no_wrap=True)
    for heading in ("GFLOP", "of plain", "s", "of peak", "plain / this", "programs", "peak MiB"):
        out.add_column(heading, justify="right")
    for r in result["rows"]:
        speed = r["plain_over_this"]
        out.add_row(
            r["name"],
            f"{r['executed_flops'] / 1e9:,.1f}",
            f"{r['flops_of_plain']:.3f}",
            f"{r['seconds']['median']:.2f}",
            share_text(r["share_of_peak"]),
            f"{speed['median']:.2f} ({speed['min']:.2f}-{speed['max']:.2f})",
            str(r["compilations"]),
            f"{r['peak_rss_mb']:,.0f}",
        )
    return out
