"""``oarjax evaluate``: a run, its export and its checkpoint agree, a killed one goes on, two are compared."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import CACHE, ROOT, virtual_devices
from rich.console import Console

import oarjax.evaluate.command
from oarjax.cli import main
from oarjax.config.inputs import DatasetConfig
from oarjax.config.learning import EnvironmentConfig
from oarjax.config.loading import load_config, parse_config
from oarjax.credit.answer_text import extract_answer
from oarjax.data.problems import load_problems
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.data.tokenizer import load_tokenizer
from oarjax.errors import ConfigError
from oarjax.evaluate import export
from oarjax.evaluate import target as benchmark_target
from oarjax.evaluate.benchmarks import (
    BENCHMARKS,
    FIRST_ANSWER,
    PROMPTS,
    family_prompt,
    few_shot,
    find_fields,
    read_names,
)
from oarjax.evaluate.fields import config_of, config_tree, own_problems
from oarjax.evaluate.results import benchmark_result, compare, print_results, read_result
from oarjax.evaluate.samples import SampleLines
from oarjax.evaluate.target import Target, find_checkpoint, find_target
from oarjax.report.files import read_metrics
from oarjax.storage.checkpoint import finished
from oarjax.storage.durable import StorageError
from oarjax.storage.folder import locked
from oarjax.storage.manifest import write_manifest
from oarjax.training.held_out import Evaluation, evaluation_from, plain_evaluation

CHEAP = ["data.eval.limit=10", "rollout.max_new=8", "eval.batch=4", "grading.workers=1", f"compilation_cache={CACHE}"]
CHEAP += ["device=cpu"]


@pytest.fixture
def oarjax_json(monkeypatch, capfd):
    """Run the command with --json in this process: what it prints, or (exit code, error)."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["oarjax", *map(str, arguments), "--json"])
        capfd.readouterr()
        try:
            main()
        except SystemExit as end:
            if end.code:
                return end.code, " ".join(capfd.readouterr().err.split())
        return json.loads(capfd.readouterr().out)

    return command


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    return write_builtin_policy(folder, seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)


def test_a_policy_on_the_demo(oarjax_json, policy, tmp_path):
    result = oarjax_json("evaluate", policy, "--data", "demo", "--k", 4, *CHEAP, "--out", tmp_path / "a")
    found = result["benchmarks"]["demo"]
    assert (found["problems"], found["samples"], found["prompt"]) == (10, 4, "plain")
    assert set(found["figures"]) == {"pass@1", "pass@2", "pass@4", "avg@4", "maj@4"}
    assert json.loads((tmp_path / "a" / "results.json").read_text()) == result
    rows = [json.loads(line) for line in (tmp_path / "a" / "samples.jsonl").read_text().splitlines()]
    assert sorted((r["problem"], r["sample"]) for r in rows) == [(p, s) for p in range(10) for s in range(4)]
    assert found["truncated"] == np.mean([not r["ended"] for r in rows])
    assert found["length"] == np.mean([r["tokens"] for r in rows])
    assert [len(r["prompt"]) for r in rows] == sorted((len(r["prompt"]) for r in rows), reverse=True)
    assert len({r["completion"] for r in rows}) > 20


def test_stopped_it_goes_on_and_gives_the_same_json(oarjax_json, policy, tmp_path, monkeypatch, capfd):
    arguments = ["evaluate", policy, "--data", "demo", "--k", 2, *CHEAP]
    whole = oarjax_json(*arguments, "--out", tmp_path / "whole")
    written, write = [], SampleLines.write

    def killed(self, records):
        if len(written) == 2:
            write(self, records[:3])  # in the middle of the third batch
            os.kill(os.getpid(), signal.SIGTERM)
        written.append(records)
        write(self, records)

    monkeypatch.setattr(SampleLines, "write", killed)
    monkeypatch.setattr(sys, "argv", ["oarjax", *map(str, arguments), "--out", str(tmp_path / "cut")])
    with pytest.raises(SystemExit, match=r"^75$"):
        main()
    assert "stopped; the same command resumes with what is in" in capfd.readouterr().out
    monkeypatch.setattr(SampleLines, "write", write)
    cut = tmp_path / "cut" / "samples.jsonl"
    assert len(cut.read_text().splitlines()) == 2 * 4 * 2 + 3
    with cut.open("a") as file:
        file.write('{"benchmark": "demo", "prob')
    drawn = []
    monkeypatch.setattr(SampleLines, "write", lambda self, records: (drawn.extend(records), write(self, records))[1])
    assert oarjax_json(*arguments, "--out", tmp_path / "cut") == whole
    assert len(drawn) == 2 * 2  # the third batch has two problems
    assert cut.read_text() == (tmp_path / "whole" / "samples.jsonl").read_text()
    monkeypatch.setattr(oarjax.evaluate.command, "graded_batches", None)  # and again, there is nothing left to draw
    assert oarjax_json(*arguments, "--out", tmp_path / "cut") == whole
    code, error = oarjax_json(*arguments, "seed=1", "--out", tmp_path / "cut")
    assert code == 2
    assert "holds another evaluation (benchmarks.demo.settings.seed differ)" in error


