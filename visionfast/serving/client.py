"""Asks a served model: the same call and the same answers as the pipeline has in process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from visionfast.errors import ImageError, OptionError, ServerError
from visionfast.results import Detections
from visionfast.serving.client_model import is_unknown, not_there, served_manifest
from visionfast.serving.client_request import Answer, Options, Terms, answer_of, kept, request_of
from visionfast.serving.client_transport import Address, Scheme, open_transport
from visionfast.sessions import ImageSource
from visionfast.types import Certificate, EngineManifest, ModelSpec

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.10 has none at run time

__all__ = ["Client", "check_settings", "listed_sources"]


class Client:
    """One model on one server. A context manager; threads may share it.

    Every image is a request of its own, so that the server can put together the images of all its clients; the images
    of one call are sent several at a time.

        with Client("localhost:8001", "yolov8s") as client:
            detections = client(["bus.jpg"])[0]

    Args:
        url: `localhost:8001` or `grpc://localhost:8001`, or `http://localhost:8000`.
        model: its name on the server.
        protocol: `grpc` or `http`, for a URL without a scheme; default: gRPC.
        timeout: seconds that one image's request may take at most, and each question about the model.
        concurrency: images that are under way at the same time at most, of all calls together.

    Raises:
        OptionError: the URL is none, or a setting is out of its range.
        BackendUnavailableError: NVIDIA's client package is not installed.
        ServerError: no server answers there, it does not know the model, or the model is none of visionfast's.
        DeadlineError: it does not answer in time.
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
        self._lock = threading.Lock()
        self._closed = False
        self._transport = open_transport(self.address)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="visionfast-client")
        try:
            self.manifest = self._manifest()
        except BaseException:
            self.close()
            raise

    def _manifest(self) -> EngineManifest:
        try:
            config = self._transport.config(self.model, self._timeout)
        except ServerError as error:
            if not is_unknown(error):
                raise
            raise not_there(str(self.address), self.model, self._transport.models(self._timeout)) from error
        return served_manifest(str(self.address), self.model, config)

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
    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[Options],
    ) -> list[Detections]: ...

    @overload
    def __call__(
        self, images: ImageSource | Sequence[ImageSource], *, on_error: Literal["return"], **options: Unpack[Options]
    ) -> list[Answer]: ...

    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> Any:
        """Answers every image, in order.

        Args:
            images: paths, encoded bytes, (H, W, 3) u8 RGB arrays (also (H, W), (H, W, 1), RGBA), or frames of video
                (`Nv12Frame`). Files and bytes are sent as they are, pixels as a PPM, which loses nothing and is as
                large as they are. One of them by itself counts as a list of one.
            on_error: `raise` the first image's error, or `return` it in that image's place: one bad image never
                harms the others. That a request was refused (`QueueFullError`) or answered too late (`DeadlineError`)
                is its image's error, too; that the server is not there is the whole call's.
            options: `conf`, `iou`, `max_det`, `classes`, `class_agnostic`: as for `Detector`; by default what the
                model was deployed with.
                `priority`: `"online"`, the default, or `"offline"`, which is answered after it.
                `deadline_ms`: milliseconds, from when an image is sent, after which its answer is of no use; the
                server does not begin with it any more then. By default the client's `timeout`.

        Raises:
            ImageError: with `on_error="raise"`.
            OptionError: an option is out of its range or does not exist, or the client is closed.
            QueueFullError, DeadlineError: with `on_error="raise"`.
            ServerError: the server is not there, or does not answer as a visionfast model does.
        """
        return list(self.stream(images, on_error=on_error, **options))

    def stream(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> Iterator[Answer]:
        """As a call, but each answer as soon as it and those before it are there.

        Images are read as they are sent, and no more are under way than the client's `concurrency` allows for.
        """
        if self._closed:
            raise self._is_closed()
        terms = Terms.of(on_error, options, self._timeout)
        return self._answers(listed_sources(images), terms)

    def _answers(self, images: Sequence[ImageSource], terms: Terms) -> Iterator[Answer]:
        if len(images) == 1:  # without another thread
            yield self._answer(images[0], 0, terms)
            return
        under_way: deque[Future[Answer]] = deque()
        try:
            for index, source in enumerate(images):
                if len(under_way) == self._window:
                    yield under_way.popleft().result()
                under_way.append(self._pool.submit(self._answer, source, index, terms))
            while under_way:
                yield under_way.popleft().result()
        except (CancelledError, RuntimeError):  # the pool's words
            if self._closed:
                raise self._is_closed() from None
            raise
        finally:
            for one in under_way:
                one.cancel()

    def _answer(self, source: ImageSource, index: int, terms: Terms) -> Answer:
        try:
            request = request_of(source, index, terms)
            arrays = self._transport.infer(self.model, request, terms.patience_s)
            answer = answer_of(arrays, self.spec, source, index)
        except (ImageError, ServerError) as error:
            answer = error
        return answer if isinstance(answer, Detections) else kept(answer, terms)

    def _is_closed(self) -> OptionError:
        return OptionError(f"{self.model}: this client is closed; open another one")

    def close(self) -> None:
        """Ends what is under way, and the connections. Closing twice is harmless."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._transport.close()
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Client:
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


def listed_sources(images: ImageSource | Sequence[ImageSource]) -> Sequence[ImageSource]:
    """One by itself as a list of one."""
    if not isinstance(images, Sequence) or isinstance(images, (str, bytes, bytearray, memoryview)):
        return [images]
    return images
