"""What stands between an embedder and its engine: images in, vectors out.

`B` images a call of the engine, `D` channels, `h × w` patches.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from visionfast.errors import BackendError, ImageError, ServerError
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Embeddings
from visionfast.sessions import ImageSource, pixels_of
from visionfast.types import Letterbox, ModelSpec

__all__ = [
    "Changed",
    "EmbedSession",
    "Embedded",
    "Prepared",
    "Streams",
    "embedded",
    "gathered",
    "prepared",
    "without_frames",
]

_Stream = TypeVar("_Stream")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One image, ready for the engine.

    Attributes:
        placed: where it lies in the network's input.
        stage_ns: nanoseconds of `decode` and `preprocess`.
        tensor: the session's own business; so far (h, w, 3) uint8 on the host for all of them.
    """

    placed: Letterbox
    stage_ns: Mapping[str, int]
    tensor: Any = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """One image's vectors, which are nobody else's buffers.

    Attributes:
        cls: (D,) float32.
        patches: (h, w, D) float32, or `None` where they were not asked for.
        placed: where the image lies in the network's input.
        stage_ns: nanoseconds of `decode`, `preprocess` and `engine`; a batch's engine time is shared out evenly.
    """

    cls: npt.NDArray[np.float32]
    patches: npt.NDArray[np.float32] | None
    placed: Letterbox
    stage_ns: Mapping[str, int] = field(default_factory=dict, repr=False)


class EmbedSession(Protocol):
    """One engine with what stands before it. Safe for several threads.

    Attributes:
        batch: images that one call of `embed` takes at most.
        streams: calls of `embed` that run at the same time; who comes on top of them waits.
    """

    batch: int
    streams: int

    def prepare(self, source: ImageSource, *, name: str | None) -> Prepared:
        """Decodes an image and brings it to the network's size; as many at once as there are threads.

        Raises:
            ImageError: it is no image, a damaged one, or over the limits.
        """
        ...

    def embed(self, images: Sequence[Prepared], *, patches: bool) -> list[Embedded]:
        """The engine on 1 to `batch` images. An image's vectors do not depend on the others.

        Raises:
            BackendError: the runtime failed, or the session is closed.
        """
        ...

    def close(self) -> None:
        """Waits for those that are inside, and frees the engine; closing twice is harmless."""
        ...


class Changed:
    """A lock, and a way to wait for a change of what it guards: a condition that Ctrl-C cannot leave locked.

    `threading.Condition` is entered by a function in Python. An interrupt that comes when it has the lock, and before
    the `with` block begins, leaves it locked, and the other threads wait for ever (CPython 3.11: within a minute of
    interrupting streams). A plain lock is entered in one step of the interpreter, and a `SimpleQueue` waits in one.

    Attributes:
        lock: for `with` blocks.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: list[queue.SimpleQueue[None]] = []

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Until `true()`, which is asked under the lock, now and after every `notify`."""
        rung: queue.SimpleQueue[None] = queue.SimpleQueue()
        while True:
            with self.lock:
                if true():
                    return
                self._waiting.append(rung)
            rung.get()

    def notify(self) -> None:
        """Wakes all who wait; the lock is held."""
        for rung in self._waiting:
            rung.put(None)
        self._waiting.clear()


class Streams(Generic[_Stream]):
    """What a session has one of for each call that runs at the same time, lent to one thread at a time."""

    def __init__(self, streams: Sequence[_Stream]) -> None:
        self._changed = Changed()
        self._all = list(streams)
        self._free = list(streams)
        self._closed = False

    @contextlib.contextmanager
    def take(self) -> Iterator[_Stream]:
        """Waits until one is free.

        Raises:
            BackendError: they were closed before it came to that.
        """
        taken: list[_Stream] = []

        def lend() -> bool:
            if not self._closed:
                # Wherever Ctrl-C comes, it is in one of the lists.
                taken.extend(self._free[-1:])
                del self._free[-1:]
            return self._closed or bool(taken)

        try:
            self._changed.wait_for(lend)
            if not taken:
                raise BackendError("session: it is closed; open the engine again")
            yield taken[0]
        finally:
            with self._changed.lock:
                self._free.extend(stream for stream in taken if stream not in self._free)
                self._changed.notify()

    def close(self) -> list[_Stream]:
        """Turns away who waits, waits for who is inside, and gives what there is to free: nothing the second time."""
        with self._changed.lock:
            self._closed = True
            self._changed.notify()
        self._changed.wait_for(lambda: len(self._free) == len(self._all))
        streams, self._all, self._free = self._all, [], []
        return streams


def prepared(
    source: ImageSource, preprocessor: CropPreprocessor, *, limits: DecodeLimits, name: str | None
) -> Prepared:
    """As `EmbedSession.prepare`, on the host: `tensor` is (h, w, 3) u8."""
    started = perf_counter_ns()
    pixels = pixels_of(source, limits=limits, name=name)
    decoded = perf_counter_ns()
    tensor = np.empty((*preprocessor.spec.size_hw, 3), np.uint8)
    placed = preprocessor.write(pixels, tensor)
    return Prepared(placed, {"decode": decoded - started, "preprocess": perf_counter_ns() - decoded}, tensor)


def embedded(
    images: Sequence[Prepared], cls: npt.NDArray[Any], patches: npt.NDArray[Any] | None, engine_ns: int
) -> list[Embedded]:
    """Each image's own copy of its vectors, as float32, out of a batch's (B, D) and (B, h, w, D)."""
    share = engine_ns // len(images)
    return [
        Embedded(
            cls[slot].astype(np.float32),
            None if patches is None else patches[slot].astype(np.float32),
            image.placed,
            {**image.stage_ns, "engine": share},
        )
        for slot, image in enumerate(images)
    ]


def gathered(answers: Sequence[Embedded | ImageError | ServerError], spec: ModelSpec, *, patches: bool) -> Embeddings:
    """What was said of N images, together: NaN stands where there are no vectors."""
    (d,), grid = (tensor.shape[1:] for tensor in spec.graphs[0].outputs)
    cls = np.full((len(answers), d), np.nan, np.float32)
    dense = np.full((len(answers), *grid), np.nan, np.float32) if patches else None  # (N, h, w, D)
    for i, answer in enumerate(answers):
        if not isinstance(answer, Embedded):
            continue
        cls[i] = answer.cls
        if dense is not None:
            dense[i] = answer.patches
    return Embeddings(
        cls,
        dense,
        tuple(a.placed if isinstance(a, Embedded) else None for a in answers),
        {i: a for i, a in enumerate(answers) if not isinstance(a, Embedded)},
        tuple(a.stage_ns if isinstance(a, Embedded) else {} for a in answers),
    )


def without_frames(error: ImageError) -> ImageError:
    """The error, to be kept: without the frames it came through, whose variables hold the image's bytes."""
    link: BaseException | None = error
    while link is not None and link.__traceback__ is not None:
        link = link.with_traceback(None).__cause__ or link.__context__
    return error
