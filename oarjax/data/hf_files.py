"""Check the files of a Hugging Face folder before reading them: names, checksums, headers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from oarjax.errors import UserError
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import weight_table
from oarjax.storage.manifest import MANIFEST

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUMS = "SHA256SUMS"
"""Optional checksums, as ``sha256sum *.safetensors > SHA256SUMS`` writes them."""
SIZES = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "max_position_embeddings"), 2**28),
    **dict.fromkeys(("hidden_size", "head_dim"), 2**20),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2**13),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 2**13),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2**28),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval"), 2**13),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), 2**20),
}
"""Sizes, and the largest that is taken for one: a name is made for every layer before any file is looked at."""

REALS = ("rms_norm_eps", "rope_theta", "initializer_range", "partial_rotary_factor")
ROPE_REALS = ("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
ROPE_REALS += ("partial_rotary_factor",)
SWITCHES = ("tie_word_embeddings", "attention_bias", "use_sliding_window")
DTYPES = ("F64", "F32", "F16", "BF16")


class CheckpointError(UserError, ValueError):
    """Raised for a checkpoint that cannot be read; names what was expected, what came and the remedy."""


def read_fields(folder: Path) -> dict[str, Any]:
    """Read the fields of config.json.

    Raises:
        CheckpointError: it is missing, or not a JSON object.
    """
    missing = f"{folder}: no config.json; expected a Hugging Face checkpoint folder"
    if (folder / "config.yaml").is_file():
        missing += f"; it is a run's folder, whose policies are {folder}/export and {folder}/start, once they are there"
    elif (folder / MANIFEST).is_file():
        missing += f"; it is a run's checkpoint, of which oarjax export {folder} FOLDER makes one"
    fields = _json(folder / "config.json", missing=missing)
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
    text = fields.get("text_config")
    part = text if isinstance(text, dict) else fields
    for name, expected in _misfits(part):
        raise CheckpointError(
            f"{folder}/config.json: {name} = {_part(part, name)!r:.100}, expected {expected}; fetch it again"
        )
    return QwenConfig.from_hf(fields)


def as_stored(folder: Path, cfg: QwenConfig) -> QwenConfig:
    """Return the architecture with its experts packed if the folder's tensors are: config.json does not say it."""
    if cfg.experts is None or not any(name.endswith(".mlp.experts.gate_up_proj") for name in tensor_files(folder)):
        return cfg
    return replace(cfg, experts=replace(cfg.experts, packed=True))


def _misfits(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield fields of config.json that are of another kind than any checkpoint's, with what was expected."""
    for name, largest in SIZES.items():
        if fields.get(name) is not None and not (_is_whole(fields[name]) and 1 <= fields[name] <= largest):
            yield name, f"a positive integer up to {largest:,}"
    for name, expected in (("initializer_range", "a positive number"), ("max_window_layers", "an integer")):
        if name in fields and fields[name] is None:
            yield name, expected
    for name in ("sliding_window", "max_window_layers"):
        if fields.get(name) is not None and not _is_whole(fields[name]):
            yield name, "an integer"
    for section, names in (("", REALS), ("rope_scaling", ROPE_REALS), ("rope_parameters", ROPE_REALS)):
        part = (fields.get(section) or {}) if section else fields
        if not isinstance(part, dict):
            yield section, "an object"
            continue
        for name in names:
            value = part.get(name)
            if value is not None and not (
                _is_real(value) and (value > 0 or (value == 0 and name.startswith("mscale")))
            ):
                yield f"{section}.{name}".strip("."), "a positive number"
        original = part.get("original_max_position_embeddings")
        if original is not None and (not _is_whole(original) or original < 1):
            yield f"{section}.original_max_position_embeddings".strip("."), "a positive integer"
        if not isinstance(part.get("truncate", True), bool):
            yield f"{section}.truncate".strip("."), "true or false"
    for name in SWITCHES:
        if fields.get(name) is not None and not isinstance(fields[name], bool):
            yield name, "true or false"
    for name in ("model_type", "hidden_act"):
        if fields.get(name) is not None and not isinstance(fields[name], str):
            yield name, "text"
    for name in ("architectures", "layer_types"):
        value = fields.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(part, str) for part in value)):
            yield name, "a list of names"
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if not fields.get("head_dim") and heads and hidden and (hidden < heads or hidden % heads):
        yield "hidden_size", f"a multiple of num_attention_heads = {heads}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def _part(fields: dict[str, Any], name: str) -> Any:
    section, _, inner = name.rpartition(".")
    return fields[section][inner] if section else fields[name]


def check_weights(folder: Path, cfg: QwenConfig) -> None:
    """Check that a folder's weights are complete and of this architecture, by checksums if present and by headers.

    The head of a tied model and stored RoPE frequencies are ignored, as transformers does.

    Raises:
        CheckpointError: a shard is missing, truncated, changed or not among the checksums; a tensor is missing, not
            expected or not in the shard that the index names; a shape differs, or a dtype is not floating-point.
    """
    _check_sums(folder)
    check_headers(folder, cfg)


