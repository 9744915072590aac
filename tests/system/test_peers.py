"""Connections between the processes of a run: who is lost, who said farewell, who is a stranger."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from oarjax.system import peers


@pytest.fixture
def ends(monkeypatch):
    """Exit codes with which this process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(peers.os, "_exit", codes.append)
    monkeypatch.setattr(peers, "GRACE", 0.0)
    return codes


def watched(resumable):
    """A watch over two connections, and their other ends."""
    watch, pairs = peers.Peers(), [socket.socketpair() for _ in range(2)]
    watch.connections = {number: ours for number, (ours, _) in enumerate(pairs)}
    watch.resumable = resumable
    thread = threading.Thread(target=watch._watch, daemon=True)
    thread.start()
    return watch, [theirs for _, theirs in pairs], thread


@pytest.mark.parametrize(("saved", "code"), [(True, 75), (False, 1)])
def test_a_closed_connection_is_a_lost_process(ends, capsys, saved, code):
    _, theirs, thread = watched(lambda: saved)
    theirs[1].close()
    while not ends:
        thread.join(0.01)
    assert ends[0] == code
    said = capsys.readouterr().err
    assert "another process of the run ended or cannot be reached (the connection with process 1 closed)" in said
    assert theirs[0].recv(9) == b"", "the others notice as well"


def test_after_a_farewell_nobody_is_lost(ends):
    watch, theirs, thread = watched(lambda: True)
    for each in theirs:
        each.sendall(peers.FAREWELL)
        each.close()
    thread.join(10)
    assert not thread.is_alive()
    assert not ends
    watch.leave()  # to connections that are closed


def test_a_stranger_is_turned_away(monkeypatch):
    monkeypatch.setattr(peers.jax, "process_count", lambda: 2)
    monkeypatch.setattr(peers.jax, "process_index", lambda: 1)
    server, token, found = socket.create_server(("127.0.0.1", 0)), b"0123456789abcdef", {}
    thread = threading.Thread(target=lambda: found.update(peers.accepted(server, token)))
    thread.start()
    address, port = server.getsockname()
    for other in (b"GET / HTTP/1.1\r\nHost:", token[:-1] + b"\x00\x00\x00\x00\x01"):
        with socket.create_connection((address, port)) as stranger:
            stranger.sendall(other)
            with suppress(OSError):  # the connection may be closed before these, with bytes unread
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
    ours = peers.called(address, port, token)
    thread.join(10)
    assert list(found) == [1]
    ours.sendall(peers.FAREWELL)
    assert found[1].recv(9) == peers.FAREWELL


def test_nobody_calls(monkeypatch):
    monkeypatch.setattr(peers.jax, "process_count", lambda: 2)
    monkeypatch.setattr(peers, "PATIENCE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        peers.accepted(server, b"0" * 16)
