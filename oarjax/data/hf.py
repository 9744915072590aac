"""Load params from a Hugging Face folder or hub name, and export params to a folder. Never opens a pickle."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.sharding import Sharding
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from oarjax.data.hf_files import (
    INDEX,
    SINGLE,
    SUMS,
    CheckpointError,
    as_stored,
    check_files,
    check_headers,
    check_weights,
    kept_tensors,
    open_tensors,
    read_architecture,
    read_fields,
    tensor_files,
)
from oarjax.data.hub_name import is_hub_name, near_folder
from oarjax.models.qwen_config import QwenConfig, exported_as
from oarjax.models.weights import Weight, build_tree, init_params, lookup, weight_table
from oarjax.storage.durable import cannot_write, sync_files, sync_folder
from oarjax.system.processes import is_first, to_host, wait_for_all
from oarjax.types import Params

COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
COPIED += ("chat_template*",)
SHARD_BYTES = 5 * 10**9
MAPPED = 64 * 2**20  # bytes of a file mapped at a time, approximately


def read_config(path: str | Path, *, revision: str | None = None) -> tuple[QwenConfig, Path]:
    """Return the architecture and the local folder of a checkpoint; a hub name is downloaded.

    config.json is read first, so that an unsupported model is rejected before any weight is fetched or read; then the
    headers of the weights. All files of a download are from one commit, even if the revision is a moving branch.

    Args:
        path: local folder, or name on the Hugging Face hub.
        revision: branch, tag or commit on the hub; default None, its main branch.

    Raises:
        CheckpointError: there is no such folder, hub name or config.json, or the weights do not match it.
        UnsupportedModel: see QwenConfig.from_hf.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        cfg = read_architecture(folder)
    else:
        name = _hub_name(path, "policy", example="Qwen/Qwen2.5-0.5B")
        with _hub_errors("policy", path, revision):
            commit = Path(hf_hub_download(name, "config.json", revision=revision)).parent  # .../snapshots/<commit>
            cfg = read_architecture(commit)
            patterns = ["*.safetensors", "config.json", INDEX, SUMS, *COPIED]
            folder = Path(snapshot_download(name, revision=commit.name, allow_patterns=patterns))
    cfg = as_stored(folder, cfg)
    check_weights(folder, cfg)
    check_files(folder, tokenizer_files(folder))
    return cfg, folder


def commit_of(folder: Path) -> str | None:
    """Return the hub commit of a downloaded folder; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def read_tokenizer_folder(path: str | Path, *, revision: str | None = None) -> Path:
    """Return the local folder of a tokenizer; for a hub name only the tokenizer's files are downloaded.

    Raises:
        CheckpointError: there is no such folder or hub name.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    name = _hub_name(path, "tokenizer", example="Qwen/Qwen2.5-0.5B")
    with _hub_errors("tokenizer", path, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(COPIED)))


def _hub_name(path: str | Path, kind: str, *, example: str) -> str:
    name = str(path)
    if not is_hub_name(name):
        raise CheckpointError(
            f"{kind} {name}: no such folder{near_folder(path)}; set an HF folder or a hub name such as {example}"
        )
    return name


@contextmanager
def _hub_errors(kind: str, path: str | Path, revision: str | None) -> Iterator[None]:
    """Turn the hub's many errors into a CheckpointError with the remedy."""
    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{kind} {path}: no such local folder{near_folder(path)}, and the hub did not provide it "
            f"(revision {revision or 'main'}): {error}; check the name, the network and your access"
        ) from error


def tokenizer_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint's tokenizer and generation config.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}; make it readable") from error
    return [file for file in files if any(fnmatch(file.name, pattern) for pattern in COPIED)]


def load_params(folder: Path, cfg: QwenConfig, *, dtype: DTypeLike = jnp.float32, shardings: Any = None) -> Params:
    """Load the params of a folder.

    Args:
        folder: of the checkpoint, as ``read_config`` returns it.
        cfg: sizes that the tensors must have.
        dtype: of the params; default jnp.float32.
        shardings: tree like the params. This process then reads only the slices of its devices: one device's share of
            one stacked tensor at a time, so the host never holds more than that besides the placed arrays. Default
            None: whole arrays on the default device.

    Raises:
        CheckpointError: a shard or tensor is missing, a tensor is not expected, or a shape differs. The head of a tied
            model and stored RoPE frequencies are ignored, as transformers does.
    """
    files = check_headers(folder, cfg)

    def leaf(weight: Weight) -> jax.Array:
        read_part = partial(_read, weight, files, dtype=np.dtype(dtype))
        if shardings is None:
            return jnp.asarray(read_part((slice(None),) * len(weight.shape)))
        return _placed(weight.shape, lookup(shardings, weight), read_part)

    return build_tree(cfg, leaf)


