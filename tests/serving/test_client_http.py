"""HTTP connections with a server that is not Triton: one that is slow, breaks off, or answers anything at all."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import visionfast as vf
from visionfast.errors import DeadlineError, ServerError

pytest.importorskip("tritonclient.http", reason="a client needs tritonclient: pip install 'visionfast[triton]'")
pytest.importorskip("aiohttp", reason="an async client needs aiohttp, which comes with tritonclient[http]")

Script = Callable[[socket.socket, int], None]


@pytest.fixture
def scripted() -> Iterator[Callable[[Script], str]]:
    """`scripted(answer)`: the URL of a server that reads a request and has `answer(connection, number)` answer it.

    It closes each connection after one answer, without having said so.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    threads = []

    def serve(script: Script) -> str:
        def run() -> None:
            number = 0
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(10)
                    try:
                        asked = b""
                        while b"\r\n\r\n" not in asked and (part := connection.recv(1 << 16)):
                            asked += part
                        if asked:
                            script(connection, number)
                            number += 1
                    except OSError:  # who asked has gone
                        pass

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


def response(body: bytes, *, status: str = "200 OK", length: int | None = None, headers: str = "") -> bytes:
    n = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {n}\r\n{headers}\r\n".encode() + body


def _connect(url: str, kind: str, timeout: float) -> None:
    async def ask() -> None:
        async with vf.AsyncClient(url, "y", timeout=timeout):
            pass

    if kind == "async":
        asyncio.run(ask())
    else:
        vf.Client(url, "y", timeout=timeout).close()


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "no server answers there by HTTP"),
        (b"\x00\x01\x02\r\n\r\n", "no server answers there by HTTP"),
        (b"HTTP/1.1 banana\r\n\r\n", "no server answers there by HTTP"),
        (response(b"{}", length=100), "no server answers there by HTTP"),
        (response(b"hello"), "expected its configuration as JSON, got b'hello'; is it a Triton server?"),
        (response(b"[1]"), "expected its configuration as JSON, got b'\\[1\\]'"),
        (response(b"[" * 100_000), "expected its configuration as JSON"),
        (response(b"\xff"), "expected its configuration as JSON"),
        (response(b"{}"), "expected one that `visionfast deploy` wrote"),
        (response(b'{"parameters": 3}'), "expected its configuration, got another JSON"),
        (response(b'{"parameters": {"manifest": {"string_value": "{"}}}'), "not read by"),
        (response(b'{"parameters": {"manifest": {"string_value": "{}"}}}'), "not read by"),
        (response(b"no", status="404 Not Found"), "HTTP status 404, b'no'"),
        (response(b'{"error": "two\\nlines"}', status="500 Oh"), "y: two lines"),
        (response(b'{"error": "unknown model"}', status="400 Bad"), "expected a list of models|unknown model"),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else "",
)
def test_answers_of_anybody(scripted: Callable[[Script], str], kind: str, sent: bytes, said: str) -> None:
    with pytest.raises(ServerError, match=said) as caught:
        _connect(scripted(lambda connection, _: connection.sendall(sent)), kind, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_that_dribbles(scripted: Callable[[Script], str], kind: str) -> None:
    """The time-out is for the whole answer, not for the wait between two bytes."""

    def dribble(connection: socket.socket, _: int) -> None:
        connection.sendall(response(b"", length=1000))
        for _ in range(100):
            connection.sendall(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    with pytest.raises(DeadlineError, match="no answer within 400 ms"):
        _connect(scripted(dribble), kind, 0.4)
    assert time.monotonic() - began < 4


def test_a_connection_that_was_closed_meanwhile() -> None:
    """A client that was idle asks again on a new connection."""
    from visionfast.serving.client_http import HttpTransport
    from visionfast.serving.client_transport import Address

    answer = response(json.dumps([{"name": "y", "state": "READY"}]).encode())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted = []

        def serve() -> None:
            for _ in range(3):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                accepted.append(1)

        thread = threading.Thread(target=serve)
        thread.start()
        transport = HttpTransport(Address.parse(f"http://127.0.0.1:{listening.getsockname()[1]}"))
        for _ in range(3):
            assert transport.models(5.0) == ["y"]
            time.sleep(0.05)
        transport.close()
        thread.join(timeout=10)
        assert len(accepted) == 3


@pytest.mark.parametrize("python", ["this", "3.12.2 and later"])
def test_a_server_that_closes_and_says_so(
    scripted: Callable[[Script], str], monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    """The answer is there, though its last byte closes the socket, as it does in newer releases of Python."""
    from visionfast.serving.client_http import HttpTransport
    from visionfast.serving.client_transport import Address

    if python != "this":
        read1 = http.client.HTTPResponse.read1

        def closing_read1(self: http.client.HTTPResponse, n: int = -1) -> bytes:
            part = read1(self, n)
            if self.length == 0:
                self._close_conn()  # type: ignore[attr-defined]  # of `HTTPResponse.read1` since 3.12.2
            return part

        monkeypatch.setattr(http.client.HTTPResponse, "read1", closing_read1)
    answer = json.dumps([{"name": "y", "state": "READY"}]).encode()
    url = scripted(lambda connection, _: connection.sendall(response(answer, headers="Connection: close\r\n")))
    transport = HttpTransport(Address.parse(url))
    for _ in range(3):
        assert transport.models(5.0) == ["y"]
    transport.close()
