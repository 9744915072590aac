"""docs/data/programs.json holds what every device program of a few configs needs: none may grow unnoticed."""

import copy
import json
import os
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT, FILE = ROOT / "docs" / "make_programs.py", ROOT / "docs" / "data" / "programs.json"


@pytest.mark.slow
def test_no_program_has_grown(monkeypatch):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), "--print"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    now = json.loads(done.stdout.splitlines()[-1])
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the script changes the environment of its process
    grown = runpy.run_path(str(SCRIPT))["grown"]
    more = grown(json.loads(FILE.read_text()), now)
    assert not more, "\n".join([*more, "where that is meant: python docs/make_programs.py, and say in the commit why"])
    # Every kind of growth is seen.
    before = copy.deepcopy(now)
    demo = before["configs"]["demo"]
    demo["programs"]["apply"]["peak"] *= 0.98
    demo["programs"]["fused"]["flops"] *= 0.99
    demo["at_most"]["decode"] -= 1
    del demo["programs"]["reshard"]
    assert [line.split()[1] for line in grown(before, now)] == ["reshard", "fused:", "apply:", "at"]
    assert len(grown(before | {"jax": "0.1.0"}, now)) == 3  # another compiler may need other memory
