"""The GPU's way: one stream from the letterboxed tensor to the boxes, replayed as one CUDA graph.

Everything is allocated when the session opens. A batch is: each image into its slot of the engine's input; then, as
one graph, where the images lie (a few numbers), the engine, the post-processing kernels and the copy of their small
answer into pinned memory; one synchronisation; and what the caller gets is copied out of that memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from visionfast.backends import DeviceEngine
from visionfast.errors import BackendError, ImageError
from visionfast.postprocess.by_options import PostprocessByOptions
from visionfast.postprocess.kernels.layout import COLUMNS, placement
from visionfast.postprocess.on_device import DevicePostprocess
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.sessions import ImageSource, Owner
from visionfast.sessions.intake import Intake, is_on_device
from visionfast.types import Letterbox, ModelSpec

if TYPE_CHECKING:
    from visionfast.preprocess.dali import DaliPreprocessor

__all__ = ["CudaSession"]


class CudaSession:
    """See `visionfast.sessions.Session`.

    Args:
        spec: of the model.
        engine: of its graph, on the device that the session works on; closed with the session.
        options: of `postprocess`, checked already.
        limits: what an image may claim.
        dali: decodes on the device's stream, in the engine's input's dtype; closed with the session. `None`: images are
            decoded on the CPU.
        graph: replay one CUDA graph (`True`), or launch each part (`False`); `None`: a graph where the engine can be
            captured. The answers are the same to the bit.

    Raises:
        BackendError: the runtime failed, or `graph=True` and the engine cannot be captured. The engine is closed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        engine: DeviceEngine,
        *,
        options: Mapping[str, Any],
        limits: DecodeLimits,
        dali: DaliPreprocessor | None = None,
        graph: bool | None = None,
    ) -> None:
        self._engine = engine
        self._device = device = engine.device
        self._spec, self._options = spec, options
        self._intake: Intake | None = None
        self._owner = Owner()
        (image,) = engine.inputs  # (B, 3, h, w)
        self.batch = image.shape[0]
        try:
            with device.current():
                self._tensors = {t.name: device.empty(t.shape, t.dtype) for t in (*engine.inputs, *engine.outputs)}
                self._input = self._tensors[image.name].zero_()
                engine.bind(self._tensors)
                self._placement = device.pinned((self.batch, COLUMNS), "float32")
                self._placement_on_device = device.empty((self.batch, COLUMNS), "float32")
                self._intake = Intake(spec.preprocess, device, self._input, limits=limits, dali=dali)
                self._postprocess = DevicePostprocess(spec, engine.outputs, device, options=options)
                self._by_options: PostprocessByOptions | None = None
                self._placed: list[Letterbox | None] = []
                # Once as it is: kernels are compiled now, and libraries set up what they set up once.
                self._work()
                device.synchronize()
                self._run = self._replayable(graph)
        except BaseException:
            self.close()
            raise

    def answer(self, images: Sequence[ImageSource], *, first: int, raises: bool) -> list[Detections | ImageError]:
        """As `Session.answer`."""
        with self._owner.asking():
            try:
                if any(is_on_device(source) for source in images):
                    self._device.follow()
                with self._device.current():
                    return self._answer(images, first, raises)
            except BaseException:
                # What is still on the stream reads buffers that the next call writes.
                with contextlib.suppress(Exception):
                    self._device.synchronize()
                raise

    def objects_by(self, options: Mapping[int, Mapping[str, Any]]) -> dict[int, Detections]:
        """Slots of the last batch answered again, by other options of `postprocess`: what the engine gave is still on
        the device. By slot, those that hold an image; without `stage_ns`.

        Args:
            options: slot → its options, checked, each of them given.
        """
        with self._owner.asking(), self._device.current():
            if self._by_options is None:
                self._by_options = PostprocessByOptions(
                    self._spec, self._engine.outputs, self._device, options=self._options
                )
            some = [placed if slot in options else None for slot, placed in enumerate(self._placed)]
            return self._by_options.objects(self._tensors, some, [options.get(slot, {}) for slot in range(len(some))])

    def raw(self) -> dict[str, npt.NDArray[Any]]:
        with self._owner.asking(), self._device.current():
            # A copy to pageable memory waits for itself.
            return {spec.name: self._tensors[spec.name].cpu().numpy().copy() for spec in self._engine.outputs}

    def close(self) -> None:
        with self._owner.closing() as first:
            if not first:
                return
            with contextlib.suppress(Exception):
                self._device.synchronize()
            # The graph holds the buffers' addresses, the engine its own memory: both go before the buffers.
            self._run = self._work
            self._engine.close()
            if self._intake is not None:
                self._intake.close()
            self._tensors = {}

    def _work(self) -> None:
        """What follows the letterbox, put on the stream."""
        self._device.copy(self._placement, self._placement_on_device)
        self._engine.enqueue()
        self._postprocess.enqueue(self._tensors, self._placement_on_device)

    def _replayable(self, graph: bool | None) -> Callable[[], None]:
        if graph is False:
            return self._work
        if not self._engine.can_be_captured():
            if graph:
                raise BackendError("graph: this engine's runs cannot be captured in a CUDA graph; leave the graph off")
            return self._work
        return self._device.capture(self._work)

    def _answer(self, images: Sequence[ImageSource], first: int, raises: bool) -> list[Detections | ImageError]:
        assert self._intake is not None
        stages: list[dict[str, int]] = [{} for _ in images]
        placed = self._intake.place(images, first=first, raises=raises, stage_ns=stages)
        letterboxes = [place if isinstance(place, Letterbox) else None for place in placed]
        letterboxes += [None] * (self.batch - len(images))
        self._placed = letterboxes
        answers: dict[int, Detections | ImageError] = {
            slot: place for slot, place in enumerate(placed) if isinstance(place, ImageError)
        }
        if count := len(images) - len(answers):
            started = perf_counter_ns()
            placement(letterboxes, self._placement.numpy())
            self._run()
            damage = self._intake.damage()  # while the device works
            self._device.synchronize()
            done = perf_counter_ns()
            found = self._postprocess.read(letterboxes)
            shared = {"engine": (done - started) // count, "postprocess": (perf_counter_ns() - done) // count}
            for slot, detections in found.items():
                if slot in damage and raises:
                    raise damage[slot]
                answers[slot] = damage.get(slot) or replace(detections, stage_ns=stages[slot] | shared)
        return [answers[slot] for slot in range(len(images))]
