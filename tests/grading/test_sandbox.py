"""The sandbox of the reward ``code``: attacks from inside, limits, and what the reward makes of a completion.

Nothing here is skipped: a machine whose kernel cannot lock a program up fails.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tiny import config

from oarjax.errors import ConfigError
from oarjax.grading import sandbox
from oarjax.grading.code import code_passes, last_block
from oarjax.grading.rewards import Sample, Unparseable
from oarjax.grading.sandbox import IsolationError, prove_isolation, run_program
from oarjax.run.checks import check_grading


def test_the_attacks_of_the_proof_fail_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OARJAX_PROOF", "secret")
    canary = tmp_path / "canary"
    canary.write_text("secret")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        facts = {"port": listener.getsockname()[1], "canary": str(canary), "parent": os.getpid()}
        ran = run_program(f"FACTS = {facts!r}\n{sandbox.ATTACKS}", seconds=30.0)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert json.loads(ran.output) == {"tried": 43, "breaches": []}, ran
    assert (canary.read_text(), list(tmp_path.iterdir())) == ("secret", [canary])
    assert canary.stat().st_mode & 0o777 != 0
    prove_isolation()


def test_the_attacks_get_through_where_nothing_is_locked(tmp_path):
    """The proof can fail: outside a sandbox its attacks succeed."""
    canary = tmp_path / "canary"
    canary.write_text("secret")
    harmless = {
        "TCP",
        "reading a file outside",
        "listing a folder outside",
        "fork",
        "a command",
        "an environment variable",
    }
    some = f"ATTEMPTS = {{name: attempt for name, attempt in ATTEMPTS.items() if name in {harmless!r}}}"
    program = sandbox.ATTACKS.replace("breaches = []", f"{some}\nbreaches = []")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        facts = {"port": listener.getsockname()[1], "canary": str(canary), "parent": os.getpid()}
        out = subprocess.run(
            [sys.executable, "-c", f"FACTS = {facts!r}\n{program}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=os.environ | {"OARJAX_PROOF": "secret"},
        )
    assert set(json.loads(out.stdout)["breaches"]) == harmless


THREADS = "import threading, time\nfor n in range(10**6): threading.Thread(target=time.sleep, args=(9,)).start()"
MANY_FILES = "for n in range(300): open(str(n), 'w').close()"
LARGE_FILES = "for n in range(5): open(str(n), 'wb').write(b'x' * 600_000)"
UNLINKED = """
import os
for n in range(5):
    file = open('f', 'wb')
    os.unlink('f')
    file.write(b'x' * 600_000)
    globals()[f'held{n}'] = file
