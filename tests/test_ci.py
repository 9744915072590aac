"""Check .ci: no test is skipped for an unnamed reason, and the files it names exist."""

import re
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT

SKIPS = runpy.run_path(str(ROOT / ".ci" / "skips.py"))
LOWEST = runpy.run_path(str(ROOT / ".ci" / "lowest.py"))
KNOWN = "torch is not installed (extra parity)"

SUITE = f"""
import pytest

def test_passes():
    pass

@pytest.mark.parametrize("n", range(2))
def test_known(n):
    pytest.importorskip("nowhere", reason="{KNOWN}")

def test_missing_module():
    pytest.importorskip("nowhere")

@pytest.mark.skipif(True, reason="no time")
def test_marked():
    pass

@pytest.mark.xfail(reason="later")
def test_later():
    assert False
"""


def test_skips_are_counted_by_reason_in_what_pytest_writes(tmp_path, capsys):
    (tmp_path / "test_sample.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=out.xml", "test_sample.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    found = SKIPS["skips"](str(tmp_path / "out.xml"))
    assert found == {
        KNOWN: 2,
        "could not import 'nowhere': No module named 'nowhere'": 1,
        "no time": 1,
        "expected to fail: later": 1,
    }
    assert SKIPS["main"]([str(tmp_path / "out.xml")]) == 1
    assert "   1  NOT EXPECTED: no time" in capsys.readouterr().out


@pytest.mark.parametrize(("reason", "code"), [(KNOWN, 0), ("no time", 1)])
def test_only_unexpected_reasons_fail(tmp_path, capsys, reason, code):
    path = tmp_path / "out.xml"
    skipped = f'<skipped type="pytest.skip" message="{reason}"/>'
    path.write_text(f"<testsuites><testsuite><testcase>{skipped}</testcase></testsuite></testsuites>")
    assert SKIPS["main"]([str(path)]) == code
    assert "1 tests skipped" in capsys.readouterr().out


def test_no_more_than_five_reasons():
    assert len(SKIPS["EXPECTED"]) <= SKIPS["MOST_REASONS"] == 5


@pytest.mark.parametrize("name", ["newer_jax_tests", "lowest_tests"])
def test_the_files_that_run_with_other_versions_exist(name):
    function = re.search(rf"^{name}\(\).*?^}}", (ROOT / ".ci" / "run").read_text(), re.M | re.S)
    assert function is not None
    script = f"shopt -s failglob\n{function.group()}\n{name}"  # a pattern that matches nothing is an error
    files = subprocess.run(["bash", "-c", script], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert len(files) > 5
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_lower_bounds_become_pins():
    pins = LOWEST["lowest"]((ROOT / "pyproject.toml").read_text())
    assert {pin.split("==")[0] for pin in pins} >= {"jax", "transformers", "orbax-checkpoint", "matplotlib"}
    text = '[project]\ndependencies = ["jax>=0.10.0", "flax"]\n[project.optional-dependencies]\nlog = []\n'
    with pytest.raises(ValueError, match="flax: expected name>=version"):
        LOWEST["lowest"](text)
    assert LOWEST["lowest"](text.replace("flax", "flax>=0.9")) == ["jax==0.10.0", "flax==0.9"]
