"""Check the files of a Hugging Face folder before reading them: names, checksums, headers."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from oarjax.errors import UserError
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import weight_table

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUMS = "SHA256SUMS"
"""Optional checksums, as ``sha256sum *.safetensors > SHA256SUMS`` writes them."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
SIZES += ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
DTYPES = ("F64", "F32", "F16", "BF16")


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be read; names what was expected, what was found and the remedy."""


def read_fields(folder: Path) -> dict[str, Any]:
    """Read the fields of config.json.

    Raises:
        CheckpointError: it is missing, or not a JSON object.
    """
    fields = _json(
        folder / "config.json", missing=f"{folder}: no config.json; expected a Hugging Face checkpoint folder"
    )
    if not isinstance(fields, dict):
        raise CheckpointError(f"{folder}/config.json: expected an object, got {type(fields).__name__}; fetch it again")
    return fields


def read_architecture(folder: Path) -> QwenConfig:
    """Read the architecture that config.json describes.

    Raises:
        CheckpointError: it is missing or broken, or a size in it is not a positive integer.
        UnsupportedModel: see QwenConfig.from_hf.
    """
    fields = read_fields(folder)
    for name in SIZES:
        size = fields.get(name)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise CheckpointError(
                f"{folder}/config.json: {name} = {size!r}, expected a positive integer; fetch it again"
            )
    return QwenConfig.from_hf(fields)


def check_weights(folder: Path, cfg: QwenConfig) -> None:
    """Check that a folder's weights are complete and of this architecture, by checksums if present and by headers.

    The head of a tied model and stored RoPE frequencies are ignored, as transformers does.

    Raises:
        CheckpointError: a missing, truncated or changed shard, a missing or extra tensor, one that is not in the
            shard that the index names, a wrong shape, or a dtype that is not floating-point.
    """
    _check_sums(folder)
    check_headers(folder, cfg)


def check_headers(folder: Path, cfg: QwenConfig) -> dict[str, Path]:
    """Check as ``check_weights`` does, without checksums; return the file of each tensor."""
    files = tensor_files(folder)
    _check_names(folder, cfg, files)
    handles = {file: open_tensors(file) for file in sorted(set(files.values()))}
    inside = {file: set(handle.keys()) for file, handle in handles.items()}
    for weight in weight_table(cfg):
        for name in weight.names:
            file = files[name]
            if name not in inside[file]:
                raise CheckpointError(f"{file}: no tensor {name}, which {INDEX} places there; fetch both again")
            piece = handles[file].get_slice(name)
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
            if shape != weight.file_shape:
                raise CheckpointError(
                    f"{file}: {name} has shape {shape}, config.json expects {weight.file_shape}; "
                    "the two files are not of one checkpoint"
                )
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"{file}: {name} is stored as {dtype}, expected one of {', '.join(DTYPES)}; use a checkpoint "
                    "that is not quantised"
                )
    return files


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map each tensor to the file that holds it.

    Raises:
        CheckpointError: no weights, a broken index, or missing shards.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            others = sorted(p.name for p in folder.glob("*.bin"))
            hint = f"; {others[0]} is a pickle, which is never opened: convert it to safetensors" if others else ""
            raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}, found neither{hint}")
        return dict.fromkeys(open_tensors(folder / SINGLE).keys(), folder / SINGLE)
    index = _json(folder / INDEX, missing=f"{folder}: no {INDEX}")
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{folder}/{INDEX} is not an index of shards (no weight_map); fetch it again")
    invalid = [file for file in where.values() if not isinstance(file, str) or Path(file).name != file]
    if invalid:
        raise CheckpointError(
            f"{folder}/{INDEX}: expected the names of files beside it, got {invalid[0]!r}; fetch it again"
        )
    missing = sorted({file for file in where.values() if not (folder / file).is_file()})
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(set(where.values()))} shards named in {INDEX} are missing "
            f"({', '.join(missing[:3])}); fetch the folder again"
        )
    return {name: folder / file for name, file in where.items()}


def open_tensors(file: Path) -> Any:
    """Open a safetensors file, checking its length against its header.

    Raises:
        CheckpointError: it is truncated or not a safetensors file.
    """
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file ({error}); fetch it again") from error


def _json(path: Path, *, missing: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(missing) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch it again") from None


def _check_names(folder: Path, cfg: QwenConfig, files: dict[str, Path]) -> None:
    wanted = {name for weight in weight_table(cfg) for name in weight.names}
    ignored = {"lm_head.weight"} if cfg.tie_word_embeddings else set()
    extra = {n for n in files if n not in wanted | ignored and not n.endswith("rotary_emb.inv_freq")}
    for names, fault in ((wanted - set(files), "missing"), (extra, "not part of this architecture")):
        if names:
            shown = ", ".join(sorted(names)[:4])
            raise CheckpointError(
                f"{folder}: {len(names)} tensor(s) {fault}: {shown}; config.json and the weights do not belong together"
            )


def _check_sums(folder: Path) -> None:
    """Compare files with their SHA256SUMS if there is one: hashing reads every byte."""
    sums = folder / SUMS
    if not sums.is_file():
        return
    for number, line in enumerate(sums.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](?:\./)?([^/]+)", line)
        if match is None:
            raise CheckpointError(
                f"{sums} line {number}: expected a SHA-256 and a file name; write it again or delete it"
            )
        expected, file = match[1], folder / match[2]
        if not file.is_file():
            raise CheckpointError(f"{folder}: {file.name} is missing, and {SUMS} names it; fetch the folder again")
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != expected:
            raise CheckpointError(
                f"{file}: expected SHA-256 {expected[:12]}... as in {SUMS}, got {digest[:12]}...; fetch the file again"
            )
