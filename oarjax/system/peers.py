"""Notice at once that another process of the run has ended, instead of by JAX's heartbeat after minutes.

Every process holds a connection to the first one. A connection that closes without a farewell is a process that was
killed, or whose machine is gone: then this process ends too, so that all of them can be started again.
"""

from __future__ import annotations

import atexit
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import jax

from oarjax.system.processes import gather, is_first, lost_message

PATIENCE = 60  # seconds to connect
GRACE = 3.0  # seconds in which an error of this process's own may end it first
FAREWELL = b"bye\n"
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that vanishes is noticed within half a minute."""


class Peers:
    """Connections of this process to the others: of the first to all, of each other one to the first."""

    def __init__(self) -> None:
        self.connections: dict[int, socket.socket] = {}
        self.resumable: Callable[[], bool] = lambda: False
        self._left = False

    def link(self) -> None:
        """Connect with the other processes; call on all of them at once. Without a connection nothing is watched."""
        if jax.process_count() == 1 or self.connections:
            return
        server = socket.create_server(("", 0)) if is_first() else None
        token = secrets.token_bytes(16)
        own_endpoint = None if server is None else [own_address(), server.getsockname()[1], token.hex()]
        address, port, token_hex = next(endpoint for endpoint in gather(own_endpoint) if endpoint is not None)
        try:
            self.connections = (
                accepted(server, token)
                if server is not None
                else {0: called(str(address), int(port), bytes.fromhex(token_hex))}
            )
        except (OSError, ValueError):
            self.connections = {}
        linked = all(gather(bool(self.connections)))
        if server is not None:
            server.close()
        if not linked:
            self.leave()
            return
        atexit.register(self.leave)
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def leave(self) -> None:
        """Say farewell, so that the others do not take this process for lost."""
        self._left = True
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(FAREWELL)

    def _watch(self) -> None:
        """Wait for a connection that closes."""
        with selectors.DefaultSelector() as ready:
            for number, connection in self.connections.items():
                ready.register(connection, selectors.EVENT_READ, number)
            while ready.get_map():
                for key, _ in ready.select():
                    try:
                        message = self.connections[key.data].recv(len(FAREWELL))
                    except OSError:
                        message = b""
                    ready.unregister(key.fileobj)
                    if not message and not self._left:
                        self._lost(key.data)

    def _lost(self, number: int) -> None:
        """End this process: with 75 if the same commands resume the run, else with 1."""
        for connection in self.connections.values():
            connection.close()  # the others notice now
        if number:  # without the first one, which coordinates all, JAX would end this process by a signal
            time.sleep(GRACE)
        code, message = lost_message(self.resumable, f"the connection with process {number} closed")
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(code)


PEERS = Peers()


def leave_others(code: int, *, agreed: bool) -> None:
    """End this process at once if it is one of several; do nothing if it is alone.

    The others wait for this process's next program, and an orderly exit would wait for them in turn. Unless all end for
    a reason that they ``agreed`` on, they notice that this one is gone, and end too.
    """
    if jax.distributed.is_initialized():
        if agreed:
            PEERS.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def resumes(resumable: Callable[[], bool]) -> Iterator[None]:
    """Let ``resumable`` say, while this lasts, whether the run can go on after the loss of a process."""
    outer, PEERS.resumable = PEERS.resumable, resumable
    try:
        yield
    finally:
        PEERS.resumable = outer


def own_address() -> str:
    """Return the address of this machine that others of its network reach; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def accepted(server: socket.socket, token: bytes) -> dict[int, socket.socket]:
    """Accept the calls of all other processes, which say the token and their number; strangers are turned away.

    Raises:
        OSError: not all of them called in time.
    """
    connections: dict[int, socket.socket] = {}
    end = time.monotonic() + PATIENCE
    while len(connections) < jax.process_count() - 1:
        server.settimeout(max(end - time.monotonic(), 0.01))
        connection, _ = server.accept()
        connection.settimeout(5)
        try:
            greeting = connection.recv(len(token) + 4, socket.MSG_WAITALL)
        except OSError:
            greeting = b""
        if not secrets.compare_digest(greeting[: len(token)], token):
            connection.close()
            continue
        connections[int.from_bytes(greeting[len(token) :], "big")] = kept_alive(connection)
    return connections


def called(address: str, port: int, token: bytes) -> socket.socket:
    """Call the first process and say who this is.

    Raises:
        OSError: it cannot be reached.
    """
    connection = socket.create_connection((address, port), PATIENCE)
    connection.sendall(token + jax.process_index().to_bytes(4, "big"))
    return kept_alive(connection)


def kept_alive(connection: socket.socket) -> socket.socket:
    """Have the system ask after the other end, and wait without limit for what it says."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return connection
