"""``oarjax credit`` as a user meets it, on tiny policies of both kinds, and the parts that need no policy."""

from __future__ import annotations

import io
import json
import sys
from functools import partial

import numpy as np
import pytest
import yaml
from conftest import CACHE
from fake_lab import fake_programs
from rich.console import Console
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

import oarjax.run.grades
from oarjax.cli import main
from oarjax.config.changes import changed
from oarjax.config.loading import parse_config
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.data.hf import write_random_checkpoint
from oarjax.data.problems import Problem
from oarjax.data.tasks.arithmetic import SPECIAL, write_builtin_policy
from oarjax.run.run import open_run
from oarjax.tools.lab import command
from oarjax.tools.lab.completions import sample_completions, saved_completions, usable_rows
from oarjax.tools.lab.lab import grade_continuations, known_tokens, run_lab
from oarjax.tools.lab.oracles import Continuation
from oarjax.tools.lab.results import read_lab
from oarjax.tools.lab.saved_rollouts import SavedRollout, read_rollouts
from oarjax.types import AnswerSpan

METHODS = {
    "OAR-P": {"method": "oar_p"},
    "OAR-G": {"method": "oar_g"},
    "entropy": {"method": "entropy"},
    "keywords": {"method": "keywords", "keywords": {"words": ["="]}},
    "permuted": {"method": "permuted"},
    "random": {"method": "random"},
    "GRPO": {"method": "uniform"},
}
BASE = {
    "device": "cpu",
    "compilation_cache": str(CACHE),
    "data": {
        "template": "plain",
        "max_prompt": 24,
        "train": {"source": "builtin:arithmetic", "split": "train", "limit": 4, "arithmetic": {"terms": 2}},
        "eval": {"source": "builtin:arithmetic", "split": "eval", "limit": 12, "arithmetic": {"terms": 2}},
    },
    "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 8, "completion_bucket": 12},
    "grading": {"rewards": [{"name": "exact"}], "workers": 1},
    "credit": {"answer": {"style": "hash"}},
    "update": {"microbatch": 8},
    "eval": {"batch": 4},
    "lab": {"problems": 6, "shortest": 2, "batch": 4, "branches": 8, "bootstrap": 200, "shown": 2, "methods": METHODS},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    return write_builtin_policy(folder / "tiny", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)


@pytest.fixture
def oarjax_command(monkeypatch, capfd):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["oarjax", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "dumb")
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        return code, *capfd.readouterr()

    return command


def config_file(folder, policy, **changes):
    tree = BASE | {"run_dir": str(folder / "run"), "policy": {"path": str(policy)}} | changes
    (folder / "credit.yaml").write_text(yaml.safe_dump(tree))
    return folder / "credit.yaml"


def run_of(tmp_path, policy, **changes):
    tree = BASE | {"run_dir": str(tmp_path / "run"), "policy": {"path": str(policy)}} | changes
    return open_run(parse_config(tree), Console(file=io.StringIO()))


# Parts


def test_rows_need_an_answer_after_enough_reasoning():
    reasoning = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]], bool)
    answer = np.array([[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1]], bool)
    span = AnswerSpan(reasoning, answer, np.array([True, True, True, False]))
    assert usable_rows(span, shortest=2).tolist() == [0]
    assert usable_rows(span, shortest=1).tolist() == [0, 1]


def test_completions_are_taken_in_order_until_enough_have_an_answer(tmp_path, policy):
    run = run_of(tmp_path, policy)
    completions = sample_completions(run, fake_programs([], run))
    # Rows r write r, =, 2, r % 3 semicolons before the marker: all reason for at least 3 tokens.
    assert [p.index for p in completions.problems] == [0, 1, 2, 3, 4, 5]
    assert completions.considered == 6
    assert completions.span.reasoning.sum(1).tolist() == [3, 4, 5, 3, 3, 4]
    assert completions.rollout.completion.shape[1] == 12
    few = run_of(tmp_path, policy, lab=BASE["lab"] | {"shortest": 4})
    completions = sample_completions(few, fake_programs([], few))
    assert [p.index for p in completions.problems] == [1, 2, 5, 6, 9, 10]
    assert completions.considered == 11
    several = run_of(tmp_path, policy, lab=BASE["lab"] | {"samples": 3})
    completions = sample_completions(several, fake_programs([], several))
    assert [p.index for p in completions.problems] == [0, 0, 0, 1, 1, 1]