"""
DEEP = "import os\nfor n in range(1500):\n    os.mkdir('d' * 100)\n    os.chdir('d' * 100)"
FULL = "No space left on device"


@pytest.mark.parametrize(
    ("program", "limits", "stopped", "says"),
    [
        ("while True: pass", {"seconds": 0.7}, "more than 0.7 s", ""),
        ("x = [0] * 10**9", {"memory_mb": 256}, "", "MemoryError"),
        ("open('f', 'wb').write(b'x' * 10**8)", {"disk_mb": 1}, "", "File too large"),
        (MANY_FILES, {}, "", FULL),
        (LARGE_FILES, {"disk_mb": 1}, "", FULL),
        (UNLINKED, {"disk_mb": 1}, "", FULL),
        (DEEP, {}, "", FULL),
        (THREADS, {"seconds": 3.0}, "more than 3 s", "can't start new thread"),
        ("print('x' * 10**8)", {"disk_mb": 1}, "", ""),
    ],
)
def test_limits(program, limits, stopped, says, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = run_program(program, **limits)
    assert not ran.passed
    assert stopped in ran.stopped
    assert bool(ran.stopped) == bool(stopped)
    assert says in ran.errors
    assert len(ran.output) <= sandbox.MAX_OUTPUT
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_mounted_no_file_is_created(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("UNSHARE, MOUNT", "MOUNT, UNSHARE"))
    monkeypatch.setattr(sandbox, "CHILD", child)
    for program in ("open('f', 'w')", "import os\nos.mkdir('d')"):
        assert "Permission denied" in run_program(program).errors
    assert run_program("import os\nprint(os.listdir())").output == "[]\n"
    prove_isolation.__wrapped__()


def test_nothing_is_left_behind():
    before = set(Path("/tmp").glob("oarjax-sandbox-*"))
    ran = run_program("open('f', 'w').write('x'); print(open('f').read(), input())", stdin="7\n8\n")
    assert (ran.passed, ran.output) == (True, "x 7\n")
    assert set(Path("/tmp").glob("oarjax-sandbox-*")) <= before


def test_a_program_ends_with_the_process_that_started_it():
    start = "from oarjax.grading.sandbox import run_program\nrun_program('while True: pass', seconds=60.0)"
    trainer = subprocess.Popen([sys.executable, "-c", start])
    children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children")
    end = time.monotonic() + 60
    while not (program := children.read_text().split()) and time.monotonic() < end:
        time.sleep(0.05)
    status = Path(f"/proc/{program[0]}/status")
    while "Seccomp:\t2" not in status.read_text() and time.monotonic() < end:  # until the program itself runs
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert time.monotonic() < end


def test_a_machine_without_the_locks_runs_nothing(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(IsolationError, match="only on Linux with x86-64"):
        run_program("print(1)")
    monkeypatch.undo()
    ran = "import os; os._exit(97)"
    assert run_program(ran).code == 97  # a program cannot claim that the lock failed
    monkeypatch.setattr(
        sandbox, "run_program", lambda *_, **__: sandbox.ProgramResult(0, '{"tried": 40, "breaches": ["TCP"]}', "", "")
    )
    with pytest.raises(IsolationError, match="does not hold: TCP"):
        prove_isolation.__wrapped__()
    monkeypatch.setattr(sandbox, "run_program", lambda *_, **__: sandbox.ProgramResult(1, "", "Traceback", ""))
    with pytest.raises(IsolationError, match=r"the proof did not end \(exit code 1, Traceback\)"):
        prove_isolation.__wrapped__()


def test_a_run_is_refused_where_isolation_is_not_proved(monkeypatch):
    cfg = config(grading__rewards=[{"name": "code"}])
    check_grading(cfg)
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    prove_isolation.cache_clear()
    with pytest.raises(ConfigError, match=r"grading\.rewards: code: programs are run only on Linux with x86-64"):
        check_grading(cfg)


# --- The reward -----------------------------------------------------------------------------------------------------

DOUBLES = [{"input": "2", "output": "4"}, {"input": "5\n", "output": "10 \n\n"}]
ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def value(completion, tests):
    return code_passes(Sample(prompt="", completion=completion, answer="", columns={"tests": tests}))


@pytest.mark.parametrize(
    ("completion", "tests", "expected"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.0),
        (ADD.replace("a + b", "a - b"), "assert add(1, 2) == 3", 0.0),
        ("```python\nimport sys\nsys.exit(0)\n```", "assert False", 0.0),  # an early exit is no pass
        ("```python\nimport os\nprint('tests passed')\nos._exit(0)\n```", "assert False", 0.0),
        ("```python\nimport builtins\nbuiltins.compile = lambda *a: ''\n```", "assert False", 0.0),
        (
            "```\nprint(int(input()) * 2)\n```",
            [{"input": "2", "output": "4"}, {"input": "5\n", "output": "10 \n\n"}],
            1.0,
        ),
        ("```py\nprint(4)\n```", [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}], 0.0),
        (f"```python\n{DEEP}\n```", "assert True", 0.0),  # its files, not this machine, are the failure
        (
            ADD.replace("def", "try:\n    open('f', 'wb').write(bytes(10**8))\nexcept OSError:\n    pass\n\n\ndef"),
            "assert add(1, 2) == 3",
            1.0,
        ),
        ("```python\nprint(1)\n```\nNo:\n```python\nprint(2)\n```", [{"input": "", "output": "2"}], 1.0),  # the last
    ],
)
def test_programs_are_judged_by_their_tests(completion, tests, expected):
    assert value(completion, tests) == expected


FRAMES = "import sys\nsys._getframe(1).f_globals['_exec'] = lambda *a: None\ndef add(a, b):\n    return 0"
ALWAYS_EQUAL = "class Equal(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n"
CROSSINGS = [  # program, tests, whether they pass
    (FRAMES, "assert add(1, 2) == 3", False),
    (ALWAYS_EQUAL + "def add(a, b):\n    return Equal(0)", "assert add(1, 2) == 3", False),
    (ALWAYS_EQUAL.replace("(int)", "") + "def add(a, b):\n    return Equal()", "assert add(1, 2) == 3", False),
    ("abs = lambda x: 0\ndef f(x):\n    return 9", "assert abs(f(2) - 4) < 1e-6", False),
    ("import gc\nfor x in gc.get_objects(): isinstance(x, dict) and x.get('done') and print(x)", "assert f()", False),
    ("class math:\n    isclose = staticmethod(lambda *a: True)", "assert math.isclose(1, 2)", False),
    ("import sys\nsys.modules['math'].isclose = lambda *a: True\nimport math", "assert math.isclose(1, 2)", False),
    ("def f(x):\n    raise SystemExit(0)", "assert f(1) == 1", False),
    ("def f(x):\n    raise StopIteration", "assert all(map(f, [2, 3]))", False),
    ("def f(x):\n    return lambda: 1", "assert f(1)", False),
    ("def f(x):\n    x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]", True),
    ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]", True),
    ("def f(x):\n    return {(1, 'a'): [x, None, 1.5, b'x', 2j, {3}, frozenset([True])]}",
     "v = f(10**30)\nassert v == {(1, 'a'): [10**30, None, 1.5, b'x', 2j, {3}, frozenset([True])]}\n"
     "types = [int, type(None), float, bytes, complex, set, frozenset]\nassert [type(i) for i in v[1, 'a']] == types",
     True),
    ("from collections import Counter as C\ndef f(x):\n    return C(x)", "assert type(f('aab')) is dict", True),
    ("def f(x):\n    raise ValueError('no')",
     "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert False", True),
    ("def f(a, *, b=2):\n    return a + b", "def check(candidate):\n    assert candidate(1, b=3) == 4\ncheck(f)", True),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests", "passes"), CROSSINGS)
def test_only_plain_data_crosses_between_program_and_tests(program, tests, passes):
    assert value(f"```python\n{program}\n```", tests) == float(passes)


def test_tests_that_pass_functions_are_ungraded():
    with pytest.raises(Unparseable, match=r"the reference .*a function does not cross"):
        value("```python\ndef f(g):\n    return g(1)\n```", "assert f(lambda x: x) == 1")


@pytest.mark.parametrize("tests", [None, "", [], [3], [{"input": "1"}], {"assert": 1}])
def test_rows_without_tests_are_ungraded(tests):
    with pytest.raises(Unparseable, match="the reference"):
        value(ADD, tests)


def test_a_completion_without_a_block_is_unparseable():
    with pytest.raises(Unparseable, match="the answer"):
        value("def add(a, b): return a + b", "assert True")
    assert last_block("```json\n{}\n```") is None
    assert last_block("```python\n" * 100_000) is None
