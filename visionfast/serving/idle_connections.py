"""Connections on which a server of ours owes nobody an answer, closed so that it need not wait for their clients.

Told to end, Triton (2.51) waits its whole exit timeout while an HTTP client merely keeps a connection open, and does
not say on which of them a request is in flight. Linux does: when each last received and last sent. Our child's sockets
are had through pidfd_getfd; where that is not allowed (a container's seccomp), the server waits as it does by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["close_idle_connections"]

_PIDFD_GETFD = 438  # of every architecture
_ESTABLISHED = 1
_QUIET_MS = 200
_TCP_INFO_BYTES = 160


def close_idle_connections(pid: int, port: int) -> int:
    """How many were closed of the connections that a child process has accepted at a port.

    One is idle if nothing was ever asked on it, or if what was sent last is an answer, acknowledged, and 0.2 s old. In
    doubt it is not: an answer within a clock tick of its request may look like a request that came behind an answer.
    """
    closed = 0
    with contextlib.suppress(OSError):
        for connection in _sockets(pid):
            with connection, contextlib.suppress(OSError):
                if connection.family == socket.AF_INET and connection.getsockname()[1] == port and _idle(connection):
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Copies of a child's sockets."""
    libc = ctypes.CDLL(None)
    process = os.pidfd_open(pid)
    try:
        for link in (Path("/proc") / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if str(link.readlink()).startswith("socket:"):
                    descriptor = libc.syscall(_PIDFD_GETFD, process, int(link.name), 0)
                    if descriptor >= 0:
                        yield socket.socket(fileno=descriptor)
    finally:
        os.close(process)


def _idle(connection: socket.socket) -> bool:
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)  # linux/tcp.h
    if len(told) < _TCP_INFO_BYTES or told[0] != _ESTABLISHED:
        return False
    unacknowledged = _number(told, 24) + _number(told, 144)  # segments sent, bytes that are not yet
    sent_ms, received_ms, acknowledged_ms = (_number(told, at) for at in (44, 52, 56))  # ago
    segments_in, segments_out = _number(told, 152), _number(told, 156)
    if not segments_in:
        return True
    if unacknowledged or not segments_out or sent_ms < _QUIET_MS or sent_ms > received_ms:
        return False
    # At one tick of the clock (up to 10 ms), which came first? A request acknowledges the answer before it by itself,
    # so an acknowledgement that came later, alone, is an answer's; and a single segment is a single request's.
    return sent_ms < received_ms or acknowledged_ms < sent_ms or segments_in == 1


def _number(told: bytes, at: int) -> int:
    number: int = struct.unpack_from("=I", told, at)[0]
    return number
