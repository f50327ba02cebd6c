"""`DevicePostprocess` for requests that each have options of their own: one set of kernels for each set of options."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from visionfast.cuda import Device
from visionfast.postprocess.kernels.layout import COLUMNS, placement
from visionfast.postprocess.on_device import DevicePostprocess
from visionfast.results import Detections
from visionfast.types import Letterbox, ModelSpec, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["PostprocessByOptions"]

_KEPT = 4  # sets of options: each has buffers of its own


class PostprocessByOptions:
    """Gives what `postprocess.postprocess` gives with each slot's own options.

    Kernels are compiled for a number of objects, and `max_det` is any client's to choose: so they are compiled for the
    deployed one or a power of two, and the most confident objects are given out. The sets of options that were asked
    for last stay ready; a new one costs its buffers' allocation.

    Args:
        spec: of the model.
        outputs: of its engine, with a batch of B.
        device: where the engine's tensors are.
        options: of `postprocess`, checked: those that most requests have.
    """

    def __init__(
        self, spec: ModelSpec, outputs: Sequence[TensorSpec], device: Device, *, options: Mapping[str, Any]
    ) -> None:
        self._spec, self._outputs, self._device = spec, tuple(outputs), device
        self._usual = options["max_det"]
        self._anchors = next(output.shape[2] for output in outputs if output.name == "predictions")
        self._batch = outputs[0].shape[0]
        self._placement = device.pinned((self._batch, COLUMNS), "float32")
        self._placement_on_device = device.empty((self._batch, COLUMNS), "float32")
        self._ready: OrderedDict[Hashable, DevicePostprocess] = OrderedDict()
        with device.current():
            self._of(options)

    def objects(
        self,
        tensors: Mapping[str, torch.Tensor],
        letterboxes: Sequence[Letterbox | None],
        options: Sequence[Mapping[str, Any]],
    ) -> dict[int, Detections]:
        """The objects in each slot that has an image; waits for the device once for each set of options.

        Args:
            tensors: the engine's outputs, by name, (B, …) on the device.
            letterboxes: each slot's, at most B; `None`: there is no image in it.
            options: each slot's, checked.
        """
        groups: dict[Hashable, list[int]] = {}
        for slot, letterbox in enumerate(letterboxes):
            if letterbox is not None:
                groups.setdefault((*self._key(options[slot]), options[slot]["max_det"]), []).append(slot)
        found: dict[int, Detections] = {}
        with self._device.current():
            for slots in groups.values():
                some = [letterbox if slot in slots else None for slot, letterbox in enumerate(letterboxes)]
                placement(some, self._placement.numpy())
                self._device.copy(self._placement, self._placement_on_device)
                asked = options[slots[0]]
                postprocess = self._of(asked)
                postprocess.enqueue(tensors, self._placement_on_device)
                self._device.synchronize()
                found |= postprocess.read(some, max_det=asked["max_det"])
        return found

    def _of(self, options: Mapping[str, Any]) -> DevicePostprocess:
        key = self._key(options)
        if key not in self._ready:
            if len(self._ready) == _KEPT:
                self._ready.popitem(last=False)
            compiled_for = {**options, "max_det": self._capacity(options["max_det"])}
            self._ready[key] = DevicePostprocess(self._spec, self._outputs, self._device, options=compiled_for)
        self._ready.move_to_end(key)
        return self._ready[key]

    def _key(self, options: Mapping[str, Any]) -> tuple[Hashable, ...]:
        classes = None if options["classes"] is None else tuple(sorted(set(options["classes"])))
        capacity = self._capacity(options["max_det"])
        return options["conf"], options["iou"], classes, options["class_agnostic"], capacity

    def _capacity(self, max_det: int) -> int:
        """Objects that kernels are compiled for: no more than there are anchors."""
        if max_det <= self._usual:
            return int(self._usual)
        return int(min(1 << (max_det - 1).bit_length(), max(self._anchors, self._usual)))
