"""Where a server is, and what carries requests there: the same three questions over gRPC and HTTP, sync and async."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

import numpy.typing as npt

from visionfast.errors import BackendUnavailableError, OptionError
from visionfast.serving.client_request import Request

__all__ = [
    "Address",
    "AsyncTransport",
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
        except ValueError as error:
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

    def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]:
        """The model's outputs by name; they may be read-only."""
        ...

    def close(self) -> None:
        """Ends what is under way, too."""
        ...


class AsyncTransport(Protocol):
    """As `Transport`, for the tasks of one event loop; it is made inside that loop."""

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]: ...

    async def models(self, timeout_s: float) -> list[str]: ...

    async def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]: ...

    async def close(self) -> None: ...


def open_transport(address: Address) -> Transport:
    """Opens no connection yet.

    Raises:
        BackendUnavailableError: NVIDIA's client package is not installed.
    """
    if address.scheme == "http":
        from visionfast.serving.client_http import HttpTransport

        return HttpTransport(address)
    from visionfast.serving.client_grpc import GrpcTransport

    return GrpcTransport(address)


def open_async_transport(address: Address) -> AsyncTransport:
    """As `open_transport`."""
    if address.scheme == "http":
        from visionfast.serving.client_http import AsyncHttpTransport

        return AsyncHttpTransport(address)
    from visionfast.serving.client_grpc import AsyncGrpcTransport

    return AsyncGrpcTransport(address)


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
