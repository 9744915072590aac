"""Adapters leave and enter as PEFT folders: torch gets equal logits with them, by hand and by peft."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TESTS
from safetensors.numpy import load_file, save_file

from oarjax.config.learning import LoraConfig
from oarjax.data.hf import load_params, read_config
from oarjax.data.hf_files import CheckpointError
from oarjax.data.peft import CONFIG, WEIGHTS, read_adapters, write_adapters
from oarjax.errors import ConfigError
from oarjax.models.lora import init_adapters, join_params
from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy
from oarjax.report.files import make_console
from oarjax.run.adapters import start_adapters

ALPHA, RANK = 6.0, 3
IDS = np.random.default_rng(0).integers(0, 64, (2, 9))


TRAINED = [
    ("qwen2_tied", ("q", "k", "v", "o")),
    ("qwen3_untied", ("q", "gate", "down")),
    ("delta_untied", ("o", "up")),  # attention alone, and layers of both kinds
    ("moe_untied", ("q", "gate", "up", "down")),  # of every expert
    ("moe_delta_untied", ("o", "gate", "up", "down")),  # and of the shared one
    ("next_untied", ("q", "v", "o")),
]


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, tmp_path_factory):
    """A golden policy with adapters that are not 0, and its PEFT folder."""
    kind, targets = request.param
    base = TESTS / "golden" / "policy" / kind
    cfg, folder = read_config(base)
    params = load_params(folder, cfg, dtype=jnp.float32)
    fresh = init_adapters(jax.random.key(0), params, rank=RANK, targets=targets)
    draw = np.random.default_rng(1)
    adapters = jax.tree.map(lambda x: x + 0.2 * draw.normal(size=x.shape).astype(np.float32), fresh)
    out = write_adapters(tmp_path_factory.mktemp("peft") / "out", cfg, adapters, alpha=ALPHA, base=str(base))
    return cfg, params, adapters, targets, base, out


def logits_here(cfg, params, adapters):
    policy = make_policy(cfg, remat="none", adapter_scale=ALPHA / RANK)
    whole, valid = join_params(params, adapters), jnp.ones(IDS.shape, bool)
    hidden, _ = policy.trunk(whole, policy.embed(whole, jnp.asarray(IDS)), positions_of(valid), valid)
    return np.asarray(policy.unembed(whole, hidden))


def torch_logits(model):
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def torch_policy(folder):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def merged_in_torch(base, out, folder):
    """Return the policy with W + alpha / r * B A for its matrices, found by the names in the folder alone."""
    fields, tensors = json.loads((out / CONFIG).read_text()), load_file(out / WEIGHTS)
    weights = load_file(base / "model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            assert weight.split(".")[-2] in fields["target_modules"]
            weights[weight] = (
                weights[weight] + fields["lora_alpha"] / fields["r"] * tensors[name.replace("lora_A", "lora_B")] @ a
            )
    shutil.copytree(base, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return torch_policy(folder)


def test_peft_gets_equal_logits_from_the_folder(trained, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed (extra parity)")
    cfg, params, adapters, targets, base, out = trained
    ours, alone = logits_here(cfg, params, adapters), torch_logits(torch_policy(base))
    theirs = torch_logits(peft.PeftModel.from_pretrained(torch_policy(base), out))
    if cfg.experts is not None and cfg.experts.shared is not None and "gate" in targets:
        # PEFT 0.21 renames gate_proj to the packed experts' and misses the shared expert's.
        assert np.abs(ours - theirs).max() > 1e-4, "PEFT applies these adapters now: docs/models.md says otherwise"
        theirs = torch_logits(merged_in_torch(base, out, tmp_path / "whole"))
    assert np.abs(theirs - alone).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_what_leaves_comes_back(trained):
    cfg, _, adapters, targets, _, out = trained
    found = read_adapters(out, cfg)
    assert (found.rank, found.alpha, sorted(found.targets)) == (RANK, ALPHA, sorted(targets))
    jax.tree.map(np.testing.assert_array_equal, found.params, adapters)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, start=str(out))
    jax.tree.map(np.testing.assert_array_equal, start_adapters(lora, cfg), adapters)
    with pytest.raises(ConfigError, match=r"has rank 3, alpha 6 and targets .*; set lora.rank, lora.alpha"):
        start_adapters(lora.model_copy(update={"rank": 4}), cfg)
    assert start_adapters(LoraConfig(rank=4), cfg) is None


def test_what_is_no_plain_lora_is_refused(trained, tmp_path):
    cfg, _, _, _, _, out = trained
    fields, tensors = json.loads((out / CONFIG).read_text()), load_file(out / WEIGHTS)
    first = next(iter(tensors))

    def written(name, fields=fields, tensors=tensors):
        folder = tmp_path / name
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(fields))
        save_file(tensors, folder / WEIGHTS)
        return folder

    for name, changes, message in (
        ("kind", {"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ("dora", {"use_dora": True}, "use_dora is True; only False"),
        ("bias", {"bias": "all"}, "bias is 'all'; only 'none'"),
        ("stacks", {"target_parameters": ["mlp.experts.gate_up_proj"]}, "adapters of whole stacks of experts cannot"),
        ("ranks", {"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ("rank", {"r": 0}, "r = 0 and lora_alpha = 6.0; expected positive"),
        ("truth", {"r": True}, "r = True and"),
        ("digits", {"lora_alpha": int("9" * 400)}, "lora_alpha = a huge integer; expected positive"),
        ("nan", {"lora_alpha": float("nan")}, "lora_alpha = nan; expected positive"),
        ("pissa", {"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the weights below"),
        ("olora", {"init_lora_weights": "olora"}, "convert to plain LoRA"),
        ("eva", {"eva_config": {"rho": 2.0}}, "eva_config is"),
        ("loftq", {"loftq_config": {"loftq_bits": 4}}, "loftq_config is"),
        ("qalora", {"use_qalora": True}, "use_qalora is True; only False"),
        ("alora", {"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ("layers", {"layers_pattern": "blocks"}, "layers_pattern is 'blocks'"),
        ("rslora", {"use_rslora": "false"}, "use_rslora is 'false'; expected true or false"),
        ("later", {"use_tomorrow": False}, "use_tomorrow is False, an unknown field"),
        ("dropout", {"lora_dropout": "0.1"}, "lora_dropout is '0.1'"),
        ("share", {"lora_dropout": 2}, "lora_dropout is 2; expected a share of 0 to 1"),
        ("corda", {"corda_config": {"corda_method": "kpm"}}, "corda_config is"),
        ("nothing", {"alpha_pattern": {"no_such_module": 2}}, "alpha_pattern is"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_adapters(written(name, fields | changes), cfg)
    with pytest.raises(
        CheckpointError, match=r"no tensor .*; every layer needs its own|match no matrix of this policy"
    ):
        read_adapters(written("missing", tensors={n: t for n, t in tensors.items() if n != first}), cfg)
    with pytest.raises(CheckpointError, match="1 tensors match no matrix of this policy, first other"):
        read_adapters(written("other", tensors=tensors | {"other": tensors[first]}), cfg)
    with pytest.raises(CheckpointError, match=r"expected \[3, "):
        read_adapters(written("shape", tensors=tensors | {first: tensors[first][:, :-1].copy()}), cfg)
    with pytest.raises(CheckpointError, match="no tensor is an adapter of this policy's matrices; target_modules is"):
        read_adapters(written("empty", tensors={}), cfg)
    broken = tensors[first].copy()
    broken.flat[0] = np.inf
    with pytest.raises(CheckpointError, match="holds values that are not finite"):
        read_adapters(written("infinite", tensors=tensors | {first: broken}), cfg)
    with pytest.raises(CheckpointError, match=r"expected a dtype of F64, F32, F16, BF16, got F8_E4M3"):
        read_adapters(written("fp8", tensors=tensors | {first: tensors[first].astype(jnp.float8_e4m3fn)}), cfg)
    (nested := written("nested")).joinpath(CONFIG).write_text('{"a":' * 20_000)
    (pipe := written("pipe")).joinpath(WEIGHTS).unlink()
    os.mkfifo(pipe / WEIGHTS)
    for folder in (tmp_path, nested, pipe):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_adapters(folder, cfg)
    with pytest.raises(CheckpointError, match="has no adapters"):
        write_adapters(tmp_path / "none", cfg, {}, alpha=1.0, base="x")
    rs = read_adapters(written("rs", fields | {"use_rslora": True}), cfg)
    np.testing.assert_allclose(rs.alpha / rs.rank, ALPHA / RANK**0.5)


def test_what_peft_writes_by_default_is_read(trained, tmp_path, capsys):
    """With dropout, which means nothing when adapters are loaded: one line says so."""
    peft = pytest.importorskip("peft", reason="peft is not installed (extra parity)")
    cfg, _, _, targets, _, out = trained
    shutil.copytree(out, tmp_path / "out")
    fields = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.1, target_modules=["q_proj"]).to_dict()
    (tmp_path / "out" / CONFIG).write_text(json.dumps(fields, default=sorted))
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, start=str(tmp_path / "out"))
    start_adapters(lora, cfg, make_console())
    assert capsys.readouterr().out == "lora.start: lora_dropout = 0.1 is not applied: training here has no dropout\n"
