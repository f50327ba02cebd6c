"""The fast CPU path of DINO's resizes against the definition, to the bit; and what it may cost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from visionfast.errors import ShapeError
from visionfast.preprocess.antialias import crop, fit
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.reference import normalise
from visionfast.types import PreprocessSpec

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIDES = st.one_of(st.integers(1, 4), st.integers(1, 400))
SEEDS = st.integers(0, 2**32 - 1)


def cropping(size_hw=(224, 224), cover_hw=(256, 256), **changes):
    return PreprocessSpec(size_hw, "centre-crop", "bicubic-antialias", 0, cover_hw=cover_hw, **(IMAGENET | changes))


def squashing(size_hw=(224, 224)):
    return PreprocessSpec(size_hw, "stretch", "bicubic-antialias", 0, **IMAGENET)


# Small, so that hypothesis can try many; the published one has its own tests.
SPECS = [
    cropping((28, 28), (32, 32)),
    cropping((28, 42), (32, 48)),
    cropping((27, 14), (27, 31)),  # an odd and an even difference; nothing to cut off above
    cropping((1, 1), (1, 1)),
    squashing((28, 28)),
    squashing((14, 42)),
]


def noise(image_hw, seed=0):
    """Every third is black and white only: full of ties, steps and overshoot."""
    image = np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)
    return np.where(image < 128, 0, 255).astype(np.uint8) if seed % 3 == 1 else image


def with_awkward_sizes(test):
    for spec in SPECS:
        for image_hw in ((1, 1), (1, 3000), (3000, 1), (2, 3), (28, 28), (32, 32), (31, 32), (33, 32), (65, 64)):
            test = example(image_hw=image_hw, spec=spec, seed=1)(test)
    drawn = given(image_hw=st.tuples(SIDES, SIDES), spec=st.sampled_from(SPECS), seed=SEEDS)
    return settings(max_examples=150, deadline=None)(drawn(test))


@with_awkward_sizes
def test_equals_the_definition_in_a_used_slot(image_hw, spec, seed):
    image = noise(image_hw, seed)
    untouched = image.copy()
    out = noise(spec.size_hw, seed + 1)  # a stale image lies in it
    placed = CropPreprocessor(spec).write(image, out)
    expected, expected_placed = crop(image, spec)
    assert placed == expected_placed
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(image, untouched)


@pytest.mark.parametrize("image_hw", [(480, 640), (1333, 800), (3, 30_000), (9000, 3), (2, 70_000)])
@pytest.mark.parametrize(
    "spec", [cropping(), cropping((518, 518), (592, 592)), squashing()], ids=["224", "518", "squash"]
)
def test_equals_the_definition_at_the_published_sizes(image_hw, spec):
    image, out = noise(image_hw, 1), np.empty((*spec.size_hw, 3), np.uint8)
    CropPreprocessor(spec).write(image, out)
    np.testing.assert_array_equal(out, crop(image, spec)[0])


def test_equals_the_definition_where_a_side_is_longer_than_a_jpegs():
    for image_hw in ((66_000, 5), (3, 66_000)):
        for spec in SPECS:
            image, out = noise(image_hw, 1), np.empty((*spec.size_hw, 3), np.uint8)
            CropPreprocessor(spec).write(image, out)
            np.testing.assert_array_equal(out, crop(image, spec)[0])


@pytest.mark.parametrize("image_hw", [(1, 10**8), (10**8, 1), (3, 33_000_000)])
def test_only_what_is_looked_at_is_computed(image_hw):
    """The whole would be 256 × 25,600,000,000; and all but the middle of the image is left alone."""
    image = np.broadcast_to(np.array([10, 128, 250], np.uint8), (*image_hw, 3))
    out = np.empty((224, 224, 3), np.uint8)
    CropPreprocessor(cropping()).write(image, out)
    assert (out == [10, 128, 250]).all()


def test_bounded_memory():
    import tracemalloc

    spec, image = cropping(), noise((2500, 4000))
    out = np.empty((224, 224, 3), np.uint8)
    preprocessor = CropPreprocessor(spec)
    tracemalloc.start()
    try:
        preprocessor.write(image, out)
        assert tracemalloc.get_traced_memory()[1] < 10e6  # a third of the image's own 30 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-1],
        lambda a: a[..., ::-1],
        lambda a: a[::2, 1::3],
        lambda a: a.transpose(1, 0, 2),
        lambda a: np.frombuffer(a.tobytes(), np.uint8).reshape(a.shape),
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: np.asfortranarray(a),
    ],
    ids=["upside down", "mirrored", "BGR view", "strided", "transposed", "read-only", "one row", "Fortran"],
)
def test_views_of_arrays(view):
    image = view(noise((50, 60)))
    for spec in SPECS:
        out = np.empty((*spec.size_hw, 3), np.uint8)
        CropPreprocessor(spec).write(image, out)
        np.testing.assert_array_equal(out, crop(np.ascontiguousarray(image), spec)[0])


def test_writes_into_a_slot_of_a_batch_and_nowhere_else():
    batch = np.full((3, 28, 28, 3), 9, np.uint8)
    CropPreprocessor(SPECS[0]).write(noise((20, 30)), batch[1])
    assert (batch[[0, 2]] == 9).all()
    np.testing.assert_array_equal(batch[1], crop(noise((20, 30)), SPECS[0])[0])


def test_several_threads_share_one():
    preprocessor = CropPreprocessor(cropping())
    images = [noise((300 + 7 * i, 500 - 9 * i), 2 * i) for i in range(24)]

    def write(image):
        out = np.empty((224, 224, 3), np.uint8)
        preprocessor.write(image, out)
        return out, preprocessor.normalised(out[None], "float16")

    with ThreadPoolExecutor(4) as threads:
        for image, (out, planes) in zip(images, threads.map(write, images), strict=True):
            expected, _ = crop(image, cropping())
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(planes[0], normalise(expected, cropping(), np.float16))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_normalised_equals_the_definition(dtype):
    spec = SPECS[1]
    canvas = noise((2 * 28, 42)).reshape(2, 28, 42, 3)
    expected = np.stack([normalise(pixels, spec, dtype) for pixels in canvas])
    out = np.full(expected.shape, np.nan, dtype)
    CropPreprocessor(spec).normalise(canvas, out)
    np.testing.assert_array_equal(out, expected)
    made = CropPreprocessor(spec).normalised(canvas, dtype)
    assert made.dtype == dtype
    np.testing.assert_array_equal(made, expected)
    assert CropPreprocessor(spec).normalised(canvas[:0], dtype).shape == (0, 3, 28, 42)


@pytest.mark.parametrize("spec", [cropping(), squashing((28, 42))], ids=["crop", "squash"])
def test_fit_is_the_crop_normalised(spec):
    image = noise((60, 50))
    tensor, placed = fit(image, spec)
    canvas, expected = crop(image, spec)
    assert placed == expected
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor, normalise(canvas, spec))


def test_wrong_shapes_are_refused():
    preprocessor = CropPreprocessor(SPECS[1])
    image, out = noise((8, 8)), np.zeros((28, 42, 3), np.uint8)
    for wrong in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3)), noise((0, 4))):
        for use in (lambda i: preprocessor.write(i, out), lambda i: crop(i, SPECS[1]), lambda i: fit(i, SPECS[1])):
            with pytest.raises(ShapeError, match=r"image: expected \(H, W, 3\) uint8"):
                use(wrong)
    for wrong in (out.transpose(1, 0, 2), out.astype(np.float32), out[None], out[:27]):
        with pytest.raises(ShapeError, match=r"out: expected \(28, 42, 3\) uint8, got"):
            preprocessor.write(image, wrong)
    with pytest.raises(ShapeError, match="C-contiguous"):
        preprocessor.write(image, np.zeros((28, 42, 6), np.uint8)[..., ::2])
    with pytest.raises(ShapeError, match=r"float32 or float16, got .* float64"):
        preprocessor.normalised(out[None], np.float64)


@pytest.mark.parametrize("level", [0, 1, 127, 254, 255])
@pytest.mark.parametrize("hw", [(1, 1), (1, 70_000), (70_000, 1), (333, 500), (20, 30)])
def test_one_level_stays_that_level(level, hw):
    for spec in SPECS:
        out = np.empty((*spec.size_hw, 3), np.uint8)
        CropPreprocessor(spec).write(np.full((*hw, 3), level, np.uint8), out)
        assert (out == level).all()
