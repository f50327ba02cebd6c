"""An embedder's whole pipeline in one process: encoded images in, vectors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from visionfast.embedder import Embedder
from visionfast.errors import ImageError, VisionfastError
from visionfast.results import unit_vectors
from visionfast.serving.stages.answers import Asked
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, guarded, images_of, refused, response_of
from visionfast.serving.stages.steps import SAMPLE
from visionfast.serving.wire import stages_of
from visionfast.serving.wire.vectors import pack_vectors
from visionfast.sessions.embeddings import Embedded

__all__ = ["TritonPythonModel"]


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = deployed = Deployed.of(args)
        self._metrics = StageMetrics.of(args, stages=stages_of("embed"))
        self._engines = _Engines(deployed)
        warm = Asked(SAMPLE, {**deployed.options, "patches": True})
        self._engines.on_all(lambda embedder: self._embed(embedder, [warm]))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        asked = [guarded(self._read, request) for request in requests]
        images = [image for some in asked if not isinstance(some, VisionfastError) for image in some]
        batch = self._deployed.manifest.spec.batch
        calls = [images[first : first + batch] for first in range(0, len(images), batch)]
        answered = self._engines.each(calls, self._embed)
        answers = iter(
            answer
            for call, some in zip(calls, answered, strict=True)
            for answer in ([some] * len(call) if isinstance(some, VisionfastError) else some)
        )
        return [
            self._refused(some)
            if isinstance(some, VisionfastError)
            else self._respond([next(answers) for _ in some], some[0].options)
            for some in asked
        ]

    def finalize(self) -> None:
        self._engines.close()
        self._metrics.close()

    def _read(self, request: Any) -> list[Asked]:
        options = self._deployed.options_of(request)
        return [Asked(image, options) for image in images_of(request)]

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
                answers[slot] = error
        if ready:
            patches = any(images[slot].options.get("patches", False) for slot in ready)
            found = session.embed(list(ready.values()), patches=patches)
            for slot, one in zip(ready, found, strict=True):
                answers[slot] = _normalised(one) if images[slot].options["normalise"] else one
        return [answers[slot] for slot in range(len(images))]

    def _respond(self, answers: Sequence[Embedded | VisionfastError], options: Mapping[str, Any]) -> Any:
        own: list[Embedded | ImageError] = []
        for answer in answers:
            if isinstance(answer, VisionfastError) and not isinstance(answer, ImageError):
                return self._refused(answer)
            own.append(answer)
        for answer in own:
            if isinstance(answer, ImageError):
                self._metrics.count(kind_of(answer))
            else:
                self._metrics.observe(answer.stage_ns)
        return response_of(pack_vectors(own, self._deployed.manifest.spec, patches=options.get("patches", False)))

    def _refused(self, error: VisionfastError) -> Any:
        self._metrics.count(kind_of(error))
        return refused(error)


def _normalised(one: Embedded) -> Embedded:
    patches = None if one.patches is None else unit_vectors(one.patches)
    return replace(one, cls=unit_vectors(one.cls), patches=patches)


class _Engines:
    """One engine with all threads for a batch that comes alone, and one with a stream a thread for several: see
    `lanes`. The vectors are the same."""

    def __init__(self, deployed: Deployed) -> None:
        folder, manifest, threads = deployed.folder, deployed.manifest, deployed.threads
        self._streams = min(threads, -(-deployed.max_batch // manifest.spec.batch))
        self._alone = Embedder.from_folder(folder, manifest, threads=threads, limits=deployed.limits)
        self._beside = self._alone
        if self._streams > 1:
            self._beside = Embedder.from_folder(
                folder, manifest, threads=threads, streams=self._streams, limits=deployed.limits
            )
        self._pool = ThreadPoolExecutor(self._streams, thread_name_prefix="lane")

    def each(self, calls: Sequence[Sequence[Asked]], work: Any) -> list[Any]:
        """`work` on every call, in order; what it raises stands in the call's place."""
        # One that is left over when the streams are through has all threads.
        alone = len(calls) if self._streams == 1 else int(len(calls) % self._streams == 1)
        several = calls[: len(calls) - alone]
        done = list(self._pool.map(lambda call: guarded(work, self._beside, call), several))
        return done + [guarded(work, self._alone, call) for call in calls[len(calls) - alone :]]

    def on_all(self, work: Any) -> None:
        """`work` on both, as often as they have streams: the first call of each is slow."""
        work(self._alone)
        if self._beside is not self._alone:
            list(self._pool.map(work, [self._beside] * self._streams))

    def close(self) -> None:
        self._pool.shutdown()
        self._alone.close()
        self._beside.close()
