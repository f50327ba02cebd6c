"""The ensemble's second step: canvases → the engine's raw outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import VisionfastError
from visionfast.serving.stages.lanes import Lane, Lanes
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, array_of, guarded, refused, response_of

__all__ = ["TritonPythonModel"]


class _Batch:
    """One request: its canvases, which of them hold an image, and where the outputs go: rows of the stage's buffers."""

    def __init__(self, request: Any, outputs: Mapping[str, npt.NDArray[Any]], first: int) -> None:
        self.canvas = array_of(request, "canvas")
        self.rows = np.flatnonzero(array_of(request, "image_hw").all(1))
        b = len(self.canvas)
        self.outputs = {name: array[first : first + b] for name, array in outputs.items()}
        if len(self.rows) < b:  # what has no image has no outputs
            for array in self.outputs.values():
                array[...] = 0
        self.outputs["engine_ns"] = np.full((b, 1), -1, np.int64)


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        deployed = Deployed.of(args)
        graph = deployed.manifest.spec.graphs[0]
        # Megabytes an image: new memory, whose every page the system clears first, would take longer than the copy.
        self._kept = {
            tensor.name: np.zeros((deployed.max_batch, *tensor.shape[1:]), tensor.dtype) for tensor in graph.outputs
        }
        self._lanes = Lanes(deployed.folder, deployed.manifest, threads=deployed.threads, max_batch=deployed.max_batch)
        self._lanes.on_all(lambda lane: lane.infer(lane.canvas))
        self._metrics = StageMetrics.of(args, stages=())

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        batches: list[_Batch | VisionfastError] = []
        taken = 0
        for request in requests:
            batches.append(batch := guarded(_Batch, request, self._kept, taken))
            taken += len(batch.canvas) if isinstance(batch, _Batch) else 0
        # An engine's call may hold the images of several requests.
        images = [(batch, row) for batch in batches if isinstance(batch, _Batch) for row in batch.rows]
        alone = len(images) == len(batches) == 1 and len(images[0][0].canvas) == 1
        size = self._lanes.batch
        calls = [images[first : first + size] for first in range(0, len(images), size)]
        failed = self._lanes.each(lambda lane, call: guarded(self._infer, lane, call, alone), calls)
        for call, error in zip(calls, failed, strict=True):
            if error is not None:
                harmed = {id(batch) for batch, _ in call}
                batches = [error if id(batch) in harmed else batch for batch in batches]
        for batch in batches:
            if isinstance(batch, VisionfastError):
                self._metrics.count(kind_of(batch))
        return [
            refused(batch) if isinstance(batch, VisionfastError) else response_of(batch.outputs) for batch in batches
        ]

    def finalize(self) -> None:
        self._metrics.close()
        self._lanes.close()

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
            batch.outputs["engine_ns"][row] = engine_ns // len(call)
            if alone:  # the runner's own buffers, which nobody else writes before this is answered
                batch.outputs |= {name: outputs[name][:1] for name in self._kept}
                continue
            for name in self._kept:
                batch.outputs[name][row] = outputs[name][slot]
