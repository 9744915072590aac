"""An engine over real HTTP: what it is asked, and that none of its faults gets into a rollout."""

import asyncio
import json
import threading
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from judge_server import Answering, serving

from oarjax.config.learning import EngineConfig, RolloutConfig
from oarjax.config.loading import parse_config
from oarjax.errors import ConfigError
from oarjax.rollout.source import Batch, rollout_of
from oarjax.sources import engine as module
from oarjax.sources.engine import EngineError, EngineSource, Unfit
from oarjax.sources.records import RecordedSource, Records
from oarjax.sources.turns import Rules
from oarjax.storage.durable import Failures
from oarjax.system.http import Reply
from oarjax.types import PromptBatch

STOP, VOCAB, T = 2, 50, 4
PROMPTS = PromptBatch(np.array([[0, 5], [6, 7]], np.int32), np.array([[False, True], [True, True]]), np.array([8, 3]))  # type: ignore
BATCH = Batch(PROMPTS, jax.random.key(1), 1, 0, group_size=2, max_new=T)


def answer(asked: dict, *, older: bool = False) -> dict:
    """Answer as vLLM does; rows of odd number are cut at the end, the others stop."""
    row = int(asked["request_id"].split("-")[2])
    ids = [10 + row, 11, 12, 13] if row % 2 else [10 + row, STOP]
    if asked["sampling_params"]["max_tokens"] == 1:
        ids = [10]
    logps = [0.0] if asked["sampling_params"]["top_k"] == 1 else [-0.5 - n for n in range(len(ids))]
    names = [{"token": f"token_id:{i}"} if older else {"token_id": i} for i in ids]
    content = [{**name, "logprob": logp, "top_logprobs": []} for name, logp in zip(names, logps)]
    finish = "stop" if ids[-1] == STOP else "length"
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
    return {"request_id": "x", "choices": [choice], "usage": {"prompt_tokens": len(asked["token_ids"])}}


class Engine(Answering):
    """Answers by the function ``fault`` of its server: (number of the request, its JSON, the right answer) -> answer.

    A dict is sent as JSON, a number as a status; bytes are sent as they are, and the connection is closed; None closes
    it at once.
    """

    server: Any

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, asked))
            number = len(self.server.asked)
        sent = self.server.fault(number, asked, answer(asked))
        if isinstance(sent, dict):
            self.answer(json.dumps(sent).encode())
        elif isinstance(sent, int):
            self.send_error(sent)
        else:
            if sent == b"drip":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                while not self.server.over.wait(0.05):
                    try:
                        self.wfile.write(b" ")
                    except OSError:
                        break
            elif sent is not None:
                self.send_response(200)
                self.send_header("Content-Length", str(2 * len(sent)))
                self.end_headers()
                self.wfile.write(sent)
            self.close_connection = True


def fine(number, asked, right):
    return right


def changed(number, asked, right, **fields):
    """Change fields of the first choice of every answer."""
    return right | {"choices": [right["choices"][0] | fields]}


def logprobs(number, asked, right, *, change):
    return changed(number, asked, right, logprobs={"content": change(right["choices"][0]["logprobs"]["content"])})


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.fixture
def engine():
    """Serve with a fault: (server, a source that draws with it)."""
    with serving(Engine, asked=[], fault=fine) as server:

        def source(fault=fine, **settings):
            server.fault = fault
            url = f"http://127.0.0.1:{server.server_port}"
            cfg = EngineConfig(url=url, **{"retries": 1, "deadline": 5.0, **settings})
            return EngineSource(cfg, RolloutConfig(max_new=T, top_k=3, temperature=0.7), Rules(VOCAB, (STOP,)))

        yield server, source


