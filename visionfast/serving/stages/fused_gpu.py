"""A whole pipeline in one process on a GPU: the session of `predict`, with every request's own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from visionfast.errors import BackendError, ImageError
from visionfast.loading import load_graphs
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.serving.options import options_of_request
from visionfast.serving.stages.answers import Asked, respond_all
from visionfast.serving.stages.metrics import StageMetrics
from visionfast.serving.stages.requests import Deployed, guarded
from visionfast.serving.stages.steps import SAMPLE
from visionfast.serving.wire import pack_answers
from visionfast.sessions.cuda import CudaSession
from visionfast.sessions.opening import open_session
from visionfast.types import EngineManifest

__all__ = ["TritonPythonModel", "open_on_gpu"]


def open_on_gpu(
    folder: Path, manifest: EngineManifest, index: int, options: Mapping[str, Any], limits: DecodeLimits
) -> CudaSession:
    """The engine on the GPU that the server gave to this process; DALI decodes where it is installed.

    Raises:
        BackendError: this machine cannot run it.
    """
    (engine,) = load_graphs(folder, manifest, device=f"cuda:{index}")
    session = open_session(manifest.spec, engine, options, limits)
    if not isinstance(session, CudaSession):
        session.close()
        raise BackendError(f"{folder}: expected an engine for a GPU, got one for {manifest.device}; deploy it again")
    return session


def _other(answer: Detections | ImageError, found: Detections | None) -> Detections | ImageError:
    """The answer by the request's own options, where it has some; an error is called as the request's only image is."""
    if isinstance(answer, ImageError):
        return type(answer)("bytes", answer.reason)
    return answer if found is None else replace(found, stage_ns=answer.stage_ns)


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = deployed = Deployed.of(args)
        self._task = deployed.manifest.spec.task
        self._usual = options_of_request({}, deployed.options, deployed.manifest.spec)
        index = int(args["model_instance_device_id"])
        self._session = open_on_gpu(deployed.folder, deployed.manifest, index, self._usual, deployed.limits)
        self._metrics = StageMetrics.of(args)
        self._answer([Asked(SAMPLE, self._usual)])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return respond_all(
            requests,
            self._deployed,
            self._metrics,
            work=lambda calls: [guarded(self._answer, call) for call in calls],
            pack=lambda answers, _: pack_answers(answers, self._task),
        )

    def finalize(self) -> None:
        self._metrics.close()
        self._session.close()

    def _answer(self, asked: Sequence[Asked]) -> list[Detections | ImageError]:
        """At most a batch of the engine's."""
        # What came in no image's form takes no slot.
        sent = [(one.image, one.options) for one in asked if isinstance(one.image, bytes)]
        answered = self._session.answer([image for image, _ in sent], first=0, raises=False) if sent else []
        others = {slot: options for slot, (_, options) in enumerate(sent) if options != self._usual}
        found = self._session.objects_by(others) if others else {}
        each = iter(_other(answer, found.get(slot)) for slot, answer in enumerate(answered))
        return [one.image if isinstance(one.image, ImageError) else next(each) for one in asked]
