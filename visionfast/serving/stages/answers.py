"""What a request asks of a whole pipeline in one process, and its answer, counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from visionfast.errors import ImageError, VisionfastError
from visionfast.results import Detections
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import refused, response_of
from visionfast.serving.wire import pack_answers
from visionfast.types import Task

__all__ = ["Asked", "refuse", "respond"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One image, and how its request wants it answered."""

    image: bytes | ImageError
    options: Mapping[str, Any]


def respond(answers: Sequence[Detections | VisionfastError], task: Task, metrics: StageMetrics) -> Any:
    """The server's response for the images of one request; an error that is no image's own is the request's."""
    own: list[Detections | ImageError] = []
    for answer in answers:
        if isinstance(answer, VisionfastError) and not isinstance(answer, ImageError):
            return refuse(answer, metrics)
        own.append(answer)
    for answer in own:
        if isinstance(answer, ImageError):
            metrics.count(answer.kind)
        else:
            metrics.observe(answer.stage_ns)
    return response_of(pack_answers(own, task))


def refuse(error: VisionfastError, metrics: StageMetrics) -> Any:
    """The server's response to a request that has no answer."""
    metrics.count(kind_of(error))
    return refused(error)
