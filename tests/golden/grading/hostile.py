"""A user's rewards that misbehave on command; loaded by path in tests of the grader."""

import os
import sys
import time
from pathlib import Path

from oarjax.grading.rewards import Sample, reward

hoard = []


@reward("hostile")
def hostile(sample: Sample) -> float:
    word, _, rest = sample.completion.partition(" ")
    if word == "sleep":
        time.sleep(600)
    elif word == "exit":
        os._exit(7)
    elif word == "exit_once":
        mark = Path(rest)
        if not mark.exists():
            mark.touch()
            os._exit(7)
    elif word == "signal":
        Path(rest).touch()
    elif word == "await":
        while not Path(rest).exists():
            time.sleep(0.01)
    elif word == "hog":
        hog = []
        while True:
            hog.append(bytearray(b"x") * 10_000_000)
    elif word == "huge":
        bytearray(10**14)
    elif word == "hoard":
        hoard.append(bytearray(b"x") * 50_000_000)
    elif word == "recurse":
        hostile(sample)
    elif word == "raise":
        raise KeyError("no such thing")
    elif word == "nan":
        return float("nan")
    elif word == "infinite":
        return float("inf")
    elif word == "print":
        print("noise")
    return 1.0


@reward("pid")
def pid(sample: Sample) -> float:
    return float(os.getpid())


@reward("heavy_imports")
def heavy_imports(sample: Sample) -> float:
    return float(len({"jax", "flax", "torch", "transformers"} & set(sys.modules)))
