"""A teacher: the policy of another folder, laid out as plans expect it, with the policy's own tokens."""

import jax
import jax.numpy as jnp
import pytest
from tiny_programs import one_mesh

from oarjax.config.inputs import PolicyConfig
from oarjax.data.hf_files import CheckpointError
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.data.tasks.forks import write_forks_policy
from oarjax.data.tokenizer import load_tokenizer
from oarjax.errors import ConfigError
from oarjax.run.teacher import check_teacher, read_teacher, teacher_shapes
from oarjax.system.devices import to_device_memory, to_host_memory


def test_a_teacher_lies_as_its_shapes_say_and_reads_the_same_tokens(tmp_path):
    size = {"layers": 1, "heads": 2, "kv_heads": 1, "ffn": 16, "hidden": 8}
    write_builtin_policy(tmp_path / "teacher", seed=0, **size)
    write_forks_policy(tmp_path / "forks", seed=0)
    settings, mesh, path = PolicyConfig(path="unused", compute_dtype="bfloat16"), one_mesh(), str(tmp_path / "teacher")
    params = read_teacher(path, settings, mesh).load(settings, mesh)
    back = to_device_memory(to_host_memory(params))
    for tree in (params, back):
        described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), tree)
        expected = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), teacher_shapes(path, settings, mesh))
        assert described == expected
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype("bfloat16")}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(back)} == {
        x.sharding.memory_kind for x in jax.tree.leaves(params)
    }
    check_teacher(path, load_tokenizer(tmp_path / "teacher"))
    check_teacher(None, load_tokenizer(tmp_path / "teacher"))
    with pytest.raises(ConfigError, match=r"loss.teacher: .*forks has other tokens than the policy"):
        check_teacher(str(tmp_path / "forks"), load_tokenizer(tmp_path / "teacher"))
    with pytest.raises(CheckpointError, match=r"^loss.teacher: .*gone"):
        read_teacher(str(tmp_path / "gone"), settings, mesh)
