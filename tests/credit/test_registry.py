"""One record per method and one list: what reads it, and that a new entry needs no other edit."""

import subprocess
import sys
import textwrap
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from oarjax.config.loading import parse_config
from oarjax.config.outputs import LabConfig
from oarjax.config.schema import Config
from oarjax.costs import RowTokens, clean_flops
from oarjax.credit.method import built_in
from oarjax.credit.record import KINDS, SIGNALS, MethodRecord
from oarjax.credit.registry import METHODS, choices, described, label
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings, FisherSettings, ProbeSettings, ScreenSettings
from oarjax.credit.signals import CreditInputs, Signals
from oarjax.errors import ConfigError
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of
from oarjax.report.fields import field_rows
from oarjax.tools.plan.command import methods_of
from oarjax.tools.plan.programs import with_method
from oarjax.tools.plan.sums import model_flops
from oarjax.tools.study.config import StudyConfig, make_plan
from oarjax.training.meter import Meter
from oarjax.types import AnswerSpan, Rollout

ENTRY = """MethodRecord(
    name="mine", label="Mine", about="every other token", module="mine_method", needs=("importance",)
)"""

FUNCTIONS = """
import jax.numpy as jnp
from oarjax import CreditMethod

def score(policy, params, rollout, span, keys, context):
    return jnp.ones(span.reasoning.shape)

def weigh(inputs, context):
    return inputs.signals.importance * (jnp.arange(inputs.completion.shape[1]) % 2 * 2)

METHOD = CreditMethod(weigh, name="mine", needs=("importance",), score=score, forwards=2.0)
"""

TREE = {
    "run_dir": "unused",
    "policy": {"path": "unused"},
    "data": {"train": {"source": "unused"}, "max_prompt": 16},
    "rollout": {"prompts": 4, "group_size": 4, "max_new": 32, "prompt_bucket": 16},
    "update": {"microbatch": 4},
}

