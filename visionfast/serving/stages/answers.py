"""What requests ask of a whole pipeline in one process, and their answers, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from visionfast.errors import ImageError, VisionfastError
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, guarded, images_of, refused, response_of

__all__ = ["Asked", "respond_all"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One image, and how its request wants it answered."""

    image: bytes | ImageError
    options: Mapping[str, Any]


class _Timed(Protocol):
    """An answer with the nanoseconds of each stage."""

    @property
    def stage_ns(self) -> Mapping[str, int]: ...


_Answer = TypeVar("_Answer", bound=_Timed)


def respond_all(
    requests: Sequence[Any],
    deployed: Deployed,
    metrics: StageMetrics,
    *,
    work: Callable[[Sequence[Sequence[Asked]]], Sequence[Sequence[_Answer | ImageError] | VisionfastError]],
    pack: Callable[[Sequence[_Answer | ImageError], Mapping[str, Any]], Mapping[str, npt.NDArray[Any]]],
) -> list[Any]:
    """The server's response to each request.

    Args:
        requests: the server's.
        deployed: what the pipeline was told.
        metrics: what was answered is told them, and what was not.
        work: answers the images of all requests together, some calls of the engine: of each call its images' answers,
            or the error that it ended with.
        pack: the answers of one request, by its options, as the tensors of the response.
    """
    asked = [guarded(_asked_of, request, deployed) for request in requests]
    images = [image for some in asked if not isinstance(some, VisionfastError) for image in some]
    batch = deployed.manifest.spec.batch
    calls = [images[first : first + batch] for first in range(0, len(images), batch)]
    each = iter(
        answer
        for call, some in zip(calls, work(calls), strict=True)
        for answer in ([some] * len(call) if isinstance(some, VisionfastError) else some)
    )
    return [
        _refuse(some, metrics)
        if isinstance(some, VisionfastError)
        else _respond([next(each) for _ in some], some[0].options, metrics, pack)
        for some in asked
    ]


def _asked_of(request: Any, deployed: Deployed) -> list[Asked]:
    options = deployed.options_of(request)
    return [Asked(image, options) for image in images_of(request)]


def _respond(
    answers: Sequence[_Answer | VisionfastError],
    options: Mapping[str, Any],
    metrics: StageMetrics,
    pack: Callable[[Sequence[_Answer | ImageError], Mapping[str, Any]], Mapping[str, npt.NDArray[Any]]],
) -> Any:
    """The response for the images of one request; an error that is no image's own is the request's."""
    own: list[_Answer | ImageError] = []
    for answer in answers:
        if isinstance(answer, VisionfastError) and not isinstance(answer, ImageError):
            return _refuse(answer, metrics)
        own.append(answer)
    for answer in own:
        if isinstance(answer, ImageError):
            metrics.count(answer.kind)
        else:
            metrics.observe(answer.stage_ns)
    return response_of(pack(own, options))


def _refuse(error: VisionfastError, metrics: StageMetrics) -> Any:
    """The response to a request that has no answer."""
    metrics.count(kind_of(error))
    return refused(error)
