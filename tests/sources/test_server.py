"""The token server over real HTTP: it answers our own client, and what is malformed harms nobody else."""

import fcntl
import http.client
import json
import queue
import socket
import threading
from contextlib import closing
from urllib.parse import urlsplit

import jax
import numpy as np
import pytest

from oarjax.config.learning import EngineConfig, RolloutConfig
from oarjax.rollout.source import Batch
from oarjax.sources import server as module
from oarjax.sources.engine import ENDPOINT, EngineSource
from oarjax.sources.server import Sampling, TokenServer, cut
from oarjax.sources.turns import Rules
from oarjax.types import PromptBatch

STOP, VOCAB = 2, 50
RIGHT = {"model": "row", "token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "temperature": 1.0}}


@pytest.fixture
def served():
    """A server whose requests are answered with the id after their last one, and the stop id."""
    asked = queue.Queue()
    server = TokenServer(asked.put)

    def work():
        while (request := asked.get()) is not None:
            seen.append(request)
            request.answer(np.array([request.tokens[-1] + 1, STOP]), np.array([-0.5, -0.25], np.float32), "stop")

    seen, worker = [], threading.Thread(target=work, daemon=True)
    worker.start()
    with closing(server):
        yield server, seen
    asked.put(None)


def send(server, body, *, path=ENDPOINT, **headers):
    """Send a request as it is; return status and JSON of the answer."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    link = http.client.HTTPConnection(str(urlsplit(server.url).hostname), urlsplit(server.url).port, timeout=10)
    headers = {"Authorization": f"Bearer {server.token}", "Content-Length": str(len(body)), **headers}
    with closing(link):
        link.request("POST", path, body, {name: value for name, value in headers.items() if value is not None})
        reply = link.getresponse()
        return reply.status, json.loads(reply.read())


def test_our_own_client_draws_from_it(served, monkeypatch):
    server, seen = served
    prompts = PromptBatch(np.array([[0, 5], [6, 7]], np.int32), np.array([[False, True], [True, True]]), np.arange(2))  # type: ignore
    batch = Batch(prompts, jax.random.key(1), 1, 0, group_size=2, max_new=4)
    monkeypatch.setenv("VLLM_API_KEY", server.token)
    cfg = EngineConfig(url=server.url, retries=0, deadline=10.0)
    turns = EngineSource(cfg, RolloutConfig(max_new=4), Rules(VOCAB, (STOP,))).draw(batch)
    assert [turn.tokens.tolist() for turn in turns] == [[6, STOP]] * 2 + [[8, STOP]] * 2
    assert {tuple(turn.logps.tolist()) for turn in turns} == {(-0.5, -0.25)}
    assert {request.sampling.max_tokens for request in seen} == {4}


@pytest.mark.parametrize(
    ("status", "message", "sent", "headers"),
    [
        (401, "the server's token", RIGHT, {"Authorization": None}),
        (401, "the server's token", RIGHT, {"Authorization": "Bearer other"}),
        (404, ENDPOINT, RIGHT, {"path": "/v1/chat/completions"}),
        (411, "Content-Length", RIGHT, {"Content-Length": "-1"}),
        (413, "at most", RIGHT, {"Content-Length": str(2**24 + 1)}),
        (400, "expected JSON", b"{", {}),
        (400, "expected JSON", b"[" * 100_000, {}),
        (400, "expected an object", [1], {}),
        (400, "model", RIGHT | {"model": 1}, {}),
        (400, "stream", RIGHT | {"stream": True}, {}),
        (400, "pictures", RIGHT | {"features": {"mm_hashes": {}}}, {}),
        (400, "token_ids", RIGHT | {"token_ids": ["5"]}, {}),
        (400, "token_ids", RIGHT | {"token_ids": [5.5]}, {}),
        (400, "token_ids", RIGHT | {"token_ids": [True]}, {}),
        (400, "token_ids", RIGHT | {"token_ids": [-1]}, {}),
        (400, "token_ids", RIGHT | {"token_ids": [2**31]}, {}),
        (400, "at least one", RIGHT | {"token_ids": []}, {}),
        (400, "max_tokens", RIGHT | {"sampling_params": {"max_tokens": -1}}, {}),
        (400, "n: expected 1", RIGHT | {"sampling_params": {"n": 2}}, {}),
        (400, "stop_token_ids", RIGHT | {"sampling_params": {"stop_token_ids": ["x"]}}, {}),
    ],
)
def test_malformed_requests_get_a_clear_error_and_the_server_lives_on(served, status, message, sent, headers):
    server, seen = served
    got, reply = send(server, sent, **headers)
    assert (got, reply["error"]["code"]) == (status, status)
    assert message in reply["error"]["message"]
    assert not seen
    assert send(server, RIGHT)[0] == 200


def test_a_client_that_breaks_off_or_goes_harms_nobody(monkeypatch):
    monkeypatch.setattr(module, "LOOKING", 0.01)
    monkeypatch.setattr(module, "READING", 0.05)
    asked, body = queue.Queue(), json.dumps(RIGHT).encode()
    with closing(TokenServer(asked.put)) as server:
        place = (urlsplit(server.url).hostname, urlsplit(server.url).port)
        head = (
            f"POST {ENDPOINT} HTTP/1.1\r\nAuthorization: Bearer {server.token}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(place) as link:  # half a request
            link.sendall(head.encode() + body[:5])
        with socket.create_connection(place) as link:
            link.sendall(head.encode() + body)
            gone = asked.get(timeout=10)
        for _ in range(1000):
            if gone.gone:
                break
            threading.Event().wait(0.01)
        assert gone.gone
        gone.answer(np.array([STOP]), np.array([0.0]), "stop")  # in vain, and no harm
        threading.Thread(target=lambda: asked.get(timeout=10).refuse(400, "no room"), daemon=True).start()
        assert send(server, RIGHT) == (
            400,
            {"error": {"message": "no room", "type": "invalid_request_error", "code": 400}},
        )


def test_a_connection_too_many_waits_for_another_to_end(monkeypatch):
    monkeypatch.setattr(module, "MOST_DRIVEN", 1)
    asked = queue.Queue()
    with closing(TokenServer(asked.put)) as server:
        link = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
        threading.Timer(0.05, link.close).start()
        threading.Thread(target=lambda: asked.get(timeout=10).refuse(400, "its turn"), daemon=True).start()
        assert send(server, RIGHT)[1]["error"]["message"] == "its turn"


def test_a_client_beyond_a_thousand_descriptors_is_waited_for(monkeypatch):
    monkeypatch.setattr(module, "LOOKING", 0.01)
    asked = module.asked_of(RIGHT)
    here, there = socket.socketpair()
    try:
        far = socket.socket(fileno=fcntl.fcntl(here.fileno(), fcntl.F_DUPFD, 1024))
    except OSError:
        pytest.skip("this machine allows fewer")
    with here, there, far:
        threading.Timer(0.05, asked.refuse, (409, "late")).start()
        assert asked.wait(far)[0] == 409


def test_a_turn_is_cut_as_its_request_wants_it():
    ids = np.array([7, 8, 9, STOP])
    assert cut(ids, "stop", Sampling(None, (STOP,), {}), (STOP,))[1] == "stop"
    shorter = cut(ids, "stop", Sampling(2, (), {}), (STOP,))
    assert (shorter[0].tolist(), shorter[1]) == ([7, 8], "length")
    earlier = cut(ids, "length", Sampling(None, (8, STOP), {}), (STOP,))
    assert (earlier[0].tolist(), earlier[1]) == ([7, 8], "stop")
