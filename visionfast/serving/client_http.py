"""Requests over HTTP: NVIDIA's client writes and reads the messages, the connections are the standard library's.

NVIDIA's own connections are gevent's: one client is for one thread, and its time-outs hold for a client, not a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy.typing as npt

from visionfast.errors import ServerError
from visionfast.serving.client_request import Request, as_json, late, refusal
from visionfast.serving.client_transport import Address, Placed, client_library

__all__ = ["AsyncHttpTransport", "HttpTransport"]

_HEADER_LENGTH = "Inference-Header-Content-Length"
_INDEX = "/v2/repository/index"
_STATISTICS = "/v2/models/stats"
_SHARED_MEMORY = "/v2/systemsharedmemory"
_SHARED = "shared memory"
_CHUNK = 1 << 20  # bytes


class HttpTransport:
    """See `client_transport.Transport`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._library = client_library("http")
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._closed = False

    def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        _, body = self._exchange("GET", _model_path(model, "config"), None, {}, timeout_s, model)
        return _object(str(self._address), model, body)

    def models(self, timeout_s: float) -> list[str]:
        _, body = self._exchange("POST", _INDEX, b"", {}, timeout_s, "its models")
        return _ready(str(self._address), body)

    def statistics(self, timeout_s: float) -> Mapping[str, Any]:
        _, body = self._exchange("GET", _STATISTICS, None, {}, timeout_s, "its statistics")
        return _object(str(self._address), "its statistics", body)

    def infer(
        self, model: str, request: Request, timeout_s: float, placed: Placed | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        body, headers = _message(self._library, request, placed)
        length, answer = self._exchange("POST", _model_path(model, "infer"), body, headers, timeout_s, model)
        return _arrays(self._library, str(self._address), model, length, answer)

    def regions(self, timeout_s: float) -> list[str]:
        _, body = self._exchange("GET", f"{_SHARED_MEMORY}/status", None, {}, timeout_s, _SHARED)
        return _region_names(str(self._address), body)

    def register_region(self, name: str, key: str, size: int, timeout_s: float) -> None:
        body = json.dumps({"key": key, "offset": 0, "byte_size": size}).encode()
        self._exchange("POST", f"{_SHARED_MEMORY}/region/{name}/register", body, {}, timeout_s, _SHARED)

    def forget_region(self, name: str, timeout_s: float) -> None:
        self._exchange("POST", f"{_SHARED_MEMORY}/region/{name}/unregister", b"", {}, timeout_s, _SHARED)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            for connection in self._busy:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)  # closing alone would not wake who reads

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float, model: str
    ) -> tuple[str | None, bytes]:
        """The length of the header inside the body, and the body, of an answer that is no error."""
        ends = time.monotonic() + timeout_s
        while True:
            connection, used = self._take()
            try:
                status, length, answer = _ask(connection, method, path, body, headers, ends)
            except TimeoutError:
                self._drop(connection)
                raise late(str(self._address), model, timeout_s) from None
            except (OSError, http.client.HTTPException) as error:
                self._drop(connection)
                if used and isinstance(error, (ConnectionError, http.client.BadStatusLine)):
                    continue  # the server had closed it meanwhile; asking twice does no harm
                raise _no_server(self._address, error) from error
            except BaseException:
                self._drop(connection)
                raise
            self._give_back(connection)
            if status != 200:
                raise refusal(str(self._address), model, _error_text(status, answer))
            return length, answer

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            if self._closed:
                raise ServerError(f"{self._address}: the client was closed while it was asked")
            used = bool(self._idle)
            connection = (
                self._idle.pop() if used else http.client.HTTPConnection(self._address.host, self._address.port)
            )
            self._busy.add(connection)
        return connection, used

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    ends: float,
) -> tuple[int, str | None, bytes]:
    """Status, the length of the header inside the body, and the body. Each wait is for no longer than what is left."""
    connection.timeout = _left(ends)
    if connection.sock is None:
        connection.connect()
    sock = connection.sock
    sock.settimeout(_left(ends))
    connection.request(method, path, body, dict(headers))
    sock.settimeout(_left(ends))
    response = connection.getresponse()
    parts = []
    # Read to its end, Python 3.12.2 and later close it at once, and its socket with it if the server said it would.
    while not response.isclosed():
        sock.settimeout(_left(ends))
        if not (part := response.read1(_CHUNK)):
            break
        parts.append(part)
    if response.length:  # `None` where it came in chunks
        raise http.client.IncompleteRead(b"", response.length)
    response.close()  # read to its end, and not all releases see it
    return response.status, response.headers.get(_HEADER_LENGTH), b"".join(parts)


