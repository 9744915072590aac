"""A config for a user's own data: columns, what is held out, what of the base remains."""

import json
from pathlib import Path

import pytest

from oarjax.cli import main
from oarjax.config.loading import load_config
from oarjax.data.problems import load_problems
from oarjax.data.rows import DataError
from oarjax.data.starter import write_config
from oarjax.errors import ConfigError
from oarjax.run.run import open_run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def csv_file(path, header="Question,Answer,level", rows=40):
    lines = [f"What is {n} plus 3?,{n + 3},easy" for n in range(rows)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path.name)


def test_a_config_of_ones_own_data(tmp_path):
    written = write_config(csv_file(tmp_path / "qa.csv"))
    cfg = load_config(written.config)
    parts = [load_problems(part) for part in (cfg.data.train, cfg.data.eval)]
    assert [len(part) for part in parts] == [36, 4] == list(written.rows)
    assert len({p.prompt for part in parts for p in part}) == 40
    assert parts[0][0].columns == {"Question": "What is 1 plus 3?", "Answer": "4", "level": "easy"}
    assert (cfg.run_dir, cfg.policy.path) == ("runs/qa", "Qwen/Qwen2.5-0.5B-Instruct")
    assert [reward.name for reward in cfg.grading.rewards] == ["math"]
    assert "oarjax train qa.yaml" in written.message()
    assert "extra hub" in written.message()
    assert "4 held-out prompts is known to ±35 points" in written.message()


@pytest.mark.parametrize(
    "row", ['"question": "\\ud800", "answer": "1"', '"question": "a", "answer": "1", "note": "\\udfff"']
)
def test_half_a_surrogate_pair_is_refused_before_a_file_is_written(tmp_path, row):
    (tmp_path / "half.jsonl").write_text('{"question": "b", "answer": "2"}\n{' + row + "}\n")
    with pytest.raises(DataError, match=r"half.jsonl line 2: holds '.*', half of a surrogate pair.*leave the row out"):
        write_config("half.jsonl", base="demo")
    assert [path.name for path in tmp_path.iterdir()] == ["half.jsonl"]


def test_answers_that_the_demos_policy_never_saw_are_counted(tmp_path):
    rows = ["question,answer", "9-9=,0.0", "9-2=,7", "9+1=,10", "1-2=,-1"]
    (tmp_path / "sums.csv").write_text("\n".join(rows) + "\n")
    said = write_config("sums.csv", base="demo").message()
    assert "2 of 4 answers are not numbers from 0 to 9" in said
    assert "4 of 4 prompts do not have 5 numbers" in said
    assert "hub" not in said
    assert "cannot read" not in said


def test_a_yaml_that_is_no_config_is_the_file_to_write_and_unknown_letters_are_named(tmp_path):
    said = write_config(csv_file(tmp_path / "qa.csv"), base="mine.yaml").message()
    assert "wrote mine.yaml for Qwen/" in said
    assert "cannot read" not in said
    said = write_config("qa.csv", Path("with_demo.yaml"), base="demo").message()
    assert "the built-in policy cannot read 'W' 'a' 'h' 'i' 'l' 'p' 's' 't' 'u': without a NAME" in said


def test_sums_without_an_equals_sign_get_the_warm_starts(tmp_path):
    """Without it the demo's policy had 0% of 20 such sums after ten iterations, and with it 30%."""
    for name, end, expected in (("bare", "", "{prompt}="), ("asked", "=", "{prompt}")):
        (tmp_path / f"{name}.csv").write_text(f"question,answer\n9+9-1{end},17\n9+8{end},17\n")
        assert load_config(write_config(f"{name}.csv", base="demo").config).data.prompt_format == expected


