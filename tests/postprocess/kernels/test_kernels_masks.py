"""The mask kernels against their NumPy definition: in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_boxes import random_boxes

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from visionfast.errors import BackendUnavailableError, OptionError, ShapeError  # noqa: E402
from visionfast.postprocess.kernels import mask_stages as stages  # noqa: E402
from visionfast.postprocess.kernels import masks as masks_module  # noqa: E402
from visionfast.postprocess.kernels.layout import found_shape, placement  # noqa: E402
from visionfast.postprocess.kernels.masks import MaskKernels, ahead_of_time  # noqa: E402
from visionfast.postprocess.packed import box_pixels, pack_reference, unpack  # noqa: E402
from visionfast.postprocess.prototypes import (  # noqa: E402
    _enlargement,
    decode_masks,
    mask_logits_reference,
    masks_reference,
)
from visionfast.preprocess.reference import letterbox_geometry  # noqa: E402
from visionfast.types import Letterbox  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, CLASSES, ANCHORS = 5, 3, 11

# A pixel may fall on either side where its logit is this near to 0, relative to the sum of |coefficient| × the
# plane's largest value, which no logit passes. float32 rounds at 6e-8 of that, a few times for each prototype.
ROUNDING = 2e-6


@dataclass
class Batch:
    """What the kernels read, and where it came from; a slot without an image has no letterbox."""

    letterboxes: list[Letterbox | None]
    xyxy: list[np.ndarray]
    anchor: list[np.ndarray]
    predictions: np.ndarray
    prototypes: np.ndarray
    size_hw: tuple[int, int]
    max_det: int

    def coefficients(self, slot: int) -> np.ndarray:
        return np.ascontiguousarray(self.predictions[slot, 4 + CLASSES :].T[self.anchor[slot]])

    def tensors(self) -> tuple[torch.Tensor, ...]:
        batch = len(self.letterboxes)
        # What lies beyond the count is undefined: here NaN boxes and anchors far outside.
        found = np.full(found_shape(batch, self.max_det), np.float32("nan").view(np.int32), np.int32)
        for rows, xyxy, anchor in zip(found, self.xyxy, self.anchor, strict=True):
            rows[0, 0] = len(xyxy)
            rows[1 : 1 + len(xyxy), :4] = xyxy.view(np.int32)
            rows[1 : 1 + len(xyxy), 6] = anchor
        placed = np.zeros((batch, 8), np.float32)
        placement(self.letterboxes, placed)
        arrays = (self.predictions, self.prototypes, found, placed)
        return tuple(torch.from_numpy(array).to(DEVICE) for array in arrays)

    def kernels(self, capacity_words: int = 20_000) -> MaskKernels:
        kernels = MaskKernels(
            batch=len(self.letterboxes),
            num_classes=CLASSES,
            anchors=ANCHORS,
            prototypes_shape=self.prototypes.shape[1:],
            size_hw=self.size_hw,
            max_det=self.max_det,
            capacity_words=capacity_words,
            device=DEVICE,
        )
        kernels._logits.fill_(float("nan"))  # a logit that nobody worked out shows
        return kernels


def _batch(
    seed: int,
    images_hw: Sequence[tuple[int, int] | None],
    *,
    size_hw: tuple[int, int] = (64, 64),
    stride: int = 4,
    counts: Sequence[int],
    max_det: int = 4,
    half: bool = False,
    xyxy: Sequence[np.ndarray] | None = None,
) -> Batch:
    rng = np.random.default_rng(seed)
    slots = len(images_hw)
    planes = rng.normal(0, 1, (slots, M, size_hw[0] // stride, size_hw[1] // stride))
    boxes = [
        np.zeros((0, 4), np.float32) if image_hw is None else random_boxes(rng, n, image_hw)
        for image_hw, n in zip(images_hw, counts, strict=True)
    ]
    boxes = boxes if xyxy is None else list(xyxy)
    return Batch(
        letterboxes=[None if image_hw is None else letterbox_geometry(image_hw, size_hw) for image_hw in images_hw],
        xyxy=boxes,
        anchor=[rng.integers(0, ANCHORS, len(b)) for b in boxes],
        predictions=rng.normal(0, 1, (slots, 4 + CLASSES + M, ANCHORS)).astype(np.float32),
        prototypes=planes.astype(np.float16 if half else np.float32),
        size_hw=size_hw,
        max_det=max_det,
    )


def _check(batch: Batch, offsets: np.ndarray, words: np.ndarray) -> None:
    """Every image's words are the definition's, up to pixels whose logit is 0 within rounding: at most one in 1000."""
    pixels = undecided_pixels = 0
    end = 0
    for slot, letterbox in enumerate(batch.letterboxes):
        xyxy, n = batch.xyxy[slot], len(batch.xyxy[slot])
        assert offsets[slot, 0] == end
        end = int(offsets[slot, -1])
        assert (offsets[slot, n:] == end).all()
        if letterbox is None:
            assert n == 0
            continue
        masks = unpack(words, offsets[slot], xyxy, letterbox.image_hw).dense()
        planes, coefficients = batch.prototypes[slot], batch.coefficients(slot)
        expected = masks_reference(planes, coefficients, xyxy, letterbox)
        scale = (np.abs(coefficients) * np.abs(planes).max(axis=(1, 2))).sum(axis=1)
        undecided = np.abs(mask_logits_reference(planes, coefficients, letterbox)) < ROUNDING * scale[:, None, None]
        np.testing.assert_array_equal(masks[~undecided], expected[~undecided])
        pixels, undecided_pixels = pixels + undecided.size, undecided_pixels + int(undecided.sum())
        # Nothing is set that the format has no pixel for.
        again, steps = pack_reference(masks, xyxy)
        np.testing.assert_array_equal(words[offsets[slot, 0] : end], again)
        np.testing.assert_array_equal(offsets[slot, : n + 1] - offsets[slot, 0], steps)
    assert end == len(words)
    assert undecided_pixels <= 1 + pixels // 1000


def _run(batch: Batch, capacity_words: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    kernels, tensors = batch.kernels(capacity_words), batch.tensors()
    kernels.enqueue(*tensors)
    return kernels.fetch(*tensors)


IMAGES_HW = st.tuples(st.integers(1, 70), st.integers(1, 90)) | st.sampled_from(
    [(1, 1), (1, 200), (120, 1), (64, 64), (16, 16), (48, 63), (61, 64), (62, 64), (32, 33), (3, 3)]
)


@given(
    images_hw=st.lists(IMAGES_HW | st.none(), min_size=1, max_size=2),
    size_hw=st.sampled_from([(64, 64), (32, 64), (96, 32)]),
    half=st.booleans(),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
def test_kernels_equal_definition(
    images_hw: list[tuple[int, int] | None], size_hw: tuple[int, int], half: bool, data: st.DataObject, seed: int
) -> None:
    counts = [0 if image_hw is None else data.draw(st.integers(0, 2)) for image_hw in images_hw]
    batch = _batch(seed, images_hw, size_hw=size_hw, counts=counts, max_det=2, half=half)
    _check(batch, *_run(batch))


@pytest.mark.parametrize(
    ("image_hw", "size_hw", "stride", "factor"),
    [
        ((64, 64), (64, 64), 4, 1),  # no padding, one prototype pixel for four image pixels
        ((16, 16), (64, 64), 4, 1),  # image as large as the plane
        ((100, 50), (64, 64), 4, 1),  # padding 16 + 16
        ((62, 64), (64, 64), 4, 4),  # padding 1 + 1
        ((60, 64), (64, 64), 4, 2),  # padding 2 + 2
        ((59, 64), (64, 64), 4, 4),  # padding 2 + 3
        ((7, 9), (64, 64), 4, 4),  # smaller than the plane
        ((90, 93), (64, 64), 4, 4),
        ((150, 2), (64, 64), 4, 4),  # one column of the input
        ((40, 48), (48, 48), 3, 3),  # padding 4 + 4, and a third is no power of two
        ((45, 50), (64, 64), 8, 8),
        ((30, 30), (32, 32), 1, 1),  # planes as large as the input
    ],
)
def test_geometries(image_hw: tuple[int, int], size_hw: tuple[int, int], stride: int, factor: int) -> None:
    letterbox = letterbox_geometry(image_hw, size_hw)
    assert _enlargement(letterbox, (size_hw[0] // stride, size_hw[1] // stride)) == factor
    whole = np.array([[0, 0, image_hw[1], image_hw[0]]], np.float32)
    batch = _batch(1, [image_hw], size_hw=size_hw, stride=stride, counts=[1], xyxy=[whole])
    _check(batch, *_run(batch))


def test_several_tiles() -> None:
    # 300 × 70 pixels: three tiles of columns, three rows of tiles; the middle box begins and ends inside some.
    boxes = np.array([[0, 0, 300, 70], [5, 3, 262, 68], [128, 32, 256, 64]], np.float32)
    batch = _batch(2, [(70, 300)], counts=[3], xyxy=[boxes])
    _check(batch, *_run(batch))


@pytest.mark.parametrize("count", [0, 1, 19])
def test_counts_from_none_to_max_det(count: int) -> None:
    # 19: two groups of objects, neither a power of two nor a whole group.
    batch = _batch(3, [(20, 12), None, (9, 14)], size_hw=(32, 32), counts=[count, 0, count], max_det=19)
    _check(batch, *_run(batch))


@pytest.mark.parametrize("capacity", [1, 7, 150, 10_000])
def test_words_that_do_not_fit_come_in_further_rounds(capacity: int) -> None:
    boxes = [np.array([[0, 0, 9, 40], [1, 1, 8, 9]], np.float32), np.array([[2, 0, 5, 33]], np.float32)]
    batch = _batch(4, [(40, 9), (33, 9)], size_hw=(32, 32), counts=[2, 1], xyxy=boxes)
    total = 9 * 2 + 7 + 3 * 2
    if capacity == 1:  # 31 rounds of one word: one of the boxes will do
        batch.xyxy, batch.anchor = [boxes[0][1:], boxes[1]], [batch.anchor[0][1:], batch.anchor[1]]
        total -= 9 * 2
    kernels, tensors = batch.kernels(capacity), batch.tensors()
    guarded = torch.full((capacity + 64,), 77, dtype=torch.int32, device=DEVICE)
    kernels.words = guarded[:capacity]
    kernels.enqueue(*tensors)
    offsets, words = kernels.fetch(*tensors)
    assert offsets[-1, -1] == len(words) == total
    assert (guarded[capacity:] == 77).all()  # nothing beyond the end
    assert (guarded[total:] == 77).all()
    _check(batch, offsets, words)


def test_images_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _batch(5, [(20, 12), (9, 14), None, (30, 3), (8, 8)], size_hw=(32, 32), counts=[2, 1, 0, 3, 4])
    together = _run(batch)
    _check(batch, *together)
    one_image = 4 * batch.max_det * 8 * 8
    for scratch in (1, 2 * one_image):  # one at a time, and two, two and one
        monkeypatch.setattr(masks_module, "_SCRATCH_BYTES", scratch)
        for ours, theirs in zip(_run(batch), together, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_call_leaves_nothing_behind_for_the_next() -> None:
    full = _batch(6, [(40, 30), (33, 9)], size_hw=(32, 32), counts=[4, 4])
    sparse = _batch(7, [None, (12, 30)], size_hw=(32, 32), counts=[0, 1])
    kernels = full.kernels()
    for batch in (full, sparse, full):
        tensors = batch.tensors()
        kernels.enqueue(*tensors)
        ours = kernels.fetch(*tensors)
        for mine, fresh in zip(ours, _run(batch), strict=True):
            np.testing.assert_array_equal(mine, fresh)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_that_are_not_finite_stay_with_their_object(value: float) -> None:
    boxes = np.array([[0, 0, 12, 20]] * 3, np.float32)
    batch = _batch(8, [(20, 12)], size_hw=(32, 32), counts=[3], xyxy=[boxes])
    batch.anchor = [np.array([4, 1, 2])]
    batch.predictions[0, 4 + CLASSES + 1, 1] = value
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy
        offsets, words = _run(batch)
    letterbox = batch.letterboxes[0]
    assert letterbox is not None
    masks = unpack(words, offsets[0], boxes, letterbox.image_hw)
    healthy = [0, 2]
    expected = decode_masks(batch.prototypes[0], batch.coefficients(0)[healthy], boxes[healthy], letterbox)
    assert masks[healthy] == expected
    assert np.isfinite(value) or masks.area()[1] == 0


def test_a_logit_of_0_is_outside() -> None:
    boxes = np.array([[0, 0, 12, 20]], np.float32)
    batch = _batch(13, [(20, 12)], size_hw=(32, 32), counts=[1], xyxy=[boxes])
    batch.predictions[:, 4 + CLASSES :] = 0
    offsets, words = _run(batch)
    assert offsets[0, -1] == 12
    assert not words.any()


@pytest.mark.parametrize("box", [(np.nan, 0, 9, 9), (0, 0, 9, np.nan), (-np.inf, 0, np.inf, 9), (5, 5, 5, 9)])
def test_boxes_that_are_none(box: tuple[float, ...]) -> None:
    boxes = np.array([box, (1, 2, 7, 8)], np.float32)
    batch = _batch(9, [(20, 12)], size_hw=(32, 32), counts=[2], xyxy=[boxes])
    offsets, words = _run(batch)
    first = 12 if np.isinf(box[0]) else 0  # the columns of the whole width: infinity is beyond every edge
    assert offsets[0, :3].tolist() == [0, first, first + 6]
    batch.xyxy = [np.nan_to_num(boxes[1:])]
    batch.anchor = [batch.anchor[0][1:]]
    _check(batch, offsets[:, 1:] - first, words[first:])


def test_offsets_beyond_31_bits() -> None:
    max_det, side = 300, 60_000
    letterbox = letterbox_geometry((side, side), (64, 64))
    found = np.zeros(found_shape(2, max_det), np.int32)
    found[:, 0, 0] = max_det
    found[:, 1:, 2:4] = np.float32(side).view(np.int32)
    placed = np.zeros((2, 8), np.float32)
    placement([letterbox, letterbox], placed)
    offsets, tiles = (torch.zeros((2, max_det + 1), dtype=torch.int64, device=DEVICE) for _ in range(2))
    extents = torch.zeros((2, max_det + 1, 8), dtype=torch.int32, device=DEVICE)
    constants = masks_module._Shape(2, CLASSES, ANCHORS, (M, 16, 16), 4, max_det, 1).plan()
    inputs = (torch.from_numpy(array).to(DEVICE) for array in (found, placed))
    stages.plan[(2,)](*inputs, extents, offsets, tiles, **constants)
    words_of_one = side * (side // 32)
    expected = np.arange(2 * max_det + 1, dtype=np.int64) * words_of_one
    assert offsets.cpu().numpy()[0].tolist() == expected[: max_det + 1].tolist()
    assert offsets.cpu().numpy()[1].tolist() == expected[max_det:].tolist()
    assert int(tiles[1, -1]) == 2 * max_det * -(-side // 128) * (side // 32)
    assert extents[:, :-1].reshape(-1, 8).unique(dim=0).tolist() == [[0, 0, side, side, 0, 0, 16, 16]]


def test_real_sizes_once() -> None:
    # A 640 input of 32 prototypes, a photograph of 1280 × 720, an object of ordinary size.
    rng = np.random.default_rng(10)
    letterbox = letterbox_geometry((720, 1280), (640, 640))
    kernels = MaskKernels(
        batch=1,
        num_classes=80,
        anchors=8400,
        prototypes_shape=(32, 160, 160),
        size_hw=(640, 640),
        max_det=20,
        capacity_words=1 << 17,
        device=DEVICE,
    )
    predictions = rng.normal(0, 1, (1, 116, 8400)).astype(np.float32)
    planes = rng.normal(0, 1, (1, 32, 160, 160)).astype(np.float16)
    xyxy = np.array([[600.3, 401.7, 663.2, 460]], np.float32)
    found = np.zeros(found_shape(1, 20), np.int32)
    found[0, 0, 0], found[0, 1, :4], found[0, 1, 6] = 1, xyxy.view(np.int32), 8399
    placed = np.zeros((1, 8), np.float32)
    placement([letterbox], placed)
    tensors = tuple(torch.from_numpy(array).to(DEVICE) for array in (predictions, planes, found, placed))
    kernels.enqueue(*tensors)
    offsets, words = kernels.fetch(*tensors)
    coefficients = predictions[:, 84:, 8399]
    expected = decode_masks(planes[0], coefficients, xyxy, letterbox).dense()
    (left, top, right, bottom) = box_pixels(xyxy, (720, 1280))[0]
    logits = mask_logits_reference(planes[0], coefficients, letterbox)
    undecided = np.abs(logits) < ROUNDING * 32 * 4
    assert undecided[0, top:bottom, left:right].mean() < 1e-3
    masks = unpack(words, offsets[0], xyxy, (720, 1280)).dense()
    np.testing.assert_array_equal(masks[~undecided], expected[~undecided])


def test_what_is_refused() -> None:
    batch = _batch(11, [(20, 12)], size_hw=(32, 32), counts=[1])
    kernels = batch.kernels()
    names = ("predictions", "prototypes", "found", "placement")
    for position, name in enumerate(names):
        tensors = list(batch.tensors())
        for wrong in (tensors[position][..., :-1], tensors[position].to(torch.float64)):
            with pytest.raises(ShapeError, match=f"{name}: expected"):
                kernels.enqueue(*tensors[:position], wrong, *tensors[position + 1 :])
    tensors = batch.tensors()
    with pytest.raises(ShapeError, match=r"predictions: .*not contiguous"):
        kernels.enqueue(tensors[0].transpose(1, 2).contiguous().transpose(1, 2), *tensors[1:])
    sizes = {"num_classes": 3, "anchors": 11, "prototypes_shape": (5, 8, 8), "size_hw": (32, 32), "device": DEVICE}
    for bad in ({"batch": 0}, {"max_det": 0}, {"capacity_words": 0}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            MaskKernels(**sizes | {"batch": 1, "max_det": 4, "capacity_words": 8} | bad)
    for planes in ((5, 8, 7), (5, 0, 0), (0, 8, 8), (5, 16, 8)):
        with pytest.raises(ShapeError, match="prototypes"):
            MaskKernels(**sizes | {"batch": 1, "max_det": 4, "capacity_words": 8, "prototypes_shape": planes})


@pytest.mark.skipif(DEVICE == "cuda", reason="here is a CUDA device")
def test_without_a_cuda_device() -> None:
    sizes = {"batch": 1, "num_classes": 3, "anchors": 11, "prototypes_shape": (5, 8, 8), "size_hw": (32, 32)}
    for device in ("cuda", "cuda:1", "meta"):
        with pytest.raises(BackendUnavailableError, match=f"got {device}, which is not here"):
            MaskKernels(**sizes, max_det=4, capacity_words=8, device=device)


def test_the_longest_side_still_fits_in_32_bits() -> None:
    # `longest_side` columns of one pixel each, seen by the widest column of the plane, are at the edge of int32.
    kernels = _batch(12, [(1, 1)], size_hw=(64, 64), counts=[0]).kernels()
    side = kernels.longest_side
    assert (2 * (side - 1) + 1) * 64 + side < 2**31
    letterbox = letterbox_geometry((1, side), (64, 64))
    last = np.array([[side - 40, 0, side, 1]], np.float32)
    planes = np.repeat(np.linspace(-1, 1, 16, dtype=np.float32)[None, None], 16, axis=1)  # below 0 left, above it right
    found = np.zeros(found_shape(1, 4), np.int32)
    found[0, 0, 0], found[0, 1, :4] = 1, last.view(np.int32)
    placed = np.zeros((1, 8), np.float32)
    placement([letterbox], placed)
    kernels = MaskKernels(
        batch=1,
        num_classes=CLASSES,
        anchors=ANCHORS,
        prototypes_shape=(1, 16, 16),
        size_hw=(64, 64),
        max_det=4,
        capacity_words=100,
        device=DEVICE,
    )
    predictions = np.ones((1, 4 + CLASSES + 1, ANCHORS), np.float32)
    tensors = tuple(torch.from_numpy(array).to(DEVICE) for array in (predictions, planes[None], found, placed))
    kernels.enqueue(*tensors)
    _, words = kernels.fetch(*tensors)
    assert words.tolist() == [1] * 40


def test_ahead_of_time_lists_every_kernel_with_all_its_arguments() -> None:
    cases = list(ahead_of_time())
    assert len({name for name, *_ in cases}) == len(cases)
    for name, kernel, signature, constexprs, _ in cases:
        arguments = set(inspect.signature(kernel.fn).parameters)
        assert signature.keys() | constexprs.keys() == arguments, name
        assert not signature.keys() & constexprs.keys()
    assert {kernel.fn.__name__ for _, kernel, *_ in cases} == set(stages.__all__)
