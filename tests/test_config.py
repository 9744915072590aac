"""Reading a config: files, overrides, and every kind of mistake, each with its path and what is accepted."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from pydantic import ValidationError

from oarjax.config.foreign import NAMES
from oarjax.config.loading import check_files, find_config, load_config, parse_config
from oarjax.config.schema import Config
from oarjax.config.section import fields_of, section_of
from oarjax.config.shipped import copy_shipped
from oarjax.errors import ConfigError

SMALLEST = {"run_dir": "r", "policy": {"path": "p"}, "data": {"train": {"source": "t.jsonl"}}}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    return path


def message(tree) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    return str(caught.value)


def changed(**changes):
    """The smallest config with fields changed, "__" for a dot."""
    tree = yaml.safe_load(yaml.safe_dump(SMALLEST))
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


def test_three_fields_are_enough_and_the_rest_are_the_design_defaults(file):
    cfg = load_config(file)
    assert (cfg.rollout.group_size, cfg.rollout.max_new, cfg.data.max_prompt) == (8, 1024, 512)
    assert (cfg.optim.lr, cfg.optim.warmup, cfg.optim.b2, cfg.optim.weight_decay) == (1e-6, 10, 0.95, 0.01)
    assert (cfg.loss.clip_low, cfg.loss.clip_high, cfg.loss.kl_beta, cfg.loss.aggregation) == (0.2, 0.28, 0, "dapo")
    assert (cfg.credit.method, cfg.credit.draws) == ("oar_g", 1)
    assert (cfg.credit.gate.tau, cfg.credit.gate.boost, cfg.credit.gate.floor) == (0.4, 2.0, 0.1)
    with pytest.raises(ValidationError, match="frozen"):
        cfg.seed = 1


def test_a_whole_config_written_down_reads_back_the_same(file, tmp_path):
    cfg = load_config(file, ["profile=[1, 2]", "grading.plugins=[mine.py]", "loss.off_policy=icepop"])
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    assert load_config(again) == cfg


def test_a_gate_preset_is_a_name_for_its_values(file):
    gate = load_config(file, ["credit.gate=readme"]).credit.gate
    assert (gate.tau, gate.boost, gate.floor, gate.rule, gate.levels) == (0.25, 1.0, 0.1, "quantile", "both")
    assert load_config(file, ["credit.gate=paper"]).credit.gate == load_config(file).credit.gate
    assert parse_config(changed(credit__gate="readme")).credit.gate == gate  # in a file
    # what is written down are the values
    written = load_config(file, ["credit.gate=readme"]).model_dump(mode="json")["credit"]["gate"]
    assert (written["tau"], written["boost"]) == (0.25, 1.0)
    assert "  credit.gate: expected fields, or one of the presets paper, readme, hard, got 'official'" in message(
        changed(credit__gate="official")
    )


def test_decays_that_bfloat16_moments_cannot_follow():
    text = message(changed(optim__moments="bfloat16", optim__b2=0.999))
    assert "  optim.b2: 0.999 is too slow for optim.moments = bfloat16" in text
    assert "lower b2" in text
    assert parse_config(changed(optim__moments="bfloat16")).optim.moments == "bfloat16"


def test_on_and_off_are_words_where_a_field_wants_words(file):
    for word in ("on", "off", '"on"', "auto"):
        assert load_config(file, [f"report.memory={word}"]).report.memory == word.strip('"')
        assert load_config(file, [f"compile_ahead={word}"]).compile_ahead == word.strip('"')
    assert load_config(file, ["advantage.soft=off"]).advantage.soft == "off"


def test_overrides_are_yaml_and_the_last_one_counts(file):
    cfg = load_config(
        file,
        [
            "rollout.group_size=16",
            "rollout.group_size=4",
            "optim.lr=3e-5",
            "optim.function=optax.lion",
            "optim.settings={eps: 1e-8, b1: .9, big: +2.E3, name: 1e-8x, date: 2026-01-02}",
            "data.eval.source=e.jsonl",  # makes the section
            "compilation_cache=null",
            "report.to=[jsonl, tensorboard]",
            "data.system_prompt=a=b, c",
        ],
    )
    assert cfg.rollout.group_size == 4
    assert cfg.optim.lr == 3e-5
    settings = {"eps": 1e-8, "b1": 0.9, "big": 2e3, "name": "1e-8x", "date": "2026-01-02"}  # YAML 1.1 has other texts
    assert cfg.optim.settings == settings
    assert cfg.data.eval is not None
    assert cfg.data.eval.source == "e.jsonl"
    assert cfg.compilation_cache is None
    assert cfg.data.system_prompt == "a=b, c"
    assert cfg.report.to == ("jsonl", "tensorboard")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.group_size", r"override 'rollout.group_size': expected key.sub=value"),
        (
            "run_dir.sub=1",
            r"override 'run_dir.sub=1': run_dir is a value .'r'. and has no field sub; set the fields of run_dir",
        ),
        ("seed=[1", r"override 'seed=\[1': the value is not valid YAML; quote it"),
        (
            "rollout.group=16",
            r"rollout.group: no such field \(did you mean group_size\?\); accepted: attention, cache, cache_bucket",
        ),
        ("rolout.group_size=16", r"rolout: no such field \(did you mean rollout\?\); accepted: .*rollout, run_dir"),
        ("rollout=3", r"rollout: .*got 3"),
        ("rollout.num_generations=8", r"no such field \(here it is rollout.group_size\); accepted"),
        ("lr=1", r"lr: no such field \(here it is optim.lr\)"),
        ("credit.gate.beta=2", r"credit.gate.beta: no such field; accepted: boost"),  # the paper's beta is no KL's
    ],
)
def test_bad_overrides(file, override, says):
    with pytest.raises(ConfigError, match=says):
        load_config(file, [override])


def test_names_of_other_trainers_lead_to_fields_that_exist():
    def exists(path):
        section = Config
        for part in path.split("."):
            if part not in fields_of(section):
                return False
            section = section_of(section, part)
        return True

    named = [
        name
        for text in NAMES.values()
        for name in re.findall(r"\b[a-z]\w*(?:\.[a-z]\w*)+|^(?:run_dir|iterations)\b", text)
    ]
    assert len(named) > 60
    table = (ROOT / "docs" / "coming_from_tunix.md").read_text(encoding="utf-8").split("## Rewards")[0]
    renamed = re.findall(r"^\|[^|]*\| (`\w+`(?:, `\w+`)*): .*`(?:\w+\.)?\w+`", table, flags=re.MULTILINE)
    told = [name for names in renamed for name in re.findall(r"\w+", names)]
    assert len(told) > 20
    assert [name for name in told if name not in NAMES and not exists(name)] == []
    assert [name for name in named if not exists(name)] == []


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match=r"config .*none\.yaml: no such file; shipped ones: .*demo,"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="a folder; expected a YAML file or the name of a shipped one"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"a folder; a run's own config is .*config\.yaml"):
        load_config(tmp_path)
    for text, says in [
        ("a: [", "not valid YAML"),
        ("- a", "expected a mapping of fields, got list"),
        ("a: 1\nb: 2\na: 3", r"bad\.yaml: a is set in line 1 and again in line 3; keep one"),
        ("a: {b: 1}\nc:\n  - {d: 1, e: 2, d: 3}", "d is set in line 3 and again in line 3"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_config(tmp_path / "bad.yaml")


def test_all_wrong_fields_come_in_one_message_with_paths_and_accepted_values():
    tree = changed(
        rollout__group_size=0,
        loss__level="word",
        credit__gate__taw=0.5,
        grading__rewards=[{"name": "math", "wieght": 2}],
        mesh__data=0,
        optim__lr=-1,
        iterations="many",
    )
    del tree["run_dir"], tree["data"]["train"]["source"]
    assert message(tree).splitlines() == [
        "config: 9 bad fields",
        "  run_dir: required and missing",
        "  iterations: Input should be a valid integer, unable to parse string as an integer, got 'many'",
        "  mesh.data: expected a positive number of devices, or -1 for all remaining ones, got 0",
        "  data.train.source: required and missing",
        "  rollout.group_size: Input should be greater than 0, got 0",
        "  grading.rewards.0.wieght: no such field (did you mean weight?); accepted: name, settings, weight",
        "  credit.gate.taw: no such field (did you mean tau?); accepted: boost, floor, levels, mass, rule, tau",
        "  loss.level: Input should be 'token' or 'sequence', got 'word'",
        "  optim.lr: Input should be greater than or equal to 0, got -1",
    ]


def test_a_word_in_place_of_a_list_or_of_fields():
    assert message(changed(grading__plugins="near.py", grading__rewards=["near"])).splitlines()[1:] == [
        "  grading.rewards.0: expected fields, such as {name: near} (weight, settings may follow), got 'near'",
        "  grading.plugins: expected a list, such as [near.py], got 'near.py'",
    ]
    assert "policy: expected fields, such as {path: runs/x}" in message(changed(policy="runs/x"))


def test_field_of_an_optional_section_is_found():
    assert "data.eval.sauce: no such field (did you mean source?)" in message(
        changed(data__eval={"source": "x.jsonl", "sauce": 1})
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss__dual_clip": 3.0}, "loss.dual_clip: has no effect with one epoch and one minibatch"),
        ({"update__minibatches": 5}, "update.minibatches: 5 does not divide rollout.prompts = 32"),
        (
            {"rollout__environment": {"name": "verifiers:words"}, "eval__samples": 9},
            r"expected at most 1,024 episodes of verifiers:words at once, got eval.batch x eval.samples = 1,152; lower",
        ),
        (
            {"update__minibatches": 4, "update__microbatch": 48},
            "update.microbatch: 48 does not divide the 64 rows of a minibatch",
        ),
        ({"credit__answer__style": "regex"}, "credit.answer.pattern: needed when credit.answer.style is regex"),
        (
            {"credit__answer__pattern": "x"},
            "credit.answer.pattern: applies to style regex only, got style boxed; set null",
        ),
        ({"grading__overlong_window": 2000}, "grading.overlong_window: 2000 exceeds rollout.max_new = 1024"),
        ({"grading__rewards": []}, "grading.rewards: expected one or more distinct rewards, got []"),
        (
            {"grading__rewards": [{"name": "math"}, {"name": "math"}]},
            "grading.rewards: expected one or more distinct rewards, got ['math', 'math']",
        ),
        ({"profile": [3, 2]}, "profile: expected 1 <= first <= last <= iterations = 100, got [3, 2]"),
        ({"profile": [0, 2]}, "profile: expected 1 <= first"),
        ({"optim__lr": 1e300}, "optim.lr: Input should be less than or equal to 1000000, got 1e+300"),
        ({"profile": [99, 101]}, "profile: expected 1 <= first"),
        ({"credit__answer__cue": 1e5}, "credit.answer.cue: expected text, got 100000.0; write it in quotes"),
        ({"export__folder": "../other"}, "export.folder: expected a folder below run_dir such as export"),
        ({"export__folder": "/tmp"}, "export.folder: expected a folder below run_dir"),
        ({"export__folder": "."}, "export.folder: expected a folder below run_dir"),
        ({"report__controls": ["uniform"]}, "report: controls was replaced by a study: leave it out, and run oarjax"),
        ({"mesh": {"data": -1, "tensor": -1}}, "mesh: at most one axis can be -1"),
        (
            {"policy__path": "builtin:big"},
            "policy.path: builtin:big is unknown; accepted: builtin:arithmetic, builtin:for",
        ),
        ({"policy__path": "builtin:random"}, "policy.tokenizer: builtin:random needs one"),
        ({"policy__tokenizer": "t"}, "policy.tokenizer: p has its own tokenizer; set null"),
        (
            {"sft": {"data": {"source": "s.jsonl"}, "steps": 1, "batch": 10, "microbatch": 4}},
            "sft.microbatch: 4 does not divide sft.batch = 10",
        ),
    ],
)
def test_contradictions_name_the_field_and_the_remedy(fields, says):
    text = message(changed(**fields))
    assert says in text
    assert text.startswith("config: 1 bad field\n  ")


def test_a_warm_starts_rate_is_its_own_whatever_else_its_optimizer_gets():
    sft = {"data": {"source": "s.jsonl"}, "steps": 1}
    given = {**sft, "optim": {"schedule": "cosine"}}
    assert parse_config(changed(sft=sft)).sft.optim.lr == parse_config(changed(sft=given)).sft.optim.lr == 1e-3


def test_several_contradictions_come_together():
    text = message(changed(update__minibatches=5, policy__path="builtin:random", profile=[9, 1]))
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "config",
        "  policy.tokenizer",
        "  update.minibatches",
        "  profile",
    ]
    assert re.match(r"config: 3 bad fields", text)


def test_shipped_configs_are_known_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo.yaml", "configs/demo.yaml"):
        assert load_config(name) == load_config(ROOT / "configs" / "demo.yaml")
    with pytest.raises(ConfigError, match=r"config dmeo: no such file; did you mean demo\? shipped ones: "):
        load_config("dmeo")
    (tmp_path / "demo.yaml").write_text((ROOT / "configs" / "demo.yaml").read_text() + "seed: 7\n")
    assert load_config("demo.yaml").seed == 7  # an existing file takes precedence
    assert find_config("demo") == find_config("configs/demo.yaml")
    (tmp_path / "demo").mkdir()
    assert find_config("demo") == find_config("configs/demo.yaml")


def test_a_shipped_config_is_copied_and_never_over_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert copy_shipped("demo_tiny") == Path("demo_tiny.yaml")
    assert load_config("demo_tiny.yaml") == load_config(ROOT / "configs" / "demo_tiny.yaml")
    with pytest.raises(ConfigError, match=r"init: demo_tiny\.yaml exists; give another file, or remove it"):
        copy_shipped("demo_tiny.yaml")
    with pytest.raises(ConfigError, match=r"init: no/demo\.yaml cannot be written"):
        copy_shipped("demo", Path("no/demo.yaml"))
    with pytest.raises(ConfigError, match=r"did you mean demo\?"):
        copy_shipped("demoo")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train.source=nowhere.csv", r"data.train.source: no file nowhere.csv; set the path"),
        ("grading.plugins=[oarjax, nowhere.py]", r"grading.plugins: no file nowhere.py"),
        ("loss.function=nowhere.py:loss", r"loss.function: no file nowhere.py"),
    ],
)
def test_a_missing_file_is_named_before_jax_is_imported(override, says):
    with pytest.raises(ConfigError, match=says):
        check_files(load_config("demo", [override]).model_dump(mode="json"))


def test_files_that_are_there_and_hub_names_are_no_missing_files(tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer\n")
    for source in (tmp_path / "rows.csv", "openai/gsm8k"):
        check_files(load_config("demo", [f"data.train.source={source}", "loss.function=module:loss"]).model_dump())


def test_a_list_of_bad_items_is_not_also_too_short():
    with pytest.raises(ConfigError, match="2 bad fields") as error:
        load_config("demo", ["lora.targets=[q_proj, v_proj]"])
    assert "at least 1 item" not in str(error.value)
    with pytest.raises(ConfigError, match=r"1 bad field\n  lora.targets: .*at least 1 item"):
        load_config("demo", ["lora.targets=[]"])
