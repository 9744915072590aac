"""``oarjax bench --growth``: the arithmetic of sizes that double, and what the table marks. Nothing is timed."""

from contextlib import nullcontext

import pytest

from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of
from oarjax.tools.bench import growth
from oarjax.tools.bench.command import MODELS


class Counted:
    """A case whose seconds are its FLOPs; four times as many in the wide one's update, and as much memory."""

    def __init__(self, folder, fields, shapes):
        d = decoder_of(QwenConfig.from_hf(fields))
        self.flops = growth.arithmetic(d, shapes, 4)
        wide = 1 + 3 * (fields["hidden_size"] > MODELS["nano"]["hidden_size"])
        self.memory = dict.fromkeys(self.flops, 2**20) | {"update": wide**2 * 2**20}

    def __call__(self):
        return self.flops | {"update": self.flops["update"] * (self.memory["update"] / 2**20) ** 0.5}


def test_sizes_double_beside_the_arithmetic(monkeypatch):
    monkeypatch.setattr(growth, "write_random_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(growth, "Case", Counted)
    found = growth.measure_growth(MODELS["nano"], growth.BASE, repeats=2, status=lambda what: nullcontext())
    ratios = {(r["phase"], r["axis"]): r for r in found["rows"]}
    phases = ("rollout", "score, OAR-G", "update")
    assert set(ratios) == {(phase, axis) for phase in phases for axis in growth.AXES}
    for (phase, axis), r in ratios.items():
        assert r["time"]["median"] == pytest.approx(r["flops"] * (4 if (phase, axis) == ("update", "width") else 1))
    assert all(ratios[phase, "rows"]["flops"] == 2 for phase in phases)
    assert 1 < ratios["rollout", "group"]["flops"] < 2  # a group's prompt is prefilled once
    assert all(ratios[phase, "completion"]["flops"] + ratios[phase, "prompt"]["flops"] - 1 > 2 for phase in phases)
    assert all(2 < ratios[phase, "width"]["flops"] < 4 for phase in phases)
    marked = [cell for row in growth.table(found).columns for cell in row.cells if "*" in str(cell)]
    assert len(marked) == 1
    assert marked[0].count("*") == 2  # time and memory of the wide update
