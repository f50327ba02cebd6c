"""What a prompt decoder gave, on a GPU: logits stay there, and scores, bits and counts come to the host.

The kernels write a bit for each pixel of a mask, and the host makes run lengths of them (`postprocess.packed`): a
mask of 1920 × 1080 pixels is 255 KiB on its way instead of the 8 MiB that its enlarged logits would be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.postprocess.enlarge import Taps, enlarge_taps
from visionfast.postprocess.kernels.enlarge import TAP_ROWS, EnlargeKernels, TapTable, write_taps
from visionfast.postprocess.masks import InstanceMasks
from visionfast.postprocess.packed import unpack
from visionfast.stream import Turns, Upload
from visionfast.types import Letterbox, Resize

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceDecoded", "DeviceMasks"]

CAPACITY_WORDS = 1 << 19
"""Of 32 mask pixels: 2 MiB, eight masks of 1920 × 1080, come to the host in one round."""
_MOST_MASKS = 256  # of one round: those of 64 prompts
_MOST_LOGITS = 16  # masks whose logits come to the host in one round, 4 MiB


class DeviceMasks:
    """Reads masks off logits that are on a device. Safe for several threads: each call takes a turn.

    Its buffers are allocated once, but for the table of how an image is enlarged, which grows to the largest image.

    Args:
        turns: at the device's stream.
        plane_hw: of a mask's logits.
        dtype: of the logits, `float32` or `float16`.
        resize: how images come into the network's input, `PreprocessSpec.resize`.
        capacity_words: that come to the host in one round; default: `CAPACITY_WORDS`.
    """

    def __init__(
        self, turns: Turns, *, plane_hw: tuple[int, int], dtype: str, resize: Resize, capacity_words: int | None = None
    ) -> None:
        capacity_words = capacity_words or CAPACITY_WORDS
        self._turns = turns
        self._device = device = turns.device
        self._plane_hw = plane_hw
        self._resize: Resize = resize
        with device.current():
            self._kernels = EnlargeKernels(
                plane_hw=plane_hw, capacity_words=capacity_words, most_masks=_MOST_MASKS, device=device.where
            )
            self._chosen = Upload(device, "int32", _MOST_MASKS)
            self._taps = Upload(device, "int32")
        self._words = device.pinned((capacity_words,), "int32")
        self._counts = device.pinned((_MOST_MASKS, 2), "int64")
        self._logits = device.pinned((_MOST_LOGITS, *plane_hw), dtype)
        self._table: tuple[Letterbox | None, TapTable] | None = None  # of the image that was asked for last

    def logits(self, planes: torch.Tensor, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """(K, h, w) float32 on the host, of the chosen ones of `planes` (M, h, w)."""
        _check_chosen(chosen, len(planes))
        gathered = np.empty((len(chosen), *self._plane_hw), np.float32)
        with self._turns.take():
            for begin in range(0, len(chosen), _MOST_LOGITS):
                some = chosen[begin : begin + _MOST_LOGITS].tolist()
                for slot, plane in enumerate(some):
                    self._device.copy(planes[plane], self._logits[slot])
                self._device.synchronize()
                gathered[begin : begin + len(some)] = self._logits.numpy()[: len(some)]
        return gathered

    def counts(
        self, planes: torch.Tensor, chosen: npt.NDArray[np.int64], delta: float, placed: Letterbox | None
    ) -> npt.NDArray[np.int64]:
        """(K, 2) int64: pixels above `delta` and above `-delta` of each chosen mask; with `placed`, enlarged."""
        _check_chosen(chosen, len(planes))
        counted = np.empty((len(chosen), 2), np.int64)
        with self._turns.take():
            table = self._enlargement(placed)
            for begin in range(0, len(chosen), _MOST_MASKS):
                some = self._chosen.write(chosen[begin : begin + _MOST_MASKS])
                self._kernels.count(planes, some, table, delta=delta)
                self._device.copy(self._kernels.counts[: len(some)], self._counts[: len(some)])
                self._device.synchronize()
                counted[begin : begin + len(some)] = self._counts.numpy()[: len(some)]
        return counted

    def masks(self, planes: torch.Tensor, chosen: npt.NDArray[np.int64], placed: Letterbox) -> InstanceMasks:
        """The chosen masks at the image's resolution, in rounds of as many as fit."""
        _check_chosen(chosen, len(planes))
        height, width = placed.image_hw
        words_of_one = width * -(-height // 32)
        step = min(_MOST_MASKS, max(1, len(self._words) // words_of_one))
        counts: list[bytes] = []
        for begin in range(0, len(chosen), step):
            some = chosen[begin : begin + step]
            words = self._packed(planes, some, placed, words_of_one)
            offsets = np.arange(len(some) + 1, dtype=np.int64) * words_of_one
            whole = np.tile(np.array([[0, 0, width, height]], np.float32), (len(some), 1))
            counts += unpack(words, offsets, whole, placed.image_hw).counts  # while others take their turns
        return InstanceMasks(tuple(counts), placed.image_hw)

    def _packed(
        self, planes: torch.Tensor, chosen: npt.NDArray[np.int64], placed: Letterbox, words_of_one: int
    ) -> npt.NDArray[np.int32]:
        """All words of the chosen masks; where not even one mask fits in a round, it comes in several."""
        height, width = placed.image_hw
        words = np.empty(len(chosen) * words_of_one, np.int32)
        pinned: npt.NDArray[np.int32] = self._words.numpy()
        with self._turns.take():
            table, on_device = self._enlargement(placed), self._chosen.write(chosen)
            begin = first = 0
            while begin < len(chosen) * width:
                end = self._kernels.pack(planes, on_device, table, begin=begin)
                count = (end - begin) * -(-height // 32)
                self._device.copy(self._kernels.words[:count], self._words[:count])
                self._device.synchronize()
                words[first : first + count] = pinned[:count]
                begin, first = end, first + count
        return words

    def _enlargement(self, placed: Letterbox | None) -> TapTable:
        """The table on the device; `None`: of the logits as they are."""
        if self._table is not None and self._table[0] == placed:
            return self._table[1]
        if placed is None:
            image_hw = self._plane_hw
            rows, columns = (_as_they_are(side) for side in image_hw)
        else:
            image_hw = placed.image_hw
            rows, columns = enlarge_taps(self._plane_hw, placed, self._resize)
        self._table = None  # it is written over
        shape = (TAP_ROWS, sum(image_hw))
        used = write_taps(rows, columns, self._taps.array(shape))
        self._table = (placed, TapTable(self._taps.send(shape), image_hw, used))
        return self._table[1]


class DeviceDecoded:
    """See `visionfast.sessions.prompts.Decoded`.

    Args:
        logits: (P, C, h, w) on the device, of its own: no live buffer.
        scores: (P, C) float32 on the host.
        reader: of such logits.
    """

    def __init__(self, logits: torch.Tensor, scores: npt.NDArray[np.float32], reader: DeviceMasks) -> None:
        self.scores = scores
        self._planes = logits.flatten(0, 1)  # (P · C, h, w)
        self._reader = reader

    def logits(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """As `Decoded.logits`."""
        return self._reader.logits(self._planes, chosen)

    def stability(
        self, chosen: npt.NDArray[np.int64], delta: float, placed: Letterbox | None = None
    ) -> npt.NDArray[np.float32]:
        """As `Decoded.stability`."""
        above, union = self._reader.counts(self._planes, chosen, delta, placed).astype(np.float32).T
        stability: npt.NDArray[np.float32] = np.full_like(above, 1 if placed is None else np.nan)
        np.divide(above, union, out=stability, where=union > 0)
        return stability

    def masks(self, chosen: npt.NDArray[np.int64], placed: Letterbox) -> InstanceMasks:
        """As `Decoded.masks`."""
        return self._reader.masks(self._planes, chosen, placed)


def _as_they_are(side: int) -> Taps:
    """Each logit is a pixel; the second tap has no weight, but for the last pixel, whose first has none."""
    pixel = np.arange(side)
    first = np.minimum(pixel, side - 2)
    return Taps(first.astype(np.int32), (first[:, None] + (0, 1) == pixel[:, None]).astype(np.float32))


def _check_chosen(chosen: npt.NDArray[np.int64], masks: int) -> None:
    """A kernel reads wherever a number leads it, and what is not the device's to read ends its context."""
    if chosen.ndim != 1 or (len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < masks):
        raise ShapeError(f"chosen: expected (K,) numbers of {masks} masks, got {chosen.ravel()[:4].tolist()}")
