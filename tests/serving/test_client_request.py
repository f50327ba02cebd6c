"""One request, before anything carries it: sources as bytes, addresses, and a server's words as errors."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from PIL import Image

from visionfast.errors import (
    DeadlineError,
    ImageFormatError,
    ImageNotFoundError,
    ImageTooLargeError,
    OptionError,
    QueueFullError,
    ServerError,
    VisionfastError,
)
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.nv12 import Nv12Frame, nv12_to_rgb
from visionfast.results import Detections
from visionfast.serving.client_questions import SentImages, about_objects
from visionfast.serving.client_request import Terms, encoded_image, kept, refusal
from visionfast.serving.client_transport import Address, open_async_transport, open_transport
from visionfast.serving.wire import fault_text, pack_answers, unpack_image
from visionfast.types import ModelSpec, PreprocessSpec

SPEC = ModelSpec("y", "yolov8", "yolov8n", "detect", (), PreprocessSpec((64, 64)), ("cat", "dog"), (8, 16, 32))
QUESTION = about_objects(SPEC, {}, on_error="raise", timeout=30.0)
TERMS = QUESTION.terms
LIMITS = DecodeLimits()

_SIDES = st.integers(1, 40)
PIXELS = st.one_of(
    st.tuples(_SIDES, _SIDES),
    st.tuples(_SIDES, _SIDES, st.sampled_from([1, 3, 4])),
).flatmap(lambda shape: arrays.arrays(np.uint8, shape))


@given(PIXELS)
def test_pixels_arrive_as_they_are(pixels: npt.NDArray[np.uint8]) -> None:
    expected = decode_image(pixels)
    np.testing.assert_array_equal(decode_image(encoded_image(pixels)), expected)
    with Image.open(io.BytesIO(encoded_image(pixels))) as image:  # anybody's decoder reads it
        np.testing.assert_array_equal(np.asarray(image), expected)


def test_a_frame_of_video_arrives_as_it_is() -> None:
    random = np.random.default_rng(0)
    frame = Nv12Frame(random.integers(0, 256, (6, 8), np.uint8), random.integers(0, 256, (3, 4, 2), np.uint8))
    np.testing.assert_array_equal(decode_image(encoded_image(frame)), nv12_to_rgb(frame.y, frame.uv))


@given(st.binary(max_size=200_000))
def test_bytes_are_sent_as_they_are(data: bytes) -> None:
    for source in (data, bytearray(data), memoryview(data)):
        sent = QUESTION.request(source, 0, LIMITS).arrays
        assert unpack_image(sent["image"][0], sent["length"][0]) == data


def test_a_file_is_sent_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"anything")
    sent = QUESTION.request(tmp_path / "a.bin", 0, LIMITS).arrays
    assert unpack_image(sent["image"][0], sent["length"][0]) == b"anything"


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("missing.jpg", ImageNotFoundError, "missing.jpg: no such file"),
        ("", ImageNotFoundError, "path: expected the path of an image file, got an empty one"),
        (np.zeros((2, 2), np.float32), ImageFormatError, "image 7: expected a uint8 RGB array"),
        (np.zeros((0, 2, 3), np.uint8), ImageFormatError, "image 7: expected a uint8 RGB array"),
        (3, ImageFormatError, "image 7: expected a path, encoded bytes or a uint8 RGB array, got int"),
    ],
)
def test_what_cannot_be_sent(source: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        QUESTION.request(source, 7, LIMITS)
    assert str(caught.value).startswith(said)


def test_what_is_too_large_for_the_model_is_not_sent(tmp_path: Path) -> None:
    limits = DecodeLimits(max_bytes=10, max_pixels=20)
    with pytest.raises(ImageTooLargeError, match="image 7: expected at most 10 bytes, got 11"):
        QUESTION.request(b"a" * 11, 7, limits)
    (tmp_path / "a.bin").write_bytes(b"a" * 11)
    with pytest.raises(ImageTooLargeError, match="expected at most 10 bytes, got 11"):
        QUESTION.request(tmp_path / "a.bin", 7, limits)
    with pytest.raises(ImageTooLargeError, match="image 7: expected at most 20 pixels"):
        QUESTION.request(np.zeros((3, 7, 3), np.uint8), 7, limits)
    QUESTION.request(np.zeros((4, 5, 3), np.uint8), 7, limits)  # 60 bytes of 20 pixels: no file


# ---- answers ------------------------------------------------------------------------------------------------------


def _found(class_id: int) -> Detections:
    return Detections(np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.array([class_id]), (4, 6))


def test_an_error_bears_the_callers_name() -> None:
    packed = pack_answers([ImageTooLargeError("bytes", "too many")], "detect")
    for source, name in ((b"", "image 3"), ("a.jpg", "a.jpg"), (Path("b.jpg"), "b.jpg")):
        answer = QUESTION.answer(packed, source, 3)
        assert isinstance(answer, ImageTooLargeError)
        assert (answer.source, answer.reason) == (name, "too many")


def test_answers_that_are_no_ones() -> None:
    for answers in ([_found(0), _found(1)], [_found(2)], [_found(-1)]):
        with pytest.raises(ServerError):
            QUESTION.answer(pack_answers(answers, "detect"), b"", 0)
    with pytest.raises(ServerError):
        QUESTION.answer({}, b"", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[request id: <id_unknown>] Exceeds maximum queue size", QueueFullError),
        ("in ensemble 'y', [request id: 3] Request timeout expired", DeadlineError),
        (f"in ensemble 'y', {fault_text(OptionError('conf: no'))}", OptionError),
        (fault_text(ImageFormatError("bytes", "bad")), ServerError),
        ("Stub process 'y_0_0' is not healthy.\nTraceback …", ServerError),
        ("visionfast.KeyError: 3", ServerError),
        ("", ServerError),
        (None, ServerError),
    ],
)
def test_a_servers_words(text: str | None, expected: type[VisionfastError]) -> None:
    error = refusal("grpc://localhost:8001", "y", text)
    assert type(error) is expected
    assert "\n" not in str(error)
    if expected is not OptionError:
        assert str(error).startswith("grpc://localhost:8001: y: ")


def test_which_errors_are_one_images() -> None:
    returned = Terms.of("return", {}, 30.0)
    for error in (ImageFormatError("a", "b"), QueueFullError("a"), DeadlineError("a")):
        assert kept(error, returned) is error
        with pytest.raises(type(error)):
            kept(error, TERMS)
    with pytest.raises(ServerError):
        kept(ServerError("nobody there"), returned)


# ---- terms and addresses ------------------------------------------------------------------------------------------


def test_terms() -> None:
    asked = {"conf": np.float32(0.5), "classes": (np.int64(1), "dog"), "iou": None, "deadline_ms": 250}
    terms = Terms.of("return", asked | {"priority": "offline"}, 30.0)
    assert terms == Terms(b'{"classes": [1, "dog"], "conf": 0.5}', 2, 0.25, raises=False)
    assert Terms.of("raise", {"deadline_ms": 60_000}, 30.0).patience_s == 30.0
    with pytest.raises(OptionError, match=r"priority: expected 'online' or 'offline', got \['online'\]"):
        Terms.of("raise", {"priority": ["online"]}, 30.0)


@pytest.mark.parametrize("opening", [open_transport, open_async_transport])
def test_shared_memory_elsewhere_than_on_linux(monkeypatch: pytest.MonkeyPatch, opening: Any) -> None:
    """It is refused before anything is opened."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(OptionError, match="shared_memory: expected Linux"):
        opening(Address.parse("localhost"), shared_memory=True)