def test_the_rest_of_a_named_config_stays(tmp_path):
    rows = [{"prompt": "ab" * 50, "input": "x", "output": f"word {n % 2}"} for n in range(4)] + [
        {"prompt": "b", "input": "x", "output": "word"}
    ]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = write_config("words.jsonl", tmp_path / "mine.yaml", base="demo")
    demo, mine = load_config("demo"), load_config(tmp_path / "mine.yaml")
    changed = {name for name in type(demo).model_fields if getattr(demo, name) != getattr(mine, name)}
    assert changed == {"run_dir", "data"}
    assert mine.data.max_prompt == 128  # 100 bytes at one a token of a built-in policy, in steps of 32
    assert sorted(written.rows) == [1, 4]  # the rows of a prompt stay together
    assert (mine.data.eval.prompt_field, mine.data.eval.answer_field) == ("prompt", "output")


def test_columns_are_named_or_refused_with_those_there(tmp_path):
    source = csv_file(tmp_path / "de.csv", header="Frage,Antwort,level")
    with pytest.raises(ConfigError, match=r"de.csv has the columns Frage, Antwort, level; expected one of question, "):
        write_config(source)
    with pytest.raises(ConfigError, match="expected two of Frage, Antwort, level, as PROMPTS,ANSWERS, got Frage,Wort"):
        write_config(source, columns="Frage,Wort")
    assert not (tmp_path / "de.yaml").exists()
    assert write_config(source, columns="Frage, Antwort").columns == ("Frage", "Antwort")


def test_nothing_is_overwritten(tmp_path):
    source = csv_file(tmp_path / "qa.csv")
    (tmp_path / "qa.eval.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"qa.eval.jsonl exists; give another file"):
        write_config(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qa.csv", "qa.eval.jsonl"]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("question,answer\n", DataError, "holds no rows"),
        ("question,answer\n1+1,2\n1+1,3\n", DataError, "all rows have the same prompt"),
        ("question,answer\n1+1\n", DataError, "expected 2 values"),
        ("question;answer\n1+1;2\n", ConfigError, "columns are divided by ';': write commas"),
        ("1+1,2\n1+2,3\n", ConfigError, "the first line of a CSV file must name its columns"),
    ],
)
def test_data_that_cannot_be_read_or_divided(tmp_path, text, error, says):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(error, match=says):
        write_config("rows.csv")


def test_remedies_name_the_command_s_options(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": null}\n')
    with pytest.raises(DataError, match=r"or remove it, or set --columns to another"):
        write_config("rows.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"x": 1}\n')
    with pytest.raises(DataError, match=r"line 2: no fields 'question' and 'answer', only 'x'; set --columns to two"):
        write_config("rows.jsonl")
    (tmp_path / "rows.tsv").touch()
    with pytest.raises(DataError, match=r"init --data: expected a \.jsonl"):
        write_config("rows.tsv")


def test_a_run_opens_from_what_the_command_writes(tmp_path, monkeypatch):
    lines = [f"{a}+{b}=,{a}+{b}={a + b}#### {a + b}" for a in range(6) for b in range(6)]
    (tmp_path / "sums.csv").write_text("\n".join(["question,answer", *lines]) + "\n")
    monkeypatch.setattr("sys.argv", ["oarjax", "init", "demo", "sums.yaml", "--data", "sums.csv"])
    with pytest.raises(SystemExit):
        main()
    run = open_run(load_config("sums.yaml", ["sft=null", "device=cpu"]))
    assert (len(run.train), len(run.held_out)) == (32, 4)


def test_one_row_far_longer_than_the_rest_does_not_widen_every_prompt(tmp_path):
    source = csv_file(tmp_path / "qa.csv")
    usual = load_config(write_config(source, Path("usual.yaml")).config).data.max_prompt
    with (tmp_path / source).open("a") as file:
        file.write("x" * 10_000 + ",,\n" + "What is 1 plus 3?,5,\n" * 2 + " ,7,\n")
    written = write_config(source, Path("far.yaml"))
    assert load_config(written.config).data.max_prompt == usual
    assert "data.max_prompt=5024 takes them all" in written.message()
    assert "1 of 44 answers are blank or NaN" in written.message()
    assert "1 of 44 prompts are blank" in written.message()
    assert "1 of 42 prompts stand with different answers in several rows" in written.message()
