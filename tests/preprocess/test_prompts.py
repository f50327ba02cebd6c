"""Clicks and boxes: order and padding by hand, and an error that names what is no prompt."""

from __future__ import annotations

import numpy as np
import pytest

from visionfast.errors import OptionError
from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.prompts import parse_box, parse_point, prompt_tensors
from visionfast.types import PreprocessSpec, PromptSpec

SAM = PromptSpec(box_first=False, pad_with_box=False)
SAM2 = PromptSpec(box_first=True, pad_with_box=True, stability=(0.05, 0.98), logit_limit=32.0)
HW = (480, 640)


def tensors(points=None, boxes=None, *, mask_input=None, spec=SAM, image_hw=HW, most_points=32):
    resize = "stretch" if spec.box_first else "longest-side"
    placed = geometry(image_hw, PreprocessSpec((1024, 1024), resize, "bilinear-antialias", None))
    return prompt_tensors(points, boxes, mask_input=mask_input, placed=placed, spec=spec, most_points=most_points)


# ---- order and padding, by hand ---------------------------------------------------------------------------

POINTS = [(320, 240, 1), (100, 50, 0)]
BOX = (10, 20, 300, 400)


@pytest.mark.parametrize(
    ("spec", "points", "boxes", "labels", "xy"),
    [
        pytest.param(SAM, POINTS, None, [1, 0, -1], [(512, 384), (160, 80), (0, 0)], id="SAM: points, padding"),
        pytest.param(SAM, None, BOX, [2, 3], [(16, 32), (480, 640)], id="SAM: a box alone"),
        pytest.param(
            SAM,
            POINTS,
            BOX,
            [1, 0, 2, 3],
            [(512, 384), (160, 80), (16, 32), (480, 640)],
            id="SAM: points, then the box",
        ),
        pytest.param(SAM2, POINTS, None, [1, 0, -1], [(512, 512), (160, 320 / 3), (0, 0)], id="SAM 2: points, padding"),
        pytest.param(SAM2, None, BOX, [2, 3, -1], [(16, 128 / 3), (480, 2560 / 3), (0, 0)], id="SAM 2: a box, padding"),
        pytest.param(
            SAM2,
            POINTS[:1],
            BOX,
            [2, 3, 1, -1],
            [(16, 128 / 3), (480, 2560 / 3), (512, 512), (0, 0)],
            id="SAM 2: the box, then points, padding",
        ),
    ],
)
def test_order_and_padding(spec, points, boxes, labels, xy):
    made = tensors(points, boxes, spec=spec)
    assert made.labels.tolist() == [labels]
    np.testing.assert_array_equal(made.points, np.array([xy], np.float32))
    assert made.points.dtype == made.labels.dtype == np.float32
    assert made.mask_input is None
    assert len(made) == 1


@pytest.mark.parametrize(
    "as_form", [list, np.array, lambda a: np.array(a, np.float32), lambda a: np.array(a, np.uint16)]
)
def test_lists_and_arrays_of_any_kind(as_form):
    expected = tensors(POINTS, BOX)
    for points, boxes in ((POINTS, BOX), ([POINTS], BOX), (POINTS, [BOX]), ([POINTS], [BOX])):
        made = tensors(as_form(points), as_form(boxes))
        np.testing.assert_array_equal(made.points, expected.points)
        np.testing.assert_array_equal(made.labels, expected.labels)


@pytest.mark.parametrize("spec", [SAM, SAM2], ids=["SAM", "SAM 2"])
def test_each_of_several_prompts_is_what_it_is_alone(spec):
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.uniform(0, (640, 480), (5, 3, 2)), rng.integers(0, 2, (5, 3, 1))], axis=2)
    boxes = np.sort(rng.uniform(0, 480, (5, 2, 2)), axis=1).reshape(5, 4)
    for given_points, given_boxes in ((points, None), (None, boxes), (points, boxes)):
        together = tensors(given_points, given_boxes, spec=spec)
        assert len(together) == 5
        for i in range(5):
            alone = tensors(
                None if given_points is None else given_points[i],
                None if given_boxes is None else given_boxes[i],
                spec=spec,
            )
            np.testing.assert_array_equal(together.points[i : i + 1], alone.points)
            np.testing.assert_array_equal(together.labels[i : i + 1], alone.labels)


def test_one_point_by_itself():
    np.testing.assert_array_equal(tensors((320, 240, 1)).points, tensors([(320, 240, 1)]).points)


