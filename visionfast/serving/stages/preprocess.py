"""The ensemble's first step: encoded images → letterboxed canvases, and what is wrong with those that have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, VisionfastError
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, guarded, images_of, refused, response_of
from visionfast.serving.stages.steps import SAMPLE, place
from visionfast.serving.wire import pack_problems

__all__ = ["TritonPythonModel"]


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = Deployed.of(args)
        self._spec = self._deployed.manifest.spec.preprocess
        self._preprocessor = CpuPreprocessor(self._spec)  # all threads', for `write` alone, which keeps nothing
        # New memory, whose every page the system clears first, would take longer than to fill this again.
        self._kept = np.empty((self._deployed.max_batch, *self._spec.size_hw, 3), np.uint8)
        self._pool = ThreadPoolExecutor(self._deployed.threads)
        self._metrics = StageMetrics.of(args, stages=())
        self._canvases([SAMPLE], self._kept[:1])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        read = [guarded(self._read, request) for request in requests]
        counts = [0 if isinstance(images, VisionfastError) else len(images) for images in read]
        canvases = [self._kept[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
        if len(requests) == 1:
            return [self._respond(read[0], canvases[0])]
        # Decoding leaves Python's lock to others: as many requests at once as there are processors.
        return list(self._pool.map(self._respond, read, canvases))

    def finalize(self) -> None:
        self._pool.shutdown()
        self._metrics.close()

    def _respond(self, images: list[bytes | ImageError] | VisionfastError, canvas: npt.NDArray[np.uint8]) -> Any:
        arrays = images if isinstance(images, VisionfastError) else guarded(self._canvases, images, canvas)
        if isinstance(arrays, VisionfastError):
            self._metrics.count(kind_of(arrays))
            return refused(arrays)
        return response_of(arrays)

    def _read(self, request: Any) -> list[bytes | ImageError]:
        self._deployed.options_of(request)  # a wrong one is refused before anything is computed for it
        return images_of(request)

    def _canvases(
        self, images: Sequence[bytes | ImageError], canvas: npt.NDArray[np.uint8]
    ) -> dict[str, npt.NDArray[Any]]:
        b = len(images)
        image_hw = np.zeros((b, 2), np.int32)  # 0 × 0: there is no image
        intake_ns = np.full((b, 2), -1, np.int64)
        problems: list[ImageError | None] = [None] * b
        for i, image in enumerate(images):
            try:
                letterbox, stage_ns = place(image, self._preprocessor, canvas[i], self._deployed.limits)
            except ImageError as error:
                problems[i] = error.with_traceback(None)  # see `guarded`
                canvas[i] = 0  # not what an image before it left there
                self._metrics.count(error.kind)
                continue
            image_hw[i] = letterbox.image_hw
            intake_ns[i] = stage_ns["decode"], stage_ns["preprocess"]
        return {
            "canvas": canvas,
            "image_hw": image_hw,
            "problem": pack_problems(problems),
            "intake_ns": intake_ns,
        }
