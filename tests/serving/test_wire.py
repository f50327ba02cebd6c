"""The wire: what goes in comes out to the bit, and what nobody packed is a typed error."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from visionfast import errors
from visionfast.errors import ImageError, ImageTruncatedError, OptionError, ServerError
from visionfast.postprocess.masks import InstanceMasks
from visionfast.results import Detections
from visionfast.serving.wire import (
    BUCKET,
    OPTIONS,
    STAGES,
    fault_of,
    fault_text,
    inputs_of,
    outputs_of,
    pack_answers,
    pack_image,
    pack_options,
    unpack_answers,
    unpack_image,
    unpack_options,
)
from visionfast.types import Task

TASKS: tuple[Task, ...] = ("detect", "segment")
IMAGE_ERRORS = [kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), ImageError)]


def some(n: int, shape: tuple[int, ...] = (), dtype: type = np.float32) -> st.SearchStrategy[npt.NDArray[Any]]:
    """Every bit pattern, NaN and Inf among them."""
    size = np.dtype(dtype).itemsize
    raw = hnp.arrays(np.uint8, (n, *shape, size))
    return raw.map(lambda bits: bits.view(dtype)[..., 0])


@st.composite
def detections(draw: st.DrawFn, task: Task) -> Detections:
    n = draw(st.sampled_from([0, 1, 2, 5, 300]))
    image_hw = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    stages = draw(st.sets(st.sampled_from(STAGES)))
    mask = None
    if task == "segment":
        mask = InstanceMasks.from_dense(draw(hnp.arrays(np.bool_, (n, *image_hw))))
    return Detections(
        xyxy=draw(some(n, (4,))),
        confidence=draw(some(n)),
        class_id=draw(hnp.arrays(np.int64, n, elements=st.integers(0, 2**31 - 1))),
        image_hw=image_hw,
        mask=mask,
        stage_ns={stage: draw(st.integers(0, 2**62)) for stage in stages},
    )


image_errors = st.builds(
    lambda kind, source, reason: kind(source, reason), st.sampled_from(IMAGE_ERRORS), st.text(), st.text()
)


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_answers_come_out_as_they_went_in(task: Task, data: st.DataObject) -> None:
    answers = data.draw(st.lists(detections(task) | image_errors, min_size=1, max_size=4))
    packed = pack_answers(answers, task)
    assert list(packed) == [tensor.name for tensor in outputs_of(task)]
    for tensor in outputs_of(task):
        array = packed[tensor.name]
        assert array.dtype.name == tensor.dtype
        assert all(size in (-1, got) for size, got in zip(tensor.dims, array.shape[1:], strict=True))
        assert array.size
        assert array.flags.owndata
        array.flags.writeable = False  # as the client library hands them out
    for before, after in zip(answers, unpack_answers(packed, task), strict=True):
        if isinstance(before, ImageError):
            assert type(after) is type(before)
            assert (after.source, after.reason, str(after)) == (before.source, before.reason, str(before))  # type: ignore[union-attr]
            continue
        assert isinstance(after, Detections)
        for name in ("xyxy", "confidence", "class_id"):
            old, new = getattr(before, name), getattr(after, name)
            assert (old.tobytes(), old.dtype, old.shape) == (new.tobytes(), new.dtype, new.shape)
            assert new.flags.writeable
        assert after.image_hw == before.image_hw
        assert after.stage_ns == before.stage_ns
        assert (after.mask, before.mask).count(None) in (0, 2)
        assert before.mask is None or after.mask.counts == before.mask.counts  # type: ignore[union-attr]


def test_a_name_that_is_no_text_comes_back() -> None:
    packed = pack_answers([ImageTruncatedError("\udcff.jpg", "ends\0early\n")], "detect")
    (back,) = unpack_answers(packed, "detect")
    assert isinstance(back, ImageTruncatedError)
    assert (back.source, back.reason) == ("\udcff.jpg", "ends\0early\n")


def two_objects() -> dict[str, npt.NDArray[Any]]:
    dense = np.zeros((2, 6, 5), np.bool_)
    dense[0, 1:3, 2:4], dense[1, :, 0] = True, True
    found = Detections(
        np.ones((2, 4), np.float32),
        np.ones(2, np.float32),
        np.ones(2, np.int64),
        (6, 5),
        InstanceMasks.from_dense(dense),
    )
    return pack_answers([found], "segment")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("count", np.array([[3]], np.int32)),
        ("count", np.array([[-1]], np.int32)),
        ("count", np.array([[2]], np.int64)),
        ("count", np.array([2], np.int32)),
        ("count", np.array(2, np.int32)),
        ("count", np.zeros((2, 1), np.int32)),
        ("image_hw", np.array([[0, 5]], np.int32)),
        ("image_hw", np.array([[6, -5]], np.int32)),
        ("image_hw", np.array([[7, 5]], np.int32)),  # not the masks' image
        ("xyxy", np.ones((1, 2, 5), np.float32)),
        ("xyxy", np.ones((1, 8), np.float32)),
        ("confidence", np.ones((1, 3), np.float32)),
        ("class_id", np.ones((1, 2), np.float32)),
        ("stage_ns", np.ones((1, 3), np.int64)),
        ("mask_ends", np.array([[3, 2]], np.int32)),
        ("mask_ends", np.array([[-1, 2]], np.int32)),
        ("mask_ends", np.array([[4, 2**31 - 1]], np.int32)),
        ("mask_ends", np.array([[0, 4]], np.int32)),
        ("mask", np.zeros((1, 40), np.uint8)),
        ("mask", np.full((1, 40), 255, np.uint8)),
        ("mask", np.full((1, 40), 111, np.uint8)),  # numbers without an end
        ("mask", np.full((1, 40), 79, np.uint8)),  # negative lengths
        ("problem", np.full((1, 1), 255, np.uint8)),
        ("problem", np.frombuffer(b"{}", np.uint8)[None]),
        ("problem", np.frombuffer(b"[" * 100_000, np.uint8)[None]),
        ("problem", np.frombuffer(b'{"kind": "no such", "source": "a", "reason": "b"}', np.uint8)[None]),
        ("problem", np.frombuffer(b'{"kind": "image", "source": 1, "reason": "b"}', np.uint8)[None]),
        ("problem", np.frombuffer(b'{"kind": [], "source": "a", "reason": "b"}', np.uint8)[None]),
    ],
)
def test_arrays_that_contradict_one_another_are_an_error(name: str, wrong: npt.NDArray[Any]) -> None:
    with pytest.raises(ServerError):
        unpack_answers({**two_objects(), name: wrong}, "segment")


@pytest.mark.parametrize("name", [tensor.name for tensor in outputs_of("segment")])
def test_a_missing_array_is_named(name: str) -> None:
    arrays = two_objects()
    del arrays[name]
    with pytest.raises(ServerError, match=f"^{name}: expected it among the answers"):
        unpack_answers(arrays, "segment")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_hostile_bytes_are_an_answer_or_a_server_error(data: st.DataObject) -> None:
    arrays = two_objects()
    for name in data.draw(st.sets(st.sampled_from(sorted(arrays)), min_size=1)):
        array = arrays[name]
        raw = data.draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
        arrays[name] = np.frombuffer(raw, array.dtype).reshape(array.shape)
    try:
        (answer,) = unpack_answers(arrays, "segment")
    except ServerError:
        return
    if isinstance(answer, Detections):
        assert answer.mask is not None
        assert answer.mask.dense().shape == (len(answer), *answer.image_hw)  # what came through can be used


# ---- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, BUCKET - 1, BUCKET, BUCKET + 1])
def test_an_image_is_padded_to_buckets(size: int) -> None:
    encoded = bytes(range(1, 256)) * (size // 255 + 1)
    arrays = pack_image(encoded[:size])
    assert [tensor.name for tensor in inputs_of("detect")] == list(arrays)
    for tensor in inputs_of("detect"):
        assert arrays[tensor.name].dtype.name == tensor.dtype
    image, length = arrays["image"], arrays["length"]
    assert image.shape == (1, max(1, -(-size // BUCKET)) * BUCKET)
    assert not image[0, size:].any()
    assert unpack_image(image[0], length[0]) == encoded[:size]


@pytest.mark.parametrize("length", [-1, -(2**31), 5, 2**31 - 1])
def test_a_length_beyond_the_image_is_that_image_s_error(length: int) -> None:
    with pytest.raises(ImageError, match=f"length: expected 0 to 4, the bytes that were sent, got {length}"):
        unpack_image(np.zeros(4, np.uint8), np.array([length], np.int32))


def test_an_image_of_another_shape_is_that_image_s_error() -> None:
    one = np.array([1], np.int32)
    for image in (np.zeros((2, 2), np.uint8), np.zeros(4, np.float32)):
        with pytest.raises(ImageError):
            unpack_image(image, one)  # type: ignore[arg-type]
    with pytest.raises(ImageError):
        unpack_image(np.zeros(4, np.uint8), np.zeros(2, np.int32))


def test_options_come_back() -> None:
    given: dict[str, Any] = {
        "conf": 0.1 + 0.2,
        "iou": 1,
        "max_det": 7,
        "classes": ("café, \udcff", 3),
        "class_agnostic": False,
    }
    assert set(given) == set(OPTIONS)
    options = pack_image(b"", pack_options(**given))["options"]
    assert unpack_options(options) == {**given, "classes": ["café, \udcff", 3]}
    assert unpack_options(np.repeat(options, 3, 0)) == unpack_options(options)
    assert unpack_options(pack_image(b"", pack_options(conf=None))["options"]) == {}


@pytest.mark.parametrize("text", [b"{", b"[]", b"1", b"\xff", b"[" * 100_000, b'{"conf": 1}\0x'])
def test_options_that_are_no_json_object_are_an_option_error(text: bytes) -> None:
    with pytest.raises(OptionError, match="expected a JSON object"):
        unpack_options(np.frombuffer(text, np.uint8)[None])


def test_options_of_one_request_are_one() -> None:
    with pytest.raises(OptionError, match="the same for every image"):
        unpack_options(np.array([[0], [49]], np.uint8))


def test_a_fault_keeps_its_type_and_text_through_the_server_s_words() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        if issubclass(kind, ImageError):
            continue  # they have an entry of their own
        back = fault_of(f"in ensemble 'yolov8s', {fault_text(kind('conf: expected a number: got x'))}")
        assert type(back) is kind
        assert str(back) == "conf: expected a number: got x"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Request timeout expired",
        "visionfast.Any: x",
        "visionfast.ImageError: x",
        "visionfast.os: x",
        "visionfast.annotations: x",
        "visionfast.__doc__: 3",
    ],
)
def test_other_words_are_no_fault_of_ours(text: str) -> None:
    assert fault_of(text) is None
