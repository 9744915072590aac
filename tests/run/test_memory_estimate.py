"""The table of memory at a run's start, and a reference policy that waits in the hosts' memory."""

import io
import json

import jax
import numpy as np
import pytest
import tiny
from rich.console import Console
from tiny_programs import built

from oarjax.errors import ConfigError
from oarjax.models.weights import parameter_count
from oarjax.rollout import row_schedule
from oarjax.run import memory as memory_estimate
from oarjax.run.memory import memory_facts, report_memory
from oarjax.run.shapes import ProgramShapes
from oarjax.step.iteration import iterate
from oarjax.system.devices import DeviceError, to_host_memory


def printed():
    return Console(file=io.StringIO(), width=120)


@pytest.mark.slow
def test_every_phase_is_compiled_and_told_with_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(row_schedule, "SHORT", 2)  # rows that are done are dropped, and the others move
    console, weights = printed(), 4 * parameter_count(tiny.model())
    everything = built(loss__kl_beta=0.1, data__eval={"source": "unused"}, eval__batch=4, rollout__cache_bucket=5)
    found = {each.title: each for each in report_memory(ProgramShapes(everything), tmp_path, console)}
    sampling = {
        "sample": ["prefill", "decode 16 rows, 9 slots", "take 8 of 4 prompts", "decode 8 rows, 9 slots", "move rows"],
        "evaluate": ["prefill", "decode 4 rows, 9 slots"],
    }
    titles = [f"{phase}: {name}" for phase, names in sampling.items() for name in names]
    assert list(found) == ["reshard", *titles, "score", "credit", "update", "apply"]
    a_slot = 2 * 2 * 8 * 4  # keys and values of two layers, one key head of 8 numbers
    moving = found["sample: move rows"]
    rows, prompts = 16 * 9 * a_slot, 4 * 6 * a_slot
    assert moving.peak >= sum(moving.resident.values()) + rows + prompts
    assert moving.peak < sum(moving.resident.values()) + 2 * rows + prompts  # in the same memory
    for each in found.values():
        assert each.peak >= sum(each.resident.values())  # whether the program takes them or not
        assert each.resident["optimizer"] == 2 * weights + 2 * 4
    assert found["update"].peak > 5 * weights  # params, moments, reference and the gradients
    text = console.file.getvalue()
    assert "will not fit" not in text
    assert "GiB per device, estimated by the compiler" in text
    tree = json.loads((tmp_path / "memory.json").read_text())
    assert tree["phases"][-1]["resident"]["reference"] == weights
    top = max(found.values(), key=lambda each: each.peak).title
    assert f"phase {top}" in memory_facts(tmp_path)["peak memory"]
    assert memory_facts(tmp_path / "nowhere") == {}

    console = printed()
    monkeypatch.setattr(memory_estimate, "memory_limit", lambda device: found["update"].peak - 1)
    report_memory(ProgramShapes(built(loss__kl_beta=0.1)), tmp_path, console)
    said = " ".join(console.file.getvalue().split())
    assert "phase update needs" in said
    assert "and will not fit; try a lower update.microbatch, a lower policy.head_chunk" in said
    assert "phase credit needs" not in said


def test_a_program_that_the_compiler_refuses_is_told_with_the_remedy():
    class Refused:
        def lower(self, *_):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM, needs 27.91G of 15.75G")

    b = ProgramShapes(built())
    with pytest.raises(DeviceError, match=r"phase sample does not fit: RESOURCE_EXHAUSTED.*27\.91G.*lower rollout\.p"):
        memory_estimate.phase_memory(b, b.sampling_programs("sample")[0]._replace(jitted=Refused()))


def test_a_reference_in_host_memory_gives_the_same_numbers_and_is_on_the_device_only_to_score():
    cfg = tiny.config(loss__kl_beta=0.1, loss__reference="host")
    ended = []
    for host in (False, True):
        _, steps, state = tiny.build(cfg)
        reference = jax.tree.map(lambda x: x * 1.01, state.params)
        where = jax.tree.map(lambda x: x.sharding, reference)
        world, kinds = tiny.host(), []
        if host:
            reference = to_host_memory(reference)

            def load(tree, where=where, kinds=kinds):
                kinds += [x.sharding.memory_kind for x in jax.tree.leaves(tree)]
                loaded = jax.device_put(tree, where)
                kinds += [x.sharding.memory_kind for x in jax.tree.leaves(loaded)]
                return loaded

            world = world._replace(load_reference=load)
        state, done = iterate(state, reference, 1, steps=steps, host=world, cfg=cfg)
        ended.append((state.params, done.metrics))
        if host:
            arrays = len(kinds) // 2
            assert kinds == ["pinned_host"] * arrays + ["device"] * arrays
            assert {x.sharding.memory_kind for x in jax.tree.leaves(reference)} == {"pinned_host"}
    (one, a), (two, b) = ended
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert a == b
    assert a["kl"] > 0


def test_a_reference_that_is_not_there_waits_nowhere():
    with pytest.raises(ConfigError, match=r"loss\.reference: host needs a reference, but loss\.kl_beta is 0"):
        tiny.config(loss__reference="host")
    with pytest.raises(ConfigError, match=r"loss\.reference: host has no effect with LoRA"):
        tiny.config(loss__reference="host", loss__kl_beta=0.1, lora__rank=2)
