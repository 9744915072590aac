"""Rewards that show the grader's settings: which process answers, how long, how much memory it takes."""

import asyncio
import os
import time

from oarjax.grading.rewards import Sample, reward

in_flight: list[Sample] = []
most: list[int] = []


@reward("field_pid")
def pid(sample: Sample) -> float:
    time.sleep(0.2)
    return float(os.getpid())


@reward("field_slow")
def slow(sample: Sample) -> float:
    time.sleep(0.6 if sample.completion.endswith("0") else 0.0)
    return 1.0


@reward("field_waiting")
async def waiting(sample: Sample) -> float:
    """The most samples in flight so far; the first one takes half a second."""
    in_flight.append(sample)
    most.append(len(in_flight))
    await asyncio.sleep(0.5 if sample.completion.endswith("0") else 0.02)
    in_flight.remove(sample)
    return float(max(most))


@reward("field_set")
def settable(sample: Sample, *, value: float = 1.0) -> float:
    return value


@reward("field_large")
def large(sample: Sample) -> float:
    if sample.completion.endswith("0"):
        held = b"x" * 600_000_000
        time.sleep(0.5)
        return float(len(held) > 0)
    return 1.0
