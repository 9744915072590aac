"""The notebooks: clean as committed, and executed from the first cell to the last with their tiny switch."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from conftest import CACHE
from nbclient import NotebookClient

import oarjax

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
ADDRESSES = runpy.run_path(str(ROOT / "docs" / "make_address.py"))


def badge(name):
    target = ADDRESSES["colab"](name, ADDRESSES["ADDRESS"])
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({target})"


def read(name):
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def code(name) -> str:
    return "\n\n".join(cell.source for cell in read(name).cells if cell.cell_type == "code")


def text(name) -> str:
    return "\n\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")


# As committed


def test_the_four_are_there():
    assert list(NOTEBOOKS) == ["colab_tpu", "compose_losses", "kaggle_lora_7b", "what_gets_credit"]


SHOWN = ("compose_losses", "what_gets_credit")
"""Notebooks that are committed with their outputs; the others need chips."""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_there_where_no_chip_is_needed(name):
    """As HTML, each with a picture beside it, and nothing of the machine; the others say that they have not run."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [bool(cell.metadata) for cell in notebook.cells] == ["find_spec(" in cell.source for cell in notebook.cells]
    if name not in SHOWN:
        assert "**Not run on a TPU yet.**" in text(name)
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
        return
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [[list(output["data"]) for output in cell.outputs] for cell in cells]
    assert all(kind in ([], [["text/html"], ["image/png"]]) for kind in kinds)
    assert all(cell.outputs for cell in cells if re.search(r"^oarjax\.show_|^curves = display", cell.source, re.M))
    page = "".join(str(output["data"]) for cell in cells for output in cell.outputs)
    assert not re.search(r"<script|/home/|/tmp/|/root/|Traceback", page)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_are_short_and_each_is_introduced(name):
    cells = read(name).cells
    assert [cell.cell_type for cell in cells] == ["markdown", "code"] * (len(cells) // 2) + ["markdown"]
    assert all(len(cell.source.splitlines()) <= 36 for cell in cells)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_only_public_names_are_used(name):
    tree = ast.parse(code(name))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "oarjax" in imports
    assert not {module for module in froms | imports if module.startswith("oarjax.")}
    assert "oarjax" not in froms
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "oarjax"}
    assert used
    assert used <= set(oarjax.__all__)
    assert not {node.attr for node in attributes if node.attr.startswith("_")}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_one_switch_at_the_top(name):
    first = next(cell.source for cell in read(name).cells if cell.cell_type == "code")
    assert 'TINY = os.environ.get("OARJAX_TINY") == "1"' in first
    assert code(name).count("OARJAX_TINY") == 1


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_and_badges_lead_somewhere(name):
    on_colab = not name.startswith("kaggle")
    assert text(name).count(badge(name)) == on_colab
    for link in re.findall(r"\]\(([^)]+)\)", text(name).replace(badge(name), "")):
        assert (NOTEBOOKS[name].parent / link).exists(), link
    for config in re.findall(r"configs/[\w.-]+\.yaml", code(name)):
        assert (ROOT / config).is_file(), config
    readme = (ROOT / "README.md").read_text()
    (row,) = [line for line in readme.splitlines() if f"(notebooks/{name}.ipynb)" in line]
    assert (badge(name) in row) == on_colab


def test_the_address_is_where_the_script_writes_it(tmp_path):
    """Another address goes to every place and away again; without one nobody is led to a repository of others."""
    made = ADDRESSES
    assert made["written"]() == made["ADDRESS"]
    for path in made["PLACES"]:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    texts = {path: (tmp_path / path).read_bytes() for path in made["PLACES"]}
    made["write"](made["ADDRESS"], tmp_path)
    assert texts == {path: (tmp_path / path).read_bytes() for path in made["PLACES"]}
    for address in ("https://github.com/someone/oarjax", "https://git.example.org/a/b"):
        made["write"](address, tmp_path)
        assert made["written"](tmp_path) == address
        assert all(address in (tmp_path / path).read_text() for path in made["PLACES"])
    assert "someone" not in "".join((tmp_path / path).read_text() for path in made["PLACES"])
    made["write"](made["ADDRESS"], tmp_path)
    assert texts == {path: (tmp_path / path).read_bytes() for path in made["PLACES"]}
    with pytest.raises(ValueError, match="expected https://HOST/OWNER/NAME"):
        made["write"]("github.com/someone/oarjax", tmp_path)


def test_badges_open_the_notebook_itself_once_it_has_an_address():
    read = ADDRESSES["rewritten"](
        "README.md", (ROOT / "README.md").read_text(), before=ADDRESSES["ADDRESS"], address="https://github.com/x/y.git"
    )
    opened = re.findall(r"colab\.research\.google\.com/github/x/y/blob/main/notebooks/(\w+)\.ipynb", read)
    assert opened == ["colab_tpu", "what_gets_credit", "compose_losses"]
    assert "git clone https://github.com/x/y.git oarjax && cd oarjax" in read


# Executed


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What the notebooks need of the repository; the first trains the tiny policy, the others find it."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in ("notebooks", "configs"):
        shutil.copytree(ROOT / part, folder / part)
    return folder


def executed(name: str, checkout: Path, questions: dict[str, str]) -> tuple[list, dict]:
    """Run a notebook in a kernel of this interpreter: its code cells with outputs, and the values of expressions."""
    notebook = nbformat.read(checkout / "notebooks" / f"{name}.ipynb", as_version=4)
    asked = ", ".join(f"{key!r}: {expression}" for key, expression in questions.items())
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{asked}}}))"))
    home = CACHE / "home"  # programs that were compiled are found again below it
    home.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OARJAX_TINY": "1", "JAX_PLATFORMS": "cpu", "HOME": str(home), "PYTHONPATH": path}
    env |= {"JUPYTER_PREFER_ENV_PATH": "1", "IPYTHONDIR": str(home / ".ipython")}
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(checkout / "notebooks")}}
    )
    client.execute(env=env)
    *cells, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    noise = [out.text for cell in cells for out in cell.outputs if out.output_type == "stream"]
    assert not noise, "notebooks print nothing"
    return cells, json.loads(last.outputs[0].text)