def test_neither_batches_nor_other_problems_change_a_sample(oarjax_json, policy, tmp_path):
    def rows(name, *changes):
        oarjax_json("evaluate", policy, "--data", "demo", "--k", 2, *CHEAP, *changes, "--out", tmp_path / name)
        lines = (tmp_path / name / "samples.jsonl").read_text().splitlines()
        return {(r["problem"], r["sample"]): r["completion"] for r in map(json.loads, lines)}

    four = rows("four")
    assert rows("three", "eval.batch=3") == four
    few = rows("few", "data.eval.limit=4")
    assert few == {place: text for place, text in four.items() if place[0] < 4}


@pytest.mark.slow
def test_devices_change_nothing(oarjax_json, policy, tmp_path):
    """Four devices in another process, against the one of this."""
    arguments = ["evaluate", policy, "--data", "demo", "--k", 2, *CHEAP]
    oarjax_json(*arguments, "--out", tmp_path / "one")
    command = [sys.executable, "-m", "oarjax.cli", *map(str, arguments), "mesh.data=2", "mesh.fsdp=2"]
    command += ["--out", str(tmp_path / "four")]
    subprocess.run(command, check=True, env=os.environ | {"XLA_FLAGS": virtual_devices(4)}, capture_output=True)
    for name in ("results.json", "samples.jsonl"):
        assert (tmp_path / "four" / name).read_text() == (tmp_path / "one" / name).read_text()


