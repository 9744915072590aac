"""Rewards that show the grader's settings: which process answers, how long, how much memory it takes."""

import os
import time

from oarjax.grading.rewards import Sample, reward


@reward("field_pid")
def pid(sample: Sample) -> float:
    time.sleep(0.2)
    return float(os.getpid())


@reward("field_slow")
def slow(sample: Sample) -> float:
    time.sleep(0.6 if sample.completion.endswith("0") else 0.0)
    return 1.0


@reward("field_large")
def large(sample: Sample) -> float:
    if sample.completion.endswith("0"):
        held = b"x" * 600_000_000
        time.sleep(0.5)
        return float(len(held) > 0)
    return 1.0
