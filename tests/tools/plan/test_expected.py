"""The step under expected lengths, from the committed plans."""

import json

import pytest
from conftest import ROOT

from oarjax.config.loading import load_config
from oarjax.errors import ConfigError
from oarjax.models.qwen_config import QwenConfig
from oarjax.tools.plan.expected import expected_step, survival_of
from oarjax.tools.plan.published_sizes import PUBLISHED
from oarjax.tools.plan.table import describe

PLANS = {p["config"]: p for p in json.loads((ROOT / "docs/data/plans.json").read_text())}


def expected(name, *overrides):
    plan = PLANS[f"configs/{name}.yaml"]
    cfg = load_config(ROOT / plan["config"], list(overrides))
    survival = survival_of(cfg.plan.lengths, limit=cfg.rollout.max_new)
    assert survival is not None
    model = QwenConfig.from_hf(PUBLISHED[plan["policy"]])
    step = expected_step(cfg, model, plan, survival, tensor=cfg.rollout.tensor or plan["mesh"]["tensor"])
    return plan, step


def test_a_lognormal_of_median_400_shortens_a_7b_step():
    plan, step = expected("qwen2.5-7b_v5e-64", "plan.lengths.mean=479")
    assert 400 < step["mean"] < 479  # cut at 1,024
    assert 1000 < step["decode_steps"] <= 1024  # the longest of 1,024 rows
    assert step["padding_share"] < 0.6 * step["padding_share_unsorted"]
    worst = {p["name"]: p["seconds_in_turn"] for p in plan["phases"]}
    assert step["seconds"]["sample"] < 0.9 * worst["sample"]  # weights are read at every step all the same
    assert step["seconds"]["fused"] < 0.9 * worst["fused"]  # and sent between chips per microbatch
    assert step["seconds"]["reshard"] == worst["reshard"]
    assert any("decode steps" in line for line in describe(plan | {"lengths": step}))


def test_completions_that_all_reach_the_limit_are_the_plan_itself(tmp_path):
    lines = json.dumps({"iteration": 1, "tokens": ["x"] * 1024}) + "\n"
    (tmp_path / "completions.jsonl").write_text(lines)
    plan, step = expected("qwen2.5-1.5b_v5e-8", f"plan.lengths.completions={tmp_path}/completions.jsonl")
    assert (step["decode_steps"], step["occupancy"]) == (1024, 1)
    # The plan reads one slot more: the last token is never read back.
    assert sum(step["seconds"].values()) == pytest.approx(plan["step"]["seconds_in_turn"], rel=1e-3)


def test_a_file_without_completions_is_refused(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no completions"):
        expected("qwen2.5-7b_v5e-64", f"plan.lengths.completions={tmp_path}/none.jsonl")


def test_lengths_have_one_source():
    with pytest.raises(ConfigError, match="either mean"):
        expected("qwen2.5-7b_v5e-64", "plan.lengths.sigma=0.5")
