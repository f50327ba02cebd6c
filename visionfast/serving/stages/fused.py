"""A whole pipeline in one process: encoded images in, objects out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from visionfast.errors import ImageError
from visionfast.results import Detections
from visionfast.serving.stages.answers import Asked, respond_all
from visionfast.serving.stages.lanes import Lane, Lanes
from visionfast.serving.stages.metrics import StageMetrics
from visionfast.serving.stages.requests import Deployed, guarded
from visionfast.serving.stages.steps import SAMPLE, objects_in, place
from visionfast.serving.wire import pack_answers
from visionfast.types import Letterbox

__all__ = ["TritonPythonModel"]


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = deployed = Deployed.of(args)
        self._task = deployed.manifest.spec.task
        self._lanes = Lanes(deployed.folder, deployed.manifest, threads=deployed.threads, max_batch=deployed.max_batch)
        self.workers = self._lanes.streams
        options = {"num_classes": len(deployed.manifest.spec.class_names), **deployed.options}
        self._lanes.on_all(lambda lane: self._answer(lane, [Asked(SAMPLE, options)]))
        self._metrics = StageMetrics.of(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return self._respond(requests, self._lanes.each)

    def beside(self, worker: int, requests: Sequence[Any]) -> list[Any]:
        return self._respond(requests, functools.partial(self._lanes.beside, worker))

    def _respond(self, requests: Sequence[Any], each: Callable[[Any, Any], list[Any]]) -> list[Any]:
        return respond_all(
            requests,
            self._deployed,
            self._metrics,
            work=lambda calls: each(lambda lane, call: guarded(self._answer, lane, call), calls),
            pack=lambda answers, _: pack_answers(answers, self._task),
        )

    def finalize(self) -> None:
        self._metrics.close()
        self._lanes.close()

    def _answer(self, lane: Lane, images: Sequence[Asked]) -> list[Detections | ImageError]:
        """At most a batch of the engine's."""
        answers: list[Detections | ImageError | None] = [None] * len(images)
        placed: dict[int, tuple[Letterbox, dict[str, int]]] = {}
        for slot, asked in enumerate(images):
            try:
                placed[slot] = place(asked.image, lane.preprocessor, lane.canvas[slot], self._deployed.limits)
            except ImageError as error:
                answers[slot] = error.with_traceback(None)  # see `guarded`
        if placed:
            outputs, engine_ns = lane.infer(lane.canvas)
            for slot, (letterbox, stage_ns) in placed.items():
                found, objects_ns = objects_in(outputs, slot, letterbox, images[slot].options)
                stage_ns |= {"engine": engine_ns // len(placed), "postprocess": objects_ns}
                answers[slot] = replace(found, stage_ns=stage_ns)
        return [answer for answer in answers if answer is not None]
