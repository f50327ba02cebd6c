"""Requests over gRPC, through NVIDIA's client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from visionfast.errors import ServerError, VisionfastError
from visionfast.serving.client_request import Request, late, refusal
from visionfast.serving.client_transport import Address, client_library
from visionfast.serving.wire import inputs_of

__all__ = ["AsyncGrpcTransport", "GrpcTransport"]

_CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A server that was restarted is found again within a second; gRPC itself would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Clients of one process share neither a connection nor what another one thinks of the server.
    ("grpc.use_local_subchannel_pool", 1),
)
_NO_SERVER = ("failed to connect to", "errors resolving", "resolution failed", "Received http2 header")
_BROKEN = ("Socket closed", "Connection reset", "Broken pipe")


class GrpcTransport:
    """See `client_transport.Transport`."""

    def __init__(self, address: Address) -> None:
        self._where = str(address)
        self._grpc = client_library("grpc")
        self._client = self._grpc.InferenceServerClient(address.target, channel_args=list(_CHANNEL))

    def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        try:
            told = self._client.get_model_config(model, as_json=True, client_timeout=timeout_s)
        except self._grpc.InferenceServerException as error:
            raise _fault(self._where, model, error, timeout_s) from error
        found: Mapping[str, Any] = told["config"]
        return found

    def models(self, timeout_s: float) -> list[str]:
        try:
            told = self._client.get_model_repository_index(as_json=True, client_timeout=timeout_s)
        except self._grpc.InferenceServerException as error:
            raise _fault(self._where, "its models", error, timeout_s) from error
        return [entry["name"] for entry in told.get("models", ()) if entry.get("state") == "READY"]

    def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]:
        try:
            result = self._client.infer(model, _inputs(self._grpc, request), **_call(request, timeout_s))
        except self._grpc.InferenceServerException as error:
            raise _fault(self._where, model, error, timeout_s) from error
        except ValueError as error:  # gRPC's word for a channel that is closed
            raise ServerError(f"{self._where}: the client was closed while it was asked ({error})") from error
        return _arrays(self._where, model, result)

    def close(self) -> None:
        self._client.close()


class AsyncGrpcTransport:
    """See `client_transport.AsyncTransport`."""

    def __init__(self, address: Address) -> None:
        self._where = str(address)
        self._grpc = client_library("grpc")
        self._client = client_library("grpc.aio").InferenceServerClient(address.target, channel_args=list(_CHANNEL))

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        try:
            told = await self._client.get_model_config(model, as_json=True, client_timeout=timeout_s)
        except self._grpc.InferenceServerException as error:
            raise _fault(self._where, model, error, timeout_s) from error
        found: Mapping[str, Any] = told["config"]
        return found

    async def models(self, timeout_s: float) -> list[str]:
        try:
            told = await self._client.get_model_repository_index(as_json=True, client_timeout=timeout_s)
        except self._grpc.InferenceServerException as error:
            raise _fault(self._where, "its models", error, timeout_s) from error
        return [entry["name"] for entry in told.get("models", ()) if entry.get("state") == "READY"]

    async def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]:
        try:
            result = await self._client.infer(model, _inputs(self._grpc, request), **_call(request, timeout_s))
        except self._grpc.InferenceServerException as error:
            raise _fault(self._where, model, error, timeout_s) from error
        return _arrays(self._where, model, result)

    async def close(self) -> None:
        await self._client.close()


def _inputs(library: Any, request: Request) -> list[Any]:
    made = []
    for tensor in inputs_of("detect"):  # every task takes the same
        array = request.arrays[tensor.name]
        one = library.InferInput(tensor.name, list(array.shape), tensor.datatype)
        one.set_data_from_numpy(array)
        made.append(one)
    return made


def _call(request: Request, timeout_s: float) -> dict[str, Any]:
    return {
        "priority": request.terms.priority,
        "timeout": request.queue_us,
        "client_timeout": timeout_s,
    }


def _arrays(where: str, model: str, result: Any) -> dict[str, npt.NDArray[Any]]:
    try:
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
    except (ValueError, TypeError, IndexError) as error:  # its shapes do not fit its bytes
        raise ServerError(f"{where}: {model}: expected arrays, got others ({error})") from error


def _fault(where: str, model: str, error: Any, timeout_s: float) -> VisionfastError:
    status, text = str(error.status() or ""), str(error.message() or "")
    if status.endswith("DEADLINE_EXCEEDED"):
        return late(where, model, timeout_s)
    if any(sign in text for sign in _NO_SERVER):
        return ServerError(
            f"{where}: no server answers there by gRPC ({' '.join(text.split())}); `visionfast serve` starts one, and "
            "http:// in front is for its HTTP port"
        )
    if any(sign in text for sign in _BROKEN):
        return ServerError(f"{where}: {model}: the server ended while it was asked ({' '.join(text.split())})")
    return refusal(where, model, text)
