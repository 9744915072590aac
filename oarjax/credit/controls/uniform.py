"""Plain GRPO: every token has the advantage of its row."""

from __future__ import annotations

from oarjax.credit.method import CreditMethod

METHOD = CreditMethod(name="uniform")
