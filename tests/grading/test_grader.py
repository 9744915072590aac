"""The grader: verdicts for answers that hang, crash or eat memory; workers replaced, none left behind."""

import contextlib
import itertools
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from oarjax.grading.grader import Grader, worker_count
from oarjax.grading.link import InvalidMessage, Link
from oarjax.grading.pool import GraderError
from oarjax.grading.process_tree import Usage, clock_seconds
from oarjax.grading.rewards import Sample

DEADLINE = 3.0  # generous for good answers on a busy machine; they take a millisecond


def samples(*completions, answer="3"):
    return [Sample(prompt="", completion=text, answer=answer) for text in completions]


def workers_of(grader):
    return [worker.process.pid for pool in grader.pools for worker in pool.workers]


@pytest.fixture(scope="module")
def plugin():
    return os.path.join(os.path.dirname(os.path.dirname(__file__)), "golden", "grading", "hostile.py")


@pytest.fixture(scope="module")
def grader(plugin):
    rewards = (("hostile", 1.0), ("math", 2.0), ("pid", 0.0))
    with Grader(rewards, plugins=[plugin], workers=2, deadline=DEADLINE, memory_mb=200) as pool:
        yield pool


def test_good_answers(grader):
    grades = grader.grade(samples(r"a \boxed{3}", r"b \boxed{\frac{6}{2}}", r"c \boxed{4}", "d"))
    assert grades.verdicts == ["graded"] * 4
    assert grades.answers == ["3", r"\frac{6}{2}", "4", None]
    np.testing.assert_array_equal(grades.rewards, [3, 3, 1, 1])  # 1 * hostile + 2 * math
    np.testing.assert_array_equal(grades.per_reward["math"], [1, 1, 0, 0])
    assert set(grades.per_reward["pid"]) <= set(workers_of(grader))
    assert grades.rewards.dtype == np.float32
    assert grades.notes == [""] * 4
    assert grades.counts() == {"graded": 4}


def test_no_samples(grader):
    assert grader.grade([]).rewards.shape == (0,)


def test_hostile_answers_cost_only_themselves(grader, plugin, tmp_path):
    before = set(workers_of(grader))
    canary = tmp_path / "canary"
    bad = {
        "sleep": "timeout",
        r"x \boxed{9^{9^{9^{9}}}}": "unparseable",
        "exit": "crash",
        "hog": "crash",
        "child_hog": "crash",
        "forge": "crash",
        r"fork \boxed{3}": "graded",
        r"quit \boxed{3}": "crash",
        rf"daemon {tmp_path / 'daemon'}": "timeout",
        r"huge \boxed{3}": "crash",
        r"recurse \boxed{3}": "crash",
        r"raise \boxed{3}": "crash",
        r"infinite \boxed{3}": "crash",
        r"nan \boxed{3}": "ungraded",
        rf"x \boxed{{__import__('os').system('touch {canary}')}}": "unparseable",
        rf"x \boxed{{\operatorname{{exec}}(\text{{open('{canary}','w')}})}}": None,  # whatever it is read as
    }
    texts = [text for one in bad for text in (one, r"good \boxed{3}")]
    grades = grader.grade(samples(*texts))
    for text, verdict, reward, note in zip(bad, grades.verdicts[::2], grades.rewards[::2], grades.notes[::2]):
        assert bad[text] in (verdict, None), (text, verdict, note)
        assert math.isnan(reward) == (verdict in ("timeout", "crash", "ungraded")), text
        assert bool(note) == (verdict != "graded")
    notes = dict(zip(texts, grades.notes))
    assert notes["sleep"] == "no verdict within 3 s"
    assert notes["exit"] == "the worker ended with exit code 7"
    assert notes["hog"] == notes["child_hog"] == "used more than 200 MB of memory"
    assert notes["forge"].startswith("the worker sent a reply out of turn")
    assert notes[r"quit \boxed{3}"].endswith(" raised SystemExit: 3")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "daemon").read_text())).wait(timeout=60)  # raises TimeoutExpired if it lives on
    assert notes[r"huge \boxed{3}"].startswith(f"reward 'hostile' ({plugin}, line ")
    assert notes[r"huge \boxed{3}"].endswith(" raised MemoryError: ")
    np.testing.assert_array_equal(grades.rewards[1::2], np.full(len(bad), 3))  # the others' results survive
    assert grades.per_reward["hostile"][texts.index(r"fork \boxed{3}")] == 1
    assert grades.verdicts[1::2] == ["graded"] * len(bad)
    assert not canary.exists()
    # The killed were replaced, and the next batch is graded as if nothing had been.
    again = grader.grade(samples(r"a \boxed{3}", r"b \boxed{3}"))
    np.testing.assert_array_equal(again.rewards, [3, 3])
    assert len(workers_of(grader)) == 2
    assert not before & set(workers_of(grader))
    assert not any(psutil.pid_exists(pid) for pid in before)  # reaped as well


