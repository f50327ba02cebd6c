"""SAM's and SAM 2's resizes: the definitions against Pillow, torchvision and arithmetic done by hand; the fast versions
against the definitions; both against the official transforms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import OptionError, ShapeError
from visionfast.preprocess.antialias import fit, geometry, resize_antialias_float, resize_antialias_u8, triangle
from visionfast.preprocess.cpu_antialias import AntialiasPreprocessor
from visionfast.products import product
from visionfast.types import PreprocessSpec

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
STD = np.array(IMAGENET["std"])[:, None, None]
SIDES = st.one_of(st.integers(1, 4), st.integers(1, 400))
POWERS = st.sampled_from([2, 16, 64, 256])  # torch 2.14 makes an output of width 1 from the first pixel alone
SEEDS = st.integers(0, 2**32 - 1)


def spec(resize, side=1024, **changes):
    return PreprocessSpec(
        **{
            "size_hw": (side, side),
            "resize": resize,
            "interpolation": "bilinear-antialias",
            "pad_value": None,
            **IMAGENET,
            **changes,
        }
    )


def noise(image_hw, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)


# ---- geometry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image_hw", "resized_hw"),
    [
        pytest.param((1080, 810), (1024, 768), id="bus"),
        pytest.param((720, 1280), (576, 1024), id="zidane"),
        pytest.param((1024, 1024), (1024, 1024), id="as it is"),
        pytest.param((1, 1), (1024, 1024), id="one pixel"),
        pytest.param((1, 5000), (1, 1024), id="thin: a side that rounds to nothing"),
        pytest.param((5000, 1), (1024, 1), id="tall"),
        pytest.param((3, 2048), (2, 1024), id="1.5 rounds to 2"),
        pytest.param((5, 2048), (3, 1024), id="2.5 rounds to 3: half up"),
    ],
)
def test_longest_side_geometry(image_hw, resized_hw):
    placed = geometry(image_hw, spec("longest-side"))
    assert (placed.resized_hw, placed.top, placed.left) == (resized_hw, 0, 0)
    assert placed.gain == 1024 / max(image_hw)


@settings(deadline=None)
@given(image_hw=st.tuples(st.integers(1, 9000), st.integers(1, 9000)))
@example(image_hw=(1, 5000))
def test_longest_side_geometry_is_the_official_one(image_hw):
    transforms = pytest.importorskip("segment_anything.utils.transforms")
    theirs = transforms.ResizeLongestSide.get_preprocess_shape(*image_hw, 1024)
    assert geometry(image_hw, spec("longest-side")).resized_hw == tuple(max(1, side) for side in theirs)


def test_stretch_geometry_fills_the_input():
    placed = geometry((1, 5000), spec("stretch", size_hw=(256, 512)))
    assert (placed.size_hw, placed.resized_hw, placed.top, placed.left) == ((256, 512), (256, 512), 0, 0)
    assert placed.gain == 512 / 5000


@pytest.mark.parametrize("image_hw", [(0, 5), (5, 0)])
@pytest.mark.parametrize("resize", ["longest-side", "stretch"])
def test_geometry_refuses_an_image_of_nothing(image_hw, resize):
    with pytest.raises(ShapeError, match="at least 1 pixel"):
        geometry(image_hw, spec(resize))


@pytest.mark.parametrize(
    "other",
    [
        PreprocessSpec((64, 64)),
        PreprocessSpec((64, 64), "stretch"),
        PreprocessSpec((64, 32), "longest-side", "bilinear-antialias"),
    ],
    ids=["letterbox", "without antialias", "not square"],
)
def test_another_resize_is_refused(other):
    for use in (
        lambda: geometry((8, 8), other),
        lambda: fit(noise((8, 8)), other),
        lambda: AntialiasPreprocessor(other),
    ):
        with pytest.raises(OptionError, match="expected bilinear-antialias with stretch"):
            use()


# ---- the definitions --------------------------------------------------------------------------------------


def test_halving_a_row_by_hand():
    # The first of two pixels: centre 1, half the filter's width 2; pixels 0, 1, 2 have 3/4, 3/4 and 1/4.
    start, weights = triangle(2, 4)
    assert start.tolist() == [0, 1]
    np.testing.assert_allclose(weights, np.array([[3, 3, 1], [1, 3, 3]]) / 7, rtol=1e-15)
    row = np.repeat(np.array([[0, 70, 140, 210]], np.uint8)[:, :, None], 3, axis=2)
    np.testing.assert_allclose(resize_antialias_float(row, (1, 2))[0, :, 0], [50, 160], rtol=1e-15)
    assert resize_antialias_u8(row, (1, 2))[0, :, 0].tolist() == [50, 160]


def test_doubling_a_row_by_hand():
    row = np.repeat(np.array([[0, 100, 201]], np.uint8)[:, :, None], 3, axis=2)
    assert resize_antialias_float(row, (1, 6))[0, :, 0].tolist() == [0, 25, 75, 125.25, 175.75, 201]
    assert resize_antialias_u8(row, (1, 6))[0, :, 0].tolist() == [0, 25, 75, 125, 176, 201]


@settings(deadline=None)
@given(
    length=st.integers(1, 300), source=st.one_of(st.integers(1, 300), st.integers(1, 20_000)), cut=st.integers(0, 300)
)
def test_weights_are_inside_the_image_and_part_of_it_is_the_same(length, source, cut):
    start, weights = triangle(length, source)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
    last = start + (weights > 0).cumsum(1).argmax(1)
    assert (start >= 0).all()
    assert (last < source).all()
    assert (np.diff(start) >= 0).all()
    first = min(cut, length - 1)
    some_start, some_weights = triangle(length, source, first, min(first + 8, length))
    np.testing.assert_array_equal(some_start, start[first : first + 8])
    np.testing.assert_array_equal(some_weights, weights[first : first + 8, : some_weights.shape[1]])


@settings(max_examples=150, deadline=None)
@given(hw=st.tuples(SIDES, SIDES), size_hw=st.tuples(SIDES, SIDES), seed=SEEDS)
@example(hw=(1, 1), size_hw=(1, 1), seed=0)
@example(hw=(1, 5000), size_hw=(1, 64), seed=0)
@example(hw=(5000, 1), size_hw=(64, 1), seed=0)
@example(hw=(64, 64), size_hw=(64, 64), seed=0)
@example(hw=(64, 99), size_hw=(64, 31), seed=0)
@example(hw=(99, 64), size_hw=(31, 64), seed=0)
def test_eight_bit_resize_equals_pillow(hw, size_hw, seed):
    image = noise(hw, seed)
    if seed % 2:
        image = np.where(image < 128, 0, 255).astype(np.uint8)  # full of ties and steps
    np.testing.assert_array_equal(
        resize_antialias_u8(image, size_hw), _pillow(_pillow(image, (hw[0], size_hw[1])), size_hw)
    )


@settings(max_examples=60, deadline=None)
@given(hw=st.tuples(SIDES, SIDES), seed=SEEDS)
def test_eight_bit_resize_of_a_wide_image_is_one_call_of_pillow(hw, seed):
    image = noise(sorted(hw), seed)  # Pillow 13 does not turn the passes round
    size_hw = geometry(image.shape[:2], spec("longest-side", 96)).resized_hw
    np.testing.assert_array_equal(resize_antialias_u8(image, size_hw), _pillow(image, size_hw))


@settings(max_examples=60, deadline=None)
@given(hw=st.tuples(SIDES, SIDES), size_hw=st.tuples(SIDES, SIDES), seed=SEEDS)
def test_eight_bit_resize_is_pillows_within_one_level_in_whichever_order(hw, size_hw, seed):
    image = noise(hw, seed)
    apart = np.abs(resize_antialias_u8(image, size_hw).astype(int) - _pillow(image, size_hw))
    assert apart.max() <= 1


def _pillow(image, size_hw):
    return np.asarray(Image.fromarray(image).resize(size_hw[::-1], Image.Resampling.BILINEAR))


@settings(max_examples=60, deadline=None)
@given(hw=st.tuples(SIDES, SIDES), size_hw=st.tuples(POWERS, POWERS), seed=SEEDS)
@example(hw=(1, 5000), size_hw=(64, 64), seed=0)
@example(hw=(64, 64), size_hw=(64, 64), seed=0)
def test_real_resize_is_torchvisions(hw, size_hw, seed):
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("torchvision.transforms.functional")
    image = noise(hw, seed)
    planes = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    theirs = functional.resize(planes.double() / 255, list(size_hw), antialias=True)
    ours = resize_antialias_float(image, size_hw).transpose(2, 0, 1) / 255
    assert np.abs(ours - theirs.numpy()).max() < 1e-12
    # As its predictor has it, in float32, which rounds at every pixel that it adds up.
    theirs = functional.resize(planes.float() / 255, list(size_hw), antialias=True)
    reduction = max(1, hw[0] / size_hw[0], hw[1] / size_hw[1])
    assert np.abs(ours - theirs.numpy()).max() < 5e-7 * max(1, (reduction / 32) ** 0.5)


@settings(max_examples=60, deadline=None)
@given(hw=st.tuples(SIDES, SIDES), size_hw=st.tuples(SIDES, SIDES), seed=SEEDS)
def test_both_resizes_are_within_two_roundings_of_each_other(hw, size_hw, seed):
    image = noise(hw, seed)
    apart = np.abs(resize_antialias_u8(image, size_hw) - resize_antialias_float(image, size_hw))
    assert apart.max() < 1 + 1e-3


@pytest.mark.parametrize("level", [0, 1, 127, 255])
@pytest.mark.parametrize("size_hw", [(3, 50), (50, 3), (17, 16)])
def test_one_level_stays_that_level(level, size_hw):
    image = np.full((16, 17, 3), level, np.uint8)
    assert (resize_antialias_u8(image, size_hw) == level).all()
    np.testing.assert_allclose(resize_antialias_float(image, size_hw), level, rtol=1e-14)


# ---- the fast version -------------------------------------------------------------------------------------

LONGEST = {side: AntialiasPreprocessor(spec("longest-side", side)) for side in (1, 64)}
STRETCH = {hw: AntialiasPreprocessor(spec("stretch", size_hw=hw)) for hw in ((1, 1), (64, 64), (33, 97))}


@settings(max_examples=120, deadline=None)
@given(image_hw=st.tuples(SIDES, SIDES), side=st.sampled_from([64, 1]), half=st.booleans(), seed=SEEDS)
@example(image_hw=(1, 1), side=64, half=False, seed=0)
@example(image_hw=(64, 64), side=64, half=True, seed=0)
@example(image_hw=(64, 63), side=64, half=False, seed=0)
@example(image_hw=(1, 5000), side=64, half=False, seed=0)
@example(image_hw=(5000, 1), side=64, half=True, seed=0)
@example(image_hw=(1, 70_000), side=64, half=False, seed=0)
def test_longest_side_equals_the_definition_in_a_used_input(image_hw, side, half, seed):
    image = noise(image_hw, seed)
    untouched = image.copy()
    out = np.full((1, 3, side, side), np.nan, np.float16 if half else np.float32)
    placed = LONGEST[side].write(image, out)
    expected, expected_placed = fit(image, LONGEST[side].spec)
    assert placed == expected_placed
    np.testing.assert_array_equal(out[0], _rounded(image, LONGEST[side].spec) if half else expected)
    np.testing.assert_array_equal(image, untouched)


def _rounded(image, spec_):
    """The definition in float16: rounded once, from double precision."""
    from visionfast.preprocess.reference import normalise

    placed = geometry(image.shape[:2], spec_)
    (new_h, new_w), out = placed.resized_hw, np.zeros((3, *spec_.size_hw), np.float16)
    out[:, :new_h, :new_w] = normalise(resize_antialias_u8(image, placed.resized_hw), spec_, np.float16)
    return out


@settings(max_examples=120, deadline=None)
@given(image_hw=st.tuples(SIDES, SIDES), size_hw=st.sampled_from(sorted(STRETCH)), half=st.booleans(), seed=SEEDS)
@example(image_hw=(1, 1), size_hw=(64, 64), half=False, seed=0)
@example(image_hw=(64, 64), size_hw=(64, 64), half=False, seed=0)
@example(image_hw=(1, 5000), size_hw=(33, 97), half=True, seed=0)
@example(image_hw=(5000, 1), size_hw=(33, 97), half=False, seed=0)
@example(image_hw=(1, 70_000), size_hw=(64, 64), half=False, seed=0)
@example(image_hw=(70_000, 2), size_hw=(64, 64), half=False, seed=0)
def test_stretch_is_the_definition_in_a_used_input(image_hw, size_hw, half, seed):
    image = noise(image_hw, seed)
    untouched = image.copy()
    out = np.full((3, *size_hw), np.nan, np.float16 if half else np.float32)
    placed = STRETCH[size_hw].write(image, out)
    expected, expected_placed = fit(image, STRETCH[size_hw].spec)
    assert placed == expected_placed
    rounding = np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64) if half else 0
    assert (np.abs(out.astype(np.float64) - expected) <= 1e-6 / STD + rounding).all()
    np.testing.assert_array_equal(image, untouched)


@pytest.mark.parametrize("image_hw", [(480, 640), (1080, 1920), (1920, 1080), (300, 4000)])
def test_stretch_in_the_pieces_that_one_thread_computes(image_hw):
    image, full = noise(image_hw), spec("stretch")
    out = np.full((1, 3, 1024, 1024), np.nan, np.float32)
    AntialiasPreprocessor(full).write(image, out)
    assert (np.abs(out[0] - fit(image, full)[0]) <= 1e-6 / STD).all()


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (900, 40, 32), (8, 100, 5000), (2, 300_000, 3), (3, 300_000, 2)])
def test_products_in_pieces(m, k, n):
    rng = np.random.default_rng(0)
    a, b = rng.random((m, k), np.float32), rng.random((k, n), np.float32)
    out = np.full((m, n), np.nan, np.float32)
    product(a, b, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b, rtol=1e-4)


@pytest.mark.parametrize("resize", ["longest-side", "stretch"])
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-1],
        lambda a: a[..., ::-1],
        lambda a: a[::2, 1::3],
        lambda a: a.transpose(1, 0, 2),
        lambda a: np.frombuffer(a.tobytes(), np.uint8).reshape(a.shape),
    ],
    ids=["upside down", "mirrored", "BGR view", "strided", "transposed", "read-only"],
)
def test_views_of_arrays(resize, view):
    image = view(noise((50, 60)))
    small = spec(resize, 64)
    out = np.empty((3, 64, 64), np.float32)
    AntialiasPreprocessor(small).write(image, out)
    np.testing.assert_allclose(out, fit(np.ascontiguousarray(image), small)[0], rtol=0, atol=1e-5)


def test_padding_of_a_grey_level():
    grey = spec("longest-side", 64, pad_value=114)
    image = np.full((10, 20, 3), 114, np.uint8)
    expected = fit(image, grey)[0]
    np.testing.assert_array_equal(expected, np.broadcast_to(expected[:, :1, :1], expected.shape))
    for dtype in (np.float32, np.float16):
        out = np.full((3, 64, 64), np.nan, dtype)
        AntialiasPreprocessor(grey).write(image, out)
        np.testing.assert_array_equal(out, expected.astype(dtype))


@pytest.mark.parametrize("resize", ["longest-side", "stretch"])
def test_wrong_shapes_are_refused(resize):
    preprocessor = AntialiasPreprocessor(spec(resize, 64))
    right_image, right_out = noise((8, 8)), np.zeros((1, 3, 64, 64), np.float32)
    for image in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3)), noise((0, 4))):
        with pytest.raises(ShapeError, match=r"image: expected \(H, W, 3\) uint8"):
            preprocessor.write(image, right_out)
        with pytest.raises(ShapeError, match=r"image: expected \(H, W, 3\) uint8"):
            fit(image, preprocessor.spec)
    for out in (right_out[..., :32], right_out.astype(np.float64), np.zeros((2, 3, 64, 64), np.float32)):
        with pytest.raises(ShapeError, match=r"out: expected \(3, 64, 64\) float32 or float16"):
            preprocessor.write(right_image, out)
    with pytest.raises(ShapeError, match="C-contiguous"):
        preprocessor.write(right_image, np.zeros((3, 64, 128), np.float32)[..., ::2])


# ---- the official transforms ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(photographs):
    return [np.asarray(Image.open(path).convert("RGB")) for path in photographs] + [noise((37, 500)), noise((5, 4000))]


def test_longest_side_is_what_sam_feeds_its_encoder(pictures):
    torch = pytest.importorskip("torch")
    pytest.importorskip("segment_anything")
    from segment_anything.modeling import ImageEncoderViT, Sam
    from segment_anything.utils.transforms import ResizeLongestSide

    sam = Sam(
        ImageEncoderViT(img_size=1024, embed_dim=8, depth=1, num_heads=1), torch.nn.Identity(), torch.nn.Identity()
    )
    preprocessor = AntialiasPreprocessor(spec("longest-side"))
    out = np.empty((1, 3, 1024, 1024), np.float32)
    for picture in pictures:
        resized = ResizeLongestSide(1024).apply_image(picture)
        theirs = sam.preprocess(torch.as_tensor(resized).permute(2, 0, 1)[None])
        preprocessor.write(picture, out)
        # Their normalisation is in single precision, of levels 0..255: its own roundings are all that differs.
        assert np.abs(out - theirs.numpy()).max() < 1e-6

    tall = noise((900, 41))  # Pillow 13 resizes its columns first
    theirs = sam.preprocess(torch.as_tensor(ResizeLongestSide(1024).apply_image(tall)).permute(2, 0, 1)[None])
    preprocessor.write(tall, out)
    levels = np.abs(out[0] - theirs[0].numpy()) * STD * 255
    assert levels.max() < 1.001
    assert (levels > 0.001).mean() < 0.01


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # in SAM2Transforms
def test_stretch_is_what_sam_2_feeds_its_encoder(pictures):
    pytest.importorskip("torch")
    pytest.importorskip("sam2")
    from sam2.utils.transforms import SAM2Transforms

    transforms = SAM2Transforms(1024, mask_threshold=0.0)
    preprocessor = AntialiasPreprocessor(spec("stretch"))
    out = np.empty((3, 1024, 1024), np.float32)
    for picture in pictures:
        preprocessor.write(picture, out)
        theirs = transforms(picture.copy()).numpy()  # it wants to write
        assert (np.abs(out - theirs) * STD).max() < 1e-6
