"""A small result of the credit lab, for tests of its tables and pages."""

import math

from oarjax.stats import Interval
from oarjax.tools.lab.results import LabCompletion, LabResult, MethodResult

EVEN, ONES = {"uniform (GRPO)": [0.0] * 4}, {"uniform (GRPO)": [1.0] * 4}


def figures(mean=0.5, **changes):
    named = dict.fromkeys(("spearman", "recall_exact", "recall_direct", "recall_total", "recall_known"), mean)
    named |= dict.fromkeys(("auc_exact", "auc_direct", "auc_total", "auc_known", "ess", "top_mass", "repeat"), mean)
    named |= {"forwards": 12.0, "seconds": 0.0123} | changes
    return {name: Interval(m, m - 0.1, m + 0.1, 100) for name, m in named.items()}


def completion(**changes):
    fields = {
        "prompt": "1+2=",
        "answer": "3",
        "reference": "3",
        "reward": 1.0,
        "tokens": ["1", "=3\n", "#### ", "3"],
        "is_reasoning": [True, True, False, False],
        "is_answer": [False, False, False, True],
        "direct": [False, True, False, False],
        "total": [True, True, False, False],
        "known": [False, True, False, False],
        "wrong": [],
        "scores": {"OAR-P": [0.125, 2.5, 0.0, 0.0], "OAR-G, 16 draws": [0.0, 0.25, 0.0, 0.0]} | EVEN,
        "weights": {"OAR-P": [0.1, 1.9, 1.0, 1.0], "OAR-G, 16 draws": [3.0, 1.0, 1.0, 1.0]} | ONES,
    }
    return LabCompletion(**(fields | changes))


def result(**changes):
    fields = {
        "title": "runs/demo/export",
        "facts": {"device": "cpu"},
        "share": 0.1,
        "interval": "percentile bootstrap over 100 problems",
        "oracles": {"direct": Interval(0.0861, 0.08, 0.0922, 100)},
        "best": {"recall_direct": Interval(0.97, 0.96, 0.98, 100)},
        "methods": [
            MethodResult("OAR-P", {"method": "oar_p"}, figures(1.0, spearman=-0.25)),
            MethodResult("OAR-G, 16 draws", {"method": "oar_g", "draws": 16}, figures(recall_total=math.nan)),
            MethodResult("uniform (GRPO)", {"method": "uniform"}, figures(forwards=0.0, seconds=0.0)),
        ],
        "completions": [completion()],
    }
    return LabResult(**(fields | changes))
