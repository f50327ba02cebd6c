"""The wire of prompt segmenters: prompts and masks come out as they went in; what nobody packed is a typed error."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_wire import image_errors, some

from visionfast.errors import ImageError, OptionError, ServerError
from visionfast.postprocess.masks import InstanceMasks
from visionfast.results import Masks
from visionfast.serving.options import checked_options, deployed_options
from visionfast.serving.wire import outputs_of, pack_options, stages_of
from visionfast.serving.wire.masks import pack_masks, unpack_masks
from visionfast.serving.wire.prompts import NO_MASK, pack_prompts, unpack_mask_input, unpack_prompts
from visionfast.types import ModelSpec, PreprocessSpec, PromptSpec

SPEC = ModelSpec(
    "small", "sam", "small", "prompt-segment", (), PreprocessSpec((64, 64)), (), (), prompts=PromptSpec(False, False)
)
REQUIRED = [tensor.name for tensor in outputs_of("prompt-segment") if not tensor.optional]


@st.composite
def masks(draw: st.DrawFn, optional: tuple[str, ...]) -> Masks:
    n = draw(st.sampled_from([0, 1, 2, 5, 40]))
    image_hw = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    tails = {"logits": (4, 4), "stability": (), "points": (2,)}
    return Masks(
        InstanceMasks.from_dense(draw(hnp.arrays(np.bool_, (n, *image_hw)))),
        draw(some(n)),
        draw(hnp.arrays(np.int64, n, elements=st.integers(0, 2**31 - 1))),
        image_hw,
        stage_ns={stage: draw(st.integers(0, 2**62)) for stage in draw(st.sets(st.sampled_from(stages_of(SPEC.task))))},
        **{name: draw(some(n, tails[name])) for name in optional},
    )


@pytest.mark.parametrize("optional", [(), ("logits",), ("stability", "points")], ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_masks_come_out_as_they_went_in(optional: tuple[str, ...], data: st.DataObject) -> None:
    answers = data.draw(st.lists(masks(optional) | image_errors, min_size=1, max_size=4))
    packed = pack_masks(answers)
    declared = {tensor.name: tensor for tensor in outputs_of("prompt-segment")}
    found = any(isinstance(answer, Masks) for answer in answers)
    assert set(packed) == {*REQUIRED, *(optional if found else ())}
    for name, array in packed.items():
        assert array.dtype.name == declared[name].dtype
        assert array.ndim == 1 + len(declared[name].dims)
        assert array.size
        assert array.flags.owndata
        array.flags.writeable = False
    for before, after in zip(answers, unpack_masks(packed), strict=True):
        if isinstance(before, ImageError):
            assert (type(after), str(after)) == (type(before), str(before))
            continue
        assert isinstance(after, Masks)
        assert (after.mask, after.image_hw, after.stage_ns) == (before.mask, before.image_hw, before.stage_ns)
        for name in ("score", "prompt", "logits", "stability", "points"):
            old, new = getattr(before, name), getattr(after, name)
            assert (old is None) == (new is None)
            assert old is None or (old.tobytes(), old.dtype, old.shape) == (new.tobytes(), new.dtype, new.shape)


def two_masks() -> dict[str, npt.NDArray[Any]]:
    dense = np.zeros((2, 6, 5), np.bool_)
    dense[0, 1:3, 2:4], dense[1, :, 0] = True, True
    found = InstanceMasks.from_dense(dense)
    logits = np.ones((2, 4, 4), np.float32)
    return pack_masks([Masks(found, np.ones(2, np.float32), np.arange(2), (6, 5), logits)])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("count", np.array([[3]], np.int32)),
        ("count", np.array([[-1]], np.int32)),
        ("image_hw", np.array([[0, 5]], np.int32)),
        ("image_hw", np.array([[7, 5]], np.int32)),  # not the masks' image
        ("score", np.ones(2, np.float32)),
        ("prompt", np.ones((1, 3), np.int32)),
        ("logits", np.ones((1, 3, 4, 4), np.float32)),
        ("logits", np.ones((1, 2, 16), np.float32)),
        ("stability", np.ones((1, 1), np.float32)),
        ("points", np.ones((1, 2, 3), np.float32)),
        ("mask_ends", np.array([[3, 2]], np.int32)),
        ("mask", np.full((1, 40), 255, np.uint8)),
    ],
)
def test_arrays_that_contradict_one_another_are_an_error(name: str, wrong: npt.NDArray[Any]) -> None:
    with pytest.raises(ServerError):
        unpack_masks({**two_masks(), name: wrong})


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_array_is_named(name: str) -> None:
    arrays = two_masks()
    del arrays[name]
    with pytest.raises(ServerError, match=f"^{name}: expected it among the answers"):
        unpack_masks(arrays)


# ---- prompts ------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([np.float32, np.float64, np.int64, np.uint8])


def as_sent(
    points: Any, boxes: Any, mask_input: Any = None, multimask: bool | None = None
) -> tuple[dict[str, Any], npt.NDArray[np.float32] | None]:
    packed, mask = pack_prompts(points, boxes, mask_input, multimask=multimask, logits=False)
    options = json.loads(pack_options(**packed) or b"{}")
    options = {"multimask": False, **checked_options(options, SPEC)}
    return unpack_prompts(options), unpack_mask_input(options, mask[0])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_prompts_arrive_to_the_bit(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(3,), (1, 3), (4, 3), (2, 4, 3)]))
    points = data.draw(hnp.arrays(data.draw(NUMBERS), shape))
    boxes = data.draw(hnp.arrays(data.draw(NUMBERS), data.draw(st.sampled_from([(4,), (1, 4), (3, 4), (0, 4)]))))
    mask = data.draw(st.none() | hnp.arrays(np.float32, st.sampled_from([(4, 4), (1, 4, 4), (2, 1, 4, 4)])))
    if boxes.size == 0:
        points, mask = None, None
    got, got_mask = as_sent(points, boxes, mask)
    for name, expected in (("points", points), ("boxes", boxes)):
        if expected is not None:
            np.testing.assert_array_equal(np.asarray(got[name]), expected.astype(np.float64))
    assert (got_mask is None) == (mask is None)
    if mask is not None:
        np.testing.assert_array_equal(got_mask, mask)


def test_without_a_mask_there_is_a_zero() -> None:
    assert pack_prompts([(1, 2, 1)], None, None, multimask=None, logits=False)[1] is NO_MASK
    assert as_sent([(1, 2, 1)], None, multimask=True)[0]["multimask"] is True


@pytest.mark.parametrize("shape", [3, [], [4], [2, -2], [2.0, 2], ["2", 2], [2**31, 2], None, [True, 4]], ids=str)
def test_a_mask_of_a_shape_that_is_none(shape: Any) -> None:
    options = {"mask_input_shape": shape}
    if shape is None:
        assert unpack_mask_input(options, np.zeros(4, np.float32)) is None
    elif shape == [4]:
        assert unpack_mask_input(options, np.zeros(4, np.float32)) is not None
    else:
        with pytest.raises(OptionError, match="mask_input_shape: expected the shape of 4 numbers"):
            unpack_mask_input(options, np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"multimask": 1}, "multimask: expected true or false, got 1"),
        ({"everything": True}, "everything: expected its options"),
        ({"everything": {}, "points": []}, "everything: expected it alone, got points too"),
        ({"image_key": "abc"}, "key: expected 64 lower-case hex digits, got 'abc'"),
        ({"conf": 0.5}, "option 'conf': expected one of points, boxes"),
        ({"image_cache_mb": 5}, "option 'image_cache_mb': expected one of points, boxes"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_request(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        checked_options(options, SPEC)
    assert str(caught.value).startswith(said)


def test_what_a_deployment_says() -> None:
    assert deployed_options({}, SPEC) == {"multimask": False, "image_cache_mb": 1024}
    for value in (-1, 2.5, True, "5", 1 << 40):
        with pytest.raises(OptionError, match="image_cache_mb: expected a whole number of MiB"):
            deployed_options({"image_cache_mb": value}, SPEC)
    with pytest.raises(OptionError, match="option 'points': expected one of multimask, image_cache_mb for small"):
        deployed_options({"points": []}, SPEC)
