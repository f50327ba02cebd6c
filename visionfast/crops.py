"""Everything mode's geometry: the crops of an image, the grid of points in each, and the way back to the image.

The arithmetic is that of Segment Anything's automatic generator (Kirillov et al., "Segment Anything", 2023, B.;
`segment_anything/utils/amg.py`), which SAM 2 took over.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.postprocess.masks import InstanceMasks, counts_from_runs, run_lengths

__all__ = ["Crop", "crops_of", "near_crop_edge", "point_grid", "uncrop"]


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of an image that is looked at by itself.

    Attributes:
        left, top, right, bottom: pixels of the image, `left ≤ x < right` and `top ≤ y < bottom`; never empty.
        layer: 0 for the whole image; layer i has 2^i × 2^i crops.
    """

    left: int
    top: int
    right: int
    bottom: int
    layer: int

    @property
    def hw(self) -> tuple[int, int]:
        """Its height and width, pixels."""
        return self.bottom - self.top, self.right - self.left

    @property
    def corner(self) -> npt.NDArray[np.int64]:
        """(2,) int64: x, y of its top left pixel."""
        return np.array([self.left, self.top])

    @property
    def area(self) -> int:
        """Pixels."""
        return self.hw[0] * self.hw[1]


def crops_of(image_hw: tuple[int, int], layers: int, overlap: float) -> list[Crop]:
    """The whole image, then each layer's crops, column by column.

    Where an image has fewer pixels on a side than a layer has crops, those that would have none are left out (the
    official generator fails there).

    Args:
        image_hw: pixels, at least 1 × 1.
        layers: of crops, beside the whole image.
        overlap: of neighbours in the first layer, as a share of the image's shorter side; half of it in the next.
    """
    height, width = image_hw
    crops = [Crop(0, 0, width, height, 0)]
    for layer in range(1, layers + 1):
        count = 2**layer  # on each side
        shared = int(overlap * min(image_hw) * (2 / count))  # pixels, of neighbours
        crop_h, crop_w = (math.ceil((shared * (count - 1) + side) / count) for side in image_hw)
        for column, row in itertools.product(range(count), repeat=2):
            left, top = (crop_w - shared) * column, (crop_h - shared) * row
            right, bottom = min(left + crop_w, width), min(top + crop_h, height)
            if left < right and top < bottom:
                crops.append(Crop(left, top, right, bottom, layer))
    return crops


def point_grid(points_per_side: int, hw: tuple[int, int]) -> npt.NDArray[np.float64]:
    """(points_per_side², 2) float64: x, y in pixels of a crop of `hw` pixels, row by row, half a step from an edge."""
    offset = 1 / (2 * points_per_side)
    along = np.linspace(offset, 1 - offset, points_per_side)
    y, x = np.meshgrid(along, along, indexing="ij")
    points: npt.NDArray[np.float64] = np.stack([x, y], -1).reshape(-1, 2) * np.array(hw[::-1])
    return points


def near_crop_edge(
    xyxy: npt.NDArray[np.float32], crop: Crop, image_hw: tuple[int, int], distance: float = 20
) -> npt.NDArray[np.bool_]:
    """Which boxes end within `distance` pixels of an edge of the crop that is not within that of the image's edge.

    Their objects are likely cut off, and another crop shows them whole.

    Args:
        xyxy: (N, 4) float32, in pixels of the crop; the right and bottom ones are the last inside.
        crop: where they are from.
        image_hw: of the image, pixels.
        distance: pixels.

    Returns:
        (N,) bool.
    """
    in_image = xyxy + np.tile(crop.corner, 2).astype(np.float32)
    at_crop = np.abs(in_image - np.array([crop.left, crop.top, crop.right, crop.bottom], np.float32)) <= distance
    at_image = np.abs(in_image - np.array([0, 0, *image_hw[::-1]], np.float32)) <= distance
    return np.asarray((at_crop & ~at_image).any(axis=1))


def uncrop(masks: InstanceMasks, crop: Crop, image_hw: tuple[int, int]) -> InstanceMasks:
    """Masks of a crop as masks of its image: their runs are moved, no plane is made."""
    if crop.hw == image_hw:
        return masks
    assert masks.image_hw == crop.hw
    return InstanceMasks(tuple(_moved(counts, crop, image_hw) for counts in masks.counts), image_hw)


def _moved(counts: bytes, crop: Crop, image_hw: tuple[int, int]) -> bytes:
    edges = np.cumsum(run_lengths(counts))  # in column-major pixels of the crop: where zeros end, ones end, …
    start, end = edges[: len(edges) // 2 * 2].reshape(-1, 2).T  # (R,) of each run of ones
    high = crop.hw[0]
    # A run may go on from a column's bottom to the next one's top, which lie apart in the image: one piece a column.
    first, last = start // high, (end - 1) // high
    pieces = last - first + 1
    column = np.repeat(first - np.cumsum(pieces) + pieces, pieces) + np.arange(int(pieces.sum()))
    top = np.maximum(np.repeat(start, pieces), column * high)
    bottom = np.minimum(np.repeat(end, pieces), (column + 1) * high)
    shift = (column + crop.left) * image_hw[0] + crop.top - column * high
    return counts_from_runs(top + shift, bottom + shift, image_hw)
