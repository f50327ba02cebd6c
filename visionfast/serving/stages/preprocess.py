"""The ensemble's first step: encoded images → letterboxed canvases, and what is wrong with those that have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, VisionfastError
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.serving.stages.requests import Deployed, guarded, images_of, refused, response_of
from visionfast.serving.stages.steps import SAMPLE, place
from visionfast.serving.wire import pack_problems

__all__ = ["TritonPythonModel"]


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = Deployed.of(args)
        self._spec = self._deployed.manifest.spec.preprocess
        self._pool = ThreadPoolExecutor(self._deployed.threads)
        self._canvases([SAMPLE])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        # Decoding leaves Python's lock to others: as many requests at once as there are processors.
        return list(self._pool.map(self._respond, requests))

    def finalize(self) -> None:
        self._pool.shutdown()

    def _respond(self, request: Any) -> Any:
        arrays = guarded(lambda: self._canvases(self._read(request)))
        return refused(arrays) if isinstance(arrays, VisionfastError) else response_of(arrays)

    def _read(self, request: Any) -> list[bytes | ImageError]:
        self._deployed.options_of(request)  # a wrong one is refused before anything is computed for it
        return images_of(request)

    def _canvases(self, images: Sequence[bytes | ImageError]) -> dict[str, npt.NDArray[Any]]:
        b, (h, w) = len(images), self._spec.size_hw
        canvas = np.full((b, h, w, 3), self._spec.pad_value, np.uint8)
        image_hw = np.zeros((b, 2), np.int32)  # 0 × 0: there is no image
        intake_ns = np.full((b, 2), -1, np.int64)
        problems: list[ImageError | None] = [None] * b
        preprocessor = CpuPreprocessor(self._spec)
        for i, image in enumerate(images):
            try:
                letterbox, stage_ns = place(image, preprocessor, canvas[i], self._deployed.limits)
            except ImageError as error:
                problems[i] = error
                continue
            image_hw[i] = letterbox.image_hw
            intake_ns[i] = stage_ns["decode"], stage_ns["preprocess"]
        return {
            "canvas": canvas,
            "image_hw": image_hw,
            "problem": pack_problems(problems),
            "intake_ns": intake_ns,
        }
