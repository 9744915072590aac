"""Hugging Face checkpoints: a folder or hub name in, params out; params in, a folder out. Never pickle."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy learns bfloat16 from it)
import numpy as np
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from oarjax.models.qwen import QwenConfig
from oarjax.models.weights import Weight, build_tree, init_params, lookup, weight_table
from oarjax.types import Params

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; says what was expected, what was found and the remedy."""


def read_config(path: str | Path, *, revision: str | None = None) -> tuple[QwenConfig, Path]:
    """The architecture and the local folder of a checkpoint: an HF folder, or a hub name that is downloaded.

    config.json is read first, so that an unsupported model is refused before any weight is fetched or read.

    Raises:
        CheckpointError: no such folder or hub name, or no config.json.
        UnsupportedModel: see QwenConfig.from_hf.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return QwenConfig.from_hf(read_fields(folder)), folder
    name = _hub_name(path, "policy", example="Qwen/Qwen2.5-0.5B")
    with _fetching(f"policy {name}", revision):
        cfg = QwenConfig.from_hf(read_fields(Path(hf_hub_download(name, "config.json", revision=revision)).parent))
        patterns = ["*.safetensors", "config.json", INDEX, *COPIED]
        return cfg, Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def read_tokenizer_folder(path: str | Path, *, revision: str | None = None) -> Path:
    """The local folder of a tokenizer: a folder, or a hub name of which nothing but the tokenizer is downloaded.

    Raises:
        CheckpointError: no such folder or hub name.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    name = _hub_name(path, "tokenizer", example="Qwen/Qwen2.5-0.5B")
    with _fetching(f"tokenizer {name}", revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(COPIED)))


def _hub_name(path: str | Path, what: str, *, example: str) -> str:
    name = str(path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(f"{what} {name}: no such folder; give an HF folder or a hub name such as {example}")
    return name


@contextmanager
def _fetching(what: str, revision: str | None) -> Iterator[None]:
    """The hub's many errors as one that says what to check."""
    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{what}: no such folder here, and the hub did not give it "
            f"(revision {revision or 'main'}): {error}; check the name, the network and your access"
        ) from error


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that belong to its tokenizer and its generation."""
    return [file for file in sorted(folder.iterdir()) if any(fnmatch(file.name, pattern) for pattern in COPIED)]


def read_fields(folder: Path) -> dict[str, Any]:
    """config.json as it stands."""
    try:
        fields = json.loads((folder / "config.json").read_text())
        if isinstance(fields, dict):
            return fields
        raise CheckpointError(f"{folder}/config.json: expected an object, got {type(fields).__name__}; fetch it again")
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{folder}/config.json is not valid JSON: {error}") from None


def load_params(folder: Path, cfg: QwenConfig, *, dtype: DTypeLike = jnp.float32, shardings: Any = None) -> Params:
    """The params of a folder, each tensor cast to ``dtype`` and put where ``shardings`` (same tree) says.

    Tensors are read layer by layer and with shardings only the slices that this process holds, so that
    never more than one stacked tensor is on the host besides what has been placed.

    Raises:
        CheckpointError: a missing shard or tensor, one too many, or a wrong shape. A head in the file of a tied
            model and stored RoPE frequencies are passed over, as transformers does.
    """
    files = _tensor_files(folder)
    _check_names(folder, cfg, files)
    handles = {file: _open(file) for file in set(files.values())}
    for weight in weight_table(cfg):
        for name in weight.names:
            found = tuple(handles[files[name]].get_slice(name).get_shape())
            if found != weight.file_shape:
                raise CheckpointError(
                    f"{files[name]}: {name} has shape {found}, config.json asks for {weight.file_shape}; "
                    "the two files are not of one checkpoint"
                )

    def leaf(weight: Weight) -> jax.Array:
        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index if index is not None else (slice(None),) * len(weight.shape)
            return _read(weight, index, lambda name: handles[files[name]].get_slice(name), np.dtype(dtype))

        if shardings is None:
            return jnp.asarray(read(None))
        return jax.make_array_from_callback(weight.shape, lookup(shardings, weight), read)

    return build_tree(cfg, leaf)


def stored_dtype(folder: Path) -> np.dtype:
    """The dtype of the embedding in the checkpoint's files."""
    files = _tensor_files(folder)
    name = "model.embed_tokens.weight"
    if name not in files:
        raise CheckpointError(f"{folder}: no tensor {name}; config.json and the weights do not belong together")
    return _open(files[name]).get_tensor(name).dtype


