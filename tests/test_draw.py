"""Drawing: what must change, what must not, and that labels and prompts are where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from visionfast.draw import draw, draw_everything, draw_prompts, mask_colors
from visionfast.errors import ShapeError
from visionfast.postprocess import InstanceMasks
from visionfast.results import Detections, Masks


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


# ---- masks of prompts ------------------------------------------------------------------------------------


def _masks(boxes: list[tuple[int, int, int, int]], image_hw: tuple[int, int], prompt: list[int] | None = None) -> Masks:
    """Rectangular ones, by default of a prompt each."""
    dense = np.zeros((len(boxes), *image_hw), bool)
    for plane, (x1, y1, x2, y2) in zip(dense, boxes, strict=True):
        plane[y1:y2, x1:x2] = True
    return Masks(
        mask=InstanceMasks.from_dense(dense),
        score=np.full(len(boxes), 0.87, np.float32),
        prompt=np.array(range(len(boxes)) if prompt is None else prompt, np.int64),
        image_hw=image_hw,
    )


def _tinted(color: tuple[int, int, int]) -> list[int]:
    return [round(0.55 * 100 + 0.45 * channel) for channel in color]


def test_a_click_s_mask_and_its_points() -> None:
    image = _grey((300, 400))
    image.flags.writeable = False
    drawn = draw_prompts(image, _masks([(100, 80, 300, 250)], (300, 400)), points=[(200, 150, 1), (50, 40, 0)])
    assert drawn.shape == image.shape
    assert drawn.dtype == np.uint8
    assert drawn.flags.c_contiguous
    assert (image == 100).all()
    (blue,) = mask_colors(1)
    np.testing.assert_allclose(drawn[230, 280], _tinted(blue), atol=1)
    assert tuple(drawn[80, 250]) == blue  # its outline
    assert drawn[150, 200].argmax() == 1  # green
    assert drawn[40, 50].argmax() == 0  # red
    assert (drawn[260:, :] == 100).all()
    assert (drawn[:, 310:] == 100).all()


def test_boxes_have_the_colours_of_their_masks() -> None:
    drawn = draw_prompts(
        _grey((300, 400)),
        _masks([(20, 60, 120, 160), (210, 60, 320, 160)], (300, 400)),
        boxes=[(10.4, 50.4, 140, 280), (200, 50, 390, 280)],
    )
    first, second = mask_colors(2)
    assert tuple(drawn[200, 10]) == tuple(drawn[279, 60]) == first
    assert tuple(drawn[200, 200]) == second
    np.testing.assert_allclose(drawn[150, 30], _tinted(first), atol=1)
    np.testing.assert_allclose(drawn[150, 300], _tinted(second), atol=1)


@pytest.mark.parametrize(("image_hw", "expected"), [((300, 400), (900, 400)), ((400, 300), (400, 900))])
def test_several_masks_a_prompt_have_a_panel_for_each_candidate(
    image_hw: tuple[int, int], expected: tuple[int, int]
) -> None:
    boxes = [(200, 200, 220, 220), (180, 180, 220, 220), (140, 160, 240, 240), (10, 200, 20, 210), (0, 0, 1, 1)]
    boxes.append((40, 200, 60, 240))
    drawn = draw_prompts(_grey(image_hw), _masks(boxes, image_hw, [0, 0, 0, 1, 1, 1]))
    assert drawn.shape[:2] == expected
    panels = np.split(drawn, 3, axis=0 if image_hw[0] < image_hw[1] else 1)
    first, second = mask_colors(2)
    for panel, (x1, y1, x2, y2) in zip(panels, boxes[:3], strict=True):
        np.testing.assert_allclose(panel[y1 + 8, x1 + 8], _tinted(first), atol=1)
        assert tuple(panel[y2 - 1, x2 - 1]) == first
    assert [tuple(panel[209, 19]) == second for panel in panels] == [True, False, False]
    assert [tuple(panel[239, 59]) == second for panel in panels] == [False, False, True]


@pytest.mark.parametrize("prompt", ["box", "point"])
def test_an_empty_mask_is_labelled_at_its_prompt(prompt: str) -> None:
    masks = _masks([(0, 0, 0, 0)], (300, 400))
    if prompt == "box":
        drawn = draw_prompts(_grey((300, 400)), masks, boxes=[(150, 150, 200, 200)])
    else:
        drawn = draw_prompts(_grey((300, 400)), masks, points=[(150, 150, 1)])
    assert (drawn[:, :100] == 100).all()
    assert tuple(mask_colors(1)[0]) in {tuple(pixel) for pixel in drawn[110:148, 140:260].reshape(-1, 3).tolist()}


def test_no_mask_at_all() -> None:
    image = _grey((50, 60))
    np.testing.assert_array_equal(draw_prompts(image, _masks([], (50, 60))), image)
    drawn = draw_everything(image, _masks([], (50, 60)))
    np.testing.assert_array_equal(drawn, image)
    assert not np.shares_memory(drawn, image)


def test_everything_has_a_hundred_colours_and_small_masks_on_top() -> None:
    image_hw = (1000, 1000)
    boxes = [(5 * i, 5 * i, 1000 - 5 * i, 1000 - 5 * i) for i in range(100)]  # each inside the one before
    order = np.random.default_rng(0).permutation(100)
    drawn = draw_everything(_grey(image_hw), _masks([boxes[i] for i in order], image_hw))
    colors = mask_colors(100)
    assert len(set(colors)) == 100
    for color, i in zip(colors, order.tolist(), strict=True):
        assert tuple(drawn[5 * i, 500]) == color  # its outline
        np.testing.assert_allclose(drawn[5 * i + 3, 500], _tinted(color), atol=1)


@pytest.mark.parametrize("image_hw", [(1, 1), (1, 300), (300, 1)])
def test_one_pixel_sides(image_hw: tuple[int, int]) -> None:
    whole = (0, 0, image_hw[1], image_hw[0])
    assert draw_everything(_grey(image_hw), _masks([whole], image_hw)).shape == (*image_hw, 3)
    assert draw_prompts(_grey(image_hw), _masks([whole], image_hw), points=[(0, 0, 1)]).shape == (*image_hw, 3)


def test_masks_of_another_picture() -> None:
    for drawing in (draw_prompts, draw_everything):
        with pytest.raises(ShapeError, match=r"image_rgb: expected \(5, 6, 3\) uint8"):
            drawing(np.zeros((6, 5, 3), np.uint8), _masks([], (5, 6)))


def test_boxes_for_some_prompts_only() -> None:
    masks = _masks([(0, 0, 3, 3), (2, 2, 4, 4)], (5, 6))
    with pytest.raises(ShapeError, match="boxes: expected one for each of the 2 prompts or none, got 1"):
        draw_prompts(_grey((5, 6)), masks, boxes=(0, 0, 3, 3))
