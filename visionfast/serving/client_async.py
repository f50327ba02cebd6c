"""Asks a served model from an event loop: as `client`, with `await`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from visionfast.errors import ImageError, OptionError, ServerError
from visionfast.results import Detections
from visionfast.serving.client import check_settings, listed_sources
from visionfast.serving.client_model import is_unknown, not_there, served_manifest
from visionfast.serving.client_request import Answer, Options, Terms, answer_of, kept, request_of
from visionfast.serving.client_transport import Address, AsyncTransport, Scheme, open_async_transport
from visionfast.sessions import ImageSource
from visionfast.types import Certificate, EngineManifest, ModelSpec

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.10 has none at run time

__all__ = ["AsyncClient"]


class AsyncClient:
    """One model on one server, for the tasks of one event loop; otherwise as `Client`.

        async with AsyncClient("localhost:8001", "yolov8s") as client:
            detections = (await client(["bus.jpg"]))[0]

    Arguments and errors are `Client`'s; the server is first asked when the block is entered, or by the first call.
    A call that is cancelled cancels its requests.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        protocol: Scheme | None = None,
        timeout: float = 30.0,
        concurrency: int = 8,
    ) -> None:
        check_settings(model, timeout, concurrency)
        self.address = Address.parse(url, protocol)
        self.model = model
        self._timeout = timeout
        self._window = 2 * concurrency  # of a stream: the next ones need not wait for one that takes long
        self._turns = asyncio.Semaphore(concurrency)
        self._connecting = asyncio.Lock()
        self._closed = False
        self._transport: AsyncTransport | None = None
        self._manifest: EngineManifest | None = None

    @property
    def manifest(self) -> EngineManifest:
        """Of the engine that the server runs. Raises `OptionError` before the server was asked."""
        if self._manifest is None:
            raise OptionError(f"{self.model}: the server was not asked yet; use `async with`, or ask it something")
        return self._manifest

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec

    @property
    def certificate(self) -> Certificate:
        """Of the engine that the server runs."""
        return self.manifest.certificate

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.spec.class_names

    @overload
    async def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[Options],
    ) -> list[Detections]: ...

    @overload
    async def __call__(
        self, images: ImageSource | Sequence[ImageSource], *, on_error: Literal["return"], **options: Unpack[Options]
    ) -> list[Answer]: ...

    async def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> Any:
        """As `Client.__call__`."""
        return [answer async for answer in self.stream(images, on_error=on_error, **options)]

    async def stream(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> AsyncIterator[Answer]:
        """As `Client.stream`. One that is not read to its end is closed with `aclose()`."""
        terms = Terms.of(on_error, options, self._timeout)
        transport, spec = await self._connected()
        under_way: deque[asyncio.Task[Answer]] = deque()
        try:
            for index, source in enumerate(listed_sources(images)):
                if len(under_way) == self._window:
                    yield await under_way.popleft()
                under_way.append(asyncio.create_task(self._answer(transport, spec, source, index, terms)))
            while under_way:
                yield await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _answer(
        self, transport: AsyncTransport, spec: ModelSpec, source: ImageSource, index: int, terms: Terms
    ) -> Answer:
        async with self._turns:
            try:
                # Reading a file and writing pixels may take as long as the answer: others go on meanwhile.
                request = await asyncio.to_thread(request_of, source, index, terms)
                arrays = await transport.infer(self.model, request, terms.patience_s)
                answer = answer_of(arrays, spec, source, index)
            except (ImageError, ServerError) as error:
                answer = error
            except asyncio.CancelledError:
                if self._closed:  # gRPC cancels what is under way when its channel is closed
                    raise self._is_closed() from None
                raise
        return answer if isinstance(answer, Detections) else kept(answer, terms)

    async def _connected(self) -> tuple[AsyncTransport, ModelSpec]:
        async with self._connecting:
            if self._closed:
                raise self._is_closed()
            if self._transport is None:
                self._transport = open_async_transport(self.address)
            if self._manifest is None:
                self._manifest = await self._asked(self._transport)
            return self._transport, self.spec

    async def _asked(self, transport: AsyncTransport) -> EngineManifest:
        try:
            config = await transport.config(self.model, self._timeout)
        except ServerError as error:
            if not is_unknown(error):
                raise
            raise not_there(str(self.address), self.model, await transport.models(self._timeout)) from error
        return served_manifest(str(self.address), self.model, config)

    def _is_closed(self) -> OptionError:
        return OptionError(f"{self.model}: this client is closed; open another one")

    async def close(self) -> None:
        """Ends what is under way, and the connections. Closing twice is harmless."""
        self._closed = True
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> AsyncClient:
        try:
            await self._connected()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
