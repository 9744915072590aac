"""The oarjax half of docs/coming_from_trl.md runs, and its tables name fields and metrics that exist."""

import json
import re
import sys

import pyarrow.parquet as parquet
import pytest
import yaml
from conftest import CACHE, ROOT

from oarjax.cli import main
from oarjax.config.loading import parse_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.report.fields import field_rows

PAGE = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")


def block(first_line):
    text = PAGE[PAGE.index(first_line) :]
    return text[: text.index("```")]


def our_names(heading, pattern):
    """Names in the second column of the table below a heading."""
    section = PAGE[PAGE.index(heading) :].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in section.splitlines() if row.startswith("|")]
    return [name for row in rows for name in re.findall(pattern, row)]


@pytest.mark.slow
def test_the_run_of_the_page(tmp_path, monkeypatch, capsys):
    """Its config and rewards as they stand, on a tiny policy and its characters, for two iterations."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(block("# my_rewards.py"))
    policy = write_builtin_policy(tmp_path / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    rows = [{"question": f"{n}+1=", "answer": f"{n}+1={n + 1}#### {n + 1}"} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = yaml.safe_load(block("# gsm8k.yaml"))
    parse_config(tree)
    tree |= {"iterations": 2, "device": "cpu", "compilation_cache": str(CACHE), "export": {"folder": None}}
    tree["policy"] = {"path": str(policy)}
    tree["data"] |= {
        "template": "plain",
        "prompt_format": "{prompt}",
        "max_prompt": 24,
        "train": {"source": "rows.jsonl"},
    }
    tree["rollout"] |= {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 8, "completion_bucket": 12}
    tree["grading"]["workers"] = 1
    tree["report"] |= {"to": ["jsonl"], "groups": 1, "html": False}
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(sys, "argv", ["oarjax", "train", "gsm8k.yaml"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (None, 0), capsys.readouterr().err
    folder = tmp_path / "runs" / "gsm8k"
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == 2
    assert logged[0]["reward/brief"] == 1  # within 12 tokens
    assert logged[0]["reward"] == pytest.approx(logged[0]["reward/correct"] + 0.1)
    groups = parquet.read_table(folder / "groups" / "000002.parquet").to_pydict()
    assert groups["group"] == [row // 4 for row in range(16)]
    # Every metric that the page names without a condition is there.
    table = PAGE[PAGE.index("## Metrics") :]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("|")
        for name in re.findall(r"`([\w/]+)`", row.split("|")[2])
    }
    optional = {"kl", "sampler_weight", "sampler_masked", "drifted", "sampler_gap", "clip_low", "clip_high", "entropy"}
    optional |= {"grad_norm", "loss", "skipped"}  # of an update; two iterations of equal rewards have none
    assert {name.replace("NAME", "brief") for name in named} - optional - {"verdict/brief"} <= logged[0].keys()


GRPO_CONFIG = """learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval max_completion_length
ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature
top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos
vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights
multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_correction
vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal num_completions_to_print
log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap"""
"""The fields that GRPOConfig of TRL 1.16 declares itself."""


def test_every_field_of_grpo_config_is_on_the_page():
    table = PAGE[PAGE.index("## Settings") : PAGE.index("## Metrics")]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("|")]
    theirs = "".join(same + other.partition(": ")[0] + absent for _, same, other, absent, _ in rows)
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", theirs))
    assert [name for name in GRPO_CONFIG.split() if name not in named] == []


@pytest.mark.parametrize("page", ["trl", "verl", "tunix"])
def test_the_fields_of_the_page_exist(page):
    first = "| the same |"
    text = (ROOT / "docs" / f"coming_from_{page}.md").read_text(encoding="utf-8")
    table = text[text.index(first) + len(first) :].partition("\n## ")[0]
    fields = {row.path for row in field_rows()}
    known = fields | {field.rpartition(".")[0] for field in fields}  # and their sections
    rows = [row.split("|") for row in table.splitlines() if row.startswith("|")]
    pairs = [pair for row in rows for pair in ([row[2]] if page == "trl" else row[2].split("; "))]  # "theirs: ours"
    ours = [pair.partition(": ")[2] for pair in pairs] + [row[1] for row in rows]
    named = [n for row in ours for n in re.findall(r"`([a-z]+\.[a-z0-9_.]+)", row)]
    assert len(named) > 20
    assert [name for name in named if name not in known and not name.endswith(".rewards")] == []