def test_a_link_waits_for_nobody_and_takes_only_messages():
    ours, theirs = socket.socketpair()
    link, other = Link(ours), Connection(theirs.detach())
    link.send(["x" * 5_000_000])  # far more than fits between them
    assert link.waiting
    received = threading.Thread(target=lambda: seen.append(json.loads(other.recv_bytes())))
    seen: list = []
    received.start()
    while link.waiting:
        link.flush()
    received.join()
    assert seen == [["x" * 5_000_000]]
    other.send_bytes(b'{"a": 1}')
    os.write(other.fileno(), struct.pack("!i", 8) + b'{"b"')  # half a message
    assert link.receive() == [{"a": 1}]
    assert link.receive() == []
    os.write(other.fileno(), b": 2}" + struct.pack("!i", 1) + b"{")
    with pytest.raises(InvalidMessage, match="invalid JSON"):
        link.receive()
    other.close()
    link.close()
    for header in (-1, 2**30):
        ours, theirs = socket.socketpair()
        theirs.sendall(struct.pack("!i", header))
        with pytest.raises(InvalidMessage, match="a message of"):
            Link(ours).receive()


def test_a_crash_is_tried_once_more(grader, tmp_path):
    grades = grader.grade(samples(rf"exit_once {tmp_path / 'mark'}", r"b \boxed{3}"))
    assert (tmp_path / "mark").exists()
    assert grades.verdicts == ["graded", "graded"]
    np.testing.assert_array_equal(grades.per_reward["hostile"], [1, 1])


def test_an_unreadable_reference_is_ungraded(grader):
    grades = grader.grade(samples(r"a \boxed{3}", answer=r"\frac{"))
    assert grades.verdicts == ["ungraded"]
    assert np.isnan(grades.rewards[0])
    assert "the reference" in grades.notes[0]
    assert grades.per_reward["hostile"][0] == 1  # the other rewards are known


def test_a_worker_that_piles_up_memory_is_replaced_between_answers(grader):
    first = set(workers_of(grader))
    grades = grader.grade(samples(*["hoard"] * 6))  # 50 MB each that stay
    assert grades.verdicts == ["graded"] * 6
    assert len(set(grades.per_reward["pid"]) | first) > 2


def test_batches_in_the_background_come_in_order(grader):
    futures = [grader.submit(samples(rf"a \boxed{{{i}}}", answer="2")) for i in range(4)]
    assert not wait(futures, timeout=60).not_done
    assert [future.result().per_reward["math"][0] for future in futures] == [0, 0, 1, 0]


def test_a_submission_is_not_held_up_by_the_last_answer_of_the_one_before(plugin, tmp_path):
    mark = tmp_path / "mark"
    order: list[str] = []
    # The first answer waits for another worker, which may have to start on a busy machine.
    with Grader((("hostile", 1.0),), plugins=[plugin], workers=2, deadline=50.0) as pool:
        first = pool.submit(samples(f"await {mark}"))
        second = pool.submit(samples("a", f"signal {mark}"))
        second.add_done_callback(lambda _: order.append("second"))
        first.add_done_callback(lambda _: order.append("first"))
        assert [f.result(timeout=60).verdicts for f in (first, second)] == [["graded"], ["graded"] * 2]
    assert order == ["first", "second"]


def test_workers_import_nothing_heavy(plugin):
    with Grader((("heavy_imports", 1.0), ("math", 1.0)), plugins=[plugin], workers=1) as pool:
        assert pool.grade(samples(r"\boxed{3}")).per_reward["heavy_imports"][0] == 0