MODEL = QwenConfig.from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A method in a file of its own and one entry."""
    (tmp_path / "mine_method.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(METHODS, "mine", eval(ENTRY, {"MethodRecord": MethodRecord}))
    yield METHODS["mine"]
    sys.modules.pop("mine_method", None)


def config(method: str, **changes) -> Config:
    return parse_config({**TREE, "credit": {"method": method}, **changes})


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda m: m.name)
def test_entries_say_what_exists(method):
    assert method.kind in KINDS
    assert set(method.needs) <= set(SIGNALS)
    assert set(method.sections) <= {field.name for field in fields(CreditSettings)}
    assert method.about
    assert method.experimental == (".experimental." in method.module)
    functions = built_in(method.name)
    for name in ("name", "kind", "needs", "coupling"):
        assert getattr(functions, name) == getattr(method, name), name
    if functions.score is None:
        assert "importance" not in method.needs
        assert functions.forwards == 0
    elif functions.score not in ("permuted_of", "turn_oar.by"):
        assert callable(functions.score)
        assert functions.forwards != 0
    LabConfig(methods={name: {"method": method.name, **fields} for name, fields in (method.lab or {}).items()})


def test_the_experimental_shelf_is_named_in_help_and_in_the_table():
    shelf = [name for name, m in METHODS.items() if m.experimental]
    assert shelf
    assert f"not matched against the authors' code): {', '.join(shelf)}" in field_rows("credit.method")[0].about
    assert [name for name, about in described().items() if about.endswith(" (experimental)")] == shelf
    rows = [row for row in (ROOT / "docs/credit.md").read_text().splitlines() if row.startswith("| `")]
    assert {row.split("`")[1] for row in rows if "| experimental: arXiv" in row} == set(shelf)


def test_labels_are_different():
    labels = [m.label for m in METHODS.values()]
    assert len(set(labels)) == len(labels)
    assert choices("permuted_of") == ("oar_p", "oar_screened", "oar_l", "oar_f", "oar_g")
    assert choices("screen.by") == ("oar_l", "oar_f", "oar_g")


def test_which_methods_draw_noise():
    drawn = {name for name in METHODS if resolve_method(CreditSettings(method=name)).draws_noise}
    assert drawn == {"oar_g", "random", "permuted", "turn_oar"}
    sampled = FisherSettings(sampled=2)
    screened = CreditSettings(method="oar_screened", screen=ScreenSettings(by="oar_f"), fisher=sampled)
    assert resolve_method(CreditSettings(method="oar_f", fisher=sampled)).draws_noise
    assert resolve_method(screened).draws_noise
    assert not resolve_method(CreditSettings(method="oar_g", probe=ProbeSettings(mode="answer_joint"))).draws_noise


def test_a_new_entry_is_in_config_lab_study_and_label(mine):
    assert config("mine").credit.method == "mine"
    with pytest.raises(ConfigError, match=r"credit.method: expected one of oar_p, .*uniform, mine, custom, got 'min'"):
        config("min")
    assert LabConfig().methods["Mine"] == {"method": "mine"}
    assert label("mine", "oar_g") == "Mine"
    assert label("custom", "oar_g", "my_credit.py:later_tokens") == "later_tokens"
    study = StudyConfig.model_validate(
        {
            "run_dir": "study",
            "base": TREE | {"data": TREE["data"] | {"eval": TREE["data"]["train"]}},
            "arms": {"GRPO": {"credit.method": "uniform"}, "ours": {"credit.method": "mine"}},
            "seeds": [0],
        }
    )
    assert make_plan(study).arms["ours"][0].config.credit.method == "mine"


def test_a_new_entry_is_in_mfu_and_plan(mine):
    assert methods_of("mine, oar_p") == ("mine", "oar_p")
    cost = 16 * 2 * clean_flops(decoder_of(MODEL), RowTokens(16, 32))
    assert model_flops("score", MODEL, with_method(config("uniform"), "mine")) == pytest.approx(cost)
    metrics = {
        "groups_drawn": 4.0,
        "prompt_tokens": 256.0,
        "completion_tokens": 512.0,
        "reasoning_length": 16.0,
        "rows_used": 16.0,
    }
    plain, more = (
        Meter(cfg, MODEL, resolve_method(cfg.credit), 1.0).flops(metrics) for cfg in (config("uniform"), config("mine"))
    )
    assert more - plain == pytest.approx(cost)


def test_a_new_entry_scores_and_weighs(mine):
    method = resolve_method(CreditSettings(method="mine"))
    assert method.signals == {"importance"}
    mask = jnp.ones((2, 4), bool)
    span = AnswerSpan(mask.at[:, 3].set(False), mask, jnp.ones(2, bool))
    rollout = Rollout(jnp.ones((2, 6), int), jnp.ones((2, 6), bool), mask, mask * 0.0, mask * 0.0, jnp.ones(2, bool))
    score = method.scorer(make_policy(MODEL), temperature=1.0, pad_id=0)
    scores = score({}, rollout, span, jax.random.split(jax.random.key(0)), "last").importance
    np.testing.assert_array_equal(scores, [[1, 1, 1, 0]] * 2)
    w = method.weigher()(CreditInputs(Signals(importance=scores), span, jnp.ones(2), mask, jax.random.key(0)))
    np.testing.assert_array_equal(w, [[0, 2, 0, 0]] * 2)


def test_help_names_a_new_entry_and_nothing_of_it_imports_jax():
    program = f"""
    import sys
    from oarjax.credit.record import MethodRecord
    from oarjax.credit.registry import METHODS
    import oarjax.config.loading, oarjax.costs
    METHODS["mine"] = {" ".join(ENTRY.split())}
    from oarjax.cli import app
    from typer.testing import CliRunner
    print(CliRunner().invoke(app, ["config", "credit.method"]).output)
    assert not {{"jax", "jaxlib", "flax", "jaxtyping"}} & set(sys.modules), "imports jax"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mine every other token" in " ".join(done.stdout.split())
