"""Install oarjax over what a hosted notebook has: run by the first cell of each notebook, from the clone beside it.

Python keeps the modules that it has loaded. pip is asked to leave these as they are; where it cannot, it replaces them
and the session restarts by itself. ``EXTRAS`` and ``get_ipython`` come from the cell.
"""

import importlib
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from typing import Any

EXTRAS: str
get_ipython: Any

install = [sys.executable, "-m", "pip", "install", "--quiet", f"./repository[{EXTRAS}]"]
owners, loaded = packages_distributions(), {name.split(".")[0] for name in sys.modules}
kept = sorted({owner for name in loaded for owner in owners.get(name, ())})
with open("kept.txt", "w") as file:
    file.writelines(f"{name}=={version(name)}\n" for name in kept)
if subprocess.run([*install, "--constraint", "kept.txt"]).returncode:  # one of them has to be replaced
    subprocess.run(install, check=True)
    get_ipython().kernel.do_shutdown(restart=True)
importlib.invalidate_caches()
