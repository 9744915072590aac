"""Bytes of HBM by hand, on programs written as a TPU's compiler writes them."""

import pytest

from oarjax.tools.plan.hlo import executed

PROGRAM = """%sliced (p.0: f32[7,64], p.1: s32[], p.2: f32[64]) -> f32[64] {
  %p.0 = f32[7,64]{1,0:T(8,128)} parameter(0)
  %p.1 = s32[] parameter(1)
  %p.2 = f32[64]{0:T(256)S(1)} parameter(2)
  %slice.1 = f32[1,64]{1,0} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={1,64}
  %bitcast.1 = f32[64]{0} bitcast(%slice.1)
  ROOT %add.1 = f32[64]{0} add(%bitcast.1, %p.2)
}

%cut (c.0: s32[], c.1: f32[7,64]) -> f32[1,64] {
  %c.0 = s32[] parameter(0)
  %c.1 = f32[7,64]{1,0:T(8,128)} parameter(1)
  ROOT %slice.2 = f32[1,64]{1,0} dynamic-slice(%c.1, %c.0), dynamic_slice_sizes={1,64}
}

%nested (n.0: f32[7,64], n.1: s32[]) -> f32[1,64] {
  %n.0 = f32[7,64]{1,0:T(8,128)} parameter(0)
  %n.1 = s32[] parameter(1)
  %fusion.1 = f32[1,64]{1,0} fusion(%n.1, %n.0), kind=kLoop, calls=%cut
  ROOT %negate.1 = f32[1,64]{1,0} negate(%fusion.1)
}

%laid (l.0: f32[7,64]) -> f32[7,64] {
  %l.0 = f32[7,64]{1,0:T(8,128)} parameter(0)
  ROOT %copy.1 = f32[7,64]{1,0:T(4,128)} copy(%l.0)
}

%relaid (r.0: f32[7,64], r.1: s32[]) -> f32[1,64] {
  %r.0 = f32[7,64]{1,0:T(8,128)} parameter(0)
  %r.1 = s32[] parameter(1)
  %fusion.2 = f32[7,64]{1,0:T(4,128)} fusion(%r.0), kind=kLoop, calls=%laid
  ROOT %slice.3 = f32[1,64]{1,0} dynamic-slice(%fusion.2, %r.1), dynamic_slice_sizes={1,64}
}

%written (p.3: f32[7,64], p.4: f32[64], p.5: s32[]) -> f32[7,64] {
  %p.3 = f32[7,64]{1,0} parameter(0)
  %p.4 = f32[64]{0} parameter(1)
  %p.5 = s32[] parameter(2)
  %bitcast.2 = f32[1,64]{1,0} bitcast(%p.4)
  ROOT %update.1 = f32[7,64]{1,0} dynamic-update-slice(%p.3, %bitcast.2, %p.5)
}

%multiplied (p.6: bf16[8,64], p.7: bf16[64,32]) -> f32[8,32] {
  %p.6 = bf16[8,64]{1,0} parameter(0)
  %p.7 = bf16[64,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,32]{1,0} dot(%p.6, %p.7), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[7,64], i: s32[], x: bf16[8,64], w: bf16[64,32]) -> f32[8,32] {
  %a = f32[7,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[8,64]{1,0} parameter(2)
  %w = bf16[64,32]{1,0} parameter(3)
  %near = f32[64]{0:T(256)S(1)} constant({...})
  BODY
}
"""


def passed(*lines):
    found = executed(PROGRAM.replace("BODY", "\n  ".join(lines)))
    return found.passed, found.moved


@pytest.mark.parametrize(
    ("line", "bytes_"),
    [
        ("ROOT %r = f32[64]{0} fusion(%a, %i, %near), kind=kLoop, calls=%sliced", 64 * 4 * 2 + 4),  # a row; i; result
        ("ROOT %r = f32[64]{0:T(256)S(1)} fusion(%a, %i, %near), kind=kLoop, calls=%sliced", 64 * 4 + 4),
        ("ROOT %r = f32[1,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%nested", 64 * 4 * 2 + 4),  # a row of a stack
        ("ROOT %r = f32[1,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%relaid", 64 * 4 * 2 + 4),  # in another layout
        ("ROOT %r = f32[7,64]{1,0} fusion(%a, %near, %i), kind=kLoop, calls=%written", 64 * 4 * 2 + 4),  # in place
        ("ROOT %r = f32[7,64]{0,1} copy(%a)", 2 * 7 * 64 * 4),  # another layout
        ("ROOT %r = (f32[7,64]{1,0:S(1)}, f32[7,64]{1,0}, u32[]{:S(2)}) copy-start(%a)", 7 * 64 * 4),
        ("ROOT %r = ((f32[7,64]{1,0}), f32[2,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={}", 2 * 64 * 4),
        ("ROOT %r = ((f32[7,64]{1,0}), f32[2,64]{1,0}, s32[]{:S(2)}) slice-start(%a), slice={}", 2 * 2 * 64 * 4),
        ("ROOT %r = ((f32[64]{0:S(1)}), f32[2]{0:S(1)}, s32[]{:S(2)}) slice-start(%near), slice={}", 0),
        ("ROOT %r = f32[64,7]{1,0} bitcast(%a)", 0),
    ],
)
def test_what_instructions_without_products_move(line, bytes_):
    assert passed(line) == (bytes_, 0)


