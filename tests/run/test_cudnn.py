"""Programs with cuDNN's attention, lowered for a GPU on a machine without one."""

import pytest
import tiny
from jax._src.cudnn import fused_attention_stablehlo
from tiny_programs import one_mesh

from oarjax.run.run import Run
from oarjax.run.shapes import ProgramShapes

CALL = "__cudnn$fmha"


@pytest.mark.parametrize(("fused", "learning"), [("auto", {"fused"}), ("never", {"score", "update"})])
def test_programs_lower_for_a_gpu(fused, learning, monkeypatch):
    """Those that learn call its kernels. None does that takes arrays of the mesh of sampling, which JAX refuses."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    settings = {"policy__attention": "cudnn", "policy__compute_dtype": "bfloat16", "update__fused": fused}
    cfg = tiny.config(data__max_prompt=6, rollout__prompt_bucket=6, credit__method="oar_g", **settings)
    run = Run(cfg, model=tiny.model(), mesh=one_mesh(), stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
    calls: dict[str, int] = {}
    for program in ProgramShapes(run).programs():
        lowered = program.jitted.trace(*program.args, **program.static).lower(lowering_platforms=("cuda",))
        calls[program.phase] = calls.get(program.phase, 0) + lowered.as_text().count(CALL)
    assert {phase for phase, count in calls.items() if count} == learning
