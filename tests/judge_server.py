"""A local HTTP server on a free port, for the tests of judges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answering(BaseHTTPRequestHandler):
    """Keep connections open, and print nothing."""

    protocol_version = "HTTP/1.1"

    def answer(self, body: bytes) -> None:
        """Send a body with status 200."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Accept as many connections at once as a client opens: with the default of 5, further ones may be reset."""

    request_queue_size = 128
    daemon_threads = True


@contextmanager
def serving(handler: type[Answering], **state: Any) -> Iterator[Any]:
    """Serve until the block ends. Handlers find the state on their server, a lock, and ``over``, set at the end."""
    server: Any = Server(("127.0.0.1", 0), handler)
    vars(server).update(state, lock=threading.Lock(), over=threading.Event())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