@pytest.mark.parametrize("shape", [(256, 256), (1, 256, 256), (1, 1, 256, 256)])
def test_a_mask_of_one_prompt(shape):
    logits = np.random.default_rng(0).normal(0, 9, shape).astype(np.float32)
    made = tensors(POINTS, mask_input=logits)
    assert made.mask_input is not None
    np.testing.assert_array_equal(made.mask_input, logits.reshape(1, 1, 256, 256))
    assert made.mask_input.dtype == np.float32


@pytest.mark.parametrize("shape", [(3, 256, 256), (3, 1, 256, 256)])
def test_a_mask_for_each_prompt(shape):
    logits = np.random.default_rng(0).normal(0, 9, shape).astype(np.float16)
    made = tensors(None, [BOX] * 3, mask_input=logits)
    assert made.mask_input is not None
    np.testing.assert_array_equal(made.mask_input, logits.reshape(3, 1, 256, 256))
    assert made.mask_input.dtype == np.float32


def test_points_and_boxes_at_the_edges_are_inside():
    tensors([(0, 0, 1), (639.9, 479.9, 1)], (0, 0, 640, 480))
    tensors([(0, 0, 0)])  # only beside the object
    tensors([(0, 0, 1)], image_hw=(1, 1))
    tensors(None, (0, 0, 1e-3, 1e-3))


def test_as_many_points_as_the_engine_takes():
    assert tensors([(1, 1, 1)] * 31).points.shape == (1, 32, 2)
    assert tensors([(1, 1, 1)] * 30, BOX).points.shape == (1, 32, 2)
    assert tensors([(1, 1, 1)] * 29, BOX, spec=SAM2).points.shape == (1, 32, 2)


# ---- what is no prompt ------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
MASK = np.zeros((256, 256), np.float32)


