"""Pack ``configs/`` into the wheel as ``oarjax/configs``; refuse to build a package without configs.

An editable install packs none: it reads those of the checkout, so that an edited one takes effect.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedConfigs(BuildHookInterface):
    """Runs before every build of an sdist, a wheel or an editable wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the configs to a wheel's files.

        Raises:
            RuntimeError: the folder ``configs`` holds none.
        """
        files = sorted(Path(self.root, "configs").glob("*.yaml"))
        if not files:
            raise RuntimeError(f"configs: expected YAML files in {self.root}/configs, got none; build from a checkout")
        if self.target_name == "wheel" and version != "editable":
            build_data["force_include"] |= {str(file): f"oarjax/configs/{file.name}" for file in files}
