"""DINO's resizes in DALI's graph, on its CPU operators, held to the NumPy definition."""

from __future__ import annotations

import functools
import io

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import ImageError, OptionError
from visionfast.preprocess.antialias import crop, geometry, window_of
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.dali import CpuDecode, DaliPreprocessor, DaliRow, input_pipeline
from visionfast.preprocess.dali_graph import trailer
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.reference import normalise
from visionfast.types import PreprocessSpec

pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CROP = PreprocessSpec((224, 224), "centre-crop", "bicubic-antialias", 0, cover_hw=(256, 256), **IMAGENET)
SMALL = [
    PreprocessSpec((28, 42), "centre-crop", "bicubic-antialias", 0, cover_hw=(33, 48), **IMAGENET),
    PreprocessSpec((28, 28), "centre-crop", "bicubic-antialias", 0, cover_hw=(28, 28), **IMAGENET),
    PreprocessSpec((28, 42), "stretch", "bicubic-antialias", 0, **IMAGENET),
]
SIDES = st.one_of(st.integers(1, 5), st.integers(1, 500))


def noise(image_hw, seed=0):
    """Every third is black and white only: full of overshoot."""
    image = np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)
    return np.where(image < 128, 0, 255).astype(np.uint8) if seed % 3 == 1 else image


def png(image):
    return cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()


@functools.cache
def preprocessor(spec, dtype="uint8"):
    return DaliPreprocessor(spec, batch=2, dtype=dtype)


def apart(canvas, expected):
    return np.abs(canvas.astype(int) - expected)


def with_awkward_sizes(test):
    for spec in SMALL:
        for image_hw in [(1, 1), (1, 16), (16, 1), (2, 3), (28, 42), (33, 48), (34, 48), (33, 49), (32, 47), (66, 97)]:
            test = example(image_hw=image_hw, spec=spec, seed=1)(test)
    drawn = given(image_hw=st.tuples(SIDES, SIDES), spec=st.sampled_from(SMALL), seed=st.integers(0, 999))
    return settings(max_examples=80, deadline=None)(drawn(test))


def inside(placed):
    """(h, w) bool: the pixels whose filter does not reach beyond the image, where DALI repeats the edge."""
    sides = []
    for window, new, source in zip(window_of(placed), placed.resized_hw, placed.image_hw, strict=True):
        reach = 2 * max(1, new / source)  # in pixels of the result
        centre = np.arange(window.start, window.stop) + 0.5
        sides.append((centre >= reach) & (centre <= new - reach) | (new == source))
    return sides[0][:, None] & sides[1]


@with_awkward_sizes
def test_near_the_definition(image_hw, spec, seed):
    """Even of noise in black and white, which in one go, unclipped in between, is 30 levels off."""
    image = noise(image_hw, seed)
    ((canvas, placed),) = preprocessor(spec)([png(image)])
    expected, expected_placed = crop(image, spec)
    assert placed == expected_placed
    off = apart(canvas, expected)
    assert off.max() <= 45  # in a corner, where the edge is repeated: two twelfths of the contrast, and two levels
    within = off[inside(placed)]
    assert within.max(initial=0) <= 2
    assert within.sum() <= 0.1 * within.size + 2


