"""What a run was made from is fixed with its first progress, and compared afterwards."""

import os
import subprocess
import sys

import jax
import pytest

from oarjax.errors import ConfigError
from oarjax.storage import inputs
from oarjax.storage.durable import DamagedError
from oarjax.storage.inputs import (
    add_inputs,
    check_files,
    digests,
    machine_inputs,
    policy_files,
    read_inputs,
    record_inputs,
)

NOW = {"rows/data.train": "a" * 64, "version/jax": "0.10.2", "harmless/machine": "x86_64"}


def started(run):
    (run / "start").mkdir(parents=True)
    return run


def test_until_there_is_progress_they_are_replaced_and_then_fixed(tmp_path):
    record_inputs(tmp_path, NOW)
    record_inputs(tmp_path, NOW | {"rows/data.train": "b" * 64})
    assert read_inputs(tmp_path).inputs["rows/data.train"] == "b" * 64
    started(tmp_path)
    with pytest.raises(
        ConfigError, match=r"trained from other inputs \(rows/data.train was bbbbbbbbbbbb, is aaaaaaaaaaaa\)"
    ):
        record_inputs(tmp_path, NOW)
    assert read_inputs(tmp_path).inputs["rows/data.train"] == "b" * 64


def test_rollouts_of_other_inputs_go_with_them(tmp_path):
    drawn = tmp_path / "rollouts" / "000001.jsonl"
    drawn.parent.mkdir()
    drawn.write_text("")
    for seen, policy in ((False, "a"), (True, "a"), (False, "b")):
        record_inputs(tmp_path, {"policy/model.safetensors": policy * 64})
        assert drawn.exists() is seen
        drawn.write_text("")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rows/data.eval", "refused"),
        ("policy/model.safetensors", "refused"),
        ("code/loss.function=x.py:f", "refused"),
        ("random/jax_enable_x64", "refused"),
        ("version/jax", "rounding"),
        ("device/cpu_threads", "rounding"),
        ("environment/XLA_FLAGS", "rounding"),
        ("setting/jax_default_matmul_precision", "rounding"),
        ("harmless/machine", "harmless"),
    ],
)
def test_every_difference_is_of_one_kind(tmp_path, name, kind):
    for before, now in (({name: "1"}, {name: "2"}), ({}, {name: "2"}), ({name: "1"}, {})):
        found = inputs.compare(before, now)
        assert [k for k in ("refused", "rounding", "harmless") if getattr(found, k)] == [kind]
        assert getattr(found, kind)[0].startswith(f"{name} was ")


def test_rounding_is_reported_and_allowed(tmp_path):
    record_inputs(tmp_path, NOW)
    started(tmp_path)
    found = record_inputs(tmp_path, NOW | {"version/jax": "0.12.0"})
    assert "version/jax was '0.10.2', is '0.12.0' (allowed, but the run will not end bit for bit" in found.words()


def test_one_flipped_bit_of_the_start_is_refused(tmp_path):
    record_inputs(tmp_path, NOW)
    weights = started(tmp_path) / "start" / "model.safetensors"
    weights.write_bytes(bytes(1000))
    files = {f"start/{p.name}": p for p in policy_files(tmp_path / "start")}
    check_files(tmp_path, files)  # nothing was recorded
    add_inputs(tmp_path, digests(files)[0])
    check_files(tmp_path, files)
    assert record_inputs(tmp_path, NOW).words() == ""  # the others do not know it
    weights.write_bytes(bytes(500) + b"\x01" + bytes(499))
    with pytest.raises(DamagedError, match=r"start/model.safetensors: is not what the warm start wrote") as error:
        check_files(tmp_path, files)
    assert error.value.exit_code == 2
    weights.unlink()
    with pytest.raises(DamagedError, match=r"start/model.safetensors: is missing"):
        check_files(tmp_path, {})


def test_a_damaged_file_is_no_comparison(tmp_path):
    record_inputs(tmp_path, NOW)
    path = tmp_path / "inputs.json"
    whole = path.read_text()
    for text in ("", "[]", whole[:-20], whole.replace("0.10.2", "0.10.3")):
        path.write_text(text)
        with pytest.raises(DamagedError, match=r"inputs.json is not what was written .* remove it to resume without"):
            read_inputs(tmp_path)


def test_files_are_read_once_and_again_after_any_change(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    first, stats = digests({"policy/x": file})
    assert stats == {}  # too fresh: a change within the clock's tick would not show
    monkeypatch.setattr(inputs, "SETTLED", -1.0)
    _, stats = digests({"policy/x": file})
    forged = {str(file): stats[str(file)]._replace(sha256="known")}
    assert digests({"policy/x": file}, forged)[0] == {"policy/x": "known"}
    before = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened; ctime tells
    second, _ = digests({"policy/x": file}, forged)
    assert second["policy/x"] not in ("known", first["policy/x"])


def test_the_machine_has_its_versions_and_threads(monkeypatch):
    jax.devices()  # XLA ends a process that starts it with a flag that it does not know
    monkeypatch.setenv("XLA_FLAGS", "--some")
    monkeypatch.setenv("NPROC", "7")
    found = machine_inputs(cpu=True)
    assert found["environment/XLA_FLAGS"] == "--some"
    assert found["device/cpu_threads"] == "7"
    assert {"version/jax", "version/oarjax", "random/jax_enable_x64", "device/kind"} <= found.keys()
    assert "device/cpu_threads" not in machine_inputs(cpu=False)


GRADIENT = """
import hashlib, os, sys
from oarjax.system.devices import cpu_threads, pin_cpu_threads
if sys.argv[1] != "0":
    pin_cpu_threads(int(sys.argv[1]))
import jax, jax.numpy as jnp, numpy as np
from oarjax.models.qwen import QwenConfig, make_policy
from oarjax.models.weights import init_params
cfg = QwenConfig.from_hf({"model_type": "qwen2", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.1})
policy = make_policy(cfg, compute_dtype=jnp.float32, remat="none")
params = init_params(cfg, jax.random.key(0), dtype=jnp.float32)
tokens = jax.random.randint(jax.random.key(1), (16, 32), 0, 64)

def loss(params):
    x = policy.embed(params, tokens)
    x, _ = policy.trunk(params, x, jnp.broadcast_to(jnp.arange(32), (16, 32)), jnp.ones((16, 32), bool))
    return jax.nn.logsumexp(policy.unembed(params, x), -1).sum()

digest = hashlib.sha256()
for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
    digest.update(np.asarray(leaf).tobytes())
print(cpu_threads(), digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_bits_depend_on_the_cores_and_not_on_them_once_the_threads_are_pinned():
    two = sorted(os.sched_getaffinity(0))[:2]

    def gradient(cores, pinned):
        clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")} | {"JAX_PLATFORMS": "cpu"}
        command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-c", GRADIENT, str(pinned)]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    both, one, one_pinned = gradient(two, 0), gradient(two[:1], 0), gradient(two[:1], 2)
    assert [run[0] for run in (both, one, one_pinned)] == ["2", "1", "2"]
    assert one[1] != both[1]  # the policy is wide enough to show it
    assert one_pinned[1] == both[1]
