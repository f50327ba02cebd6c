"""An embedder's engine on the host: as many images at once as it has streams."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np

from visionfast.errors import BackendError
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.limits import DecodeLimits
from visionfast.sessions import ImageSource, pixels_of
from visionfast.sessions.embeddings import Embedded, Prepared
from visionfast.types import ModelSpec, Runner

__all__ = ["HostEmbedSession"]


class HostEmbedSession:
    """See `visionfast.sessions.embeddings.EmbedSession`.

    Args:
        spec: of the model.
        runners: of its graph, one a stream; closed with the session.
        limits: what an image may claim.
    """

    def __init__(self, spec: ModelSpec, runners: Sequence[Runner], *, limits: DecodeLimits) -> None:
        self.batch = spec.batch
        self.streams = len(runners)
        self._runners = tuple(runners)
        self._limits = limits
        self._preprocessor = CropPreprocessor(spec.preprocess)
        self._size_hw = spec.preprocess.size_hw
        self._free: queue.LifoQueue[Runner] = queue.LifoQueue()
        for runner in runners:
            self._free.put(runner)
        self._closed = False

    def prepare(self, source: ImageSource, *, name: str | None) -> Prepared:
        """As `EmbedSession.prepare`."""
        started = perf_counter_ns()
        pixels = pixels_of(source, limits=self._limits, name=name)
        decoded = perf_counter_ns()
        tensor = np.empty((*self._size_hw, 3), np.uint8)
        placed = self._preprocessor.write(pixels, tensor)
        stage_ns = {"decode": decoded - started, "preprocess": perf_counter_ns() - decoded}
        return Prepared(placed, stage_ns, tensor)

    def embed(self, images: Sequence[Prepared], *, patches: bool) -> list[Embedded]:
        """As `EmbedSession.embed`."""
        if self._closed:
            raise BackendError("session: it is closed; open the engine again")
        runner = self._free.get()
        try:
            started = perf_counter_ns()
            (image,) = runner.inputs
            tensor = np.zeros((self.batch, *self._size_hw, 3), np.uint8)
            for slot, prepared in zip(tensor, images, strict=False):
                slot[...] = prepared.tensor
            feeds = tensor if image.layout == "NHWC" else self._preprocessor.normalised(tensor, image.dtype)
            outputs = runner.infer({image.name: feeds}, copy=False)
            cls = outputs["cls"].astype(np.float32)
            dense = outputs["patches"].astype(np.float32) if patches else None
            engine_ns = (perf_counter_ns() - started) // len(images)
        finally:
            self._free.put(runner)
        return [
            Embedded(
                cls[i].copy(),
                None if dense is None else dense[i].copy(),
                prepared.placed,
                {**prepared.stage_ns, "engine": engine_ns},
            )
            for i, prepared in enumerate(images)
        ]

    def close(self) -> None:
        self._closed = True
        for runner in self._runners:
            runner.close()
