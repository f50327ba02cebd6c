"""Where a server is, and what carries requests there: the same questions over gRPC and HTTP, sync and async,
and with the images in shared memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

import numpy.typing as npt

from visionfast.errors import BackendUnavailableError, OptionError
from visionfast.serving.client_request import Request

__all__ = [
    "Address",
    "AsyncMessageTransport",
    "AsyncTransport",
    "MessageTransport",
    "Placed",
    "Scheme",
    "Transport",
    "client_library",
    "open_async_transport",
    "open_transport",
]

Scheme: TypeAlias = Literal["grpc", "http"]

_PORTS: dict[str, int] = {"grpc": 8001, "http": 8000}  # Triton's own defaults


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. As text it is a URL."""

    scheme: Scheme
    host: str
    port: int

    @classmethod
    def parse(cls, url: str, scheme: Scheme | None = None) -> Address:
        """`localhost:8001`, `grpc://localhost:8001` or `http://localhost:8000`; ports may be left out.

        Args:
            url: without a scheme it is gRPC.
            scheme: of a URL that has none.

        Raises:
            OptionError: it is none of these, or the schemes differ.
        """
        forms = "expected localhost:8001, grpc://localhost:8001 or http://localhost:8000"
        if scheme not in (None, *_PORTS):
            raise OptionError(f"protocol: expected 'grpc' or 'http', got {scheme!r}")
        if not isinstance(url, str):
            raise OptionError(f"url: {forms}, got {url!r}")
        named = url.split("://", 1)[0].lower() if "://" in url else None
        if named not in (None, *_PORTS):
            raise OptionError(f"{url}: {forms}; TLS ends at a proxy in front of the server")
        if named and scheme and named != scheme:
            raise OptionError(f"{url}: protocol {scheme!r} does not fit the URL; leave one of them out")
        try:
            parts = urlsplit(url if named else f"//{url}")
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # as sockets will: an empty part, or one of more than 63 characters
        except ValueError as error:  # `UnicodeError` is one
            raise OptionError(f"{url}: {forms} ({error})") from None
        extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
        if not host or extra or any(c.isspace() or not c.isprintable() for c in host):
            raise OptionError(f"{url}: {forms}")
        chosen: Scheme = "http" if (named or scheme) == "http" else "grpc"
        return cls(chosen, host, _PORTS[chosen] if port is None else port)

    @property
    def target(self) -> str:
        """`localhost:8001`, `[::1]:8001`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}"


@dataclass(frozen=True, slots=True)
class Placed:
    """An input whose bytes are not in the message.

    Attributes:
        tensor: its name.
        region: of the server's shared memory, which begins with its bytes.
    """

    tensor: str
    region: str


class Transport(Protocol):
    """Carries requests to one server, for several threads at once.

    Each call ends within its `timeout_s` seconds and raises `ServerError` where the server is not there or refuses,
    `DeadlineError` where it does not answer in time.
    """

    def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        """A model's configuration, as Triton has it in JSON."""
        ...

    def models(self, timeout_s: float) -> list[str]:
        """The names of the models that are ready."""
        ...

    def statistics(self, timeout_s: float) -> Mapping[str, Any]:
        """What the server added up since it started, of every model, as Triton has it in JSON."""
        ...

    def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]:
        """The model's outputs by name; they may be read-only."""
        ...

    def close(self) -> None:
        """Ends what is under way, too."""
        ...


class MessageTransport(Transport, Protocol):
    """One that sends a request's inputs in a message, but for what is placed in shared memory already."""

    def infer(
        self, model: str, request: Request, timeout_s: float, placed: Placed | None = None
    ) -> dict[str, npt.NDArray[Any]]: ...

    def regions(self, timeout_s: float) -> list[str]:
        """The names of the shared memory that the server has mapped."""
        ...

    def register_region(self, name: str, key: str, size: int, timeout_s: float) -> None:
        """Has the server map the shared memory `key`, as large as `size` bytes, under a name."""
        ...

    def forget_region(self, name: str, timeout_s: float) -> None:
        """Has the server unmap it; an error while a request uses it, and nothing where it doesn't know the name."""
        ...


class AsyncTransport(Protocol):
    """As `Transport`, for the tasks of one event loop; it is made inside that loop."""

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]: ...

    async def models(self, timeout_s: float) -> list[str]: ...

    async def statistics(self, timeout_s: float) -> Mapping[str, Any]: ...

    async def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]: ...

    async def close(self) -> None: ...


class AsyncMessageTransport(AsyncTransport, Protocol):
    """As `MessageTransport`."""

    async def infer(
        self, model: str, request: Request, timeout_s: float, placed: Placed | None = None
    ) -> dict[str, npt.NDArray[Any]]: ...

    async def regions(self, timeout_s: float) -> list[str]: ...

    async def register_region(self, name: str, key: str, size: int, timeout_s: float) -> None: ...

    async def forget_region(self, name: str, timeout_s: float) -> None: ...


def open_transport(address: Address, *, shared_memory: bool = False) -> Transport:
    """Opens no connection yet.

    Args:
        address: of the server.
        shared_memory: images go through it.

    Raises:
        BackendUnavailableError: NVIDIA's client package is not installed.
        OptionError: there is no shared memory on this system.
    """
    _check_system(shared_memory)
    transport: MessageTransport
    if address.scheme == "http":
        from visionfast.serving.client_http import HttpTransport

        transport = HttpTransport(address)
    else:
        from visionfast.serving.client_grpc import GrpcTransport

        transport = GrpcTransport(address)
    if not shared_memory:
        return transport
    from visionfast.serving.client_shared_memory import SharedMemoryTransport

    return SharedMemoryTransport(transport)


def open_async_transport(address: Address, *, shared_memory: bool = False) -> AsyncTransport:
    """As `open_transport`."""
    _check_system(shared_memory)
    transport: AsyncMessageTransport
    if address.scheme == "http":
        from visionfast.serving.client_http import AsyncHttpTransport

        transport = AsyncHttpTransport(address)
    else:
        from visionfast.serving.client_grpc import AsyncGrpcTransport

        transport = AsyncGrpcTransport(address)
    if not shared_memory:
        return transport
    from visionfast.serving.client_shared_memory import AsyncSharedMemoryTransport

    return AsyncSharedMemoryTransport(transport)


def _check_system(shared_memory: bool) -> None:
    if shared_memory and sys.platform != "linux":
        raise OptionError("shared_memory: expected Linux, which the server runs on; leave it out")


def client_library(name: str) -> Any:
    """A module of NVIDIA's client package, by its name below `tritonclient`.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module(f"tritonclient.{name}")
    except (ImportError, RuntimeError) as error:  # tritonclient's own word for a missing part is RuntimeError
        raise BackendUnavailableError(
            f"tritonclient: expected NVIDIA's client package, but {' '.join(str(error).split())}; "
            "`pip install 'visionfast[triton]'`"
        ) from error