@pytest.mark.parametrize("image_hw", [(300, 400), (120, 90), (1100, 1500)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_published_crop_shows_nothing_of_the_edge(image_hw, seed):
    image = noise(image_hw, seed)
    ((canvas, placed),) = preprocessor(CROP)([png(image)])
    assert inside(placed).all()
    off = apart(canvas, crop(image, CROP)[0])
    assert off.max() <= 2
    assert off.mean() <= 0.1


@with_awkward_sizes
def test_the_place_told_is_the_one_computed_in_the_graph(image_hw, spec, seed):
    file = png(noise(image_hw, seed))
    told = trailer(seed, geometry(image_hw, spec))
    computed, read_hw = run(pipeline(spec, False), file)
    image, again_hw, came_out = run(pipeline(spec, True), file + told.tobytes())
    np.testing.assert_array_equal(image, computed)
    assert read_hw.tolist() == again_hw.tolist() == [list(image_hw)]
    np.testing.assert_array_equal(came_out, told[None])


@functools.cache
def pipeline(spec, with_trailer):
    made = input_pipeline(spec, batch=1, with_trailer=with_trailer)
    made.build()
    return made


def run(made, file):
    made.feed_input("encoded", [np.frombuffer(file, np.uint8)])
    return [output.as_array() for output in made.run()]


def test_photographs_within_one_level(photographs):
    for path in photographs:
        assert_near(path.read_bytes(), 1)


def test_real_and_odd_pictures(shared_data):
    for path in sorted((shared_data / "coco-val27" / "images").iterdir())[:8]:
        assert_near(path.read_bytes(), 1)
    for path in (shared_data / "odd-images").glob("hopper_orientation_*.jpg"):  # enlarged
        assert_near(path.read_bytes(), 2)


def assert_near(file, levels):
    """A mean of 0.02 levels: half a pixel's shift is 1 and more, a resize without antialias as much."""
    (answer,) = preprocessor(CROP).run([file]).answers
    assert isinstance(answer, DaliRow)
    image = decode_image(file)
    ((canvas, _),) = preprocessor(CROP)([file])
    expected, _ = crop(image, CROP)
    assert apart(canvas, expected).max() <= levels
    assert apart(canvas, expected).mean() <= 0.02


def test_the_bound_would_show_a_shift_and_a_missing_antialias(photographs):
    image = decode_image(photographs[0].read_bytes())
    expected, placed = crop(image, CROP)
    new_h, new_w = placed.resized_hw
    window = np.s_[-placed.top : 224 - placed.top, -placed.left : 224 - placed.left]
    aliased = cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_CUBIC)[window]
    assert apart(aliased, expected).mean() > 1
    twice = crop(image.repeat(2, 0).repeat(2, 1)[1:, 1:], CROP)[0]  # half a pixel of the image
    assert apart(twice, expected).mean() > 0.5


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: f"{spec.resize} {spec.cover_hw}")
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("float16", 2**-10)])
def test_float_inputs_are_near_the_definition(spec, dtype, rounding):
    images = [noise((50, 80), 3), noise((97, 31), 6)]
    for image, (tensor, placed) in zip(images, preprocessor(spec, dtype)([png(i) for i in images]), strict=True):
        assert tensor.shape == (3, *spec.size_hw)
        assert tensor.dtype == dtype
        expected = normalise(crop(image, spec)[0], spec, np.float64)
        seen = np.broadcast_to(inside(placed), expected.shape)
        two_levels = 2 / 255 / min(spec.std)
        np.testing.assert_allclose(tensor[seen], expected[seen], rtol=rounding, atol=two_levels + rounding)


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: f"{spec.resize} {spec.cover_hw}")
def test_a_long_image_takes_the_cpus_way_with_its_answer(spec, dtype):
    files = [png(noise((2, 50), 1)), png(noise((3, 9000), 1)), png(noise((9000, 2), 2)), png(noise((1, 200_000), 3))]
    refused = preprocessor(spec, dtype).run(files).answers
    assert [type(answer) for answer in refused[1:]] == [CpuDecode] * 3
    assert refused[1].reason == "9000×3 pixels are 2000 times longer than the input" or spec is not SMALL[2]
    cpu = CropPreprocessor(spec)
    for file, (tensor, placed) in list(zip(files, preprocessor(spec, dtype)(files), strict=True))[1:]:
        expected = np.empty((*spec.size_hw, 3), np.uint8)
        assert cpu.write(decode_image(file), expected) == placed
        np.testing.assert_array_equal(tensor, expected if dtype == "uint8" else normalise(expected, spec, np.float16))


def test_how_long_is_too_long():
    spec = SMALL[1]
    files = [png(noise(hw)) for hw in ((2, 32), (2, 33), (32, 2), (33, 2))]
    kinds = [type(answer) for answer in preprocessor(spec).run(files).answers]
    assert kinds == [DaliRow, CpuDecode, DaliRow, CpuDecode]


def test_a_bad_image_harms_none():
    out = io.BytesIO()
    Image.fromarray(noise((60, 50))).save(out, "JPEG")
    file = out.getvalue()
    no_tables = file[: file.index(b"\xff\xdb")] + file[file.index(b"\xff\xc0") :]
    answers = preprocessor(CROP)([file, no_tables, b"", file, png(noise((1, 9000)))])
    assert [isinstance(answer, ImageError) for answer in answers] == [False, True, True, False, False]
    np.testing.assert_array_equal(answers[0][0], answers[3][0])
    assert apart(answers[0][0], crop(decode_image(file), CROP)[0]).max() <= 2


@pytest.mark.parametrize(
    "other",
    [
        PreprocessSpec((64, 64), "longest-side", "bilinear-antialias", None),
        PreprocessSpec((64, 64), "stretch", "bilinear-antialias", None),
        PreprocessSpec((64, 64), "letterbox", "bicubic-antialias"),
        PreprocessSpec((64, 64), "centre-crop", "bicubic-antialias", 0),
    ],
    ids=lambda spec: f"{spec.resize} {spec.interpolation}",
)
def test_another_resize_is_refused(other):
    for use in (lambda: input_pipeline(other, batch=1), lambda: DaliPreprocessor(other)):
        with pytest.raises(OptionError, match=r"expected .*got"):
            use()