def test_printing_rewards_do_not_reach_standard_output(grader, capfd):
    grader.grade(samples("print"))
    assert "noise" not in capfd.readouterr().out


def test_styles_and_slow_patterns(plugin):
    with Grader((("math", 1.0),), workers=1, style="regex", pattern=r"A: (.+)|(x|xx)+$") as pool:
        grades = pool.grade(samples("A: 4\nA: 3", "x" * 64 + "y"))
    assert grades.verdicts == ["graded", "timeout"]
    assert grades.rewards[0] == 1
    assert "ran too long" in grades.notes[1]


def test_mistakes_are_named_before_any_worker_starts(plugin):
    with pytest.raises(ValueError, match=r"no reward is called 'maths'; known are .*exact"):
        Grader((("maths", 1.0),))
    with pytest.raises(ValueError, match=r"'nowhere\.py' cannot be imported"):
        Grader((("math", 1.0),), plugins=["nowhere.py"])
    with pytest.raises(ValueError, match="is not a regular expression"):
        Grader((("math", 1.0),), style="regex", pattern="(")
    with pytest.raises(ValueError, match="expected at least one reward and each once"):
        Grader(())


def test_a_plugin_that_fails_in_workers_is_an_error(data, monkeypatch):
    monkeypatch.setenv("OARJAX_TEST_PARENT", str(os.getpid()))
    plugin = str(data / "grading" / "broken_in_workers.py")
    with Grader((("licensed", 1.0),), plugins=[plugin], workers=1) as pool:
        with pytest.raises(GraderError, match="this machine has no licence for that"):
            pool.grade(samples("a"))
        assert workers_of(pool) == []


@pytest.mark.parametrize("change", ["helper", "removed"])
def test_a_worker_is_replaced_by_one_with_the_same_code_alone(tmp_path, change):
    """A file that is edited while a run lives belongs to the next one."""
    file, helper = tmp_path / f"edited_{change}.py", tmp_path / f"helper_{change}.py"
    helper.write_text("WORTH = 1.0\n")
    file.write_text(
        f"import os\nfrom helper_{change} import WORTH\nfrom oarjax import reward\n\n\n"
        f"@reward('edited_{change}')\ndef worth(sample):\n"
        "    return os._exit(1) if 'end' in sample.completion else WORTH\n"
    )
    with Grader(((f"edited_{change}", 1.0),), plugins=[str(file)], workers=1, deadline=DEADLINE) as grader:
        assert grader.grade(samples("a")).rewards.tolist() == [1.0]
        if change == "helper":
            helper.write_text("WORTH = 2.0\n")
        else:
            file.unlink()
        assert grader.grade(samples("b")).rewards.tolist() == [1.0], "its worker lives"
        with pytest.raises(GraderError, match=rf"edited_{change}\.py has changed since .* put the old one back"):
            grader.grade(samples("end", "c"))


def test_closing_ends_work_and_workers(plugin):
    pool = Grader((("hostile", 1.0),), plugins=[plugin], workers=1, deadline=600.0)
    with pool:
        assert pool.grade(samples("a")).verdicts == ["graded"]
        pids = workers_of(pool)
        future = pool.submit(samples("sleep"))
        while not future.running():
            time.sleep(0.01)
    with pytest.raises(GraderError, match="pool for grading was closed"):
        future.result(timeout=0)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(GraderError, match="the grader is closed"):
        pool.submit(samples("a"))


PARENT = """
import json, sys, time
from oarjax.grading.grader import Grader
from oarjax.grading.rewards import Sample

plugin, word, deadline = sys.argv[1:]
pool = Grader((("hostile", 1.0),), plugins=[plugin], workers=1, deadline=float(deadline)).__enter__()
pool.grade([Sample(prompt="", completion="a", answer="")])
future = pool.submit([Sample(prompt="", completion=word, answer="")])
time.sleep(0.2)
print(json.dumps([worker.process.pid for worker in pool.pools[0].workers]), flush=True)
sys.stdin.readline()  # until the test watches the worker
sys.exit(0) if word == "leave" else time.sleep(600)
"""