def html(cell) -> str:
    (out,) = [out for out in cell.outputs if "text/html" in out.get("data", {})]
    return out.data["text/html"]


def cell_with(cells, text: str):
    (found,) = [cell for cell in cells if text in cell.source]
    return found


class Pip:
    """Stands in for a fresh notebook: records what the installation runs; with ``failures`` nothing may be kept."""

    def __init__(self, failures: int):
        self.failures, self.commands, self.restarted, self.kernel = failures, [], False, self

    def run(self, command, check=False):
        self.commands.append(command[2:])
        return SimpleNamespace(returncode=int(self.failures > 0 and "--constraint" in command))

    def do_shutdown(self, restart):
        self.restarted = restart


def test_all_install_alike():
    cells = {
        c.source.replace("tpu,log,hub", "log") for name in NOTEBOOKS for c in read(name).cells if "_spec(" in c.source
    }
    assert len(cells) == 1


@pytest.mark.parametrize("failures", [0, 1])
def test_the_installation_restarts_only_where_a_loaded_package_has_to_go(failures, tmp_path, monkeypatch):
    """Of the packages that are loaded pip is told to keep the versions; where it cannot, the session starts anew."""
    cell = next(c.source for c in read("colab_tpu").cells if "find_spec(" in c.source)
    assert cell.startswith("# @title ")
    pip = Pip(failures)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repository" / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks" / "install.py", tmp_path / "repository" / "notebooks")
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", pip.run)
    exec(cell, {"os": os, "REPOSITORY": "address", "get_ipython": lambda: pip})
    clone, *installs = pip.commands
    assert clone[-2:] == ["address", "repository"]
    assert installs[0][-2:] == ["--constraint", "kept.txt"]
    assert f"pytest=={pytest.__version__}\n" in (tmp_path / "kept.txt").read_text()
    assert (len(installs), pip.restarted) == (1 + failures, failures == 1)


RECORDS = "[json.loads(line) for line in open(run / 'metrics.jsonl')]"


@pytest.mark.slow
def test_colab_tpu(checkout):
    cells, found = executed(
        "colab_tpu", checkout, {"python": "__import__('sys').executable", "records": RECORDS, "where": "os.getcwd()"}
    )
    assert found["python"] == sys.executable
    assert Path(found["where"]).resolve() == checkout.resolve()
    rewards = [record["reward"] for record in found["records"] if "reward" in record]
    assert len(rewards) == 3
    assert all(0 <= reward <= 1 for reward in rewards)
    assert any(rewards), "the warm start must leave something to learn from"
    assert [record["iteration"] for record in found["records"] if "pass_at_1" in record] == [0, 3]
    charts = html(cell_with(cells, "oarjax.train("))
    assert charts.count("<figure>") == 6
    assert 'class="c1 d0 line" d="M' in charts
    coloured = html(cell_with(cells, "show_completions"))
    assert re.search(r"background: rgb\(var\(--(boost|suppress)\) / 0\.[1-9]", coloured.split("block", 1)[1])
    saved = checkout / "saved" / "demo_tiny"
    assert (saved / "export" / "model.safetensors").is_file()
    assert (saved / "checkpoints" / "000003").is_dir()


