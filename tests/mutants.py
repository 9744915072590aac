"""Change one text at a time in the equations, the gate, the sampler and the loop; each change must fail a named test.

    python tests/mutants.py               run all mutants, one per core at a time
    python tests/mutants.py gate.py 12    run those of files whose path contains gate.py, and number 12

mutants.txt lists them by function (or method, or constant): a text that occurs in it exactly once, its replacement, and
the tests that must fail. First all these tests must pass on the unchanged code. Then each mutant is applied alone to a
copy of the checkout, and its tests run there. A mutant that breaks an import proves nothing and counts as an error. Not
part of CI; tests/test_mutants.py keeps the list valid: each function and test exists, each text still occurs once.

Last result, run folder by folder, 14 minutes in all on two cores that had other work:

    file                   mutants  killed
    rl/advantages.py            11      11
    rl/surrogates.py             9       9
    rl/loss.py                  22      22
    rl/off_policy.py             6       6
    rl/masked.py                10      10
    rl/optimizer.py             10      10
    credit/gate.py              19      19
    step/minibatches.py     18      18
    step/iteration.py       25      25
    step/programs.py         1       1
    step/loss.py       2       2
    rollout/sampler.py          21      21
    rollout/filters.py           5       5
    all                        159     159

Left out are changes that cannot matter: `_std` of one reward is 0 with and without its guard, at a threshold above 0
both branches of the gate give 1, and min-max makes every entry of a row with a NaN or infinite one NaN or 0, so that
`oar_weights` would find nothing above 0 in it without asking what is finite. The mean that GDPO's batch normalisation
subtracts is 0 but for rounding, since every reward is centred in its group before.
"""

import ast
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRELOADED = ["jax", "optax", "flax", "orbax.checkpoint", "transformers", "hypothesis", "jaxtyping", "beartype"]
"""Imported once; every run is a process forked from this state. None of them opens a device on import."""


class Mutant(NamedTuple):
    """A change of one text in a function, method or constant of the package, and the tests that must fail for it."""

    file: str
    function: str
    before: str
    after: str
    tests: tuple[str, ...]


def read_mutants() -> list[Mutant]:
    """Read mutants.txt: ``# file function: test file``, then per mutant ``- before``, ``+ after``, ``! test names``."""
    mutants, place, tests, before, after = [], ("", ""), "", "", ""
    for line in (ROOT / "tests" / "mutants.txt").read_text(encoding="utf-8").splitlines():
        sign, text = line[:1], line[2:]
        if sign == "#":
            functions, tests = text.split(": ")
            file, function = functions.split(" ")
            place = (file, function)
        elif sign == "-":
            before = text
        elif sign == "+":
            after = text
        elif sign == "!":
            mutants.append(Mutant(*place, before, after, tuple(f"{tests}::test_{name}" for name in text.split())))
    return mutants


def lines_of(text: str, function: str) -> tuple[str, str, str]:
    """Split a file into the lines before a function, method or constant, its own, and those after it; "" if missing."""
    nodes: list[ast.stmt] = ast.parse(text).body
    for name in function.split("."):
        found = [node for node in nodes if name in names_of(node)]
        nodes = getattr(found[0], "body", []) if found else []
    if not found:
        return text, "", ""
    lines, (first, last) = text.splitlines(keepends=True), (found[0].lineno - 1, found[0].end_lineno)
    return "".join(lines[:first]), "".join(lines[first:last]), "".join(lines[last:])


def names_of(node: ast.stmt) -> set[str]:
    """Return the names that a definition or an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def run_tests(checkout: Path, tests: list[str]) -> int:
    """Run tests of a copy of the checkout in this process, up to the first failure; return pytest's exit code."""
    import pytest

    os.chdir(checkout)
    sys.path[:0] = [str(checkout), str(checkout / "tests")]
    paths = [f"tests/{test}" for test in tests]
    with open("pytest.log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        return int(pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "", *paths]))


def outcome_of(number: int, mutant: Mutant, copies: Path) -> str:
    """Apply a mutant to a free copy of the checkout, run its tests, and restore the copy."""
    home = next(path for path in sorted(copies.iterdir()) if taken(path))
    path = home / "checkout" / "oarjax" / mutant.file
    text, times = path.read_text(encoding="utf-8"), path.stat()
    above, own, below = lines_of(text, mutant.function)
    if own.count(mutant.before) != 1:
        return f"ERROR: the text occurs {own.count(mutant.before)} times in {mutant.function}"
    path.write_text(above + own.replace(mutant.before, mutant.after) + below, encoding="utf-8")
    os.utime(path, (number, number))  # a distinct time, so that no cached bytecode of another text is used
    try:
        code = run_tests(home / "checkout", list(mutant.tests))
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        (home / "taken").rmdir()
    log = (home / "checkout" / "pytest.log").read_text()
    if code == 1 and " failed" in log and " error" not in log.splitlines()[-1]:
        return "killed"
    return "SURVIVED" if code == 0 else f"ERROR: pytest ended with {code}\n{log[-2000:]}"


def taken(home: Path) -> bool:
    """Claim a copy of the checkout; return False if another run has it."""
    try:
        (home / "taken").mkdir()
    except FileExistsError:
        return False
    return True


def copy_checkout(home: Path) -> None:
    for name in ("oarjax", "tests"):
        shutil.copytree(ROOT / name, home / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", home / "checkout")


def main(words: list[str]) -> int:
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(read_mutants(), 1)
        if not words or any(word == str(number) or (not word.isdigit() and word in mutant.file) for word in words)
    ]
    os.environ["JAX_PLATFORMS"] = "cpu"
    context, began = multiprocessing.get_context("forkserver"), time.monotonic()
    context.set_forkserver_preload(PRELOADED)
    jobs = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, context.Pool(jobs, maxtasksperchild=1) as pool:
        for job in range(jobs):
            copy_checkout(Path(folder) / str(job))
        tests = sorted({test for _, mutant in chosen for test in mutant.tests})
        first = Path(folder) / "0" / "checkout"
        if pool.apply(run_tests, (first, tests)):
            print((first / "pytest.log").read_text())
            return 1
        results = [
            (number, mutant, pool.apply_async(outcome_of, (number, mutant, Path(folder)))) for number, mutant in chosen
        ]
        outcomes = []
        for number, mutant, result in results:
            outcomes.append(result.get())
            change = f"{mutant.before}  ->  {mutant.after or 'nothing'}"
            print(f"{number:3d} {mutant.file} {mutant.function}: {change}: {outcomes[-1]}", flush=True)
    killed = outcomes.count("killed")
    print(f"{killed} of {len(chosen)} mutants killed in {time.monotonic() - began:.0f} s")
    return int(killed != len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
