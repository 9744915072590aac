"""A plan as a table: in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from oarjax.costs import Number
from oarjax.system.chips import GIB
from oarjax.tools.plan.cycles import cycles_table
from oarjax.tools.plan.needs import NOTICE, WRITE_RATE
from oarjax.tools.plan.overlap import describe_overlap
from oarjax.tools.plan.public import before_table, public_table, served_line
from oarjax.tools.plan.roofline import Reached
from oarjax.tools.plan.starting import starting_table

WORD = (
    "The compiler's word: whether a program fits, its HBM, and the optimized program that executed FLOPs and bytes are "
    "counted in. Our arithmetic: what lies beside it, the counting (matrix products times trips of their loops, "
    "kernels by formula), and all times, from peak rates: no hardware reaches them. Nothing here was measured on a TPU."
)


BEFORE = (
    "Commit fe2bcd7 to the programs of the commits above, both by assumed shares of the peaks and nothing overlapped, "
    "as they were planned then. Shares of HBM's rate are of the bytes that sampling must read, and of all that scores "
    "and update move. Some of the difference is counting: then a token read a full cache, a mixture's chip every "
    "expert, and slices that are read ahead counted whole. The last two columns are by the compiler's cycles, of which "
    "the tables below take the larger time, counted alike on both sides: that commit's programs were compiled anew for "
    "some of the configs (`python docs/make_before.py`)."
)
"""What a table beside an earlier version's plans compares."""

OLDER = (
    "This table is older than the others: of scores and update in two passes, without the optimizer's own program and "
    "expected seconds."
)

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def columns_of(plan: dict[str, Any]) -> list[str]:
    """Return a column for each phase, and for the step if everything fits."""
    names = [p["name"] if p["method"] is None else f"{p['name']}, {p['method']}" for p in plan["phases"]]
    return [*names, "whole step"] if plan["step"] else names


