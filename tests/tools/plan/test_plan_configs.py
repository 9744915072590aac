"""The configs of real runs: sizes that fit their slices, headers that say what is known, and a plan on the page."""

from __future__ import annotations

import json
import math
import re
import runpy

import pytest
import yaml
from conftest import ROOT

from oarjax.config.loading import load_config
from oarjax.models.qwen_config import QwenConfig
from oarjax.tools.plan.architecture import architecture_fields
from oarjax.tools.plan.programs import shapes_of
from oarjax.tools.plan.sums import padding_of_groups, read_bytes
from oarjax.tools.plan.table import commits_table, headline, markdown
from oarjax.tools.plan.topology import find_slice

PLANS = json.loads((ROOT / "docs/data/plans.json").read_text())
ANOTHERS = {"paper_qwen2.5-7b_v5e-64.yaml"}
"""Configs whose header says that their programs are another's."""
SHIPPED = sorted(p for p in (ROOT / "configs").glob("*.yaml") if "\nplan:" in p.read_text() and p.name not in ANOTHERS)


def test_there_are_configs_for_real_runs():
    assert {load_config(p).lora.rank for p in SHIPPED} == {0, 32}
    assert {load_config(p).optim.moments for p in SHIPPED} == {"float32", "bfloat16"}
    policies = {yaml.safe_load(p.read_text())["policy"]["path"].removesuffix("-Instruct") for p in SHIPPED}
    dense = {"2.5-0.5B", "2.5-1.5B", "2.5-7B", "2.5-Math-7B", "2.5-32B", "3-4B", "3-8B", "3.5-9B"}
    assert policies == {f"Qwen/Qwen{name}" for name in dense | {"3-30B-A3B", "3.6-35B-A3B"}}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_config_and_its_plan(path):
    cfg, header = load_config(path), re.match(r"(?:#.*\n)+", path.read_text())
    where = find_slice(cfg.plan.topology or "")
    fixed = math.prod(n for n in cfg.mesh.model_dump().values() if n != -1)
    assert fixed == where.chips or (cfg.mesh.data == -1 and where.chips % fixed == 0)
    model = QwenConfig.from_hf(architecture_fields(cfg.policy.path))
    assert cfg.data.max_prompt + cfg.rollout.max_new <= model.max_position_embeddings
    if where.chips > 1:  # one chip would need minutes for an iteration
        assert (cfg.rollout.prompts, cfg.rollout.group_size) == (128, 8)
    assert shapes_of(cfg).microbatches * cfg.update.microbatch == cfg.rollout.prompts * cfg.rollout.group_size
    assert header is not None
    for part in (f"oarjax train configs/{path.name}", f"oarjax plan configs/{path.name}", "GiB", "not yet measured"):
        assert part in header[0], f"{path.name}: its header does not say {part!r}"
    page = (ROOT / "docs" / "plans.md").read_text()
    section = re.search(rf"^## configs/{re.escape(path.name)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert section, f"docs/plans.md has no plan of {path.name}: write it anew (its first lines say how)"
    assert f"on {where.name}" in section[1]
    fits = re.search(r"^\| fits \|(.*)\|$", section[1], re.M)
    assert fits
    assert set(fits[1].replace("|", " ").split()) == {"yes"}
    together = re.search(r"^\| together, of ([\d.]+) \|(.*)\|$", section[1], re.M)
    assert together
    most = max(map(float, together[2].replace("|", " ").split()))
    (found,) = (p for p in PLANS if p["config"] == f"configs/{path.name}")
    assert most == pytest.approx(found["step"]["hbm"]["total"] / 2**30, abs=0.006)
    assert headline(found) in header[0].replace("\n#", ""), "the header tells another plan"
    assert found["shapes"] == shapes_of(cfg)._asdict()
    assert (found["remat"], found["credit"]) == (cfg.policy.remat, cfg.credit.method)
    assert found["mesh"] == {axis: where.chips if n == -1 else n for axis, n in cfg.mesh.model_dump().items()}


def test_planned_figures():
    """What the README and the design promise of plans, from the numbers beside the page."""
    made = runpy.run_path(str(ROOT / "docs/make_plans.py"))
    beside = json.loads((ROOT / made["BESIDE"]).read_text())
    before = json.loads((ROOT / made["BEFORE"]).read_text())
    page = markdown(PLANS, numbers=made["FILE"], command=made["COMMAND"], served=beside["served"], before=before)
    assert page == (ROOT / "docs/plans.md").read_text()
    steps = made["steps_table"](PLANS, beside)
    assert steps in (ROOT / made["COST"]).read_text()
    slice_v5p, slice_v5e = (line.split(" | ")[-1].rstrip(" |") for line in steps.splitlines()[2:4])
    said = f"{slice_v5e}x for 7B on v5e-64, {slice_v5p}x on v5p-32, by plan"
    assert said in (ROOT / "docs/paper.md").read_text()
    assert json.loads(json.dumps(made["renewed"](PLANS[-1]))) == PLANS[-1]
    plans = {p["config"].removeprefix("configs/"): p for p in PLANS}
    assert set(plans) == {p.name for p in SHIPPED}
    for name, found in plans.items():
        assert found["fits"], name
        for phase in found["phases"]:
            assert phase["hbm"]["total"] < 0.95 * phase["hbm"]["limit"], f"{name}: {phase['name']} leaves less than 5%"
        assert all(re.fullmatch(r"[0-9a-f]{12}", phase["commit"]) for phase in found["phases"]), name
        assert set(found["versions"]) >= {"jax", "libtpu"}, name
        update = next(p for p in found["phases"] if p["name"] in ("update", "fused"))
        fused = update["name"] == "fused"
        cfg = load_config(ROOT / "configs" / name)
        model, s = QwenConfig.from_hf(architecture_fields(cfg.policy.path)), shapes_of(cfg)
        sizes = {"tensor": cfg.rollout.tensor or found["mesh"]["tensor"], "expert": found["mesh"]["expert"]}
        weights = read_bytes(model, s._replace(rows=0, prompts=0), cfg.rollout, chips=found["chips"], **sizes)
        assert 0.75 < weights / s.completion / found["resident"]["rollout"] < 1, f"{name}: a step reads the copy, once"
        if cfg.lora.rank:
            continue  # gradients of adapters alone: another share, and no formula
        analytic = found["expected_fused" if fused else "expected"]
        assert update["executed"] * found["chips"] == pytest.approx(analytic, rel=0.03), name
        share = 0.75 if cfg.rollout.max_new <= 1024 else 0.70  # attention is computed again
        if fused or model.experts:
            share -= 0.1  # and layers for scores, or the experts' last products for the router's gradient
        if model.experts:
            sizes, tokens = found["shapes"], found["shapes"]["prompt"] + found["shapes"]["completion"]
            padding = 2 * padding_of_groups(model, tokens=sizes["microbatch"] * tokens // found["chips"])
            share -= padding * sizes["rows"] * tokens / analytic  # blocks of rows that an expert fills in part
        assert update["share"] >= share, name
    update = next(p for p in plans["qwen2.5-7b_v5p-32.yaml"]["phases"] if p["name"] in ("update", "fused"))
    assert update["utilisation_in_turn"] >= 0.45
    assert update["utilisation_together"] >= 0.60


def test_a_phase_whose_programs_are_others_by_now_is_marked():
    """An older plan has one key for a phase; a mark goes where the programs are the same again."""
    checked = runpy.run_path(str(ROOT / "docs/make_plans.py"))["checked"]
    known = {"sample": {"programs": [{"key": "a"}, {"key": "b"}]}, "fused": {"key": "c"}}
    known["apply"] = {"key": "d", "changed": True}
    now = {"sample": "ae", "fused": "c", "apply": "d"}

    def lower(phase):
        return {"commit": "new", "programs": [{"key": key} for key in now[phase]]}

    phases = [{"name": name, "commit": "old", **keys} for name, keys in known.items()]
    found = checked({"config": "x", "phases": phases}, lower)
    assert [(p["commit"], p.get("changed")) for p in found["phases"]] == [("old", True), ("new", None), ("new", None)]
    assert commits_table([found])[-1] == "| x | sample: old, changed; fused, apply: new |"


def test_the_notebook_of_one_chip_tells_the_plan_of_its_config():
    text = (ROOT / "notebooks" / "colab_tpu.ipynb").read_text()
    (found,) = (p for p in PLANS if p["config"] == "configs/colab_qwen2.5-0.5b.yaml")
    sample, fused = (p for p in found["phases"] if p["name"] in ("sample", "fused"))
    least = [p["seconds_in_turn"] for p in (sample, fused, found["step"])]
    memory = [p["hbm"]["total"] / 2**30 for p in (sample, fused, found["step"])]
    for what, numbers in (("seconds at least", least), ("memory, GiB of 15.75", memory)):
        assert f"| {what} | {' | '.join(f'{number:.1f}' for number in numbers)} |" in text
    assert f"expected to take {found['step']['seconds_expected']:.1f} seconds" in text


def test_the_notebook_with_adapters_tells_the_plan_of_its_config():
    text = (ROOT / "notebooks" / "kaggle_lora_7b.ipynb").read_text()
    (step,) = (p["step"] for p in PLANS if p["config"] == "configs/qwen2.5-7b_v5e-8_lora.yaml")
    for what, seconds in (("expected", "expected"), ("nothing overlapped", "in_turn"), ("everything over", "together")):
        assert re.search(rf"{what}\w* \| {step[f'seconds_{seconds}']:.0f} s \|", text), what
    assert f"per chip | {step['hbm']['total'] / 2**30:.1f} |" in text
