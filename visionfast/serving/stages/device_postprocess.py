"""The last step of an ensemble on a GPU: the engine's outputs, where they are, → objects in original pixels.

Rows of several requests are gathered on the device and answered together; what leaves it is boxes, scores, classes and
packed masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from visionfast.cuda import CudaDevice, Device
from visionfast.errors import ImageError, ServerError, VisionfastError
from visionfast.postprocess.by_options import PostprocessByOptions
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.results import Detections
from visionfast.serving.options import options_of_request
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, device_tensor_of, guarded, refused, response_of
from visionfast.serving.wire import pack_answers
from visionfast.types import Letterbox

if TYPE_CHECKING:
    import torch

__all__ = ["TritonPythonModel", "open_device"]

_NO_IMAGE = ImageError("bytes", "its problem is told by the step that found it")


def open_device(index: int) -> Device:
    """The GPU that the server gave to this process."""
    return CudaDevice(index)


@dataclass(frozen=True, slots=True)
class _Row:
    """One image's: the engine's outputs on the device, where it lies, and how its request wants it answered."""

    outputs: Mapping[str, torch.Tensor]
    letterbox: Letterbox | None
    options: Mapping[str, Any]
    intake_ns: int


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = deployed = Deployed.of(args)
        spec = deployed.manifest.spec
        self._task, self._size_hw = spec.task, spec.preprocess.size_hw
        self._device = device = open_device(int(args["model_instance_device_id"]))
        b = deployed.max_batch
        outputs = [replace(tensor, shape=(b, *tensor.shape[1:])) for tensor in spec.graphs[0].outputs]
        with device.current():
            self._gathered = {tensor.name: device.empty(tensor.shape, tensor.dtype) for tensor in outputs}
        usual = options_of_request({}, deployed.options, spec)
        self._postprocess = PostprocessByOptions(spec, outputs, device, options=usual)
        self._metrics = StageMetrics.of(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        read = [guarded(self._read, request) for request in requests]
        rows = [row for some in read if not isinstance(some, VisionfastError) for row in some]
        answered = guarded(self._answer, rows)
        if isinstance(answered, VisionfastError):
            return [self._refuse(some if isinstance(some, VisionfastError) else answered) for some in read]
        answers = iter(answered)
        return [
            self._refuse(some) if isinstance(some, VisionfastError) else self._respond([next(answers) for _ in some])
            for some in read
        ]

    def finalize(self) -> None:
        self._metrics.close()

    def _read(self, request: Any) -> list[_Row]:
        """A request's images.

        Raises:
            OptionError: an option is none, or out of its range.
            ServerError: a row was made from another image than the one that was asked for.
        """
        options = self._deployed.options_of(request)
        told, seen, tickets, sizes, intake = (
            # Wherever the server has them: a few numbers each.
            device_tensor_of(request, name).cpu().numpy()
            for name in ("told", "decoded_hw", "ticket", "image_hw", "intake_ns")
        )
        if (tickets[:, :5] != told).any() or (tickets[:, 5:] != seen).any():
            raise ServerError(
                f"preprocess: expected images {tickets.tolist()} of DALI, got {told.tolist()} of sizes {seen.tolist()};"
                " send them again, and tell us"
            )
        outputs = {name: device_tensor_of(request, name) for name in self._gathered}
        return [
            _Row(
                {name: tensor[i] for name, tensor in outputs.items()},
                letterbox_geometry((height, width), self._size_hw) if height and width else None,
                options,
                int(intake[i, 0]),
            )
            for i, (height, width) in enumerate(sizes.tolist())
        ]

    def _answer(self, rows: Sequence[_Row]) -> list[Detections | ImageError]:
        answers: list[Detections | ImageError] = []
        for first in range(0, len(rows), self._deployed.max_batch):
            answers += self._answer_together(rows[first : first + self._deployed.max_batch])
        return answers

    def _answer_together(self, rows: Sequence[_Row]) -> list[Detections | ImageError]:
        started = perf_counter_ns()
        if all(row.letterbox is None for row in rows):
            return [_NO_IMAGE] * len(rows)
        with self._device.current():
            for slot, row in enumerate(rows):
                for name, tensor in row.outputs.items():
                    self._device.copy(tensor, self._gathered[name][slot])
        unused = [None] * (self._deployed.max_batch - len(rows))
        letterboxes = [*(row.letterbox for row in rows), *unused]
        found = self._postprocess.objects(self._gathered, letterboxes, [row.options for row in rows])
        spent_ns = (perf_counter_ns() - started) // len(found)
        # What DALI and the engine took, the server's own figures tell: they are not ours to time.
        return [
            replace(found[slot], stage_ns={"decode": row.intake_ns, "postprocess": spent_ns})
            if slot in found
            else _NO_IMAGE
            for slot, row in enumerate(rows)
        ]

    def _respond(self, answers: Sequence[Detections | ImageError]) -> Any:
        for answer in answers:
            if isinstance(answer, Detections):
                self._metrics.observe(answer.stage_ns)
        packed: Mapping[str, npt.NDArray[Any]] = pack_answers(answers, self._task)
        return response_of({name: array for name, array in packed.items() if name not in ("image_hw", "problem")})

    def _refuse(self, error: VisionfastError) -> Any:
        self._metrics.count(kind_of(error))
        return refused(error)
