"""The enlarging kernels against their NumPy definition: in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from visionfast.errors import BackendUnavailableError, OptionError, ShapeError  # noqa: E402
from visionfast.postprocess.enlarge import Resize, Taps, enlarge_reference, enlarge_taps  # noqa: E402
from visionfast.postprocess.kernels import enlarge_stages as stages  # noqa: E402
from visionfast.postprocess.kernels.enlarge import (  # noqa: E402
    TAP_ROWS,
    EnlargeKernels,
    TapTable,
    ahead_of_time,
    write_taps,
)
from visionfast.postprocess.packed import pack_reference, unpack  # noqa: E402
from visionfast.types import Letterbox  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# A pixel may fall on either side where its logit is this near to 0, relative to the sum of its taps' |weight × logit|:
# float32 rounds at 6e-8 of that, a few times for each tap.
ROUNDING = 5e-7


def placed_at(image_hw: tuple[int, int], resize: Resize, size: int = 64) -> Letterbox:
    """Where an image lies in a square input: at its top left, or all over it."""
    gain = size / max(image_hw)
    resized = (size, size) if resize == "stretch" else tuple(max(1, int(side * gain + 0.5)) for side in image_hw)
    return Letterbox(image_hw, (size, size), resized, 0, 0, gain)  # type: ignore[arg-type]


def on_device(array: np.ndarray) -> Any:
    return torch.from_numpy(array).to(DEVICE)


def table_of(plane_hw: tuple[int, int], placed: Letterbox, resize: Resize) -> TapTable:
    table = np.full((TAP_ROWS, sum(placed.image_hw)), -77, np.int32)
    used = write_taps(*enlarge_taps(plane_hw, placed, resize), table)
    return TapTable(on_device(table), placed.image_hw, used)


def kernels_for(logits: np.ndarray, capacity_words: int = 20_000) -> EnlargeKernels:
    return EnlargeKernels(
        plane_hw=(logits.shape[1], logits.shape[2]), capacity_words=capacity_words, most_masks=8, device=DEVICE
    )


def packed(
    logits: np.ndarray, chosen: Sequence[int], placed: Letterbox, resize: Resize, *, capacity_words: int = 20_000
) -> np.ndarray:
    """(K, H, W) bool, in as many rounds as it takes; nothing is written beyond, and no bit that is not a pixel's."""
    kernels, table = kernels_for(logits, capacity_words), table_of(logits.shape[1:], placed, resize)
    guarded = torch.full((capacity_words + 64,), 77, dtype=torch.int32, device=DEVICE)
    kernels.words = guarded[:capacity_words]
    height, width = placed.image_hw
    words_high = -(-height // 32)
    words, begin = [np.zeros(0, np.int32)], 0
    while begin < len(chosen) * width:
        end = kernels.pack(on_device(logits), on_device(np.array(chosen, np.int32)), table, begin=begin)
        assert begin < end <= begin + capacity_words // words_high
        words.append(guarded[: (end - begin) * words_high].cpu().numpy().copy())
        begin = end
    assert (guarded[capacity_words:] == 77).all()
    whole = np.tile(np.array([[0, 0, width, height]], np.float32), (len(chosen), 1))
    offsets = np.arange(len(chosen) + 1, dtype=np.int64) * width * words_high
    masks = unpack(np.concatenate(words), offsets, whole, placed.image_hw).dense()
    np.testing.assert_array_equal(np.concatenate(words), pack_reference(masks, whole)[0])
    return masks


def counted(
    logits: np.ndarray, chosen: Sequence[int], placed: Letterbox, resize: Resize, delta: float
) -> list[tuple[int, ...]]:
    kernels, table = kernels_for(logits), table_of(logits.shape[1:], placed, resize)
    kernels.counts.fill_(1 << 40)  # a call leaves nothing behind for the next
    kernels.count(on_device(logits), on_device(np.array(chosen, np.int32)), table, delta=delta)
    return [tuple(row) for row in kernels.counts[: len(chosen)].tolist()]


def check(
    logits: np.ndarray, chosen: Sequence[int], placed: Letterbox, resize: Resize, *, delta: float = 0.3, **options: Any
) -> None:
    """Masks and counts are the definition's, but for pixels within rounding: at most one in 1000."""
    picked = logits[list(chosen)].astype(np.float32)
    enlarged = enlarge_reference(picked, placed, resize)
    slack = ROUNDING * enlarge_reference(np.abs(picked), placed, resize)
    undecided = np.abs(enlarged) <= slack
    masks = packed(logits, chosen, placed, resize, **options)
    np.testing.assert_array_equal(masks[~undecided], (enlarged > 0)[~undecided])
    assert undecided.sum() <= 1 + undecided.size // 1000 or not np.isfinite(picked).all()

    for index, counts in enumerate(counted(logits, chosen, placed, resize, delta)):
        for count, threshold in zip(counts, (delta, -delta), strict=True):
            near = int((np.abs(enlarged[index] - np.float32(threshold)) <= slack[index]).sum())
            assert abs(count - int((enlarged[index] > np.float32(threshold)).sum())) <= near


def random_logits(seed: int, plane_hw: tuple[int, int] = (16, 16), masks: int = 4, half: bool = False) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 2, (masks, *plane_hw))
    return logits.astype(np.float16 if half else np.float32)


