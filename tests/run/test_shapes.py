"""The programs that are compiled ahead are the programs that a run calls."""

import logging

import jax
import jax.numpy as jnp
import pytest
import tiny
from tiny_programs import built

from oarjax.environments.pool import Step
from oarjax.models.lora import all_params
from oarjax.models.weights import init_params, parameter_count
from oarjax.rollout import row_schedule, source
from oarjax.run.compile_ahead import in_order
from oarjax.run.shapes import ProgramShapes, bytes_per_device
from oarjax.sources.episodes import EpisodeSource
from oarjax.step.iteration import iterate


class Asks:
    """An environment that never ends an episode."""

    def advance(self, episodes):
        return [Step("7") for _ in episodes]

    def finish(self, episodes):
        return [Step(None) for _ in episodes]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"credit__method": "entropy", "rollout__environment": {"name": "builtin:guess", "turns": 3}},
        {"loss__kl_beta": 0.1, "update__epochs": 2, "lora__rank": 2},
    ],
)
def test_an_iteration_compiles_nothing_that_was_compiled_before(changes, caplog, monkeypatch):
    """Neither of the scores and updates of two lengths, nor of rollouts and evaluations of fewer and fewer rows."""
    monkeypatch.setattr(source, "SHORT", 2)  # rows that go on have two widths
    monkeypatch.setattr(row_schedule, "SHORT", 2)  # rows that are done are dropped
    plays = "rollout__environment" in changes
    b = built(**changes, rollout__completion_bucket=5, data__eval={"source": "unused"}, eval__batch=4)
    listed = [*in_order(ProgramShapes(b), evaluates_first=False), ProgramShapes(b).reshard_program()]
    assert len({program.static["bucket"] for program in listed if "bucket" in program.static}) == 2
    for program in listed:
        program.lower().compile()
    start = init_params(tiny.model(), jax.random.key(3), dtype=jnp.float32)
    start = jax.device_put(start, b.layout.params)
    state = b.new_state(start)
    host = tiny.host()._replace(place=b.place)
    if plays:
        host = host._replace(
            source=lambda sampler: EpisodeSource(sampler, Asks(), str, lambda said: [7], lambda problem: {}, most=3)
        )
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for iteration in (1, 2):
            state, done = iterate(state, None, iteration, steps=b.steps, host=host, cfg=b.cfg)
        b.steps.evaluate(
            b.steps.rollout_params(all_params(state)), b.place(tiny.prompts(), "prompts"), jax.random.key(1)
        )
    assert done.metrics["rows_used"] > 0
    assert done.metrics.get("turns", 1) > 1 or not plays
    compiled = [r.getMessage() for r in caplog.records if "XLA compilation of" in r.getMessage()]
    names = {program.jitted.__name__ for program in listed}
    assert {"prepare", "_prefill_rows", "_decode_rows", "take_rows", "move_rows", "finish", "apply"} < names
    assert not [name for name in names for message in compiled if f"jit({name})" in message], compiled


def test_an_update_reuses_the_memory_of_its_state():
    b = built()
    program = ProgramShapes(b).apply_program()
    state = bytes_per_device(program.args[0])
    assert state == 3 * 4 * parameter_count(tiny.model()) + 3 * 4  # params, two moments, three counters
    memory = program.lower().compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * state


def test_an_update_of_adapters_reuses_the_memory_of_the_frozen_weights():
    b = built(lora__rank=2, loss__kl_beta=0.1)
    program = ProgramShapes(b).apply_program()
    state = bytes_per_device(program.args[0])
    assert state > 4 * parameter_count(tiny.model())
    assert program.lower().compile().memory_analysis().alias_size_in_bytes >= 0.99 * state


def test_what_is_resident():
    weights = 4 * parameter_count(tiny.model())
    trained = {"params": weights, "optimizer": 2 * weights + 2 * 4}
    assert ProgramShapes(built()).resident("credit") == trained
    assert ProgramShapes(built()).resident("sample") == {**trained, "rollout": weights}
    assert ProgramShapes(built(optim__moments="bfloat16")).resident("update")["optimizer"] == weights + 2 * 4
    assert ProgramShapes(built(loss__kl_beta=0.1)).resident("score")["reference"] == weights
    lora = ProgramShapes(built(lora__rank=2, loss__kl_beta=0.1, policy__compute_dtype="bfloat16")).resident("score")
    assert lora["frozen"] == weights // 2
    assert lora["optimizer"] == 2 * lora["params"] + 2 * 4
    assert "reference" not in lora
