"""Mask the secrets of this process's environment in what a run prints and records. Imports no jax."""

from __future__ import annotations

import json
import os

SHORTEST = 12
"""Values below this length are masked nowhere but in the judge's own errors: they may be words of a text."""

NAMES = ("_KEY", "_TOKEN", "_SECRET")
HIDDEN = "***"

_named: set[str] = set()


def mark_secret(variable: str) -> None:
    """Mask the value of an environment variable, whatever its name."""
    _named.add(variable)


def masked(text: str) -> str:
    """Replace the values of secret environment variables in a text.

    These are the variables whose names end in _KEY, _TOKEN or _SECRET and those passed to ``mark_secret``, if their
    values have at least 12 characters.
    """
    values = {value for name, value in os.environ.items() if name in _named or name.upper().endswith(NAMES)}
    return hide(text, {value.strip() for value in values if len(value.strip()) >= SHORTEST})


def hide(text: str, values: set[str]) -> str:
    """Replace values in a text, also where they are escaped as in Python's or JSON's strings."""
    forms = values | {repr(value)[1:-1] for value in values} | {json.dumps(value)[1:-1] for value in values}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text