def test_products_are_counted_apart_and_collectives_left_to_the_links():
    product = "ROOT %r = f32[8,32]{1,0} fusion(%x, %w), kind=kOutput, calls=%multiplied"
    gathered = "%g = f32[28,64]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}"
    assert passed(gathered, product) == (0, 2 * 8 * 64 + 2 * 64 * 32 + 4 * 8 * 32)
    found = executed(PROGRAM.replace("BODY", f"{gathered}\n  {product}"))
    assert found.groups == {4: 3 * 7 * 64 * 4}
    assert found.group_calls == {4: 1}


@pytest.mark.parametrize(("number", "steps", "size"), [("bf16", "", 2 * 2 * 128), ("s8", ", %s", 2 * 128 + 2 * 2)])
def test_a_decode_kernel_reads_slots_of_the_rows_of_one_layer(number, steps, size):
    """Of 4 rows of 28 layers of a cache of 8 rows, prompts whole and the rows' own as far as it is said."""
    text = PROGRAM.replace(
        "%near =",
        f"""%q = bf16[2,4,7,128]{{3,2,1,0}} parameter(4)
  %k = {number}[28,2,8,128,1024]{{4,3,2,1,0}} parameter(5)
  %v = {number}[28,2,8,1024,128]{{4,3,2,1,0}} parameter(6)
  %s = bf16[28,2,8,2,1024]{{4,3,2,1,0}} parameter(7)
  %near =""",
    )
    line = f'f32[2,4,7,128]{{3,2,1,0:S(1)}} custom-call(%i, %q, %k, %v{steps}), custom_call_target="tpu_custom_call"'
    own, prompts = (text.replace("BODY", f"ROOT %decode_attention_{part}.3 = {line}") for part in ("rows", "prompts"))
    small, slot = 4 + 2 * 2 * 4 * 7 * 128, 2 * 4 * size
    for program, slots, read in ((own, 300, 300), (own, None, 1024), (prompts, 300, 1024)):
        found = executed(program, slots=slots)
        assert found.moved == found.streamed == pytest.approx(small + read * slot)
        assert found.passed == 0


@pytest.mark.parametrize(("keys", "pairs", "times"), [(1024, 3, 3 / 2), (512, 2, 1 / 4)])
def test_a_tangents_kernel_reads_keys_per_block_of_queries_and_what_draws_share_for_each(keys, pairs, times):
    """8 heads of 2 key heads, 3 draws; a single block of keys stays on the chip for all heads that read it."""
    q, k, row = "bf16[2,8,1024,128]", f"bf16[2,2,{keys},128]", f"s32[2,1,{keys}]"
    shapes = f"s32[3,{pairs}]", q, k, k, "s32[2,1,1024]", row, q, *(f"bf16[3,{x[5:]}" for x in (q, k, k))
    lines = "\n  ".join(f"%x{n} = {shape} parameter({n + 4})" for n, shape in enumerate(shapes))
    names = ", ".join(f"%x{n}" for n in range(len(shapes)))
    call = f'ROOT %vmap_attention_tangent_.1 = {shapes[7]} custom-call({names}), custom_call_target="tpu_custom_call"'
    found = executed(PROGRAM.replace("BODY", f"{lines}\n  {call}"))
    of_queries, of_keys = 2 * 3 * 2 * 8 * 1024 * 128, 2 * 3 * 2 * 8 * 1024 * 128
    assert found.moved == 4 * of_queries + 4 * times * of_keys * (1 if keys > 512 else 1 / 2) + 4 * 2 * (1024 + keys)


def test_a_delta_nets_step_reads_and_writes_the_states_of_one_layer():
    text = PROGRAM.replace("%near =", "%s = f32[24,4,8,128,128]{4,3,2,1,0} parameter(4)\n  %near =")
    line = "ROOT %delta_step.1 = (f32[4,8,128]{2,1,0}, f32[24,4,8,128,128]{4,3,2,1,0}) custom-call(%i, %s), "
    found = executed(text.replace("BODY", line + 'custom_call_target="tpu_custom_call"'))
    assert found.moved == found.streamed == pytest.approx(4 + 4 * 4 * 8 * 128 + 2 * 4 * 4 * 8 * 128 * 128)
    assert (found.passed, found.flops) == (0, 0)


def test_cycles_are_the_compilers_for_whole_fusions():
    """What an instruction within a fusion would take alone does not count, nor an estimate that is not there."""
    within = '%add.1 = f32[64]{0} add(%bitcast.1, %p.2), backend_config={"window_config":{"estimated_cycles":"50"}}'
    inside = PROGRAM.replace("%add.1 = f32[64]{0} add(%bitcast.1, %p.2)", within)
    costs = 'backend_config={"window_config":{"estimated_cycles":"%s"}}'
    fusion = "%r = f32[64]{0} fusion(%a, %i, %near), kind=kLoop, calls=%sliced, " + costs % 120
    for unknown in (-1, 2**63 - 1):
        last = "ROOT %s = f32[7,64]{0,1} copy(%a), " + costs % unknown
        found = executed(inside.replace("BODY", f"{fusion}\n  {last}"))
        assert (found.cycles, found.operations) == (120, {"fusion": 120})


def test_gathers_whose_cycles_are_not_stated_count_their_bytes():
    gathers = PROGRAM.replace("ROOT %add.1 = f32[64]{0} add", "ROOT %add.1 = f32[64]{0} gather")
    line = "ROOT %r = f32[64]{0} fusion(%a, %i, %near), kind=kCustom, calls=%sliced"
    found = executed(gathers.replace("BODY", line))
    assert (found.cycles, found.streamed) == (0, found.passed)
    assert found.passed > 0
    stated = line + ', backend_config={"window_config":{"estimated_cycles":"120"}}'
    assert executed(gathers.replace("BODY", stated)).streamed == 0
    assert executed(PROGRAM.replace("BODY", line)).streamed == 0
