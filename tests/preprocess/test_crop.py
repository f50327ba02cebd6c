"""DINO's resizes: the definition against Pillow, torchvision and arithmetic done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import OptionError
from visionfast.preprocess import antialias
from visionfast.preprocess.antialias import crop, fit, geometry, resize_antialias_u8, rows_first, window_of
from visionfast.preprocess.cpu_antialias import AntialiasPreprocessor
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.filters import cubic, fixed_point
from visionfast.types import PreprocessSpec

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIDES = st.one_of(st.integers(1, 4), st.integers(1, 400))
SEEDS = st.integers(0, 2**32 - 1)


def cropping(size_hw=(224, 224), cover_hw=(256, 256), **changes):
    return PreprocessSpec(size_hw, "centre-crop", "bicubic-antialias", 0, cover_hw=cover_hw, **(IMAGENET | changes))


def squashing(size_hw=(224, 224)):
    return PreprocessSpec(size_hw, "stretch", "bicubic-antialias", 0, **IMAGENET)


def noise(image_hw, seed=0):
    """Every third is black and white only: full of ties, steps and overshoot."""
    image = np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)
    return np.where(image < 128, 0, 255).astype(np.uint8) if seed % 3 == 1 else image


def pillow(image, size_hw):
    return np.asarray(Image.fromarray(image).resize(size_hw[::-1], Image.Resampling.BICUBIC))


# ---- geometry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image_hw", "resized_hw", "top_left"),
    [
        pytest.param((256, 256), (256, 256), (16, 16), id="as it is"),
        pytest.param((480, 640), (256, 341), (16, 58), id="341.33 down; 58.5 to the even 58"),
        pytest.param((640, 480), (341, 256), (58, 16), id="the same, tall"),
        pytest.param((1080, 810), (341, 256), (58, 16), id="bus"),
        pytest.param((720, 1280), (256, 455), (16, 116), id="zidane: 115.5 to the even 116"),
        pytest.param((256, 257), (256, 257), (16, 16), id="a pixel more: 16.5 to the even 16"),
        pytest.param((256, 259), (256, 259), (16, 18), id="three more: 17.5 to the even 18"),
        pytest.param((255, 256), (256, 257), (16, 16), id="a pixel less"),
        pytest.param((1, 1), (256, 256), (16, 16), id="one pixel"),
        pytest.param((1, 100_000_000), (256, 25_600_000_000), (16, 12_799_999_888), id="thin"),
        pytest.param((30_000, 3), (2_560_000, 256), (1_279_888, 16), id="tall and thin"),
    ],
)
def test_centre_crop_geometry(image_hw, resized_hw, top_left):
    placed = geometry(image_hw, cropping())
    assert (placed.resized_hw, (-placed.top, -placed.left)) == (resized_hw, top_left)
    assert placed.gain == 256 / min(image_hw)


@settings(deadline=None)
@given(image_hw=st.tuples(st.integers(1, 9000), st.integers(1, 9000)), side=st.integers(1, 600))
@example(image_hw=(1, 9000), side=224)
def test_centre_crop_geometry_is_torchvisions(image_hw, side):
    functional = pytest.importorskip("torchvision.transforms.functional")
    placed = geometry(image_hw, cropping((side, side), (side + side // 7, side + side // 7)))
    theirs = functional._compute_resized_output_size(image_hw, [side + side // 7])
    assert placed.resized_hw == tuple(theirs)


@settings(deadline=None)
@given(
    image_hw=st.tuples(st.integers(1, 100_000), st.integers(1, 100_000)),
    size_hw=st.tuples(st.integers(1, 600), st.integers(1, 600)),
    more=st.tuples(st.integers(0, 100), st.integers(0, 100)),
)
def test_the_resized_image_just_covers_and_the_window_is_in_its_middle(image_hw, size_hw, more):
    cover_hw = (size_hw[0] + more[0], size_hw[1] + more[1])
    placed = geometry(image_hw, cropping(size_hw, cover_hw))
    assert all(new >= cover for new, cover in zip(placed.resized_hw, cover_hw, strict=True))
    assert any(new == cover for new, cover in zip(placed.resized_hw, cover_hw, strict=True))
    for window, new in zip(window_of(placed), placed.resized_hw, strict=True):
        assert 0 <= window.start < window.stop <= new
        assert abs(window.start - (new - window.stop)) <= 2  # halves to even, as torchvision
    aspect = placed.resized_hw[0] / image_hw[0], placed.resized_hw[1] / image_hw[1]
    assert max(aspect) <= placed.gain * (1 + 1e-12)


def test_stretch_geometry_fills_the_input():
    placed = geometry((1, 5000), squashing((28, 42)))
    assert (placed.resized_hw, placed.top, placed.left, placed.gain) == ((28, 42), 0, 0, 42 / 5000)


@pytest.mark.parametrize("cover_hw", [None, (223, 256), (256, 223)])
def test_a_cover_that_does_not_cover_is_refused(cover_hw):
    with pytest.raises(OptionError, match=r"cover_hw: expected at least \(224, 224\), got"):
        geometry((8, 8), cropping(cover_hw=cover_hw))


@pytest.mark.parametrize(
    "other",
    [
        PreprocessSpec((64, 64)),
        PreprocessSpec((64, 64), "letterbox", "bicubic-antialias"),
        PreprocessSpec((64, 64), "longest-side", "bicubic-antialias"),
        PreprocessSpec((64, 64), "centre-crop", "bilinear-antialias", cover_hw=(73, 73)),
        PreprocessSpec((64, 64), "stretch", "bilinear-antialias"),
    ],
    ids=lambda spec: f"{spec.resize} {spec.interpolation}",
)
def test_another_resize_is_refused(other):
    for use in (lambda: crop(noise((8, 8)), other), lambda: CropPreprocessor(other)):
        with pytest.raises(OptionError, match=r"preprocess: expected .*bi"):
            use()


def test_sams_preprocessor_refuses_dinos_resizes():
    for spec in (cropping(), squashing()):
        with pytest.raises(OptionError, match="preprocess: expected bilinear-antialias, got bicubic-antialias"):
            AntialiasPreprocessor(spec)


# ---- the definition ---------------------------------------------------------------------------------------


def test_weights_by_hand():
    # Halving: distances in units of two pixels ¼, ¾, 1¼, 1¾. Keys' polynomials there, times 128: 111, 29, -9, -3.
    start, weights = cubic(8, 16, 3, 4)
    assert start.tolist() == [3]
    np.testing.assert_allclose(weights[0] * 256, [-3, -9, 29, 111, 111, 29, -9, -3], rtol=1e-14)
    # At the edge what lies outside is left out, and the rest scaled up.
    start, weights = cubic(8, 16, 0, 1)
    assert start.tolist() == [0]
    np.testing.assert_allclose(weights[0] * (111 + 111 + 29 - 9 - 3), [111, 111, 29, -9, -3], rtol=1e-14)


@settings(deadline=None)
@given(
    length=st.integers(1, 300), source=st.one_of(st.integers(1, 300), st.integers(1, 40_000)), cut=st.integers(0, 300)
)
def test_weights_are_inside_the_image_and_a_part_has_those_of_the_whole(length, source, cut):
    start, weights = cubic(length, source)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
    last = start + (weights != 0).cumsum(1).argmax(1)
    assert (start >= 0).all()
    assert (last < source).all()
    assert (np.diff(start) >= 0).all()
    assert np.abs(weights).sum(1).max() * 255 < 640  # what Pillow's tables of clipped levels are made for
    first = min(cut, length - 1)
    some_start, some_weights = cubic(length, source, first, min(first + 8, length))
    np.testing.assert_array_equal(some_start, start[first : first + 8])
    np.testing.assert_array_equal(some_weights, weights[first : first + 8, : some_weights.shape[1]])


def test_fixed_point_rounds_halves_away_from_zero():
    units = np.array([0.0, -0.0, 0.49, 0.5, 1.5, -0.49, -0.5, -1.5]) / (1 << 22)
    assert fixed_point(units).tolist() == [0, 0, 0, 1, 2, 0, -1, -2]


@settings(max_examples=200, deadline=None)
@given(hw=st.tuples(SIDES, SIDES), size_hw=st.tuples(SIDES, SIDES), seed=SEEDS)
@example(hw=(1, 1), size_hw=(1, 1), seed=0)
@example(hw=(1, 5000), size_hw=(1, 64), seed=1)
@example(hw=(5000, 1), size_hw=(64, 1), seed=1)
@example(hw=(64, 64), size_hw=(64, 64), seed=0)
@example(hw=(64, 99), size_hw=(64, 31), seed=1)
@example(hw=(99, 64), size_hw=(31, 64), seed=1)
@example(hw=(2, 2), size_hw=(300, 300), seed=1)
def test_resize_equals_pillow(hw, size_hw, seed):
    image = noise(hw, seed)
    np.testing.assert_array_equal(
        resize_antialias_u8(image, size_hw, cubic), pillow(pillow(image, (hw[0], size_hw[1])), size_hw)
    )


@settings(max_examples=100, deadline=None)
@given(hw=st.tuples(SIDES, SIDES), size_hw=st.tuples(SIDES, SIDES), seed=SEEDS, data=st.data())
def test_a_window_is_a_part_of_the_whole(hw, size_hw, seed, data):
    image = noise(hw, seed)
    window = tuple(slice(*sorted(data.draw(st.sets(st.integers(0, side), min_size=2, max_size=2)))) for side in size_hw)
    np.testing.assert_array_equal(
        resize_antialias_u8(image, size_hw, cubic, window=window), resize_antialias_u8(image, size_hw, cubic)[window]
    )


def test_overshoot_is_clipped_after_either_pass():
    # A white cross on black, enlarged: beside its arms the filter goes below 0, inside them above 255.
    image = np.zeros((9, 9, 3), np.uint8)
    image[3:6], image[:, 3:6] = 255, 255
    resized = resize_antialias_u8(image, (63, 63), cubic)
    assert (resized == pillow(image, (63, 63))).all()
    assert (resized.min(), resized.max()) == (0, 255)
    in_one_go = np.einsum("yi,xj,ijc->yxc", *(dense(63, 9) for _ in range(2)), image.astype(float))
    assert in_one_go.min() < -20
    assert in_one_go.max() > 270
    assert np.abs(np.clip(in_one_go, 0, 255) - resized).max() > 1  # so it matters that it is done in between, too


def dense(length, source):
    start, weights = cubic(length, source)
    matrix = np.zeros((length, source + weights.shape[1]))
    np.put_along_axis(matrix, start[:, None] + np.arange(weights.shape[1]), weights, axis=1)
    return matrix[:, :source]


def test_what_would_become_too_large_between_the_passes_takes_its_columns_first(monkeypatch):
    assert rows_first((150, 100), 224)
    assert not rows_first((10**8, 1), 224)
    assert rows_first((10**8, 1), 1)  # nothing is enlarged
    monkeypatch.setattr(antialias, "_HALFWAY_PIXELS", 1000)
    for hw, spec in (((500, 3), squashing((28, 28))), ((40, 9), squashing((28, 42)))):
        image, out = noise(hw, 1), np.empty((*spec.size_hw, 3), np.uint8)
        columns_first = pillow(pillow(image, (spec.size_hw[0], hw[1])), spec.size_hw)
        np.testing.assert_array_equal(crop(image, spec)[0], columns_first)
        CropPreprocessor(spec).write(image, out)
        np.testing.assert_array_equal(out, columns_first)


# ---- torchvision's own transform --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transforms():
    return pytest.importorskip("torchvision.transforms")


def evaluation(transforms, size=224, cover=256):
    """`make_classification_eval_transform` of DINOv2's repository: the pixels, and what is done to them."""
    pixels = transforms.Compose(
        [
            transforms.Resize(cover, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
        ]
    )
    return pixels, transforms.Compose([transforms.ToTensor(), transforms.Normalize(*IMAGENET.values())])


def test_photographs_are_what_dino_is_evaluated_on(transforms, photographs):
    pixels, tensor = evaluation(transforms)
    for path in photographs:
        image = decode_image(path.read_bytes())
        theirs = pixels(Image.fromarray(image))
        canvas, _ = crop(image, cropping())
        np.testing.assert_array_equal(canvas, np.asarray(theirs))
        # Theirs is in single precision: its own roundings are all that differs.
        assert np.abs(fit(image, cropping())[0] - tensor(theirs).numpy()).max() < 1e-6


def test_real_and_odd_pictures_are_what_dino_is_evaluated_on(transforms, shared_data):
    pixels, _ = evaluation(transforms)
    preprocessor, out = CropPreprocessor(cropping()), np.empty((224, 224, 3), np.uint8)
    paths = sorted((shared_data / "coco-val27" / "images").iterdir())[:12]
    paths += [shared_data / "odd-images" / name for name in ("flower.webp", "hopper_orientation_6.jpg", "i_trns.png")]
    for path in paths:
        image = decode_image(path.read_bytes())
        preprocessor.write(image, out)
        assert_is(np.asarray(pixels(Image.fromarray(image))), out, image, cropping())


def assert_is(theirs, ours, image, spec):
    """To the bit; with the columns first where Pillow 13 takes them first (python-pillow/Pillow#9549)."""
    if image.shape[0] > 2 * image.shape[1] and not np.array_equal(theirs, ours):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(antialias, "rows_first", lambda *_: False)
            ours, _ = crop(image, spec)
    np.testing.assert_array_equal(theirs, ours)


@settings(max_examples=80, deadline=None)
@given(hw=st.tuples(st.integers(1, 500), st.integers(1, 500)), size=st.sampled_from([14, 28, 98]), seed=SEEDS)
@example(hw=(1, 1), size=14, seed=0)
@example(hw=(1, 3000), size=14, seed=1)
@example(hw=(16, 16), size=14, seed=1)
@example(hw=(17, 16), size=14, seed=1)
@example(hw=(15, 16), size=14, seed=1)
@example(hw=(19, 16), size=14, seed=1)
def test_any_size_is_what_torchvision_makes_of_it(transforms, hw, size, seed):
    cover = round(size * 256 / 224)
    pixels, _ = evaluation(transforms, size, cover)
    image = noise(hw, seed)
    spec = cropping((size, size), (cover, cover))
    assert_is(np.asarray(pixels(Image.fromarray(image))), crop(image, spec)[0], image, spec)


def test_stretch_is_what_torchvision_makes_of_it(transforms):
    for hw in ((50, 300), (300, 300), (7, 5)):
        image = noise(hw, 1)
        theirs = transforms.Resize((28, 42), interpolation=transforms.InterpolationMode.BICUBIC)(Image.fromarray(image))
        np.testing.assert_array_equal(crop(image, squashing((28, 42)))[0], np.asarray(theirs))
