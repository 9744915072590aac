"""A mesh that the devices cannot fill is refused before anything is read."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_mesh_that_does_not_fit_is_refused(tmp_path):
    command = [sys.executable, "-m", "oarjax.cli", "train", str(ROOT / "configs/demo.yaml"), "mesh.tensor=3"]
    done = subprocess.run(
        [*command, f"run_dir={tmp_path}"],
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "does not multiply to the 1 devices here" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
