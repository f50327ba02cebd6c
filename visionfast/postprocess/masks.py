"""Instance masks as run lengths: N full-resolution masks in a few kilobytes.

COCO's run-length encoding, as pycocotools has it: pixels in column-major order, the lengths of alternating
runs of 0 and 1, the first of 0, then a compressed byte string. Decoding prototypes into such masks is
`visionfast.postprocess.prototypes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError

__all__ = ["InstanceMasks", "counts_from_runs", "mask_iou", "run_lengths"]


@dataclass(frozen=True, slots=True)
class InstanceMasks:
    """N instance masks of one image, at its original resolution.

    Attributes:
        counts: for each mask its compressed COCO run lengths, exactly as `pycocotools.mask.encode` writes
            them.
        image_hw: the original image, pixels.
    """

    counts: tuple[bytes, ...] = field(repr=False)
    image_hw: tuple[int, int]

    @classmethod
    def from_dense(cls, masks: npt.NDArray[np.bool_]) -> InstanceMasks:
        """From (N, H, W) bool (or integers, where everything but 0 is inside); H and W at least 1.

        Raises:
            ShapeError: not three axes, or no pixels.
        """
        if masks.ndim != 3 or 0 in masks.shape[1:]:
            raise ShapeError(f"masks: expected (N, H, W) with H, W >= 1, got {masks.shape}")
        counts = tuple(_coco_mask().encode(np.asfortranarray(m != 0, np.uint8))["counts"] for m in masks)
        return cls(counts, (masks.shape[1], masks.shape[2]))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: slice | npt.NDArray[Any] | Sequence[int] | Sequence[bool]) -> InstanceMasks:
        """The selected masks; `index` is a slice, a boolean mask or positions (of one mask: `masks[[i]]`)."""
        chosen = np.arange(len(self))[index if isinstance(index, slice) else _as_index(index)]
        return InstanceMasks(tuple(self.counts[i] for i in chosen), self.image_hw)

    def dense(self) -> npt.NDArray[np.bool_]:
        """(N, H, W) bool: N × H × W bytes, so for large pictures rather ask for one mask at a time."""
        planes = np.zeros((len(self), *self.image_hw), np.bool_)
        for plane, counts in zip(planes, self.counts, strict=True):
            plane[:] = _plane(counts, self.image_hw)
        return planes

    def rle(self) -> list[dict[str, Any]]:
        """For each mask `{"size": [H, W], "counts": str}`, which `json` and pycocotools both take."""
        return [{"size": rle["size"], "counts": rle["counts"].decode("ascii")} for rle in self._coco()]

    def area(self) -> npt.NDArray[np.int64]:
        """(N,) int64, pixels."""
        # Not pycocotools.mask.area: 2.0.11 counts the masks of one call in 8 bits and fails from 256 on.
        return np.array([run_lengths(counts)[1::2].sum() for counts in self.counts], np.int64)

    def xywh(self) -> npt.NDArray[np.int64]:
        """(N, 4) int64: left, top, width, height of each mask's own extent, pixels; 0 for an empty one."""
        return np.asarray(_coco_mask().toBbox(self._coco()), np.int64).reshape(len(self), 4)

    def polygons(self) -> list[list[npt.NDArray[np.int32]]]:
        """For each mask its outer contours, each (K, 2) int32 x, y at pixel centres, K ≥ 3.

        Holes are not told apart, and parts of one or two pixels have no polygon. One dense plane at a time.
        """
        import cv2

        found = []
        for counts, (left, top, width, height) in zip(self.counts, self.xywh().tolist(), strict=True):
            plane = _plane(counts, self.image_hw)
            part = plane[top : top + height, left : left + width].astype(np.uint8, order="C")
            contours = (
                cv2.findContours(part, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top))[0]
                if part.size
                else ()
            )
            found.append([contour.reshape(-1, 2).astype(np.int32) for contour in contours if len(contour) >= 3])
        return found

    def _coco(self) -> list[dict[str, Any]]:
        return [{"size": list(self.image_hw), "counts": counts} for counts in self.counts]


def _coco_mask() -> Any:
    """pycocotools, once masks are there: who finds boxes alone does without it."""
    import pycocotools.mask

    return pycocotools.mask


def _as_index(index: Any) -> npt.NDArray[Any]:
    array = np.asarray(index)
    return array.astype(np.int64) if array.size == 0 else np.atleast_1d(array)


def mask_iou(a: InstanceMasks, b: InstanceMasks) -> npt.NDArray[np.float64]:
    """Intersection over union of each of N masks with each of M, counted on the runs.

    Returns:
        (N, M) float64; 0 where both masks are empty.

    Raises:
        ShapeError: the masks belong to images of different size.
    """
    if a.image_hw != b.image_hw:
        raise ShapeError(f"mask_iou: expected masks of one image size, got {a.image_hw} and {b.image_hw}")
    if not len(a) or not len(b):
        return np.zeros((len(a), len(b)))
    return np.asarray(_coco_mask().iou(a._coco(), b._coco(), [0] * len(b)), np.float64)


def counts_from_runs(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64], image_hw: tuple[int, int]) -> bytes:
    """Compressed run lengths of one mask from its runs of ones.

    Args:
        start, end: (R,) int64, column-major pixel indices, ascending, `start < end`; a run may begin where
            the one before ends (a full-height column and the next): such runs are joined.
        image_hw: the image, pixels.

    Returns:
        what `pycocotools.mask.encode` gives for the same mask.
    """
    pixels = image_hw[0] * image_hw[1]
    apart = start[1:] != end[:-1]
    edges = np.zeros(2 * (int(np.count_nonzero(apart)) + min(1, len(start))) + 2, np.int64)
    edges[-1] = pixels
    edges[1:-1:2] = start[np.concatenate(([True], apart))[: len(start)]]
    edges[2:-1:2] = end[np.concatenate((apart, [True]))[-len(start) :]] if len(end) else end
    lengths = np.diff(edges)  # of zeros, ones, zeros, …
    if lengths[-1] == 0:
        lengths = lengths[:-1]  # the mask ends inside: there is no last run of zeros
    rle = _coco_mask().frPyObjects({"size": list(image_hw), "counts": lengths}, *image_hw)
    counts: bytes = rle["counts"]
    return counts


def run_lengths(counts: bytes) -> npt.NDArray[np.int64]:
    """Compressed counts → (R,) int64 lengths of the alternating runs, the first of zeros.

    The format (cocoapi, `rleFrString`): digits of 5 bits, the lowest first, each as the character 48 + digit,
    + 32 where more follow; the last digit's top bit is the number's sign; from the fourth number on it is the
    difference to the last but one.
    """
    symbols = np.frombuffer(counts, np.uint8).astype(np.int64) - 48
    last = np.flatnonzero(symbols < 32)  # of each number
    first = np.concatenate(([0], last[:-1] + 1))
    place = np.arange(len(symbols)) - np.repeat(first, last - first + 1)
    numbers = np.add.reduceat((symbols & 31) << (5 * place), first)
    negative = (symbols[last] & 16) != 0
    numbers[negative] -= np.int64(1) << (5 * (place[last] + 1))[negative]
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers


def _plane(counts: bytes, image_hw: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """(H, W) bool, column-major. Not pycocotools.mask.decode: 2.0.11 warns under NumPy 2 at every call."""
    lengths = run_lengths(counts)
    inside = np.arange(len(lengths)) % 2 == 1
    return np.repeat(inside, lengths).reshape(image_hw[::-1]).T
