"""The ensemble's second step: canvases → of the engine's raw outputs what can become an object.

Of thousands of anchors a few are above the request's confidence; the others' columns would be copied from process to
process, megabytes an image, for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import VisionfastError
from visionfast.postprocess.boxes import above_confidence
from visionfast.serving.stages.lanes import Lane, Lanes
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, array_of, guarded, refused, response_of

__all__ = ["TritonPythonModel"]


class _Batch:
    """One request: its canvases, which of them hold an image, and the outputs that come of them.

    Args:
        request: the server's.
        options: that hold for it.
        kept: rows of the stage's buffers for it: (b, ...) of every output but the predictions.
    """

    def __init__(self, request: Any, options: Mapping[str, Any], kept: Mapping[str, npt.NDArray[Any]]) -> None:
        self.canvas = array_of(request, "canvas")
        self.rows = np.flatnonzero(array_of(request, "image_hw").all(1))
        b = len(self.canvas)
        self._options = options
        self._kept = {name: array[:b] for name, array in kept.items()}
        if len(self.rows) < b:  # what has no image has no outputs
            for array in self._kept.values():
                array[...] = 0
        self._columns: dict[int, npt.NDArray[np.float32]] = {}
        self._engine_ns = np.full((b, 1), -1, np.int64)

    def take(self, row: int, outputs: Mapping[str, npt.NDArray[Any]], slot: int, engine_ns: int, *, lent: bool) -> None:
        """What the engine gave in one slot for the image of one row; `lent`: nobody else writes the outputs before
        this is answered."""
        predictions = outputs["predictions"][slot]
        chosen = above_confidence(predictions, self._options["num_classes"], self._options["conf"])
        self._columns[row] = predictions[:, chosen]
        self._engine_ns[row] = engine_ns
        for name, array in self._kept.items():
            if lent:
                self._kept[name] = outputs[name][:1]
            else:
                array[row] = outputs[name][slot]

    def arrays(self, channels: int) -> dict[str, npt.NDArray[Any]]:
        """The answer; images with fewer anchors than others get columns of zeros, which are above no confidence."""
        most = max((columns.shape[1] for columns in self._columns.values()), default=0)
        predictions = np.zeros((len(self.canvas), channels, max(1, most)), np.float32)
        for row, columns in self._columns.items():
            predictions[row, :, : columns.shape[1]] = columns
        return {"predictions": predictions, **self._kept, "engine_ns": self._engine_ns}


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = deployed = Deployed.of(args)
        predictions, *others = deployed.manifest.spec.graphs[0].outputs
        assert predictions.name == "predictions", "a detector's graph gives them first"
        self._channels = predictions.shape[1]

        # Megabytes an image: new memory, whose every page the system clears first, would take longer than the copy.
        def buffers(images: int) -> dict[str, npt.NDArray[Any]]:
            return {tensor.name: np.zeros((images, *tensor.shape[1:]), tensor.dtype) for tensor in others}

        self._kept = buffers(deployed.max_batch)
        self._lanes = Lanes(deployed.folder, deployed.manifest, threads=deployed.threads, max_batch=deployed.max_batch)
        self.workers = self._lanes.streams
        self._beside = [buffers(self._lanes.batch) for _ in range(self.workers)]
        self._lanes.on_all(lambda lane: lane.infer(lane.canvas))
        self._metrics = StageMetrics.of(args, stages=())

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return self._respond(requests, self._kept, self._lanes.each)

    def beside(self, worker: int, requests: Sequence[Any]) -> list[Any]:
        return self._respond(requests, self._beside[worker], functools.partial(self._lanes.beside, worker))

    def _respond(
        self, requests: Sequence[Any], kept: Mapping[str, npt.NDArray[Any]], each: Callable[[Any, Any], list[Any]]
    ) -> list[Any]:
        batches: list[_Batch | VisionfastError] = []
        taken = 0
        for request in requests:
            batches.append(batch := guarded(self._read, request, kept, taken))
            taken += len(batch.canvas) if isinstance(batch, _Batch) else 0
        # An engine's call may hold the images of several requests.
        images = [(batch, row) for batch in batches if isinstance(batch, _Batch) for row in batch.rows]
        alone = len(images) == len(batches) == 1 and len(images[0][0].canvas) == 1
        size = self._lanes.batch
        calls = [images[first : first + size] for first in range(0, len(images), size)]
        failed = each(lambda lane, call: guarded(self._infer, lane, call, alone), calls)
        for call, error in zip(calls, failed, strict=True):
            if error is not None:
                harmed = {id(batch) for batch, _ in call}
                batches = [error if id(batch) in harmed else batch for batch in batches]
        for batch in batches:
            if isinstance(batch, VisionfastError):
                self._metrics.count(kind_of(batch))
        return [
            refused(batch) if isinstance(batch, VisionfastError) else response_of(batch.arrays(self._channels))
            for batch in batches
        ]

    def finalize(self) -> None:
        self._metrics.close()
        self._lanes.close()

    def _read(self, request: Any, kept: Mapping[str, npt.NDArray[Any]], first: int) -> _Batch:
        rows = {name: array[first:] for name, array in kept.items()}
        return _Batch(request, self._deployed.options_of(request), rows)

    def _infer(self, lane: Lane, call: Sequence[tuple[_Batch, int]], alone: bool) -> None:
        if self._lanes.batch == 1:
            (batch, row) = call[0]
            canvas = batch.canvas[row : row + 1]
        else:
            canvas = lane.canvas
            for place, (batch, row) in zip(canvas, call, strict=False):
                place[...] = batch.canvas[row]
        outputs, engine_ns = lane.infer(canvas)
        for slot, (batch, row) in enumerate(call):
            batch.take(row, outputs, slot, engine_ns // len(call), lent=alone)
