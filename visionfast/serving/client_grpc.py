"""Requests over gRPC: the messages are NVIDIA's, the channel is ours."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ServerError, VisionfastError
from visionfast.serving.client_request import Request, late, refusal
from visionfast.serving.client_transport import Address, Placed, client_library

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
_SHARED = "shared memory"
_BROKEN = ("Socket closed", "Connection reset", "Broken pipe")


_LEFT_TO_SERVER_S = 60.0
"""That the server has after its client gave up. gRPC itself would tell it at once that the request is cancelled, and a
cancellation at about the moment of the answer, or before the request is read, ends Triton up to 24.11 with SIGSEGV or
SIGABRT (its issue 7368; 2.51 is 24.10). By our deadlines that is the usual moment: the server refuses at the same time.
With 6 clients and deadlines of 0.5 to 10 ms it lived for 4 s. So no request is cancelled, whoever stops waiting."""

_CLOSING_S = 5.0
"""That closing waits for what is under way, given up or not: it would cancel it."""


class GrpcTransport:
    """See `client_transport.Transport`."""

    def __init__(self, address: Address) -> None:
        self._where = str(address)
        self._messages, services = _service()
        import grpc

        self._grpc = grpc
        self._channel = grpc.insecure_channel(address.target, options=_CHANNEL)
        self._under_way: set[Any] = set()  # one that nobody holds cancels itself
        self._closing = False
        self._sending = threading.Lock()  # what is sent is under way before a close looks
        self._stub = services.GRPCInferenceServiceStub(self._channel)

    def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        message = self._messages.ModelConfigRequest(name=model)
        return _config(self._ask(self._stub.ModelConfig, message, model, timeout_s))

    def models(self, timeout_s: float) -> list[str]:
        message = self._messages.RepositoryIndexRequest()
        return _ready(self._ask(self._stub.RepositoryIndex, message, "its models", timeout_s))

    def statistics(self, timeout_s: float) -> Mapping[str, Any]:
        message = self._messages.ModelStatisticsRequest()
        return _json(self._ask(self._stub.ModelStatistics, message, "its statistics", timeout_s))

    def infer(
        self, model: str, request: Request, timeout_s: float, placed: Placed | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        message = _message(self._messages, model, request, placed)
        return _arrays(self._where, model, self._ask(self._stub.ModelInfer, message, model, timeout_s))

    def regions(self, timeout_s: float) -> list[str]:
        message = self._messages.SystemSharedMemoryStatusRequest()
        return list(self._ask(self._stub.SystemSharedMemoryStatus, message, _SHARED, timeout_s).regions)

    def register_region(self, name: str, key: str, size: int, timeout_s: float) -> None:
        message = self._messages.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size)
        self._ask(self._stub.SystemSharedMemoryRegister, message, _SHARED, timeout_s)

    def forget_region(self, name: str, timeout_s: float) -> None:
        message = self._messages.SystemSharedMemoryUnregisterRequest(name=name)
        self._ask(self._stub.SystemSharedMemoryUnregister, message, _SHARED, timeout_s)

    def close(self) -> None:
        with self._sending:
            self._closing = True
        ends = time.monotonic() + _CLOSING_S
        try:
            for one in tuple(self._under_way):
                with contextlib.suppress(
                    self._grpc.RpcError, self._grpc.FutureTimeoutError, self._grpc.FutureCancelledError
                ):
                    one.result(timeout=max(0.0, ends - time.monotonic()))
        finally:
            self._channel.close()

    def _ask(self, call: Any, message: Any, what: str, timeout_s: float) -> Any:
        try:
            with self._sending:
                if self._closing:
                    raise self._closed()
                asked = call.future(message, timeout=timeout_s + _LEFT_TO_SERVER_S)
                self._under_way.add(asked)
            try:
                return asked.result(timeout=timeout_s)
            finally:
                asked.add_done_callback(self._under_way.discard)  # at once, where it is done
        except self._grpc.FutureTimeoutError:
            raise late(self._where, what, timeout_s) from None
        except self._grpc.FutureCancelledError as error:
            raise self._closed() from error
        except self._grpc.RpcError as error:
            raise _fault(self._where, what, error, timeout_s) from error
        except ValueError as error:  # gRPC's word for a channel that is closed
            raise self._closed() from error

    def _closed(self) -> ServerError:
        return ServerError(f"{self._where}: the client was closed while it was asked")


class AsyncGrpcTransport:
    """See `client_transport.AsyncTransport`."""

    def __init__(self, address: Address) -> None:
        self._where = str(address)
        self._messages, services = _service()
        import grpc
        import grpc.aio

        self._grpc = grpc
        self._channel = grpc.aio.insecure_channel(address.target, options=_CHANNEL)
        self._under_way: set[asyncio.Future[Any]] = set()  # one that nobody holds cancels itself
        self._closing = False
        self._stub = services.GRPCInferenceServiceStub(self._channel)

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        message = self._messages.ModelConfigRequest(name=model)
        return _config(await self._ask(self._stub.ModelConfig, message, model, timeout_s))

    async def models(self, timeout_s: float) -> list[str]:
        message = self._messages.RepositoryIndexRequest()
        return _ready(await self._ask(self._stub.RepositoryIndex, message, "its models", timeout_s))

    async def statistics(self, timeout_s: float) -> Mapping[str, Any]:
        message = self._messages.ModelStatisticsRequest()
        return _json(await self._ask(self._stub.ModelStatistics, message, "its statistics", timeout_s))

    async def infer(
        self, model: str, request: Request, timeout_s: float, placed: Placed | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        message = _message(self._messages, model, request, placed)
        return _arrays(self._where, model, await self._ask(self._stub.ModelInfer, message, model, timeout_s))

    async def regions(self, timeout_s: float) -> list[str]:
        message = self._messages.SystemSharedMemoryStatusRequest()
        return list((await self._ask(self._stub.SystemSharedMemoryStatus, message, _SHARED, timeout_s)).regions)

    async def register_region(self, name: str, key: str, size: int, timeout_s: float) -> None:
        message = self._messages.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size)
        await self._ask(self._stub.SystemSharedMemoryRegister, message, _SHARED, timeout_s)

    async def forget_region(self, name: str, timeout_s: float) -> None:
        message = self._messages.SystemSharedMemoryUnregisterRequest(name=name)
        await self._ask(self._stub.SystemSharedMemoryUnregister, message, _SHARED, timeout_s)

    async def close(self) -> None:
        self._closing = True
        try:
            if left := [one for one in self._under_way if not one.done()]:
                await asyncio.wait(left, timeout=_CLOSING_S)
        finally:
            await self._channel.close()

    async def _ask(self, call: Any, message: Any, what: str, timeout_s: float) -> Any:
        if self._closing:
            raise self._closed()
        try:
            asked = asyncio.ensure_future(_answer(call(message, timeout=timeout_s + _LEFT_TO_SERVER_S)))
            self._under_way.add(asked)
            asked.add_done_callback(self._under_way.discard)
            asked.add_done_callback(_taken)
            answered, _ = await asyncio.wait([asked], timeout=timeout_s)  # which, cancelled itself, does not cancel it
            if not answered:
                raise late(self._where, what, timeout_s)
            return asked.result()
        except self._grpc.RpcError as error:
            raise _fault(self._where, what, error, timeout_s) from error
        except self._grpc.aio.UsageError as error:  # the channel is closed
            raise self._closed() from error

    def _closed(self) -> ServerError:
        return ServerError(f"{self._where}: the client was closed while it was asked")


async def _answer(call: Any) -> Any:
    return await call


def _taken(asked: asyncio.Future[Any]) -> None:
    """What comes of it after its client gave up is nobody's business."""
    if not asked.cancelled():
        asked.exception()


