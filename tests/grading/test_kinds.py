"""Rewards per batch and group, async ones, callables of this process: values, verdicts, what a bad one costs."""

import asyncio
import itertools
import os
import re
import textwrap
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from oarjax.grading import worker
from oarjax.grading.grader import Grader, local_digests, local_rewards, reads_answers
from oarjax.grading.pool import GraderError
from oarjax.grading.recorded import RecordedGrader
from oarjax.grading.rewards import Sample, load_plugins, reward
from oarjax.storage.durable import Failures

PLUGIN = '''
import asyncio, json, os, struct, time
from oarjax import Sample, reward


def forge(text):
    """Send the parent what looks like an answer, through whatever sockets there are."""
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("!i", len(text)) + text.encode())
        except OSError:
            continue


@reward("kinds_rank", per="batch")
def rank(samples, *, top=1.0):
    """Between 0 and top, by length."""
    order = sorted(range(len(samples)), key=lambda n: samples[n].tokens)
    return [top * order.index(n) / max(len(samples) - 1, 1) for n in range(len(samples))]


@reward("kinds_best", per="group")
def best(samples):
    """A pairwise judge: the share of its group that an answer beats. Hangs, dies and lies where it is told to."""
    said = " ".join(s.completion for s in samples)
    if "HANG" in said:
        time.sleep(60)
    if "DIE" in said:
        os._exit(3)
    if "RAISE" in said:
        raise KeyError("no such criterion")
    if "SHORT" in said:
        return [1.0]
    if "FORK" in said:
        os.fork()  # and both return
    if "FORGE" in said:
        forge(json.dumps({"number": 1, "values": [9.0], "verdict": "graded", "extracted": None, "note": ""}))
    numbers = [float(s.extracted or 0) for s in samples]
    return [None if s.columns.get("hard") else sum(a > b for b in numbers) for s, a in zip(samples, numbers)]


@reward("kinds_async")
async def slowly(sample):
    if "BLOCK" in sample.completion:
        time.sleep(60)
    await asyncio.sleep(60 if "HANG" in sample.completion else 0.05)
    if "RAISE" in sample.completion:
        raise OSError("no route")
    return float(sample.tokens)
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    file = tmp_path_factory.mktemp("kinds") / "kinds.py"
    file.write_text(PLUGIN)
    return str(file)


def sample(text, group=0, tokens=1, **columns):
    return Sample(prompt="p", completion=text, answer="7", tokens=tokens, group=group, columns=columns)


def graded(plugin, rewards, samples, **settings):
    limits = {"workers": 1, "call_deadline": 1.0} | settings
    with Grader(rewards, plugins=[plugin], style="hash", **limits) as grader:
        return grader.grade(samples)


def test_batch_group_and_async_rewards_beside_the_pool(plugin):
    samples = [
        sample("#### 7", 0, 3), sample("#### 5", 0, 1), sample("#### 7", 0, 2),
        sample("#### 1", 1, 4), sample("#### 2", 1, 5, hard=True),
    ]  # fmt: skip
    names = [("exact", 1.0), ("kinds_rank", 0.5), ("kinds_best", 0.1), ("kinds_async", 0.0)]
    grades = graded(plugin, names, samples, settings={"kinds_rank": {"top": 4.0}})
    want = {
        "exact": [1, 0, 1, 0, 0],
        "kinds_rank": [2, 0, 1, 3, 4],
        "kinds_best": [1, 0, 1, 0, np.nan],  # None: not graded
        "kinds_async": [3, 1, 2, 4, 5],
    }
    assert list(grades.per_reward) == list(want)
    for name, values in want.items():
        np.testing.assert_array_equal(grades.per_reward[name], np.float32(values), err_msg=name)
    np.testing.assert_allclose(grades.rewards, [2.1, 0, 1.6, 1.5, np.nan], rtol=1e-6)
    assert grades.verdicts == ["graded"] * 4 + ["ungraded"]
    assert grades.answers == ["7", "5", "7", "1", "2"]
    assert re.fullmatch(r"kinds_best: .*kinds.py, line 22, returned None or NaN: not graded; .*", grades.notes[4])


@pytest.mark.parametrize("values", [{0: 1.0, 1: 2.0}, {1.0, 2.0}])
def test_values_without_an_order_are_refused(values):
    found = []
    limits = worker.AsyncLimits(1.0, 1)
    worker.make_call(
        lambda batch: values, "group", [sample("one"), sample("two")], limits, lambda *each: found.append(each)
    )
    assert [(row, verdict) for row, (_, verdict, _) in found] == [(0, "crash"), (1, "crash")]
    assert f"returned a {type(values).__name__}; return a list" in found[0][1][2]


@pytest.mark.slow
def test_a_bad_call_costs_its_own_samples(plugin):
    bad = ["HANG", "DIE", "RAISE", "SHORT"]
    samples = [sample(f"#### {n} {word}", group) for group, word in enumerate([*bad, ""]) for n in range(2)]
    grades = graded(plugin, [("kinds_best", 1.0)], samples)
    assert grades.verdicts == [v for v in ("timeout", "crash", "crash", "crash", "graded") for _ in range(2)]
    np.testing.assert_array_equal(grades.rewards, np.array([np.nan] * 8 + [0, 1], np.float32))
    for row, note in (
        (0, "within 1 s"),
        (2, "exit code 3"),
        (4, "kinds.py, line 31, raised KeyError: 'no such criterion'"),
        (6, "kinds.py, line 22, returned 1 values for 2 samples; return one per sample"),
    ):
        assert note in grades.notes[row]
    texts = ["one", "HANG", "RAISE", "two"]
    grades = graded(
        plugin, [("kinds_async", 1.0)], [sample(text, n) for n, text in enumerate(texts)], call_deadline=0.5
    )
    assert grades.verdicts == ["graded", "timeout", "crash", "graded"]
    assert "kinds.py, line 48, raised OSError: no route" in grades.notes[2]
    grades = graded(plugin, [("kinds_async", 1.0)], [sample("BLOCK"), sample("one")], call_deadline=0.3)
    assert grades.verdicts == ["timeout", "timeout"]  # it blocked the loop for both


@pytest.mark.slow
def test_a_call_that_forks_or_forges_moves_no_value_to_another_call(plugin):
    words = ["", "FORK", "", "FORGE", "", ""]
    samples = [sample(f"{word} #### {n}", group) for group, word in enumerate(words) for n in range(2)]
    grades = graded(plugin, [("kinds_best", 1.0)], samples)
    values = [np.nan if word == "FORGE" else n for word in words for n in range(2)]
    np.testing.assert_array_equal(grades.rewards, np.array(values, np.float32))
    assert grades.verdicts == ["crash" if word == "FORGE" else "graded" for word in words for n in range(2)]


def test_an_async_call_is_on_the_clock_only_while_this_process_is_awake(monkeypatch):
    """The clock jumps by 100 s, as after SIGSTOP: a look counts for one second at most."""
    monkeypatch.setattr(worker, "monotonic", partial(next, itertools.count(0.0, 100.0)))
    monkeypatch.setattr(worker, "TICK", 0.01)
    assert asyncio.run(worker._before(asyncio.sleep(0.015, "kept"), 2.5)) == "kept"
    with pytest.raises(TimeoutError):
        asyncio.run(worker._before(asyncio.sleep(60), 2.5))


def test_a_closed_grader_says_so(plugin):
    grader = Grader([("kinds_best", 1.0)], plugins=[plugin], workers=1)
    with grader:
        pass
    with pytest.raises(GraderError, match="the grader is closed"):
        grader.submit([sample("x")])


def test_unknown_settings_and_kinds_are_refused(unchecked):
    with pytest.raises(ValueError, match="repetition has no setting n; its settings are words, penalty"):
        Grader([("repetition", 1.0)], settings={"repetition": {"n": 2}})
    with pytest.raises(ValueError, match="exact has no setting n; it has none"):
        Grader([("exact", 1.0)], settings={"exact": {"n": 2}})
    with pytest.raises(ValueError, match="per must be sample, batch or group, got 'row'"):
        reward("kinds_wrong", per="row")  # pyright: ignore[reportArgumentType]


# --- Callables of this process ---------------------------------------------------------------------------------------


def in_this_process(sample: Sample) -> float:
    return float(os.getpid() == PID and sample.extracted == "7")


async def waits(sample: Sample) -> float:
    await asyncio.sleep(0)
    return 2.0


def breaks(sample: Sample) -> float:
    raise ZeroDivisionError("nothing to share")


PID = os.getpid()


def test_callables_are_called_here_and_forgotten_afterwards():
    with local_rewards([in_this_process, (waits, 0.5), ("exact", 0.25)]) as pairs:
        assert pairs == [("in_this_process", 1.0), ("waits", 0.5), ("exact", 0.25)]
        assert sorted(local_digests(["in_this_process", "waits", "exact"])) == ["in_this_process", "waits"]
        with Grader(pairs, style="hash", workers=1) as grader:
            grades = grader.grade([sample("#### 7"), sample("#### 8")])
    np.testing.assert_array_equal(grades.rewards, [2.25, 1.0])
    with pytest.raises(ValueError, match="no reward is called 'in_this_process'"):
        Grader(pairs)
    with local_rewards([breaks]) as pairs, Grader(pairs, workers=1) as grader:
        grades = grader.grade([sample("x")])
    assert (grades.verdicts, np.isnan(grades.rewards).all()) == (["crash"], True)
    assert re.fullmatch(r"breaks: .*test_kinds.py, line \d+, raised ZeroDivisionError: nothing to .*", grades.notes[0])


def test_a_sample_is_graded_by_the_rewards_that_it_names(plugin):
    """One of each kind: in a worker, of a group, and of this process. One that is not asked for is not called."""
    asked = [("exact",), ("kinds_best",), ("breaks",), ("exact", "kinds_best"), (), ("exact",)]
    rows = [replace(sample(f"#### {n}"), answer="5", rewards=names) for n, names in enumerate(asked)]
    with local_rewards([("exact", 1.0), ("kinds_best", 10.0), (breaks, 1.0)]) as pairs:
        grades = graded(plugin, pairs, rows)
    np.testing.assert_array_equal(grades.rewards, np.array([0, 0, np.nan, 10, np.nan, 1], np.float32))
    np.testing.assert_array_equal(
        grades.per_reward["kinds_best"], np.array([np.nan, 0, np.nan, 1, 2, np.nan], np.float32)
    )
    np.testing.assert_array_equal(grades.per_reward["exact"], np.array([0, np.nan, np.nan, 0, 0, 1], np.float32))
    assert grades.verdicts == ["graded", "graded", "crash", "graded", "crash", "graded"]
    assert grades.answers == list("012345")


def test_a_function_typed_at_a_prompt_is_known_by_its_instructions():
    def digest(body, arguments="sample"):
        scope = {}
        exec(f"def typed({arguments}):\n    return max({body} for _ in 'ab')", scope)
        with local_rewards([scope["typed"]]):
            return local_digests(["typed"])["typed"]

    assert digest("1.0") == digest("1.0") != digest("2.0")
    assert digest("[1.0]", "completions") == digest("[1.0]", "completions") != digest("[2.0]", "completions")  # TRL's


def test_code_says_which_rewards_read_answers(plugin):
    load_plugins([plugin])
    with local_rewards([in_this_process, waits, breaks]):
        for names, reads in (("exact", True), ("in_this_process", True), ("kinds_best", True), ("waits breaks", False)):
            assert reads_answers(names.split()) == reads
        assert not reads_answers(["kinds_rank", "code"])


def test_what_is_no_reward_is_refused():
    for wrong, message in (
        ([lambda s: 1.0], "a lambda has no name"),
        ([3], r"expected a function, a reward's name, or \(either, weight\), got 3"),
    ):
        with pytest.raises(ValueError, match=message), local_rewards(wrong):
            pass


# --- Recorded verdicts ------------------------------------------------------------------------------------------------


def test_recorded_verdicts_of_a_judge_are_not_asked_for_again(tmp_path):
    """Killed between two batches: on resume the first comes from disk, only the second is asked about."""
    log = tmp_path / "asked.txt"
    file = tmp_path / "judge.py"
    file.write_text(
        textwrap.dedent(f"""
        from oarjax import reward

        @reward("kinds_judge_{tmp_path.name}")
        async def judge(sample):
            with open({str(log)!r}, "a") as file:
                file.write(sample.completion + "\\n")
            return len(sample.completion) / 10
        """)
    )
    name = f"kinds_judge_{tmp_path.name}"
    batches = [[sample("a", 0), sample("bb", 0)], [sample("ccc", 1), sample("dddd", 1)]]

    def run(count):
        with Grader([(name, 1.0)], plugins=[str(file)], workers=1) as grader:
            failures = Failures("stop", lambda *_: None)
            recorded = RecordedGrader(
                grader, tmp_path / "verdicts", setup="s", failures=failures, say=lambda text: None
            )
            recorded.begin(1)
            return [recorded.submit(batch).result().rewards.tolist() for batch in batches[:count]]

    first = run(1)
    again = run(2)
    assert again[:1] == first
    assert sorted(log.read_text().split()) == ["a", "bb", "ccc", "dddd"]
    assert run(2) == again


TRL_PLUGIN = """
from neighbour import boxed


def correct(completions, answer, **columns):
    return [float(boxed(c[0]["content"]) == a.split("####")[1].strip()) for c, a in zip(completions, answer)]


def brief(prompts, completions, completion_ids, *, limit=2):
    assert prompts == [[{"role": "user", "content": "p"}]] * len(completions)
    return [None if len(ids) == 9 else float(len(ids) < limit) for ids in completion_ids]


async def sorted_columns(completions, hard, easy=None):
    return [float(h or 0) for h in hard]


def helper(text):
    return text
"""


def test_rewards_of_trls_signature_are_found_and_called_as_there(tmp_path):
    """They get chats as messages, ids and columns; a neighbour of their file can be imported."""
    (tmp_path / "trl_kinds.py").write_text(TRL_PLUGIN)
    (tmp_path / "neighbour.py").write_text("def boxed(text):\n    return text.partition('{')[2].partition('}')[0]\n")
    chat = ({"role": "user", "content": "p"},)

    def chatted(text, ids, **columns):
        return Sample(prompt="p", completion=text, answer="7", columns=columns, chat=chat, completion_ids=ids)

    samples = [
        chatted(r"\\boxed{7}", (4, 5, 6), answer="so #### 7", hard=1, prompt="p"),
        chatted("7", (4,), answer="so #### 7"),
        chatted("7", (0,) * 9, answer="so #### 7", hard=2),
    ]
    names = [("correct", 1.0), ("brief", 0.0), ("sorted_columns", 0.0)]
    grades = graded(str(tmp_path / "trl_kinds.py"), names, samples, settings={"brief": {"limit": 3}})
    np.testing.assert_array_equal(grades.per_reward["correct"], [1, 0, 0])
    np.testing.assert_array_equal(grades.per_reward["brief"], [0, 1, np.nan])
    np.testing.assert_array_equal(grades.per_reward["sorted_columns"], [1, 0, 2])
    with pytest.raises(ValueError, match="no reward is called 'helper'"):
        Grader([("helper", 1.0)], plugins=[str(tmp_path / "trl_kinds.py")])


def test_a_reward_of_trls_signature_sees_environments_and_no_failed_ones():
    def of_environment(environments, **kwargs):
        assert len(kwargs["hard"]) == len(environments)
        return [environment.reward + hard for environment, hard in zip(environments, kwargs["hard"])]

    def short(completions, environments):
        return [0.0]

    rows = [Sample("p", "c", "7", columns={"hard": n}, environment={"reward": 2 * n}) for n in (1, 2)]
    rows.insert(1, Sample("p", "c", "7", columns={"hard": 9}))
    with local_rewards([of_environment, (short, 0.0)]) as pairs, Grader(pairs) as grader:
        grades = grader.grade(rows)
        np.testing.assert_array_equal(grades.per_reward["of_environment"], [3, np.nan, 6])
        assert grades.verdicts[1] == "crash"  # of short
        assert "1 values for 2 samples; return one per sample" in grades.notes[0]
        assert grader.grade(rows[:1]).verdicts == ["graded"]
        assert grader.grade(rows[1:2]).verdicts == ["ungraded"]


def test_a_function_of_trls_signature_grades_in_this_process():
    def loud(completions, **kwargs):
        return [float(c.isupper()) for c in completions]

    def tracked(completions, trainer_state):
        return [0.0 for _ in completions]

    def few_tokens(completion_ids, **kwargs):
        return [float(len(ids) < 2) for ids in completion_ids]

    with local_rewards([loud, few_tokens]) as pairs, Grader(pairs) as grader:
        rows = [replace(sample("A"), completion_ids=(1,)), replace(sample("b"), completion_ids=(1, 2))]
        np.testing.assert_array_equal(grader.grade(rows).rewards, [2, 0])
    with pytest.raises(ValueError, match="'tracked': trainer_state is not available here"), local_rewards([tracked]):
        pass
