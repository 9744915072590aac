"""Work counted in HLO text: by hand on a TPU's own way of writing, and against what a CPU's program must execute."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import tiny
from conftest import ROOT

from oarjax.credit.settings import CreditSettings
from oarjax.kernels import grouped_dot
from oarjax.models.qwen_config import Experts
from oarjax.tools.plan.hlo import HloError, Kernel, executed, group_size, parse
from oarjax.tools.plan.programs import LargestShapes
from oarjax.tools.plan.sums import count

LOOP = (ROOT / "tests" / "golden" / "hlo" / "loop.txt").read_text()


def test_a_loop_as_a_tpu_writes_it():
    found = executed(LOOP)
    turns = 5  # i = 0, 2, 4, 6, 8: i + 1 < 11, unrolled by 2
    assert found.flops == turns * 2 * 32 * 16 * 64
    # One gather, in two pieces: three neighbours' worth of 8 x 16 bfloat16. The kept part of a sum: 3/4 of it.
    assert found.collectives == {"all-gather": turns * 3 * 8 * 16 * 2, "reduce-scatter": turns * 0.75 * 32 * 16 * 4}
    assert found.calls == {"all-gather": turns, "reduce-scatter": turns}
    assert found.kernels == {Kernel("splash_mha_fwd", ((8, 16), (16, 64))): turns}


def test_a_gather_that_is_no_piece_of_another_counts_by_itself():
    text = LOOP.replace(', frontend_attributes={chain_id="1"}', "")
    assert executed(text).calls["all-gather"] == 10


def test_loops_that_values_decide_are_asked_for():
    text = LOOP.replace("%start = s32[]{:T(128)} constant(0)", "%start = s32[]{:T(128)} parameter(3)")
    with pytest.raises(HloError, match=r"loop while.1 \(jit\(f\)/while\): its length is not in the text"):
        executed(text)
    asked = []

    def trips(op_name, branching):
        asked.append((op_name, branching))
        return 7

    assert executed(text, trips=trips).flops == 7 * 2 * 32 * 16 * 64
    assert asked == [("jit(f)/while", False)]


@pytest.mark.parametrize(
    ("window", "labels", "left", "right", "out", "meets"),
    [
        ("", "bf_io->bf", "8,16", "16,4", "8,4", 1),
        # A batch of 3 products as a TPU writes it: the window slides over the batch, and only equal places meet.
        (
            "window={size=3 stride=2 pad=2_2 lhs_dilate=3}",
            "b0f_i0o->b0f",
            "8,3,16",
            "16,3,4",
            "8,3,4",
            3,
        ),
        # An ordinary convolution of 5 places with 3 taps and padding at both ends: 2 + 3 + 3 + 3 + 2.
        ("window={size=3 pad=1_1}", "b0f_0io->b0f", "8,5,16", "3,16,4", "8,5,4", 13),
    ],
)
def test_convolutions_count_what_meets(window, labels, left, right, out, meets):
    comma = ", " if window else ""
    text = f"""ENTRY %main (a: f32[{left}], b: f32[{right}]) -> f32[{out}] {{
  %a = f32[{left}]{{1,0}} parameter(0)
  %b = f32[{right}]{{1,0}} parameter(1)
  ROOT %c = f32[{out}]{{1,0}} convolution(%a, %b), {window}{comma}dim_labels={labels}
}}
"""
    assert executed(text).flops == 2 * 8 * 16 * 4 * meets


def test_branches_count_as_often_as_they_run():
    def f(i, x, y):
        return jax.lax.switch(i, [lambda x: (x @ y).sum(), lambda x: x.sum()], x)

    text = jax.jit(f).lower(0, jnp.ones((8, 8)), jnp.ones((8, 8))).compile().as_text()
    assert executed(text).flops == 1024  # the dearer one
    assert executed(text, branches=lambda name, number: [0.25, 0.75]).flops == 256


def test_loops_of_a_program_that_was_compiled_here():
    w = jnp.ones((16, 16))

    def f(x):
        inner = lambda x, _: (jnp.tanh(x @ w), None)  # noqa: E731
        outer = lambda x, _: (jax.lax.scan(inner, x, length=5)[0] @ w, None)  # noqa: E731
        return jax.lax.scan(outer, x, length=7)[0]

    text = jax.jit(f).lower(jnp.ones((4, 16))).compile().as_text()
    assert executed(text).flops == 7 * (5 + 1) * 2 * 4 * 16 * 16


def test_gradients_of_experts_stop_at_the_last_group(monkeypatch):
    """Their loop is asked for by rows and groups; as many blocks are counted as even groups need."""
    rows, held, experts = 40, 4, 16
    monkeypatch.setattr(grouped_dot, "BLOCK", 2)
    pair = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    outer = jax.jit(lambda x, y, sizes: grouped_dot.grouped_outer(x, y, sizes, dtype=jnp.float32))
    text = outer.lower(pair, pair, jax.ShapeDtypeStruct((held,), jnp.int32)).compile().as_text()
    model = replace(tiny.model(), experts=Experts(experts, per_token=2, normalised=True))
    found = count(text, LargestShapes(1, 1, 4, 8, 1, 1), CreditSettings(), model)
    # A quarter of the rows in four groups: 2.5 rows a group are two blocks.
    assert found.flops == held * 2 * (2 * 2 * 8 * 8)


def test_groups_of_a_collective():
    def members(groups):
        text = LOOP.replace("replica_groups={{0,1,2,3}}", f"replica_groups={groups}")
        return group_size(parse(text).computations["all-reduce-scatter.3"]["all-reduce.1"])

    assert members("{{0,4},{1,5}}") == 2
    assert members("[2,8]<=[4,4]T(1,0)") == 8
    assert members("mesh['a'=2,'b'=3,'c'=4] {'a','c'}") == 8
    assert members("mesh['a'=4,'b'=1,'c'=16], device_ids=([16,4]T(1,0)) {'a'}") == 4
    with pytest.raises(HloError, match="replica groups are not understood"):
        members("anything")


def test_text_of_another_kind_is_refused():
    with pytest.raises(HloError, match="ENTRY"):
        executed("module @jit_f {}")
