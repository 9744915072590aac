"""Text of strangers is shown, never sent to the terminal: whatever is printed, and however."""

import io
import re
import sys

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oarjax.cli import main
from oarjax.errors import UserError
from oarjax.grading.rewards import load_plugins
from oarjax.report.console import OnceWarnings, Progress, banner
from oarjax.report.files import make_console

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[bold]:smile:"
SHOWN = "<U+001B>]0;owned<U+001B>[2J<U+009B>31m<U+202E>[bold]:smile:"  # rich leaves out the bell and the return
OWN = re.compile(r"\x1b\[[\d;]*m")
"""Colours, which a terminal gets of the console itself."""


def table() -> Table:
    made = Table(EVIL)
    made.add_row(EVIL)
    made.add_row(Text(EVIL))
    return made


WAYS = {
    "text": lambda console: console.print(EVIL),
    "Text": lambda console: console.print(Text(EVIL, style="red")),
    "table": lambda console: console.print(table()),
    "panel": lambda console: console.print(Panel(EVIL, title="x")),
    "rule": lambda console: console.rule(EVIL),
    "list": lambda console: console.print([EVIL]),
    "warning": lambda console: OnceWarnings(console).say(EVIL, EVIL),
    "banner": lambda console: banner(console, {EVIL: EVIL}),
}


@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_it_reaches_the_terminal(way, colours, monkeypatch):
    monkeypatch.setenv("TERM", "xterm" if colours else "dumb")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = make_console(stream)
    console._force_terminal, console.width = colours, 400
    WAYS[way](console)
    stream.flush()
    text = OWN.sub("", stream.buffer.getvalue().decode())
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text), repr(text)
    assert "owned" in text
    if way in ("text", "Text", "warning"):
        assert SHOWN in text


def test_a_progress_bar_moves_the_cursor_itself(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = make_console(stream)
    console._force_terminal = True
    with Progress(2, label="x", console=console) as progress:
        progress.update(1, {})
    stream.flush()
    assert b"\x1b[" in stream.buffer.getvalue()
    assert b"<U+001B>" not in stream.buffer.getvalue()


def test_without_a_terminal_a_spinner_is_a_line():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with make_console(stream).status("scores of every method"):
        stream.flush()
        assert stream.buffer.getvalue() == b"scores of every method ...\n"


@pytest.mark.parametrize(("error", "code"), [(UserError(EVIL), 2), (RuntimeError(EVIL), 1)])
def test_errors_of_a_command(monkeypatch, capfd, error, code):
    def fails():
        raise error

    monkeypatch.setattr("oarjax.cli.app", fails)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    text = capfd.readouterr().err
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert "<U+001B>]0;owned" in text
    assert ("Traceback" in text) == (code == 1)


def test_code_of_a_run_that_ends_the_process_is_an_error(monkeypatch, capfd):
    monkeypatch.setattr("oarjax.cli.app", lambda: sys.exit(0))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "test_shown.py, line" in capfd.readouterr().err


def replaced(exit_before):
    """Return a sys.exit that notes the code and calls the one before, as W&B leaves it behind for good."""
    return lambda code=0: exit_before(code)


def test_a_command_after_a_tracker_replaced_sys_exit_ends_as_before(monkeypatch, capfd):
    monkeypatch.setattr("sys.exit", replaced(replaced(sys.exit)))
    monkeypatch.setattr("sys.argv", ["oarjax", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capfd.readouterr().err) == (0, "")
    test_code_of_a_run_that_ends_the_process_is_an_error(monkeypatch, capfd)


def test_a_plugin_that_ends_the_process_is_an_error(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"leaves\.py' cannot be imported \(ImportError: it calls sys\.exit\(0\)\)"):
        load_plugins([str(tmp_path / "leaves.py")])
