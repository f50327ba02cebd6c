"""What a prompt decoder gave, in host memory: scores, and masks read off the logits when they are asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.postprocess.crossings import enlarged_pixels, enlarged_runs
from visionfast.postprocess.masks import InstanceMasks, counts_from_runs
from visionfast.types import Letterbox, Resize

__all__ = ["HostDecoded"]


class HostDecoded:
    """See `visionfast.sessions.prompts.Decoded`. Safe for several threads: nothing is written after it is made.

    Masks are worked on one by one, so that memory does not grow with how many are chosen, nor with the image.

    Args:
        logits: (P, C, h, w) float32, kept: no buffer that somebody writes to later.
        scores: (P, C) float32, kept too.
        resize: how images come into the network's input, `PreprocessSpec.resize`.

    Raises:
        ShapeError: the two do not go together.
    """

    def __init__(self, logits: npt.NDArray[np.float32], scores: npt.NDArray[np.float32], resize: Resize) -> None:
        if logits.ndim != 4 or logits.dtype != np.float32 or scores.shape != logits.shape[:2]:
            raise ShapeError(
                f"logits, scores: expected (P, C, h, w) float32 and (P, C), "
                f"got {logits.shape} {logits.dtype.name} and {scores.shape}"
            )
        self.scores = scores
        self._planes = logits.reshape(-1, *logits.shape[2:])  # (P · C, h, w)
        self._resize: Resize = resize

    def logits(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """As `Decoded.logits`; a copy."""
        return self._planes[chosen]

    def stability(
        self, chosen: npt.NDArray[np.int64], delta: float, placed: Letterbox | None = None
    ) -> npt.NDArray[np.float32]:
        """As `Decoded.stability`: `calculate_stability_score` of segment_anything 1.0 where `placed` is given, else
        `MaskDecoder._get_stability_scores` of sam2 1.1."""
        pixels = np.zeros((len(chosen), 2), np.int64)  # above +delta, above -delta
        for i, plane in enumerate(chosen):
            if placed is None:
                pixels[i] = [np.count_nonzero(self._planes[plane] > np.float32(level)) for level in (delta, -delta)]
            else:
                pixels[i] = enlarged_pixels(self._planes[plane], placed, self._resize, (delta, -delta))
        inner, outer = pixels.astype(np.float32).T
        with np.errstate(invalid="ignore"):  # 0 / 0
            stability: npt.NDArray[np.float32] = inner / outer
        if placed is None:
            stability[outer == 0] = 1
        return stability

    def masks(self, chosen: npt.NDArray[np.int64], placed: Letterbox) -> InstanceMasks:
        """As `Decoded.masks`."""
        runs = (enlarged_runs(self._planes[plane], placed, self._resize) for plane in chosen)
        counts = tuple(counts_from_runs(start, end, placed.image_hw) for start, end in runs)
        return InstanceMasks(counts, placed.image_hw)
