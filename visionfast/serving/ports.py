"""The ports of a server: whether they are free, and which are."""

from __future__ import annotations

import errno
import random
import socket

from visionfast.errors import OptionError, ServerError
from visionfast.serving.tritonserver import Endpoints

__all__ = ["free_endpoints"]

_CHOSEN = range(20000, 32768)
"""Below those that Linux gives to connections: nobody takes one by chance before the server has it."""


def free_endpoints(address: str, http: int, grpc: int, metrics: int) -> Endpoints:
    """The same, as numbers: a name as its IPv4 address, and a port of 0 as one that is free.

    The server itself cannot be relied on to tell: gRPC shares a port with whoever has it, without a word, and requests
    go to either.

    Raises:
        OptionError: the address is none of this machine's, or the ports are no ports, or not different ones.
        ServerError: another program has one of them, or it is not for this user to take.
    """
    wanted = {"http": http, "grpc": grpc, "metrics": metrics}
    for name, port in wanted.items():
        if not 0 <= port <= 65535:
            raise OptionError(f"--{name} {port}: expected a port, 1 to 65535, or 0 for one that is free")
    named = [port for port in wanted.values() if port]
    if len(named) > len(set(named)):
        raise OptionError(f"--http {http} --grpc {grpc} --metrics {metrics}: expected different ports")
    try:
        host = str(socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise OptionError(
            f"--address {address}: expected an IPv4 address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        ) from None
    # All of them are held until the last is known, so that those which are chosen differ; named ones first.
    held: dict[str, socket.socket] = {}
    try:
        for name, port in sorted(wanted.items(), key=lambda pair: not pair[1]):
            held[name] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            # Connections that ended a moment ago do not count; a program that listens does.
            held[name].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port or not any(_binds(held[name], host, chosen) for chosen in random.sample(_CHOSEN, 20)):
                _bind(held[name], name, host, port)
        return Endpoints(host, **{name: bound.getsockname()[1] for name, bound in held.items()})
    finally:
        for bound in held.values():
            bound.close()


def _binds(bound: socket.socket, host: str, port: int) -> bool:
    try:
        bound.bind((host, port))
    except OSError:
        return False
    return True


def _bind(bound: socket.socket, name: str, host: str, port: int) -> None:
    try:
        bound.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServerError(
                f"--{name} {port}: another program has this port on {host}; name another, or 0 for one that is free"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise OptionError(f"--address {host}: expected an address of this machine, got another's") from None
        raise ServerError(f"--{name} {port}: cannot be had on {host} ({error.strerror})") from error
