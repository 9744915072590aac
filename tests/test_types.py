"""Type checkers see every public name, and the README's code, outside the checkout: in the wheel and editable."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_package import build, install

import oarjax

pytestmark = pytest.mark.slow

SETTINGS = {
    "typeCheckingMode": "strict",
    "reportUnknownMemberType": False,  # jax.numpy's own signatures are partially unknown
}

USE = """
from pathlib import Path
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import oarjax

scores, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
cfg = oarjax.load_config("demo")
assert_type(cfg, oarjax.Config)
assert_type(cfg.rollout.group_size, int)
assert_type(oarjax.train(cfg), Path)
assert_type(oarjax.open_run(cfg), oarjax.Run)
assert_type(oarjax.open_run(cfg).policy, oarjax.Policy)
assert_type(oarjax.read_config("folder"), tuple[oarjax.QwenConfig, Path])
assert_type(oarjax.outcome_probe("last", temperature=1.0), oarjax.Probe)
assert_type(oarjax.gate(scores, mask, rule="level", tau=scores[0, 0]), jax.Array)
assert_type(oarjax.aggregate(scores, mask, mode="dapo", max_length=3), oarjax.Mean)
assert_type(oarjax.aggregate(scores, mask, mode="dapo", max_length=3).value, jax.Array)
assert_type(oarjax.find_answers(np.ones((1, 2)), np.ones((1, 2)), [b"a"], style="hash").answer, jax.Array)


def weights(tau: jax.Array) -> jax.Array:
    return oarjax.oar_weights(scores, mask, tau=tau)


assert_type(jax.vmap(weights)(scores[0]), jax.Array)


@oarjax.reward("short")
def short(sample: oarjax.Sample) -> float:
    return float(sample.tokens < 9)


assert_type(short(oarjax.Sample("", "", "")), float)
"""

MISTAKES = """
import jax.numpy as jnp
import oarjax

scores, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
oarjax.oar_weights(scores, mask, rule="quantil")
oarjax.oar_weights(scores, mask, levels="none")
oarjax.oar_weights(scores, mask, mass="both")
oarjax.oar_weights(scores, mask, signs="abs")
oarjax.oar_weights(scores, mask, tua=0.4)
oarjax.oar_weights(scores, mask, tau="0.4")
oarjax.oar_weights([[0.1]], mask)
oarjax.outcome_probe("mean", temperature=1.0)
oarjax.load_config("demo").rollout.groups
oarjax.grop_loss
"""


@pytest.fixture(scope="module", params=["wheel", "editable"])
def diagnostics(request, tmp_path_factory):
    """Return pyright's findings by file name, as (severity, line, message), in a folder without the checkout."""
    folder = tmp_path_factory.mktemp(request.param)
    what = (str(build("wheel", ROOT, folder)),) if request.param == "wheel" else ("--editable", str(ROOT))
    python = install(folder / "venv", *what)
    user = folder / "user"
    user.mkdir()
    user.joinpath("pyrightconfig.json").write_text(json.dumps(SETTINGS))
    user.joinpath("names.py").write_text(
        "\n".join(["import oarjax", *(f"reveal_type(oarjax.{n})" for n in oarjax.__all__)])
    )
    user.joinpath("use.py").write_text(USE)
    user.joinpath("mistakes.py").write_text(MISTAKES)
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)):
        user.joinpath(f"readme_{number}.py").write_text(snippet)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), "--project", "."]
    done = subprocess.run(command, cwd=user, capture_output=True, text=True, timeout=300, check=False)
    found = {path.name: [] for path in user.glob("*.py")}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        line = each["range"]["start"]["line"]
        found[each["file"].rsplit("/", 1)[-1]].append((each["severity"], line, each["message"]))
    return found


def test_every_public_name_has_a_type(diagnostics):
    types = dict(re.findall(r'Type of "oarjax\.(\w+)" is "(.*)"', "\n".join(m for *_, m in diagnostics["names.py"])))
    assert set(types) == set(oarjax.__all__)
    assert {name for name, kind in types.items() if kind == "Any" or "Unknown" in kind} == {"Params"}  # opaque
    assert [message for severity, _, message in diagnostics["names.py"] if severity == "error"] == []


def test_the_readme_and_a_use_of_the_names_are_clean(diagnostics):
    assert len(diagnostics) == 6  # three of the README
    assert {name: rows for name, rows in diagnostics.items() if rows and name.startswith(("readme", "use"))} == {}


def test_a_mistake_is_an_error(diagnostics):
    wrong = {line for severity, line, _ in diagnostics["mistakes.py"] if severity == "error"}
    assert wrong == {n for n, line in enumerate(MISTAKES.splitlines()) if line.startswith("oarjax.")}
