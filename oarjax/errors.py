"""Base class of errors that a user can fix: a command prints them as a message instead of a traceback."""

from __future__ import annotations


class UserError(Exception):
    """One sentence with the field or file, what was expected, what came, and the remedy."""

    exit_code = 2
    """Exit code of a command that fails with it: 2 = fix something first, 75 = the same command may work later."""

    everywhere = False
    """True if every process of a run raises it at once: then none of them takes another for lost."""


class ConfigError(UserError, ValueError):
    """Raised for a config that cannot run; the message lists every bad field with its path and the remedy."""