@pytest.mark.slow
def test_a_run_its_export_and_its_checkpoint_agree(oarjax_json, policy, tmp_path, monkeypatch, capfd):
    """The same JSON from each of them, and of the run's own held-out problems what the run itself had measured last."""
    task = {"source": "builtin:arithmetic", "arithmetic": {"terms": 2, "highest": 19}}
    tree = {
        "run_dir": str(tmp_path / "run"),
        "iterations": 2,
        "device": "cpu",
        "compilation_cache": str(CACHE),
        "policy": {"path": str(policy), "remat": "none"},
        "data": {
            "template": "plain",
            "max_prompt": 16,
            "train": task | {"split": "train", "limit": 40},
            "eval": task | {"split": "eval", "limit": 12},
        },
        "sft": {"data": task | {"split": "sft", "limit": 64}, "steps": 80, "batch": 16, "microbatch": 16}
        | {"max_length": 48},
        "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 16, "completion_bucket": 12},
        "grading": {"rewards": [{"name": "format"}, {"name": "exact"}], "workers": 1},
        "credit": {"answer": {"style": "hash"}},
        "update": {"microbatch": 8},
        "optim": {"lr": 1e-3},
        "eval": {"batch": 5, "samples": 3},
        "checkpoint": {"every": 1, "best": "maj_at_k"},
        "report": {"html": False},
        "export": {"folder": "exported"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["oarjax", "train", str(tmp_path / "run.yaml")])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    said = "".join(capfd.readouterr().out.split("\n"))
    arguments = ["--data", "demo", "--k", 8, *CHEAP]
    of_run = oarjax_json("evaluate", run, *arguments)
    assert json.loads((run / "evaluate" / "demo-k8" / "results.json").read_text()) == of_run
    assert oarjax_json("evaluate", run / "exported", *arguments, "--out", tmp_path / "out") == of_run
    newest = oarjax_json("evaluate", run / "checkpoints" / "000002", *arguments)
    assert newest["benchmarks"] == of_run["benchmarks"]
    assert newest["policy"] != of_run["policy"]
    own = oarjax_json("evaluate", run, "grading.workers=1", "eval.batch=7")["benchmarks"]["held-out"]
    last = read_metrics(run / "metrics.jsonl")[-1]
    np.testing.assert_allclose(own["figures"]["avg@3"]["value"], last["pass_at_1"])
    assert last["pass_at_1"] > 0
    for figure, metric in (("pass@3", "pass_at_k"), ("maj@3", "maj_at_k")):
        np.testing.assert_allclose(own["figures"][figure]["value"], last[metric])
    rows = [{"problem": p.prompt, "answer": p.answer} for p in load_problems(DatasetConfig(**tree["data"]["eval"]))]
    (tmp_path / "same.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    as_file = oarjax_json("evaluate", run, "--data", tmp_path / "same.jsonl", "grading.workers=1", "eval.batch=7")
    assert as_file["benchmarks"]["same"]["figures"] == own["figures"]
    assert finished(run / "checkpoints")[2]["score"] == last["maj_at_k"]
    np.testing.assert_allclose(own["length"], last["eval/length"])
    np.testing.assert_allclose(own["truncated"], last["eval/truncated"])

    export.run(str(run / "checkpoints" / "000002"), tmp_path / "from_checkpoint", "keep")
    same = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "from_checkpoint", run / "exported")]
    assert same[0] == same[1]
    best = max((1, 2), key=lambda n: finished(run / "checkpoints")[n]["score"] or 0)
    assert f"best    {run}/checkpoints/{best:06d} (maj_at_k " in said

    (run / "exported").rename(tmp_path / "elsewhere")
    assert find_target(str(run)).checkpoint == run / "checkpoints" / "000002"
    weights = next((run / "checkpoints" / "000002").rglob("d/*"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert find_target(str(run)).checkpoint == run / "checkpoints" / "000001"
    with pytest.raises(ConfigError, match="this checkpoint is damaged"):
        find_target(str(run / "checkpoints" / "000002"))


def test_checkpoints_of_compared_runs_find_the_policy_beside_them(tmp_path):
    cfg = load_config(ROOT / "configs" / "demo.yaml")
    run = tmp_path / "seed0" / "oar_g"
    for folder in (run, tmp_path / "seed0" / "policy"):
        folder.mkdir(parents=True)
    assert benchmark_target.policy_of(run, cfg) == str(tmp_path / "seed0" / "policy")
    (run / "policy").mkdir()
    assert benchmark_target.policy_of(run, cfg) == str(run / "policy")
    write_manifest(run, {"record": {"commit": "abc"}})
    assert benchmark_target.revision_of(cfg.policy, run) == "abc"
    assert benchmark_target.revision_of(cfg.policy, tmp_path) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "demo", "--k", "2", "--temperature", "0"], "all 2 samples of a problem are the same"),
        (["--data", ","], "--data: expected names out of gsm8k"),
        (["--data", "demo,demo"], "2 of 'demo,demo' are called 'demo', and results are kept by name"),
        (["--data", "gsm8k,org/gsm8k"], "rename a file, or evaluate them one at a time"),
        (["--data", "gsm9k"], "'gsm9k' is neither a benchmark (gsm8k, math500"),
        (["--data", "mine=rows.jsonl"], "unknown benchmark 'mine'"),
        (["--data", "nothing.jsonl"], "--data: no file nothing.jsonl; give the path of"),
        (["--data", "demo", "optim.lr=1"], "optim.lr=1: an evaluation reads seed, device"),
        (["--data", "demo", "rollout.max_new=0"], "rollout.max_new: Input should be greater than 0"),
        (["--data", "demo", "rollout.max_new=5000"], "more than the checkpoint's max_position_embeddings"),
        (["--data", "demo", "data.eval.splitt=test"], "splitt: no such field (did you mean split?)"),
        ([], "is not a run with held-out problems"),
    ],
)
def test_mistakes(oarjax_json, policy, tmp_path, arguments, says):
    code, error = oarjax_json("evaluate", policy, *arguments, "--out", tmp_path / "out", "device=cpu")
    assert code == 2
    assert says in error


