"""A command outlives what it prints to."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from oarjax.report.files import make_console
console = make_console()
for n in range(3000):
    console.print("a line", n)
sys.stderr.write("alive")
"""


@pytest.mark.parametrize("how", ["| head -n 1", "> /dev/full", ">&-"])
def test_a_lost_standard_output_ends_nothing(how):
    if how == "> /dev/full" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    script = f"{sys.executable} -c '{PROGRAM}' {how}; echo ended ${{PIPESTATUS[0]}} >&2"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "aliveended 0\n"


ERROR = """
import os, sys
from oarjax.errors import UserError
from oarjax.report.files import print_error
try:
    sys.stderr.write("a warning of a library, which stays in the buffer")
    sys.stderr.flush()
except OSError:
    os._exit(print_error(UserError("shown to nobody")))
"""


def test_an_error_keeps_its_exit_code_where_standard_error_is_lost():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", ERROR], stderr=full, check=False)
    assert done.returncode == 2
