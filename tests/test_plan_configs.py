"""The configs of real runs: sizes that fit their slices, headers that say what is known."""

from __future__ import annotations

import math
import re

import pytest
import yaml
from conftest import ROOT

from oarjax.cli.plan_programs import shapes_of
from oarjax.config import load_config
from oarjax.host.architecture import architecture_fields
from oarjax.host.topology import find_slice
from oarjax.models.qwen import QwenConfig

SHIPPED = sorted(p for p in (ROOT / "configs").glob("*.yaml") if "\nplan:" in p.read_text())


def test_there_are_configs_for_real_runs():
    policies = {yaml.safe_load(p.read_text())["policy"]["path"].removesuffix("-Instruct") for p in SHIPPED}
    wanted = {"2.5-0.5B", "2.5-1.5B", "2.5-7B", "2.5-Math-7B", "2.5-32B", "3-4B", "3-8B"}
    assert policies == {f"Qwen/Qwen{name}" for name in wanted}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_config_and_its_plan(path):
    cfg, header = load_config(path), re.match(r"(?:#.*\n)+", path.read_text())
    where = find_slice(cfg.plan.topology)
    fixed = math.prod(n for n in cfg.mesh.model_dump().values() if n != -1)
    assert fixed == where.chips or (cfg.mesh.data == -1 and where.chips % fixed == 0)
    model = QwenConfig.from_hf(architecture_fields(cfg.policy.path))
    assert cfg.data.max_prompt + cfg.rollout.max_new <= model.max_position_embeddings
    if where.chips > 8:
        assert (cfg.rollout.prompts, cfg.rollout.group_size) == (128, 8)
    assert shapes_of(cfg).microbatches * cfg.update.microbatch == cfg.rollout.prompts * cfg.rollout.group_size
    assert header is not None
    for part in (f"oarjax train configs/{path.name}", f"oarjax plan configs/{path.name}", "measured"):
        assert part in header[0], f"{path.name}: its header does not say {part!r}"
