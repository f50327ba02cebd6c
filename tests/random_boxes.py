"""Boxes for masks: inside, across and outside of an image."""

from __future__ import annotations

import numpy as np

__all__ = ["random_boxes"]


def random_boxes(rng: np.random.Generator, n: int, image_hw: tuple[int, int]) -> np.ndarray:
    """From outside of the image to all of it, on pixel edges as often as not; some without area."""
    height, width = image_hw
    corners = rng.uniform(-0.3, 1.3, (n, 2, 2)) * (width, height)
    corners = np.where(rng.random((n, 1, 1)) < 0.5, np.round(corners), corners)
    boxes = np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1)
    boxes[rng.random(n) < 0.25] = (0, 0, width, height)
    boxes[rng.random(n) < 0.1, 2:] = 0
    return boxes.astype(np.float32)