def test_folders_that_cannot_be_written_to(oarjax_json, policy, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ["evaluate", policy, "--data", "demo", *CHEAP, "--out"]
    code, error = oarjax_json(*arguments, tmp_path / "file")
    assert code == 2
    assert error.startswith(f"error: --out: cannot write to {tmp_path}/file: ")
    assert error.endswith("set another --out")
    with locked(tmp_path / "used"):
        code, error = oarjax_json(*arguments, tmp_path / "used")
    assert code == 2
    assert f"--out: {tmp_path}/used is in use by process" in error
    assert error.endswith("set another --out")


@pytest.mark.parametrize("text", ['{"policy": {"wei', "[1]"])
def test_a_folder_of_a_damaged_evaluation(oarjax_json, policy, tmp_path, text):
    (tmp_path / "evaluation.json").write_text(text)
    code, error = oarjax_json("evaluate", policy, "--data", "demo", *CHEAP, "--out", tmp_path)
    assert code == 2
    assert f"--out: {tmp_path}/evaluation.json is damaged or belongs to no evaluation" in error


def test_an_evaluation_that_cannot_be_read_is_not_damaged(tmp_path, monkeypatch):
    for name in ("evaluation.json", "samples.jsonl"):
        (tmp_path / name).write_text("{}\n")

    def fails(path, *_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    for call in ("read_text", "stat"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, call, fails)
            patch.setattr(Path, "read_bytes", fails)
            with pytest.raises(StorageError, match=r"cannot read .*evaluation\.json"):
                oarjax.evaluate.command._claim(tmp_path, {})
            with pytest.raises(StorageError, match=r"cannot read .*samples\.jsonl"):
                SampleLines(tmp_path / "samples.jsonl")
    assert (tmp_path / "samples.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("damaged", ["3\n", '{"benchmark": "b", "problem": 1, "sample": 0}\n'])
def test_samples_are_taken_up_to_the_first_damaged_line(tmp_path, damaged):
    good = {"benchmark": "b"} | lines([[1.0]], [["3"]])[0]
    (tmp_path / "samples.jsonl").write_text(json.dumps(good) + "\n" + damaged + json.dumps(good) + "\n")
    with closing(SampleLines(tmp_path / "samples.jsonl")) as samples:
        assert samples.known("b", 3, samples=1, batch=1) == [good]
    assert (tmp_path / "samples.jsonl").read_text() == json.dumps(good) + "\n"


@pytest.mark.parametrize(
    "benchmark", [3, {"data": "d"}, {"data": "d", "settings": {}, "by_problem": {"problem": [0], "pass@1": [1, 0]}}]
)
def test_results_that_are_something_else(tmp_path, benchmark):
    (tmp_path / "results.json").write_text(json.dumps({"benchmarks": {"ok": benchmark}}))
    with pytest.raises(ConfigError, match="not the results of oarjax evaluate; expected its"):
        read_result(tmp_path)


def test_results_in_a_run_are_named_where_the_run_is_given(tmp_path):
    (tmp_path / "evaluate" / "held-out").mkdir(parents=True)
    (tmp_path / "evaluate" / "held-out" / "results.json").touch()
    with pytest.raises(ConfigError, match=r"of oarjax evaluate; in this run lies .*/evaluate/held-out"):
        read_result(tmp_path)


def test_every_checkpoint_of_a_run_has_a_folder_of_its_own_until_there_is_an_export(tmp_path):
    run, asked = tmp_path / "run", read_names("demo")
    cfg = load_config(ROOT / "configs" / "demo.yaml")
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))

    def folder(text: Path, checkpoint: str | None = None) -> Path:
        found = Target("policy", cfg, run / "checkpoints" / checkpoint if checkpoint else None, folder=run)
        return oarjax.evaluate.command._folder(str(text), found, asked, 8, None, None)

    assert folder(run, "000002") == run / "evaluate" / "000002-demo-k8"
    assert folder(run, "000004") == run / "evaluate" / "000004-demo-k8"
    assert folder(run / "checkpoints" / "000004", "000004") == run / "evaluate" / "000004-demo-k8"
    assert folder(run) == run / "evaluate" / "demo-k8"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"policy": {"weights": "b"}}, "give another --out"),
        ({"seed": 1}, "give another --out, or the command that it was started with to resume it"),
    ],
)
def test_a_refused_folder_names_only_remedies_that_help(tmp_path, changes, remedy):
    identity = {"policy": {"weights": "a"}, "seed": 0}
    oarjax.evaluate.command._claim(tmp_path, identity)
    oarjax.evaluate.command._claim(tmp_path, identity)
    with pytest.raises(ConfigError) as refused:
        oarjax.evaluate.command._claim(tmp_path, identity | changes)
    assert str(refused.value).endswith(f"differ); {remedy}")