def test_known_tokens_are_the_digits_of_results(tmp_path, policy):
    run = run_of(tmp_path, policy)
    texts = [[*"3+9=12;12-4=8;", "####", " ", "8"], ["####", " ", "8"], [*"3+9=12;12-4=7;", "####", " ", "7"]] * 2
    problems = [Problem("3+9-4=", "8", n) for n in range(6)]
    reasoning = np.zeros((6, 17), bool)
    reasoning[::2, :14] = True
    found = known_tokens(
        run.cfg.data.eval or run.cfg.data.train, problems, texts, reasoning, np.array([1.0, 0, 0, 1, 1, 1], np.float32)
    )
    assert found is not None
    known, wrong = found
    assert np.flatnonzero(known[0]).tolist() == [4, 5, 12]
    assert not known[1].any()
    assert np.argwhere(wrong).tolist() == [[2, 12]]  # of the failed one alone


def test_the_same_completion_is_graded_once(tmp_path, policy, monkeypatch):
    from test_config_fields import FakeGrader

    seen = []

    class Counting(FakeGrader):
        def submit(self, samples):
            seen.extend(samples)
            return super().submit(samples)

    monkeypatch.setattr(oarjax.run.grades, "Grader", Counting)
    run = run_of(tmp_path, policy)
    completions = sample_completions(run, fake_programs([], run))
    completions.referenced[1] = False
    with run.grader() as grader:
        found = grade_continuations(
            partial(run.submit, grader), completions, [0, 0, 1, 2, 0],
            [Continuation([5, 6], True), Continuation([5, 6], True), Continuation([5], True), Continuation([5], True),
             Continuation([5, 6, 7, 8], True)],
            reward=run.cfg.grading.rewards[0].name, pad_id=run.pad_id,
        )  # fmt: skip
    assert len(seen) == 3
    assert [s.tokens for s in seen] == [2, 1, 4]
    np.testing.assert_array_equal(found, [0, 0, np.nan, 1, 1])  # FakeGrader: 1 for lengths 1 and 4


@pytest.mark.parametrize(
    ("credit", "draws"),
    [
        ({"method": "oar_g"}, True),
        ({"method": "oar_g", "probe": {"mode": "answer_joint"}}, False),
        ({"method": "oar_g", "probe": {"mode": "answer_joint"}, "estimator": "noisy"}, True),
        ({"method": "oar_p"}, False),
        ({"method": "oar_f"}, False),
        ({"method": "oar_f", "fisher": {"sampled": 2}}, True),
        ({"method": "oar_screened", "fisher": {"sampled": 2}}, False),
        ({"method": "oar_screened", "fisher": {"sampled": 2}, "screen": {"by": "oar_f"}}, True),
        ({"method": "random"}, True),
        ({"method": "permuted", "permuted_of": "oar_p"}, True),
        ({"method": "entropy"}, False),
    ],
)
def test_methods_that_draw_noise(credit, draws):
    assert resolve_method(changed(CreditSettings(), credit)).draws_noise is draws


def test_saved_text_and_ids_come_to_the_same(tmp_path, policy):
    run = run_of(tmp_path, policy)
    ids = {text: run.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("3+4=", "3+4=7;#### 7")}
    saved = [
        SavedRollout("3+4=", "3+4=7;#### 7", "7"),
        SavedRollout("3+4=", "no answer?"[-1:], "7"),
        SavedRollout(ids["3+4="], ids["3+4=7;#### 7"], None),
    ]
    completions = saved_completions(run, saved)
    assert completions.referenced.tolist() == [True, False]
    np.testing.assert_array_equal(completions.rollout.tokens[0], completions.rollout.tokens[1])
    assert completions.span.reasoning.sum(1).tolist() == [6, 6]
    assert [p.prompt for p in completions.problems] == ["3+4=", "3+4="]
    assert completions.considered == 3


def test_rollouts_of_one_prompt_are_one_problem(tmp_path, policy, monkeypatch):
    from test_config_fields import FakeGrader

    monkeypatch.setattr(oarjax.run.grades, "Grader", FakeGrader)
    run = run_of(tmp_path, policy)
    completions = ["3+4=7;#### 7", "7", "3+4=7;;#### 7"]
    saved = [SavedRollout(f"3+{n}=", text, "7") for n in (4, 5, 6, 4, 7) for text in completions]
    completions = saved_completions(run, saved)
    assert [p.index for p in completions.problems] == [0, 0, 1, 1, 2, 2]
    assert (completions.answered, completions.considered) == (10, 15)
    with run.grader() as grader:
        found = run_lab(run, fake_programs([], run), grader, completions)
    assert found.facts["completions"] == "the first 6 of 10 with an answer, out of 15"
    assert "percentile bootstrap over 3 prompts, each with its rollouts (200 resamples)" in found.interval
    assert found.oracles["direct"].count == 3