@pytest.mark.slow
def test_kaggle_lora_7b(checkout):
    """After the Colab notebook its run is there and finished, and is shown again."""
    cells, found = executed("kaggle_lora_7b", checkout, {"records": RECORDS, "run": "str(run)"})
    assert found["run"] == "saved/demo_tiny"
    assert [record["iteration"] for record in found["records"]] == [0, 1, 2, 3]
    assert html(cell_with(cells, "oarjax.train(")).count("<figure>") == 6


@pytest.mark.slow
def test_compose_losses(checkout):
    cells, found = executed(
        "compose_losses",
        checkout,
        {
            "records": "records",
            "sharpness": "float(params['sharpness'])",
            "moved": "float(optax.tree.norm(optax.tree.sub(params['base'], opened.load())))",
            "mass": "(np.asarray(weights) * span.reasoning).sum(1).tolist()",
            "reasoning": "span.reasoning.sum(1).tolist()",
            "spread": "float(np.ptp(np.asarray(weights)[span.reasoning]))",
            "rewards": "rewards.tolist()",
        },
    )
    assert [record["iteration"] for record in found["records"]] == [1, 2, 3]
    assert all(math.isfinite(value) for record in found["records"] for value in record.values())
    assert len(set(found["rewards"])) > 2  # lengths differ, and so do rewards
    assert found["sharpness"] != 1, "the own policy's parameter is learned"
    assert 0 < found["moved"] < 1
    assert found["mass"] == pytest.approx(found["reasoning"], rel=1e-4)  # GRPO's total
    assert found["spread"] > 0.5
    curves = html(cell_with(cells, "records.append"))
    assert "composed here" in curves
    assert curves.count("<figure>") == 3
    tokens = html(cell_with(cells, "show_tokens"))
    assert all(f"<b>{name}</b>" in tokens for name in ("smooth", "the paper&#39;s gate", "GRPO"))


@pytest.mark.slow
def test_what_gets_credit(checkout):
    figures = "{m.name: {k: v.mean for k, v in m.figures.items()} for m in result.methods}"
    weights = "[{name: list(w) for name, w in c.weights.items()} for c in result.completions]"
    scores = "[list(c.scores['OAR-P']) for c in result.completions]"
    cells, found = executed("what_gets_credit", checkout, {"figures": figures, "weights": weights, "scores": scores})
    measured = found["figures"]
    assert list(measured) == ["OAR-P", "OAR-F", "OAR-G", "OAR-P permuted", "random", "uniform (GRPO)"]
    # Exact OAR-P ranks as itself, and what is made of it to find its top finds more of it than the controls do.
    assert measured["OAR-P"]["spearman"] == pytest.approx(1)
    assert measured["OAR-P"]["recall_exact"] == pytest.approx(1)
    for control in ("OAR-P permuted", "random", "uniform (GRPO)"):
        assert measured[control]["recall_exact"] < 0.9
    assert measured["uniform (GRPO)"]["ess"] == pytest.approx(1)
    assert measured["OAR-P"]["forwards"] > measured["OAR-G"]["forwards"] > 1 > measured["random"]["forwards"]
    assert all(math.isfinite(score) and score >= 0 for row in found["scores"] for score in row)
    for completion in found["weights"]:
        assert set(completion["uniform (GRPO)"]) == {1.0}
        assert sorted(completion["OAR-P permuted"]) == pytest.approx(sorted(completion["OAR-P"]), rel=1e-3)
        assert len(set(completion["OAR-P"])) > 2
    assert html(cell_with(cells, "show_credit(")).count("<b>OAR-P permuted</b>") == 2
    assert "data:image/png;base64,iVBOR" in html(cell_with(cells, "show_lab_figure("))
    assert "best possible" in html(cell_with(cells, "show_lab(result"))
    assert (checkout / "runs" / "demo_tiny-credit" / "credit.json").is_file()
