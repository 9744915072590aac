"""Code that a run's files name is not imported unless it is the user's own, or allowed."""

import sys
from pathlib import Path

import pytest
import tiny
from conftest import ROOT

from oarjax.evaluate import sample
from oarjax.report.fields import field_rows
from oarjax.storage.folder import claim
from oarjax.storage.trust import (
    UntrustedCode,
    check_trust,
    code_digest,
    code_digests,
    code_places,
    note_trusted,
    state_folder,
)
from oarjax.system.plugins import plugin_file


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "stdin", open("/dev/null", encoding="utf-8"))  # noqa: SIM115


def code(tmp_path, name="mine.py", text="raise RuntimeError('imported')\n"):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def refused(cfg, run):
    with pytest.raises(
        UntrustedCode, match=r"names Python code that is not known to be yours: .*pass --trust-code"
    ) as e:
        check_trust(code_places(cfg), run, source="x", trusted=False)
    return str(e.value)


def test_without_code_there_is_no_question(tmp_path):
    check_trust(code_places(tiny.config()), tmp_path, source="x", trusted=False)


def test_own_is_what_was_noted_and_is_unchanged(tmp_path):
    file = code(tmp_path)
    cfg = tiny.config(loss__function=f"{file}:loss")
    run = claim(tmp_path / "run", cfg)
    assert f"loss.function={file}:loss" in refused(cfg, run)
    assert note_trusted(run, code_places(cfg)) is None
    check_trust(code_places(cfg), run, source="x", trusted=False)
    run = run.rename(tmp_path / "moved")
    check_trust(code_places(cfg), run, source="x", trusted=False)
    refused(tiny.config(loss__function=f"{file}:another"), run)  # another name in the same file
    refused(tiny.config(grading__plugins=[str(file)]), run)
    refused(tiny.config(loss__function="os:system"), run)
    refused(cfg, tmp_path)  # of another run, or of none
    file.write_text("print('changed')")
    refused(cfg, run)
    check_trust(code_places(cfg), run, source="x", trusted=True)
    assert "is not here" not in refused(cfg, run)
    file.unlink()
    assert f"loss.function={file}:loss is not here: start the command in the folder that" in refused(cfg, run)


def test_every_field_that_names_code_is_asked_about(tmp_path):
    place, named = f"{code(tmp_path)}:loss", sorted(row.path for row in field_rows() if "file.py:" in row.about)
    credit = ["credit.function", "credit.marks", "credit.probe.function"]
    plain = ["loss.function", "optim.function", "rollout.environment.name", "sft.optim.function"]
    assert named == ["advantage.function", *credit, *plain]
    warm = {"sft__data": {"source": "builtin:arithmetic"}, "sft__batch": 2, "sft__microbatch": 2, "sft__steps": 1}
    settings = {name.replace(".", "__"): place for name in named} | warm
    cfg = tiny.config(**settings, credit__method="custom", grading__plugins=[str(tmp_path / "rewards.py")])
    asked = refused(cfg, claim(tmp_path / "run", cfg))
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    assert all(f"{name}={place}" in asked and f"`{name}`" in page for name in named)
    assert "grading.plugins=" in asked
    taskset = {"name": "verifiers:words", "settings": {"python": "theirs/python"}}
    asked = refused(tiny.config(rollout__environment=taskset), tmp_path)
    assert "rollout.environment.name=words" in asked
    assert "rollout.environment.settings.python=theirs/python" in asked


def test_episodes_of_a_run_are_sampled_only_if_its_class_is_trusted(tmp_path):
    cfg = tiny.config(rollout__environment={"name": f"{code(tmp_path)}:Shop"})
    run = claim(tmp_path / "run", cfg)
    (run / "export").mkdir()
    (run / "export" / "config.json").touch()
    with pytest.raises(UntrustedCode, match=r"rollout\.environment\.name="):
        sample.run(str(run), ["x"], "auto", 1, 4, None, {}, [], 0)


