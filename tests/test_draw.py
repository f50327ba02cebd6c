"""Drawing: what must change, what must not, and that labels stay in the picture."""

from __future__ import annotations

import numpy as np
import pytest

from visionfast.draw import draw
from visionfast.errors import ShapeError
from visionfast.postprocess import InstanceMasks
from visionfast.results import Detections


def _detections(boxes: list[tuple[int, int, int, int]], image_hw: tuple[int, int], masks: bool = False) -> Detections:
    dense = np.zeros((len(boxes), *image_hw), bool)
    for plane, (x1, y1, x2, y2) in zip(dense, boxes, strict=True):
        plane[y1:y2, x1:x2] = True
    return Detections(
        xyxy=np.array(boxes, np.float32).reshape(-1, 4),
        confidence=np.full(len(boxes), 0.87, np.float32),
        class_id=np.arange(len(boxes)),
        image_hw=image_hw,
        mask=InstanceMasks.from_dense(dense) if masks else None,
    )


def _grey(image_hw: tuple[int, int]) -> np.ndarray:
    return np.full((*image_hw, 3), 100, np.uint8)


@pytest.mark.parametrize("masks", [False, True])
def test_nothing_to_draw_is_an_unchanged_copy(masks: bool) -> None:
    image = _grey((50, 60))
    drawn = draw(image, _detections([], (50, 60), masks), ["cat"])
    np.testing.assert_array_equal(drawn, image)
    assert not np.shares_memory(drawn, image)


def test_the_given_picture_is_left_alone() -> None:
    image = _grey((300, 400))
    image.flags.writeable = False
    drawn = draw(image, _detections([(50, 60, 350, 250)], (300, 400), masks=True), ["cat"])
    assert drawn.shape == image.shape
    assert drawn.dtype == np.uint8
    assert drawn.flags.c_contiguous
    assert (image == 100).all()
    assert (drawn[60, 100:300] != 100).any(axis=-1).all()  # the box's upper edge
    assert (drawn[280:, :] == 100).all()


def test_masks_tint_their_pixels_only_and_small_ones_lie_on_top() -> None:
    boxes = [(20, 150, 380, 280), (150, 190, 250, 230)]
    plain = draw(_grey((300, 400)), _detections(boxes, (300, 400)), ["cat", "dog"])
    tinted = draw(_grey((300, 400)), _detections(boxes, (300, 400), masks=True), ["cat", "dog"])
    changed = (plain != tinted).any(axis=-1)
    assert changed[260, 40:360].all()
    assert not changed[:150].any()
    assert (tinted[225, 200] != tinted[260, 60]).any()  # the dog's colour, not the cat's


def test_classes_have_their_own_rgb_colour() -> None:
    sv = pytest.importorskip("supervision")
    drawn = draw(_grey((300, 400)), _detections([(50, 100, 350, 250)], (300, 400)), ["cat"])
    assert tuple(drawn[250, 200]) == sv.ColorPalette.DEFAULT.by_idx(0).as_rgb()


@pytest.mark.parametrize("corner", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("image_hw", [(400, 600), (1080, 810), (3000, 4000)])
def test_labels_stay_inside(image_hw: tuple[int, int], corner: tuple[int, int]) -> None:
    height, width = image_hw

    def white_pixels(x: float, y: float) -> int:
        """Of the text of a small box there."""
        left, top = round(x * (width - width // 40)), round(y * (height - height // 40))
        box = (left, top, left + width // 40, top + height // 40)
        drawn = draw(_grey(image_hw), _detections([box], image_hw), ["a name of some length"])
        return int((drawn.min(axis=-1) > 150).sum())

    assert white_pixels(*corner) == white_pixels(0.5, 0.5) > 100


def test_class_beyond_the_names_and_one_pixel() -> None:
    draw(_grey((1, 1)), _detections([(0, 0, 1, 1)], (1, 1), masks=True), [])


@pytest.mark.parametrize("image", [np.zeros((5, 6), np.uint8), np.zeros((6, 5, 3), np.uint8), np.zeros((5, 6, 3))])
def test_an_image_of_another_kind(image: np.ndarray) -> None:
    with pytest.raises(ShapeError, match=r"image_rgb: expected \(5, 6, 3\) uint8"):
        draw(image, _detections([], (5, 6)), [])
