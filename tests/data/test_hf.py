"""Reading and writing Hugging Face folders: bit for bit, and every way a folder can be broken."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from oarjax.data import hf
from oarjax.data.hf import (
    CheckpointError,
    export,
    load_params,
    read_config,
    read_fields,
    tokenizer_files,
    write_random_checkpoint,
)
from oarjax.data.hf_files import open_tensors
from oarjax.data.tokenizer import load_tokenizer, stop_ids
from oarjax.models.qwen_config import UnsupportedModel


@pytest.fixture
def copy(data, tmp_path):
    """A golden checkpoint that a test may break."""
    return shutil.copytree(data / "policy" / "qwen3_untied", tmp_path / "copy")


def tensors(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same_bits(a, b):
    assert set(a) == set(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8), err_msg=name)


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen3_untied", "moe_untied", "delta_untied", "next_untied"])
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000])
def test_load_then_export_gives_the_same_bits(kind, shard_bytes, data, tmp_path):
    source = data / "policy" / kind
    cfg, folder = read_config(source)
    out = export(tmp_path / "out", cfg, load_params(folder, cfg), source=source, shard_bytes=shard_bytes)
    same_bits(tensors(source), tensors(out))
    index = out / "model.safetensors.index.json"
    assert index.is_file() == (shard_bytes == 20_000)
    assert len({file.stat().st_mode for file in out.iterdir() if file.suffix in (".safetensors", ".json")}) == 1
    if index.is_file():
        written = json.loads(index.read_text())
        assert written["metadata"]["total_size"] == sum(t.nbytes for t in tensors(source).values())
        assert len(set(written["weight_map"].values())) > 3
        assert all(f.stat().st_size < 24_000 for f in out.glob("*.safetensors"))
    again = load_params(out, read_config(out)[0])  # read back, single and sharded
    jax.tree.map(np.testing.assert_array_equal, again, load_params(folder, cfg))


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen3_untied"])
def test_files_read_in_small_pieces_give_the_same_bits(kind, data, monkeypatch):
    cfg, folder = read_config(data / "policy" / kind)
    whole = load_params(folder, cfg)
    monkeypatch.setattr(hf, "MAPPED", 1000)  # a few rows of these matrices at a time, the last piece shorter
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, cfg), whole)


def test_bfloat16_round_trip(data, tmp_path):
    fields = read_fields(data / "policy" / "qwen2_untied") | {"torch_dtype": "float32"}
    source = write_random_checkpoint(tmp_path / "a", fields, seed=1, dtype=jnp.bfloat16)
    cfg, _ = read_config(source)
    params = load_params(source, cfg, dtype=jnp.bfloat16)
    assert params["norm"]["scale"].dtype == jnp.bfloat16
    same_bits(tensors(source), tensors(export(tmp_path / "b", cfg, params, source=source)))
    # float32 masters of a bfloat16 checkpoint, exported as bfloat16: nothing is lost on the way
    wide = load_params(source, cfg, dtype=jnp.float32)
    out = export(tmp_path / "c", cfg, wide, source=source, dtype=jnp.bfloat16)
    same_bits(tensors(source), tensors(out))
    written = read_fields(out)
    assert written["dtype"] == "bfloat16"
    assert "torch_dtype" not in written
    assert written["architectures"] == fields["architectures"]


def test_export_copies_what_belongs_to_the_model_and_replaces_the_last(copy, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "merges.txt", "training.bin"):
        (copy / name).write_text(name)
    cfg, _ = read_config(copy)
    params = load_params(copy, cfg)
    out = export(tmp_path / "out", cfg, params, source=copy)
    names = {p.name for p in out.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    export(out, cfg, jax.tree.map(lambda x: x + 1, params), source=copy)
    assert tensors(out)["model.norm.weight"][0] == tensors(copy)["model.norm.weight"][0] + 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "out"]  # no scratch left


def test_export_ends_generation_where_the_policy_was_taught_to(copy, tmp_path):
    cfg, _ = read_config(copy)
    params = load_params(copy, cfg)
    bare = export(tmp_path / "bare", cfg, params, source=copy, stop_ids=(3, 5))
    assert json.loads((bare / "generation_config.json").read_text()) == {"eos_token_id": [3, 5]}
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "temperature": 0.7}))
    out = export(tmp_path / "out", cfg, params, source=copy, stop_ids=(3, 5))
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [3, 5], "temperature": 0.7}


@pytest.mark.slow
def test_export_has_what_vllm_reads(shared, data, tmp_path):
    """Through transformers, as vLLM does: the architecture's class, dtype, stops, tokenizer, template and shards."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = load_tokenizer(shared / "tokenizer")
    fields = read_fields(data / "policy" / "qwen2_tied") | {"vocab_size": 151_936, "hidden_size": 8, "torch_dtype": "x"}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    source = write_random_checkpoint(tmp_path / "in", fields, seed=0, tokenizer=shared / "tokenizer")
    stops = stop_ids(source, tokenizer)
    cfg, _ = read_config(source)
    settings = {"dtype": jnp.bfloat16, "shard_bytes": 10**6, "stop_ids": stops}
    out = export(tmp_path / "out", cfg, load_params(source, cfg), source=source, **settings)
    config = AutoConfig.from_pretrained(out)
    assert (config.architectures, config.model_type) == (["Qwen2ForCausalLM"], "qwen2")
    assert str(config.dtype) in ("bfloat16", "torch.bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert GenerationConfig.from_pretrained(out).eos_token_id == [151643, 151645]
    theirs = AutoTokenizer.from_pretrained(out)
    turns = [{"role": "user", "content": "1+1="}]
    shown = [t.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) for t in (tokenizer, theirs)]
    assert shown[0] == shown[1]
    assert theirs(shown[0])["input_ids"] == tokenizer(shown[0])["input_ids"]
    shards = set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert shards == {file.name for file in out.glob("*.safetensors")}


