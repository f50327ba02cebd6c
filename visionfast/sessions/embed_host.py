"""An embedder's engine on the host: as many images (batches) at once as it has streams."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.limits import DecodeLimits
from visionfast.sessions import ImageSource
from visionfast.sessions.embeddings import Embedded, Prepared, Streams, embedded, prepared
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
        self._limits = limits
        self._preprocessor = CropPreprocessor(spec.preprocess)
        shape = (self.batch, *spec.preprocess.size_hw, 3)
        self._streams = Streams([_Stream(runner, np.zeros(shape, np.uint8)) for runner in runners])

    def prepare(self, source: ImageSource, *, name: str | None) -> Prepared:
        """As `EmbedSession.prepare`."""
        return prepared(source, self._preprocessor, limits=self._limits, name=name)

    def embed(self, images: Sequence[Prepared], *, patches: bool) -> list[Embedded]:
        """As `EmbedSession.embed`."""
        with self._streams.take() as stream:
            started = perf_counter_ns()
            (image,) = stream.runner.inputs
            tensor = stream.batched(images)  # (B, h, w, 3) u8
            if image.layout != "NHWC":
                tensor = self._preprocessor.normalised(tensor, image.dtype)  # (B, 3, h, w)
            outputs = stream.runner.infer({image.name: tensor}, copy=False)
            engine_ns = perf_counter_ns() - started
            # Copied while the stream is this thread's: they are the runner's own buffers.
            return embedded(images, outputs["cls"], outputs["patches"] if patches else None, engine_ns)

    def close(self) -> None:
        """As `EmbedSession.close`."""
        with contextlib.ExitStack() as closing:
            for stream in self._streams.close():
                closing.callback(stream.runner.close)  # all, whatever one of them says


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """A runner, and where a batch for it is put together: (B, h, w, 3) u8."""

    runner: Runner
    slots: npt.NDArray[np.uint8]

    def batched(self, images: Sequence[Prepared]) -> npt.NDArray[Any]:
        """A slot without an image keeps what it had; nobody looks at its answer."""
        if len(self.slots) == 1:
            only: npt.NDArray[np.uint8] = images[0].tensor[None]
            return only
        for slot, image in zip(self.slots, images, strict=False):
            slot[...] = image.tensor
        return self.slots