def check_files(folder: Path, files: Iterable[Path]) -> None:
    """Check that files which an export copies are files of this folder; links within a hub's cache are.

    Raises:
        CheckpointError: one is a link that leads elsewhere or nowhere, or is no file at all.
    """
    cache = folder.resolve().parent.parent if folder.resolve().parent.name == "snapshots" else folder.resolve()
    for file in files:
        try:
            target = file.resolve(strict=True)
        except (OSError, RuntimeError):  # a link to nowhere, or to itself
            raise CheckpointError(f"{file} is not a file; fetch the folder again") from None
        if not target.is_relative_to(cache):
            raise CheckpointError(f"{file} is a link to {target}, outside its folder; copy the file that is meant here")
        if not target.is_file():
            raise CheckpointError(f"{file} is not a file; fetch the folder again")


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
                    f"{file}: {name}: expected the shape {weight.file_shape} of config.json, got {shape}; the two "
                    "files are not from the same checkpoint"
                )
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"{file}: {name}: expected a dtype of {', '.join(DTYPES)}, got {dtype}; use a checkpoint that is "
                    "not quantised"
                )
    return files


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map each tensor to the file that holds it.

    Raises:
        CheckpointError: no weights, a broken index, or missing shards.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            pickles = sorted(p.name for p in folder.glob("*.bin"))
            hint = f"; {pickles[0]} is a pickle, which is never opened: convert it to safetensors" if pickles else ""
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
    missing_files = sorted({file for file in where.values() if not (folder / file).is_file()})
    if missing_files:
        raise CheckpointError(
            f"{folder}: {len(missing_files)} of {len(set(where.values()))} shards named in {INDEX} are missing "
            f"({', '.join(missing_files[:3])}); fetch the folder again"
        )
    return {name: folder / file for name, file in where.items()}


def kept_tensors(cfg: QwenConfig, files: dict[str, Path]) -> dict[str, Path]:
    """Return the tensors that are not of the text model but belong to its checkpoint: vision, multi-token prediction.

    They are neither read nor trained, and an export copies them with a whole checkpoint, not with a text model alone.
    """
    prefixes = ("model.visual.",) if cfg.prefix != "model." else ()
    prefixes += ("mtp.",) if cfg.delta else ()
    return {name: file for name, file in files.items() if name.startswith(prefixes)}


def open_tensors(file: Path) -> Any:
    """Open a safetensors file, checking its length against its header.

    Raises:
        CheckpointError: it cannot be read, is truncated or not a safetensors file.
    """
    try:
        file.open("rb").close()  # safetensors calls a file that may not be read missing
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; make it readable, or fetch it") from error
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file ({error}); fetch it again") from error


def _json(path: Path, *, missing: str) -> Any:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise CheckpointError(f"{path} is not a file; fetch the folder again")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(missing) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch it again") from None


def _check_names(folder: Path, cfg: QwenConfig, files: dict[str, Path]) -> None:
    expected = {name for weight in weight_table(cfg) for name in weight.names}
    ignored = {"lm_head.weight"} if cfg.tie_word_embeddings else set()
    extra = set(files) - expected - ignored - {n for n in files if n.endswith("rotary_emb.inv_freq")}
    extra -= set(kept_tensors(cfg, files))
    for names, fault in ((expected - set(files), "missing"), (extra, "not part of this architecture")):
        if names:
            sample, noun = ", ".join(sorted(names)[:4]), "tensor" if len(names) == 1 else "tensors"
            raise CheckpointError(
                f"{folder}: {len(names)} {noun} {fault}: {sample}; config.json and the weights do not belong together"
            )


def _check_sums(folder: Path) -> None:
    """Compare files with SHA256SUMS if the folder has it; this reads every byte."""
    sums = folder / SUMS
    if not sums.is_file():
        return
    listed_files = set()
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines()
    if not any(line.strip() for line in lines):
        raise CheckpointError(f"{sums} names no file and checks nothing; regenerate it or delete it")
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](?:\./)?([^/]+)", line)
        if match is None:
            raise CheckpointError(
                f"{sums} line {number}: expected a SHA-256 and a file name; regenerate it or delete it"
            )
        expected, file = match[1], folder / match[2]
        listed_files.add(file)
        if not file.is_file():
            raise CheckpointError(f"{folder}: {file.name} is missing, and {SUMS} names it; fetch the folder again")
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != expected:
            raise CheckpointError(
                f"{file}: expected SHA-256 {expected[:12]}... as in {SUMS}, got {digest[:12]}...; fetch the file again"
            )
    if unlisted := sorted(file.name for file in set(tensor_files(folder).values()) - listed_files):
        raise CheckpointError(f"{sums} does not name {unlisted[0]}, whose weights would go unchecked; regenerate it")