# ---- messages -----------------------------------------------------------------------------------------------------


def _service() -> tuple[Any, Any]:
    """The messages and the stubs of Triton's service; NVIDIA's own client round them copies an image twice more."""
    client_library("grpc")  # says what to install where it is missing
    return client_library("grpc.service_pb2"), client_library("grpc.service_pb2_grpc")


def _config(response: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _json(response)["config"]
    return found


def _json(response: Any) -> Mapping[str, Any]:
    from google.protobuf.json_format import MessageToDict

    found: Mapping[str, Any] = MessageToDict(response, preserving_proto_field_name=True)
    return found


def _ready(response: Any) -> list[str]:
    return [entry.name for entry in response.models if entry.state == "READY"]


def _message(messages: Any, model: str, request: Request, placed: Placed | None) -> Any:
    message = messages.ModelInferRequest(model_name=model)
    message.parameters["priority"].uint64_param = request.terms.priority
    message.parameters["timeout"].int64_param = request.queue_us
    if request.terms.is_offline:  # the priority itself does not reach a stage of the Python backend
        message.parameters["offline"].bool_param = True
    for tensor in request.tensors:
        array = request.arrays[tensor.name]
        one = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        if placed is not None and tensor.name == placed.tensor:
            one.parameters["shared_memory_region"].string_param = placed.region
            one.parameters["shared_memory_byte_size"].int64_param = array.nbytes
        else:
            message.raw_input_contents.append(array.tobytes())
    for name in request.outputs or ():
        message.outputs.add(name=name)
    return message


def _arrays(where: str, model: str, response: Any) -> dict[str, npt.NDArray[Any]]:
    """Views of the message."""
    try:
        return {
            output.name: np.frombuffer(raw, _dtype(output.datatype)).reshape(tuple(output.shape))
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
    except (ValueError, TypeError) as error:  # its shapes do not fit its bytes
        raise ServerError(f"{where}: {model}: expected arrays, got others ({error})") from error


def _dtype(datatype: str) -> Any:
    if (dtype := client_library("utils").triton_to_np_dtype(datatype)) in (None, np.object_):
        raise ValueError(f"{datatype} is no type of numbers")
    return dtype


def _fault(where: str, model: str, error: Any, timeout_s: float) -> VisionfastError:
    text = str(error.details() or "")
    if error.code().name == "DEADLINE_EXCEEDED":
        return late(where, model, timeout_s)
    if any(sign in text for sign in _NO_SERVER):
        return ServerError(
            f"{where}: no server answers there by gRPC ({' '.join(text.split())}); `visionfast serve` starts one, and "
            "http:// in front is for its HTTP port"
        )
    if any(sign in text for sign in _BROKEN):
        return ServerError(f"{where}: {model}: the server ended while it was asked ({' '.join(text.split())})")
    return refusal(where, model, text)