IMAGES_HW = st.tuples(st.integers(1, 40), st.integers(1, 60)) | st.sampled_from(
    [(1, 1), (1, 200), (70, 1), (64, 64), (16, 16), (33, 17), (32, 128), (3, 3), (2, 500)]
)


@given(
    image_hw=IMAGES_HW,
    resize=st.sampled_from(["longest-side", "stretch"]),
    chosen=st.lists(st.integers(0, 3), max_size=2),
    half=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
def test_kernels_equal_definition(
    image_hw: tuple[int, int], resize: Resize, chosen: list[int], half: bool, seed: int
) -> None:
    check(random_logits(seed, half=half), chosen, placed_at(image_hw, resize), resize)


@pytest.mark.parametrize(
    ("plane_hw", "size", "image_hw", "resize", "taps"),
    [
        ((16, 16), 64, (70, 30), "stretch", 2),
        ((16, 16), 64, (70, 30), "longest-side", 3),
        ((48, 48), 64, (40, 30), "longest-side", 3),
        ((64, 64), 64, (40, 30), "longest-side", 3),  # logits as fine as the input
        ((256, 256), 1024, (40, 53), "longest-side", 3),  # the published models', of a picture smaller than the logits
        ((256, 256), 1024, (3, 140), "stretch", 2),
    ],
)
def test_taps(plane_hw: tuple[int, int], size: int, image_hw: tuple[int, int], resize: Resize, taps: int) -> None:
    placed = placed_at(image_hw, resize, size)
    assert table_of(plane_hw, placed, resize).used == taps
    check(random_logits(1, plane_hw, 2), [1], placed, resize)


def test_several_tiles_and_words() -> None:
    # 270 × 66 pixels: three tiles of columns and three words of rows, the last of each all but empty.
    check(random_logits(2), [3], placed_at((66, 270), "longest-side"), "longest-side")


@pytest.mark.parametrize("chosen", [[], [2], [0, 0, 0], [3, 2, 1, 0]])
def test_masks_in_any_order_and_twice(chosen: list[int]) -> None:
    check(random_logits(3), chosen, placed_at((9, 21), "stretch"), "stretch")


@pytest.mark.parametrize("columns", [1, 5, 12, 13, 100])
def test_what_does_not_fit_comes_in_further_rounds(columns: int) -> None:
    # Columns of 2 words, one word to spare; a round may end inside a mask, and may hold several.
    chosen = [1, 3] if columns > 1 else [1]
    width = 12 if columns > 1 else 3
    check(random_logits(4), chosen, placed_at((33, width), "stretch"), "stretch", capacity_words=2 * columns + 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("resize", ["longest-side", "stretch"])
def test_numbers_that_are_not_finite_stay_where_they_are(value: float, resize: Resize) -> None:
    logits, placed = random_logits(5), placed_at((33, 40), resize)
    healthy = packed(logits, [0, 1], placed, resize)
    logits[1, 4, 7] = value
    with np.errstate(over="ignore", invalid="ignore"):
        check(logits, [0, 1], placed, resize)
        masks = packed(logits, [0, 1], placed, resize)
    np.testing.assert_array_equal(masks[0], healthy[0])
    touched = enlarge_reference((np.arange(256) == 4 * 16 + 7).reshape(1, 16, 16).astype(np.float32), placed, resize)
    np.testing.assert_array_equal(masks[1][touched[0] == 0], healthy[1][touched[0] == 0])
    assert (masks[1][touched[0] > 1e-3] == (value > 0)).all()


def test_nothing_but_nan() -> None:
    logits, placed = np.full((1, 16, 16), np.nan, np.float32), placed_at((33, 40), "longest-side")
    with np.errstate(invalid="ignore"):
        assert not packed(logits, [0], placed, "longest-side").any()
        assert counted(logits, [0], placed, "longest-side", 1.0) == [(0, 0)]


def test_a_threshold_is_outside_itself() -> None:
    placed = placed_at((33, 20), "stretch")
    assert not packed(np.zeros((1, 16, 16), np.float32), [0], placed, "stretch").any()
    # Where the image is as large as the logits, each is its own pixel to the bit.
    logits = np.zeros((1, 16, 16), np.float32)
    logits[0, 0, :4] = np.float32(0.05), np.nextafter(np.float32(0.05), np.float32(1)), 1, -0.0
    logits[0, 1, :2] = np.float32(-0.05), np.nextafter(np.float32(-0.05), np.float32(0))
    assert counted(logits, [0], placed_at((16, 16), "stretch"), "stretch", 0.05) == [(2, 255)]
    assert packed(logits, [0], placed_at((16, 16), "stretch"), "stretch").sum() == 3


def test_counts_are_the_same_every_time() -> None:
    logits, placed = random_logits(6), placed_at((40, 150), "longest-side")
    first = counted(logits, [2, 0], placed, "longest-side", 0.7)
    assert counted(logits, [2, 0], placed, "longest-side", 0.7) == first
    assert all(0 < above < union < 40 * 150 for above, union in first)


def test_a_table_is_written_whole() -> None:
    rows = Taps(np.array([0, 3], np.int32), np.array([[1, 0], [0.75, 0.25]], np.float32))
    columns = Taps(np.array([5], np.int32), np.array([[0.5, 0.5]], np.float32))
    table = np.full((TAP_ROWS, 3), -77, np.int32)
    assert write_taps(rows, columns, table) == 2
    assert table[0].tolist() == [0, 3, 5]
    assert table[1:].view(np.float32).tolist() == [[1, 0.75, 0.5], [0, 0.25, 0.5], [0, 0, 0]]


# ---- what it refuses ---------------------------------------------------------------------------------------


def _call(**changes: Any) -> tuple[EnlargeKernels, tuple[Any, ...]]:
    logits, placed = random_logits(7), placed_at((33, 20), "stretch")
    arguments = {
        "logits": on_device(logits),
        "chosen": on_device(np.array([0], np.int32)),
        "table": table_of((16, 16), placed, "stretch"),
    } | changes
    return kernels_for(logits, changes.pop("capacity_words", 100)), tuple(arguments.values())


def _table(length: int, image_hw: tuple[int, int]) -> TapTable:
    return TapTable(torch.zeros(TAP_ROWS, length, dtype=torch.int32, device=DEVICE), image_hw, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(4, 16, 15, device=DEVICE)}, r"logits: expected \(4, 16, 16\) float32 or float16"),
        ({"logits": torch.zeros(4, 16, 16, device=DEVICE, dtype=torch.float64)}, "logits: expected"),
        ({"logits": torch.zeros(4, 16, 32, device=DEVICE)[..., ::2]}, "not contiguous"),
        ({"chosen": torch.zeros(1, device=DEVICE, dtype=torch.int64)}, r"chosen: expected \(1,\) int32"),
        ({"chosen": torch.zeros(1, 1, device=DEVICE, dtype=torch.int32)}, "chosen: expected"),
        ({"table": _table(53, (33, 21))}, r"taps: expected \(4, 54\)"),
        ({"table": _table(53, (53, 0))}, "image: expected sides"),
        ({"table": _table(1, (1, 1 << 23))}, "image: expected sides"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    kernels, arguments = _call(**changes)
    for call in (kernels.pack, lambda *a: kernels.count(*a, delta=1.0)):
        with pytest.raises(ShapeError, match=message):
            call(*arguments)


def test_a_column_that_does_not_fit() -> None:
    kernels, arguments = _call()
    kernels.words = kernels.words[:1]
    with pytest.raises(ShapeError, match=r"columns of at most 1 words, got 20 of 2"):
        kernels.pack(*arguments)


def test_too_many_masks_to_count() -> None:
    kernels, arguments = _call(chosen=torch.zeros(9, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ShapeError, match="at most 8 masks, got 9"):
        kernels.count(*arguments, delta=1.0)


@pytest.mark.parametrize(
    "changes", [{"plane_hw": (0, 4)}, {"capacity_words": 0}, {"most_masks": 0}, {"most_masks": 65_536}]
)
def test_sizes_that_are_none(changes: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"plane_hw": (4, 4), "capacity_words": 8, "most_masks": 4, "device": DEVICE}
    with pytest.raises(OptionError, match="expected at"):
        EnlargeKernels(**sizes | changes)


@pytest.mark.skipif(DEVICE == "cuda", reason="here is a CUDA device")
def test_without_a_cuda_device() -> None:
    with pytest.raises(BackendUnavailableError, match="got cuda, which is not here"):
        EnlargeKernels(plane_hw=(4, 4), capacity_words=8, most_masks=4, device="cuda")


def test_ahead_of_time_lists_every_kernel_with_all_its_arguments() -> None:
    cases = list(ahead_of_time())
    assert len({name for name, *_ in cases}) == len(cases)
    for name, kernel, signature, constexprs, _ in cases:
        arguments = set(inspect.signature(kernel.fn).parameters)
        assert signature.keys() | constexprs.keys() == arguments, name
        assert not signature.keys() & constexprs.keys()
    assert {kernel.fn.__name__ for _, kernel, *_ in cases} == set(stages.__all__)
