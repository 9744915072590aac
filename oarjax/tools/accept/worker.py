"""Run stages in a worker process: ``python -m oarjax.tools.accept.worker``, with a JSON object on its first input line.

Each further line names a stage; the answer is one line of JSON on the original standard output, while the output of
the stages goes to standard error. The parent kills this process if a stage hangs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from oarjax.config.inputs import DistributedConfig
from oarjax.system.devices import choose_platform, use_compilation_cache
from oarjax.system.json import to_json
from oarjax.system.processes import join_processes
from oarjax.tools.accept.setting import StageSetting, peaks_of
from oarjax.tools.accept.stages import STAGES


def prepare(job: dict[str, Any]) -> StageSetting:
    """Join the other hosts, choose the platform and describe where the stages run."""
    import jax

    join_processes(**DistributedConfig().model_dump())
    platform = choose_platform(job["device"])
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    use_compilation_cache(str(folder / "compiled"))
    bucket = None if job["bucket"] is None else Path(job["bucket"])
    return StageSetting(folder, bucket, platform, peaks_of(jax.devices()[0].device_kind))


def answer(name: str, setting: StageSetting) -> dict[str, Any]:
    """Run a stage; an exception becomes part of the answer."""
    stage = next(stage for stage in STAGES if stage.name == name)
    try:
        return {"checks": [check._asdict() for check in stage.load()(setting)], "error": None}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"checks": [], "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setting = prepare(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        print(to_json(answer(line.strip(), setting)), file=replies, flush=True)


if __name__ == "__main__":
    main()
