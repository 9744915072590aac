"""Compare measured values with bounds. Plain values, no device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

State = Literal["ok", "slow", "failed", "not applicable", "measured"]
SLOW = 0.6
"""A speed between this share of its bound and the bound is slow, not failed: worth a look, and no reason to stop."""

Number = float | int
Value = Number | str | bool | None


class Check(NamedTuple):
    """One line of a stage: a value and its verdict."""

    name: str
    state: State
    value: Value = None
    unit: str = ""
    bound: Number | None = None
    ratio: float | None = None  # value / bound
    note: str = ""


def at_least(name: str, value: Number, bound: Number, *, unit: str = "", note: str = "") -> Check:
    """Fail below the bound; a value that is not finite fails too."""
    return _compared(name, value, bound, "ok" if value >= bound else "failed", unit, note)


def at_most(name: str, value: Number, bound: Number, *, unit: str = "", note: str = "") -> Check:
    """Fail above the bound; a value that is not finite fails too."""
    return _compared(name, value, bound, "ok" if value <= bound else "failed", unit, note)


def fast(name: str, value: Number, bound: Number, *, unit: str = "", note: str = "") -> Check:
    """Compare a speed: slow below the bound, failed below the share ``SLOW`` of it."""
    state: State = "ok" if value >= bound else "slow" if value >= SLOW * bound else "failed"
    return _compared(name, value, bound, state, unit, note)


def quick(name: str, value: Number, bound: Number, *, unit: str = "", note: str = "") -> Check:
    """Compare a time: slow above the bound, failed above the bound divided by ``SLOW``."""
    state: State = "ok" if value <= bound else "slow" if value <= bound / SLOW else "failed"
    return _compared(name, value, bound, state, unit, note)


def holds(name: str, condition: bool, *, value: Value = None, note: str = "") -> Check:
    """Fail unless the condition holds."""
    return Check(name, "ok" if condition else "failed", bool(condition) if value is None else value, note=note)


def measured(name: str, value: Value, *, unit: str = "", note: str = "") -> Check:
    """Record a value that has no bound."""
    return Check(name, "measured", value, unit, note=note)


def not_applicable(name: str, reason: str, *, value: Value = None, unit: str = "") -> Check:
    """Record that a bound does not hold on this platform, and why."""
    return Check(name, "not applicable", value, unit, note=reason)


def _compared(name: str, value: Number, bound: Number, state: State, unit: str, note: str) -> Check:
    ratio = value / bound if bound else None
    return Check(name, state if math.isfinite(value) else "failed", value, unit, bound, ratio, note)


def cells(check: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return a check as text: name, state, value, bound, note."""
    unit = f" {check['unit']}" if check["unit"] else ""
    bound = "" if check["bound"] is None else f"{check['bound']:.4g}"
    return check["name"], check["state"], f"{_text(check['value'])}{unit}", bound, check["note"]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