def test_export_leaves_foreign_folders_alone(copy, tmp_path):
    cfg, _ = read_config(copy)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="not a checkpoint; choose a new folder"):
        export(tmp_path / "mine", cfg, load_params(copy, cfg), source=copy)
    assert (tmp_path / "mine" / "thesis.tex").is_file()


def test_an_export_that_fails_leaves_the_last_one(copy, tmp_path):
    cfg, _ = read_config(copy)
    params = load_params(copy, cfg)
    out = export(tmp_path / "out", cfg, params, source=copy)
    broken = {**params, "norm": {}}
    with pytest.raises(KeyError):
        export(out, cfg, broken, source=copy)
    same_bits(tensors(out), tensors(copy))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "out"]


def rewrite(folder, change):
    file = folder / "model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 tensor missing: model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), r"1 tensor missing: lm_head.weight"),
        (lambda t: t.update(extra=np.zeros(2)), r"1 tensor not part of this architecture: extra"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)}),
            r"model.norm.weight: expected the shape \(32,\) of config.json, got \(31,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit(change, message, copy):
    rewrite(copy, change)
    with pytest.raises(CheckpointError, match=message):
        load_params(copy, read_config(copy)[0])


def test_stored_rope_frequencies_and_the_head_of_a_tied_model_are_passed_over(data, tmp_path):
    folder = shutil.copytree(data / "policy" / "qwen2_tied", tmp_path / "copy")
    spare = {
        "lm_head.weight": np.zeros((64, 32), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    rewrite(folder, lambda t: t.update(spare))
    cfg, _ = read_config(folder)
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, cfg), load_params(data / "policy/qwen2_tied", cfg))


def test_files_that_are_not_there(copy, tmp_path):
    cfg, _ = read_config(copy)
    out = export(tmp_path / "out", cfg, load_params(copy, cfg), source=copy, shard_bytes=20_000)
    shards = sorted(out.glob("*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_params(out, cfg)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of \d+ shards named in .* are missing \(model-00002-of"):
        load_params(out, cfg)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or model.safetensors.index.json"):
        load_params(copy, cfg)
    (copy / "pytorch_model.bin").write_text("")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle, which is never opened: convert"):
        load_params(copy, cfg)


VISION = {"text_config": {"model_type": "qwen3", "hidden_size": 64}, "vision_config": {"depth": 2}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gemma3_text", {"hidden_size": 64}),
        ("llama", {"architectures": ["LlamaForCausalLM"]}),
        ("qwen4_exp", {"architectures": ["Qwen4ExpForCausalLM"]}),
        ("qwen2_5_vl", VISION),
        ("qwen2_moe", {"num_experts": 60}),
    ],
)
def test_unsupported_models_are_refused_with_no_weights_there(kind, fields, tmp_path):
    """In one sentence that says what is supported; a folder of config.json alone shows that no weight is read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | fields))
    message = (
        rf"^config\.json: model_type = '{kind}': this architecture is not supported; supported are the text models "
    )
    with pytest.raises(
        UnsupportedModel, match=message + r".*\(qwen3_moe\), .*and the text part of Qwen3-VL \(qwen3_vl.*\)$"
    ):
        read_config(tmp_path)


def test_where_there_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config.json; expected a Hugging Face checkpoint folder"):
        read_config(tmp_path)
    (tmp_path / "manifest.json").touch()
    with pytest.raises(CheckpointError, match=rf"run's checkpoint, of which oarjax export {tmp_path} FOLDER makes one"):
        read_config(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CheckpointError, match=rf"a run's folder, whose policies are {tmp_path}/export and "):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder; set an HF folder or a hub name"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "qwen-small").mkdir()
    with pytest.raises(CheckpointError, match=r"no such folder \(did you mean .*qwen-small\?\); set an HF folder"):
        read_config(tmp_path / "qwen_small")
    with pytest.raises(CheckpointError, match=r"policy nobody/nothing: .*revision v1.*check the name"):
        read_config("nobody/nothing", revision="v1")  # the tests run with the hub offline


def test_random_checkpoint_takes_tokenizer_files(data, tmp_path):
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    fields = read_fields(data / "policy" / "qwen2_tied")
    first = write_random_checkpoint(tmp_path / "a", fields, seed=5, tokenizer=tmp_path / "tok")
    again = write_random_checkpoint(tmp_path / "b", fields, seed=5)
    assert (first / "tokenizer.json").is_file()
    same_bits(tensors(first), tensors(again))


def test_an_export_is_on_disk_before_it_has_its_name(data, tmp_path, monkeypatch):
    cfg, source = read_config(str(data / "policy" / "qwen2_untied"))
    params, order = load_params(source, cfg), []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr("os.fsync", lambda handle: order.append("fsync") or fsync(handle))
    monkeypatch.setattr(Path, "rename", lambda self, to: order.append("rename") or rename(self, to))
    export(tmp_path / "out", cfg, params, source=source)
    files = len(list((tmp_path / "out").iterdir()))
    assert order == ["fsync"] * (files + 1) + ["rename", "fsync"]


def test_what_a_killed_export_left_is_removed_and_nothing_else(tmp_path):
    left, others = tmp_path / ".export-abc_1234", (".export-abc", ".exports-abcd1234", "export", ".export-ABCD1234")
    (left / "new").mkdir(parents=True)
    for name in others:
        (tmp_path / name).mkdir()
    hf.remove_half_written(tmp_path / "export")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


def test_what_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read: Permission denied; make it readable"):
        open_tensors(tmp_path / "model.safetensors")
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied; make it readable"):
        tokenizer_files(tmp_path)
