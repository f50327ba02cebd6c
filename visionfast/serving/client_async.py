"""Asks a served model from an event loop: as `client`, with `await`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic, perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from visionfast.embedding import image_key
from visionfast.errors import ImageError, ImageNotKeptError, OptionError, ServerError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections, Embeddings, Masks
from visionfast.serving.client_asking import check_process, check_settings, listed_sources
from visionfast.serving.client_model import is_unknown, not_there, served_model
from visionfast.serving.client_questions import (
    Question,
    SentImages,
    about_everything,
    about_objects,
    about_prompts,
    about_vectors,
)
from visionfast.serving.client_request import (
    Answer,
    Options,
    Priority,
    PromptOptions,
    Request,
    encoded_image,
    just_large_enough,
    kept,
    shown_name,
)
from visionfast.serving.client_tracing import Timed, traced_async
from visionfast.serving.client_transport import Address, AsyncTransport, Scheme, open_async_transport
from visionfast.serving.tracing import Traced
from visionfast.sessions import ImageSource
from visionfast.sessions.embeddings import Embedded, gathered
from visionfast.types import Certificate, EngineManifest, ModelSpec

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.10 has none at run time

__all__ = ["AsyncClient"]

_Answer = TypeVar("_Answer")
_Timed = TypeVar("_Timed", bound=Timed)


class AsyncClient:
    """One model on one server, for the tasks of one event loop in one process; otherwise as `Client`.

        async with AsyncClient("localhost:8001", "yolov8s") as client:
            detections = (await client(["bus.jpg"]))[0]

    Arguments and errors are `Client`'s; the server is first asked when the block is entered, or by the first call.
    A call that is cancelled ends at once. What it had sent over gRPC is still answered, to nobody: cancelling that as
    well may end the server.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        protocol: Scheme | None = None,
        timeout: float = 30.0,
        concurrency: int = 8,
        shared_memory: bool = False,
    ) -> None:
        check_settings(model, timeout, concurrency)
        self.address = Address.parse(url, protocol)
        self.model = model
        self._timeout = timeout
        self._shared_memory = shared_memory
        self._window = 2 * concurrency  # of a stream: the next ones need not wait for one that takes long
        self._turns = asyncio.Semaphore(concurrency)
        self._connecting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # as soon as it was asked, as the process
        self._process = os.getpid()
        self._closed = False
        self._sent = SentImages()
        self._transport: AsyncTransport | None = None
        self._manifest: EngineManifest | None = None
        self._limits = DecodeLimits()

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
        _, spec = await self._connected()
        question = about_objects(spec, options, on_error=on_error, timeout=self._timeout)
        async with contextlib.aclosing(self._each(images, question)) as answers:
            async for answer in answers:
                yield answer

    async def traced(self, image: ImageSource, **options: Unpack[Options]) -> Traced[Detections]:
        """As `Client.traced`."""
        _, spec = await self._connected()
        return await self._traced(image, about_objects(spec, options, on_error="raise", timeout=self._timeout))

    # ---- embedders ------------------------------------------------------------------------------------------------

    async def embed(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        patches: bool = True,
        normalise: bool | None = None,
        on_error: Literal["raise", "return"] = "raise",
        priority: Priority = "online",
        deadline_ms: float | None = None,
    ) -> Embeddings:
        """As `Client.embed`."""
        stream = self.embed_stream(
            images,
            patches=patches,
            normalise=normalise,
            on_error=on_error,
            priority=priority,
            deadline_ms=deadline_ms,
        )
        async with contextlib.aclosing(stream) as answers:
            return gathered([answer async for answer in answers], self.spec, patches=patches)

    def embed_stream(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        patches: bool = False,
        normalise: bool | None = None,
        on_error: Literal["raise", "return"] = "raise",
        priority: Priority = "online",
        deadline_ms: float | None = None,
    ) -> AsyncGenerator[Embedded | ImageError | ServerError, None]:
        """As `Client.embed_stream`. One that is not read to its end is closed with `aclose()`."""
        options = {"normalise": normalise, "priority": priority, "deadline_ms": deadline_ms}
        return self._embedded(images, options, patches=patches, on_error=on_error)

    async def _embedded(
        self, images: ImageSource | Sequence[ImageSource], options: Mapping[str, Any], *, patches: bool, on_error: str
    ) -> AsyncGenerator[Embedded | ImageError | ServerError, None]:
        _, spec = await self._connected()
        question = about_vectors(spec, options, patches=patches, on_error=on_error, timeout=self._timeout)
        async with contextlib.aclosing(self._each(images, question)) as answers:
            async for answer in answers:
                yield answer

    async def traced_embed(
        self,
        image: ImageSource,
        *,
        patches: bool = True,
        normalise: bool | None = None,
        priority: Priority = "online",
        deadline_ms: float | None = None,
    ) -> Traced[Embedded]:
        """As `Client.traced_embed`."""
        _, spec = await self._connected()
        options = {"normalise": normalise, "priority": priority, "deadline_ms": deadline_ms}
        question = about_vectors(spec, options, patches=patches, on_error="raise", timeout=self._timeout)
        return await self._traced(image, question)

    # ---- prompt segmenters ----------------------------------------------------------------------------------------

    async def segment(self, image: ImageSource, **prompts: Unpack[PromptOptions]) -> Masks:
        """As `Client.segment`."""
        _, spec = await self._connected()
        question = about_prompts(spec, prompts, timeout=self._timeout)
        encoded = await asyncio.to_thread(encoded_image, image, limits=self._limits)
        started = perf_counter_ns()
        key = (await asyncio.to_thread(image_key, encoded, limits=just_large_enough(encoded))).key
        hash_ns = perf_counter_ns() - started
        if key in self._sent:
            ends = monotonic() + question.terms.patience_s
            with contextlib.suppress(ImageNotKeptError):
                masks = await self._one(question.by_key(key), image, question)
                return replace(masks, stage_ns={"hash": hash_ns} | dict(masks.stage_ns))
            question = question.until(ends)
        masks = await self._one(question.carrying(encoded, shown_name(image, None)), image, question)
        self._sent.add(key)
        return masks

    async def everything(
        self,
        image: ImageSource,
        *,
        priority: Priority = "online",
        deadline_ms: float | None = None,
        **options: Any,
    ) -> Masks:
        """As `Client.everything`."""
        _, spec = await self._connected()
        terms = {"priority": priority, "deadline_ms": deadline_ms}
        question = about_everything(spec, terms, everything=options, timeout=self._timeout)
        request = await asyncio.to_thread(question.request, image, None, self._limits)
        return await self._one(request, image, question)

    async def traced_segment(self, image: ImageSource, **prompts: Unpack[PromptOptions]) -> Traced[Masks]:
        """As `Client.traced_segment`."""
        _, spec = await self._connected()
        question = about_prompts(spec, prompts, timeout=self._timeout)
        return await self._traced(image, question)

    async def traced_everything(
        self,
        image: ImageSource,
        *,
        priority: Priority = "online",
        deadline_ms: float | None = None,
        **options: Any,
    ) -> Traced[Masks]:
        """As `Client.traced_everything`."""
        _, spec = await self._connected()
        terms = {"priority": priority, "deadline_ms": deadline_ms}
        question = about_everything(spec, terms, everything=options, timeout=self._timeout)
        return await self._traced(image, question)

    # ---- around them ----------------------------------------------------------------------------------------------

    async def _traced(self, image: ImageSource, question: Question[_Timed]) -> Traced[_Timed]:
        transport, _ = await self._connected()
        return await traced_async(transport, self.model, image, question, self._timeout, self._limits)

    async def _one(self, request: Request, image: ImageSource, question: Question[_Answer]) -> _Answer:
        """The answer to the only request of a call. Raises what is wrong with its image, too."""
        transport, _ = await self._connected()
        async with self._turns:
            try:
                arrays = await transport.infer(self.model, request, question.terms.patience_s)
            except asyncio.CancelledError:
                if self._closed:  # gRPC cancels what is under way when its channel is closed
                    raise self._is_closed() from None
                raise
        return question.only(arrays, image)

    async def _each(
        self, images: ImageSource | Sequence[ImageSource], question: Question[_Answer]
    ) -> AsyncGenerator[_Answer | ImageError | ServerError, None]:
        under_way: deque[asyncio.Task[_Answer | ImageError | ServerError]] = deque()
        try:
            for index, source in enumerate(listed_sources(images)):
                if len(under_way) == self._window:
                    yield await under_way.popleft()
                under_way.append(asyncio.create_task(self._answer(source, index, question)))
            while under_way:
                yield await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _answer(
        self, source: ImageSource, index: int, question: Question[_Answer]
    ) -> _Answer | ImageError | ServerError:
        transport, _ = await self._connected()
        async with self._turns:
            try:
                # Reading a file and writing pixels may take as long as the answer: others go on meanwhile.
                request = await asyncio.to_thread(question.request, source, index, self._limits)
                arrays = await transport.infer(self.model, request, question.terms.patience_s)
                answer = question.answer(arrays, source, index)
            except (ImageError, ServerError) as error:
                return kept(error, question.terms)
            except asyncio.CancelledError:
                if self._closed:  # gRPC cancels what is under way when its channel is closed
                    raise self._is_closed() from None
                raise
        return kept(answer, question.terms) if isinstance(answer, ImageError) else answer

    async def _connected(self) -> tuple[AsyncTransport, ModelSpec]:
        self._check_loop()
        async with self._connecting:
            if self._closed:
                raise self._is_closed()
            if self._transport is None:
                self._transport = open_async_transport(self.address, shared_memory=self._shared_memory)
            if self._manifest is None:
                self._manifest, self._limits = await self._told(self._transport)
            return self._transport, self.spec

    async def _told(self, transport: AsyncTransport) -> tuple[EngineManifest, DecodeLimits]:
        try:
            config = await transport.config(self.model, self._timeout)
        except ServerError as error:
            if not is_unknown(error):
                raise
            raise not_there(str(self.address), self.model, await transport.models(self._timeout)) from error
        return served_model(str(self.address), self.model, config)

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._process = loop, os.getpid()
        check_process(self.model, self._process)
        if loop is not self._loop:
            which = "an event loop that is closed" if self._loop.is_closed() else "another event loop"
            raise OptionError(f"{self.model}: this client belongs to {which}; open one in this loop")

    def _is_closed(self) -> OptionError:
        return OptionError(f"{self.model}: this client is closed; open another one")

    async def close(self) -> None:
        """As `Client.close`. Raises `OptionError` in another event loop while the client's own is not closed."""
        if os.getpid() != self._process:
            return  # dropping them would take the connections from the other process's loop
        is_orphan = self._loop is not None and self._loop.is_closed()
        if self._loop is not None and not is_orphan:
            self._check_loop()
        self._closed = True
        transport, self._transport = self._transport, None
        if transport is not None:
            # What is left of connections whose loop is closed cannot always be closed, only be dropped.
            with contextlib.suppress(RuntimeError) if is_orphan else contextlib.nullcontext():
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
