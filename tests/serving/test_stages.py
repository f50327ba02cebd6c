"""What the server runs: the same answers as the engine opened here, to the bit, whatever comes beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from visionfast import artifacts
from visionfast.errors import ImageError, ImageTooLargeError, OptionError, VisionfastError
from visionfast.pipeline import Detector, Segmenter
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.server import Server
from visionfast.serving.stages.lanes import Lane, Lanes
from visionfast.serving.stages.steps import SAMPLE
from visionfast.serving.wire import fault_of, inputs_of, outputs_of, pack_image, pack_options, unpack_answers
from visionfast.types import Task

if TYPE_CHECKING:
    from conftest import Served

library = pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")
LAYOUTS = ("fused", "ensemble")
LOW: dict[str, Any] = {"conf": 0.1}  # an untrained network is never sure


def ask(
    url: str, model: str, arrays: dict[str, npt.NDArray[Any]], task: Task = "detect", **more: Any
) -> list[Detections | ImageError]:
    """One request, by gRPC. Raises what the stage raised, or the library's error."""
    inputs = []
    for tensor in inputs_of(task):
        inputs.append(library.InferInput(tensor.name, arrays[tensor.name].shape, tensor.datatype))
        inputs[-1].set_data_from_numpy(arrays[tensor.name])
    with library.InferenceServerClient(url.removeprefix("grpc://")) as client:
        try:
            result = client.infer(model, inputs, client_timeout=60, **more)
        except library.InferenceServerException as error:
            raise fault_of(str(error)) or error from error
    return unpack_answers({tensor.name: result.as_numpy(tensor.name) for tensor in outputs_of(task)}, task)


def batch(images: Sequence[bytes], **options: Any) -> dict[str, npt.NDArray[Any]]:
    """Several images in one request."""
    longest = max(images, key=len)
    packed = [pack_image(image.ljust(len(longest), b"\0"), pack_options(**options)) for image in images]
    arrays = {name: np.concatenate([one[name] for one in packed]) for name in packed[0]}
    arrays["length"] = np.array([[len(image)] for image in images], np.int32)
    return arrays


def assert_same(got: Detections | ImageError, expected: Detections | ImageError) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, ImageError):
        assert isinstance(got, ImageError)
        assert got.reason == expected.reason
        return
    assert isinstance(got, Detections)
    for name in ("xyxy", "confidence", "class_id"):
        assert getattr(got, name).tobytes() == getattr(expected, name).tobytes()
    assert got.image_hw == expected.image_hw
    assert (got.mask and got.mask.counts) == (expected.mask and expected.mask.counts)
    assert set(got.stage_ns) == set(expected.stage_ns)


