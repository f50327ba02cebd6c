"""An embedder on the real server: the vectors of `Embedder`, to the bit."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from clients import async_client_of, client_of

import visionfast as vf
from visionfast.errors import ImageError, ImageTooLargeError, OptionError
from visionfast.preprocess.decode import decode_image
from visionfast.serving.wire import inputs_of, pack_image, pack_options

if TYPE_CHECKING:
    from conftest import Served

library = pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")

NAMES = ("embed", "embed-3")
OPTIONS: list[dict[str, Any]] = [{}, {"normalise": True}, {"patches": False}, {"patches": False, "normalise": True}]


@pytest.fixture(scope="module")
def embedder(small_engines: dict[str, Path]) -> Iterator[vf.Embedder]:
    with vf.Embedder.open(small_engines["embed"]) as opened:
        yield opened


@pytest.fixture(scope="session")
def odd_images(photographs: list[Path]) -> list[Any]:
    """Photographs, and what else a file may hold, the bad among the good."""
    bus = decode_image(photographs[0])  # (1080, 810, 3)
    huge = b"P6\n60000 60000\n255\n" + bytes(100)
    sixteen = b"P5\n5 4\n65535\n" + np.arange(20, dtype=">u2").tobytes()
    return [
        *photographs,
        photographs[0].read_bytes()[:5000],
        bus,
        b"no image",
        bus[..., 0],
        b"",
        bus[:1, :1],
        huge,
        sixteen,
        bus[:3],
        _rotated(photographs[0]),
        Path("missing.jpg"),
        np.zeros((4, 4, 3), np.float32),
        photographs[1].read_bytes(),
    ]


def _rotated(path: Path) -> bytes:
    """With the camera held upright, as its EXIF orientation says."""
    from PIL import Image

    with Image.open(path) as image:
        exif = image.getexif()
        exif[0x0112] = 6
        stream = io.BytesIO()
        image.save(stream, "jpeg", exif=exif)
    return stream.getvalue()


def assert_same(got: vf.Embeddings, expected: vf.Embeddings) -> None:
    """To the bit; errors by type and text."""
    assert got.cls.dtype == expected.cls.dtype
    np.testing.assert_array_equal(got.cls, expected.cls)
    assert (got.patches is None) == (expected.patches is None)
    if got.patches is not None and expected.patches is not None:
        np.testing.assert_array_equal(got.patches, expected.patches)
    assert got.placed == expected.placed
    assert {i: (type(e), str(e)) for i, e in got.errors.items()} == {
        i: (type(e), str(e)) for i, e in expected.errors.items()
    }
    assert [list(stages) for stages in got.stage_ns] == [list(stages) for stages in expected.stage_ns]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_vectors(
    small_served: Callable[[str], Served],
    embedder: vf.Embedder,
    odd_images: list[Any],
    name: str,
    scheme: str,
    options: dict[str, Any],
) -> None:
    expected = embedder(odd_images, on_error="return", **options)
    assert len(expected.errors) == 6
    assert isinstance(expected.errors[8], ImageTooLargeError)
    with client_of(small_served(name), scheme) as client:
        assert_same(client.embed(odd_images, on_error="return", **options), expected)
        assert_same(client.embed(odd_images[0], **options), embedder(odd_images[0], **options))


def test_the_odd_pictures(small_served: Callable[[str], Served], embedder: vf.Embedder, shared_data: Path) -> None:
    paths = sorted((shared_data / "odd-images").iterdir())
    with client_of(small_served("embed")) as client:
        assert_same(client.embed(paths, on_error="return"), embedder(paths, on_error="return"))


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_same_vectors_with_await(
    small_served: Callable[[str], Served], embedder: vf.Embedder, odd_images: list[Any], scheme: str
) -> None:
    async def ask() -> tuple[vf.Embeddings, vf.Embeddings, list[Any]]:
        async with async_client_of(small_served("embed"), scheme) as client:
            every, one = await asyncio.gather(
                client.embed(odd_images, on_error="return"), client.embed(odd_images[0], patches=False, normalise=True)
            )
            streamed = [answer async for answer in client.embed_stream(odd_images[:2])]
            return every, one, streamed

    every, one, streamed = asyncio.run(ask())
    assert_same(every, embedder(odd_images, on_error="return"))
    assert_same(one, embedder(odd_images[0], patches=False, normalise=True))
    assert [answer.patches for answer in streamed] == [None, None]
    np.testing.assert_array_equal(np.stack([answer.cls for answer in streamed]), every.cls[:2])


@pytest.mark.parametrize("name", NAMES)
def test_requests_that_come_at_once_each_get_their_own_answer(
    small_served: Callable[[str], Served], embedder: vf.Embedder, odd_images: list[Any], name: str
) -> None:
    asked = [(source, options) for source in (*odd_images[:2], odd_images[5]) for options in OPTIONS] * 3
    with client_of(small_served(name)) as client, ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda one: client.embed(one[0], **one[1]), asked))
    for (source, options), vectors in zip(asked, got, strict=True):
        assert_same(vectors, embedder(source, **options))


def test_a_kept_answer_is_given_for_the_same_options_only(
    small_served: Callable[[str], Served], embedder: vf.Embedder, photographs: list[Path]
) -> None:
    with client_of(small_served("embed-kept")) as client:
        for _ in range(2):
            for options in OPTIONS:
                assert_same(client.embed(photographs[0], **options), embedder(photographs[0], **options))
        first, again = (client.embed(photographs[1]) for _ in range(2))
    assert first.stage_ns == again.stage_ns  # it was not computed again


def test_patches_that_nobody_asked_for_are_not_in_the_answer(
    small_served: Callable[[str], Served], photographs: list[Path]
) -> None:
    served = small_served("embed")
    encoded = photographs[0].read_bytes()
    for options, there in ((pack_options(patches=True), True), (pack_options(patches=False), False), (b"", False)):
        arrays, inputs = pack_image(encoded, options), []
        for tensor in inputs_of("embed"):
            inputs.append(library.InferInput(tensor.name, arrays[tensor.name].shape, tensor.datatype))
            inputs[-1].set_data_from_numpy(arrays[tensor.name])
        with library.InferenceServerClient(served.grpc_url.removeprefix("grpc://")) as client:
            result = client.infer(served.name, inputs)
        assert (result.as_numpy("patches") is not None) == there
        assert result.as_numpy("cls").shape == (1, 384)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"normalise": 1}, "normalise: expected true or false, got 1"),
        ({"normalise": object}, "options: expected numbers"),
        ({"priority": "high"}, "priority: expected 'online' or 'offline', got 'high'"),
        ({"on_error": "ignore"}, "on_error: expected 'raise' or 'return', got 'ignore'"),
    ],
    ids=str,
)
def test_a_wrong_option(
    small_served: Callable[[str], Served], photographs: list[Path], options: dict[str, Any], said: str
) -> None:
    with client_of(small_served("embed")) as client, pytest.raises(OptionError) as caught:
        client.embed(photographs, **options)
    assert str(caught.value).startswith(said)


def test_what_another_task_is_asked(small_served: Callable[[str], Served], photographs: list[Path]) -> None:
    with client_of(small_served("embed")) as client:
        for ask, said in (
            (lambda: client(photographs), "client(images)"),
            (lambda: client.stream(photographs), "client(images)"),
            (lambda: client.segment(photographs[0], points=[(1, 1, 1)]), "client.segment"),
            (lambda: client.everything(photographs[0]), "client.everything"),
        ):
            with pytest.raises(OptionError) as caught:
                ask()
            assert str(caught.value) == f"{said}: small is a model for embed; client.embed(images) asks it"


def test_the_first_error_is_raised(small_served: Callable[[str], Served], photographs: list[Path]) -> None:
    with client_of(small_served("embed")) as client:
        with pytest.raises(ImageError, match=r"^image 1: "):
            client.embed([photographs[0], b"bad", "missing.jpg"])
        assert len(client.embed([])) == 0