def _left(ends: float) -> float:
    """Seconds; raises `TimeoutError` where none are left."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class AsyncHttpTransport:
    """See `client_transport.AsyncTransport`. Its connections are aiohttp's, which comes with NVIDIA's client."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._library = client_library("http")
        client_library("http.aio")  # says what to install where aiohttp is missing
        import aiohttp

        self._aiohttp = aiohttp
        self._session = aiohttp.ClientSession(
            str(address),
            # The client has its own limit; and Triton, told to end, waits for connections that are merely open.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            headers={"Accept-Encoding": "identity"},  # aiohttp would ask for compressed answers
        )

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        _, body = await self._exchange("GET", _model_path(model, "config"), None, {}, timeout_s, model)
        return _object(str(self._address), model, body)

    async def models(self, timeout_s: float) -> list[str]:
        _, body = await self._exchange("POST", _INDEX, b"", {}, timeout_s, "its models")
        return _ready(str(self._address), body)

    async def statistics(self, timeout_s: float) -> Mapping[str, Any]:
        _, body = await self._exchange("GET", _STATISTICS, None, {}, timeout_s, "its statistics")
        return _object(str(self._address), "its statistics", body)

    async def infer(
        self, model: str, request: Request, timeout_s: float, placed: Placed | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        body, headers = _message(self._library, request, placed)
        length, answer = await self._exchange("POST", _model_path(model, "infer"), body, headers, timeout_s, model)
        return _arrays(self._library, str(self._address), model, length, answer)

    async def regions(self, timeout_s: float) -> list[str]:
        _, body = await self._exchange("GET", f"{_SHARED_MEMORY}/status", None, {}, timeout_s, _SHARED)
        return _region_names(str(self._address), body)

    async def register_region(self, name: str, key: str, size: int, timeout_s: float) -> None:
        body = json.dumps({"key": key, "offset": 0, "byte_size": size}).encode()
        await self._exchange("POST", f"{_SHARED_MEMORY}/region/{name}/register", body, {}, timeout_s, _SHARED)

    async def forget_region(self, name: str, timeout_s: float) -> None:
        await self._exchange("POST", f"{_SHARED_MEMORY}/region/{name}/unregister", b"", {}, timeout_s, _SHARED)

    async def close(self) -> None:
        await self._session.close()

    async def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float, model: str
    ) -> tuple[str | None, bytes]:
        ends = time.monotonic() + timeout_s
        again = True
        while True:
            try:
                total = self._aiohttp.ClientTimeout(total=_left(ends))
                data = None if body is None else io.BytesIO(body)  # which aiohttp sends piece by piece
                async with self._session.request(method, path, data=data, headers=headers, timeout=total) as response:
                    answer = await response.read()
            except (TimeoutError, asyncio.TimeoutError):  # Python 3.10 has two of them
                raise late(str(self._address), model, timeout_s) from None
            except self._aiohttp.ServerDisconnectedError as error:
                if not again:
                    raise _no_server(self._address, error) from error
                again = False  # the server had closed it meanwhile; asking twice does no harm
            except (self._aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the session is closed
                raise _no_server(self._address, error) from error
            else:
                if response.status != 200:
                    raise refusal(str(self._address), model, _error_text(response.status, answer))
                return response.headers.get(_HEADER_LENGTH), answer


# ---- messages -----------------------------------------------------------------------------------------------------


def _model_path(model: str, what: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/{what}"


def _message(library: Any, request: Request, placed: Placed | None) -> tuple[bytes, dict[str, str]]:
    """A request's body and headers."""
    inputs = []
    for tensor in request.tensors:
        array = request.arrays[tensor.name]
        one = library.InferInput(tensor.name, list(array.shape), tensor.datatype)
        if placed is not None and tensor.name == placed.tensor:
            one.set_shared_memory(placed.region, array.nbytes)
        else:
            one.set_data_from_numpy(array)
        inputs.append(one)
    wanted = request.outputs
    body, header_length = library.InferenceServerClient.generate_request_body(
        inputs,
        outputs=None if wanted is None else [library.InferRequestedOutput(name) for name in wanted],
        priority=request.terms.priority,
        timeout=request.queue_us,
        # The priority itself does not reach a stage of the Python backend.
        parameters={"offline": True} if request.terms.is_offline else None,
    )
    return body, {_HEADER_LENGTH: str(header_length), "Content-Type": "application/octet-stream"}


def _arrays(
    library: Any, where: str, model: str, header_length: str | None, body: bytes
) -> dict[str, npt.NDArray[Any]]:
    try:
        length = None if header_length is None else int(header_length)
        result = library.InferenceServerClient.parse_response_body(body, header_length=length)
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}
    except (ValueError, TypeError, LookupError, AttributeError, library.InferenceServerException) as error:
        said = " ".join(str(error).split())
        raise ServerError(f"{where}: {model}: expected an inference response, got another ({said})") from error


def _object(where: str, model: str, body: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        told = as_json(body.decode())
        if isinstance(told, dict):
            return told
    raise ServerError(
        f"{where}: {model}: expected its configuration as JSON, got {body[:40]!r}; is it a Triton server?"
    )


def _ready(where: str, body: bytes) -> list[str]:
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        return [str(entry["name"]) for entry in as_json(body.decode()) if entry.get("state") == "READY"]
    raise ServerError(f"{where}: expected a list of models as JSON, got {body[:40]!r}; is it a Triton server?")


def _region_names(where: str, body: bytes) -> list[str]:
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        return [str(entry["name"]) for entry in as_json(body.decode())]
    raise ServerError(f"{where}: expected a list of regions as JSON, got {body[:40]!r}; is it a Triton server?")


def _error_text(status: int, body: bytes) -> str:
    """Triton's words, or what else came."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(as_json(body.decode())["error"])
    return f"HTTP status {status}, {body[:80]!r}"


def _no_server(address: Address, error: Exception) -> ServerError:
    # What comes instead of HTTP may be any bytes.
    said = " ".join((str(error) or type(error).__name__).split())[:200]
    shown = said if said.isprintable() else "what answers is no HTTP"
    return ServerError(
        f"{address}: no server answers there by HTTP ({shown}); `visionfast serve` starts one, and grpc:// in front is "
        "for its gRPC port"
    )