def test_targets_that_are_no_policy(tmp_path):
    numbered = tmp_path / "checkpoints" / "000020"
    numbered.mkdir(parents=True)
    write_manifest(numbered, {})
    cut = tmp_path / "of_a_run" / "checkpoints" / "000040"
    cut.mkdir(parents=True)
    (tmp_path / "of_a_run" / "config.yaml").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("a: [")
    for name, says in (
        ("broken", "config.yaml: not valid YAML"),
        ("checkpoints", "a folder of checkpoints; name one of them, such as .*/checkpoints/000020"),
        ("of_a_run/checkpoints/000040", "this checkpoint was not finished: it has no manifest.json; use another"),
        ("checkpoints/000099", "no such checkpoint; expected one of 000020"),
        ("", r"has neither config.yaml nor config.json; expected a run folder \(runs/demo\), one of its checkpoints"),
        ("broken/config.yaml", "a file; expected a run folder"),
        ("none", "no such folder; expected a run folder .*, one of its checkpoints .* or a hub name such as"),
    ):
        with pytest.raises(ConfigError, match=f"^(config )?{tmp_path / name}.*{says}"):
            find_target(str(tmp_path / name))
    assert find_target("Qwen/Qwen2.5-0.5B").policy == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("find", [find_target, find_checkpoint])
