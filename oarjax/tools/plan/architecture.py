"""The sizes of a checkpoint without its weights: what planning needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from oarjax.data.hf_files import CheckpointError, read_fields
from oarjax.tools.plan.published_sizes import PUBLISHED


def architecture_fields(path: str, *, revision: str | None = None) -> dict[str, Any]:
    """Read config.json of an HF folder, of a published checkpoint that is known here, or from the hub.

    Without a revision the built-in table goes before the hub, so that a plan is the same with a network and without.

    Raises:
        CheckpointError: none of these has it.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return read_fields(folder)
    if revision is None and path in PUBLISHED:
        return dict(PUBLISHED[path])
    try:
        return read_fields(Path(hf_hub_download(path, "config.json", revision=revision)).parent)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"policy.path: {path} is not a folder here, not among the checkpoints whose sizes are known offline "
            f"({', '.join(PUBLISHED)}), and the hub did not give its config.json: {error}; check name and network"
        ) from error
