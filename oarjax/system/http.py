"""Send HTTP requests, each with a deadline for all of it."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit


class Reply(NamedTuple):
    """A reply of the service."""

    status: int
    body: bytes
    retry_after: float | None  # seconds that it asks to wait


def names_host(url: str) -> bool:
    """Return True if a URL names a host, and perhaps a port, that can be looked up."""
    try:
        parts = urlsplit(url)
        return bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # a port above 65535, a label of more than 63 characters
        return False


async def post(
    address: SplitResult, body: bytes, headers: Mapping[str, str], *, timeout: float, most: int, threads: Executor
) -> Reply:
    """Send a POST; when it takes too long or is cancelled, its socket is shut and its thread ends.

    Args:
        timeout: seconds for all of it, however slowly the reply drips.
        most: bytes of the reply that are read, and one more if there are more.

    Raises:
        TimeoutError: there was no whole reply in time.
        OSError, HTTPException: the service cannot be reached, or broke off.
    """
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    link = kind(str(address.hostname), address.port, timeout=timeout)
    target = (address.path or "/") + (f"?{address.query}" if address.query else "")

    def send() -> Reply:
        link.request("POST", target, body, dict(headers))
        reply = link.getresponse()
        content = reply.read(most + 1)
        return Reply(reply.status, content, _seconds(reply.headers.get("Retry-After")))

    try:
        async with asyncio.timeout(timeout):
            return await asyncio.get_running_loop().run_in_executor(threads, send)
    finally:
        _shut(link)


def _seconds(header: str | None) -> float | None:
    """Read a Retry-After in seconds; a date, or nonsense, is not obeyed."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < 1e6 else None


def _shut(link: http.client.HTTPConnection) -> None:
    """Close a connection that a thread may be reading from: shutting the socket wakes it."""
    if link.sock is not None:
        try:
            link.sock.shutdown(2)
        except OSError:  # it was closed by the other side
            return
    link.close()