def test_rollouts_of_trl_and_verl_come_to_the_same(tmp_path, policy):
    """Their prompts are what the policy read: the config's template is not laid around them again."""
    run = run_of(tmp_path, policy)
    run = run.with_config(run.cfg.model_copy(update={"data": changed_data(run, "({prompt})")}))
    trl = {"step": 1, "prompt": "3+4=", "completion": "3+4=7;#### 7", "math": 1.0, "advantage": 0.5, "answer": "7"}
    verl = {"input": "3+4=", "output": "3+4=7;#### 7", "gts": "7", "score": 1.0, "step": 1}
    found = []
    for name, line in (("trl", trl), ("verl", verl)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
        found.append(saved_completions(run, read_rollouts(tmp_path / f"{name}.jsonl")))
    for completions in found:
        ids = run.tokenizer("3+4=3+4=7;#### 7", add_special_tokens=False)["input_ids"]
        assert completions.rollout.tokens[0][completions.rollout.valid[0]].tolist() == ids
        assert completions.problems[0].reference == "7"


def changed_data(run, prompt_format):
    return run.cfg.data.model_copy(update={"prompt_format": prompt_format})


# Mistakes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["policy.path=runs/demo/export"], "so train it first: oarjax train configs/demo.yaml"),
        (["credit.answer.style=none"], "credit.answer.style: the lab needs answers, got none"),
        (["credit.answer.source=reference"], "the lab reads the answers of the completions, got reference; set own"),
        (["lab.methods={}"], "lab.methods: expected at least one method"),
        (["lab.methods={x: {methd: oar_p}}"], "lab.methods.x: methd: no such field (did you mean method?)"),
        (["lab.methods={x: {answer: {style: boxed}}}"], "lab.methods.x: all methods read the same answers"),
        (["lab.share=0"], "lab.share: "),
    ],
)
def test_mistakes_fail_early(oarjax_command, tmp_path, policy, monkeypatch, changes, says):
    monkeypatch.chdir(tmp_path)  # where no demo was trained
    code, _, err = oarjax_command("credit", config_file(tmp_path, policy), *changes)
    assert code == 2
    assert says in " ".join(err.split())


def test_a_missing_file_of_rollouts(oarjax_command, tmp_path, policy):
    code, _, err = oarjax_command("credit", config_file(tmp_path, policy), "--rollouts", tmp_path / "none.jsonl")
    assert code == 2
    assert "--rollouts: no file" in err


def test_rollouts_that_do_not_fit_the_policy(oarjax_command, tmp_path, policy):
    path = config_file(tmp_path, policy)
    for record, says in (
        ({"completion_ids": [4, 99]}, "expected the policy's token ids, 0 to 31, got 99; set policy.path to"),
        (
            {"completion": "1" * 600},
            "expected at most 512 tokens, the policy's max_position_embeddings, got 604",
        ),
        ({"completion": "two"}, "the tokenizer cannot encode 'two': "),
    ):
        lines = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1="} | record]
        (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, lines)))
        code, _, err = oarjax_command("credit", path, "--rollouts", tmp_path / "bad.jsonl")
        assert code == 2
        assert f"--rollouts: {tmp_path}/bad.jsonl, line 2: {says}" in " ".join(err.split())


def test_help(oarjax_command):
    code, out, _ = oarjax_command("credit", "--help")
    assert code == 0
    for words in ("CONFIG.yaml", "--rollouts", "--json", "oarjax credit demo_credit", "credit.html"):
        assert words in out


# The whole command


@pytest.mark.slow
def test_a_policy_without_answers(oarjax_command, tmp_path, policy):
    code, _, err = oarjax_command("credit", config_file(tmp_path, policy), "credit.answer.style=boxed")
    assert code == 2
    assert "lab: none of 12 completions has an answer (credit.answer.style boxed)" in " ".join(err.split())


