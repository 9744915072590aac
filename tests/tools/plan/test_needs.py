"""What a run needs besides HBM, by hand."""

import pytest
from conftest import ROOT

from oarjax.config.loading import load_config
from oarjax.models.qwen_config import QwenConfig
from oarjax.tools.plan.needs import hosts_of, needs_of
from oarjax.tools.plan.published_sizes import PUBLISHED
from oarjax.tools.plan.table import needs_table
from oarjax.tools.plan.topology import find_slice

PARAMETERS = {"Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen2.5-32B": 32_763_876_352}


def needs(name, *overrides, seconds=None):
    cfg = load_config(ROOT / "configs" / f"{name}.yaml", list(overrides))
    return needs_of(cfg, QwenConfig.from_hf(PUBLISHED[cfg.policy.path]), find_slice(cfg.plan.topology), seconds=seconds)


def test_hosts():
    counts = {name: hosts_of(find_slice(name)) for name in ("v5e-1", "v5e-8", "v5e-16", "v6e-8", "v5p-8", "v5p-32")}
    assert counts == {"v5e-1": 1, "v5e-8": 1, "v5e-16": 4, "v6e-8": 1, "v5p-8": 1, "v5p-32": 4}
    assert hosts_of(find_slice("v5e-16"), slices=2) == 8


def test_a_7b_run_saves_within_a_notice():
    found, size = needs("qwen2.5-7b_v5e-64", seconds=36.0), PARAMETERS["Qwen/Qwen2.5-7B"]
    assert (found["hours"], found["chip_hours"]) == (2.0, 128.0)  # 200 iterations on 64 chips
    assert found["checkpoint"] == 12 * size
    assert found["saving"] == pytest.approx(12 * size / 16 / 500e6)  # 16 hosts: 11 s
    assert found["weights"] == 2 * size
    assert found["disk"] == 10e9 + 12 * size / 16  # software, and its share of a checkpoint on its way
    assert found["bucket"] == 4 * 12 * size + 4 * size  # two newest, the best, one being written; float32 export
    smaller = needs("qwen2.5-7b_v5e-64", "optim.moments=bfloat16", "export.dtype=bfloat16", "checkpoint.best=null")
    assert smaller["bucket"] == 3 * 8 * size + 2 * size
    assert smaller["chip_hours"] is None


def test_32b_does_not_fit_a_boot_disk():
    found = needs("qwen2.5-32b_v5p-128")
    size = PARAMETERS["Qwen/Qwen2.5-32B"]
    assert found["weights"] + found["disk"] == pytest.approx(2 * size + 10e9 + 12 * size / 16)
    assert found["weights"] + found["disk"] > 80e9 > found["disk"]


def test_adapters_are_small_on_disk():
    found = needs("qwen2.5-7b_v5e-8_lora")
    assert found["checkpoint"] < 0.15 * found["weights"]


def test_the_table_has_the_columns_that_create_reads():
    row = {"config": "configs/x.yaml", "chips": 64, "chip": {"name": "TPU v5e"}, "step": None}
    header, _, line = needs_table([row | {"needs": needs("qwen2.5-7b_v5e-64")}])
    cells = dict(zip(header.split("|"), line.split("|"), strict=True))
    assert cells[" GB of weights per host "] == " 15 "
    assert len(cells) == 9  # and empty ends, as awk counts: 10 fields
    assert [n for n, name in enumerate(header.split("|"), 1) if "weights" in name or "disk" in name] == [7, 8]