@pytest.mark.parametrize(
    ("points", "boxes", "message"),
    [
        (None, None, "prompts: expected points or boxes, got neither"),
        ([(640, 0, 1)], None, r"points: prompt 0, point 0: expected 0 <= x < 640 and 0 <= y < 480, got \(640.0, 0.0\)"),
        ([(0, 0, 1), (0, 480, 1)], None, "points: prompt 0, point 1: expected 0 <= x < 640"),
        ([[(0, 0, 1)], [(-0.5, 0, 1)]], None, "points: prompt 1, point 0: expected 0 <= x < 640"),
        ([(NAN, 0, 1)], None, r"prompt 0, point 0: .* got \(nan, 0.0\)"),
        ([(0, INF, 1)], None, r"prompt 0, point 0: .* got \(0.0, inf\)"),
        ([(0, 0, 2)], None, r"prompt 0, point 0: expected label 1 .* or 0 .*, got 2.0"),
        ([(0, 0, -1)], None, "got -1.0"),
        ([(0, 0, 0.5)], None, "got 0.5"),
        ([(0, 0, NAN)], None, "got nan"),
        ([], None, r"points: expected \[x, y, label\] points as \(N, 3\).*, got none at all \(0,\)"),
        (np.zeros((0, 3)), None, "got none at all"),
        (np.zeros((2, 0, 3)), None, "got none at all"),
        (None, np.zeros((0, 4)), "boxes: .* got none at all"),
        ((320, 240), None, r"points: expected .*label 1 on the object and 0 beside it, got \(2,\)"),
        ([(470, 700, 1)], None, "give pixels of the original image$"),
        ([(470, 481, 1)], None, "give pixels of the original image with x first$"),
        ([(320, 240)], None, r"points: expected .*, got \(1, 2\)"),
        (np.zeros((1, 1, 1, 3)), None, r"points: expected .*, got \(1, 1, 1, 3\)"),
        (5, None, r"points: expected .*, got \(\)"),
        ([[1, 2, 1], [1, 2]], None, "points: expected .* one after the other"),
        ([[(1, 2, 1)], [(1, 2, 1), (3, 4, 1)]], None, "points: expected .* one after the other"),
        ("320,240:1", None, "points: expected .* got str"),
        ([("a", "b", "c")], None, "points: expected .* got str"),
        ([(None, 1, 1)], None, "points: expected .* got object"),
        ([(1 + 2j, 1, 1)], None, "points: expected .* got complex128"),
        ([(True, True, True)], None, "points: expected .* got bool"),
        (None, (10, 20, 30), r"boxes: expected \[x1, y1, x2, y2\] boxes as \(4,\).*, got \(3,\)"),
        (None, [[BOX]], r"boxes: expected .*, got \(1, 1, 4\)"),
        (None, (10, 20, 10, 400), r"boxes: prompt 0: expected 0 <= x1 < x2 <= 640 .*, got \(10.0, 20.0, 10.0, 400.0\)"),
        (None, [BOX, (300, 20, 10, 400)], "boxes: prompt 1: expected 0 <= x1 < x2 <= 640"),
        (None, (10, 400, 300, 20), "boxes: prompt 0: .* 0 <= y1 < y2 <= 480"),
        (None, (-1, 20, 300, 400), "boxes: prompt 0"),
        (None, (0, 0, 640.5, 480), "boxes: prompt 0"),
        (None, (0, 0, 640, 481), "boxes: prompt 0"),
        (None, (NAN, 20, 300, 400), "boxes: prompt 0"),
        (None, (10, 20, INF, 400), "boxes: prompt 0"),
        (POINTS, [BOX, BOX], r"as many prompts of points as boxes, got 1 and 2; give points as \(2, N, 3\)"),
        ([POINTS, POINTS], BOX, "as many prompts of points as boxes, got 2 and 1"),
        ([(1, 1, 1)] * 32, None, "points: expected at most 31 a prompt, .*, got 32"),
        ([(1, 1, 1)] * 31, BOX, "points: expected at most 30 a prompt with a box, .*, got 31"),
    ],
)
def test_what_is_no_prompt_is_named(points, boxes, message):
    with pytest.raises(OptionError, match=message) as caught:
        tensors(points, boxes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_padding_counts_where_a_box_has_it():
    with pytest.raises(OptionError, match=r"expected at most 29 a prompt with a box, .*, got 30"):
        tensors([(1, 1, 1)] * 30, BOX, spec=SAM2)


@pytest.mark.parametrize(
    ("boxes", "mask", "message"),
    [
        (None, MASK, "mask_input: expected points or boxes with it, got it alone"),
        (BOX, MASK[:255], r"mask_input: expected mask logits \(1, 256, 256\).*, got \(255, 256\)"),
        ([BOX, BOX], MASK, r"mask_input: expected mask logits \(2, 256, 256\).*, got \(256, 256\)"),
        ([BOX, BOX], MASK[None], r"got \(1, 256, 256\)"),
        (BOX, np.stack([MASK, MASK]), r"got \(2, 256, 256\)"),
        (BOX, MASK + NAN, "mask_input: expected finite logits"),
        (BOX, MASK > 0, "mask_input: expected .* got bool"),
        (BOX, np.full((256, 256), 1e300), "mask_input: expected finite logits"),
    ],
)
def test_what_is_no_mask_is_named(boxes, mask, message):
    with pytest.raises(OptionError, match=message):
        tensors(None, boxes, mask_input=mask)


# ---- the command line's -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("320,240", (320, 240, 1)),
        ("320,240:1", (320, 240, 1)),
        ("100,50:0", (100, 50, 0)),
        ("0.5,1e2:0", (0.5, 100, 0)),
        (" 1 , 2 : 0 ", (1, 2, 0)),
        ("-3,4", (-3, 4, 1)),  # for prompt_tensors to refuse, which knows the image
    ],
)
def test_typed_points(text, point):
    assert parse_point(text) == point


@pytest.mark.parametrize(
    "text", ["", ",", "1", "1,2,3", "1;2", "a,b", "1,2:", "1,2:2", "1,2:-1", "1,2:0:1", "1,2:x", ":1", "nan,1", "1,inf"]
)
def test_what_is_no_typed_point(text):
    with pytest.raises(OptionError, match="expected X,Y or X,Y:LABEL") as caught:
        parse_point(text)
    assert repr(text) in str(caught.value)


def test_typed_boxes():
    assert parse_box("10,20,300,400") == (10, 20, 300, 400)
    assert parse_box(" 1.5, 2 ,3,4 ") == (1.5, 2, 3, 4)


@pytest.mark.parametrize("text", ["", "1,2,3", "1,2,3,4,5", "1,2,3,x", "1 2 3 4", "1,2,3,nan", "1,2,3,4:1"])
def test_what_is_no_typed_box(text):
    with pytest.raises(OptionError, match="expected X1,Y1,X2,Y2") as caught:
        parse_box(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_point, "0.5,0.5"), (parse_point, "1,0.25:0"), (parse_box, "0.1,0.2,0.9,1"), (parse_box, "0,0,1,0.5")],
)
def test_parts_of_the_picture_are_no_pixels(parse, text):
    with pytest.raises(OptionError, match="expected pixels of the original image, got parts of it"):
        parse(text)


def test_the_first_pixel_may_be_typed():
    assert parse_point("0,1") == (0, 1, 1)
    assert parse_box("0,0,1,1") == (0, 0, 1, 1)
