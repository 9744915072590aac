"""Print constraints for pip that pin what oarjax needs to its lower bounds: what pyproject.toml promises is tested.

python .ci/lowest.py > lowest.txt; pip install -c lowest.txt '.[log]'
"""

import re
import sys
import tomllib
from pathlib import Path


def lowest(text: str) -> list[str]:
    """Return ``name==bound`` for each dependency and those of the extra log.

    Raises:
        ValueError: one has no lower bound, or more than that.
    """
    project = tomllib.loads(text)["project"]
    pins = []
    for need in [*project["dependencies"], *project["optional-dependencies"]["log"]]:
        match = re.fullmatch(r"([\w.-]+)>=([\w.]+)", need)
        if match is None:
            raise ValueError(f"{need}: expected name>=version")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


if __name__ == "__main__":
    sys.stdout.write("\n".join(lowest((Path(__file__).parents[1] / "pyproject.toml").read_text())) + "\n")