def rows_of(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the stated quantities, each with its value in every column."""
    columns = [*plan["phases"], *([plan["step"]] if plan["step"] else [])]
    chips = plan["chips"]

    def row(name: str, value: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
        return (name, *(value(c) for c in columns))

    def gib(number: Number | None) -> str:
        return "?" if number is None else f"{number / GIB:.2f}"

    def hbm(part: str) -> Callable[[dict[str, Any]], str]:
        return lambda c: gib(c["hbm"][part]) if part in c["hbm"] else ""

    def cell(field: str, value: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
        return lambda c: value(c[field]) if c.get(field) is not None else ""

    def percent(share: float) -> str:
        return f"{share:.1%}" if share else ""

    estimates = [
        row("GiB of HBM in products", cell("moved", gib)),
        row("GiB of HBM in other passes and copies", cell("passed", gib)),
        row("seconds by assumed shares of the peaks", cell("seconds_assumed", lambda n: f"{n:.2f}")),
        row("seconds by the compiler's cycles", cell("seconds_compiler", lambda n: f"{n:.2f}")),
        row("seconds expected, the larger of both", cell("seconds_expected", lambda n: f"{n:.2f}")),
        row("model-FLOPs utilisation, expected", cell("utilisation_expected", percent)),
        row("share of HBM's rate for bytes that must be read, expected", cell("hbm_expected", percent)),
    ]
    if not any("seconds_expected" in c for c in columns):  # of an older plan
        estimates = []
    kinds = [kind for kind in KINDS if any(c.get("sent", {}).get(kind) for c in columns)]
    return [
        row("fits", lambda c: "yes" if c.get("fits", True) else "NO"),
        row("HBM of the program, GiB per chip", hbm("program")),
        row("beside it, GiB per chip", hbm("beside")),
        row(f"together, of {gib(plan['chip']['memory'])}", hbm("total")),
        row("executed TFLOP per chip", cell("executed", lambda n: f"{n / 1e12:,.1f}")),
        row("of them in kernels", cell("kernels", lambda n: f"{n / 1e12:,.1f}" if n else "")),
        row("model TFLOP per chip", cell("model", lambda n: f"{n / chips / 1e12:,.1f}" if n else "")),
        row("model's share of executed", cell("share", percent)),
        *(row(f"{kind}, GiB sent per chip", cell("sent", lambda s, k=kind: gib(s.get(k, 0)))) for kind in kinds),
        row("seconds at least, nothing overlapped", cell("seconds_in_turn", lambda n: f"{n:.2f}")),
        row("seconds at least, all overlapped", cell("seconds_together", lambda n: f"{n:.2f}")),
        *estimates,
        row("model-FLOPs utilisation, nothing overlapped", cell("utilisation_in_turn", percent)),
        row("model-FLOPs utilisation, all overlapped", cell("utilisation_together", percent)),
        row("compiled in, CPU seconds", cell("compile_cpu_seconds", lambda n: f"{n:.0f}")),
    ]


def terminal(plan: dict[str, Any]) -> Table:
    """Build the table for the terminal."""
    table = Table("", *columns_of(plan), title=title(plan), title_justify="left")
    for row in rows_of(plan):
        table.add_row(*row, style="bold red" if "NO" in row[1:] else None)
    return table


def title(plan: dict[str, Any]) -> str:
    """Title a plan: run and slice."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1) or "one chip"
    return (
        f"{plan['config']}: {plan['policy']}, {plan['parameters'] / 1e9:.2f}B parameters, on {plan['topology']} "
        f"({plan['product']}, {plan['chips']} x {plan['chip']['name']}), mesh {mesh}"
    )


def headline(plan: dict[str, Any]) -> str:
    """Summarise a plan for the header of its config."""
    peak, capacity = plan["step"]["hbm"]["total"] / GIB, plan["chip"]["memory"] / GIB
    update = [p for p in plan["phases"] if p["name"] in ("update", "fused", "apply") and p["method"] is None]
    subject = "scores and update take" if any(p["name"] == "fused" for p in update) else "an update takes"
    plain, overlapped = (sum(p[f"seconds_{kind}"] for p in update) for kind in ("in_turn", "together"))
    flops = sum(p["model"] for p in update) / (plan["chips"] * plan["chip"]["flops"])
    return (
        f"Planned by the TPU's compiler (docs/plans.md): at most {peak:.2f} of {capacity:.2f} GiB of HBM "
        f"per chip; {subject} {plain:.1f} s with nothing overlapped and {overlapped:.1f} s with all, "
        f"at {flops / plain:.0%} and {flops / overlapped:.0%} model-FLOPs utilisation: bounds from peak rates."
    )


def describe(plan: dict[str, Any]) -> list[str]:
    """Write the lines below a table: shapes, peaks, resident memory, and how the count compares with the formula."""
    s, chip = plan["shapes"], plan["chip"]
    lines = [
        f"{s['prompts']} prompts x {s['rows'] // s['prompts']} rollouts of {s['prompt']} + {s['completion']} tokens; "
        f"an update is {s['microbatches']} microbatches of {s['microbatch']} rows; remat {plan['remat']}, attention "
        f"{plan['attention']}, credit {plan['credit']}.",
        *([describe_prompts(plan)] if "prompts" in plan else []),
        *([describe_again(plan["again"])] if plan.get("again") else []),
        f"Peaks of a chip: {chip['flops'] / 1e12:g} TFLOP/s, {chip['bandwidth'] / 1e9:g} GB/s of HBM, "
        f"{chip['link'] / 1e9:g} GB/s per link and direction; a collective is a ring that uses two links.",
        "On each chip: " + ", ".join(f"{n} {b / GIB:.2f} GiB" for n, b in plan["resident"].items() if b) + ".",
    ]
    for name, field in (("update", "expected"), ("fused", "expected_fused")):
        if plan.get(field) is not None:
            phase = next(p for p in plan["phases"] if p["name"] == name and p["method"] is None)
            lines.append(
                f"Executed FLOPs of the phase {name} over the analytic count for remat {plan['remat']}: "
                f"{phase['executed'] * plan['chips'] / plan[field]:.4f}."
            )
    if any("seconds_expected" in p for p in plan["phases"]):
        lines.append(assumptions())
    elif any("seconds_in_turn" in p for p in plan["phases"]):
        lines.append(OLDER)
    if plan.get("needs") is not None:
        lines.append(describe_needs(plan["needs"], plan))
    if plan.get("lengths") is not None:
        lines.append(describe_expected(plan["lengths"], plan))
    if "lag" in plan:
        lines.append(describe_overlap(plan["lag"], chips=plan["chips"], hosts=plan["needs"]["hosts"]))
    return lines + plan["notes"]


def describe_prompts(plan: dict[str, Any]) -> str:
    """Say what the size of groups saves: a prompt is computed and cached once for all of its group."""
    costs, size = plan["prompts"], plan["shapes"]["rows"] // plan["shapes"]["prompts"]
    group, single = (
        f"{costs[name]['flops']:.1%} of a step's model FLOPs and {costs[name]['bytes'] / GIB:.2f} GiB of keys, values"
        for name in ("group", "single")
    )
    return f"Prompts, once per group of {size}: {group}" + ("." if size == 1 else f"; with groups of 1: {single}.")


def describe_again(costs: Mapping[str, Any]) -> str:
    """Say what it costs that rows are computed again before every turn but the first."""
    return (
        f"Episodes of {costs['turns']:.0f} turns, all equally long: before each but the first every row is computed "
        f"again, {costs['positions']:,.0f} positions an iteration and {costs['flops']:.0%} of sampling's FLOPs, which "
        "model FLOPs leave out."
    )


def assumptions() -> str:
    """State what expected seconds rest on."""
    r = Reached()
    return (
        f"Expected seconds are the larger of two estimates. One assumes {r.products:.0%} of the peak in matrix "
        f"products, {r.kernels:.0%} in kernels, "
        f"{r.memory:.0%} of HBM's and {r.links:.0%} of the links' rate, {r.hop * 1e6:g} microsecond per link that a "
        "collective's farthest message passes, one ring or line per collective as the slice has it (full tori only "
        "where the vendor says so), and nothing overlapped but the reading of products' operands. The other has the "
        "compiler's own cycles for all but kernels and collectives."
    )


def describe_needs(needs: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Describe what a run needs besides HBM, in one line."""
    duration = ""
    if needs["hours"] is not None:
        duration = (
            f"{needs['iterations']} iterations in {needs['hours']:.1f} hours expected, {needs['chip_hours']:,.0f} "
            "chip-hours, without evaluations, compilation and restarts; "
        )
    longest = max((p["seconds_expected"] for p in plan["phases"] if p.get("seconds_expected")), default=None)
    notice = ""
    if longest is not None:
        total = longest + needs["saving"]
        fits = total <= NOTICE
        verdict = f"{'within' if fits else 'more than'} a notice of {NOTICE:.0f} s"
        verdict += "" if fits else ", which with checkpoint.every=1 costs one finished iteration at most"
        notice = (
            f" At {WRITE_RATE / 1e6:g} MB/s per host a checkpoint takes {needs['saving']:.0f} s, with the longest "
            f"phase before it {total:.0f} s: {verdict}."
        )
    return (
        f"{duration}disk of each of {needs['hosts']} hosts {(needs['disk'] + needs['weights']) / 1e9:.0f} GB, "
        f"{needs['weights'] / 1e9:.0f} GB of it the policy's files; bucket {needs['bucket'] / 1e9:.0f} GB, "
        f"{needs['checkpoint'] / 1e9:.0f} GB per checkpoint.{notice}"
    )


def needs_table(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate what the runs need, one line each; tpu/create.sh reads the columns of GB."""
    lines = [
        "| config | chips | seconds per iteration, at least | expected | chip-hours | GB of weights per host | GB of "
        "disk per host beside them | GB of bucket |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for plan in plans:
        needs, step = plan["needs"], plan["step"] or {}
        minimum, expected = step.get("seconds_together"), step.get("seconds_expected")
        seconds = ["" if s is None else f"{s:.1f}" for s in (minimum, expected)]
        bound = step.get("seconds_in_turn", 0) * needs["iterations"] * plan["chips"] / 3600
        chip_hours = needs["chip_hours"] or bound
        hours = f"{chip_hours:,.0f}" if chip_hours >= 10 else f"{chip_hours:.1f}" if chip_hours else ""
        hours = hours if needs["chip_hours"] or not hours else f"above {hours}"
        sizes = [f"{needs[part] / 1e9:.0f}" for part in ("weights", "disk", "bucket")]
        cells = [plan["config"], f"{plan['chips']} {plan['chip']['name']}", *seconds, hours, *sizes]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def describe_expected(step: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Describe the step under the expected lengths beside the planned one, in one line."""
    total, worst = sum(step["seconds"].values()), plan["step"]["seconds_in_turn"]
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in step["seconds"].items())
    return (
        f"Expected with completions of {step['mean']:,.0f} tokens on average: {step['decode_steps']:,.0f} decode steps "
        f"with {step['rows_in_use']:,.0f} rows on average ({step['occupancy']:.0%} of them draw a token), "
        f"{step['padding_share']:.0%} padding in score and update ({step['padding_share_unsorted']:.0%} at most), "
        f"{total:.1f} s a step instead of {worst:.1f} s with nothing overlapped ({phases})."
    )


def commits_table(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate the commit whose programs each phase of a config is of."""
    said = (
        "A phase is of the programs of the commit named; when this page was written, a run had the same, by their text"
    )
    if any(phase.get("changed") for plan in plans for phase in plan["phases"]):
        said += ", but for those marked *changed*: the code that they come from has been written anew since"
    lines = [
        f"{said}.",
        "",
        "| config | phases and commits |",
        "|---|---|",
    ]
    for plan in plans:
        by_commit: dict[str, list[str]] = {}
        for p in plan["phases"]:
            by_commit.setdefault(f"{p.get('commit')}{', changed' if p.get('changed') else ''}", []).append(p["name"])
        cells = [f"{', '.join(phases)}: {commit}" for commit, phases in by_commit.items()]
        lines.append(f"| {plan['config']} | {'; '.join(cells)} |")
    return lines


def markdown(
    plans: Sequence[dict[str, Any]],
    *,
    numbers: Path | None = None,
    command: str | None = None,
    served: Mapping[str, Any] | None = None,
    before: Mapping[str, Any] | None = None,
) -> str:
    """Write the page of all plans; ``numbers`` is the file that holds them as JSON, ``command`` what wrote it.

    ``served`` is a plan of what an engine was measured at, see ``served_line``, ``before`` an earlier version's plans.
    """
    versions = plans[0]["versions"]
    option = "" if numbers is None else f" --json {numbers}"
    command = command or f"oarjax plan --write docs/plans.md{option} " + " ".join(p["config"] for p in plans)
    lines = [
        "# Plans of the shipped configurations",
        "",
        f"Written by `{command}`; jax {versions['jax']}, libtpu {versions['libtpu']}. **Not measured on a TPU.**",
        "",
        WORD,
        "",
        "Sampling is planned at its longest: every completion goes to max_new, and a token reads as many slots of the "
        "cache as the sampler's window has then. Score, update (the sum of the "
        "gradients), fused (both in one pass, `update.fused`) and apply (the optimizer) are for one minibatch with "
        "every row in use, times the minibatches and epochs of a step in the column *whole step*.",
    ]
    if all(plan.get("needs") is not None for plan in plans):
        lines += ["", "## What the runs need", "", *needs_table(plans)]
    lines += ["", "## Whose programs", "", *commits_table(plans)]
    lines += ["", "## Until the first iteration", "", *starting_table(plans)]
    lines += ["", "## Beside public figures", "", *public_table(plans)]
    lines += [] if served is None else ["", served_line(served)]
    if before is not None:
        lines += ["", "## Beside an earlier version", "", BEFORE, "", *before_table(plans, before)]
    if cycles := cycles_table(plans):
        lines += ["", "## Where an update's time goes", "", *cycles]
    for plan in plans:
        lines += ["", f"## {plan['config']}", "", f"{title(plan)}.", ""]
        names = columns_of(plan)
        lines += ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
        lines += ["| " + " | ".join(row) + " |" for row in rows_of(plan)]
        lines += ["", *(f"- {line}" for line in describe(plan))]
    return "\n".join(lines) + "\n"
