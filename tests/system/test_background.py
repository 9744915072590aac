"""Programs that are compiled in threads: calls wait for theirs, errors are reported, and an end does not wait."""

import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from oarjax.system.background import Background, awaited, compiling
from oarjax.tools.bench.measure import counted_compilations

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def program():
    return awaited(jax.jit(lambda x, times: x * times + 1, static_argnames="times"))


def test_a_call_waits_for_its_program_and_compiles_nothing():
    f, x, ready = program(), jnp.ones(3), threading.Event()

    def slow(work):
        ready.wait(60)
        return work()

    with counted_compilations() as compiled, Background(threads=1) as background:
        background.add(f, (SHAPE,), {"times": 2}, slow)
        background.start()
        while not background._jobs[0][0].running():
            time.sleep(0.01)
        threading.Timer(0.2, ready.set).start()
        assert f(x, times=2).tolist() == [3, 3, 3]
        assert compiled.count == 1
        assert f(x, times=3).tolist() == [4, 4, 4]  # which nobody announced
        assert compiled.count == 2
    assert awaited(f) is f


def test_programs_are_compiled_in_the_order_in_which_they_were_added():
    f, seen = program(), []
    with Background(threads=1) as background:
        for times in (5, 3, 4):
            background.add(f, (SHAPE,), {"times": times}, lambda work, n=times: seen.append(n) or work())
        background.start()
        while not background._jobs[-1][0].done():
            time.sleep(0.01)
    assert seen == [5, 5, 3, 3, 4, 4]  # each is lowered, then compiled


def test_an_error_is_reported_between_phases_and_where_the_program_is_called():
    f = program()

    def refused(work):
        raise MemoryError("does not fit")

    with Background(threads=1) as background:
        background.add(f, (SHAPE,), {"times": 2}, refused)
        background.check()
        background.start()
        while not background._jobs[0][0].done():
            time.sleep(0.01)
        with pytest.raises(MemoryError, match="does not fit"):
            background.check()
        with pytest.raises(MemoryError, match="does not fit"):
            f(jnp.ones(3), times=2)


def test_the_end_waits_for_no_program_and_calls_go_on():
    f, ready = program(), threading.Event()
    with Background(threads=1) as background:
        for times in (2, 3):
            background.add(f, (SHAPE,), {"times": times}, lambda work: ready.wait(60) and work())
        background.start()
        while not background._jobs[0][0].running():
            time.sleep(0.01)
    assert compiling()  # the first one is under way
    assert f(jnp.ones(3), times=3).tolist() == [4, 4, 4]  # the second one was forgotten
    ready.set()
    while compiling():
        time.sleep(0.01)
    assert f(jnp.ones(3), times=2).tolist() == [3, 3, 3]


def test_a_process_that_a_signal_stopped_runs_nothing_on_its_way_out():
    """XLA may be compiling in threads of its own, for a call of the main thread: they end in a crash."""
    program = """
        import atexit, os
        import oarjax.cli as cli
        import oarjax.system.background
        from oarjax.storage.stop import Stop
        atexit.register(os._exit, 139)
        print("said")
        cli.app = Stop().obey
        cli.main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "said\n"), done.stderr