@pytest.mark.parametrize("known", ["../../escape", "", 5, "f" * 33])
def test_an_id_that_is_none_is_not_looked_up(tmp_path, known):
    cfg = tiny.config(loss__function=f"{code(tmp_path)}:loss")
    run = claim(tmp_path / "run", cfg)
    notes = state_folder() / "runs"
    notes.mkdir(parents=True)
    place, digest = next(iter(code_digests(code_places(cfg)).items()))
    text = f'{{"code": {{"{place}": "{digest}"}}}}'
    (state_folder().parent / "escape.json").write_text(text)
    (run / "run.json").write_text(f'{{"id": "{known}"}}')
    refused(cfg, run)


def test_a_state_folder_that_cannot_be_written_is_a_word(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    cfg = tiny.config(loss__function=f"{code(tmp_path)}:loss")
    assert "will ask for --trust-code" in note_trusted(claim(tmp_path / "run", cfg), code_places(cfg))
    refused(cfg, tmp_path / "run")


@pytest.mark.parametrize(("answer", "runs"), [("y\n", True), ("\n", False), ("", False), ("no\n", False)])
def test_a_terminal_is_asked(tmp_path, monkeypatch, capsys, answer, runs):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cfg = tiny.config(grading__plugins=[f"{tmp_path}/\x1b[2Jmine.py"])
    if runs:
        check_trust(code_places(cfg), tmp_path, source="x", trusted=False)
    else:
        refused(cfg, tmp_path)
    said = capsys.readouterr().err
    assert "Run it? [y/N]" in said
    assert "\x1b" not in said


def test_files_are_found_without_an_import(tmp_path, monkeypatch):
    package = code(tmp_path, "trust_package/__init__.py")
    module = code(tmp_path, "trust_package/inner.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugin_file("trust_package") == package
    assert plugin_file("trust_package.inner") == module
    assert plugin_file("trust_package.none") is None
    assert plugin_file("no_such_module_at_all") is None
    assert plugin_file(str(tmp_path / "none.py")) is None
    assert "trust_package" not in sys.modules
    cfg = tiny.config(loss__function="trust_package.inner:loss")
    before = code_digests(code_places(cfg))
    code(tmp_path, "trust_package/__init__.py", "print('other')")  # it runs before the module
    assert code_digests(code_places(cfg)) != before
    assert Path(str(module)).exists()


@pytest.mark.parametrize("place", ["outer.inner.mine:loss", "outer/inner/mine.py:loss"])
def test_the_outermost_package_counts_as_a_whole(tmp_path, monkeypatch, place):
    for name in ("outer/__init__.py", "outer/inner/__init__.py", "outer/inner/mine.py"):
        code(tmp_path, name, "from outer.util import V")
    util = code(tmp_path, "outer/util.py", "V = 1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = code_digest(place)
    Path(util).write_text("V = 9.0")
    assert code_digest(place) != before


def test_what_a_file_imports_from_its_own_folder_counts(tmp_path):
    mine = code(tmp_path, "mine.py", "import json\nfrom near import x\nimport parts.one\n")
    cfg = tiny.config(loss__function=f"{mine}:loss")
    alone = code_digests(code_places(cfg))
    seen = [alone]
    for name, text in (
        ("near.py", "from far import y"),
        ("far.py", "y = 1"),
        ("parts/one.py", ""),
        ("parts/two.py", ""),
        ("far.py", "y = 2"),
    ):
        code(tmp_path, name, text)
        assert code_digests(code_places(cfg)) not in seen
        seen.append(code_digests(code_places(cfg)))
    code(tmp_path, "other.py", "nobody imports it")
    assert code_digests(code_places(cfg)) == seen[-1]
    code(tmp_path, "far.py", "y = (")  # no Python any more
    assert code_digests(code_places(cfg)) not in seen


def test_a_clone_of_this_package_beside_the_file_does_not_count(tmp_path):
    (tmp_path / "mine.py").write_text("from oarjax import Sample, reward\n")
    (tmp_path / "oarjax").mkdir()
    before = code_digest(str(tmp_path / "mine.py"))
    (tmp_path / "oarjax" / "anything.py").write_text("x = 1\n")
    assert code_digest(str(tmp_path / "mine.py")) == before
