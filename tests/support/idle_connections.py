"""Connections to a server on which nothing more arrives."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"  # without its end
CLOSED_WITHIN_S = 90.0


@contextmanager
def open_idle(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Open connections to a loopback server. Every second one sends a part of a request's head."""
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(count)
        ]
        for one in idle[::2]:
            one.sendall(HEAD)
        yield idle


def wait_until_closed(idle: list[socket.socket]) -> None:
    """Wait until the server has closed all connections without a word.

    The close is a reset if bytes arrive that nobody has read.
    """
    until = time.monotonic() + CLOSED_WITHIN_S
    for one in idle:
        one.settimeout(max(0.1, until - time.monotonic()))
        with suppress(ConnectionResetError):
            assert one.recv(1) == b"", "an idle connection got an answer"


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has not closed a connection yet."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
