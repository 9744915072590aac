"""A user's rewards that misbehave on command; loaded by path in tests of the grader."""

import json
import os
import struct
import sys
import time
from pathlib import Path

from oarjax.grading.rewards import Sample, reward

hoard = []


def forge(text: str) -> None:
    """Send the parent what looks like a reply, through whatever sockets there are."""
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("!i", len(text)) + text.encode())
        except OSError:
            continue


def daemon(path: str) -> None:
    """Leave a process behind that has no parent, group or session in common with this one."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(path).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not Path(path).exists() or not Path(path).read_text():
        time.sleep(0.01)


@reward("hostile")
def hostile(sample: Sample) -> float:
    word, _, rest = sample.completion.partition(" ")
    if word == "sleep":
        time.sleep(600)
    elif word == "nap":
        time.sleep(1.0)
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
    elif word == "quit":
        sys.exit(3)
    elif word == "fork":
        os.fork()  # and both return
    elif word == "forge":
        forge(json.dumps({"number": 0, "values": [9.0, 9.0, 9.0], "verdict": "graded", "extracted": None, "note": ""}))
    elif word == "daemon":
        daemon(rest)
        time.sleep(600)
    elif word == "child_hog":
        if os.fork() == 0:
            hog = bytearray(b"x") * 400_000_000
            time.sleep(600)
        time.sleep(600)
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
