"""A first signal waits for the iteration, or ends at once where nothing is under way; the second kills."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from oarjax.storage.stop import RESUMABLE, Stop, Stopped


def kill(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """Signals as a terminal leaves them: below nohup SIGHUP is ignored, and in the background of a script SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_inside_it_waits_to_be_asked(number, capfd):
    before = signal.getsignal(number)
    heard = []

    def run():
        with Stop() as stop:
            with stop.held():
                heard.append(stop.asked())
                kill(number)
                heard.append(stop.asked())
            heard.append("obeyed at the end of what was held")

    with pytest.raises(Stopped) as stopped:
        run()
    assert heard == [False, True]
    assert stopped.value.code == RESUMABLE == 75
    assert signal.getsignal(number) is (signal.SIG_IGN if number == signal.SIGHUP else before)
    assert re.search(
        r"saves after this phase; (signal|Ctrl-C) again ends now and loses unsaved", capfd.readouterr().err
    )


def test_between_phases_it_stops_where_it_asks():
    late = []

    def run():
        with Stop() as stop, stop.held():
            stop.check()
            kill()
            stop.check()
            late.append("it went on")

    with pytest.raises(Stopped):
        run()
    assert late == []


def stop_on(*numbers):
    def run():
        with Stop() as stop, stop.held():
            for number in numbers:
                kill(number)

    with pytest.raises(Stopped):
        run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_hangup_does_not_change_the_exit_code(number):
    """A closing terminal sends SIGHUP twice, or after SIGTERM; the process may be past ``Stop`` by then."""
    stop_on(number, signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_an_interrupted_notebook_still_hears_of_a_hangup():
    before = signal.getsignal(signal.SIGHUP)
    stop_on(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is before


def test_outside_it_ends_at_once():
    with Stop(), pytest.raises(Stopped):
        kill()


TWO = """
import sys, time, jax
from oarjax.storage.stop import Stop
with Stop() as stop:
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    with stop.held():
        for n in range(6000):
            if n == 1:
                print("begun", flush=True)
            if stop.asked():
                print(n, flush=True)
                stop.obey()
            time.sleep(0.01)
"""


@pytest.mark.slow
def test_of_two_processes_one_is_told_and_both_stop_after_the_same_iteration():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    both = [
        subprocess.Popen([sys.executable, "-c", TWO, address, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "begun\n"
    both[1].terminate()
    (first, _), (second, _) = (process.communicate(timeout=120) for process in both)
    assert first == second != ""
    assert [process.returncode for process in both] == [RESUMABLE] * 2


def test_the_second_kills():
    script = "import os, signal; from oarjax.storage.stop import Stop\n"
    script += "with Stop() as stop, stop.held():\n  for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\n  print(1)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == b""


def test_under_nohup_a_closed_terminal_changes_nothing():
    script = "import os, signal; from oarjax.storage.stop import Stop\n"
    script += "with Stop() as stop, stop.held():\n  os.kill(os.getpid(), signal.SIGHUP)\n  print(stop.asked())"
    done = subprocess.run(["nohup", sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_a_closed_terminal_that_tells_twice_still_saves():
    script = "import os, signal; from oarjax.storage.stop import Stop\nos.close(2)\n"
    script += "with Stop() as stop, stop.held():\n  for _ in range(2): os.kill(os.getpid(), signal.SIGHUP)\n"
    script += "  print(stop.asked(), flush=True)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (RESUMABLE, "True\n")
