"""A plugin that watches what grading does: once a sample has been seen, files, network, processes and code of text."""

import os
import sys

from oarjax.grading.rewards import Sample, reward

seen = []
armed = False
FORBIDDEN = ("socket.", "subprocess.", "os.", "shutil.", "ctypes.", "urllib.", "http.", "ftplib.", "tempfile.", "pty.")


def watch(event, arguments):
    if not armed:
        return
    text = event in ("compile", "exec")
    if not (text or event == "open" or event.startswith(FORBIDDEN)) or event == "os.listdir":
        return
    name = arguments[-1].co_filename if event == "exec" else arguments[1] if event == "compile" else arguments[0]
    # What the guard let through is arithmetic; it reads the syntax tree of what it is given first.
    if text and str(name).startswith(("<lambdifygenerated", "<unknown>")):
        return
    frame = sys._getframe()
    while frame is not None:
        # Modules may be imported late, and one of sympy's writes code from the number of variables alone.
        if frame.f_globals.get("__name__", "").startswith(("importlib", "sympy.polys.monomials")):
            return
        frame = frame.f_back
    seen.append(f"{event} {name}")


sys.addaudithook(watch)


@reward("watched")
def watched(sample: Sample) -> float:
    """The number of events so far; the first sample of a worker starts the watch and tries it."""
    global armed
    if not armed:
        armed = True
        eval("1")
        with open(os.devnull):
            pass
        if {event.split()[0] for event in seen} != {"compile", "exec", "open"}:
            raise RuntimeError(f"the watch is blind: {seen}")
        seen.clear()
    if seen:
        found = "; ".join(seen[:5])
        seen.clear()
        raise RuntimeError(found)
    return 0.0
