import dataclasses
import json

import jax
import numpy as np
import pytest
import unsound
from safetensors.numpy import save_file

from oarjax.storage import bad_batches
from oarjax.storage.bad_batches import (
    FOLDER,
    BadBatchError,
    Header,
    read_bad_batch,
    read_params,
    write_bad_batch,
    write_params,
)
from oarjax.types import Hints, Privileged


def header(number=12, *, kind="iteration", params=None) -> Header:
    return Header(
        kind=kind,
        number=number,
        minibatch=1,
        step=11,
        wrong={"update": ["loss"]},
        probe="last",
        key=[0, 3],
        key_impl="threefry2x32",
        config={"run_dir": "somewhere"},
        config_file="somewhere/config.yaml",
        policy="policy",
        compute_dtype="float32",
        platform="cpu",
        versions={"oarjax": "0.1.0", "jax": "0.10.2"},
        params=params,
    )


@pytest.mark.parametrize("scored", [True, False])
def test_a_batch_comes_back_as_it_was(tmp_path, scored):
    given = unsound.evidence(scored=scored)
    path = write_bad_batch(tmp_path, header(), given, keep=3)
    assert path.name == "iteration-000012.safetensors"
    found, evidence = read_bad_batch(path)
    assert found == header()
    assert jax.tree.structure(evidence) == jax.tree.structure(given)
    for a, b in zip(jax.tree.leaves(evidence), jax.tree.leaves(given)):
        assert a.dtype == np.asarray(b).dtype
        assert a.shape == np.shape(b)
        np.testing.assert_array_equal(a, b)  # NaN is equal to NaN here
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing half-written beside it


def test_what_importance_was_measured_on_comes_back(tmp_path):
    plain = unsound.evidence()
    given = dataclasses.replace(plain, probed=(plain.rollout, plain.span))
    _, evidence = read_bad_batch(write_bad_batch(tmp_path, header(), given, keep=1))
    assert evidence.probed is not None
    np.testing.assert_array_equal(evidence.probed[0].tokens, plain.rollout.tokens)
    np.testing.assert_array_equal(evidence.probed[1].answer, plain.span.answer)


def test_signals_hints_and_choices_of_experts_come_back(tmp_path):
    plain = unsound.evidence()
    experts = np.arange(4, dtype=np.int8).reshape(2, 2) + np.zeros((*plain.rollout.tokens.shape, 1, 1), np.int8)
    values = np.asarray(plain.scores.old_logps)
    measured = {"entropies": values, "hidden": np.stack([values, values, values], -1)}
    teacher = Privileged(np.ones((2, 2, 9), np.int32), np.ones((2, 2, 9), bool))
    hints = Hints(values, values.astype(np.int32), teacher)
    changes = {"scores": dataclasses.replace(plain.scores, measured=measured), "hints": hints}
    given = dataclasses.replace(plain, rollout=dataclasses.replace(plain.rollout, experts=experts), **changes)
    _, evidence = read_bad_batch(write_bad_batch(tmp_path, header(), given, keep=1))
    returned = evidence.scores.measured, evidence.hints, evidence.rollout.experts
    jax.tree.map(np.testing.assert_array_equal, returned, (measured, hints, experts))


def test_params_come_back(tmp_path):
    params = {"embed": {"embedding": np.arange(6, dtype=np.float32).reshape(2, 3)}, "norm": {"scale": np.ones(3)}}
    name = write_params(tmp_path, {"w": np.zeros(2)}, kind="sft", step=11)
    assert write_params(tmp_path, params, kind="sft", step=11) == name == "params-sft-000011.safetensors"
    found = read_params(tmp_path / name)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_arrays_that_are_not_contiguous_are_written_as_they_read(tmp_path):
    params = {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    np.testing.assert_array_equal(
        read_params(tmp_path / write_params(tmp_path, params, kind="sft", step=0))["w"], params["w"]
    )


def test_the_newest_are_kept_and_the_params_that_they_need(tmp_path):
    for number in (3, 20, 5):
        params = write_params(tmp_path, {"w": np.ones(2)}, kind="iteration", step=number)
        write_bad_batch(tmp_path, header(number, params=params), unsound.evidence(), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iteration-000005.safetensors",
        "iteration-000020.safetensors",
        "params-iteration-000005.safetensors",
        "params-iteration-000020.safetensors",
    ]
    write_bad_batch(tmp_path, header(2), unsound.evidence(), keep=2)  # a run that went back: the newest all the same
    write_bad_batch(tmp_path, header(900, kind="sft"), unsound.evidence(), keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iteration-000002.safetensors",
        "iteration-000020.safetensors",
        "params-iteration-000020.safetensors",
        "sft-000900.safetensors",
    ]
    (tmp_path / "iteration-000020.safetensors").write_bytes(b"damaged")
    write_bad_batch(tmp_path, header(21), unsound.evidence(), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iteration-000020.safetensors",
        "iteration-000021.safetensors",
    ]


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path, monkeypatch):
    def full(arrays, path, metadata):
        path.write_bytes(b"half")
        raise bad_batches.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(bad_batches, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device .*iteration-000012.safetensors"):
        write_bad_batch(tmp_path, header(), unsound.evidence(), keep=2)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_replayed_say_why(tmp_path):
    with pytest.raises(
        BadBatchError, match=r"nothing.safetensors: no such file; a run keeps its bad batches in RUN_FOLDER/bad_b"
    ):
        read_bad_batch(tmp_path / "nothing.safetensors")
    path = write_bad_batch(tmp_path, header(), unsound.evidence(), keep=3)
    with pytest.raises(BadBatchError, match=r"no such file; .* has iteration-000012.safetensors"):
        read_bad_batch(tmp_path / "iteration-000013.safetensors")
    with pytest.raises(BadBatchError, match=r"a folder, not a bad batch; .* has iteration-000012.safetensors"):
        read_bad_batch(tmp_path)
    write_bad_batch(tmp_path / "run" / FOLDER, header(), unsound.evidence(), keep=3)
    with pytest.raises(BadBatchError, match=r"run: a folder, .*run/bad_batches has iteration-000012.safetensors"):
        read_bad_batch(tmp_path / "run")
    other = tmp_path / "model.safetensors"
    save_file({"w": np.ones(2)}, other)
    with pytest.raises(BadBatchError, match=r"is a safetensors file, but not a batch .*; pass RUN_FOLDER/bad"):
        read_bad_batch(other)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadBatchError, match=r"is not a whole safetensors file .* it cannot be replayed"):
        read_bad_batch(path)
    fields = dataclasses.asdict(header()) | {"format": 4, "versions": {"oarjax": "9.0"}}
    save_file({"w": np.ones(2)}, other, metadata={bad_batches.METADATA: json.dumps(fields)})
    with pytest.raises(BadBatchError, match=r"format 4, expected 3; replay it with the version .* \(oarjax 9.0\)"):
        read_bad_batch(other)