@pytest.mark.slow
def test_tables_files_and_json(oarjax_command, tmp_path, policy, monkeypatch):
    """A random policy whose first digit counts as its answer."""
    answer = {"answer": {"style": "regex", "pattern": "[0-9]"}, "masking": {"buckets": 1}}
    path = config_file(tmp_path, policy, credit=answer)
    code, out, err = oarjax_command("credit", path)
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    for words in (*METHODS, "best possible", "Spearman", "forwards", "written to"):
        assert words in out
    folder = tmp_path / "run"
    found = read_lab(folder / "credit.json")
    by_name = {m.name: m.figures for m in found.methods}
    assert by_name["OAR-P"]["spearman"].mean == pytest.approx(1)
    assert by_name["OAR-P"]["recall_exact"].mean == pytest.approx(1)
    assert by_name["GRPO"]["ess"].mean == pytest.approx(1)
    assert by_name["GRPO"]["forwards"].mean == 0
    assert 1 < by_name["entropy"]["forwards"].mean < 1.2  # a forward pass and the vocabulary head
    assert by_name["OAR-P"]["forwards"].mean > by_name["OAR-G"]["forwards"].mean > 1.5
    assert by_name["OAR-P"]["seconds"].mean > 0
    assert set(by_name["random"]) - set(by_name["OAR-P"]) == {"repeat"}
    assert len(found.completions) == 2
    assert (folder / "credit.png").read_bytes().startswith(b"\x89PNG")
    assert 'id="a6"' in (folder / "credit.html").read_text()  # seven methods to choose from

    measured = command.measure_credit
    monkeypatch.setattr(command, "measure_credit", lambda *a, **k: print("my method prints") or measured(*a, **k))
    code, out, err = oarjax_command("credit", path, "--json", "report.html=false", f"run_dir={tmp_path / 'other'}")
    assert code == 0, err
    assert "my method prints" in err
    again = json.loads(out)
    same = json.loads((folder / "credit.json").read_text())
    for document in (again, same):
        document["facts"].pop("run folder")
        for method in document["methods"]:
            method["figures"].pop("seconds")
    assert again == same
    assert not (tmp_path / "other" / "credit.html").exists()


def write_boxed_qwen3(folder):
    """A random Qwen3 with a character-level tokenizer that can write a box."""
    letters = "0123456789+-=; \\boxed{}.S"
    vocabulary = {token: n for n, token in enumerate((*SPECIAL, *dict.fromkeys(letters)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    files = folder / "tokenizer"
    files.mkdir()
    tokenizer.save(str(files / "tokenizer.json"))
    (files / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]})
    )
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return write_random_checkpoint(folder / "qwen3", fields, seed=0, tokenizer=files)


@pytest.mark.slow
def test_saved_boxed_completions_of_a_qwen3(oarjax_command, tmp_path):
    """Any HF Qwen folder, answers in boxes, rollouts from a file, of which one has no right answer."""
    qwen3 = write_boxed_qwen3(tmp_path)
    lines = [
        {"prompt": "1+2=", "completion": "So 1+2=3. \\boxed{3}.", "reference": "3"},
        {"prompt": "4+5=", "completion": "S 4+5=9; \\boxed{9}", "reference": "8"},
        {"prompt": "7-5=", "completion": "7-5=2 \\boxed{2}"},
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "1+1=", "answer": "2"}))
    path = config_file(
        tmp_path,
        qwen3,
        credit={"answer": {"style": "boxed"}, "masking": {"buckets": 1}},
        data={"template": "plain", "max_prompt": 24, "train": {"source": str(problems)}},
        grading={"rewards": [{"name": "math"}], "workers": 1},
        lab=BASE["lab"] | {"answer_tokens": 4, "methods": {n: METHODS[n] for n in ("OAR-P", "entropy", "random")}},
    )
    code, out, err = oarjax_command("credit", path, "--json", "--rollouts", tmp_path / "rollouts.jsonl")
    assert code == 0, err
    found = json.loads(out)
    assert found["facts"]["completions"] == "3 with an answer, out of 3"
    assert [c["reward"] for c in found["completions"]] == [1.0, 0.0]
    assert [c["answer"] for c in found["completions"]] == ["3", "9"]
    assert "".join(found["completions"][0]["tokens"]) == lines[0]["completion"]
    assert all(not c["known"] for c in found["completions"]), "nothing is known of another task"
    assert "computed" not in found["oracles"]
    assert found["oracles"]["total"]["count"] == 2, "the third has no right answer to grade by"
    by_name = {m["name"]: m["figures"] for m in found["methods"]}
    assert by_name["OAR-P"]["spearman"]["mean"] == pytest.approx(1)
