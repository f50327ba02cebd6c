"""The CPU's way: decode and letterbox into the engine's input, infer, post-process in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError
from visionfast.postprocess.detections import postprocess
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.sessions import ImageSource, Owner, pixels_of, source_name
from visionfast.types import Letterbox, ModelSpec, Runner

__all__ = ["HostSession"]


class HostSession:
    """See `visionfast.sessions.Session`.

    Args:
        spec: of the model.
        runner: of its graph; closed with the session.
        options: of `postprocess`, checked already.
        limits: what an image may claim.
    """

    def __init__(self, spec: ModelSpec, runner: Runner, *, options: Mapping[str, Any], limits: DecodeLimits) -> None:
        self._runner = runner
        self._options = options
        self._limits = limits
        self._preprocessor = CpuPreprocessor(spec.preprocess)
        self._input = runner.inputs[0]
        self.batch = self._input.shape[0]
        h, w = spec.preprocess.size_hw
        self._canvas = np.full((self.batch, h, w, 3), spec.preprocess.pad_value, np.uint8)
        # An engine with normalisation inside reads the canvas itself.
        self._tensor: npt.NDArray[Any] = (
            self._canvas if self._input.layout == "NHWC" else np.zeros(self._input.shape, self._input.dtype)
        )
        self._outputs: dict[str, npt.NDArray[Any]] = {}
        self._owner = Owner()

    def answer(self, images: Sequence[ImageSource], *, first: int, raises: bool) -> list[Detections | ImageError]:
        """As `Session.answer`."""
        with self._owner.asking():
            return self._batch(images, first, raises)

    def raw(self) -> dict[str, npt.NDArray[Any]]:
        with self._owner.asking():
            return {name: array.copy() for name, array in self._outputs.items()}

    def close(self) -> None:
        with self._owner.closing():
            self._outputs = {}
            self._runner.close()

    def _batch(self, images: Sequence[ImageSource], first: int, raises: bool) -> list[Detections | ImageError]:
        answers: list[Detections | ImageError | None] = [None] * len(images)
        placed: dict[int, tuple[Letterbox, dict[str, int]]] = {}
        for slot, source in enumerate(images):
            try:
                placed[slot] = self._place(source, slot, first + slot)
            except ImageError as error:
                if raises:
                    raise
                answers[slot] = error
        if placed:
            engine_ns = self._infer(len(placed))
            for slot, (letterbox, stage_ns) in placed.items():
                answers[slot] = self._answer(slot, letterbox, stage_ns | {"engine": engine_ns})
        return [answer for answer in answers if answer is not None]

    def _place(self, source: ImageSource, slot: int, index: int) -> tuple[Letterbox, dict[str, int]]:
        started = perf_counter_ns()
        pixels = pixels_of(source, limits=self._limits, name=source_name(source, index))
        decoded = perf_counter_ns()
        letterbox = self._preprocessor.write(pixels, self._canvas[slot])
        return letterbox, {"decode": decoded - started, "preprocess": perf_counter_ns() - decoded}

    def _infer(self, count: int) -> int:
        """The engine on all slots; a slot without an image computes what is there and is not looked at."""
        started = perf_counter_ns()
        if self._tensor is not self._canvas:
            self._preprocessor.normalise(self._canvas, self._tensor)
        # The answers are made from copies before the next call can overwrite these buffers.
        self._outputs = self._runner.infer({self._input.name: self._tensor}, copy=False)
        return (perf_counter_ns() - started) // count

    def _answer(self, slot: int, letterbox: Letterbox, stage_ns: dict[str, int]) -> Detections:
        started = perf_counter_ns()
        prototypes = self._outputs.get("prototypes")
        found = postprocess(
            self._outputs["predictions"][slot],
            letterbox,
            prototypes=None if prototypes is None else prototypes[slot],
            **self._options,
        )
        return replace(found, stage_ns=stage_ns | {"postprocess": perf_counter_ns() - started})
