"""Vectors for images and for their patches, from one engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

from visionfast import artifacts, machine
from visionfast.backends import DeviceEngine
from visionfast.errors import BackendError, ImageError, OptionError
from visionfast.loading import check_outputs, load_streams, runs_here
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Embeddings
from visionfast.sessions import ImageSource, source_name
from visionfast.sessions.embed_stream import embed_stream
from visionfast.sessions.embeddings import Embedded, EmbedSession, gathered, without_frames
from visionfast.sessions.opening import open_embed_session
from visionfast.types import EngineManifest, ModelSpec, Runner
from visionfast.whole_numbers import checked_threads

__all__ = ["Embedder"]

_Self = TypeVar("_Self", bound="Embedder")
_Item = TypeVar("_Item")


class Embedder:
    """Gives images vectors. One engine; a context manager; safe for several threads.

    Args:
        spec: of the model.
        engines: runners of its graph on the host, one a stream, or one engine on a GPU; closed with the embedder.
        limits: what an image may claim.
        threads: to decode on, beside the engine's; default: as many as there are processors that may be used.
        manifest: of the engine.

    Raises:
        OptionError: the model has another task, or `threads` is out of its range.
        BackendError: the runtime failed; the engines are closed then.
    """

    task = "embed"

    def __init__(
        self,
        spec: ModelSpec,
        engines: Sequence[Runner | DeviceEngine],
        *,
        limits: DecodeLimits | None = None,
        threads: int | None = None,
        manifest: EngineManifest | None = None,
    ) -> None:
        if spec.task != self.task:
            raise OptionError(_other_task(spec))
        self.spec = spec
        self.manifest = manifest
        self._threads = checked_threads(threads) or machine.usable_cpus()
        self._closed = False
        self.session: EmbedSession = open_embed_session(spec, engines, limits or DecodeLimits())

    @classmethod
    def open(
        cls: type[_Self],
        engine: str | os.PathLike[str],
        *,
        threads: int | None = None,
        streams: int = 1,
        device: str | None = None,
        limits: DecodeLimits | None = None,
    ) -> _Self:
        """Opens an engine's folder.

        Args:
            engine: its path, `<model>/<variant>` under engines/, or a model's name where one of its engines runs here.
            threads: processors to compute on, and threads to decode on; default: all that this process may use.
            streams: images (batches) that are computed at the same time, on a CPU, each with its share of the threads:
                more images a second, and each of them later. 1 is for the earliest answer.
            device: `cpu`, `cuda` or `cuda:1`; default: what the engine was built for, the first of its kind.
            limits: what an image may claim.

        Raises:
            ArtifactError, ManifestError: there is no such engine, or its files are not those it was built with.
            BackendError: this machine cannot run it.
            OptionError: an option is out of its range.
        """
        folder = artifacts.find_engine(engine, usable=runs_here)
        # Verified: vectors are kept beside those of other runs, and told apart by the hashes in engine.json.
        manifest = artifacts.read_manifest(folder, verify=True)
        return cls.from_folder(folder, manifest, threads=threads, streams=streams, device=device, limits=limits)

    @classmethod
    def from_folder(
        cls: type[_Self],
        folder: Path,
        manifest: EngineManifest,
        *,
        threads: int | None = None,
        streams: int = 1,
        device: str | None = None,
        limits: DecodeLimits | None = None,
    ) -> _Self:
        """`open`, once the engine was found and its manifest read."""
        check_outputs(folder, manifest)
        if manifest.spec.task != cls.task:
            raise OptionError(_other_task(manifest.spec))
        engines = load_streams(folder, manifest, threads=threads, streams=streams, device=device)
        return cls(manifest.spec, engines, limits=limits, threads=threads, manifest=manifest)

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        return self.spec.graphs[0].outputs[0].shape[-1]

    @property
    def grid_hw(self) -> tuple[int, int]:
        """Patches of an image."""
        h, w = self.spec.graphs[0].outputs[1].shape[1:3]
        return h, w

    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        patches: bool = True,
        normalise: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **unknown: NoReturn,
    ) -> Embeddings:
        """The vectors of some images, in order.

        Args:
            images: paths, encoded bytes, (H, W, 3) uint8 RGB arrays (also (H, W), (H, W, 1), RGBA), or frames of video
                (`Nv12Frame`). One of them by itself counts as a list of one.
            patches: give the patches' vectors too.
            normalise: scale every vector to a length of 1.
            on_error: `raise` the first image's error, or `return` it in `Embeddings.errors`: one bad image never
                harms the others.

        Raises:
            ImageError: with `on_error="raise"`.
            BackendError: the runtime failed, or the embedder is closed.
        """
        if unknown:
            expected = "patches, normalise or on_error"
            raise TypeError(f"Embedder() got an unexpected keyword argument {min(unknown)!r}; expected {expected}")
        if on_error not in ("raise", "return"):
            raise OptionError(f"on_error: expected 'raise' or 'return', got {on_error!r}")
        self._check_open()
        if not isinstance(images, Sequence) or isinstance(images, (str, bytes, bytearray, memoryview)):
            images = [images]
        raises = on_error == "raise"
        if len(images) <= self.session.batch:
            answers = self._batch(images, raises, patches)
        else:
            answers = self._batches(images, raises, patches)
        found = gathered(answers, self.spec, patches=patches)
        return found.normalised() if normalise else found

    def stream(
        self,
        items: Iterable[_Item],
        *,
        load: Callable[[_Item], ImageSource],
        patches: bool = False,
        prefetch: int | None = None,
    ) -> Generator[tuple[_Item, Embedded | ImageError], None, None]:
        """The vectors of any number of images, in order, in bounded memory: images are decoded on other threads than
        the engine's while it computes.

        Its threads end with it: after the last item, when it is closed, at an error and at Ctrl-C; what is being
        computed then is waited for, the rest is dropped. A `for` loop that is left early closes it when nothing else
        holds it; `contextlib.closing` does so in any case.

        Args:
            items: what the images are known by; taken as they are needed, by the thread that asks for the answers.
            load: an item's image; called on the decoding threads. An `ImageError` that it raises is that item's answer.
            patches: give the patches' vectors too.
            prefetch: items that are taken ahead of the answers, at most; default: enough for a batch in each stream,
                one that waits for it and one that is being decoded.

        Yields:
            each item with its vectors, or with what is wrong with its image; errors call an item that is a path by it,
            others `image 0`, `image 1`, ….

        Raises:
            BackendError: the runtime failed, or the embedder is closed. Whatever else `items` or `load` raises comes
                out, too, after the answers of the items before it.
            OptionError: `prefetch` is not at least 1.
        """
        if prefetch is None:
            prefetch = 3 * self.session.streams * self.session.batch + self._threads
        elif isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
            raise OptionError(f"prefetch: expected a number of items, at least 1, got {prefetch!r}")
        self._check_open()
        return embed_stream(self.session, items, load=load, patches=patches, prefetch=prefetch, threads=self._threads)

    def close(self) -> None:
        """Frees the engine. Closing twice is harmless."""
        self._closed = True
        self.session.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError(f"{self.spec.name}: this embedder is closed; open the engine again")

    def _batch(self, images: Sequence[ImageSource], raises: bool, patches: bool) -> list[Embedded | ImageError]:
        """At most a batch, by the caller's own thread."""
        answers: list[Any] = []
        for index, source in enumerate(images):
            try:
                answers.append(self.session.prepare(source, name=source_name(source, index)))
            except ImageError as error:
                if raises:
                    raise
                answers.append(without_frames(error))
        ready = [answer for answer in answers if not isinstance(answer, ImageError)]
        embedded = iter(self.session.embed(ready, patches=patches) if ready else ())
        return [answer if isinstance(answer, ImageError) else next(embedded) for answer in answers]

    def _batches(self, images: Sequence[ImageSource], raises: bool, patches: bool) -> list[Embedded | ImageError]:
        """Decoded while the engine computes, on all of its streams."""
        answers: list[Embedded | ImageError] = []
        with contextlib.closing(self.stream(images, load=_as_it_is, patches=patches)) as answered:
            for _, answer in answered:
                if raises and isinstance(answer, ImageError):
                    raise answer
                answers.append(answer)
        return answers


def _other_task(spec: ModelSpec) -> str:
    return f"{spec.name}: a model for {spec.task}, expected one for embed; `visionfast predict` answers with it"


def _as_it_is(source: ImageSource) -> ImageSource:
    return source
