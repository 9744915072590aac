"""Keep batches with values that are not finite below the run's folder, for replays. safetensors, never pickle.

    bad_batches/iteration-000012.safetensors         one minibatch, with a JSON header in the file's metadata
    bad_batches/params-iteration-000011.safetensors  the params after 11 updates, for all their batches
    bad_batches/sft-000003.safetensors               a step of the warm start; its params are params-sft-...

Only the first host should write.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from oarjax.credit.record import MEASURES
from oarjax.errors import UserError
from oarjax.storage.durable import check_guards
from oarjax.system.json import to_json
from oarjax.types import AnswerSpan, Evidence, Hints, Params, Privileged, Rollout, Scores, TokenValues

FORMAT = 3
FOLDER = "bad_batches"
METADATA = "oarjax"
"""Key of the header in the safetensors metadata."""


class BadBatchError(UserError, ValueError):
    """Raised when a file cannot be replayed; names the reason and the remedy."""


@dataclass(frozen=True)
class Header:
    """The identity of a kept batch, and its quantities that were not finite."""

    kind: str  # iteration, or sft for a step of the warm start
    number: int  # of the iteration or step, from 1
    minibatch: int
    step: int  # optimizer updates of the params
    wrong: dict[str, list[str]]  # phase -> quantities that were not finite, in the order of discovery
    probe: str  # mode of the outcome probe
    key: list[int]  # the run's root random key
    key_impl: str
    config: dict[str, Any]
    config_file: str
    policy: str  # HF folder of architecture and tokenizer
    compute_dtype: str
    platform: str
    versions: dict[str, str]
    params: str | None  # file beside this file; None: too large to keep
    format: int = FORMAT


def write_bad_batch(folder: Path, header: Header, evidence: Evidence, *, keep: int) -> Path:
    """Write a batch atomically; an earlier batch of the same iteration is replaced.

    Keep this batch and the newest others, ``keep`` in all, and the params that they need.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    path = folder / f"{header.kind}-{header.number:06d}.safetensors"
    _write(path, _flat(evidence), {METADATA: to_json(asdict(header))})
    _prune(path, keep=keep)
    return path