@pytest.mark.parametrize(
    ("word", "deadline"),
    [
        ("leave", 5.0),  # an orderly exit that forgot to close
        ("idle", 5.0),  # killed while its worker waits
        pytest.param("sleep", 2.0, marks=pytest.mark.slow),  # killed while its worker is busy
    ],
)
def test_workers_end_with_their_parent(plugin, word, deadline):
    command = [sys.executable, "-c", PARENT, plugin, word, str(deadline)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        (pid,) = json.loads(parent.stdout.readline())
        worker = psutil.Process(pid)
        if word == "leave":
            parent.stdin.write("\n")
            parent.stdin.flush()
        else:
            parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=60)
        worker.wait(timeout=60)  # raises TimeoutExpired if it lives on


@pytest.mark.slow
def test_the_clock_stands_still_while_the_parent_sleeps(plugin):
    """As when a machine is suspended: the worker sleeps too, and its answer is not late."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER, plugin], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.5)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(parent.pid, number)
            os.kill(worker, number)
            time.sleep(3 if number == signal.SIGSTOP else 0)
        assert json.loads(parent.stdout.readline()) == ["graded", "graded"]


SLEEPER = (
    PARENT.partition("future =")[0].replace("plugin, word, deadline =", "(plugin,) =").replace("float(deadline)", "2.0")
    + """
print(pool.pools[0].workers[0].process.pid, flush=True)
print(json.dumps(pool.grade([Sample(prompt="", completion=c, answer="") for c in ("nap", "a")]).verdicts), flush=True)
sys.exit(0)
"""
)


def test_only_time_that_a_worker_could_use_counts():
    looked = [(0.1, "S", 0.0, 0.1), (0.1, "R", 0.1, 0.1), (0.1, "R", 0.02, 0.02), (0.1, "R", 0.3, 0.1)]
    looked += [(500.0, "S", 0.0, 1.0), (500.0, "R", 0.0, 0.0), (500.0, "R", 40.0, 1.0), (0.1, "D", 0.0, 0.1)]
    for elapsed, state, cpu, counted in looked:
        assert clock_seconds(elapsed, 7.0, Usage(state, 7.0 + cpu)) == pytest.approx(counted), (elapsed, state, cpu)
    assert clock_seconds(0.1, 0.0, None) == 0.1  # a system without /proc


def test_a_machine_too_busy_for_its_workers_makes_no_answer_late(plugin, monkeypatch):
    """The answer takes a second of the clock, ten times the deadline, and none of a processor."""
    starved, cpu = [True], itertools.count(0.0, 0.02)
    monkeypatch.setattr("oarjax.grading.pool.usage", lambda _: Usage("R", 0.0 if starved[0] else next(cpu)))
    with Grader((("hostile", 1.0),), plugins=[plugin], workers=1, deadline=0.1) as pool:
        assert pool.grade(samples("nap")).verdicts == ["graded"]
        starved[0] = False
        assert pool.grade(samples("sleep")).verdicts == ["timeout"]


@pytest.mark.slow
def test_a_worker_that_was_stopped_costs_no_verdict(grader):
    """SIGSTOP from outside: nothing waits for it, a batch larger than any socket's buffer included."""
    for pid in workers_of(grader):
        os.kill(pid, signal.SIGSTOP)
    grades = grader.grade(samples(*[rf"{'x' * 400_000} \boxed{{3}}"] * 4))
    assert grades.verdicts == ["graded"] * 4


@pytest.mark.slow
def test_all_labelled_outputs_through_the_pool(shared):
    rows, labels = [], []
    for line in (shared / "data" / "math_model_outputs.jsonl").read_text().splitlines():
        problem = json.loads(line)
        rows += samples(*problem["outputs"], answer=problem["gt"])
        labels += problem["score"]
    with Grader((("math", 1.0),), workers=2) as pool:
        grades = pool.grade(rows)
    known = ~np.isnan(grades.rewards)
    assert grades.counts() == {"graded": 392, "ungraded": 8}
    np.testing.assert_array_equal(grades.rewards[known] == 1, np.array(labels)[known])


def test_workers_by_cores():
    assert worker_count(5, cores=64) == 5
    assert [worker_count("auto", cores=cores) for cores in (1, 24, 224)] == [2, 12, 32]
