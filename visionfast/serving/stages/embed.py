"""An embedder's whole pipeline in one process: encoded images in, vectors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from visionfast.embedder import Embedder
from visionfast.errors import ImageError
from visionfast.results import unit_vectors
from visionfast.serving.stages.answers import Asked, respond_all
from visionfast.serving.stages.metrics import StageMetrics
from visionfast.serving.stages.requests import Deployed, guarded
from visionfast.serving.stages.steps import SAMPLE
from visionfast.serving.wire import stages_of
from visionfast.serving.wire.vectors import pack_vectors
from visionfast.sessions.embeddings import Embedded

__all__ = ["TritonPythonModel"]


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = deployed = Deployed.of(args)
        self._spec = deployed.manifest.spec
        self._metrics = StageMetrics.of(args, stages=stages_of("embed"))
        self._engines = _Engines(deployed)
        self.workers = self._engines.streams
        warm = Asked(SAMPLE, {**deployed.options, "patches": True})
        self._engines.on_all(lambda embedder: self._embed(embedder, [warm]))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return self._respond(requests, self._engines.each)

    def beside(self, worker: int, requests: Sequence[Any]) -> list[Any]:
        return self._respond(requests, self._engines.beside)

    def _respond(self, requests: Sequence[Any], each: Callable[[Any, Any], list[Any]]) -> list[Any]:
        return respond_all(
            requests,
            self._deployed,
            self._metrics,
            work=lambda calls: each(calls, self._embed),
            pack=lambda answers, options: pack_vectors(answers, self._spec, patches=options.get("patches", False)),
        )

    def finalize(self) -> None:
        self._engines.close()
        self._metrics.close()

    def _embed(self, embedder: Embedder, images: Sequence[Asked]) -> list[Embedded | ImageError]:
        """At most a batch of the engine's."""
        session = embedder.session
        answers: dict[int, Embedded | ImageError] = {}
        ready = {}
        for slot, asked in enumerate(images):
            if isinstance(asked.image, ImageError):
                answers[slot] = asked.image
                continue
            try:
                ready[slot] = session.prepare(asked.image, name="bytes")
            except ImageError as error:
                answers[slot] = error.with_traceback(None)  # see `guarded`
        if ready:
            patches = any(images[slot].options.get("patches", False) for slot in ready)
            found = session.embed(list(ready.values()), patches=patches)
            for slot, one in zip(ready, found, strict=True):
                answers[slot] = _normalised(one) if images[slot].options["normalise"] else one
        return [answers[slot] for slot in range(len(images))]


def _normalised(one: Embedded) -> Embedded:
    patches = None if one.patches is None else unit_vectors(one.patches)
    return replace(one, cls=unit_vectors(one.cls), patches=patches)


class _Engines:
    """One engine with all threads for a batch that comes alone, and one with a stream a thread for several: see
    `lanes`. The vectors are the same."""

    def __init__(self, deployed: Deployed) -> None:
        folder, manifest, threads = deployed.folder, deployed.manifest, deployed.threads
        self.streams = min(threads, -(-deployed.max_batch // manifest.spec.batch))
        self._alone = Embedder.from_folder(folder, manifest, threads=threads, limits=deployed.limits)
        self._beside = self._alone
        if self.streams > 1:
            self._beside = Embedder.from_folder(
                folder, manifest, threads=threads, streams=self.streams, limits=deployed.limits
            )
        self._pool = ThreadPoolExecutor(self.streams, thread_name_prefix="lane")

    def each(self, calls: Sequence[Sequence[Asked]], work: Any) -> list[Any]:
        """`work` on every call, in order; what it raises stands in the call's place."""
        # One that is left over when the streams are through has all threads.
        alone = len(calls) if self.streams == 1 else int(len(calls) % self.streams == 1)
        several = calls[: len(calls) - alone]
        done = list(self._pool.map(lambda call: guarded(work, self._beside, call), several))
        return done + [guarded(work, self._alone, call) for call in calls[len(calls) - alone :]]

    def beside(self, calls: Sequence[Sequence[Asked]], work: Any) -> list[Any]:
        """As `each`, one after the other, by a stream that is free, for several threads at once."""
        return [guarded(work, self._beside, call) for call in calls]

    def on_all(self, work: Any) -> None:
        """`work` on both, as often as they have streams: the first call of each is slow."""
        work(self._alone)
        if self._beside is not self._alone:
            list(self._pool.map(work, [self._beside] * self.streams))

    def close(self) -> None:
        self._pool.shutdown()
        self._alone.close()
        self._beside.close()
