"""A user's code: how it is imported, and what it may do meanwhile."""

import pytest

from oarjax.system.plugins import import_object, import_plugin


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
