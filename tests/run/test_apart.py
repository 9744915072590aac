"""Devices of their own draw while the others learn: the same schedule of policies, and the same end after a kill."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from conftest import json_lines

from oarjax.config.inputs import MeshConfig
from oarjax.config.loading import parse_config
from oarjax.errors import ConfigError
from oarjax.rollout.source import Batch, EndedRows
from oarjax.run.apart import Apart, ApartSource, check_copies, learning_mesh
from oarjax.system.devices import DeviceError
from oarjax.types import PromptBatch

PROGRAM = """
import json, sys
from pathlib import Path
import jax, numpy as np
import unsound
from oarjax.config.loading import parse_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.report.files import read_metrics
from oarjax.run.run import Run, open_run
from oarjax.storage.folder import claim, locked
from oarjax.system.mesh import make_mesh
from oarjax.training import trainer
from oarjax.training.start import prepare

class Killed(Exception):
    pass

home = Path(sys.argv[1])
policy = write_builtin_policy(home / "policy", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
tree = unsound.MICRO | {"run_dir": str(home / "none"), "policy": {"path": str(policy)}, "iterations": 4}
tree |= {"checkpoint": {"every": 2, "keep": 2}, "report": unsound.MICRO["report"] | {"memory": "on"}}
tree |= {"update": tree["update"] | {"lag": 1}, "lora": {"rank": 2}, "eval": {"every": 2, "batch": 4}}
data = tree["data"]["train"] | {"limit": 4}
tree["data"] = tree["data"] | {"mixture": [data | {"arithmetic": {"terms": 3}}], "eval": data | {"split": "eval"}}
tree["rollout"] = tree["rollout"] | {"tensor": 2}
apart = parse_config(tree | {"mesh": {"fsdp": 2}, "rollout": tree["rollout"] | {"devices": 2}})
run, first = open_run(apart), jax.devices()[:2]
assert run.mesh.devices.flatten().tolist() == first and "rollouts on 2 more" in run.facts()["mesh"]
one = Run(parse_config(tree), mesh=make_mesh(slice=1, data=1, fsdp=2, tensor=1, devices=first))
iterate, left = trainer.iterate, [0]

def counted(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0:
        raise Killed
    return iterate(*args, **kwargs)

trainer.iterate = counted

def attempt(run, folder, kill=0):
    left[0] = kill
    with locked(folder):
        claim(folder, run.cfg)
        try:
            params = trainer.train(run, grader, prepare(run, run.load(), None, folder), folder).params
        except Killed:
            return None
    lines = [{n: v for n, v in line.items() if not n.startswith(("seconds", "time", "tokens_per", "mfu", "sync"))}
             for line in read_metrics(folder / "metrics.jsonl")]
    return [lines, *(np.asarray(x).tolist() for x in jax.tree.leaves(params))]

with run.grader() as grader:
    whole = attempt(run, home / "whole")
    assert attempt(run, home / "killed", 4) is None
    again = attempt(run, home / "killed")
    sent = [line.get("sync_seconds", 0) > 0 for line in read_metrics(home / "whole" / "metrics.jsonl")]
    together = attempt(one, home / "one")
print(json.dumps({"lags": [line["lag"] for line in whole[0]], "resumed": again == whole, "sent": sent,
                  "as_in_turn": together == whole, "programs": run.apart.sample.decode_programs,
                  "learner_drew": run.steps.sample.decode_programs,
                  "resident": {each["phase"]: sorted(each["resident"]) for each in
                               json.loads((home / "whole" / "memory.json").read_text())["phases"]}}))
"""


@pytest.mark.slow
def test_a_run_with_devices_apart_ends_as_one_without_whatever_happens(tmp_path):
    """Two devices draw with adapters merged, two learn and evaluate, from two data sets."""
    (found,) = json_lines(PROGRAM, str(tmp_path), devices=4, quick=True)
    assert found["lags"] == [0, 1, 1, 1]
    assert found["resumed"]
    assert found["as_in_turn"]  # on two devices in turn, with the same programs
    assert found["learner_drew"] == 0 < found["programs"]
    assert found["sent"][0]
    assert found["resident"]["sample"] == ["rollout"]


def config(**fields):
    tree = {"run_dir": "r", "policy": {"path": "p"}, "data": {"train": {"source": "s"}}}
    return parse_config(tree | {"update": {"lag": 1}, "rollout": {"devices": 2}} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"update": {"lag": 0}}, "without a lag they would draw while the others wait; set update.lag=1"),
        ({"rollout": {"devices": 2, "engine": {"url": "http://e", "weights": "w"}}}, "rollout.engine draws the roll"),
        ({"rollout": {"devices": 2, "from": ["a.jsonl"]}}, "rollout.from draws the rollouts; set one of them"),
    ],
)
def test_devices_that_would_draw_nothing_are_refused(fields, message):
    with pytest.raises(ConfigError, match=f"(?s)rollout.devices: 2, and .*{message}"):
        config(**fields)


def test_devices_that_cannot_be_divided_are_refused(monkeypatch):
    with pytest.raises(DeviceError, match="1, and there are 1 devices, of which one at"):
        learning_mesh(MeshConfig(), 1)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * 4)
    with pytest.raises(DeviceError, match=r"(?s)the 3 devices here.*rollout.devices: 1 others draw"):
        learning_mesh(MeshConfig(fsdp=2), 1)
    with pytest.raises(DeviceError, match=r"a multiple of rollout.tensor x mesh.expert = 4, .* got 2"):
        check_copies(2, 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(DeviceError, match="1, in a run of 2 processes"):
        learning_mesh(MeshConfig(), 1)


def test_weights_are_sent_once_and_a_draw_that_is_cancelled_ends_at_the_next_rows():
    """Nothing of the training params is read after ``ready``, which may be called from another thread's side."""
    where = jax.sharding.NamedSharding(learning_mesh(MeshConfig(), None), jax.sharding.PartitionSpec())
    prepared, seen = [], []

    arrays: Any = np.zeros((1, 4), np.int32), np.ones(1, np.int32), np.ones(1, bool)

    def sample(params, prompts, key, report):
        seen.append(params)
        for _ in range(2000):
            report(EndedRows(np.zeros(1, int), *arrays))
        raise AssertionError("it went on")

    def prepare(params):
        prepared.append(params)
        return params + 1

    layout: Any = SimpleNamespace(rows=where, params=where)
    source = ApartSource(Apart(layout, sample), prepare, jax.device_get)  # type: ignore[arg-type]
    source.sync(np.float32(1), 0)
    source.ready()
    source.ready()
    assert (prepared, source._params) == ([1], None)
    prompts = PromptBatch(np.array([[5]], np.int32), np.ones((1, 1), bool), np.zeros(1, np.int32))  # type: ignore[arg-type]
    batch = Batch(prompts, jax.random.key(0), 1, 0, group_size=1, max_new=4)
    with pytest.raises(InterruptedError, match="the run stopped while rows were drawn"):
        source.draw(batch, lambda rows: source.cancel())
    assert (float(seen[0]), len(prepared)) == (2.0, 1)
