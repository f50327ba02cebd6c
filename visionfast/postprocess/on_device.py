"""`postprocess` on a GPU: the kernels on the engine's own tensors, a small copy to the host, and `Detections` there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast.cuda import Device
from visionfast.errors import IncompatibleEngineError
from visionfast.postprocess.detections import postprocess
from visionfast.postprocess.kernels.detections import DetectionKernels
from visionfast.postprocess.kernels.layout import found_shape, read_found
from visionfast.postprocess.packed import pixel_counts, unpack
from visionfast.results import Detections
from visionfast.types import Letterbox, ModelSpec, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["DevicePostprocess"]

MASK_WORDS_PER_IMAGE = 1 << 17
"""Of 32 mask pixels: 512 KiB, four million pixels of boxes, go with every image's answer. More take another round."""


class DevicePostprocess:
    """Gives what `postprocess.postprocess` gives, for all slots of a batch.

    Args:
        spec: of the model.
        outputs: of its engine.
        device: where the engine's tensors are.
        options: of `postprocess`, checked already.
        mask_words: that come with a batch's answer without another round; default: `MASK_WORDS_PER_IMAGE` a slot.

    Raises:
        IncompatibleEngineError: the engine's outputs are not those of this task.
    """

    def __init__(
        self,
        spec: ModelSpec,
        outputs: Sequence[TensorSpec],
        device: Device,
        *,
        options: Mapping[str, Any],
        mask_words: int | None = None,
    ) -> None:
        named = {output.name: output for output in outputs}
        predictions, prototypes = named.get("predictions"), named.get("prototypes")
        if (
            predictions is None
            or predictions.dtype != "float32"
            or (spec.task == "segment") != (prototypes is not None)
        ):
            shown = ", ".join(f"{o.name} {o.dtype}" for o in outputs)
            raise IncompatibleEngineError(
                f"{spec.name}: expected the outputs predictions float32"
                f"{' and prototypes' if spec.task == 'segment' else ''}, got {shown}; build the engine again"
            )
        batch, rows, anchors = predictions.shape
        max_det = options["max_det"]
        self._device = device
        self._options = options
        self._outputs: Mapping[str, torch.Tensor] = {}
        self._detections = DetectionKernels(
            batch=batch,
            anchors=anchors,
            coefficients=rows - 4 - options["num_classes"],
            device=device.where,
            **options,
        )
        self._found = device.pinned(found_shape(batch, max_det), "int32")
        self._masks = None
        if prototypes is not None:
            self._masks = _Masks(spec, predictions, prototypes, device, options, mask_words)

    def enqueue(self, outputs: Mapping[str, torch.Tensor], placement: torch.Tensor) -> None:
        """Puts the kernels and the copies of their results on the stream: what a graph may hold.

        Args:
            outputs: the engine's, by name; they are read again by `read` where masks take another round.
            placement: (B, 8) float32 on the device, see `kernels.layout`.
        """
        self._outputs = outputs
        self._detections.enqueue(outputs["predictions"], placement)
        self._device.copy(self._detections.found, self._found)
        if self._masks is not None:
            self._masks.enqueue(outputs, self._detections.found, placement)

    def read(self, letterboxes: Sequence[Letterbox | None], *, max_det: int | None = None) -> dict[int, Detections]:
        """The answers, once the device was synchronised: by slot, arrays of their own.

        Args:
            letterboxes: each slot's, as `placement` had them; a slot of `None` has no answer.
            max_det: objects at most, where that is fewer than the option's.
        """
        rows = self._found.numpy()
        if max_det is not None:
            # They are sorted by confidence: the first ones are those that would have been found.
            rows[:, 0, 0] = np.minimum(rows[:, 0, 0], min(max_det, rows.shape[1]))
        words = None if self._masks is None else self._masks.words()
        answers = {}
        for slot, letterbox in enumerate(letterboxes):
            if letterbox is None:
                continue
            if self._masks is not None and max(letterbox.image_hw) > self._masks.longest_side:
                answers[slot] = self._on_host(slot, letterbox, max_det)
                continue
            found = read_found(rows[slot])
            detections = Detections(
                xyxy=found.xyxy, confidence=found.confidence, class_id=found.class_id, image_hw=letterbox.image_hw
            )
            if self._masks is not None and words is not None:
                detections = self._masks.of_slot(slot, words, detections)
            answers[slot] = detections
        return answers

    def _on_host(self, slot: int, letterbox: Letterbox, max_det: int | None) -> Detections:
        """The definition, for a picture too long for the kernels' 32-bit positions."""
        tensors = {name: tensor[slot].cpu().numpy() for name, tensor in self._outputs.items()}
        options = {**self._options, "max_det": self._options["max_det"] if max_det is None else max_det}
        return postprocess(tensors["predictions"], letterbox, prototypes=tensors.get("prototypes"), **options)


class _Masks:
    """The masks' half: kernels, pinned memory for their words, and the rounds that large ones take."""

    def __init__(
        self,
        spec: ModelSpec,
        predictions: TensorSpec,
        prototypes: TensorSpec,
        device: Device,
        options: Mapping[str, Any],
        words: int | None,
    ) -> None:
        from visionfast.postprocess.kernels.masks import MaskKernels

        batch, channels, plane_h, plane_w = prototypes.shape
        self._capacity = words or batch * MASK_WORDS_PER_IMAGE
        self._device = device
        self._kernels = MaskKernels(
            batch=batch,
            num_classes=options["num_classes"],
            anchors=predictions.shape[2],
            prototypes_shape=(channels, plane_h, plane_w),
            size_hw=spec.preprocess.size_hw,
            max_det=options["max_det"],
            capacity_words=self._capacity,
            device=device.where,
        )
        self._offsets = device.pinned((batch, options["max_det"] + 1), "int64")
        self._words = device.pinned((self._capacity,), "int32")
        self._read: tuple[torch.Tensor, ...] = ()

    def enqueue(self, outputs: Mapping[str, torch.Tensor], found: torch.Tensor, placement: torch.Tensor) -> None:
        self._read = (outputs["predictions"], outputs["prototypes"], found, placement)
        self._kernels.enqueue(*self._read)
        self._device.copy(self._kernels.offsets, self._offsets)
        self._device.copy(self._kernels.words, self._words)

    def words(self) -> npt.NDArray[np.int32]:
        """All of the batch's words: one round came with the answer, each further one is waited for."""
        total = int(self._offsets[-1, -1])
        if total <= self._capacity:
            words: npt.NDArray[np.int32] = self._words.numpy()[:total]
            return words
        words = np.empty(total, np.int32)
        for first in range(0, total, self._capacity):
            if first:
                self._kernels.enqueue(*self._read, first_word=first)
                self._device.copy(self._kernels.words, self._words)
                self._device.synchronize()
            window = words[first : first + self._capacity]
            window[:] = self._words.numpy()[: len(window)]
        return words

    @property
    def longest_side(self) -> int:
        """Of an original image, pixels."""
        return self._kernels.longest_side

    def of_slot(self, slot: int, words: npt.NDArray[np.int32], detections: Detections) -> Detections:
        """The slot's objects with their masks; as `postprocess` does: no pixel in its mask, no object."""
        offsets = self._offsets.numpy()[slot][: len(detections) + 1]
        masks = unpack(words, offsets, detections.xyxy, detections.image_hw)
        visible = np.flatnonzero(pixel_counts(words, offsets))
        with_masks = replace(detections, mask=masks)
        return with_masks if len(visible) == len(detections) else with_masks[visible]