def test_a_folder_that_may_not_be_read_is_told_so(find, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: you may not read this folder; make it readable"):
        find(str(tmp_path))


def test_prompts_that_do_not_fit(oarjax_json, policy, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+2=", "answer": 3}\n')
    arguments = ["evaluate", policy, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "out", "device=cpu"]
    arguments += ["data.max_prompt=64", "rollout.max_new=8"]
    code, error = oarjax_json(*arguments, "--prompt", "chat")
    assert code == 2
    assert "the tokenizer has no chat template" in error
    code, error = oarjax_json(*arguments, "--prompt", "poem")
    assert code == 2
    assert "--prompt: expected auto, chat, qwen-math" in error


@pytest.mark.slow
def test_an_evaluation_of_a_run_plays_its_episodes(oarjax_json, tmp_path, monkeypatch):
    """Its figures are the run's own last ones: the same seeds, turns and observations."""
    run = tmp_path / "run"
    small = ["iterations=1", "sft.steps=30", "sft.batch=16", "sft.microbatch=16", "rollout.prompts=2"]
    small += ["sft.data.limit=480", "data.train.limit=8", "rollout.group_size=2", "update.microbatch=2"]
    small += ["eval.batch=16", "eval.samples=2", "report.html=false", "device=cpu", f"compilation_cache={CACHE}"]
    monkeypatch.setattr(sys, "argv", ["oarjax", "train", "guess", f"run_dir={run}", *small])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    own = oarjax_json("evaluate", run, "eval.batch=31")["benchmarks"]["held-out"]
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["pass_at_1"] > 0
    np.testing.assert_allclose(own["figures"]["avg@2"]["value"], last["pass_at_1"])
    np.testing.assert_allclose(own["length"], last["eval/length"])


def test_a_run_of_episodes_is_asked_in_its_environment(policy, tmp_path):
    """Its fields but for those of the command line, which are part of what makes two evaluations the same."""
    played = {"name": "builtin:guess", "settings": {"budget": 3}, "turns": 4}
    cfg = load_config(ROOT / "configs" / "guess.yaml")
    cfg = parse_config(cfg.model_dump() | {"rollout": cfg.rollout.model_dump() | {"environment": played}})
    target = Target(str(policy), cfg)
    asked = (own_problems(target, "run").benchmark, "auto", None, None, {}, ["rollout.environment.turns=2"], tmp_path)
    _, tree = config_tree(target, *asked)
    assert config_of(tree).rollout.environment == EnvironmentConfig(**played | {"turns": 2})
    settings = oarjax.evaluate.command._settings(config_of(tree).model_dump(mode="json"))
    assert settings["rollout.environment"]["settings"] == {"budget": 3}


def test_another_style_of_answers_needs_no_pattern(policy, tmp_path):
    """The worked problems' own pattern is for the style that comes with it."""
    asked = (read_names("gsm8k")[0].benchmark, "few-shot", None, None, {}, ["credit.answer.style=boxed"], tmp_path)
    assert config_tree(Target(str(policy)), *asked)[1]["credit"]["answer"] == {"style": "boxed"}


def test_a_file_of_ones_own(oarjax_json, policy, tmp_path):
    """Its fields are found by their names, a local copy of a benchmark is asked like the benchmark."""
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+2=", "answer": 3}\n{"problem": "2+2=", "answer": "4"}\n')
    small = ["rollout.max_new=4", "data.max_prompt=16", *CHEAP[2:], "credit.answer.style=hash"]
    arguments = ["evaluate", policy, "--data", tmp_path / "rows.jsonl", "--prompt", "plain", *small, "--out"]
    result = oarjax_json(*arguments, tmp_path / "out")
    found = result["benchmarks"]["rows"]
    assert (found["problems"], found["figures"]["pass@1"]["problems"]) == (2, 2)
    rows = '{"problem": "1+2=", "answer": 3}\n{"problem": "2+2=", "answer": "4", "tests": "assert True"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    code, error = oarjax_json(*arguments, tmp_path / "out")
    assert code == 2
    assert "holds another evaluation (benchmarks.rows.columns differ)" in error
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+2=", "answer": ""}\n{"problem": "2+2=", "answer": "4"}\n')
    found = find_fields(DatasetConfig(source=f"{tmp_path}/rows.jsonl"))
    assert (found.prompt_field, len(load_problems(found))) == ("problem", 2)  # the first row's answer is blank
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+2=", "answer": "3"}\n{"problem": "2+2="}\n')
    code, error = oarjax_json(*arguments, tmp_path / "other")
    assert code == 2
    assert "rows.jsonl line 2: no field 'answer', only 'problem'; set data.eval.answer_field" in error
    (asked,) = read_names(f"gsm8k={tmp_path}/rows.jsonl")
    assert (asked.name, asked.benchmark.max_new) == ("gsm8k", BENCHMARKS["gsm8k"].max_new)


def lines(scores, answers):
    return [
        {"problem": p, "sample": s, "score": score, "answer": answers[p][s], "tokens": 10, "ended": s > 0}
        | {"verdict": "timeout" if score is None else "graded", "vote": -1 if answers[p][s] is None else s % 2}
        for p, row in enumerate(scores)
        for s, score in enumerate(row)
    ]


def test_figures_of_a_benchmark():
    records = lines([[1.0, 0.0, 1.0], [0.0, 0.0, None]], [["3", "4", "3"], ["1", None, "2"]])
    found = benchmark_result(records[::-1], samples=3)
    values = {name: figure["value"] for name, figure in found["figures"].items()}
    np.testing.assert_allclose([values["pass@1"], values["avg@3"], values["maj@3"]], [1 / 3, 1 / 3, 1 / 2])
    np.testing.assert_allclose(values["pass@2"], 1 / 2)
    assert (values["pass@3"], found["figures"]["pass@3"]["problems"]) == (1, 1)  # the other has two graded samples
    assert found["ungraded"] == 1
    assert found["verdicts"] == {"graded": 5, "timeout": 1}
    np.testing.assert_allclose([found["truncated"], found["no_answer"], found["length"]], [1 / 3, 1 / 6, 10])


def test_the_table_has_a_column_for_each_benchmark():
    one = benchmark_result(lines([[1.0], [0.0]], [["3"], [None]]), samples=1)
    two = benchmark_result(lines([[1.0, 0.0]], [["3", "4"]]), samples=2)
    shown = io.StringIO()
    console = Console(file=shown, width=80)
    print_results(console, {"benchmarks": {"gsm8k": one, "aime24": two}})
    rows = {line.split("│")[1].strip(): line for line in shown.getvalue().splitlines() if "│" in line}
    assert "50.0 (0.0 to 100.0)" in rows["pass@1"]
    assert "n/a" in rows["maj@2"]
    assert "100.0" in rows["maj@2"]
    assert "50.0%" in rows["no answer"]


def test_an_evaluation_survives_its_checkpoint():
    found = Evaluation(np.asarray([1.0, np.nan]), 3.0, 0.5, {"pass_at_k": 1.0, "maj_at_k": np.nan})
    back = evaluation_from(json.loads(json.dumps(plain_evaluation(found))))
    assert back is not None
    np.testing.assert_equal(back.metrics, found.metrics)
    assert found.metrics["pass_at_k"] == 1
    older = {"scores": [1.0], "length": 3.0, "truncated": 0.0}
    read = evaluation_from(older)
    assert read is not None
    assert set(read.metrics) == {"pass_at_1", "eval/length", "eval/truncated"}


def test_the_best_over_samples_needs_samples():
    tree = {"run_dir": "run", "policy": {"path": "p"}, "data": {"train": {"source": "rows.jsonl"}}}
    with pytest.raises(ConfigError, match=r"checkpoint\.best: maj_at_k needs several samples, but eval\.samples is 1"):
        parse_config(tree | {"checkpoint": {"best": "maj_at_k"}})
    parse_config(tree | {"checkpoint": {"best": "maj_at_k"}, "eval": {"samples": 2}})


def test_two_evaluations_are_paired(oarjax_json, policy, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        oarjax_json("evaluate", policy, "--data", "demo", "--k", 2, *CHEAP, f"seed={seed}", "--out", tmp_path / name)
    a, b = (json.loads((tmp_path / name / "results.json").read_text()) for name in "ab")
    for result, scores in ((a, [1.0, 1.0, 0.5]), (b, [0.5, 1.0, 0.0])):
        result["benchmarks"]["demo"]["by_problem"]["avg@2"][:3] = scores
        result["benchmarks"]["demo"]["by_problem"]["avg@2"][3:] = [0.0] * 7
    found = compare(a, b)["benchmarks"]["demo"]
    np.testing.assert_allclose(found["figures"]["avg@2"]["value"], 0.1)
    # Deviation of (.5, 0, .5, 0 x 7), t(0.975, 9) = 2.262157.
    half = 2.262157 * np.std([0.5, 0, 0.5] + [0] * 7, ddof=1) / np.sqrt(10)
    np.testing.assert_allclose(found["figures"]["avg@2"]["high"], 0.1 + half, rtol=1e-6)
    assert found["settings"] == {"seed": [0, 1]}
    printed = oarjax_json("compare", tmp_path / "a", tmp_path / "b" / "results.json")
    assert set(printed["benchmarks"]["demo"]["figures"]) == {"pass@1", "pass@2", "avg@2", "maj@2"}
    b["benchmarks"]["demo"]["data"] = "other"
    with pytest.raises(ConfigError, match="different problems and cannot be paired"):
        compare(a, b)
    with pytest.raises(ConfigError, match="share no benchmark"):
        compare(a, {"benchmarks": {}})


def test_prompts_by_family(policy):
    tokenizer = load_tokenizer(policy)
    families = {}
    for template in (
        None,
        "{{ messages }}",
        "{% if enable_thinking %}",
        "x " + PROMPTS["qwen-math"]["data.system_prompt"],
    ):
        tokenizer.chat_template = template
        families[template] = family_prompt("org/policy", tokenizer)
    assert list(families.values()) == ["few-shot", "chat", "qwen3", "qwen-math"]
    tokenizer.chat_template = "{{ messages }}"
    assert family_prompt("Qwen/Qwen2.5-Math-1.5B", tokenizer) == "qwen-math"


def test_few_shot_reads_the_first_answer():
    assert few_shot().count("{prompt}") == 1
    made = " 2 + 2 = 4. The answer is $4$.\n\nQuestion: 3?\nAnswer: The answer is 5."
    assert extract_answer(made, style="regex", pattern=FIRST_ANSWER) == "4"
    assert extract_answer("The answer is \\frac{1}{9}.", style="regex", pattern=FIRST_ANSWER) == "\\frac{1}{9}"
    assert extract_answer("It is 4.", style="regex", pattern=FIRST_ANSWER) is None


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    for name in ("old/aime.parquet", "mine.jsonl"):
        (tmp_path / name).touch()
    assert [a.name for a in read_names("gsm8k, aime24=old/aime.parquet,mine.jsonl,org/set")] == [
        "gsm8k",
        "aime24",
        "mine",
        "set",
    ]


@pytest.mark.slow
def test_answers_without_a_grade_are_said_and_no_score_is_shown(policy, tmp_path, monkeypatch, capfd):
    (tmp_path / "r.py").write_text(
        "from oarjax import reward\n\n\n@reward('broken')\ndef broken(sample):\n    raise TypeError('no')\n"
    )
    given = [f"grading.plugins=['{tmp_path / 'r.py'}']", "grading.rewards=[{name: broken}]"]
    monkeypatch.setattr(
        sys, "argv", ["oarjax", "evaluate", str(policy), "--data", "demo", "--out", f"{tmp_path}/out", *CHEAP, *given]
    )
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    said = " ".join(capfd.readouterr().out.split())
    assert "score n/a" in said
    assert "10 of 10 completions have no grade and are left out, the first: crash, reward" in said