def write_params(folder: Path, params: Params, *, kind: str, step: int) -> str:
    """Write the params after ``step`` optimizer steps of a kind of training, and return the file's name.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    path = folder / f"params-{kind}-{step:06d}.safetensors"
    _write(path, _flat(params), None)
    return path.name


def read_bad_batch(path: Path) -> tuple[Header, Evidence]:
    """Read a batch as numpy arrays.

    Raises:
        BadBatchError: the file is missing, not safetensors, or not a batch of a run.
    """
    arrays, metadata = _read(path)
    if METADATA not in metadata:
        raise BadBatchError(
            f"{path} is a safetensors file, but not a batch that a run kept; pass RUN_FOLDER/{FOLDER}/iteration-..."
        )
    try:
        header = json.loads(metadata[METADATA])
        if isinstance(header, dict) and header.get("format") != FORMAT:
            wrote = dict(header.get("versions", {})).get("oarjax", "unknown")
            raise BadBatchError(
                f"{path} has format {header.get('format')!r:.40}, expected {FORMAT}; replay it with the version that "
                f"wrote it (oarjax {wrote})"
            )
        checked = Header(**header)
        _check_header(checked)
        _check_arrays(arrays)
    except BadBatchError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadBatchError(f"{path} is not as a run writes it ({error}); it cannot be replayed") from None
    return checked, _evidence(_nested(arrays))


def read_params(path: Path) -> Params:
    """Read params as nested dicts of numpy arrays.

    Raises:
        BadBatchError: no such file, no safetensors, or a name that is also the beginning of another.
    """
    try:
        return _nested(_read(path)[0])
    except (TypeError, AttributeError, IndexError):
        raise BadBatchError(f"{path}: its names form no tree; it cannot be replayed") from None


def _check_header(header: Header) -> None:
    """Raise TypeError for a field that is of another kind than a run writes."""
    texts = (header.kind, header.probe, header.key_impl, header.config_file, header.policy, header.compute_dtype)
    kinds = {str: (*texts, header.platform), int: (header.number, header.minibatch, header.step, *header.key)}
    kinds |= {dict: (header.wrong, header.config, header.versions), list: tuple(header.wrong.values())}
    kinds |= {str | None: (header.params,)}
    for kind, values in kinds.items():
        odd = next((value for value in values if not isinstance(value, kind)), None)
        if odd is not None:
            raise TypeError(f"its header holds {odd!r:.60} where a {getattr(kind, '__name__', kind)} is expected")
    if header.kind not in ("iteration", "sft") or header.compute_dtype not in ("float32", "bfloat16"):
        raise TypeError(f"its header is of a {header.kind!r:.40} in {header.compute_dtype!r:.40}")
    if header.params is not None and Path(header.params).name != header.params:
        raise TypeError(f"its header names {header.params!r:.60}, which is not beside it")


_ROLLOUT = {"tokens": "iMbN", "valid": "bMbN", "completion": "bMbT", "behaviour_logps": "fMbT"}
_ROLLOUT |= {"filtered_logps": "fMbT", "ended": "bMb"}
_OPTIONAL = {"rollout.experts": "iMbNLk", "span.units": "iMbT", "probed.1.units": "iMbt"}
_OPTIONAL |= {"probed.1.outcome": "bMbt", "rollout.teacher_logps": "fMbT"}
_SPAN = {"reasoning": "bMbT", "answer": "bMbT", "has_answer": "bMb"}
_SCORES = dict.fromkeys(("old_logps", "ref_logps", "importance", *(f"measured.{name}" for name in MEASURES)), "fMbT")
_SCORES |= {"measured.hidden": "fMbTD", "values.ids": "iMbTC", "values.values": "fMbTC", "values.listed": "bMbTC"}
_HINTS = {"marks": "fMbT", "turns": "iMbT", "teacher.tokens": "iMbS", "teacher.valid": "bMbS"}
_SHAPES = {
    **{f"rollout.{name}": shape for name, shape in _ROLLOUT.items()},
    **{f"span.{name}": shape for name, shape in _SPAN.items()},
    **{f"scores.{name}": shape for name, shape in _SCORES.items()},
    **{f"hints.{name}": shape for name, shape in _HINTS.items()},
    **{f"probed.0.{name}": shape.replace("N", "n").replace("T", "t") for name, shape in _ROLLOUT.items()},
    **{f"probed.1.{name}": shape.replace("T", "t") for name, shape in _SPAN.items()},
    **{"numbers": "iMb", "used": "i", "advantages": "fMb", "completion": "bMbT", "weights": "fMbT", "denominator": "f"},
    **{"scale": "fMb", "late": "fMb", "scores.outcome": "fMb"},
    **_OPTIONAL,
}
"""Arrays of a file: the kind of their numbers, and a letter for each axis."""


def _check_arrays(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError for arrays that are missing, unknown, or do not fit together."""
    expected = {"numbers", "used"} | {name for name in _SHAPES if name.startswith(("rollout.", "span."))}
    if any(name.startswith("probed.") for name in arrays):
        expected |= {name for name in _SHAPES if name.startswith("probed.")}
    expected -= set(_OPTIONAL)
    if odd := sorted((expected - set(arrays)) | (set(arrays) - set(_SHAPES))):
        raise ValueError(f"it has other arrays: {', '.join(odd[:3])}")
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        kind, *axes = _SHAPES[name]
        fits = (kind in "if" and array.dtype.kind in {"i": "iu", "f": "fV"}[kind]) or array.dtype.kind == kind
        if not fits or len(axes) != array.ndim or any(sizes.setdefault(a, n) != n for a, n in zip(axes, array.shape)):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, which does not fit the others")
    if not 0 <= int(arrays["used"]) <= sizes["M"] or sizes["T"] > sizes["N"] or min(sizes.values()) < 1:
        raise ValueError(f"its sizes do not fit each other: {sizes}")


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    if not path.is_file():
        kept = next((p for p in (path / FOLDER, path) if p.is_dir()), path.parent)  # of a run, or that folder itself
        files = sorted(kept.glob("*-*.safetensors")) if kept.is_dir() else []
        names = [p.name for p in files if _place(p)]
        hint = f"{kept} has {', '.join(names)}" if names else f"a run keeps its bad batches in RUN_FOLDER/{FOLDER}"
        raise BadBatchError(f"{path}: {'a folder, not a bad batch' if path.is_dir() else 'no such file'}; {hint}")
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, TypeError, ValueError, KeyError, AttributeError) as error:  # or a dtype without a name
        raise BadBatchError(f"{path} is not a whole safetensors file ({error}); it cannot be replayed") from error