def _read(weight: Weight, index: tuple[slice, ...], get: Callable[[str], Any], dtype: np.dtype) -> np.ndarray:
    """One block of a tree array, out of the checkpoint's tensors."""
    if weight.layers is None:
        names, inner = list(weight.names), index
    else:
        names, inner = list(weight.names[index[0]]), index[1:]
    turn = weight.layout == "transposed"
    stored = inner[::-1] if turn else inner
    size = weight.shape[len(weight.shape) - len(inner) :]
    block = np.empty((len(names), *(len(range(n)[s]) for n, s in zip(size, inner))), dtype)
    for i, name in enumerate(names):
        piece = get(name)[stored]
        block[i] = piece.T if turn else piece
    return block[0] if weight.layers is None else block


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    if (folder / INDEX).is_file():
        try:
            where = dict(json.loads((folder / INDEX).read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder}/{INDEX} is not an index of shards ({error!r}); fetch it again") from None
        missing = sorted({file for file in where.values() if not (folder / file).is_file()})
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(set(where.values()))} shards named in {INDEX} are missing "
                f"({', '.join(missing[:3])}); fetch the folder again"
            )
        return {name: folder / file for name, file in where.items()}
    if not (folder / SINGLE).is_file():
        others = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {others[0]} is a pickle, which is never opened: convert it to safetensors" if others else ""
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there{hint}")
    return dict.fromkeys(_open(folder / SINGLE).keys(), folder / SINGLE)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}); fetch it again") from error


def _check_names(folder: Path, cfg: QwenConfig, files: dict[str, Path]) -> None:
    wanted = {name for weight in weight_table(cfg) for name in weight.names}
    passed_over = {"lm_head.weight"} if cfg.tie_word_embeddings else set()
    extra = {n for n in files if n not in wanted | passed_over and not n.endswith("rotary_emb.inv_freq")}
    for names, what in ((wanted - set(files), "missing"), (extra, "not part of this architecture")):
        if names:
            shown = ", ".join(sorted(names)[:4])
            raise CheckpointError(
                f"{folder}: {len(names)} tensor(s) {what}: {shown}; config.json and the weights do not belong together"
            )


def export(
    folder: Path,
    cfg: QwenConfig,
    params: Params,
    *,
    source: Path,
    dtype: DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write params as an HF folder: safetensors shards, config.json and tokenizer files of ``source``.

    The folder appears whole or not at all: it is written beside its place and renamed. An earlier export there
    is replaced. ``dtype`` None keeps the dtype of the params. Gives the folder back.

    Raises:
        FileExistsError: the folder holds something that is not a checkpoint.
    """
    out = np.dtype(dtype) if dtype is not None else np.dtype(params["embed"]["embedding"].dtype)
    fields = read_fields(source)
    fields.pop("torch_dtype", None)
    return _write(folder, cfg, params, fields | {"dtype": out.name}, out, files_of=source, shard_bytes=shard_bytes)


def write_random_checkpoint(
    folder: Path,
    fields: dict[str, Any],
    *,
    seed: int,
    dtype: DTypeLike = jnp.float32,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """A checkpoint of random weights from the fields of a config.json, with the tokenizer files of a folder."""
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
) -> Path:
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise FileExistsError(f"{folder} holds something that is not a checkpoint; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        for file in tokenizer_files(Path(files_of)) if files_of else ():
            shutil.copyfile(file, fresh / file.name)
        (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        _write_shards(fresh, cfg, params, dtype, shard_bytes)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)
    return folder


def _write_shards(folder: Path, cfg: QwenConfig, params: Params, dtype: np.dtype, shard_bytes: int) -> None:
    """Tensors in the table's order, a new file before one would pass ``shard_bytes``."""
    sizes = [
        (weight, layer, name, math.prod(weight.file_shape) * dtype.itemsize)
        for weight in weight_table(cfg)
        for layer, name in enumerate(weight.names)
    ]
    shards: list[list[tuple[Weight, int, str]]] = [[]]
    filled = 0
    for weight, layer, name, size in sizes:
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((weight, layer, name))
        filled += size
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _tensor(params, weight, layer, dtype) for weight, layer, name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(s[-1] for s in sizes)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensor(params: Params, weight: Weight, layer: int, dtype: np.dtype) -> np.ndarray:
    """One tensor as the checkpoint stores it."""
    array = lookup(params, weight)
    one = np.asarray(jax.device_get(array if weight.layers is None else array[layer])).astype(dtype)
    return np.ascontiguousarray(one.T if weight.layout == "transposed" else one)
