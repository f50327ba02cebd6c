"""How a client's calls are carried out: one connection, requests on several threads, and the end of it all."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from visionfast.errors import ImageError, OptionError, ServerError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.serving.client_model import is_unknown, not_there, served_model
from visionfast.serving.client_questions import Question, SentImages
from visionfast.serving.client_request import Request, kept
from visionfast.serving.client_tracing import Timed, traced
from visionfast.serving.client_transport import Address, Scheme, open_transport
from visionfast.serving.tracing import Traced
from visionfast.sessions import ImageSource
from visionfast.types import Certificate, EngineManifest, ModelSpec

__all__ = ["Asking", "check_process", "check_settings", "listed_sources"]

_Self = TypeVar("_Self", bound="Asking")
_Answer = TypeVar("_Answer")
_Timed = TypeVar("_Timed", bound=Timed)


class Asking:
    """What asks one model on one server; `client.Client` says what it may be asked."""

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
        self._window = 2 * concurrency  # of a stream: the next ones need not wait for one that takes long
        self._turns = threading.BoundedSemaphore(concurrency)  # a call of one image is in its caller's thread
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._sent = SentImages()
        self._transport = open_transport(self.address, shared_memory=shared_memory)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="visionfast-client")
        try:
            self.manifest, self._limits = self._told()
        except BaseException:
            self.close()
            raise

    def _told(self) -> tuple[EngineManifest, DecodeLimits]:
        try:
            config = self._transport.config(self.model, self._timeout)
        except ServerError as error:
            if not is_unknown(error):
                raise
            raise not_there(str(self.address), self.model, self._transport.models(self._timeout)) from error
        return served_model(str(self.address), self.model, config)

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

    def _one(self, request: Request, image: ImageSource, question: Question[_Answer]) -> _Answer:
        """The answer to the only request of a call. Raises what is wrong with its image, too."""
        self._check_usable()
        with self._turns:
            arrays = self._transport.infer(self.model, request, question.terms.patience_s)
        return question.only(arrays, image)

    def _traced(self, image: ImageSource, question: Question[_Timed]) -> Traced[_Timed]:
        self._check_usable()
        return traced(self._transport, self.model, image, question, self._timeout, self._limits)

    def _answers(
        self, images: ImageSource | Sequence[ImageSource], question: Question[_Answer]
    ) -> Iterator[_Answer | ImageError | ServerError]:
        self._check_usable()
        return self._each(listed_sources(images), question)

    def _each(
        self, images: Sequence[ImageSource], question: Question[_Answer]
    ) -> Iterator[_Answer | ImageError | ServerError]:
        if len(images) == 1:  # without another thread
            yield self._answer(images[0], 0, question)
            return
        under_way: deque[Future[_Answer | ImageError | ServerError]] = deque()
        try:
            for index, source in enumerate(images):
                if len(under_way) == self._window:
                    yield under_way.popleft().result()
                under_way.append(self._pool.submit(self._answer, source, index, question))
            while under_way:
                yield under_way.popleft().result()
        except (CancelledError, RuntimeError):  # the pool's words
            if self._closed:
                raise self._is_closed() from None
            raise
        finally:
            for one in under_way:
                one.cancel()

    def _answer(
        self, source: ImageSource, index: int, question: Question[_Answer]
    ) -> _Answer | ImageError | ServerError:
        try:
            with self._turns:
                request = question.request(source, index, self._limits)
                arrays = self._transport.infer(self.model, request, question.terms.patience_s)
            answer = question.answer(arrays, source, index)
        except (ImageError, ServerError) as error:
            return kept(error, question.terms)
        return kept(answer, question.terms) if isinstance(answer, ImageError) else answer

    def _is_closed(self) -> OptionError:
        return OptionError(f"{self.model}: this client is closed; open another one")

    def _check_usable(self) -> None:
        check_process(self.model, self._process)
        if self._closed:
            raise self._is_closed()

    def close(self) -> None:
        """Ends what is under way, and the connections; over gRPC, what was sent already has up to 5 s for its answer.

        Closing twice is harmless, and so is closing in another process than the client's: it does nothing there.
        """
        if os.getpid() != self._process:
            return  # connections, shared memory and threads are the other process's
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._transport.close()
            self._pool.shutdown()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_settings(model: str, timeout: float, concurrency: int) -> None:
    """Raises `OptionError` for a setting that is out of its range."""
    if not isinstance(model, str) or not model:
        raise OptionError(f"model: expected its name on the server, got {model!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise OptionError(f"timeout: expected more than 0 seconds, got {timeout!r}")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise OptionError(f"concurrency: expected at least 1, got {concurrency!r}")


def check_process(model: str, process: int) -> None:
    """Raises `OptionError` in another process than the client's.

    What was inherited by a fork is shared: on one socket each of the two processes would read the other's answers, in
    one piece of shared memory overwrite the other's image, and gRPC's threads are not there at all.
    """
    if os.getpid() != process:
        raise OptionError(
            f"{model}: this client was opened in another process (pid {process}); open one in this process"
        )


def listed_sources(images: ImageSource | Sequence[ImageSource]) -> Sequence[ImageSource]:
    """One by itself as a list of one."""
    if not isinstance(images, Sequence) or isinstance(images, (str, bytes, bytearray, memoryview)):
        return [images]
    return images