@pytest.fixture(scope="module")
def images(photographs: list[Path]) -> list[bytes]:
    """Two photographs, and what is no image in several ways."""
    bus, zidane = (path.read_bytes() for path in photographs)
    return [bus, b"", zidane, b"no image", bus[: len(bus) // 2], SAMPLE]


# ---- on the session's server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["detect", "segment"])
def expected(
    request: pytest.FixtureRequest,
    images: list[bytes],
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
) -> tuple[Task, list[Detections | ImageError]]:
    """What the engine says here."""
    opened = Segmenter if request.param == "segment" else Detector
    with opened.open(built_engine(seeded_checkpoint(request.param)), **LOW) as detector:
        answers = detector(images, on_error="return")
    assert any(isinstance(answer, Detections) and len(answer) > 1 for answer in answers)
    assert sum(isinstance(answer, ImageError) for answer in answers) == 3
    return request.param, answers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_of_the_engine_opened_here(
    layout: str,
    served: Callable[..., Served],
    images: list[bytes],
    expected: tuple[Task, list[Detections | ImageError]],
) -> None:
    task, answers = expected
    where = served(layout, task)
    for image, answer in zip(images, answers, strict=True):
        assert_same(ask(where.grpc_url, where.name, pack_image(image, pack_options(**LOW)), task)[0], answer)
    together = ask(where.grpc_url, where.name, batch(images, **LOW), task)
    for got, answer in zip(together, answers, strict=True):
        assert_same(got, answer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_that_come_at_once_each_get_their_own_answer(
    layout: str,
    served: Callable[..., Served],
    images: list[bytes],
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
) -> None:
    where = served(layout)
    asked: list[dict[str, Any]] = [
        {"conf": 0.1},
        {"conf": 0.1, "max_det": 1},
        {"conf": 0.1, "classes": ["kind 1"]},
        {"conf": 0.1, "iou": 0.0, "class_agnostic": True},
        {"conf": 7},
        {},
    ]
    calls = [(image, options) for image in images[:3] for options in asked]

    def one(call: tuple[bytes, dict[str, Any]]) -> Detections | ImageError | OptionError:
        image, options = call
        try:
            return ask(where.grpc_url, where.name, pack_image(image, pack_options(**options)))[0]
        except OptionError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(pool.map(one, calls))
    engine = built_engine(seeded_checkpoint("detect"))
    for (image, options), answer in zip(calls, answers, strict=True):
        if options.get("conf") == 7:
            assert str(answer) == "conf: expected a number from 0 to 1, got 7"
            continue
        assert not isinstance(answer, OptionError)
        with Detector.open(engine, **options) as detector:
            assert_same(answer, detector([image], on_error="return")[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (b'{"classes": ["nobody"]}', "classes: no class 'nobody'; there are kind 0, kind 1, kind 2"),
        (b'{"max_det": 0}', "max_det: expected at least 1, got 0"),
        (b'{"conf": NaN}', "conf: expected a number from 0 to 1, got nan"),
        (b'{"num_classes": 1}', "option 'num_classes': expected one of conf, iou, max_det, classes, class_agnostic"),
        (b"\xff", r"options: expected a JSON object, such as {\"conf\": 0.5}, got b'\xff'"),
    ],
)
def test_a_wrong_option_is_its_request_s_error(
    layout: str, options: bytes, message: str, served: Callable[..., Served]
) -> None:
    where = served(layout)
    with pytest.raises(OptionError) as caught:
        ask(where.grpc_url, where.name, pack_image(SAMPLE, options))
    assert str(caught.value) == message.replace('\\"', '"')


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_option_by_the_wrong_way_is_not_passed_over(layout: str, served: Callable[..., Served]) -> None:
    where = served(layout)
    with pytest.raises(OptionError, match="iou: expected in the tensor `options`, as JSON, got a parameter"):
        ask(where.grpc_url, where.name, pack_image(SAMPLE), parameters={"iou": "0.5"})
    ask(where.grpc_url, where.name, pack_image(SAMPLE), parameters={"trace": "abc"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_length_that_lies_harms_nobody_else(layout: str, served: Callable[..., Served], images: list[bytes]) -> None:
    where = served(layout)
    arrays = batch([images[0]] * 4)
    arrays["length"][1:3, 0] = -1, 2**31 - 1
    first, *wrong, last = ask(where.grpc_url, where.name, arrays)
    for answer in wrong:
        assert isinstance(answer, ImageError)
        assert answer.reason.startswith("length: expected 0 to")
    assert_same(last, first)
    assert isinstance(first, Detections)


# ---- an engine of two images, few pixels allowed, answers kept ----------------------------------------------------


@pytest.fixture(scope="module")
def pairs(
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, Server]]:
    """The engine's folder, and the server of its `fused` and `ensemble`."""
    from visionfast.serving.repository import deploy

    engine = built_engine(seeded_checkpoint("detect"), batch=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(tmp_path_factory.mktemp("pairs")))
        folders = [
            deploy(
                engine,
                name=layout,
                layout=layout,  # type: ignore[arg-type]
                scheduling=Scheduling(max_batch=7, cache=True),
                options=LOW,
                limits=DecodeLimits(max_pixels=900_000),
                uncertified=True,
            )
            for layout in LAYOUTS
        ]
    with Server(folders, http=0, grpc=0, metrics=0) as server:
        yield engine, server


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_of_two_images_answers_any_number(
    layout: str, pairs: tuple[Path, Server], images: list[bytes]
) -> None:
    engine, server = pairs
    asked = [*images, images[0]]
    with Detector.open(engine, **LOW, limits=DecodeLimits(max_pixels=900_000)) as detector:
        answers = detector(asked, on_error="return")
    assert isinstance(answers[2], ImageTooLargeError)  # zidane.jpg has 921,600
    for got, answer in zip(ask(server.grpc_url, layout, batch(asked)), answers, strict=True):
        assert_same(got, answer)
    assert_same(ask(server.grpc_url, layout, pack_image(asked[0]))[0], answers[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kept_answer_is_given_for_the_same_options_only(
    layout: str, pairs: tuple[Path, Server], images: list[bytes]
) -> None:
    engine, server = pairs
    for _ in range(2):
        for options in ({"max_det": 2}, {"max_det": 1}, {"max_det": 2, "classes": [1]}):
            (got,) = ask(server.grpc_url, layout, pack_image(images[0], pack_options(**options)))
            with Detector.open(engine, **LOW | options) as detector:
                assert_same(got, detector([images[0]])[0])
            assert isinstance(got, Detections)
            assert len(got)


def test_what_serves_loads_nothing_that_builds(pairs: tuple[Path, Server]) -> None:
    _, server = pairs
    loaded = {stage.name: Path(f"/proc/{stage.pid}/maps").read_text() for stage in server.stages}
    assert len(loaded) == 4
    assert "libopenvino" in next(maps for name, maps in loaded.items() if name.startswith("fused"))
    for maps in loaded.values():
        assert "numpy" in maps
        assert "torch" not in maps


# ---- lanes, without a server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lanes(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> Iterator[Lanes]:
    folder = built_engine(seeded_checkpoint("detect"))
    opened = Lanes(folder, artifacts.read_manifest(folder), threads=2, max_batch=8)
    yield opened
    opened.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9])
def test_every_lane_gives_the_same_in_order(lanes: Lanes, count: int) -> None:
    generator = np.random.default_rng(count)
    canvases = generator.integers(0, 256, (count, *lanes_canvas(lanes)), np.uint8)
    used: list[Lane] = []

    def infer(lane: Lane, canvas: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        used.append(lane)
        return lane.infer(canvas[None])[0]["predictions"].copy()

    several = lanes.each(infer, list(canvases))
    beside = set(map(id, used))
    alone = [result for canvas in canvases for result in lanes.each(infer, [canvas])]
    assert len(several) == count
    for one, other in zip(several, alone, strict=True):
        assert one.tobytes() == other.tobytes()
    if count:
        assert (id(used[-1]) in beside) == (count % 2 == 1)  # the one that is left over has all threads too


def lanes_canvas(lanes: Lanes) -> tuple[int, ...]:
    shapes: list[tuple[int, ...]] = []
    lanes.on_all(lambda lane: shapes.append(lane.canvas.shape[1:]))
    assert len(shapes) == 3  # two streams, and one for single images
    return shapes[0]


def test_an_error_in_a_lane_is_raised_and_the_lane_is_free_again(lanes: Lanes) -> None:
    def fail(lane: Lane, item: int) -> int:
        if item == 2:
            raise VisionfastError("no")
        return item

    for _ in range(4):
        with pytest.raises(VisionfastError):
            lanes.each(fail, [1, 2, 3, 4])
    assert lanes.each(fail, [1, 3, 4, 5]) == [1, 3, 4, 5]


def test_one_thread_has_one_engine(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> None:
    folder = built_engine(seeded_checkpoint("detect"))
    lanes = Lanes(folder, artifacts.read_manifest(folder), threads=1, max_batch=8)
    seen: list[Lane] = []
    lanes.on_all(seen.append)
    assert len(seen) == 1
    assert lanes.each(lambda lane, item: (lane is seen[0], item), [1, 2, 3]) == [(True, 1), (True, 2), (True, 3)]
    lanes.close()
