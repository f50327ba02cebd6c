"""Images into the slots of a GPU engine's input, by the shortest way that each of them can take.

Encoded images that DALI decodes as the definition does go to the GPU as they are, and are decoded and letterboxed
there. All others, and arrays, are decoded on the CPU, copied over as pixels, and letterboxed by the kernel: the same
numbers that the CPU's way feeds, to the bit. Frames that are on the GPU already are read where they lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast.cuda import Device
from visionfast.errors import ImageError, ImageFormatError, OptionError, ShapeError
from visionfast.preprocess.decode import read_image_file
from visionfast.preprocess.kernels import DeviceLetterbox
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.nv12 import Nv12Frame
from visionfast.sessions import ImageSource, pixels_of, source_name
from visionfast.types import Letterbox, PreprocessSpec

if TYPE_CHECKING:
    import torch

    from visionfast.preprocess.dali import DaliPreprocessor

__all__ = ["Intake", "is_on_device"]


class Intake:
    """Fills a batch's slots.

    Args:
        spec: of the preprocessing.
        device: whose stream everything is put on.
        slots: (B, 3, h, w), the engine's input.
        limits: what an image may claim.
        dali: on the same stream, in the slots' dtype; closed with the intake. `None`: every image is decoded on the
            CPU.
    """

    def __init__(
        self,
        spec: PreprocessSpec,
        device: Device,
        slots: torch.Tensor,
        *,
        limits: DecodeLimits,
        dali: DaliPreprocessor | None = None,
    ) -> None:
        import torch

        self._device = device
        self._slots = slots
        self._limits = limits
        self._dali = dali
        self._letterbox = DeviceLetterbox(spec, device=device.where)
        self._frames = _FrameUpload(self._letterbox, device, len(slots))
        self._damage: Callable[[], dict[int, ImageError]] = _no_damage
        # The kernel is compiled and loaded now, not when the first image waits for it.
        self._letterbox.rgb(slots.new_zeros((1, 1, 3), dtype=torch.uint8), slots[0])
        slots[0].zero_()

    def place(
        self, images: Sequence[ImageSource], *, first: int, raises: bool, stage_ns: Sequence[dict[str, int]]
    ) -> list[Letterbox | ImageError]:
        """Puts every image's way into its slot on the stream and returns at once.

        Args:
            images: at most B.
            first: the number of the first one, for the errors' names.
            raises: raise the first error.
            stage_ns: of each image; the stages' times are added. On DALI's way that is the time of asking for it.

        Returns:
            For each image where it lies in its slot, or what is wrong with it.
        """
        self._damage = _no_damage
        placed = {} if self._dali is None else self._by_dali(self._dali, images, first, stage_ns)
        answers = []
        for slot, source in enumerate(images):
            answer = placed.get(slot, source)
            if not isinstance(answer, (Letterbox, ImageError)):
                try:
                    answer = self._by_cpu(answer, slot, source_name(source, first + slot), stage_ns[slot])
                except ImageError as error:
                    answer = error
            if raises and isinstance(answer, ImageError):
                damage = self.damage()  # of an image before this one, it comes first
                raise damage[min(damage)] if damage and min(damage) < slot else answer
            answers.append(answer)
        return answers

    def damage(self) -> dict[int, ImageError]:
        """Slots whose image turned out to be damaged inside: asked once the rest is on the stream."""
        return self._damage()

    def close(self) -> None:
        if self._dali is not None:
            self._dali.close()

    def _by_cpu(self, source: ImageSource, slot: int, name: str | None, stage_ns: dict[str, int]) -> Letterbox:
        started = perf_counter_ns()
        if is_on_device(source):
            letterbox = self._in_place(source, slot, name or "frame")
            stage_ns["preprocess"] = perf_counter_ns() - started
            return letterbox
        pixels = pixels_of(source, limits=self._limits, name=name)
        stage_ns["decode"] = stage_ns.get("decode", 0) + (decoded := perf_counter_ns()) - started
        letterbox = self._frames.write(pixels, slot, self._slots[slot])
        stage_ns["preprocess"] = perf_counter_ns() - decoded
        return letterbox

    def _in_place(self, source: Any, slot: int, name: str) -> Letterbox:
        """A frame on the device: read by the kernel where it lies, rows as far apart as they are."""
        out = self._slots[slot]
        try:
            if isinstance(source, Nv12Frame):
                if not is_on_device(source.uv):
                    kind = type(source.uv).__name__
                    raise ImageFormatError(name, f"expected both planes as tensors on the device, got uv as {kind}")
                self._limits.check_pixels((*source.y.shape, 0, 0)[:2], name)
                return self._letterbox.nv12(
                    source.y, source.uv, out, matrix=source.matrix, full_range=source.full_range
                )
            self._limits.check_pixels((*source.shape, 0, 0)[:2], name)
            return self._letterbox.rgb(source, out)
        except (ShapeError, OptionError) as error:
            raise ImageFormatError(name, str(error)) from error

    def _by_dali(
        self, dali: DaliPreprocessor, images: Sequence[ImageSource], first: int, stage_ns: Sequence[dict[str, int]]
    ) -> dict[int, Letterbox | ImageError | bytes]:
        """By slot, of the encoded images: where it lies, what is wrong, or its bytes for the CPU to decode."""
        from visionfast.preprocess.dali import DaliRow

        started = perf_counter_ns()
        answers: dict[int, Letterbox | ImageError | bytes] = {}
        encoded: list[bytes] = []
        slots: list[int] = []
        names: list[str] = []
        for slot, source in enumerate(images):
            if not isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview)):
                continue  # pixels already
            name = source_name(source, first + slot) or str(source)
            try:
                if isinstance(source, (bytes, bytearray, memoryview)):
                    data = bytes(source)
                    self._limits.check_bytes(len(data), name)
                else:
                    data = read_image_file(source, limits=self._limits, name=name)
            except ImageError as error:
                answers[slot] = error
                continue
            encoded.append(data)
            slots.append(slot)
            names.append(name)
        if not encoded:
            return answers
        batch = dali.run(encoded, names=names)
        self._copy_rows(batch.runs, slots)
        for answer, slot, data in zip(batch.answers, slots, encoded, strict=True):
            if isinstance(answer, DaliRow):
                answers[slot] = answer.letterbox
            else:
                answers[slot] = answer if isinstance(answer, ImageError) else data
        self._damage = lambda: {slots[index]: error for index, error in batch.damage().items()}
        share = (perf_counter_ns() - started) // len(encoded)
        for slot in slots:
            stage_ns[slot]["decode"] = share
        return answers

    def _copy_rows(self, runs: Sequence[Any], slots: Sequence[int]) -> None:
        """DALI's tensors into the engine's input, whose address a captured graph holds: one copy on the device."""
        from torch.utils.dlpack import from_dlpack

        for run in runs:
            rows = from_dlpack(run.tensor)  # (n, 3, h, w), DALI's own memory
            targets = [slots[index] for index in run.indices]
            if targets == list(range(targets[0], targets[0] + len(targets))):
                self._device.copy(rows, self._slots[targets[0] : targets[0] + len(targets)])
                continue
            for row, slot in zip(rows, targets, strict=True):
                self._device.copy(row, self._slots[slot])


def _no_damage() -> dict[int, ImageError]:
    return {}


def is_on_device(source: ImageSource) -> bool:
    """Whether an image is tensors, not arrays or bytes."""
    import torch

    return isinstance(source.y if isinstance(source, Nv12Frame) else source, torch.Tensor)


class _FrameUpload:
    """For each slot of a batch a pinned buffer and one on the device, which grow to the largest frame seen.

    A slot's buffers are read by the device until it was synchronised: a slot is written once a batch.
    """

    def __init__(self, letterbox: DeviceLetterbox, device: Device, batch: int) -> None:
        self._device = device
        self._letterbox = letterbox
        self._pinned: list[Any] = [None] * batch
        self._on_device: list[Any] = [None] * batch

    def write(self, pixels: npt.NDArray[np.uint8], slot: int, out: torch.Tensor) -> Letterbox:
        """Letterboxes `pixels` (H, W, 3) u8 into `out`, the slot's part of the engine's input; returns at once."""
        if self._pinned[slot] is None or self._pinned[slot].numel() < pixels.size:
            self._pinned[slot] = self._device.pinned((pixels.size,), "uint8")
            self._on_device[slot] = self._device.empty((pixels.size,), "uint8")
        pinned = self._pinned[slot][: pixels.size].view(pixels.shape)
        frame = self._on_device[slot][: pixels.size].view(pixels.shape)
        np.copyto(pinned.numpy(), pixels)
        self._device.copy(pinned, frame)
        return self._letterbox.rgb(frame, out)
