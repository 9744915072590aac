"""Bound what drawing on some chips while the others learn can bring: ``rollout.devices``. Arithmetic alone.

With half of the chips each half takes twice as long, and nothing is won, but for one thing: a decode step reads the
policy's weights whatever the number of rows. On fewer chips that part of drawing does not grow, because each of them
has more rows. So a lag pays where decoding waits for weights: for long completions of few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oarjax.costs import Number
from oarjax.tools.plan.needs import WRITE_RATE


class Overlap(NamedTuple):
    """The best division of a slice, and what it brings."""

    chips: int  # that draw
    gain: float  # seconds of a step in turn, over those with the lag
    transfer: float  # seconds in which every drawing chip gets its part of the weights


def overlap(
    *,
    weights: Number,
    rows: Number,
    products: Number,
    learning: Number,
    chips: int,
    tensor: int,
    sent: Number,
    link: Number,
    drawing: int | None = None,
) -> Overlap | None:
    """Find the number of drawing chips with the shortest step; None if the slice cannot be divided, or not so.

    Both parts are taken to scale with their chips, but for ``weights``, and the transfer to be hidden: a bound.

    Args:
        weights: seconds in which decoding reads the policy's weights, on any number of chips.
        rows: its other seconds, on all chips.
        products: its seconds in matrix products, behind which reading is, on all chips.
        learning: seconds of the step's other phases, on all chips.
        tensor: chips that share one copy of the policy while sampling.
        sent: bytes of the weights on a drawing chip.
        link: bytes per second of a chip's link, of which two are used.
        drawing: the only number considered; None: all.
    """
    in_turn = weights + rows + learning
    sizes = [n for n in range(tensor, chips, tensor) if drawing is None or n == drawing]
    if not sizes or in_turn <= 0:
        return None

    def step(drawing: int) -> float:
        return max(weights + rows * chips / drawing, products * chips / drawing, learning * chips / (chips - drawing))

    best = min(sizes, key=step)
    return Overlap(best, float(in_turn / step(best)), float(sent / (2 * link)))


def overlap_of(
    plan: Mapping[str, Any], times: Mapping[str, int], weights: Number, *, tensor: int, drawing: int | None = None
) -> dict[str, Any] | None:
    """Return the overlap of a complete plan, under its distribution of lengths if it has one.

    Args:
        times: how often an iteration runs each phase.
        weights: bytes of the policy's weights that a chip reads in all steps of the longest completions.
        drawing: see ``overlap``.
    """
    completion, chip, lengths = plan["shapes"]["completion"], plan["chip"], plan.get("lengths")
    phases = [p for p in plan["phases"] if p["method"] is None]
    seconds, steps = {p["name"]: times[p["name"]] * p["seconds_in_turn"] for p in phases}, float(completion)
    if lengths is not None:
        seconds, steps = lengths["seconds"], lengths["decode_steps"]
    sampling = seconds["sample"]
    reading = min(weights / chip["bandwidth"] * steps / completion, sampling)
    products = next(p["seconds"]["products"] for p in phases if p["name"] == "sample")
    shares = {"weights": reading, "rows": sampling - reading, "learning": sum(seconds.values()) - sampling}
    shares["products"] = products * (1 if lengths is None else lengths["mean"] / completion)
    sizes = {"chips": plan["chips"], "tensor": tensor, "drawing": drawing}
    best = overlap(**shares, **sizes, sent=weights / completion, link=chip["link"])
    write_seconds = plan["needs"]["weights"] / WRITE_RATE
    return None if best is None else best._asdict() | {"written": write_seconds, "set": drawing is not None}


def describe_overlap(lag: Mapping[str, Any] | None, *, chips: int, hosts: int) -> str:
    """Say what a lag can bring, and what the weights' way to those who draw takes."""
    if lag is None:
        return "update.lag: this slice cannot be divided so into chips that draw and chips that learn."
    faster = f"makes steps at most {lag['gain']:.2f} times as fast"
    if lag["gain"] <= 1:
        faster = "makes steps no faster" + ("" if lag["set"] else ", however the chips are divided")
    overlaps = ""
    if lag["set"]:
        overlaps = (
            "Phases are planned as if all chips drew and learned in turn; those that learn hold more alone: plan them "
            "with rollout.devices=null on a slice of their number."
        )
    if hosts > 1:
        overlaps = f"oarjax overlaps in one process alone: on these {hosts} hosts a lag brings nothing."
    return (
        f"update.lag: drawing on {lag['chips']} of {chips} chips while the others learn {faster}; the weights reach "
        f"them in {lag['transfer']:.2g} s over a slice's links, or are written for an engine in "
        f"{lag['written']:.0f} s by one host, both at the least. {overlaps}".strip()
    )
