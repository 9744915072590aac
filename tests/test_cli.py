"""The oarjax command as a user meets it: help, mistakes, a whole tiny run, and what can be done with its export."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import numpy as np
import pytest
import yaml
from conftest import CACHE, ROOT

from oarjax.cli import main
from oarjax.config.loading import load_config
from oarjax.data.hf import load_params, read_config, stored_dtype
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.report.files import read_completions, read_metrics
from oarjax.report.summary import read_summary
from oarjax.tools.study.config import load_study, make_plan

TINY = {
    "iterations": 2,
    "device": "cpu",
    "compilation_cache": str(CACHE),
    "data": {
        "template": "plain",
        "max_prompt": 24,
        "train": {"source": "builtin:arithmetic", "split": "train", "limit": 20, "arithmetic": {"terms": 2}},
        "eval": {"source": "builtin:arithmetic", "split": "eval", "limit": 5, "arithmetic": {"terms": 2}},
    },
    "sft": {
        "data": {"source": "builtin:arithmetic", "split": "sft", "limit": 20, "arithmetic": {"terms": 2}},
        "steps": 3,
        "batch": 4,
        "microbatch": 4,
        "max_length": 48,
    },
    "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 16, "completion_bucket": 12},
    "grading": {"rewards": [{"name": "exact"}, {"name": "long"}], "workers": 1},
    "credit": {"answer": {"style": "regex", "pattern": "[0-9]"}},
    "update": {"microbatch": 8},
    "eval": {"batch": 4},
    "report": {"completions": 3},
}
PLUGIN = """
from oarjax.grading.rewards import Sample, reward

@reward("long")
def long(sample: Sample) -> float:
    return float(sample.tokens)
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    return write_builtin_policy(folder / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)


@pytest.fixture(scope="module")
def config(policy, tmp_path_factory):
    """A config file, its run folder beside it, and the plugin that it names."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.py").write_text(PLUGIN)
    tree = TINY | {"run_dir": str(folder / "run"), "policy": {"path": str(policy)}}
    tree["grading"] = {**TINY["grading"], "plugins": [str(folder / "mine.py")]}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return folder / "tiny.yaml"


@pytest.fixture
def oarjax(monkeypatch, capfd):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def command(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oarjax", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("TERM", "dumb")
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        return code, *capfd.readouterr()

    return command


# Help


def test_versions_are_those_installed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["oarjax", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert re.fullmatch(
        r"oarjax \S+, jax \S+, flax \S+, transformers \S+, python 3\.\d+\.\d+", capsys.readouterr().out.strip()
    )


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            (),
            [
                "Train Qwen policies with GRPO",
                "train",
                "sample",
                "export",
                "Start with: oarjax train demo",
            ],
        ),
        (
            ("train",),
            ["CONFIG.yaml", "KEY.SUB=VALUE...", "--restart", "values are YAML", "rollout.group_size=16"],
        ),
        (
            ("sample",),
            ["POLICY", "PROMPT...", "--temperature", "0 = greedy", "auto|chat|plain", "oarjax sample runs/demo"],
        ),
        (("export",), ["SOURCE", "TARGET", "keep|float32|bfloat16", "must not exist yet"]),
    ],
)
def test_help(oarjax, command, says):
    code, out, _ = oarjax(*command, "--help")
    assert code == 0
    for words in says:
        assert words in out


def test_nothing_asked_shows_the_help(oarjax):
    _, out, err = oarjax()
    print(repr(out), repr(err))
    assert "Train Qwen policies with GRPO" in out + err


def test_help_imports_no_jax():
    """A command that only prints must come at once."""
    import subprocess

    script = "import sys, oarjax.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_typo_in_a_config_costs_no_import_of_jax():
    import subprocess

    script = """