def _placed(shape: tuple[int, ...], sharding: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """Build a global array; this process reads each block of its devices once and places it before the next."""
    holders: dict[tuple[tuple[int, int, int], ...], list[Any]] = {}
    where = sharding.addressable_devices_indices_map(shape)
    for device, index in where.items():
        block = tuple(s.indices(n) for s, n in zip(index or (), shape))
        holders.setdefault(block, []).append(device)
    placed = {}
    for block, devices in holders.items():
        values = read(tuple(slice(*bounds) for bounds in block))
        placed |= {device: jax.device_put(values, device) for device in devices}
        jax.block_until_ready([placed[device] for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, [placed[device] for device in where])


def stored_dtype(folder: Path) -> np.dtype:
    """Return the dtype of the embedding in the checkpoint's files."""
    files = tensor_files(folder)
    name = next((name for name in files if name.endswith(".embed_tokens.weight")), None)
    if name is None:
        raise CheckpointError(f"{folder}: no embedding among the tensors; config.json and the weights do not match")
    return open_tensors(files[name]).get_tensor(name).dtype


def _read(weight: Weight, files: dict[str, Path], index: tuple[slice, ...], *, dtype: np.dtype) -> np.ndarray:
    """Read one block of a tree array from the checkpoint's tensors.

    The file is mapped again every few rows: the pages read through a mapping count as memory until it is closed.
    """
    outer, inner = index[: len(weight.stack)], list(index[len(weight.stack) :])
    names = np.array(weight.names).reshape(weight.stack)[outer]
    transposed = weight.layout == "transposed"
    size = weight.shape[len(weight.stack) :]
    block = np.empty((*names.shape, *(len(range(n)[s]) for n, s in zip(size, inner))), dtype)
    if transposed:
        inner[-2:] = inner[:-3:-1]
    number, parts = weight.part
    if parts > 1:
        height = weight.file_shape[-2] // parts
        first, end, _ = inner[-2].indices(height)
        inner[-2] = slice(number * height + first, number * height + end)
    rows, *columns = inner
    first, end, _ = rows.indices(weight.file_shape[0])
    step = max(1, MAPPED // (4 * math.prod(weight.file_shape[1:])))
    for at, name in np.ndenumerate(names):
        out = np.swapaxes(block[at], -1, -2) if transposed else block[at]
        for start in range(first, end, step):
            piece = slice(start, min(start + step, end))
            out[start - first : piece.stop - first] = open_tensors(files[name]).get_slice(name)[(piece, *columns)]
    return block


def export(
    folder: Path,
    cfg: QwenConfig,
    params: Params,
    *,
    source: Path,
    dtype: DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
    stop_ids: Sequence[int] = (),
    untie: bool = False,
) -> Path:
    """Write params as an HF folder: safetensors shards, config.json and tokenizer files of ``source``.

    The write is atomic: the folder is written under another name, synced and renamed; it replaces an earlier export.
    Every process takes part, tensor by tensor; the first process writes and holds one output shard at a time.

    Args:
        folder: to write; returned.
        cfg: sizes of the params.
        params: as ``load_params`` gives them.
        source: checkpoint whose config.json and tokenizer files are copied; of a Qwen3-VL the text model's part.
        dtype: of the files; default None, that of the params.
        shard_bytes: size at which another file begins.
        stop_ids: end tokens of generation_config.json, so that any generator stops where the policy was trained to
            stop; default (), those of the source.
        untie: write a tied head as a tensor of its own, in a folder of an untied model: vLLM's ``reload_weights`` does
            not renew a tied one; default False.

    Raises:
        FileExistsError: the folder is not empty and not a checkpoint.
    """
    out = np.dtype(dtype) if dtype is not None else np.dtype(params["embed"]["embedding"].dtype)
    cfg, fields = exported_as(cfg, read_fields(source))
    fields.pop("torch_dtype", None)
    if untie and cfg.tie_word_embeddings:
        cfg, fields = replace(cfg, tie_word_embeddings=False), fields | {"tie_word_embeddings": False}
        params = {**params, "head": {"kernel": params["embed"]["embedding"].T}}
    if is_first():
        fields |= {"dtype": out.name}
        tensors = kept_tensors(cfg, tensor_files(source)) if cfg.delta else {}
        options = {"files_of": source, "shard_bytes": shard_bytes, "stop_ids": stop_ids, "kept": tensors}
        _write(folder, cfg, params, fields, out, **options)
    else:
        for parts in _stored_tensors(cfg).values():
            _tensor(params, parts, out)
    wait_for_all("export")
    return folder


def write_random_checkpoint(
    folder: Path,
    fields: dict[str, Any],
    *,
    seed: int,
    dtype: DTypeLike = jnp.float32,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint of random weights from the fields of a config.json, with the tokenizer files of a folder."""
    cfg = QwenConfig.from_hf(fields)
    params = init_params(cfg, jax.random.key(seed), dtype=dtype)
    out = np.dtype(dtype)
    return _write(folder, cfg, params, fields | {"dtype": out.name}, out, files_of=tokenizer, shard_bytes=shard_bytes)


def _write(
    folder: Path,
    cfg: QwenConfig,
    params: Params,
    fields: dict[str, Any],
    dtype: np.dtype,
    *,
    files_of: Path | None,
    shard_bytes: int,
    stop_ids: Sequence[int] = (),
    kept: Mapping[str, Path] = MappingProxyType({}),
) -> Path:
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise FileExistsError(f"{folder} is not empty and not a checkpoint; choose a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        for file in tokenizer_files(Path(files_of)) if files_of else ():
            shutil.copyfile(file, fresh / file.name)
        (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        if stop_ids:
            _write_stops(fresh / "generation_config.json", stop_ids)
        _write_shards(fresh, cfg, params, dtype, shard_bytes, kept)
        sync_files(fresh)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)
        sync_folder(folder.parent)
    return folder


def remove_half_written(folder: Path) -> None:
    """Remove the temporary folders of killed exports of this folder. Call only while nothing else exports to it."""
    for path in folder.parent.glob(f".{folder.name}-*"):
        if re.fullmatch(r"[a-z0-9_]{8}", path.name[len(folder.name) + 2 :]) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _write_stops(file: Path, stop_ids: Sequence[int]) -> None:
    """Set the end tokens of a generation_config.json; its other defaults stay."""
    fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(fields | {"eos_token_id": list(stop_ids)}, indent=2) + "\n")


def _write_shards(
    folder: Path, cfg: QwenConfig, params: Params, dtype: np.dtype, shard_bytes: int, kept: Mapping[str, Path]
) -> None:
    """Write tensors in the table's order, starting a new file before one would exceed ``shard_bytes``.

    After them come the ``kept`` tensors, byte for byte as they are in their files.
    """
    entries = [
        (name, math.prod(parts[0][0].file_shape) * dtype.itemsize, partial(_tensor, params, parts, dtype))
        for name, parts in _stored_tensors(cfg).items()
    ]
    entries += [(name, _stored_bytes(file, name), partial(_stored, file, name)) for name, file in kept.items()]
    shards: list[dict[str, Callable[[], np.ndarray]]] = [{}]
    filled = 0
    for name, size, tensor in entries:
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        try:
            save_file({name: tensor() for name, tensor in shard.items()}, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # the writer's error on a full disk
            raise cannot_write(folder / file, error) from error
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # the writer's mode is owner-only
        where |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(size for _, size, _ in entries)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _stored(file: Path, name: str) -> np.ndarray:
    return open_tensors(file).get_tensor(name)


def _stored_bytes(file: Path, name: str) -> int:
    piece = open_tensors(file).get_slice(name)
    bits = re.search(r"\d+", piece.get_dtype())
    return math.prod(piece.get_shape()) * (int(bits[0]) // 8 if bits else 1)


Parts = list[tuple[Weight, tuple[int, ...]]]
"""What one tensor of a checkpoint consists of: weights of the table, and places in their stacks."""


def _stored_tensors(cfg: QwenConfig) -> dict[str, Parts]:
    """Map each tensor of a checkpoint to its parts, in the order in which all processes write them."""
    tensors: dict[str, Parts] = {}
    for weight in weight_table(cfg):
        for at, name in zip(np.ndindex(weight.stack), weight.names):
            tensors.setdefault(name, []).append((weight, at))
    return tensors


def _tensor(params: Params, parts: Parts, dtype: np.dtype) -> np.ndarray:
    """Return a tensor as the checkpoint stores it."""
    arrays = [np.asarray(to_host(lookup(params, weight)[at].astype(dtype))) for weight, at in parts]
    if parts[0][0].layout == "transposed":
        arrays = [np.swapaxes(x, -1, -2) for x in arrays]
    return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-2))