def _write(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None) -> None:
    check_guards(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    try:
        save_file(dict(arrays), fresh, metadata=metadata)
        fresh.replace(path)
    except SafetensorError as error:  # the writer's error on a full disk
        raise OSError(errno.ENOSPC, str(error), str(path)) from error
    finally:
        fresh.unlink(missing_ok=True)


def _place(path: Path) -> tuple[bool, int] | None:
    """Return a batch's place in its run by its name, warm start first; None for another file."""
    match = re.fullmatch(r"(iteration|sft)-(\d+)\.safetensors", path.name)
    return (match[1] == "iteration", int(match[2])) if match else None


def _prune(newest: Path, *, keep: int) -> None:
    """Remove all batches but ``newest`` (of any number: the run may have gone back) and the last others."""
    batches = [p for p in newest.parent.iterdir() if _place(p) and p != newest]
    batches.sort(key=lambda p: _place(p) or (False, 0), reverse=True)
    for batch in batches[keep - 1 :]:
        batch.unlink()
    params_files = set()
    for path in (newest, *batches[: keep - 1]):
        try:
            with safe_open(path, framework="numpy") as file:
                params_files.add(json.loads((file.metadata() or {})[METADATA])["params"])
        except (SafetensorError, KeyError, ValueError):  # damaged: it needs nothing
            continue
    for path in newest.parent.glob("params-*-*.safetensors"):
        if path.name not in params_files:
            path.unlink()


# Trees as flat names ----------------------------------------------------------------------------------------------


def _flat(tree: Any, name: str = "") -> dict[str, np.ndarray]:
    """Return arrays of nested dicts, dataclasses and tuples by dotted names; None is left out."""
    if tree is None:
        return {}
    if is_dataclass(tree):
        parts = {field.name: vars(tree)[field.name] for field in fields(tree)}
    elif isinstance(tree, Mapping):
        parts = tree
    elif isinstance(tree, tuple):
        parts = {str(i): part for i, part in enumerate(tree)}
    else:
        return {name: np.array(tree, order="C")}
    flat: dict[str, np.ndarray] = {}
    for key, part in parts.items():
        flat |= _flat(part, f"{name}.{key}" if name else str(key))
    return flat


def _nested(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *parents, leaf = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = array
    return tree


def _evidence(tree: dict[str, Any]) -> Evidence:
    def build(kind: Any, part: Mapping[str, Any] | None) -> Any:
        return None if part is None else kind(**{field.name: part.get(field.name) for field in fields(kind)})

    pair = tree.get("probed")
    hints = tree.get("hints")
    if hints is not None:
        hints = build(Hints, hints | {"teacher": build(Privileged, hints.get("teacher"))})
    scores = tree.get("scores")
    if scores is not None:
        scores = build(Scores, scores | {"values": build(TokenValues, scores.get("values"))})
    parts = {
        "hints": hints,
        "rollout": build(Rollout, tree.get("rollout")),
        "span": build(AnswerSpan, tree.get("span")),
        "scores": scores,
        "probed": None if pair is None else (build(Rollout, pair["0"]), build(AnswerSpan, pair["1"])),
    }
    return build(Evidence, tree | parts)
