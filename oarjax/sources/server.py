"""Answer vLLM's token endpoint, ids in, ids and log-probs out, for programs of others that drive the run's policy.

Requests are read in threads and handed to whoever draws, as ``TurnAsked``, to be answered in batches. The server
listens on loopback, wants its token with every request, and takes none that is larger or of another form than it says.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32

from oarjax.config.learning import MOST_DRIVEN
from oarjax.sources.engine import ENDPOINT

MOST_BODY = 2**24
"""Bytes of a request."""
WAITING = 1.0
"""Seconds that a connection waits for one of ``MOST_DRIVEN`` to end."""
READING = 30.0
"""Seconds in which a request must have arrived."""
LOOKING = 0.5
"""Seconds after which a waiting request's client is looked at again."""

UNREAD = {"logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "ignore_eos", "output_kind"}
UNREAD |= {"include_stop_str_in_output", "routed_experts_prompt_start", "truncate_prompt_tokens"}
"""Sampling parameters that change no token."""


class Refused(Exception):
    """A request that is not answered with a turn: the HTTP status, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Sampling(NamedTuple):
    """Describe how a turn is to be drawn."""

    max_tokens: int | None
    stop_ids: tuple[int, ...]
    others: dict[str, Any]  # parameters that would change the distribution


class TurnAsked:
    """A request that waits for its answer.

    Attributes:
        gone: its client has gone; an answer would be in vain.
    """

    def __init__(self, model: str, tokens: Int32[np.ndarray, "n"], sampling: Sampling) -> None:
        self.model, self.tokens, self.sampling = model, tokens, sampling
        self.gone = False
        self._done = threading.Event()
        self._reply: tuple[int, dict[str, Any]] = (503, {})

    def answer(self, tokens: Int[np.ndarray, "T"], logps: Float[np.ndarray, "T"], finish: str) -> None:
        """Send a turn."""
        content = [
            {"token": f"token_id:{i}", "token_id": i, "logprob": logp, "top_logprobs": []}
            for i, logp in zip(tokens.tolist(), logps.tolist(), strict=True)
        ]
        choice = {"index": 0, "token_ids": tokens.tolist(), "logprobs": {"content": content}, "finish_reason": finish}
        usage = {"prompt_tokens": len(self.tokens), "completion_tokens": len(tokens)}
        self._end(200, {"request_id": secrets.token_hex(8), "choices": [choice], "usage": usage})

    def refuse(self, status: int, message: str) -> None:
        """Send an error."""
        self._end(status, _error(status, message))

    def _end(self, status: int, reply: dict[str, Any]) -> None:
        self._reply = (status, reply)
        self._done.set()

    def wait(self, link: socket.socket) -> tuple[int, dict[str, Any]] | None:
        """Return status and JSON of the answer; None once the client at the other end of ``link`` has gone."""
        while not self._done.wait(LOOKING):
            if _readable(link) and not _peek(link):
                self.gone = True
                return None
        return self._reply


class TokenServer:
    """Listen for requests.

    Args:
        take: called with each, from its own thread.
        host, port: to listen at; port 0: any free one.

    Attributes:
        token: that requests have to bring, as ``Authorization: Bearer``.
    """

    def __init__(self, take: Callable[[TurnAsked], object], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.token = secrets.token_urlsafe(32)
        self._server = _Server((host, port), _Handler)
        self._server.take, self._server.token = take, self.token
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="token server", daemon=True).start()

    @property
    def url(self) -> str:
        """Return its address, http://host:port."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}"

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    take: Callable[[TurnAsked], object]
    token: str

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._room = threading.BoundedSemaphore(MOST_DRIVEN)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(timeout=WAITING):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that break off."""


class _Handler(BaseHTTPRequestHandler):
    """Read a request, wait for its answer, send it, and close the connection."""

    server: Any  # a _Server
    protocol_version, timeout = "HTTP/1.1", READING

    def do_POST(self) -> None:
        try:
            request = self._asked()
            self.server.take(request)
            reply = request.wait(self.connection)
        except Refused as refused:
            reply = refused.status, _error(refused.status, str(refused))
        if reply is not None:
            self._send(*reply)

    def do_GET(self) -> None:
        self._send(404, _error(404, f"there is POST {ENDPOINT} alone"))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _asked(self) -> TurnAsked:
        if self.path != ENDPOINT:
            raise Refused(404, f"there is POST {ENDPOINT} alone")
        sent = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(sent, f"Bearer {self.server.token}".encode()):
            raise Refused(401, "expected the server's token as Authorization: Bearer")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(411, "expected a Content-Length")
        if len(length) > 12 or int(length) > MOST_BODY:
            raise Refused(413, f"expected at most {MOST_BODY} bytes, got {length:.20}")
        try:
            body = json.loads(self._body(int(length)))
        except (ValueError, RecursionError):
            raise Refused(400, "expected JSON") from None
        return asked_of(body)

    def _body(self, length: int) -> bytes:
        body, until = b"", time.monotonic() + READING
        while len(body) < length:
            part = self.rfile.read1(length - len(body))
            if not part or time.monotonic() > until:
                raise Refused(408, f"{len(body)} of {length} bytes arrived")
            body += part
        return body

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def asked_of(body: Any) -> TurnAsked:
    """Read a request.

    Raises:
        Refused: it has another form, or asks for what no turn can be.
    """
    if not isinstance(body, dict) or not isinstance(params := body.get("sampling_params"), dict):
        raise Refused(400, "expected an object with token_ids and sampling_params")
    model = body.get("model", body.get("request_id"))
    if not isinstance(model, str):
        raise Refused(400, f"model: expected a text, got {model!r:.60}")
    if body.get("stream"):
        raise Refused(400, "stream: expected false, a turn is sent whole")
    if body.get("features") or body.get("content_parts"):
        raise Refused(400, "expected token ids alone, without pictures")
    tokens = _ids("token_ids", body.get("token_ids"))
    if not len(tokens):
        raise Refused(400, "token_ids: expected at least one id")
    max_tokens, count = params.get("max_tokens"), params.get("n", 1)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise Refused(400, f"max_tokens: expected a whole number from 1, got {max_tokens!r:.60}")
    if count != 1:
        raise Refused(400, f"n: expected 1, got {count!r:.60}")
    stops = _ids("stop_token_ids", params.get("stop_token_ids") or [])
    known_params = {"max_tokens", "n", "stop_token_ids", *UNREAD}
    other_params = {name: value for name, value in params.items() if name not in known_params and value is not None}
    return TurnAsked(model, tokens, Sampling(max_tokens, tuple(stops.tolist()), other_params))


def _ids(name: str, values: Any) -> Int32[np.ndarray, "n"]:
    if not isinstance(values, list) or any(type(i) is not int or not 0 <= i < 2**31 for i in values):
        raise Refused(400, f"{name}: expected a list of whole numbers from 0, got {values!r:.60}")
    return np.asarray(values, np.int32)


def cut(
    tokens: Int[np.ndarray, "T"], finish: str, sampling: Sampling, stop_ids: Sequence[int]
) -> tuple[Int[np.ndarray, "t"], str]:
    """Cut a turn as its request wants it: after max_tokens, or after one of its stop ids that the run has not.

    What is left is as likely as if no more had been drawn.
    """
    is_stop = np.isin(tokens, np.setdiff1d(sampling.stop_ids, stop_ids))
    end = int(is_stop.argmax()) + 1 if is_stop.any() else len(tokens)
    finish = "stop" if is_stop.any() else finish
    if sampling.max_tokens is not None and sampling.max_tokens < end:
        end, finish = sampling.max_tokens, "length"
    return tokens[:end], finish


def _readable(link: socket.socket) -> bool:
    look = select.poll()  # select() takes no descriptor above 1,023
    look.register(link, select.POLLIN)
    return bool(look.poll(0))


def _peek(link: socket.socket) -> bytes:
    try:
        return link.recv(1, socket.MSG_PEEK)
    except OSError:
        return b""


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": status}}