import sys
from oarjax.cli import main
for command in sys.argv[1].split(";"):
    sys.argv = ["oarjax", *command.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, command
sys.exit("jax" in sys.modules)
"""
    commands = "train demo rollout.group=3;train dmo;credit demo_credit lab.x=1;study study_demo x=1;plan demo x=1"
    commands += ";evaluate none;evaluate a/b eval.batchs=3;evaluate a/b grading.worker=1;sample none 1+1="
    done = subprocess.run([sys.executable, "-c", script, commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rollout.group: no such field (did you mean group_size?)" in done.stderr
    assert "did you mean demo?" in done.stderr


PROBES = pathlib.Path(__file__).parent / "golden" / "config" / "bad_probes.py"

# Mistakes: one message, exit code 2, no traceback, nothing compiled, nothing claimed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["rollout.group=3"], "rollout.group: no such field (did you mean group_size?)"),
        (
            ["rollout.group_size=1"],
            "rollout.group_size: grpo needs at least 2 completions per prompt, got 1; raise it, or set",
        ),
        (["update.minibatches=3"], "update.minibatches: 3 does not divide rollout.prompts = 4"),
        (
            ["device=tpu"],
            'device: expected tpu, but JAX finds cpu (cpu). Install the extra (pip install "oarjax[tpu]")',
        ),
        (
            ["device=gpu"],
            'device: expected gpu, but JAX finds cpu (cpu). Install the extra (pip install "oarjax[cuda]")',
        ),
        (["mesh.data=2", "mesh.tensor=3"], "does not multiply to the"),
        (["policy.path=nowhere"], "policy nowhere: no such folder; set an HF folder or a hub name"),
        (["policy.path=builtin:large"], "policy.path: builtin:large is unknown; accepted: builtin:arithmetic"),
        (["data.max_prompt=2"], "all 20 prompts are longer than 2 tokens; raise data.max_prompt"),
        (["sft.max_length=4"], "all 20 pairs are longer than 4 tokens; raise sft.max_length"),
        (["rollout.max_new=500"], "data.max_prompt + rollout.max_new = 524 tokens, more than the checkpoint's"),
        (
            ["sft.max_length=513"],
            "sft.max_length = 513 tokens, more than the checkpoint's max_position_embeddings = 512",
        ),
        (["data.train.source=nothing.jsonl"], "data.train.source: no file nothing.jsonl"),
        (["data.template=chat"], "the tokenizer has no chat template; set data.template to plain"),
        (["grading.plugins=[nothing.py]"], "grading.plugins: no file nothing.py"),
        (["credit.answer.pattern=("], "is not a regular expression"),
        (["credit.masking.mask_id=32"], "credit.masking.mask_id: expected a token id below 32, got 32"),
        (
            ["credit.method=keywords", "credit.keywords.words=[so, wait]"],
            "credit.keywords.words: none of 'so', 'wait' can be written in this vocabulary; set words that its tokens",
        ),
        (["credit.keywords.words=[so, '']"], "credit.keywords.words.1: String should have at least 1 character"),
        (
            ["credit.masking.unit=line", "credit.method=oar_g"],
            "credit.masking.unit: applies to oar_p only, got line; set token, or",
        ),
        (["credit.answer.cue=so "], "credit.answer.cue: applies to source reference only, got source own"),
        ([f"credit.probe.function={PROBES}:nothing"], "nothing"),
        ([f"credit.probe.function={PROBES}:of_kind"], "with kind 'vector' and reads 'completion'"),
        (
            [f"credit.probe.function={PROBES}:per_token"],
            "and kind scalar, got (2, 8)",
        ),
        ([f"credit.probe.function={PROBES}:raising"], "bad_probes.py:raising fails on hidden states (2, 8, 16): Type"),
        (
            ["credit.gate=paper", "credit.gate.tau=0.3"],
            "gate is a value ('paper') and has no field tau; set the fields of gate",
        ),
        (
            ["credit.gate=strict"],
            "credit.gate: expected fields, or one of the presets paper, readme, hard, got 'strict'",
        ),
        (["run_dir=/proc/none"], "run_dir: "),
        (["--seeds", "1"], "train --seeds: replaced by a study; run oarjax study study_grpo base=CONFIG.yaml"),
        (["--compare"], "train --compare: replaced by a study; run oarjax study study_grpo base=CONFIG.yaml"),
        (["report.controls=[uniform]"], "report: controls was replaced by a study: leave it out, and run oarjax study"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(oarjax, config, tmp_path, changes, says, monkeypatch):
    def never(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr("oarjax.training.command.start_policy", never)
    folder = tmp_path / "run"
    code, out, err = oarjax("train", config, f"run_dir={folder}", *changes)
    assert code == 2
    assert says in err
    assert "Traceback" not in out + err
    assert not (folder / "config.yaml").exists()


def test_unknown_reward_names_the_known_ones(oarjax, config, tmp_path):
    tree = yaml.safe_load(config.read_text())
    tree["grading"] = {"rewards": [{"name": "maths"}]}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(tree))
    code, _, err = oarjax("train", tmp_path / "bad.yaml", f"run_dir={tmp_path / 'run'}")
    assert code == 2
    assert "grading.rewards: no reward is called 'maths'; known are " in err
    assert " (did you mean math?)" in err


def test_tokenizer_larger_than_the_vocabulary(oarjax, config, policy, tmp_path):
    import shutil

    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(policy, tmp_path / "policy")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"vocab_size": 20}))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:20].copy()
    save_file(weights, folder / "model.safetensors")
    code, _, err = oarjax("train", config, f"run_dir={tmp_path / 'run'}", f"policy.path={folder}")
    assert code == 2
    assert "the tokenizer has ids up to 26, but the model's vocabulary only 20: they do not belong together" in err


@pytest.mark.parametrize(
    ("package", "extra", "change", "instead"),
    [
        ("tensorboardX", "log", "report.to=[tensorboard]", "report.to=[]"),
        ("wandb", "wandb", "report.to=[jsonl, wandb]", "report.to=[jsonl]"),
        ("trackio", "trackio", "report.to=[jsonl, trackio]", "report.to=[jsonl]"),
    ],
)
def test_a_missing_package_is_missed_at_the_start(
    oarjax, config, tmp_path, package, extra, change, instead, monkeypatch
):
    from oarjax.run import checks

    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == package else object())
    code, _, err = oarjax("train", config, f"run_dir={tmp_path / 'run'}", change)
    assert code == 2
    assert f'needs {package}, which is not installed; pip install "oarjax[{extra}]", or set {instead}' in err


def test_an_error_of_ours_keeps_its_traceback(oarjax, config, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("oarjax.training.command.open_run", broken)
    code, _, err = oarjax("train", config, f"run_dir={tmp_path / 'run'}")
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert "ZeroDivisionError: ours" in err


def test_interrupted(oarjax, config, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("oarjax.training.command.open_run", interrupted)
    code, out, err = oarjax("train", config, f"run_dir={tmp_path / 'run'}")
    assert code == 130
    assert "Traceback" not in out + err


# A whole tiny run


@pytest.fixture(scope="module")
def run(config):
    """The folder of a finished run, and what the command printed."""
    import subprocess

    changes = ["report.to=[jsonl, tensorboard]", "profile=[2, 2]", "seed=3"]
    done = subprocess.run(
        [sys.executable, "-m", "oarjax.cli", "train", str(config), *changes],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return config.parent / "run", done.stdout


@pytest.mark.slow
def test_a_run_writes_what_it_promises(run):
    folder, out = run
    for name in ("config.yaml", "metrics.jsonl", "completions.jsonl", "summary.json", "curves.png", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    assert any(folder.glob("tensorboard/events*"))
    assert any((folder / "profile").rglob("*.xplane.pb"))

    before, first, last = read_metrics(folder / "metrics.jsonl")
    assert before["iteration"] == 0
    assert 0 <= before["pass_at_1"] <= 1
    names = {"reward", "reward/long", "length", "entropy", "ess", "loss", "grad_norm", "lr", "tokens_per_second", "mfu"}
    names |= {"zero_variance", "truncated", "ungraded", "verdict/graded", "sampler_gap"}
    names |= {f"seconds/{phase}" for phase in ("sample", "grade_wait", "update", "total")}
    for record in (first, last):
        assert names <= set(record), names - set(record)
        assert all(np.isfinite(record[name]) for name in names)
    assert first["reward"] == pytest.approx(first["reward/exact"] + first["reward/long"])
    assert "pass_at_1" not in first
    assert "pass_at_1" in last

    rows = read_completions(folder / "completions.jsonl")
    assert [iteration for iteration, _ in rows] == [1, 1, 1, 2, 2, 2]
    row = rows[0][1]
    assert row.prompt.endswith("=")
    assert "".join(row.tokens) == row.completion
    assert len(row.weights) == len(row.tokens) == row.rewards["long"]

    for words in ("OAR-G", "SFT policy", "pass@1", str(folder / "export"), "report.html", "OAR-G compiling"):
        assert words in out, words
    assert re.search(r"sft 3/3  loss \d.*tok/s \d", out)


@pytest.mark.slow
def test_the_result_is_a_table_and_the_command_of_a_comparison(run):
    folder, out = run
    assert [row.name for row in read_summary(folder / "summary.json")] == ["SFT policy", "OAR-G"]
    command = f"oarjax study study_grpo base={folder}/config.yaml run_dir={folder}-study"
    assert command in out
    assert command in (folder / "report.html").read_text()
    plan = make_plan(load_study("study_grpo", command.split()[3:]))
    assert [runs[0].config.credit.method for runs in plan.arms.values()] == ["oar_g", "uniform"]


def documented(page: str) -> list[str]:
    """Names in the first column of a page's tables."""
    rows = [line.split("|")[1] for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.slow
def test_the_docs_name_every_metric_and_file_of_a_run(run):
    folder, _ = run
    logged = {name for record in read_metrics(folder / "metrics.jsonl") for name in record} - {"iteration", "time"}
    known = [re.sub("NAME|PHASE|SIGNAL", ".+", name) for name in documented("metrics.md")]
    assert sorted(name for name in logged if not any(re.fullmatch(k, name) for k in known)) == []
    files = [name.split("/")[0].replace("*", ".+") for name in documented("run_folder.md")]
    written = sorted(path.name for path in folder.iterdir())
    assert [name for name in written if not any(re.fullmatch(file, name) for file in files)] == []


@pytest.mark.slow
def test_a_report_is_written_from_the_files_alone(oarjax, run, tmp_path):
    folder, _ = run
    code, out, err = oarjax("report", folder, "--out", tmp_path / "again.html")
    assert code == 0, err
    assert str(tmp_path / "again.html") in out
    assert (tmp_path / "again.html").read_text() == (folder / "report.html").read_text()
    assert "Whole groups" in (tmp_path / "again.html").read_text()
    (tmp_path / "half").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "completions.jsonl"):
        (tmp_path / "half" / name).write_bytes((folder / name).read_bytes())
    assert oarjax("report", tmp_path / "half")[0] == 0
    assert "all iterations done, not yet exported, iteration 2 of 2" in (tmp_path / "half/report.html").read_text()
    code, _, err = oarjax("report", tmp_path)
    assert code == 2
    assert "holds no run (no config.yaml), or one that never began; pass the run_dir of oarjax train" in err


@pytest.mark.slow
def test_the_export_is_a_policy_like_any_other(oarjax, run, config, tmp_path):
    folder, _ = run
    model, where = read_config(folder / "export")
    params = load_params(where, model)
    start = load_params(read_config(yaml.safe_load(config.read_text())["policy"]["path"])[1], model)
    assert not np.array_equal(params["embed"]["embedding"], start["embed"]["embedding"])

    code, out, _ = oarjax("sample", where, "1+2=", "3+4=", "--count", 2, "--max-new", 6, "--seed", 1)
    assert code == 0
    assert "1+2=" in out
    assert "3+4=" in out
    for same in (folder, folder / "checkpoints" / "000002"):  # the run of the export, its checkpoint
        assert oarjax("sample", same, "1+2=", "3+4=", "--count", 2, "--max-new", 6, "--seed", 1)[1] == out

    code, out, _ = oarjax("export", where, tmp_path / "half", "--dtype", "bfloat16", "--shard-gb", 2e-6)
    assert code == 0
    assert (tmp_path / "half" / "model.safetensors.index.json").is_file()
    assert "parameters to" in out
    assert stored_dtype(tmp_path / "half") == "bfloat16"
    assert oarjax("export", where, tmp_path / "half")[0] == 2

    prompt = json.loads((folder / "completions.jsonl").read_text().splitlines()[0])["prompt"]
    drawn = tmp_path / "drawn.jsonl"
    code, out, err = oarjax("sample", where, prompt, "--count", 8, "--max-new", 6, "--record", drawn)
    assert code == 0, err
    assert len(drawn.read_text().splitlines()) == 8
    code, _, err = oarjax(
        "train",
        config,
        f"run_dir={tmp_path / 'next'}",
        f"policy.path={where}",
        "sft=null",
        "iterations=1",
        "report.html=false",
        *(f"rollout.from=[{drawn}]", "rollout.prompts=1", "rollout.group_size=8", "rollout.max_new=6"),
    )
    assert code == 0, err
    assert (tmp_path / "next" / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_is_never_written_over(oarjax, run, config):
    folder, _ = run
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    code, _, err = oarjax("train", config, "seed=4")
    assert code == 2
    assert f"run_dir: {folder} holds a run of another config (" in err
    assert "seed was 3, is 4" in err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


# sample and export by themselves


def test_sample_mistakes(oarjax, policy):
    for arguments, says in [
        (("nowhere", "x"), "nowhere: no such folder; expected a run folder (runs/demo)"),
        (("runs/nowhere", "x"), "runs/nowhere: no such folder"),  # not looked up at the hub
        ((policy, "1+1=", "--max-new", 600), "--max-new: 4 prompt tokens and 600 new ones exceed the checkpoint's"),
        ((policy, "1+1=", "--template", "chat"), "--template: this policy's tokenizer has no chat template; use plain"),
        ((policy, "1+1=", "--top-p", 0), "--top-p: expected a share in (0, 1], got 0.0"),
        ((policy, "1+1=", "--record", "x.json"), "--record: expected the name of a new .jsonl file in a folder, got x"),
        ((policy, "x"), "the tokenizer cannot encode 'x'"),
    ]:
        code, _, err = oarjax("sample", *arguments)
        assert code == 2
        assert says in err


def test_export_keeps_and_converts(oarjax, policy, tmp_path):
    assert oarjax("export", policy, tmp_path / "same")[0] == 0
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (policy / "model.safetensors").read_bytes()
    code, _, err = oarjax("export", policy, tmp_path / "same")
    assert code == 2
    assert "exists; give a folder that does not" in err
    assert oarjax("export", policy, tmp_path / "untied", "--untie")[0] == 0
    params = load_params(*reversed(read_config(tmp_path / "untied")))
    np.testing.assert_array_equal(params["head"]["kernel"].T, params["embed"]["embedding"])
    for target in (tmp_path / "same" / "config.json" / "x", "/proc/oarjax"):
        code, _, err = oarjax("export", policy, target)
        assert code == 2
        assert f"error: TARGET: cannot write to {target}: " in err


def test_shipped_configs_say_where_their_files_go():
    for path in sorted((ROOT / "configs").glob("[!s]*.yaml")):  # study_*.yaml are no runs, see test_readme.py
        assert load_config(path).run_dir == f"runs/{path.stem}"
