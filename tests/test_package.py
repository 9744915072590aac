"""The package as pip installs it: from the wheel, from the wheel of the sdist, and editable from a checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
PARTS = ("oarjax", "configs", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
SHIPPED = """import json
from oarjax.config.loading import load_config
from oarjax.config.shipped import shipped_configs
print(json.dumps([list(shipped_configs()), load_config("demo").seed]))"""

pytestmark = pytest.mark.slow


def build(target: str, source: Path, folder: Path) -> Path:
    """Build an sdist or a wheel of a source tree without a network, and return it."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


def install(folder: Path, *what: str) -> Path:
    """Install without dependencies into a new environment that sees the packages of this one; return its Python."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]  # as plain paths: their .pth files stay unread
    (packages / "outer.pth").write_text("\n".join(ours))
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command += ["--ignore-installed", *what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return python


def shipped(python: Path, folder: Path) -> tuple[list[str], int]:
    """Return the shipped names that an installation knows in an empty folder, and the demo's seed."""
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", SHIPPED]
    names, seed = json.loads(subprocess.check_output(command, cwd=folder, env=environment, timeout=120))
    return sorted(names), seed


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Return a copy of what a build reads, with a demo of its own."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def test_the_wheel_and_the_wheel_of_the_sdist_are_the_same(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheels = [build("wheel", source, tmp_path / name) for source, name in ((ROOT, "ours"), (unpacked, "theirs"))]
    contents = [{f.filename: f.CRC for f in zipfile.ZipFile(wheel).infolist()} for wheel in wheels]
    assert contents[0] == contents[1]
    assert {"oarjax/py.typed", "oarjax/report/page.html", "oarjax/grading/sandbox_child.py"} <= set(contents[0])
    assert shipped(install(tmp_path / "venv", str(wheels[1])), tmp_path / "empty")[0] == NAMES


def test_the_sdist_holds_all_that_is_committed(sdist):
    if not (ROOT / ".git").exists():  # these tests run from an sdist
        return
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked) - packed == set()


def test_an_editable_install_reads_the_checkout_and_is_a_plain_path(checkout, tmp_path):
    python = install(tmp_path / "venv", "--editable", str(checkout))
    assert shipped(python, tmp_path / "empty") == (NAMES, 0)
    demo = checkout / "configs" / "demo.yaml"
    demo.write_text(demo.read_text() + "seed: 7\n")
    assert shipped(python, tmp_path / "empty") == (NAMES, 7)
    # Type checkers read lines of .pth files that are paths; they cannot run import hooks.
    files = [path for path in python.parent.parent.glob("lib/python*/site-packages/*.pth") if path.stem != "outer"]
    assert [path.read_text().strip() for path in files] == [str(checkout)]


@pytest.mark.parametrize("target", ["sdist", "wheel"])
def test_without_configs_nothing_is_built(checkout, tmp_path, target):
    bare = shutil.copytree(checkout, tmp_path / "bare", ignore=shutil.ignore_patterns("*.yaml"))
    with pytest.raises(AssertionError, match=r"configs: expected YAML files in .*, got none"):
        build(target, bare, tmp_path / "dist")