def test_of_the_images_that_were_sent_those_used_last_are_remembered() -> None:
    sent = SentImages(most=2)
    sent.add("a")
    sent.add("b")
    assert "a" in sent
    sent.add("c")
    assert "a" in sent
    assert "b" not in sent


@pytest.mark.parametrize(
    ("url", "scheme", "expected"),
    [
        ("localhost:8001", None, "grpc://localhost:8001"),
        ("localhost", None, "grpc://localhost:8001"),
        ("localhost:8000", "http", "http://localhost:8000"),
        ("grpc://10.0.0.1:9", "grpc", "grpc://10.0.0.1:9"),
        ("http://localhost", None, "http://localhost:8000"),
        ("HTTP://Host.example:1/", None, "http://host.example:1"),
        ("[::1]:8001", None, "grpc://[::1]:8001"),
        ("http://[::1]", None, "http://[::1]:8000"),
    ],
)
def test_addresses(url: str, scheme: Any, expected: str) -> None:
    assert str(Address.parse(url, scheme)) == expected


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("", None),
        (":8001", None),
        ("http://", None),
        ("https://localhost", None),
        ("ftp://localhost", None),
        ("localhost:port", None),
        ("localhost:70000", None),
        ("http://localhost/v2", None),
        ("http://user:secret@localhost", None),
        ("localhost?x", None),
        ("http://a..b:8000", None),
        (f"{'a' * 64}.example", None),
        ("local host:1", None),
        ("[::1", None),
        ("http://localhost", "grpc"),
        ("localhost", "ftp"),
        (8001, None),
    ],
)
def test_no_addresses(url: Any, scheme: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Address.parse(url, scheme)
    assert "expected" in str(caught.value) or "does not fit" in str(caught.value)
