"""Exchange JSON messages with a worker without ever waiting for it.

The frames are those of ``multiprocessing.connection.Connection``, which the worker uses: four bytes of length, and the
message.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_BYTES = 2**26
"""Size limit of a message; no worker sends a longer one."""

READS = 64
"""Reads from one worker before the others get their turn."""


class InvalidMessage(Exception):
    """The other side sent something that is not a message."""


class Link:
    """One end of a socket pair. ``ended``: the other end is closed, and all that it sent has been received."""

    def __init__(self, ours: socket.socket):
        ours.setblocking(False)
        self._socket, self.ended = ours, False
        self._out, self._in = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """True while data waits for the other side to read it."""
        return bool(self._out)

    def send(self, message: Any) -> None:
        """Send a message, now or in calls of ``flush``.

        Raises:
            OSError: the other end is closed.
        """
        body = json.dumps(message).encode()
        self._out += struct.pack("!i", len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send as much as the other side accepts now.

        Raises:
            OSError: the other end is closed.
        """
        while self._out:
            try:
                del self._out[: self._socket.send(self._out[: 2**16])]
            except BlockingIOError:
                return

    def receive(self) -> list[Any]:
        """Return the messages that have arrived completely.

        Raises:
            InvalidMessage: one of them is not JSON, or too long.
            OSError: the connection is lost.
        """
        for _ in range(READS):
            try:
                part = self._socket.recv(2**16)
            except BlockingIOError:
                break
            self.ended = not part
            if self.ended:
                break
            self._in += part
        messages = []
        while len(self._in) >= 4:
            (length,) = struct.unpack("!i", self._in[:4])
            if not 0 <= length <= MAX_BYTES:
                raise InvalidMessage(f"a message of {length} bytes")
            if len(self._in) < 4 + length:
                break
            try:
                messages.append(json.loads(self._in[4 : 4 + length]))
            except (ValueError, RecursionError) as error:
                raise InvalidMessage(f"invalid JSON: {error}") from None
            del self._in[: 4 + length]
        return messages

    def close(self) -> None:
        self._socket.close()
