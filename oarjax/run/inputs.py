"""Collect a run's inputs, record them in its inputs.json and compare them when it resumes."""

from __future__ import annotations

from pathlib import Path

from oarjax.data.hf import commit_of
from oarjax.data.streams import Encoded
from oarjax.grading.grader import local_digests
from oarjax.run.run import Run
from oarjax.run.teacher import read_teacher
from oarjax.sources.files import recorded_files
from oarjax.storage.folder import Differences
from oarjax.storage.inputs import (
    Stat,
    add_inputs,
    check_files,
    digests,
    machine_inputs,
    policy_files,
    read_inputs,
    record_inputs,
    rows_digest,
)
from oarjax.storage.trust import code_digests, code_places
from oarjax.system.devices import pin_cpu_threads


def check_inputs(run: Run, folder: Path | None = None) -> Differences:
    """Record the run's inputs in its folder, or compare them once it has progress; call with the lock held.

    Args:
        folder: of the run, if it differs from that of the start, as in a study.

    Raises:
        ConfigError: the inputs belong to another run; names those that differ.
        DamagedError, StorageError: inputs.json or a file of the policy cannot be read.
    """
    folder = folder or run.folder
    recorded = read_inputs(folder)
    inputs, files = _inputs(run, recorded.files if recorded else {})
    return record_inputs(folder, inputs, files)


def _inputs(run: Run, recorded: dict[str, Stat]) -> tuple[dict[str, str], dict[str, Stat]]:
    inputs = machine_inputs(cpu=run.mesh.devices.flat[0].platform == "cpu")
    rows = {"data.train": run.train, "data.eval": run.held_out, "sft.data": run.pairs}
    inputs |= {f"rows/{name}": _digest(encoded) for name, encoded in rows.items() if encoded is not None}
    inputs |= {f"code/{code}": digest for code, digest in code_digests(code_places(run.cfg)).items()}
    names = [reward.name for reward in run.cfg.grading.rewards]
    inputs |= {f"code/reward {name}": digest for name, digest in local_digests(names).items()}
    paths = {}
    if run.cfg.rollout.recorded:
        rollouts = recorded_files(run.cfg.rollout.recorded, run=run.folder)
        paths |= {f"rows/rollout.from/{number}": path for number, path in enumerate(rollouts)}
    if run.cfg.lora.start is not None:
        adapters = Path(run.cfg.lora.start).expanduser()
        paths |= {f"policy/lora.start/{path.name}": path for path in policy_files(adapters)}
    teacher = read_teacher(run.cfg.loss.teacher, run.cfg.policy, run.mesh)
    if teacher is not None:
        paths |= {f"policy/loss.teacher/{path.name}": path for path in policy_files(teacher.source)}
    commit = commit_of(run.source)
    if commit is not None:  # a commit's name is a digest of its files
        inputs["policy/commit"] = commit
    else:
        paths |= {f"policy/{path.name}": path for path in policy_files(run.source)}
    policy, files = digests(paths, recorded)
    return inputs | policy, files


def _digest(encoded: Encoded) -> str:
    """Digest the rows, with the columns that rewards see."""
    return rows_digest((p.index, p.prompt, p.answer, p.columns, *p.chat) for p in encoded.problems)


def seal_start(folder: Path, warm: Path) -> None:
    """Record the files of the warm start's policy, or compare them with the record.

    Raises:
        DamagedError: a file differs; names the first.
    """
    files = {f"start/{path.name}": path for path in policy_files(warm)}
    recorded = read_inputs(folder)
    if recorded is not None and any(name.startswith("start/") for name in recorded.inputs):
        check_files(folder, files)
    else:
        add_inputs(folder, digests(files)[0])


def pin_threads(folder: Path) -> None:
    """Set XLA's number of CPU threads to that of the run's start, whatever cores this process may use.

    Call it before touching a device.
    """
    recorded = read_inputs(folder)
    threads = recorded.inputs.get("device/cpu_threads", "") if recorded else ""
    if threads.isdecimal() and int(threads) > 0:
        pin_cpu_threads(int(threads))
