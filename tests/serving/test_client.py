"""The client against the real server: the pipeline's own answers, and an error of the right type for all that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import async_client_of, client_of

import visionfast as vf
from visionfast import errors
from visionfast.artifacts import read_manifest
from visionfast.errors import ImageError, ImageTooLargeError, OptionError, ServerError
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.limits import DecodeLimits
from visionfast.serving.client_model import served_model
from visionfast.serving.metadata import parameters_of
from visionfast.serving.wire import outputs_of

pytest.importorskip("tritonclient.grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")

LOW = {"conf": 0.05, "max_det": 20}
"""The seeded network's scores are near 0.12."""


@pytest.fixture(scope="module")
def detector(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> Iterator[Callable[..., vf.Detector]]:
    """`detector(task="detect", **options)`: in process, on the engine that is served; opened once."""
    opened: dict[str, vf.Detector] = {}

    def find(task: str = "detect", **options: Any) -> vf.Detector:
        key = f"{task} {options}"
        if key not in opened:
            opened[key] = vf.open(built_engine(seeded_checkpoint(task)), **options)
        return opened[key]

    yield find
    for one in opened.values():
        one.close()


@pytest.fixture(scope="module")
def odd_sources(photographs: list[Path]) -> list[Any]:
    """Everything that a detector takes, and what it refuses."""
    bus = decode_image(photographs[0])  # (1080, 810, 3)
    return [
        *photographs,
        photographs[1].read_bytes(),
        bus,
        bus[::2, ::2],  # not contiguous
        bus[..., 0],
        bus[..., :1],
        np.dstack([bus, bus[..., :1]]),
        bus[:1, :1],
        bus[:3],  # 3 × 810
        b"",
        b"no image",
        photographs[0].read_bytes()[:5000],
        Path("missing.jpg"),
        "",
        "a\0b",
        bus.astype(np.float32),
        np.zeros((0, 5, 3), np.uint8),
        None,
    ]


def assert_same(got: Any, expected: Any) -> None:
    """To the bit; errors by type and text."""
    if isinstance(expected, ImageError):
        assert (type(got), str(got)) == (type(expected), str(expected))
        assert (got.source, got.reason) == (expected.source, expected.reason)
        return
    assert isinstance(got, vf.Detections), got
    for name in ("xyxy", "confidence", "class_id"):
        mine, other = getattr(got, name), getattr(expected, name)
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
    assert got.image_hw == expected.image_hw
    assert got.mask == expected.mask
    assert list(got.stage_ns) == list(expected.stage_ns)


@pytest.mark.parametrize("layout", ["fused", "ensemble"])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_same_answers(served: Any, detector: Any, odd_sources: list[Any], layout: str, scheme: str) -> None:
    expected = detector(**LOW)(odd_sources, on_error="return")
    assert sum(len(answer) for answer in expected if isinstance(answer, vf.Detections)) > 20
    with client_of(served(layout), scheme) as client:
        got = client(odd_sources, on_error="return", **LOW)
    for mine, other in zip(got, expected, strict=True):
        assert_same(mine, other)


def test_the_same_masks(served: Any, detector: Any, photographs: list[Path]) -> None:
    sources = [*photographs, b"no image"]
    expected = detector("segment", conf=0.05, max_det=100)(sources, on_error="return")
    assert sum(len(answer.mask) for answer in expected[:2]) > 0
    for layout, scheme in (("fused", "grpc"), ("ensemble", "http")):
        with client_of(served(layout, "segment"), scheme) as client:
            got = client(sources, on_error="return", conf=0.05, max_det=100)
        for mine, other in zip(got, expected, strict=True):
            assert_same(mine, other)


@pytest.mark.parametrize("layout", ["fused", "ensemble"])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_odd_pictures(served: Any, detector: Any, shared_data: Path, layout: str, scheme: str) -> None:
    paths = sorted((shared_data / "odd-images").iterdir())
    expected = detector(**LOW)(paths, on_error="return")
    assert {type(answer) for answer in expected} > {vf.Detections, errors.ImageFormatError}
    with client_of(served(layout), scheme) as client:
        for mine, other in zip(client(paths, on_error="return", **LOW), expected, strict=True):
            assert_same(mine, other)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_same_answers_with_await(served: Any, detector: Any, odd_sources: list[Any], scheme: str) -> None:
    expected = detector(**LOW)(odd_sources, on_error="return")

    async def ask() -> tuple[list[Any], vf.Detections]:
        async with async_client_of(served("fused"), scheme) as client:
            assert client.class_names == detector(**LOW).class_names
            alone, together = await asyncio.gather(
                client(odd_sources[0], **LOW), client(odd_sources, on_error="return", **LOW)
            )
            return together, alone[0]

    got, alone = asyncio.run(ask())
    for mine, other in zip([*got, alone], [*expected, expected[0]], strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize(
    "options",
    [
        {"conf": 0.12, "iou": 0.3},
        {"conf": 0.05, "classes": ["kind 2", 0], "max_det": 5},
        {"conf": 0.05, "class_agnostic": True, "max_det": np.int64(7), "iou": np.float64(0.5)},
        {"conf": 1},
        {},
    ],
    ids=str,
)
def test_options_are_the_detectors(
    served: Any, detector: Any, photographs: list[Path], options: dict[str, Any]
) -> None:
    expected = detector(**options)(photographs)
    with client_of(served("ensemble")) as client:
        got = client(photographs, priority="offline", deadline_ms=60_000, **options)
    for mine, other in zip(got, expected, strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"conf": 1.5}, "conf: expected a number from 0 to 1, got 1.5"),
        ({"conf": float("nan")}, "conf: expected a number from 0 to 1, got nan"),
        ({"conf": "a"}, "conf: expected a number from 0 to 1, got 'a'"),
        ({"max_det": 0}, "max_det: expected at least 1, got 0"),
        ({"classes": ["kind 9"]}, "classes: no class 'kind 9'; there are kind 0, kind 1, kind 2"),
        ({"classes": [3]}, "classes: expected ids from 0 to 2, got 3"),
        ({"classes": "kind 1"}, "classes: expected a list of names or ids, got 'kind 1'"),
        ({"classes": [object]}, "options: expected numbers, class names and truth values"),
        ({"clases": [1]}, "option 'clases': expected one of conf, iou"),
        ({"priority": "high"}, "priority: expected 'online' or 'offline', got 'high'"),
        ({"deadline_ms": 0}, "deadline_ms: expected more than 0 milliseconds, got 0"),
        ({"on_error": "ignore"}, "on_error: expected 'raise' or 'return', got 'ignore'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_the_detectors_error(
    served: Any, photographs: list[Path], options: dict[str, Any], said: str
) -> None:
    with client_of(served("fused")) as client, pytest.raises(OptionError) as caught:
        client(photographs, **options)
    assert str(caught.value).startswith(said)


def test_what_the_server_says_of_the_model(
    served: Any, built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    manifest = read_manifest(built_engine(seeded_checkpoint("segment")))
    with client_of(served("ensemble", "segment"), "http") as client:
        assert client.spec == manifest.spec
        assert client.class_names == ("kind 0", "kind 1", "kind 2")
        assert client.certificate.status == manifest.certificate.status
        assert client.certificate.measures == manifest.certificate.measures


def test_what_an_image_may_cost_is_for_the_server_to_say(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    manifest = read_manifest(built_engine(seeded_checkpoint("detect")))
    limits = DecodeLimits(max_pixels=5, max_bytes=1 << 40)
    told = parameters_of(manifest, pipeline="y", engine="e", layout="fused", options={}, limits=limits)

    def config() -> dict[str, Any]:
        outputs = [{"name": tensor.name} for tensor in outputs_of("detect")]
        return {"parameters": {name: {"string_value": text} for name, text in told.items()}, "output": outputs}

    assert served_model("grpc://localhost:8001", "y", config())[1] == limits
    for wrong in ("{", '{"max_pixels": "many"}', "[]"):
        told["limits"] = wrong
        with pytest.raises(ServerError, match=r"^grpc://localhost:8001: y: "):
            served_model("grpc://localhost:8001", "y", config())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_is_too_large_for_the_model_is_refused_before_it_is_sent(
    served: Any, small_served: Any, photographs: list[Path], kind: str
) -> None:
    """By the limits that the model has; pixels are no file, however many bytes they are."""
    pixels = np.zeros((40, 60, 3), np.uint8)

    async def ask() -> None:
        async def check(client: vf.AsyncClient, call: Callable[..., Any], **options: Any) -> None:
            client._limits = DecodeLimits(max_pixels=2399)
            with pytest.raises(ImageTooLargeError, match="expected at most 2399 pixels"):
                await call(pixels, **options)
            client._limits = DecodeLimits(max_bytes=1000)
            with pytest.raises(ImageTooLargeError, match="expected at most 1000 bytes"):
                await call(photographs[0], **options)
            await call(pixels, **options)

        async with async_client_of(served("fused"), "grpc") as client:
            await check(client, client)
        async with async_client_of(small_served("prompt"), "grpc") as client:
            await check(client, client.segment, points=[(9, 9, 1)])

    def check(client: vf.Client, call: Callable[..., Any], **options: Any) -> None:
        client._limits = DecodeLimits(max_pixels=2399)
        with pytest.raises(ImageTooLargeError, match="expected at most 2399 pixels"):
            call(pixels, **options)
        client._limits = DecodeLimits(max_bytes=1000)
        with pytest.raises(ImageTooLargeError, match="expected at most 1000 bytes"):
            call(photographs[0], **options)
        call(pixels, **options)

    if kind == "async":
        asyncio.run(ask())
        return
    with client_of(served("fused")) as client:
        check(client, client)
    with client_of(small_served("prompt")) as client:
        check(client, client.segment, points=[(9, 9, 1)])


def test_the_first_error_is_raised(served: Any, photographs: list[Path]) -> None:
    with client_of(served("fused")) as client:
        with pytest.raises(errors.ImageFormatError, match=r"^image 1: "):
            client([photographs[0], b"bad", "missing.jpg"])
        assert len(client(photographs)) == 2


def test_no_image_is_no_answer(served: Any) -> None:
    with client_of(served("fused")) as client:
        assert client([]) == []


def test_a_stream_reads_images_as_it_sends_them(served: Any, photographs: list[Path]) -> None:
    class Sources(list):
        read = 0

        def __iter__(self) -> Iterator[Any]:
            for source in super().__iter__():
                self.read += 1
                yield source

    sources = Sources([photographs[0]] * 20)
    with vf.Client(served("fused").grpc_url, served("fused").name, concurrency=1) as client:
        stream = client.stream(sources)
        next(stream)
        assert sources.read < 6
        stream.close()


def test_threads_share_a_client(served: Any, detector: Any, photographs: list[Path]) -> None:
    expected = detector(**LOW)(photographs)
    got: list[Any] = []
    with client_of(served("fused"), "http") as client:
        threads = [threading.Thread(target=lambda: got.append(client(photographs, **LOW))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 4
    for some in got:
        for mine, other in zip(some, expected, strict=True):
            assert_same(mine, other)
