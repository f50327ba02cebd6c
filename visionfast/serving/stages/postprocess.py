"""The ensemble's last step: the engine's raw outputs → objects in original pixels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, VisionfastError
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.results import Detections
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, array_of, guarded, refused, response_of
from visionfast.serving.stages.steps import objects_in
from visionfast.serving.wire import STAGES, pack_answers

__all__ = ["TritonPythonModel"]

_NO_IMAGE = ImageError("bytes", "its problem is told by the step that found it")


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = Deployed.of(args)
        spec = self._deployed.manifest.spec
        self._task, self._size_hw = spec.task, spec.preprocess.size_hw
        self._raw = [tensor.name for tensor in spec.graphs[0].outputs]
        # The server's own OpenVINO backend tells no time.
        self._timed = any(tensor["name"] == "engine_ns" for tensor in json.loads(args["model_config"])["input"])
        self._metrics = StageMetrics.of(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        self._metrics.close()

    def _respond(self, request: Any) -> Any:
        arrays = guarded(self._objects, request)
        if isinstance(arrays, VisionfastError):
            self._metrics.count(kind_of(arrays))
            return refused(arrays)
        return response_of(arrays)

    def _objects(self, request: Any) -> dict[str, npt.NDArray[Any]]:
        options = self._deployed.options_of(request)
        outputs = {name: array_of(request, name) for name in self._raw}
        sizes, intake = array_of(request, "image_hw"), array_of(request, "intake_ns")
        engine = array_of(request, "engine_ns") if self._timed else np.full((len(sizes), 1), -1)
        answers: list[Detections | ImageError] = []
        for slot, (height, width) in enumerate(sizes.tolist()):
            if not height or not width:
                answers.append(_NO_IMAGE)
                continue
            letterbox = letterbox_geometry((height, width), self._size_hw)
            found, objects_ns = objects_in(outputs, slot, letterbox, options)
            spent = (*intake[slot].tolist(), *engine[slot].tolist(), objects_ns)
            told = {stage: ns for stage, ns in zip(STAGES, spent, strict=True) if ns >= 0}
            answers.append(replace(found, stage_ns=told))
        for answer in answers:
            if isinstance(answer, Detections):
                self._metrics.observe(answer.stage_ns)
        packed = pack_answers(answers, self._task)
        return {name: array for name, array in packed.items() if name not in ("image_hw", "problem")}