@pytest.mark.parametrize("older", [False, True])
def test_rows_are_drawn_and_reported_as_they_end(engine, older):
    server, source = engine
    reported = []
    turns = source(lambda number, asked, right: answer(asked, older=older)).draw(
        BATCH, lambda news: reported.extend(news.rows.tolist())
    )
    rollout = rollout_of(BATCH, list(zip(BATCH.requests, turns)), pad_id=0)
    assert rollout.tokens[:, 2:].tolist() == [[10, 2, 0, 0], [11, 11, 12, 13], [12, 2, 0, 0], [13, 11, 12, 13]]
    assert rollout.ended.tolist() == [True, False, True, False]
    assert rollout.filtered_logps[1].tolist() == rollout.behaviour_logps[1].tolist() == [-0.5, -1.5, -2.5, -3.5]
    assert sorted(reported) == [0, 1, 2, 3]
    path, asked = min(server.asked, key=lambda each: each[1]["request_id"])
    assert (path, asked["token_ids"]) == ("/inference/v1/generate", [5])
    params = asked["sampling_params"]
    assert "seed" not in params
    assert {name: params[name] for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p")} == {
        **{"max_tokens": T, "temperature": 0.7, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
    }
    assert (params["stop_token_ids"], params["ignore_eos"], params["logprobs"]) == ([STOP], True, 1)


FAULTS = {
    "a log-prob too few": (partial(logprobs, change=lambda content: content[1:]), "of other tokens"),
    "log-probs of other tokens": (
        partial(logprobs, change=lambda content: [each | {"token_id": 9} for each in content]),
        "of other tokens",
    ),
    "no log-probs": (partial(changed, logprobs=None), "cannot be used: TypeError"),
    "a log-prob that vLLM has not": (
        partial(logprobs, change=lambda content: [each | {"logprob": -9999.0} for each in content]),
        "log-probs are missing",
    ),
    "a log-prob above 0": (
        partial(logprobs, change=lambda content: [each | {"logprob": 0.5} for each in content]),
        "above 0",
    ),
    "no tokens": (partial(changed, token_ids=[], logprobs={"content": []}), "not integers"),
    "an aborted row": (partial(changed, finish_reason="abort"), "expected finish stop or length, got 'abort'"),
    "a row that did not stop": (
        lambda n, asked, right: changed(n, asked, right, finish_reason="stop"),
        "is none of the stop ids",
    ),
    "a row cut too early": (
        lambda n, asked, right: changed(n, asked, right, finish_reason="length"),
        "finish is length, after 2 of 4",
    ),
    "an answer to another prompt": (
        lambda n, asked, right: right | {"usage": {"prompt_tokens": 77}},
        "to a prompt of 77 tokens",
    ),
    "two answers": (lambda n, asked, right: right | {"choices": right["choices"] * 2}, "too many values"),
    "half an answer": (lambda n, asked, right: json.dumps(right).encode()[:90], "the engine"),
    "no answer": (lambda n, asked, right: None, "cannot be reached"),
    "an error": (lambda n, asked, right: 500, "status 500"),
    "an answer without end": (lambda n, asked, right: {**right, "padding": "x" * 200_000}, "cannot be used"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_asked_about_again_and_then_ends_the_run(engine, name):
    server, source = engine
    fault, message = FAULTS[name]
    reported = []
    with pytest.raises(EngineError, match=message) as error:
        source(fault, concurrency=1).draw(BATCH, lambda news: reported.extend(news.rows.tolist()))
    assert error.value.exit_code == 75
    wrong = [asked["request_id"] for _, asked in server.asked][-2:]
    assert wrong[0] == wrong[1]  # the retry
    assert reported == list(range(int(wrong[0].split("-")[2])))  # rows that the fault did not touch, in order


def test_ids_outside_the_vocabulary_are_refused(engine):
    _, source = engine

    def outside(number, asked, right):
        content = [{"token_id": VOCAB, "logprob": -1.0}, {"token_id": STOP, "logprob": -1.0}]
        return changed(number, asked, right, token_ids=[VOCAB, STOP], logprobs={"content": content})

    with pytest.raises(EngineError, match="the vocabulary from 0 to 49"):
        source(outside).draw(BATCH)


def test_tokens_after_a_stop_id_are_refused(engine):
    _, source = engine

    def later(number, asked, right):
        content = [{"token_id": i, "logprob": -1.0} for i in (STOP, STOP)]
        return changed(number, asked, right, token_ids=[STOP, STOP], logprobs={"content": content})

    with pytest.raises(EngineError, match="tokens follow the stop id 2"):
        source(later).draw(BATCH)


def test_a_refused_request_is_not_repeated(engine):
    server, source = engine
    with pytest.raises(
        EngineError, match=r"0 of 4 rows were drawn, then the engine at http://\S+ answered with status 404"
    ):
        source(lambda *_: 404, concurrency=1).draw(BATCH)
    assert len(server.asked) == 1


def test_a_slow_drip_ends_at_the_deadline(engine):
    _, source = engine
    with pytest.raises(EngineError, match=r"did not answer within 0.3 s"):
        source(lambda *_: b"drip", deadline=0.3, retries=0).draw(BATCH)


def test_a_wait_that_is_asked_for_is_no_longer_than_the_deadline(engine, monkeypatch):
    _, source = engine
    pauses = []

    async def post(*_, **__):
        return Reply(503, b"", 9e5)

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(module, "post", post)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(EngineError, match="status 503"):
        source(deadline=7.0, retries=2, concurrency=1).draw(BATCH)
    assert pauses == [7.0, 7.0]


def test_a_fault_that_passes_leaves_no_trace(engine):
    server, source = engine
    expected = source().draw(BATCH)
    server.asked.clear()
    drawn = source(lambda number, asked, right: 503 if number == 1 else right).draw(BATCH)
    assert [turn.tokens.tolist() for turn in drawn] == [turn.tokens.tolist() for turn in expected]
    assert len(server.asked) == 5


def test_tokens_of_other_weights_are_refused(engine):
    server, source = engine

    def of(number, asked, right, *, version):
        spans = [{"start": 0, "end": 1, "version": version(number)}]
        return changed(number, asked, right, weight_versions=spans)

    drawing = source(partial(of, version=lambda number: "a"))
    drawing.probe()
    assert len(drawing.draw(BATCH)) == 4
    server.fault = partial(of, version=lambda number: "b")
    with pytest.raises(EngineError, match=r"are of the weights .*'b'.*, the first ones were of .*'a'"):
        drawing.draw(BATCH)


def test_after_its_death_in_mid_batch_only_the_missing_rows_are_drawn(engine, tmp_path):
    server, source = engine
    failures = Failures("stop", print)

    def recorded(fault, **settings):
        records = Records(tmp_path / "rollouts", failures=failures, say=print)
        return RecordedSource(source(fault, **settings), records)

    dying = recorded(lambda number, asked, right: right if number <= 3 else None, concurrency=1)
    with pytest.raises(EngineError, match="3 of 4 rows were drawn"):
        dying.draw(BATCH)
    server.asked.clear()
    resumed = recorded(fine)
    assert len(resumed.draw(BATCH)) == 4
    assert [asked["request_id"] for _, asked in server.asked] == ["1-0-3-0"]
    assert resumed.spent().metrics()["rows_redrawn"] == 1
    server.asked.clear()
    again = recorded(lambda *_: 500)
    assert len(again.draw(BATCH)) == 4
    assert server.asked == []


def test_an_error_of_the_grader_stops_the_requests(engine):
    _, source = engine
    held = threading.Event()

    def slow(number, asked, right):
        if number > 1:
            held.wait(20)
        return right

    def fails(news):
        raise RuntimeError("the grader died")

    drawing = source(slow, deadline=60.0)
    with pytest.raises(RuntimeError, match="the grader died"):
        drawing.draw(BATCH, fails)
    drawing._threads.shutdown(wait=True)  # returns: the requests in flight were given up
    assert not held.is_set()


def test_the_probe_wants_log_probs_of_what_was_drawn_from(engine):
    server, source = engine
    source().probe()
    assert server.asked[0][1]["sampling_params"]["top_k"] == 1
    raw = partial(logprobs, change=lambda content: [each | {"logprob": -0.7} for each in content])
    with pytest.raises(Unfit, match="--logprobs-mode processed_logprobs") as error:
        source(raw).probe()
    assert error.value.exit_code == 2
    with pytest.raises(EngineError, match="status 404"):
        source(lambda *_: 404).probe()


def test_new_weights_are_refused():
    source = EngineSource(EngineConfig(url="http://127.0.0.1:1"), RolloutConfig(), Rules(VOCAB, (STOP,)))
    source.sync(None, 0)
    with pytest.raises(Unfit, match="cannot be given new weights"):
        source.sync(None, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"url": url}, "rollout.engine.url: expected an address such as http")
            for url in ("127.0.0.1:8000", "http://h:99999", "http://h:port", f"http://{'h' * 64}:80", "http://[::1")
        ),
        ({"stop": ["x"]}, "rollout.stop: an engine cannot be told"),
        ({"from": ["a.jsonl"]}, "rollout.from: rollouts come from files, and rollout.engine is set"),
        ({"repetition_penalty": 1.1}, "rollout.engine: the loss cannot follow rollout.repetition_penalty"),
        ({"min_p": 0.1}, "rollout.engine: log-probs are those after"),
        ({"iterations": 2}, "rollout.engine: the engine keeps the weights .* or iterations=1"),
    ],
)
def test_settings_that_an_engine_cannot_follow_are_refused_by_name(fields, message):
    rollout = {"engine": {"url": fields.pop("url", "http://127.0.0.1:8000")}}
    tree = {"run_dir": "r", "policy": {"path": "p"}, "data": {"train": {"source": "s"}}}
    tree["iterations"] = fields.pop("iterations", 1)
    with pytest.raises(ConfigError, match=message):
        parse_config(tree | {"rollout": rollout | fields})
