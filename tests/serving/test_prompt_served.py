"""A prompt segmenter on the real server: the masks of `PromptSegmenter`, to the bit, from images that it keeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from clients import async_client_of, client_of

import visionfast as vf
from visionfast.embedding import image_key
from visionfast.errors import DeadlineError, ImageError, ImageFormatError, ImageNotKeptError, OptionError
from visionfast.preprocess.decode import decode_image
from visionfast.serving.client_questions import about_prompts
from visionfast.serving.scheduling import QueueLimits, Scheduling
from visionfast.serving.scrape import scrape
from visionfast.serving.server import Server

if TYPE_CHECKING:
    from conftest import Served

pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")

PROMPTS: dict[str, dict[str, Any]] = {
    "a point": {"points": [(300, 400, 1)]},
    "points of several sorts": {"points": [(300.25, 400, 1), (100, 100, 0)], "multimask": True},
    "a box": {"boxes": (10, 20.5, 300, 400)},
    "boxes": {"boxes": np.array([[10, 20, 300, 400], [5, 5, 60, 60], [0, 0, 810, 1080]], np.float32)},
    "a box and points": {"points": [(200, 300, 1)], "boxes": (10, 20, 300, 400), "logits": True},
    "prompts of two points": {"points": np.array([[[9, 9, 1], [50, 60, 1]], [[300, 300, 1], [5, 5, 0]]])},
    "a mask": {"points": [(300, 400, 1)], "mask_input": np.linspace(-9, 9, 256, dtype=np.float32).reshape(1, 16, 16)},
    "no box": {"boxes": np.zeros((0, 4))},
}
WRONG: list[dict[str, Any]] = [
    {},
    {"points": [(810, 0, 1)]},
    {"points": [(float("nan"), 0, 1)]},
    {"points": [(3, 4, 2)]},
    {"points": [(3, 4)]},
    {"points": []},
    {"points": "3,4"},
    {"points": [[[1, 2, 1]], [[1, 2, 1], [3, 4, 1]]]},
    {"points": [(9, 9, 1)] * 7},
    {"boxes": (5, 5, 5, 9)},
    {"boxes": [[1, 2, 3, 4], [1, 2, 3]]},
    {"boxes": []},
    {"boxes": [True, False, True, True]},
    {"points": [(9, 9, 1)], "boxes": [(1, 1, 9, 9), (2, 2, 8, 8)]},
    {"mask_input": np.zeros((1, 16, 16), np.float32)},
    {"points": [(9, 9, 1)], "mask_input": np.zeros((2, 16, 16), np.float32)},
    {"points": [(9, 9, 1)], "mask_input": np.full((1, 16, 16), np.inf, np.float32)},
    {"points": [(9, 9, 1)], "mask_input": np.full((1, 16, 16), 1e300)},
]
ALL: dict[str, Any] = {"points_per_side": 5, "score_threshold": 0.0, "stability_threshold": 0.0}


@pytest.fixture(scope="module")
def segmenter(small_engines: dict[str, Path]) -> Iterator[vf.PromptSegmenter]:
    with vf.PromptSegmenter.open(small_engines["prompt"]) as opened:
        yield opened


def assert_same(got: vf.Masks, expected: vf.Masks) -> None:
    """To the bit."""
    assert got.mask == expected.mask
    assert got.image_hw == expected.image_hw
    for name in ("score", "prompt", "logits", "stability", "points"):
        mine, other = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other, err_msg=name)
    assert {"decoder", "postprocess"} & set(got.stage_ns) == {"decoder", "postprocess"} & set(expected.stage_ns)


# ---- the same masks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_same_masks(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter, photographs: list[Path], scheme: str
) -> None:
    with client_of(small_served("prompt"), scheme) as client:
        for prompts in PROMPTS.values():
            got, expected = client.segment(photographs[0], **prompts), segmenter.segment(photographs[0], **prompts)
            assert_same(got, expected)
            assert len(got) or not len(prompts["boxes"])
        got, expected = (one.everything(photographs[1], **ALL) for one in (client, segmenter))
        assert len(got) > 3
        assert_same(got, expected)


def test_odd_images(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter, photographs: list[Path]
) -> None:
    bus = decode_image(photographs[0])
    sources = [
        bus,
        bus[..., 0],
        bus[:1, :1],
        bus[:3],
        photographs[0].read_bytes(),
        photographs[0].read_bytes()[:5000],
        b"no image",
        b"",
        b"P6\n60000 60000\n255\n" + bytes(100),
        b"P5\n5 4\n65535\n" + np.arange(20, dtype=">u2").tobytes(),
        "missing.jpg",
    ]
    point = {"points": [(0, 0, 1)]}
    failed: list[ImageError] = []
    with client_of(small_served("prompt")) as client:
        for source in sources:
            try:
                expected = segmenter.segment(source, **point)
            except ImageError as error:
                failed.append(error)
                with pytest.raises(ImageError) as caught:
                    client.segment(source, **point)
                assert_same_error(caught.value, failed[-1])
            else:
                assert_same(client.segment(source, **point), expected)
        with pytest.raises(ImageFormatError, match=r"^image: expected a uint8 RGB array"):
            client.segment(np.zeros((4, 4, 3), np.float32), **point)
    assert len(failed) == 5


def assert_same_error(got: ImageError, expected: ImageError) -> None:
    assert (type(got), got.source, got.reason) == (type(expected), expected.source, expected.reason)


def test_the_same_masks_with_await(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter, photographs: list[Path]
) -> None:
    async def ask() -> list[vf.Masks]:
        async with async_client_of(small_served("prompt"), "grpc") as client:
            clicks = [client.segment(path, points=[(300, 300, 1)]) for path in photographs * 3]
            return [*await asyncio.gather(*clicks), await client.everything(photographs[0], **ALL)]

    *clicks, everything = asyncio.run(ask())
    for path, got in zip(photographs * 3, clicks, strict=True):
        assert_same(got, segmenter.segment(path, points=[(300, 300, 1)]))
    assert_same(everything, segmenter.everything(photographs[0], **ALL))


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_wrong_prompts_are_the_same_errors(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter, photographs: list[Path], scheme: str
) -> None:
    with client_of(small_served("prompt"), scheme) as client:
        for prompts in WRONG:
            with pytest.raises(OptionError) as expected:
                segmenter.segment(photographs[0], **prompts)
            with pytest.raises(OptionError) as got:
                client.segment(photographs[0], **prompts)
            assert str(got.value) == str(expected.value), prompts
        assert_same(
            client.segment(photographs[0], points=[(3, 4, 1)]), segmenter.segment(photographs[0], points=[(3, 4, 1)])
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"points_per_side": 0}, "points_per_side: expected a whole number from 1"),
        ({"crop_layers": 9}, "crop_layers: expected a whole number from 0 to 4"),
        ({"side": 3}, "option 'side': expected one of points_per_side"),
        ({"encode": 3}, "option 'encode': expected one of points_per_side"),
        ({"progress": 3}, "everything: expected its options"),
    ],
    ids=str,
)
def test_wrong_options_of_everything(
    small_served: Callable[[str], Served], photographs: list[Path], options: dict[str, Any], said: str
) -> None:
    with client_of(small_served("prompt")) as client, pytest.raises(OptionError) as caught:
        client.everything(photographs[0], **options)
    assert str(caught.value).startswith(said)


def test_what_segment_does_not_know(small_served: Callable[[str], Served], photographs: list[Path]) -> None:
    with client_of(small_served("prompt")) as client:
        for ask in (client.segment, client.traced_segment):
            with pytest.raises(OptionError, match=r"option 'point': expected one of points, boxes, mask_input, "):
                ask(photographs[0], point=[(1, 1, 1)])  # type: ignore[call-arg]


def test_a_wrong_option_is_counted_once(small_served: Callable[[str], Served], photographs: list[Path]) -> None:
    served = small_served("prompt-few")  # which no other test asks anything wrong

    def wrong() -> float:
        return scrape(served.metrics_url).total("visionfast_errors_total", model=served.name, kind="option")

    before = wrong()
    with client_of(served) as client, pytest.raises(OptionError, match="multimask"):
        client.segment(photographs[0], points=[(1, 1, 1)], multimask="yes")  # type: ignore[arg-type]
    ends = time.monotonic() + 20
    while wrong() == before and time.monotonic() < ends:
        time.sleep(0.05)
    time.sleep(0.3)  # another one would be told by now
    assert wrong() - before == 1


# ---- images that are kept -----------------------------------------------------------------------------------------


def test_an_image_is_encoded_and_sent_once(small_served: Callable[[str], Served]) -> None:
    picture = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)
    with client_of(small_served("prompt")) as client:
        sent: list[int] = []
        infer = client._transport.infer

        def counted(model: str, request: Any, timeout_s: float) -> Any:
            sent.append(request.arrays["image"].nbytes)
            return infer(model, request, timeout_s)

        client._transport.infer = counted  # type: ignore[method-assign]
        first, second = (client.segment(picture, points=[(9, 9, 1)]) for _ in range(2))
    assert list(first.stage_ns) == ["hash", "decode", "preprocess", "encoder", "decoder", "postprocess"]
    assert list(second.stage_ns) == ["hash", "decoder", "postprocess"]
    assert_same(second, first)
    assert sent == [1 << 16, 1]
    with client_of(small_served("prompt"), "http") as another:
        assert list(another.segment(picture, points=[(9, 9, 1)]).stage_ns) == ["hash", "decoder", "postprocess"]


def test_an_image_that_is_not_kept_is_sent(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter
) -> None:
    picture = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
    encoded = b"P6\n60 40\n255\n" + picture.tobytes()
    with client_of(small_served("prompt")) as client:
        question = about_prompts(client.spec, {"points": [(9, 9, 1)]}, timeout=30.0)
        with pytest.raises(ImageNotKeptError, match="send the image itself"):
            client._transport.infer(client.model, question.by_key(image_key(encoded).key), 30.0)
        client._sent.add(image_key(encoded).key)  # as if the server had been started anew
        assert_same(client.segment(encoded, points=[(9, 9, 1)]), segmenter.segment(encoded, points=[(9, 9, 1)]))
        with pytest.raises(OptionError, match="key: expected 64 lower-case hex digits"):
            client._transport.infer(client.model, question.by_key("../etc/passwd"), 30.0)


def test_a_kept_answer_is_given_for_the_same_prompts_only(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter, photographs: list[Path]
) -> None:
    with client_of(small_served("prompt-kept")) as client:
        for _ in range(3):
            for prompts in PROMPTS.values():
                assert_same(client.segment(photographs[0], **prompts), segmenter.segment(photographs[0], **prompts))


def test_a_server_that_keeps_no_images(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter, photographs: list[Path]
) -> None:
    with client_of(small_served("prompt-few")) as client:
        for multimask in (None, False, True):
            got = client.segment(photographs[0], points=[(300, 400, 1)], multimask=multimask)
            expected = segmenter.segment(photographs[0], points=[(300, 400, 1)], multimask=multimask is not False)
            assert "encoder" in got.stage_ns
            assert_same(got, expected)


# ---- several at once ----------------------------------------------------------------------------------------------


def test_requests_that_come_at_once_each_get_their_own_answer(
    small_served: Callable[[str], Served], segmenter: vf.PromptSegmenter, photographs: list[Path]
) -> None:
    asked = [(path, prompts) for path in photographs for prompts in PROMPTS.values()] * 2
    with client_of(small_served("prompt")) as client, ThreadPoolExecutor(16) as pool:

        def ask(one: tuple[Path, dict[str, Any]]) -> vf.Masks | OptionError:
            try:
                return client.segment(one[0], **one[1])
            except OptionError as error:
                return error

        got = list(pool.map(ask, asked))
    for (path, prompts), masks in zip(asked, got, strict=True):
        if isinstance(masks, OptionError):  # the whole of bus.jpg is more than zidane.jpg
            with pytest.raises(OptionError) as expected:
                segmenter.segment(path, **prompts)
            assert str(masks) == str(expected.value)
        else:
            assert_same(masks, segmenter.segment(path, **prompts))
    assert sum(isinstance(masks, vf.Masks) for masks in got) > len(got) / 2


def test_a_click_does_not_wait_for_everything_and_what_nobody_waits_for_ends(
    small_served: Callable[[str], Served], photographs: list[Path]
) -> None:
    with client_of(small_served("prompt")) as client:
        client.segment(photographs[0], points=[(9, 9, 1)])
        ended: list[BaseException] = []

        def survey() -> None:
            with pytest.raises(DeadlineError) as caught:
                client.everything(photographs[0], points_per_side=1024, deadline_ms=3000)
            ended.append(caught.value)

        thread = threading.Thread(target=survey)
        thread.start()
        answered = 0
        while thread.is_alive() and answered < 5:  # a million points would take the better part of an hour
            client.segment(photographs[0], points=[(9, 9 + answered, 1)])
            answered += 1
        assert not ended
        assert answered == 5
        thread.join()
        assert ended
        # The server has given it up, too: another one begins.
        assert len(client.everything(photographs[1], **ALL)) > 3


def test_who_waits_for_everything_waits_as_long_as_it_likes_and_is_refused_in_time(
    small_engines: dict[str, Path], photographs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where clicks wait for 100 ms at most, behind one that takes seconds."""
    from visionfast.serving.repository import deploy

    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path))
    limits = QueueLimits(requests=16, timeout_ms=100)
    scheduling = Scheduling(online=limits, offline=limits)
    folder = deploy(small_engines["prompt"], name="short", scheduling=scheduling, uncertified=True)
    with Server(folder, http=0, grpc=0, metrics=0) as server, vf.Client(server.grpc_url, "short") as client:

        def survey() -> None:
            with pytest.raises(DeadlineError):
                client.everything(photographs[0], points_per_side=1024, deadline_ms=5000)

        def late() -> float:
            return scrape(server.metrics_url).total("visionfast_errors_total", kind="deadline")

        first = threading.Thread(target=survey)
        first.start()
        time.sleep(0.5)
        with pytest.raises(DeadlineError):
            client.everything(photographs[1], deadline_ms=500, **ALL)
        while first.is_alive() and late() == 0:
            time.sleep(0.1)
        assert first.is_alive()  # the second one did not wait for its end
        assert len(client.everything(photographs[1], deadline_ms=60_000, **ALL)) > 3
        assert not first.is_alive()


def test_what_serves_loads_nothing_that_builds(small_server: Server) -> None:
    loaded = [Path(f"/proc/{stage.pid}/maps").read_text() for stage in small_server.stages]
    assert len(loaded) == 6
    for maps in loaded:
        assert "libopenvino" in maps
        assert "torch" not in maps
