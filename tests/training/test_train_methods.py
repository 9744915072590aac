"""Methods of credit through the command, two epochs, with what they can be combined with: policies among it.

Methods without a pass of their own train in tests/credit/test_methods.py.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from conftest import CACHE

from oarjax.data.hf import write_random_checkpoint
from oarjax.data.hf_files import read_fields
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.report.files import read_completions, read_metrics
from oarjax.training.command import run

TINY = {
    "iterations": 1,
    "device": "cpu",
    "compilation_cache": str(CACHE),
    "data": {
        "template": "plain",
        "max_prompt": 24,
        "train": {"source": "builtin:arithmetic", "split": "train", "limit": 20, "arithmetic": {"terms": 2}},
    },
    "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 16, "completion_bucket": 12},
    # Random weights hardly ever answer right: what can be learnt is to be brief.
    "grading": {"rewards": [{"name": "exact"}], "workers": 1, "overlong_window": 10},
    "credit": {"answer": {"style": "regex", "pattern": "[0-9]"}},
    "update": {"microbatch": 8, "epochs": 2, "minibatches": 2},
    "report": {"completions": 4, "html": False},
    "export": {"folder": None},
}

COMBINATIONS = {
    "oar_p, second choice, sentences, reference answer": {
        "method": "oar_p",
        "masking.counterfactual": "second_choice",
        "masking.unit": "sentence",
        "gate": "readme",
        "answer.source": "reference",
        "answer.cue": "=",
    },
    "oar_screened, mean embedding": {"method": "oar_screened", "masking.counterfactual": "mean_embedding"},
    "oar_l, deleted": {"method": "oar_l", "masking.counterfactual": "deleted"},
    "oar_g, joint, published": {"method": "oar_g", "estimator": "noisy", "draws": 2, "probe.mode": "answer_joint"},
    "grail": {"method": "grail"},  # and its policy replays the sampler's routers
    "causal_spans": {"method": "causal_spans", "answer.source": "reference", "answer.cue": "="},
    "permuted, of oar_f, sampled": {
        "method": "permuted",
        "permuted_of": "oar_f",
        "fisher.sampled": 1,
        "polarity": "wrong",
        "gate.levels": "suppress",
    },
    "serl": {"method": "serl", "marks": f"{__file__}:first_half", "teacher": "{prompt}({answer})"},
}

EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8}
EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 8}
DELTA = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 8}
DELTA |= {"num_hidden_layers": 2, "full_attention_interval": 2, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
DELTA |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
MIXED = EXPERTS | DELTA | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
MIXED |= {"shared_expert_intermediate_size": 8}
FAMILIES = {
    "oar_g, joint, published": DELTA,
    "grail": MIXED,
    "oar_l, deleted": EXPERTS,
}
"""Names of COMBINATIONS whose policy is not the built-in Qwen2."""


def first_half(prompt: str, completion: str, reference: str) -> list[tuple[int, int]]:
    """Mark the first half of a completion, for SERL."""
    return [(0, len(completion) // 2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_one_iteration(name, tmp_path):
    policy = write_builtin_policy(tmp_path / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    if name in FAMILIES:
        fields = read_fields(policy) | FAMILIES[name]
        policy = write_random_checkpoint(tmp_path / "family", fields, seed=0, tokenizer=policy)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY | {"run_dir": str(tmp_path / "run"), "policy": {"path": str(policy)}}))
    overrides = [f"credit.{field}={json.dumps(value)}" for field, value in COMBINATIONS[name].items()]
    if name == "grail":
        overrides += ["policy.router=replay", "loss.router_balance=0.01"]
    run(file, overrides)
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert np.isfinite(record["loss"])
    assert record["skipped"] == 0
    assert record["grad_norm"] > 0
    if name == "grail":
        assert 1 <= record["router/load_max"] <= 2
        assert record["router/idle"] == 0
        assert record["router_balance"] == pytest.approx(0.01 * record["router/balance"], rel=0.1)
    rows = [row for _, row in read_completions(tmp_path / "run" / "completions.jsonl")]
    assert len(rows) == 4
    kept = name not in ("causal_spans", "grail", "serl")
    for row in rows:
        weights, reasoning = np.array(row.weights), np.array(row.is_reasoning)
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()
        if kept and reasoning.any():
            np.testing.assert_allclose(weights[reasoning].mean(), 1, rtol=1e-4)
            np.testing.assert_allclose(weights[~reasoning], 1, rtol=1e-6)
    reshaped = [np.ptp(row.weights) > 0 for row in rows if np.array(row.is_reasoning).sum() > 1]
    assert any(reshaped) or not reshaped
