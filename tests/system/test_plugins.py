"""A user's code: how it is imported, and what it may do meanwhile."""

import os
import sys

import pytest

from oarjax.system.plugins import import_object, import_plugin


@pytest.fixture(autouse=True)
def forgets(monkeypatch):
    """What tests import, and where from, ends with them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_names_that_a_module_makes_when_asked(tmp_path):
    (tmp_path / "lazy.py").write_text(
        "def __getattr__(name):\n    if name == 'made':\n        return 1\n    raise AttributeError(name)\n"
    )
    assert import_object(f"{tmp_path}/lazy.py:made", field="x", expected=int) == 1
    with pytest.raises(ValueError, match=r"x: .*lazy\.py defines no other; check the name"):
        import_object(f"{tmp_path}/lazy.py:other", field="x", expected=int)


def test_what_an_import_prints_is_no_part_of_the_output(tmp_path, capsys):
    (tmp_path / "loud.py").write_text("print('imported')\n")
    import_plugin(str(tmp_path / "loud.py"))
    assert capsys.readouterr() == ("", "imported\n")


def test_a_file_is_run_once_until_it_is_another(tmp_path, monkeypatch):
    """Also where it keeps its length and its time, by which Python knows whether its bytecode is of this file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "counted.py"
    file.write_text("made = []\n")
    os.utime(file, (1, 1))
    first = import_plugin(str(file))
    assert import_plugin(str(file)) is first
    file.write_text("made = ()\n")
    os.utime(file, (1, 1))
    assert import_plugin(str(file)).made == ()


def test_files_of_one_name_are_modules_of_their_own(tmp_path):
    def imported(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "same.py").write_text(f"def where():\n    return '{text}'\n")
        return import_plugin(str(tmp_path / folder / "same.py"))

    modules = [imported("one", "one"), imported("two", "before its edit")]
    assert [sys.modules[module.where.__module__] for module in modules] == modules
    modules = [modules[0], imported("two", "two"), imported("three", "three")]
    assert [sys.modules[module.where.__module__] for module in modules] == modules


@pytest.mark.parametrize("form", ["import helps_us", "from helps_us import WORD", "import deeper"])
def test_modules_beside_two_plugins_that_have_one_name(tmp_path, form):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helps_us.py").write_text(f"WORD = '{folder}'\n")
        (tmp_path / folder / f"deeper{folder if folder == 'one' else ''}.py").write_text("import helps_us\n")
        (tmp_path / folder / "mine.py").write_text(f"{form if folder == 'two' else 'import helps_us'}\n")
    import_plugin(str(tmp_path / "one/mine.py"))
    with pytest.raises(ImportError, match=r"it imports helps_us, which is .*one/helps_us\.py here and not .*two/helps"):
        import_plugin(str(tmp_path / "two/mine.py"))


def test_a_module_beside_a_plugin_that_is_named_like_an_installed_one(tmp_path):
    (tmp_path / "optax.py").write_text("")
    (tmp_path / "json").mkdir()  # no module, as folders of data are not
    (tmp_path / "mine.py").write_text("import json\n")
    import_plugin(str(tmp_path / "mine.py"))
    (tmp_path / "mine.py").write_text("import optax\n")
    with pytest.raises(
        ImportError, match=r"which is .*optax/__init__\.py here and not .*/optax\.py; give that another"
    ):
        import_plugin(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("name", ["time", "abc"])
def test_a_module_beside_a_plugin_that_is_named_like_a_built_in_one(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "mine.py").write_text(f"import {name}\n")
    with pytest.raises(ImportError, match=rf"it imports {name}, which is (built-in|frozen) here and not"):
        import_plugin(str(tmp_path / "mine.py"))


def test_a_module_beside_a_plugin_that_was_edited_since(tmp_path):
    """The process keeps the old one, and workers that it starts would import the new one."""
    (tmp_path / "beside_me.py").write_text("WORD = 1\n")
    (tmp_path / "mine.py").write_text("import beside_me\n")
    import_plugin(str(tmp_path / "mine.py"))
    (tmp_path / "beside_me.py").write_text("WORD = 2\n")
    with pytest.raises(ImportError, match=r"beside_me.py has changed since .* start the process again"):
        import_plugin(str(tmp_path / "mine.py"))


def test_a_file_that_fails_leaves_no_half_of_a_module(tmp_path):
    (tmp_path / "halfway.py").write_text("made = 1\n1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        import_plugin(str(tmp_path / "halfway.py"))
    assert "oarjax_plugin_halfway" not in sys.modules
